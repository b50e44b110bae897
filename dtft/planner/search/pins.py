"""Pins: settings of a plan (axis sizes, `zero`, `remat`) that the user has fixed.

Validates them and suggests nearby values.
"""

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dtft.planner.cost import SCHEDULES
from dtft.planner.search.space import REMATS, Choices
from dtft.planner.types import AXES

COUNTS = (*AXES, "microbatches", "zero", "virtual_stages")
"""Settings that take whole numbers."""

PINS = (*COUNTS, "remat", "offload", "schedule", "order", "stage_layers")
"""All settings that the user can fix."""

_MOST = 2**31
"""Numeric pins must be below this number."""

_ELSEWHERE: Mapping[str, str] = {
    "dp": "replica", "data": "replica", "data_parallel": "replica",
    "tp": "tensor", "model": "tensor", "tensor_parallel": "tensor",
    "sp": "sequence", "cp": "sequence", "context": "sequence",
    "pp": "stage", "pipeline": "stage", "pipe": "stage",
    "ep": "expert", "experts": "expert",
    "zero_stage": "zero", "micro_batches": "microbatches", "checkpoint": "remat",
    "accumulation": "microbatches", "gradient_accumulation": "microbatches",
}  # fmt: skip
"""Map from names of knobs in other frameworks to the names in dtft."""

_ABSENT = {
    "stage": "; it needs layers that are alike, and what_if",
    "expert": "; it needs arrays with a dim of experts",
    "sequence": "; it needs a batch with a second dim (positions)",
}
"""Map from an axis to what a search of the axis requires: the end of the error for a
pinned axis that is not searched."""


def check_pins(pins: Mapping[str, Any]) -> None:
    """Checks the names and values of pins, the settings that the user has fixed.

    Args:
        pins: map from the name of a setting, such as `tensor` or `zero`, to its value.

    Raises:
        ValueError: the name of a pin is unknown, the setting can never have the value,
            or `stage_layers` does not agree with another pin.
    """
    for name, value in pins.items():
        if name not in PINS:
            raise ValueError(
                f"{name}={value!r} is not a knob that can be pinned."
                f"{did_you_mean(name)} Allowed: {', '.join(PINS)}."
            )
        allowed = _allowed(name, value)
        if allowed:
            raise ValueError(f"{name}={value!r} is pinned. Allowed: {allowed}.")
    layers = pins.get("stage_layers")
    if layers is None:
        return
    for name, fits in (("stage", len(layers)), ("virtual_stages", 1)):
        if pins.get(name, fits) != fits:
            raise ValueError(
                f"stage_layers={layers!r} and {name}={pins[name]} are pinned. Allowed: "
                f"{name}={fits}. Leave one of the pins out."
            )


def pinned_sizes(pins: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of mesh axes that pins fix; other axes are left out.

    The pin `stage_layers` has the number of layers of each pipeline stage. So it also
    fixes the size of the axis `stage`.

    >>> pinned_sizes({"tensor": 8, "stage_layers": (3, 3, 2), "zero": 1})
    {'stage': 3, 'tensor': 8}
    """
    layers = pins.get("stage_layers")
    sizes = dict(pins) if layers is None else {**pins, "stage": len(layers)}
    return {axis: sizes[axis] for axis in AXES if axis in sizes}


def did_you_mean(name: str) -> str:
    """Returns a hint such as " Did you mean 'tensor'?" for an unknown setting's name.

    If another framework has a setting of this name, such as `tp`, the hint names the
    equal setting here. Otherwise it names the setting with the most similar spelling.
    Returns '' if no setting is similar.

    >>> did_you_mean("tp"), did_you_mean("tesnor"), did_you_mean("colour")
    (" Did you mean 'tensor'?", " Did you mean 'tensor'?", '')
    """
    near = difflib.get_close_matches(name, PINS, n=1)
    known = _ELSEWHERE.get(name, near[0] if near else "")
    return f" Did you mean {known!r}?" if known else ""


def _allowed(name: str, value: Any) -> str:
    """Returns the allowed values of a setting, in words; '' if `value` is allowed."""
    if name == "remat":
        return "" if value in REMATS else ", ".join(REMATS)
    if name == "schedule":
        return "" if value in SCHEDULES else ", ".join(SCHEDULES)
    if name == "offload":
        return "" if isinstance(value, bool) else "True, False"
    if name == "order":
        axes = (
            "a tuple of different axes, outermost on the fabric first, such as "
            f"('replica', 'tensor'); there are {', '.join(AXES)}"
        )
        fits = isinstance(value, tuple | list) and all(axis in AXES for axis in value)
        return "" if fits and len(set(value)) == len(value) else axes
    if name == "stage_layers":
        several = isinstance(value, tuple | list) and len(value) > 0
        fits = several and all(_is_count(number, 1) for number in value)
        layers = (
            "a tuple with the number of layers of each stage, first to last, 1 or more "
            "each, such as (5, 6, 6, 5)"
        )
        return "" if fits else layers
    least = 0 if name == "zero" else 1
    words = f"a whole number, {least} or more, below {_MOST}"
    return "" if _is_count(value, least) else words


def _is_count(value: Any, least: int) -> bool:
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return bool(is_whole and least <= value < _MOST)


def why_not(choices: Choices, name: str, value: Any) -> str:
    """Returns why no candidate can have a value that the user has fixed for a setting.

    The reason does not depend on other pins. Returns '' if no reason is found.

    Args:
        choices: the values that each setting may take.
        name: the setting, such as `tensor` or `zero`.
        value: the value that is fixed.
    """
    if name in AXES:
        return _why_not_axis(choices, name, value)
    if name == "stage_layers":
        return _why_not_axis(choices, "stage", len(value))
    if name == "microbatches" and value > choices.max_microbatches:
        why = choices.why_one_microbatch
        as_why = f", as {why}" if why else ""
        return f"at most {choices.max_microbatches} are possible here{as_why}"
    if name == "microbatches" and choices.batch % value:
        return f"{value} does not divide the batch of {choices.batch}"
    if name in ("zero", "remat") and value not in getattr(choices, name):
        allowed = ", ".join(map(str, getattr(choices, name)))
        return f"only {allowed} can be chosen here"
    return ""


def _why_not_axis(choices: Choices, axis: str, size: int) -> str:
    if axis not in choices.divides:
        searched = ", ".join(choices.divides)
        why = _ABSENT.get(axis, "")
        text = f"this axis is not searched here, only {searched}{why}"
        return text if size > 1 else ""
    if choices.num_devices % size:
        return f"{size} does not divide {choices.num_devices} devices"
    for number in choices.divides[axis]:
        if number % size:
            return f"{size} does not divide {number}, which {axis} has to divide"
    return ""


def nearest(values: np.ndarray, value: int) -> list[int]:
    """Returns the (up to) three values nearest to `value`, ascending.

    >>> nearest(np.array([1, 2, 4, 8, 16]), 6)
    [2, 4, 8]
    """
    distance = np.abs(values - value)
    return sorted(values[np.argsort(distance, kind="stable")[:3]].tolist())
