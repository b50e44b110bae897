"""Values built of what JSON has, as their types say; what does not fit is refused.

Knows dataclasses, lists (as tuples), objects (as mappings), choices (`Literal`), text,
flags and numbers; these are finite and 0 or more, as all that the planner writes are.
Must not know what a value means, or where its text lies.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from dtft.planner import once

_PLAIN: Mapping[Any, tuple[tuple[type, ...], str]] = {
    str: ((str,), "text"),
    bool: ((bool,), "true, false"),
    int: ((int,), "a whole number of 0 or more"),
    float: ((int, float), "a finite number of 0 or more"),
}
"""Type to what JSON may have for it, and that in words."""
_MOST = 2**63
"""Numbers are below it: of bytes, and of operations, there are no more."""


def build(kind: Any, item: Any, where: str = "") -> Any:
    """A value of a type.

    What an object lacks has the default of its dataclass, as in files of before there
    was the field.

    Args:
        kind: the type: a dataclass, `tuple`, `Mapping`, `Literal`, `str`, `bool`,
            `int` or `float`, with its arguments.
        item: what JSON has for it.
        where: what errors call it, such as `knobs.zero`.

    Raises:
        ValueError: the item is something else: names it, and what is allowed.

    >>> build(tuple[int, ...], [1, 2], "sizes")
    (1, 2)
    >>> build(tuple[int, ...], [1, -2], "sizes")
    Traceback (most recent call last):
    ...
    ValueError: sizes[1]=-2. Allowed: a whole number of 0 or more
    """
    origin = get_origin(kind)
    if is_dataclass(kind):
        return _record(kind, item, where)
    if origin is Mapping:
        return _mapping(get_args(kind), item, where)
    if origin is tuple:
        return _tuple(get_args(kind), item, where)
    if origin is Literal:
        return _choice(get_args(kind), item, where)
    return _plain(kind, item, where)


def _record(kind: Any, item: Any, where: str) -> Any:
    known, types = fields(kind), _types(kind)
    if not isinstance(item, dict):
        names = ", ".join(field.name for field in known)
        _refuse(where, item, f"an object with {names}")
    place = f"{where}." if where else ""
    if unknown := item.keys() - types.keys():
        name = min(unknown)
        _refuse(place + name, item[name], f"no such field, only {', '.join(types)}")
    for field in known:
        has_default = field.default is not MISSING
        has_default |= field.default_factory is not MISSING
        if not has_default and field.name not in item:
            raise ValueError(f"{place}{field.name} is missing")
    return kind(
        **{name: build(types[name], one, place + name) for name, one in item.items()}
    )


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _mapping(kinds: tuple[Any, ...], item: Any, where: str) -> dict[Any, Any]:
    if not isinstance(item, dict):
        _refuse(where, item, "an object: names to values")
    key, value = kinds
    built = (
        (_key(key, name, where), build(value, one, f"{where}[{name!r}]"))
        for name, one in item.items()
    )
    return once.mapping(built, where)  # texts of one number: "2" and "02"


def _key(kind: Any, name: str, where: str) -> Any:
    """A key, of which JSON has the text."""
    if kind is int:
        if not (name.isascii() and name.isdigit()):
            _refuse(f"a name in {where}", name, "a whole number of 0 or more")
        return int(name)
    return build(kind, name, f"a name in {where}")


def _tuple(kinds: tuple[Any, ...], item: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(item, list):
        _refuse(where, item, "a list")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(item)
    if len(item) != len(kinds):
        _refuse(where, item, f"a list of {len(kinds)}")
    pairs = enumerate(zip(kinds, item, strict=True))
    return tuple(build(kind, one, f"{where}[{at}]") for at, (kind, one) in pairs)


def _choice(allowed: tuple[Any, ...], item: Any, where: str) -> Any:
    for one in allowed:  # True is no 1, and a list is not looked for by its hash
        if type(one) is type(item) and one == item:
            return one
    _refuse(where, item, ", ".join(map(str, allowed)))


def _plain(kind: Any, item: Any, where: str) -> Any:
    types, words = _PLAIN[kind]
    fits = isinstance(item, types) and isinstance(item, bool) == (kind is bool)
    if fits and kind in (int, float):
        fits = math.isfinite(item) and 0 <= item < _MOST
    if not fits:
        _refuse(where, item, words)
    return item


def _refuse(where: str, item: Any, allowed: str) -> NoReturn:
    raise ValueError(f"{where or 'it'}={item!r:.80}. Allowed: {allowed}")
