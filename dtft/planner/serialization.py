"""Versioned JSON of dataclasses: writes text, and reads text with typed fields.

Reading checks each field by its type. An error names the field by its path, such as
`knobs.zero`. The error of a duplicate key names this key and all keys of its object.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

# Duplicate keys. Parsers silently keep the last value of a duplicate key, so an edit of
# the first value would have no effect.


class Twice(ValueError):
    """Error for a key that occurs more than once in a mapping of a file."""


def mapping_once(pairs: Iterable[tuple[Any, Any]], where: str) -> dict[Any, Any]:
    """Builds a mapping from pairs and refuses duplicate keys.

    Args:
        pairs: keys and values in the order of the file.
        where: name of the mapping in errors.

    Raises:
        Twice: a key is duplicate; the message names the key.

    >>> mapping_once([("a", 1), ("b", 2), ("a", 3)], "m")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    dtft.planner.serialization.Twice: the key a stands more than once in m. Leave one...
    """
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Twice(
                f"the key {key} stands more than once in {where}. Leave one of them."
            )
        found[key] = value
    return found


def parse_once(text: str) -> Any:
    """Parses JSON and refuses duplicate keys.

    Raises:
        Twice: a key is duplicate; the message names this key and the first of the
            object's keys.
        json.JSONDecodeError: the text is not JSON.

    >>> parse_once('{"mesh": {"replica": 2}}')
    {'mesh': {'replica': 2}}
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = ", ".join(dict(pairs))
    return mapping_once(pairs, f"an object, the one with {names:.60}")


# Typed decoding: dataclasses, lists (as tuples), objects (as mappings), `Literal`,
# text, flags and numbers. Numbers must be finite and 0 or more: the planner writes no
# other numbers.


_PLAIN: Mapping[Any, tuple[tuple[type, ...], str]] = {
    str: ((str,), "text"),
    bool: ((bool,), "true, false"),
    int: ((int,), "a whole number of 0 or more"),
    float: ((int, float), "a finite number of 0 or more"),
}
"""Map from a type to its allowed JSON types, and the allowed values in words."""
_MOST = 2**63
"""Numbers in a file must be below this bound, which exceeds all counts of bytes and
flops."""


def build_typed(kind: Any, item: Any, where: str = "") -> Any:
    """Builds a value of a type from parsed JSON.

    A field that the JSON object lacks gets the default of its dataclass. Older files
    lack newer fields.

    Args:
        kind: the type: a dataclass, `tuple`, `Mapping`, `Literal`, `str`, `bool`,
            `int` or `float`, with its type arguments.
        item: the parsed JSON value.
        where: name of the value in errors, such as `knobs.zero`.

    Raises:
        ValueError: the item does not have the type, lacks a field without default, has
            an unknown field, or has two keys that are the same number. The message
            names the wrong value by its path, such as `knobs.zero`.

    >>> build_typed(tuple[int, ...], [1, 2], "sizes")
    (1, 2)
    >>> build_typed(tuple[int, ...], [1, -2], "sizes")
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
        **{
            name: build_typed(types[name], one, place + name)
            for name, one in item.items()
        }
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
        (_key(key, name, where), build_typed(value, one, f"{where}[{name!r}]"))
        for name, one in item.items()
    )
    return mapping_once(built, where)  # "2" and "02" are the same number


def _key(kind: Any, name: str, where: str) -> Any:
    """Converts the text of a JSON key, `name`, to a mapping key of type `kind`.

    `where` names the mapping in errors.

    Raises:
        ValueError: the text is not allowed for the type.
    """
    if kind is int:
        if not (name.isascii() and name.isdigit()):
            _refuse(f"a name in {where}", name, "a whole number of 0 or more")
        return int(name)
    return build_typed(kind, name, f"a name in {where}")


def _tuple(kinds: tuple[Any, ...], item: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(item, list):
        _refuse(where, item, "a list")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(item)
    if len(item) != len(kinds):
        _refuse(where, item, f"a list of {len(kinds)}")
    pairs = enumerate(zip(kinds, item, strict=True))
    return tuple(build_typed(kind, one, f"{where}[{at}]") for at, (kind, one) in pairs)


def _choice(allowed: tuple[Any, ...], item: Any, where: str) -> Any:
    for one in allowed:  # compares types, as True == 1; lists have no hash
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


# Writing and reading versioned JSON, with the same errors for all dataclasses.


Made = TypeVar("Made")


def write_versioned(value: Any, schema: int) -> str:
    """Writes a dataclass as versioned JSON; mappings keep their order.

    Args:
        value: the dataclass instance.
        schema: version of the dataclass's fields.
    """
    return json.dumps({"schema": schema, **asdict(value)}, indent=1)


def read_versioned(
    text: str,
    kind: type[Made],
    *,
    name: str,
    schema: int,
    again: str,
    check: Callable[[Made], None] | None = None,
) -> Made:
    """Reads a dataclass from the JSON that `write_versioned` writes.

    Args:
        text: the JSON text.
        kind: the dataclass.
        name: name of the dataclass in errors.
        schema: the version that is accepted.
        again: a sentence for users that says how to make a new file.
        check: function that raises a ValueError if the dataclass it gets is invalid.

    Raises:
        ValueError: the text is not JSON, has another version, other fields or values,
            or a duplicate key. The message names the first error.

    >>> read_versioned('{"schema": 2}', dict, name="plan", schema=1, again="Replan.")
    Traceback (most recent call last):
    ...
    ValueError: schema=2 is not a plan that this dtft reads. Allowed: 1. Replan.
    """
    try:
        items = parse_once(text)
    except Twice as error:
        raise ValueError(f"the text is no {name}: {error} {again}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"text={text!r:.80} is no JSON, or only the beginning of it ({error}). "
            f"Allowed: the text of a {name}, not the path of its file. {again}"
        ) from None
    found = items.pop("schema", None) if isinstance(items, dict) else None
    if type(found) is not int or found != schema:
        raise ValueError(
            f"schema={found!r} is not a {name} that this dtft reads. Allowed: "
            f"{schema}. {again}"
        )
    try:
        made: Any = build_typed(kind, items)
        if check is not None:
            check(made)
    except ValueError as error:
        raise ValueError(
            f"the text has not what a {name} has ({error}). {again}"
        ) from None
    return made
