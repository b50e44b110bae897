"""Names each leaf of a tree by its path. Plans and checkpoints use these names.

A path joins dict keys, attribute names and sequence indices with "/". A "/" in a key,
as in the names of Haiku's modules, is written "%2F".
"""

from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def paths_of(tree: Any) -> tuple[str, ...]:
    """Returns the path of each leaf of a tree, in tree order.

    None is not a leaf.

    >>> paths_of({"b": [1, 2], "mlp/~/linear_0": {"w": 3, "none": None}})
    ('b/0', 'b/1', 'mlp%2F~%2Flinear_0/w')

    Raises:
        ValueError: a key is empty, or two leaves have one path.
    """
    paths: dict[str, None] = {}
    for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = _path(keys)
        if path in paths:
            raise ValueError(
                f"tree has two leaves at path {path!r} (keys {keys}): keys that "
                'differ only by type, or by "%2F" instead of "/", are not allowed. '
                "Rename one of them."
            )
        paths[path] = None
    return tuple(paths)


def _path(keys: tuple[Any, ...]) -> str:
    names = [_name(key) for key in keys]
    if "" in names:
        raise ValueError(f"tree has an empty key (in {keys}). Give it a name.")
    return "/".join(name.replace("/", "%2F") for name in names)


def _name(key: Any) -> str:
    match key:
        case DictKey(key=name) | FlattenedIndexKey(key=name):
            return str(name)
        case GetAttrKey(name=name):
            return name
        case SequenceKey(idx=index):
            return str(index)
    return str(key)
