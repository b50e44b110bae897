"""What a restore asks for, held against what was saved, and what it returns.

Turns the arguments of `restore` into a target per leaf, refuses what does not fit, and
puts the leaves into the user's tree or into the one that stock Orbax would return. Must
not know where the bytes come from, nor steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import orbax.checkpoint as ocp

from dtft.checkpoint import placing
from dtft.checkpoint.record import DEFAULT, Record
from dtft.checkpoint.structure import escaped, leaves_of, structure_of
from dtft.checkpoint.tree import listed


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
    mine = [number for _, number in leaves_of(record.structures[name])]
    if item.item is None:
        for number in mine:
            placing.refuse_unfit(record.leaves[number], None, item.fallback_sharding)
        return Wanted(fallback=item.fallback_sharding)
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
        placing.refuse_unfit(record.leaves[number], leaf, item.fallback_sharding)
    return Wanted(
        targets=dict(zip(order, leaves, strict=True)),
        order=order,
        treedef=treedef,
        fallback=item.fallback_sharding,
    )


def result(
    record: Record,
    values: Sequence[Any],
    json_items: Mapping[str, Any],
    wanted: Mapping[str, Wanted | None],
    shardings: Sequence[Any],
) -> Any:
    """What the user gets: an item, or a Composite of them."""
    items: dict[str, Any] = {}
    for name, item in wanted.items():
        if item is None:
            items[name] = json_items[name]
            continue
        numbers = jax.tree.leaves(record.tree(name, range(len(values))))
        leaves: dict[int, Any] = {}
        for number in numbers:
            sharding = item.fallback or shardings[number]
            leaves[number] = placing.as_wanted(
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


def metadata(record: Record, shardings: Sequence[Any]) -> Any:
    """A struct for every leaf, in the tree or trees that were saved."""
    structs = [
        placing.struct_of(leaf, sharding)
        for leaf, sharding in zip(record.leaves, shardings, strict=True)
    ]
    items = {name: record.tree(name, structs) for name in record.structures}
    return items[DEFAULT] if record.default else ocp.args.Composite(**items)
