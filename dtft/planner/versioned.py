"""Values as versioned JSON, and back: read and refused in one way.

Must not know what is written: who reads says how a value is built of its items.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

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
    build: Callable[[dict[str, Any]], Made],
    *,
    name: str,
    schema: int,
    again: str,
) -> Made:
    """The value of `write`.

    Args:
        text: JSON.
        build: makes the value of its fields.
        name: what errors call it.
        schema: the version that is read.
        again: how a user makes another one, as a sentence.

    Raises:
        ValueError: no JSON, another version, or other fields.

    >>> read('{"schema": 2}', dict, name="plan", schema=1, again="Plan again.")
    Traceback (most recent call last):
    ...
    ValueError: schema=2 is not a plan that this dtft reads. Allowed: 1. Plan again.
    """
    try:
        items = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"text={text!r:.80} is no JSON, or only the beginning of it ({error}). "
            f"Allowed: the text of a {name}, not the path of its file. {again}"
        ) from None
    found = items.pop("schema", None) if isinstance(items, dict) else None
    if found != schema:
        raise ValueError(
            f"schema={found!r} is not a {name} that this dtft reads. Allowed: "
            f"{schema}. {again}"
        )
    try:
        return build(items)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(
            f"the text has not what a {name} has ({error}). {again}"
        ) from None
