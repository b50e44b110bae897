"""What counts as the number of a step, whatever loop it comes from. Pure.

A number is made a plain int once, where a user gives it: it becomes a directory's name,
a key, JSON and msgpack, which take other kinds of numbers for something else. Must not
know which steps there are.
"""

import operator
from typing import Any

LARGEST = 2**63 - 1
"""What every place that a step is written to can hold."""


def step_number(step: Any) -> int:
    """The step as a plain int.

    Args:
        step: an int, or what stands for one exactly: a numpy or jax integer scalar.

    Raises:
        ValueError: it is not one, or negative, or too large.

    >>> import numpy as np
    >>> step_number(np.int64(3))
    3
    >>> step_number(True)
    Traceback (most recent call last):
    ValueError: step=True (bool) is no step. Allowed: whole numbers from 0 to 2**63 \
- 1, of Python, numpy or jax. Give an int.
    """
    try:
        number = None if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = None
    if number is None or not 0 <= number <= LARGEST:
        raise ValueError(
            f"step={step!r:.60} ({type(step).__name__}) is no step. Allowed: whole "
            "numbers from 0 to 2**63 - 1, of Python, numpy or jax. Give an int."
        )
    return number
