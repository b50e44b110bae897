"""Encodes leaves as bytes, and decodes bytes into arrays, PRNG keys and numbers.

The arguments of a restore become one `RestoreTarget` for each item of a step: what the
user wants each leaf to become. It is checked against the record that was saved with the
step, which has paths, shapes, dtypes and kinds of leaves. The leaves are put into the
user's tree, or into the tree that stock Orbax would return.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dtft.checkpoint.state.array_bytes import host_bytes
from dtft.checkpoint.state.digests import chunk_digests, copy_and_digest, is_same
from dtft.checkpoint.state.record import (
    DEFAULT,
    LeafRecord,
    Record,
    escaped,
    leaves_of,
    structure_of,
)
from dtft.checkpoint.state.tree import listed

_BLOCK_BYTES = 1 << 20
_PYTHON = {"bool": bool, "int": int, "float": float}


# ------------------------------------------------------------------------- copying


def copy_leaf(value: Any, record: LeafRecord, target: memoryview, chunk: int) -> bytes:
    """Copies the bytes of a leaf into `target`; returns the digests of its chunks.

    `record` is the leaf's kind, shape and dtype. The digests are concatenated, 16 bytes
    for each `chunk` bytes of the leaf.

    Keeps neither a reference to the leaf nor a view of the leaf. `np.asarray` of a CPU
    array would keep a view, and a view silently cancels donation.
    """
    parts = _parts(value, record)
    if isinstance(parts, memoryview):
        return copy_and_digest(parts, target, chunk)
    whole = as_array(target, record)
    for index, part in parts:
        whole[index] = part
    return chunk_digests(target, chunk)


def is_leaf_unchanged(
    value: Any, record: LeafRecord, saved: memoryview, digests: bytes, chunk: int
) -> bool:
    """Whether a leaf equals its saved bytes; writes nothing.

    Args:
        value: the leaf.
        record: the leaf's kind, shape and dtype.
        saved: the saved bytes.
        digests: the digests of `saved`. A leaf in one piece is compared with the
            digests: equal digests (xxh3-128) count as equal bytes. A leaf in several
            shards is compared with the bytes `saved`.
        chunk: size of a chunk in bytes; every chunk has its own digest.
    """
    parts = _parts(value, record)
    if isinstance(parts, memoryview):
        return is_same(parts, digests, chunk)
    whole = _words(as_array(saved, record))
    return all(_same(_words(part), whole[index]) for index, part in parts)


def _words(array: np.ndarray) -> np.ndarray:
    """Views each element as unsigned integers of at most 8 bytes: [..., words].

    As integers, two NaNs with the same bits are equal.
    """
    size = array.dtype.itemsize
    return array[..., None].view(f"u{min(size, 8)}")


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are equal, compared in blocks to limit temporary memory."""
    rows = max(1, _BLOCK_BYTES // max(1, one[:1].nbytes))
    starts = range(0, len(one), rows)
    return all(
        np.array_equal(one[start : start + rows], other[start : start + rows])
        for start in starts
    )


def _parts(
    value: Any, record: LeafRecord
) -> memoryview | list[tuple[tuple[slice, ...], np.ndarray]]:
    """Returns the bytes of a leaf, or the shards of a jax array that has several.

    A PRNG key is first replaced by its uint32 data. Each distinct shard is listed once,
    as (index in the global array, values of the shard).
    """
    if record.kind == "key":
        value = jax.random.key_data(value)
    if not isinstance(value, jax.Array):
        array = np.ascontiguousarray(np.asarray(value, np.dtype(record.dtype)))
        return array.reshape(-1).view(np.uint8).data
    shards = {_start(shard, value.shape): shard for shard in value.addressable_shards}
    if len(shards) == 1:
        (shard,) = shards.values()
        return host_bytes(shard.data)
    dtype = np.dtype(record.dtype)
    return [
        (
            shard.index,
            np.frombuffer(host_bytes(shard.data), np.uint8)
            .view(dtype)
            .reshape(shard.data.shape),
        )
        for shard in shards.values()
    ]


def as_array(view: memoryview, record: LeafRecord) -> np.ndarray:
    """Views the bytes of a leaf as an array, without a copy."""
    dtype = np.dtype(record.dtype)
    if not view.nbytes:
        return np.zeros(record.shape, dtype)
    return np.frombuffer(view, np.uint8).view(dtype).reshape(record.shape)


def _start(shard: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        part.indices(size)[0] for part, size in zip(shard.index, shape, strict=True)
    )


# ------------------------------------------------------------------------- placing


def as_wanted(
    value: np.ndarray | jax.Array, record: LeafRecord, target: Any, sharding: Any
) -> Any:
    """Converts a leaf to the value that a restore returns.

    Args:
        value: the saved leaf as an array; may be a view of memory that changes later.
        record: the record of the saved leaf.
        target: the user's leaf (array, struct, number); None restores the kind that was
            saved.
        sharding: the sharding of a restored jax array if `target` has no sharding. Not
            used for an uncommitted target (`is_free_target`).

    Raises:
        ValueError: the target has another shape, dtype or type than the saved leaf, or
            jax would narrow a 64-bit dtype.
    """
    kind = kind_wanted(target, record)
    if kind in ("array", "key"):
        stated = stated_sharding(target)
        sharding = stated or (None if is_free_target(target) else sharding)
        if target is not None and kind == "array":
            value = _fitting(value, record, target)
        if is_free_target(target) and isinstance(value, jax.Array):
            value = np.asarray(value)
        array = _on_devices(value, sharding, record)
        if kind == "key":
            array = jax.random.wrap_key_data(array, impl=record.impl)
            if sharding and array.sharding != sharding:
                array = jax.device_put(array, sharding)
            _refuse_other(array, record, target)
        return array
    if kind in _PYTHON:
        number = np.asarray(value)
        if number.shape != ():
            raise _differs(record, target)
        found = number.item()
        if type(found) is not _PYTHON[kind]:
            raise _differs(record, target)
        return found
    if target is not None:
        value = _fitting(value, record, target)
    array = np.array(value, copy=True, order="C")
    return array[()] if kind == "scalar" else array


def is_free_target(target: Any) -> bool:
    """Whether a target is an uncommitted jax array: jax may move it between devices.

    `jax.jit` accepts uncommitted arrays together with arrays divided over devices, but
    refuses arrays committed to one device. So an uncommitted array, such as an
    optimizer's counter, is restored uncommitted.
    """
    return isinstance(target, jax.Array) and not target.committed


def stated_sharding(target: Any) -> Any:
    """Returns a target's sharding; None if the target has none or is uncommitted."""
    return None if is_free_target(target) else getattr(target, "sharding", None)


def kind_wanted(target: Any, record: LeafRecord) -> str:
    """Returns the kind of value to which a leaf is restored for the user's `target`.

    This is "array" (jax array), "key" (PRNG key), "numpy", "scalar" (numpy scalar),
    "bool", "int" or "float". The saved kind is returned if a PRNG key was saved, or if
    `target` is None or a struct without sharding that has the saved shape and dtype.

    Raises:
        ValueError: a leaf cannot be restored to the type of the target.
    """
    if target is None:
        return record.kind
    if record.kind == "key":
        return "key"
    if type(target) in (bool, int, float):
        return type(target).__name__
    if isinstance(target, np.generic):
        return "scalar"
    if isinstance(target, np.ndarray):
        return "numpy"
    if hasattr(target, "shape") and hasattr(target, "dtype"):
        same = (tuple(target.shape), target.dtype) == (record.shape, record.dtype)
        unplaced = getattr(target, "sharding", None) is None
        return record.kind if same and unplaced else "array"
    raise ValueError(
        f"the tree has {target!r:.60} ({type(target).__name__}) for leaf "
        f"{record.path!r}. Allowed: jax.ShapeDtypeStruct, arrays and numbers."
    )


def refuse_unfit(record: LeafRecord, target: Any, fallback: Any) -> None:
    """Checks the shape and the sharding of a target before bytes are read.

    Checks nothing if the leaf is restored as a numpy array or a number.

    Args:
        record: the record of the saved leaf.
        target: the user's leaf; None restores the kind that was saved.
        fallback: the sharding for a target without a sharding. If it is None, only the
            shape of such a target is checked.

    Raises:
        ValueError: the shape differs, the sharding does not divide the shape, or a leaf
            cannot be restored to the type of the target.
    """
    if kind_wanted(target, record) not in ("array", "key"):
        return
    shape = struct_of(record, None).shape
    if target is not None and tuple(getattr(target, "shape", (None,))) != shape:
        raise _differs(record, target)
    sharding = getattr(target, "sharding", None) or fallback
    if sharding is None:
        return
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise ValueError(
            f"leaf {record.path!r}, saved with shape {list(shape)}, cannot have the "
            f"wanted sharding: {error} Nothing was read. Give the target a sharding "
            "that divides every dim evenly, or none for this leaf."
        ) from error


def _fitting(value: Any, record: LeafRecord, target: Any) -> Any:
    """Checks that a leaf has the target's shape and dtype, and returns its value.

    A saved Python number is instead cast to the dtype of a scalar target, if the cast
    is exact.

    Raises:
        ValueError: the shape or the dtype differs.
    """
    if record.kind in _PYTHON and tuple(target.shape) == ():
        host = np.asarray(value)
        cast = host.astype(target.dtype)
        if cast.astype(host.dtype).tobytes() == host.tobytes():
            return cast
    if tuple(target.shape) != record.shape or target.dtype != np.dtype(record.dtype):
        raise _differs(record, target)
    return value


def _refuse_other(array: jax.Array, record: LeafRecord, target: Any) -> None:
    if target is None:
        return
    same_shape = tuple(getattr(target, "shape", (None,))) == array.shape
    if not same_shape or getattr(target, "dtype", None) != array.dtype:
        raise _differs(record, target)


def _differs(record: LeafRecord, target: Any) -> ValueError:
    saved = f"{record.impl or record.dtype}{list(record.shape)} ({record.kind})"
    shape = list(getattr(target, "shape", ()))
    wanted = f"{getattr(target, 'dtype', type(target).__name__)}{shape}"
    return ValueError(
        f"leaf {record.path!r}: saved was {saved}, the tree has {wanted}. Restore it "
        "with the shape and dtype that it had, and convert it afterwards."
    )


def _on_devices(value: Any, sharding: Any, record: LeafRecord) -> jax.Array:
    if isinstance(value, jax.Array):
        sharding = sharding or default_sharding()
        array = value if value.sharding == sharding else jax.device_put(value, sharding)
    elif sharding is None:
        array = jax.device_put(np.array(value, copy=True))
    else:
        # Copies: a device array may alias aligned host memory, and the memory of
        # `value` is overwritten while the array is still in use.
        array = jax.make_array_from_callback(
            value.shape, sharding, lambda index: np.array(value[index], copy=True)
        )
    refuse_narrowed(array.dtype, record, value.dtype)
    return array


def refuse_narrowed(found: Any, record: LeafRecord, expected: Any = None) -> None:
    """Raises ValueError if jax has narrowed a 64-bit leaf.

    Args:
        found: dtype of the jax array.
        record: the record of the leaf.
        expected: dtype that the jax array should have; by default the saved dtype.
    """
    expected = np.dtype(record.dtype) if expected is None else expected
    if found != expected:
        raise ValueError(
            f"leaf {record.path!r} is {expected}, which jax would make {found}. Set "
            "jax_enable_x64, or restore it into a numpy array."
        )


def struct_of(record: LeafRecord, sharding: Any) -> jax.ShapeDtypeStruct:
    """Makes a struct with the shape and dtype of a saved leaf, and with `sharding`.

    For a PRNG key, the shape and dtype are those of the typed key array, not those of
    its uint32 data.
    """
    struct = jax.ShapeDtypeStruct(record.shape, np.dtype(record.dtype))
    if record.kind == "key":
        wrap = functools.partial(jax.random.wrap_key_data, impl=record.impl)
        struct = jax.eval_shape(wrap, struct)
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)


