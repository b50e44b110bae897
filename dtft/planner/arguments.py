"""Checks of plain arguments: whole numbers, choices, flags and finite numbers.

Each check raises a ValueError that names the argument and its allowed values.
"""

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args


def check_whole(name: str, value: Any, least: int) -> None:
    """Checks that an argument is a whole number and at least `least`.

    Raises:
        ValueError: the value is a bool, has no whole-number type, or is below `least`;
            the message names the argument.

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
    """Checks that an argument is one of the words of a `Literal`.

    Args:
        name: name of the argument.
        value: value of the argument.
        choices: the `Literal` type.

    Raises:
        ValueError: the value is none of the words; the message names the argument and
            the words.
    """
    words = get_args(choices)
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name}={value!r:.80}. Allowed: {', '.join(words)}.")


def check_flag(name: str, value: Any) -> None:
    """Checks that an argument is a bool.

    Raises:
        ValueError: the value is no bool; the message names the argument.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r:.80}. Allowed: True, False.")


def check_number(name: str, value: Any, least: float, most: float = math.inf) -> None:
    """Checks that an argument is a finite number from `least` to `most`.

    Raises:
        ValueError: the value is a bool, no float or int, or outside the range; the
            message names the argument and the range.

    >>> check_number("step", 5.0, 0.001, 1.0)
    Traceback (most recent call last):
    ...
    ValueError: step=5.0. Allowed: a finite number from 0.001 to 1.
    """
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    if not is_number or not least <= value <= min(most, sys.float_info.max):
        upto = f"to {most:g}" if most < math.inf else "on"
        raise ValueError(
            f"{name}={value!r:.80}. Allowed: a finite number from {least:g} {upto}."
        )


def numbers(
    name: str, value: Any, each: str, names: Sequence[str] | None = None
) -> tuple[float, ...]:
    """Converts an argument to a tuple of finite floats of 0 or more.

    Args:
        name: name of the argument.
        value: a sequence or array of numbers.
        each: words that say what each number belongs to, for errors: `each of 3
            nodes`.
        names: names of what the numbers belong to, such as node names; `value` must
            have one number per name. None allows any count.

    Raises:
        ValueError: `value` is no sequence, a number is not allowed, or the count is
            wrong; the message names the argument and the allowed values.
    """
    allowed = f"Allowed: a finite number of 0 or more for {each}."
    if isinstance(value, str | Mapping):
        raise ValueError(f"{name}={value!r:.80}. {allowed}")
    try:
        given = tuple(map(float, value))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}={value!r:.80}. {allowed}") from None
    is_short = names is not None and len(given) != len(names)
    if is_short or not all(0 <= one < math.inf for one in given):
        raise ValueError(f"{name}={list(given)!r:.80}. {allowed}")
    return given
