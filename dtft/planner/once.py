"""Keys that stand twice in one mapping of a file are refused, whoever reads it.

Parsers take the last of them without a word, so that a line which somebody edited does
nothing. Must not know what a key means, or in which file it stands.
"""

import json
from collections.abc import Iterable
from typing import Any


class Twice(ValueError):
    """A key stands more than once in its mapping."""


def mapping(pairs: Iterable[tuple[Any, Any]], where: str) -> dict[Any, Any]:
    """The mapping of its pairs.

    Args:
        pairs: keys and values, as they stand in the file.
        where: what errors call the mapping.

    Raises:
        Twice: names the key.

    >>> mapping([("a", 1), ("b", 2), ("a", 3)], "m")
    Traceback (most recent call last):
    ...
    dtft.planner.once.Twice: the key a stands more than once in m. Leave one of them.
    """
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Twice(
                f"the key {key} stands more than once in {where}. Leave one of them."
            )
        found[key] = value
    return found


def parsed(text: str) -> Any:
    """What JSON says.

    Raises:
        Twice: names the key, and those beside it.
        json.JSONDecodeError: no JSON.

    >>> parsed('{"mesh": {"replica": 2}}')
    {'mesh': {'replica': 2}}
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = ", ".join(dict(pairs))
    return mapping(pairs, f"an object, the one with {names:.60}")
