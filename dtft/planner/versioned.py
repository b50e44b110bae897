"""Values as versioned JSON, and back: read and refused in one way.

Must not know what is written: types say what their fields may be (`typed`), who reads
says what must hold between them.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from dtft.planner import once, typed

Made = TypeVar("Made")


def write(value: Any, schema: int) -> str:
    """A dataclass as JSON; equal values give equal text.

    Args:
        value: the dataclass.
        schema: version of its fields.
    """
    return json.dumps({"schema": schema, **asdict(value)}, indent=1)


def read(
    text: str,
    kind: type[Made],
    *,
    name: str,
    schema: int,
    again: str,
    check: Callable[[Made], None] | None = None,
) -> Made:
    """The value of `write`.

    Args:
        text: JSON.
        kind: the dataclass that it is of.
        name: what errors call it.
        schema: the version that is read.
        again: how a user makes another one, as a sentence.
        check: refuses, by a ValueError, what no such value has.

    Raises:
        ValueError: no JSON, another version, other fields or values, or a key that
            stands twice; names the first of them, and what is allowed.

    >>> read('{"schema": 2}', dict, name="plan", schema=1, again="Plan again.")
    Traceback (most recent call last):
    ...
    ValueError: schema=2 is not a plan that this dtft reads. Allowed: 1. Plan again.
    """
    try:
        items = once.parsed(text)
    except once.Twice as error:
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
        made: Any = typed.build(kind, items)
        if check is not None:
            check(made)
    except ValueError as error:
        raise ValueError(
            f"the text has not what a {name} has ({error}). {again}"
        ) from None
    return made
