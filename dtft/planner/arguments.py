"""Plain arguments that are something else than they may be: refused early, by name.

Each check raises a ValueError that names the argument and what is allowed.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, get_args


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuses what is no whole number, or too small a one.

    Raises:
        ValueError: names the argument.

    >>> check_whole("moves", 2.0, 0)
    Traceback (most recent call last):
    ...
    ValueError: moves=2.0 is no whole number of 0 or more. Give one, such as 1.
    """
    try:
        is_good = not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        is_good = False
    if not is_good:
        raise ValueError(
            f"{name}={value!r:.80} is no whole number of {least} or more. Give one, "
            f"such as {least + 1}."
        )


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Refuses what is none of some words.

    Args:
        name: of the argument.
        value: its value.
        choices: a `Literal`.

    Raises:
        ValueError: names the argument, and the words.
    """
    words = get_args(choices)
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name}={value!r:.80}. Allowed: {', '.join(words)}.")


def check_flag(name: str, value: Any) -> None:
    """Refuses what is neither true nor false.

    Raises:
        ValueError: names the argument.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r:.80}. Allowed: True, False.")


def check_number(name: str, value: Any, least: float, most: float = math.inf) -> None:
    """Refuses what is no finite number, or out of its range.

    Raises:
        ValueError: names the argument and the range.

    >>> check_number("step", 5.0, 0.001, 1.0)
    Traceback (most recent call last):
    ...
    ValueError: step=5.0. Allowed: a finite number from 0.001 to 1.
    """
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or math.isinf(value):
        upto = f"to {most:g}" if most < math.inf else "on"
        raise ValueError(
            f"{name}={value!r:.80}. Allowed: a finite number from {least:g} {upto}."
        )


def numbers(
    name: str, value: Any, each: str, names: Sequence[str] | None = None
) -> tuple[float, ...]:
    """Finite numbers of 0 or more, as floats.

    Args:
        name: of the argument.
        value: a sequence or array of numbers.
        each: what they are for, in words: `each of 3 nodes`.
        names: of what they are for; there must be as many.

    Raises:
        ValueError: names the argument and what is allowed.
    """
    allowed = f"Allowed: a finite number of 0 or more for {each}."
    if isinstance(value, str | Mapping):
        raise ValueError(f"{name}={value!r:.80}. {allowed}")
    try:
        given = tuple(map(float, value))
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r:.80}. {allowed}") from None
    is_short = names is not None and len(given) != len(names)
    if is_short or not all(0 <= one < math.inf for one in given):
        raise ValueError(f"{name}={list(given)!r:.80}. {allowed}")
    return given
