"""What one save holds: which items, which leaves, and how they make up the trees.

Turns Orbax's save and restore arguments into plain records (as JSON beside the bytes)
and a flat list of leaves, and back into the trees that stock Orbax would return. Must
not know where the bytes are, nor steps.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp

from dtft.checkpoint.slices import Layout, Leaf, MeshLayout
from dtft.checkpoint.tree import listed

DEFAULT = "default"
"""Orbax's name for the only item of a checkpoint that has no names."""
RECORD = "dtft"
"""The item in which the record itself travels to storage."""
RESERVED = (DEFAULT, RECORD, "metrics")

Kind = Literal["array", "key", "numpy", "scalar", "bool", "int", "float"]
"""jax array, jax PRNG key, numpy array, numpy scalar, Python scalars."""

Structure = Sequence[Any]
"""("d", {name: structure}), ("l", [structure]), ("x", leaf number), ("t",) for an empty
tuple, ("n",) for None and other empty nodes: what Orbax makes of a tree."""


@dataclass(frozen=True, kw_only=True)
class LeafRecord:
    """One leaf as bytes."""

    path: str
    """Item and keys, joined by "/"."""
    kind: Kind
    """What the user gave."""
    shape: tuple[int, ...]
    """Shape of the bytes; of a key, that of its data."""
    dtype: str
    """Numpy (or ml_dtypes) name of the dtype of the bytes."""
    impl: str = ""
    """Of a PRNG key the implementation."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One save, without the bytes."""

    default: bool
    """Whether it is one item without a name."""
    structures: Mapping[str, Structure]
    """Item name to the tree of its leaves, which are counted over all items."""
    json_items: Mapping[str, Any]
    """Item name to JSON value."""
    leaves: tuple[LeafRecord, ...]
    metrics: Any = None
    custom_metadata: Any = None

    @functools.cached_property
    def layout(self) -> Layout:
        """The leaves as a layout of one slot that owns each of them whole."""
        return _layout(self.leaves)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; inverse of `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Record":
        """Reads what `to_json` made."""
        leaves = [
            LeafRecord(**{**leaf, "shape": tuple(leaf["shape"])})
            for leaf in raw["leaves"]
        ]
        return cls(**{**raw, "leaves": tuple(leaves)})

    def tree(self, name: str, values: Sequence[Any]) -> Any:
        """The tree of one item, as stock Orbax returns it, with `values` as leaves."""
        return build(self.structures[name], values)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a restore asks of one item; `targets` by leaf number of the record."""

    targets: Mapping[int, Any] = field(default_factory=dict)
    """The leaf that the user's tree has there."""
    order: tuple[int, ...] = ()
    """Leaf numbers in the order of the user's tree."""
    treedef: Any = None
    """The user's tree; None for the tree that stock Orbax returns."""
    fallback: Any = None
    """Sharding for targets that state none."""


# -------------------------------------------------------------------------- saving


def record_of(
    args: Any, metrics: Any = None, custom_metadata: Any = None
) -> tuple[Record, list[Any]]:
    """What Orbax's arguments ask to save, and the leaves as they are.

    Raises:
        ValueError: arguments, leaves or names that cannot be saved; says which.
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
        relative, paths = _structure(treedef)
        structures[name] = _shifted(relative, len(values))
        for path, leaf in zip(paths, leaves, strict=True):
            records.append(_leaf_record(f"{_escape(name)}/{path}", leaf))
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
    if tree is None or jax.tree_util.treedef_is_leaf(jax.tree.structure(tree)):
        raise ValueError(
            f"StandardSave of item {name!r} holds {type(tree).__name__}, not a tree. "
            'Allowed: a tree of leaves. Give {"value": ...}.'
        )
    return tree


def _leaf_record(path: str, leaf: Any) -> LeafRecord:
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            raise ValueError(
                f"leaf {path!r} spans processes ({leaf.sharding}). Allowed: arrays of "
                "this process. In a job of many processes `dtft agent` is needed."
            )
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jax.eval_shape(jax.random.key_data, leaf)
            impl = str(jax.random.key_impl(leaf))
            return LeafRecord(
                path=path, kind="key", shape=data.shape, dtype="uint32", impl=impl
            )
        return LeafRecord(
            path=path, kind="array", shape=leaf.shape, dtype=leaf.dtype.name
        )
    if isinstance(leaf, np.ndarray | np.generic):
        _refuse_odd_dtype(path, leaf.dtype)
        kind = "numpy" if isinstance(leaf, np.ndarray) else "scalar"
        return LeafRecord(path=path, kind=kind, shape=leaf.shape, dtype=leaf.dtype.name)
    return _python_record(path, leaf)


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


def _refuse_odd_dtype(path: str, dtype: np.dtype) -> None:
    try:
        plain = np.dtype(dtype.name).itemsize == dtype.itemsize and not dtype.hasobject
    except TypeError:
        plain = False
    if not plain or dtype.kind in "USMm":
        raise ValueError(
            f"leaf {path!r} has dtype {dtype}. Allowed: numbers and bool. Convert it, "
            "or put it into an item of its own with ocp.args.JsonSave."
        )


def _as_json(what: str, value: Any) -> Any:
    """A detached copy, and what storage would give back."""
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
    """Metrics are often scalar arrays."""
    if getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


# --------------------------------------------------------------------- structures


@functools.lru_cache(maxsize=32)
def _structure(treedef: Any) -> tuple[Structure, tuple[str, ...]]:
    """What Orbax makes of a tree, and the path of each leaf in tree order."""
    numbers = treedef.unflatten(range(treedef.num_leaves))
    structure = _encoded(ocp.tree.serialize_tree(numbers, keep_empty_nodes=True))
    paths: list[str] = [""] * treedef.num_leaves
    names: dict[str, tuple[str, ...]] = {}
    for keys, number in _leaves(structure):
        other = names.setdefault(".".join(keys), keys)
        if other != keys:
            raise ValueError(
                f"leaves {'/'.join(other)!r} and {'/'.join(keys)!r} have one name in "
                'Orbax, which joins keys by ".". Rename one of them.'
            )
        paths[number] = "/".join(map(_escape, keys))
    return structure, tuple(paths)


def _encoded(node: Any) -> Structure:
    if isinstance(node, Mapping):
        return "d", {str(name): _encoded(child) for name, child in node.items()}
    if isinstance(node, list) or (isinstance(node, tuple) and len(node)):
        return "l", [_encoded(child) for child in node]
    if isinstance(node, int):
        return "x", node
    return ("t",) if type(node) is tuple else ("n",)


def _leaves(
    structure: Structure, keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], int]]:
    if structure[0] == "x":
        yield keys, structure[1]
    elif structure[0] == "d":
        for name, child in structure[1].items():
            yield from _leaves(child, (*keys, name))
    elif structure[0] == "l":
        for index, child in enumerate(structure[1]):
            yield from _leaves(child, (*keys, str(index)))


def _shifted(structure: Structure, by: int) -> Structure:
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
    """The tree of a structure with `values[number]` as leaves.

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


def _escape(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F")


@functools.lru_cache(maxsize=8)
def _layout(leaves: tuple[LeafRecord, ...]) -> Layout:
    return Layout(
        mesh=MeshLayout(axis_names=("host",), axis_sizes=(1,), slots=(0,)),
        leaves=tuple(
            Leaf(path=leaf.path, shape=leaf.shape, dtype=leaf.dtype) for leaf in leaves
        ),
    )


# ------------------------------------------------------------------------ restoring


def wanted_of(record: Record, args: Any) -> dict[str, Wanted | None]:
    """What Orbax's arguments ask of a save, by item; None for an item that is JSON.

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


def _wanted(record: Record, name: str, item: Any) -> Wanted | None:
    if name in record.json_items:
        if item is None or isinstance(item, ocp.args.JsonRestore):
            return None
    elif name not in record.structures:
        names = [*record.structures, *record.json_items]
        raise ValueError(f"item {name!r} was not saved. There are: {listed(names)}.")
    elif item is None:
        return Wanted()
    elif isinstance(item, ocp.args.StandardRestore):
        return _standard_wanted(record, name, item)
    right = "JsonRestore" if name in record.json_items else "StandardRestore"
    raise ValueError(
        f"args of item {name!r} is {type(item).__name__}. Allowed: ocp.args.{right}."
    )


def _standard_wanted(record: Record, name: str, item: Any) -> Wanted:
    if not item.strict or item.support_layout:
        raise ValueError(
            f"StandardRestore of item {name!r} has strict=False or support_layout=True,"
            " which would change what was saved. Leave them out."
        )
    if item.item is None:
        return Wanted(fallback=item.fallback_sharding)
    leaves, treedef = jax.tree_util.tree_flatten(item.item)
    paths = [f"{_escape(name)}/{path}" for path in _structure(treedef)[1]]
    mine = [number for _, number in _leaves(record.structures[name])]
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
    return Wanted(
        targets=dict(zip(order, leaves, strict=True)),
        order=order,
        treedef=treedef,
        fallback=item.fallback_sharding,
    )