def default_sharding() -> jax.sharding.Sharding:
    """Returns the sharding of arrays for which none is given: one local device.

    It is the first of `jax.local_devices()`.
    """
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


@dataclass(frozen=True, kw_only=True)
class RestoreTarget:
    """How one saved item is to be restored: into a user's tree, or as it was saved."""

    targets: Mapping[int, Any] = field(default_factory=dict)
    """Maps the position of a saved leaf in `Record.leaves` to that leaf in the user's
    tree. Empty if the user gave no tree."""
    order: tuple[int, ...] = ()
    """Positions in `Record.leaves`, in the order of the user's tree."""
    treedef: Any = None
    """Structure of the user's tree; None restores the tree that stock Orbax returns."""
    fallback: Any = None
    """Sharding of leaves whose target has no sharding. None: the argument `shardings`
    of `restore_result` has these shardings."""


def restore_targets(record: Record, args: Any) -> dict[str, RestoreTarget | None]:
    """Makes a `RestoreTarget` for each item that Orbax's arguments request.

    Args:
        record: the record of the save.
        args: `ocp.args.StandardRestore`, `ocp.args.JsonRestore`, or for a save of named
            items an `ocp.args.Composite` of these. None requests all items as they were
            saved.

    Returns:
        Maps the name of each item to its target, or to None for a JSON item, which has
        no target.

    Raises:
        ValueError: the arguments or the user's tree do not fit the save.
    """
    names = [*record.structures, *record.json_items]
    if record.default:
        if isinstance(args, ocp.args.Composite):
            raise ValueError(
                "args is Composite, but one item without a name was saved. Give "
                "ocp.args.StandardRestore(tree)."
            )
        items = {DEFAULT: args}
    elif args is None:
        items = dict.fromkeys(names)
    elif isinstance(args, ocp.args.Composite):
        items = dict(args.items())
    else:
        raise ValueError(
            f"args is {type(args).__name__}, but named items were saved: "
            f"{listed(names)}. Give ocp.args.Composite(name=...)."
        )
    return {name: _wanted(record, name, item) for name, item in items.items()}


