"""The record of one save: its items, its leaves and the structures of its trees.

The arguments of `save` become a record and a flat list of leaves. The record is stored
as JSON beside the leaves' bytes. The record contains the structure of each tree in
Orbax's form of dicts and lists (`Structure`).
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.checkpoint.state.tree import nested

Structure = Sequence[Any]
"""A tree in Orbax's form, as JSON with numbers in place of leaves. ("d", {name:
structure}) is a dict, ("l", [structure]) a list, ("x", number) a leaf, ("t",) an empty
tuple. ("n",) is None or an empty node of another type, such as `optax.EmptyState`."""


@functools.lru_cache(maxsize=32)
def structure_of(treedef: Any) -> tuple[Structure, tuple[str, ...]]:
    """Returns the structure of a tree in Orbax's form, and the path of each leaf.

    The structure consists of dicts and lists with numbers in place of leaves (see
    `Structure`). The paths are in tree order; leaf i has the number i.

    Raises:
        ValueError: Orbax would give two leaves one name.
    """
    numbers = treedef.unflatten(range(treedef.num_leaves))
    structure = _encoded(ocp.tree.serialize_tree(numbers, keep_empty_nodes=True))
    paths: list[str] = [""] * treedef.num_leaves
    names: dict[str, tuple[str, ...]] = {}
    for keys, number in leaves_of(structure):
        other = names.setdefault(".".join(keys), keys)
        if other != keys:
            raise ValueError(
                f"leaves {'/'.join(other)!r} and {'/'.join(keys)!r} have one name in "
                'Orbax, which joins keys by ".". Rename one of them.'
            )
        paths[number] = "/".join(map(escaped, keys))
    return structure, tuple(paths)


def _encoded(node: Any) -> Structure:
    if isinstance(node, Mapping):
        return "d", {str(name): _encoded(child) for name, child in node.items()}
    if isinstance(node, list) or (isinstance(node, tuple) and len(node)):
        return "l", [_encoded(child) for child in node]
    if isinstance(node, int):
        return "x", node
    return ("t",) if type(node) is tuple else ("n",)


def leaves_of(
    structure: Structure, keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yields (keys from the root to the leaf, leaf number) for every leaf.

    `keys` are the keys from the root of the whole tree to `structure`.
    """
    if structure[0] == "x":
        yield keys, structure[1]
    elif structure[0] == "d":
        for name, child in structure[1].items():
            yield from leaves_of(child, (*keys, name))
    elif structure[0] == "l":
        for index, child in enumerate(structure[1]):
            yield from leaves_of(child, (*keys, str(index)))


def shifted(structure: Structure, by: int) -> Structure:
    """Returns the structure with every leaf number increased by `by`."""
    return _mapped(structure, lambda number: ("x", number + by))


def _mapped(structure: Structure, leaf: Any) -> Structure:
    if structure[0] == "x":
        return leaf(structure[1])
    if structure[0] == "d":
        return "d", {k: _mapped(v, leaf) for k, v in structure[1].items()}
    if structure[0] == "l":
        return "l", [_mapped(child, leaf) for child in structure[1]]
    return structure


def build(structure: Structure, values: Any) -> Any:
    """Builds the tree that stock Orbax returns, with `values[number]` as leaves.

    In a structure, "d" is a dict, "l" a list, "x" a leaf with its number, "t" an empty
    tuple, and "n" None or another empty node.

    >>> build(("d", {"a": ("l", [("x", 1), ("t",)]), "b": ("n",)}), ["zero", "one"])
    {'a': ['one', ()], 'b': None}
    """
    if structure[0] == "x":
        return values[structure[1]]
    if structure[0] == "d":
        return {name: build(child, values) for name, child in structure[1].items()}
    if structure[0] == "l":
        return [build(child, values) for child in structure[1]]
    return () if structure[0] == "t" else None


def escaped(name: str) -> str:
    """Escapes "%" and "/" in a key, because "/" separates the keys of a path."""
    return name.replace("%", "%25").replace("/", "%2F")


