"""What cannot be stored, or would come back as something else, is refused by name."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import NamedSharding, PartitionSpec

from dtft.checkpoint.state.leaf_codec import restore_targets
from dtft.checkpoint.state.record import STORABLE, record_of
from tests.support.managers import Restore, Save, forget, memory_only

WIDE = np.dtype(np.longdouble)
"""As wide as a float64 on some machines."""


def numbers() -> list[np.dtype]:
    """Every dtype of numbers that numpy and ml_dtypes have, in native order."""
    types = [getattr(ml_dtypes, name) for name in dir(ml_dtypes) if name[0].islower()]
    dtypes = [np.dtype(found) for found in types if isinstance(found, type)]
    plain = [np.dtype(code) for code in np.typecodes["All"] if code not in "SUVOMm"]
    return [dtype for dtype in (*dtypes, *plain) if dtype.kind != "O"]


def can_be_stored(dtype: np.dtype) -> bool:
    try:
        return tensorstore.dtype(dtype).name == dtype.name
    except ValueError:
        return False


def test_what_can_be_stored_is_what_tensorstore_takes() -> None:
    assert {dtype.name for dtype in numbers() if can_be_stored(dtype)} == STORABLE


@pytest.mark.parametrize(
    "leaf",
    [
        pytest.param(lambda: jnp.zeros(2, jnp.uint4), id="uint4"),
        pytest.param(lambda: jnp.zeros(2, jnp.float8_e4m3), id="float8_e4m3"),
        pytest.param(lambda: np.zeros(2, ml_dtypes.float6_e2m3fn), id="float6"),
        pytest.param(lambda: np.zeros(2, jax.dtypes.float0), id="float0"),
        pytest.param(lambda: np.zeros(2, [("a", "i4")]), id="record"),
        pytest.param(lambda: np.zeros(2, ">f4"), id="big endian"),
        pytest.param(lambda: np.ma.masked_less([1.0, 2.0], 2), id="masked"),
        pytest.param(lambda: np.zeros(2).view(np.recarray), id="subclass"),
    ],
)
def test_a_leaf_that_would_not_come_back_is_named(leaf: Any) -> None:
    with pytest.raises(ValueError, match="leaf 'default/a/w'.*Allowed: .*Save|Convert"):
        record_of(Save({"a": {"w": leaf()}, "right": 1}))


@pytest.mark.skipif(WIDE.itemsize == 8, reason="longdouble is float64 here")
def test_a_number_wider_than_storage_has_is_named() -> None:
    with pytest.raises(ValueError, match=f"default/w.*{WIDE}, which storage cannot"):
        record_of(Save({"w": np.longdouble(1)}))


def test_a_file_in_memory_comes_back_as_its_numbers(tmp_path: Path) -> None:
    manager = memory_only(tmp_path)
    mapped = np.memmap(tmp_path / "numbers", np.float32, "w+", shape=3)
    manager.save(1, args=Save({"w": mapped}))
    assert type(manager.restore(1)["w"]) is np.ndarray
    forget(manager)


@pytest.mark.parametrize("interval", [1, "auto"])
def test_a_donated_leaf_is_named(tmp_path: Path, interval: Any) -> None:
    manager = memory_only(tmp_path, save_interval_steps=interval)
    gone = {"w": jnp.ones(3), "n": 1, "keys": jax.random.key(2)}
    jax.jit(lambda x: x * 2, donate_argnums=0)(gone["w"])
    for args in (Save(gone), ocp.args.Composite(model=Save(gone))):
        with pytest.raises(ValueError, match="/w' was donated or deleted"):
            manager.save(1, args=args)
    assert manager.all_steps() == []
    assert manager.save(1, args=Save({"w": jnp.ones(3)}))
    forget(manager)


def narrow_and_keys() -> dict[str, Any]:
    """A matrix and key array of four rows, which eight devices cannot divide."""
    return {"keys": jax.random.split(jax.random.key(0), 4), "w": jnp.ones((4, 4))}


def over_eight(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@pytest.mark.parametrize("name", ["w", "keys"])
def test_a_target_that_does_not_divide_is_refused_before_anything_is_read(
    name: str,
) -> None:
    state = narrow_and_keys()
    record, _ = record_of(Save(state))
    wanted = over_eight(state[name])
    with pytest.raises(ValueError, match=f"leaf 'default/{name}'.*4.*Nothing was read"):
        restore_targets(record, Restore(state | {name: wanted}))
    with pytest.raises(ValueError, match="leaf 'default/keys'.*Nothing was read"):
        restore_targets(record, Restore(fallback_sharding=wanted.sharding))
    wider = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=wanted.sharding)
    with pytest.raises(ValueError, match=r"saved was .*\[4.*the tree has.*\[8, 4\]"):
        restore_targets(record, Restore(state | {name: wider}))


def test_a_target_that_does_not_divide_says_nothing_of_storage(tmp_path: Path) -> None:
    state = narrow_and_keys()
    manager = memory_only(tmp_path)
    manager.save(1, args=Save(state))
    with pytest.raises(ValueError, match="leaf 'default/w'"):
        manager.restore(1, args=Restore(state | {"w": over_eight(state["w"])}))
    assert manager.all_steps() == [1]
    assert manager.restore(1, args=Restore(state))["w"].shape == (4, 4)
    forget(manager)
