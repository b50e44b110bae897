"""Checks the arguments of `make_placed_step`; errors name the argument.

Defines the allowed values of nodes, devices, seconds and weights of microbatches.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtft.parallel.planning import check_arrays, check_function, check_optimizer
from dtft.planner.arguments import check_whole, numbers


def check_given(
    loss: Any, optimizer: Any, params: Any, batch: Any, microbatches: Any
) -> None:
    """Checks arguments of `make_placed_step` before the loss is traced.

    Raises:
        ValueError: an argument has a type or value that is not allowed; the message
            says which types or values are allowed.
    """
    check_function("loss", loss)
    check_optimizer(optimizer)
    check_arrays("params", params)
    check_arrays("batch", batch)
    check_whole("microbatches", microbatches, 1)


def device_table(devices: Any) -> dict[Any, Any]:
    """Converts a sequence or a mapping of devices to a dict.

    The keys are the positions in a sequence, or the keys of a mapping.

    Raises:
        ValueError: the argument is neither a sequence nor a mapping, or has a value
            that is no JAX device.
    """
    is_row = isinstance(devices, Sequence | np.ndarray) and not isinstance(devices, str)
    if not is_row and not isinstance(devices, Mapping):
        raise ValueError(
            f"devices={devices!r:.80} is neither a sequence nor a mapping. {_ALLOWED}"
        )
    table = dict(devices) if isinstance(devices, Mapping) else dict(enumerate(devices))
    for key, device in table.items():
        if not isinstance(device, jax.Device):
            raise ValueError(
                f"devices[{key!r}]={device!r:.80} is no device of JAX. {_ALLOWED}"
            )
    return table


_ALLOWED = (
    "Allowed: devices of JAX, such as jax.devices(), in the order of nodes; or a "
    "mapping to them from numbers of nodes, or from a placement's names, types and "
    "platforms."
)


def node_numbers(nodes: Any) -> tuple[int, ...]:
    """Converts node numbers, one for each operator, to a tuple of ints.

    Raises:
        ValueError: `nodes` is not iterable, or has a value that is not a whole number
            of 0 or more.
    """
    try:
        given = list(nodes)
        for node in given:
            check_whole("nodes", node, 0)
    except (TypeError, ValueError):
        raise ValueError(
            f"nodes={nodes!r:.80} is neither a placement nor numbers of nodes. "
            "Allowed: what dtft.planner.place(...) returned, or for each operator a "
            "whole number of 0 or more."
        ) from None
    return tuple(map(int, given))


def check_nodes(nodes: Sequence[int], devices: Mapping[Any, Any]) -> None:
    """Checks that every node has a device.

    Raises:
        ValueError: a node has no device; the message names the first such node.
    """
    missing = sorted(set(nodes) - set(devices))
    if missing:
        raise ValueError(
            f"nodes has node {missing[0]}, for which devices has no device. It has "
            f"nodes {list(devices)}: add one, or place operators on these only."
        )


def operator_seconds(seconds: Any, num_operators: int) -> tuple[float, ...]:
    """Converts the seconds of operators to a tuple of floats.

    Raises:
        ValueError: `seconds` is not iterable, has another number of values than
            `num_operators`, or has a value that is not a finite number of 0 or more.
    """
    found = numbers("seconds", seconds, "each operator; or leave seconds out")
    if len(found) != num_operators:
        raise ValueError(
            f"seconds has {len(found)} entries, but nodes has {num_operators}. Give "
            "one for each operator, or leave seconds out."
        )
    return found


def check_weight(weight: Any, part: Any) -> None:
    """Checks that a weight is a function from a microbatch to a scalar.

    A function that needs values, and not only shapes, is checked only when a step calls
    it.

    Args:
        weight: the function to check.
        part: ShapeDtypeStructs of a microbatch.

    Raises:
        ValueError: the weight cannot be called, or does not return a scalar.
    """
    if not callable(weight):
        raise ValueError(
            f"weight={weight!r:.80} cannot be called. Allowed: a function "
            "weight(batch) -> scalar, or None: all parts count the same."
        )
    found: list[Any] = []

    def asked(part: Any) -> int:
        found.append(weight(part))
        return 0

    try:
        jax.eval_shape(asked, part)
    except jax.errors.JAXTypeError:
        return  # the weight needs values, for numpy or float(...)
    _check_scalar(found[0])


def part_weights(weight: Any, parts: Sequence[Any]) -> list[float]:
    """Computes the weight of each microbatch of `parts`; 1.0 if `weight` is None.

    The weights are divided by the least power of two for which all are below 1, so that
    cotangents and sums of float16 stay finite.

    Raises:
        ValueError: a weight is no scalar, negative or not finite, or all weights are 0.
    """
    if weight is None:
        return [1.0] * len(parts)
    found = [weight(part) for part in parts]
    for one in found:
        _check_scalar(one)
    values = [float(one) for one in found]
    if not (min(values) >= 0 and 0 < sum(values) < np.inf):
        raise ValueError(
            f"weight(batch) is {values!r:.80} for the microbatches. Allowed: finite "
            "numbers of 0 or more, one of them above 0: means are over their sum."
        )
    _, exponent = math.frexp(max(values))
    return [math.ldexp(value, -exponent) for value in values]


def _check_scalar(value: Any) -> None:
    is_number = isinstance(value, bool | int | float | np.generic)
    if is_number or (hasattr(value, "dtype") and np.shape(value) == ()):
        return
    words = np.shape(value) if hasattr(value, "dtype") else type(value).__name__
    raise ValueError(
        f"weight(batch) returns {words}. Allowed: a scalar, such as the number of "
        "tokens of the batch that it is given."
    )