def _wanted(record: Record, name: str, item: Any) -> RestoreTarget | None:
    if name in record.json_items:
        if item is None or isinstance(item, ocp.args.JsonRestore):
            return None
    elif name not in record.structures:
        names = [*record.structures, *record.json_items]
        raise ValueError(f"item {name!r} was not saved. There are: {listed(names)}.")
    elif item is None:
        return RestoreTarget()
    elif isinstance(item, ocp.args.StandardRestore):
        return _standard_wanted(record, name, item)
    right = "JsonRestore" if name in record.json_items else "StandardRestore"
    raise ValueError(
        f"args of item {name!r} is {type(item).__name__}. Allowed: ocp.args.{right}."
    )


def _standard_wanted(record: Record, name: str, item: Any) -> RestoreTarget:
    if not item.strict or item.support_layout:
        raise ValueError(
            f"StandardRestore of item {name!r} has strict=False or support_layout=True,"
            " which would change what was saved. Leave them out."
        )
    mine = [number for _, number in leaves_of(record.structures[name])]
    if item.item is None:
        for number in mine:
            refuse_unfit(record.leaves[number], None, item.fallback_sharding)
        return RestoreTarget(fallback=item.fallback_sharding)
    leaves, treedef = jax.tree_util.tree_flatten(item.item)
    paths = [f"{escaped(name)}/{path}" for path in structure_of(treedef)[1]]
    saved = {record.leaves[number].path: number for number in mine}
    if set(saved) != set(paths):
        missing = [path for path in paths if path not in saved]
        unexpected = [path for path in saved if path not in set(paths)]
        raise ValueError(
            f"the tree does not fit item {name!r}: it has {len(paths)} leaves, saved "
            f"were {len(saved)}. Not saved: {listed(missing)}. Saved but not in the "
            f"tree: {listed(unexpected)}. Give a tree of the saved structure."
        )
    order = tuple(saved[path] for path in paths)
    for number, leaf in zip(order, leaves, strict=True):
        refuse_unfit(record.leaves[number], leaf, item.fallback_sharding)
    return RestoreTarget(
        targets=dict(zip(order, leaves, strict=True)),
        order=order,
        treedef=treedef,
        fallback=item.fallback_sharding,
    )