def unescaped(name: str) -> str:
    """Returns the original key of an `escaped` key.

    >>> unescaped(escaped("50%2F/a"))
    '50%2F/a'
    """
    return name.replace("%2F", "/").replace("%25", "%")


DEFAULT = "default"
"""Orbax's item name if a checkpoint was saved as one item without a name."""
RECORD = "dtft"
"""Name of the item in storage that holds the `Record`."""
RESERVED = (DEFAULT, RECORD, "metrics")
STATE, ITEMS = "state", "items"
"""Names of the two items of a step of an experiment (a run of dtft's own trainer): the
arrays, and the JSON values."""

_STORABLE = """
    bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64
    bfloat16 float16 float32 float64 complex64 complex128
    float4_e2m1fn float8_e3m4 float8_e4m3fn float8_e4m3fnuz float8_e4m3b11fnuz
    float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
"""
STORABLE = frozenset(_STORABLE.split())
"""Names of the dtypes that TensorStore, which Orbax writes with, can store."""

Kind = Literal["array", "key", "numpy", "scalar", "bool", "int", "float"]
"""Kind of a saved value: jax array, PRNG key, numpy array or scalar, Python scalar."""


@dataclass(frozen=True, kw_only=True)
class LeafRecord:
    """The path, kind, shape and dtype of one saved leaf."""

    path: str
    """Item name and the keys from the root to the leaf, each `escaped`, joined by "/".
    """
    kind: Kind
    """Kind of the value that the user saved."""
    shape: tuple[int, ...]
    """Shape of the saved array; of a PRNG key, the shape of its data."""
    dtype: str
    """Numpy (or ml_dtypes) name of the dtype of the saved array."""
    impl: str = ""
    """Implementation of a PRNG key; empty for other leaves."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Describes one save: items, tree structures and leaves, but not the bytes."""

    default: bool
    """Whether the save is one item without a name."""
    structures: Mapping[str, Structure]
    """Maps the name of each item that is a tree to the item's structure. Leaves are
    numbered across all items, in the order of `leaves`."""
    json_items: Mapping[str, Any]
    """Maps the name of each JSON item to its value."""
    leaves: tuple[LeafRecord, ...]
    metrics: Any = None
    custom_metadata: Any = None
    shardings: Mapping[str, Any] | None = None
    """The leaves' shardings as `shardings_json` of `managers.distributed` encodes them;
    None outside a job of several processes."""

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of a job with one slot, which owns every leaf of the record."""
        return _layout(self.leaves)

    def to_json(self) -> dict[str, Any]:
        """Encodes the record as JSON values; the inverse of `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Record":
        """Decodes a record from the JSON values of `to_json`."""
        leaves = [
            LeafRecord(**{**leaf, "shape": tuple(leaf["shape"])})
            for leaf in raw["leaves"]
        ]
        return cls(**{**raw, "leaves": tuple(leaves)})

    def tree(self, name: str, values: Sequence[Any] | Mapping[int, Any]) -> Any:
        """Builds the tree of item `name` as stock Orbax returns it.

        `values[i]` is the value of `self.leaves[i]`; only the values of leaves of this
        item are used.
        """
        return build(self.structures[name], values)


def record_of(
    args: Any, metrics: Any = None, custom_metadata: Any = None
) -> tuple[Record, list[Any]]:
    """Makes the record of a save from Orbax's arguments.

    Args:
        args: `ocp.args.StandardSave` of a tree, `ocp.args.JsonSave`, or an
            `ocp.args.Composite` of named items, each one of these two.
        metrics: metrics of the step, JSON values or scalar arrays; None for none.
        custom_metadata: metadata of the step, JSON values or scalar arrays; None for
            none.

    Returns:
        The record, and the values of the leaves in the order of `Record.leaves`.

    Raises:
        ValueError: an argument, a leaf or a name cannot be saved; the message names the
            value.
    """
    default = not isinstance(args, ocp.args.Composite)
    items = {DEFAULT: args} if default else dict(args.items())
    structures: dict[str, Structure] = {}
    json_items: dict[str, Any] = {}
    records: list[LeafRecord] = []
    values: list[Any] = []
    for name, item in items.items():
        if not default and name in RESERVED:
            raise ValueError(
                f"args has the item {name!r}. Not allowed: {', '.join(RESERVED)}. "
                "Rename it."
            )
        if isinstance(item, ocp.args.JsonSave):
            json_items[name] = _as_json(f"item {name!r}", item.item)
            continue
        tree = _standard_tree(name, item)
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        relative, paths = structure_of(treedef)
        structures[name] = shifted(relative, len(values))
        for path, leaf in zip(paths, leaves, strict=True):
            records.append(_leaf_record(f"{escaped(name)}/{path}", leaf))
        values += leaves
    record = Record(
        default=default,
        structures=structures,
        json_items=json_items,
        leaves=tuple(records),
        metrics=_as_json("metrics", metrics),
        custom_metadata=_as_json("custom_metadata", custom_metadata),
    )
    return record, values


def experiment_record(
    arrays: Mapping[str, jax.Array], items: Mapping[str, Any]
) -> tuple[Record, list[Any]]:
    """Makes the record of a step of an experiment (a run of dtft's own trainer).

    Args:
        arrays: leaf path to array.
        items: the JSON values of the step.

    Returns:
        The record, and the arrays in the order of `Record.leaves`.

    Raises:
        ValueError: every array is empty, two paths would have one name in Orbax, or an
            array or an item cannot be saved (see `record_of`).
    """
    if not any(array.size for array in arrays.values()):
        raise ValueError(
            "arrays has no leaf with a value, which Orbax cannot write. Give at least "
            "one array that is not empty."
        )
    state = ocp.args.StandardSave(nested(arrays))
    beside = ocp.args.JsonSave(dict(items))
    return record_of(ocp.args.Composite(**{STATE: state, ITEMS: beside}))


def is_experiment(record: Record) -> bool:
    """Whether a record has exactly the items that dtft's own trainer saves.

    These are "state" (the arrays) and "items" (the JSON values).
    """
    items = set(record.structures), set(record.json_items)
    return not record.default and items == ({STATE}, {ITEMS})


def leaf_path(path: str) -> str:
    """Returns a leaf's path in the record, from its path in an experiment's state.

    An experiment is a run of dtft's own trainer.

    >>> leaf_path("params/100%/w"), state_path(leaf_path("params/100%/w"))
    ('state/params/100%25/w', 'params/100%/w')
    """
    return "/".join((STATE, *map(escaped, path.split("/"))))


def state_path(path: str) -> str:
    """Returns a leaf's path in an experiment's state, from its path in the record.

    An experiment is a run of dtft's own trainer.
    """
    return "/".join(map(unescaped, path.split("/")[1:]))


def _standard_tree(name: str, item: Any) -> Any:
    if not isinstance(item, ocp.args.StandardSave):
        raise ValueError(
            f"args of item {name!r} is {type(item).__name__}. Allowed: "
            "ocp.args.StandardSave, ocp.args.JsonSave, and ocp.args.Composite of them. "
            "Give trees as ocp.args.StandardSave(tree)."
        )
    if item.save_args is not None or item.custom_metadata is not None:
        raise ValueError(
            f"StandardSave of item {name!r} has save_args or custom_metadata, which "
            "are not used here. Leave them out; `save` takes custom_metadata."
        )
    tree = item.item
    if not jax.tree.leaves(tree) and tree is not None:
        raise ValueError(
            f"StandardSave of item {name!r} holds no leaf: {tree!r:.80}. Allowed: one "
            "leaf or more. Give the state that is to come back, or leave the item out."
        )
    if tree is None or jax.tree_util.treedef_is_leaf(jax.tree.structure(tree)):
        raise ValueError(
            f"StandardSave of item {name!r} holds {type(tree).__name__}, not a tree. "
            'Allowed: a tree of leaves. Give {"value": ...}.'
        )
    return tree


def _leaf_record(path: str, leaf: Any) -> LeafRecord:
    if isinstance(leaf, jax.Array):
        _refuse_deleted(path, leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jax.eval_shape(jax.random.key_data, leaf)
            impl = str(jax.random.key_impl(leaf))
            return LeafRecord(
                path=path, kind="key", shape=data.shape, dtype="uint32", impl=impl
            )
        kind: Kind = "array"
    elif isinstance(leaf, np.ndarray):
        _refuse_subclass(path, leaf)
        kind = "numpy"
    elif isinstance(leaf, np.generic):
        kind = "scalar"
    else:
        return _python_record(path, leaf)
    _refuse_odd_dtype(path, leaf.dtype)
    return LeafRecord(path=path, kind=kind, shape=leaf.shape, dtype=leaf.dtype.name)


def _python_record(path: str, leaf: Any) -> LeafRecord:
    if type(leaf) is bool:
        return LeafRecord(path=path, kind="bool", shape=(), dtype="bool")
    if type(leaf) is int and -(2**63) <= leaf < 2**63:
        return LeafRecord(path=path, kind="int", shape=(), dtype="int64")
    if type(leaf) is float:
        return LeafRecord(path=path, kind="float", shape=(), dtype="float64")
    raise ValueError(
        f"leaf {path!r} is {leaf!r:.60} ({type(leaf).__name__}). Allowed: jax arrays, "
        "numpy arrays and scalars, bool, float, and int of 64 bits. Put anything else "
        "into an item of its own with ocp.args.JsonSave."
    )


def _refuse_deleted(path: str, array: jax.Array) -> None:
    if array.is_deleted():
        raise ValueError(
            f"leaf {path!r} was donated or deleted: its bytes are gone. Allowed: "
            "arrays that exist. Save what the step that took it has returned, or save "
            "it before that step."
        )


def _refuse_subclass(path: str, array: np.ndarray) -> None:
    # A memmap holds only numbers and is saved whole; the mask of a masked array is not.
    if type(array) not in (np.ndarray, np.memmap):
        raise ValueError(
            f"leaf {path!r} is {type(array).__name__}, which would come back as plain "
            "numpy.ndarray. Allowed: numpy.ndarray. Save numpy.asarray of it; of a "
            "masked array its data and its mask."
        )


def _refuse_odd_dtype(path: str, dtype: np.dtype) -> None:
    if dtype.name not in STORABLE:
        raise ValueError(
            f"leaf {path!r} has dtype {dtype}, which storage cannot hold. Allowed: "
            f"{', '.join(sorted(STORABLE))}. Convert it, or put it into an item of its "
            "own with ocp.args.JsonSave."
        )
    if not dtype.isnative:
        raise ValueError(
            f"leaf {path!r} has dtype {dtype.str}, whose byte order is not this "
            "machine's. Allowed: native byte order, which it would come back in. Save "
            f"leaf.astype({dtype.name!r})."
        )


def _as_json(what: str, value: Any) -> Any:
    """Returns the value that storage would return: JSON encoded and decoded again.

    Raises:
        ValueError: the value cannot be encoded; the message begins with `what`.
    """
    if value is None:
        return None
    try:
        return json.loads(json.dumps(value, default=_number))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} is not JSON: {error}. Allowed: dicts with str keys, lists, str, "
            "numbers, bool, None. Convert it."
        ) from error


def _number(value: Any) -> Any:
    """Converts a scalar array to a number for JSON; metrics are often such arrays.

    Raises:
        TypeError: the value is not a scalar array.
    """
    if getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


@functools.lru_cache(maxsize=8)
def _layout(leaves: tuple[LeafRecord, ...]) -> Layout:
    return Layout(
        mesh=MeshLayout(axis_names=("host",), axis_sizes=(1,), slots=(0,)),
        leaves=tuple(
            Leaf(path=leaf.path, shape=leaf.shape, dtype=leaf.dtype) for leaf in leaves
        ),
    )
