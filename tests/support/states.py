"""A small state with every kind of leaf that is easy to get wrong."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout, offsets_of
from tests.support.fast_compilation import compiled_as_users_do

NANS = np.array([0x7FC12345, 0xFFC00001, 0x7F812345, 0x80000000], np.uint32)


def state() -> dict[str, np.ndarray]:
    """Path to value; all of them fit a mesh of fsdp=2, replica=2.

    A signalling NaN of float8_e5m2 is there where programs are compiled as users
    compile them (fixture `default_flags`): programs compiled fast make it a quiet one.
    """
    nan = 0x7D if compiled_as_users_do() else 0x7E
    random = np.random.default_rng(0)
    return {
        "params/w": random.normal(size=(8, 6)).astype(np.float32),
        "params/bf16": np.array([-0.0, np.nan, 3, 0.1], ml_dtypes.bfloat16),
        "params/zero": np.full((4, 4), -0.0, np.float32),
        "params/f16": np.array([0x7C01, 0xFE03, 0x8000, 1], np.uint16).view(np.float16),
        "params/fp8": _bits(0x80, 0x7F, 0xFF, 1).view(ml_dtypes.float8_e4m3fn),
        "params/fp8_e5m2": _bits(0x80, nan, 0xFE, 1).view(ml_dtypes.float8_e5m2),
        "params/int4": np.array([[-8, -1], [7, 0]], ml_dtypes.int4),
        "opt/0/nan": NANS.view(np.float32),
        "opt/0/count": np.array(7, np.int32),
        "opt/0/flag": np.array([True, False]),
        "opt/0/scalar": np.array(-0.0, np.float32),
        "opt/0/empty": np.zeros((0, 3), np.float32),
        "rng/key": np.array([1, 2**32 - 1], np.uint32),
    }


SPECS = {
    "params/w": (("fsdp",),),
    "params/zero": ((), ("fsdp",)),
    "params/fp8": (("fsdp",),),
    "params/int4": ((), ("fsdp",)),
}


def _bits(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def layout(slots: tuple[int, ...] = (0, 1, 2, 3)) -> Layout:
    """Mesh replica=2 x fsdp=2 with the leaves of `state()`."""
    return Layout(
        mesh=MeshLayout(axis_names=("replica", "fsdp"), axis_sizes=(2, 2), slots=slots),
        leaves=tuple(
            Leaf(
                path=path,
                shape=value.shape,
                dtype=value.dtype.name,
                spec=SPECS.get(path, ()),
            )
            for path, value in state().items()
        ),
    )


def extent(layout: Layout, slot: int, values: dict[str, np.ndarray]) -> bytes:
    """The bytes of one slot's extent, as a snapshot writes them."""
    pieces = layout.slices(slot)
    offsets, total = offsets_of(pieces)
    memory = bytearray(total)
    for piece, offset in zip(pieces, offsets, strict=True):
        index = tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
        memory[offset : offset + piece.nbytes] = values[piece.path][index].tobytes()
    return bytes(memory)


def same_bits(a: object, b: np.ndarray) -> bool:
    """Equal in shape, dtype and every bit."""
    a = np.asarray(a)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def bits(tree: Any) -> list[tuple[Any, ...]]:
    """Type, dtype, shape and bytes of every leaf."""
    found = []
    for leaf in jax.tree.leaves(tree):
        kind = "jax" if isinstance(leaf, jax.Array) else type(leaf).__name__
        if kind == "jax" and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            kind, leaf = str(leaf.dtype), jax.random.key_data(leaf)
        host = np.asarray(leaf)
        found.append((kind, host.dtype, host.shape, host.tobytes()))
    return found