def restore_result(
    record: Record,
    values: Sequence[Any],
    json_items: Mapping[str, Any],
    wanted: Mapping[str, RestoreTarget | None],
    shardings: Sequence[Any],
) -> Any:
    """Builds the value that a restore returns: one item, or a Composite of items.

    Args:
        record: the record of the save.
        values: the saved leaves as arrays, in the order of `record.leaves`.
        json_items: item name to JSON value.
        wanted: the result of `restore_targets`.
        shardings: for each leaf, the sharding that is used if neither the leaf's target
            nor `RestoreTarget.fallback` gives one.

    Raises:
        ValueError: a target has another shape, dtype or type than the saved leaf, or
            jax would narrow a 64-bit dtype.
    """
    items: dict[str, Any] = {}
    for name, item in wanted.items():
        if item is None:
            items[name] = json_items[name]
            continue
        numbers = jax.tree.leaves(record.tree(name, range(len(values))))
        leaves: dict[int, Any] = {}
        for number in numbers:
            sharding = item.fallback or shardings[number]
            leaves[number] = as_wanted(
                values[number],
                record.leaves[number],
                item.targets.get(number),
                sharding,
            )
        if item.treedef is None:
            items[name] = record.tree(name, leaves)
        else:
            items[name] = item.treedef.unflatten([leaves[n] for n in item.order])
    return items[DEFAULT] if record.default else ocp.args.Composite(**items)


def item_metadata(record: Record, shardings: Sequence[Any]) -> Any:
    """Returns the saved tree with a `jax.ShapeDtypeStruct` for every leaf.

    `shardings` has the sharding of each struct, or None, in the order of
    `record.leaves`. For a save of named items, returns a Composite of such trees,
    without the JSON items.
    """
    structs = [
        struct_of(leaf, sharding)
        for leaf, sharding in zip(record.leaves, shardings, strict=True)
    ]
    items = {name: record.tree(name, structs) for name in record.structures}
    return items[DEFAULT] if record.default else ocp.args.Composite(**items)
