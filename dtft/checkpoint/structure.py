"""The tree of an item as plain values: what Orbax makes of dicts, lists and classes.

Turns a tree into a structure that is JSON, with numbers for leaves, and a structure
into the tree that stock Orbax returns. Must not know what the leaves are.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

Structure = Sequence[Any]
"""("d", {name: structure}), ("l", [structure]), ("x", leaf number), ("t",) for an empty
tuple, ("n",) for None and other empty nodes: what Orbax makes of a tree."""


@functools.lru_cache(maxsize=32)
def structure_of(treedef: Any) -> tuple[Structure, tuple[str, ...]]:
    """What Orbax makes of a tree, and the path of each leaf in tree order."""
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
    """Keys and number of every leaf."""
    if structure[0] == "x":
        yield keys, structure[1]
    elif structure[0] == "d":
        for name, child in structure[1].items():
            yield from leaves_of(child, (*keys, name))
    elif structure[0] == "l":
        for index, child in enumerate(structure[1]):
            yield from leaves_of(child, (*keys, str(index)))


def shifted(structure: Structure, by: int) -> Structure:
    """The same with other leaf numbers."""
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


def escaped(name: str) -> str:
    """A key as part of a path, which "/" divides."""
    return name.replace("%", "%25").replace("/", "%2F")


def unescaped(name: str) -> str:
    """The key that was `escaped`.

    >>> unescaped(escaped("50%2F/a"))
    '50%2F/a'
    """
    return name.replace("%2F", "/").replace("%25", "%")
