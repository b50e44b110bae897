"""Seconds that candidates of many divisions send, priced for all of them at once.

Most divisions are taken by few candidates, and what is sent together (`combining`) has
to be priced for each of them: one by one that would take as long as all the rest of the
search. Must not know how candidates are found, or what hides what is sent.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dtft.planner.columns import Total
from dtft.planner.combining import Bundle
from dtft.planner.partition import Division
from dtft.planner.pricing import Sums
from dtft.planner.resting import Resting

Part = tuple[Division, np.ndarray]
"""A division, and the candidates that have it."""


def sending_s(
    resting: Resting, parts: Sequence[Part], sums: Sequence[Sums], zero: np.ndarray
) -> list[np.ndarray]:
    """Seconds of a step of all collectives, if nothing hides any of it.

    Args:
        resting: gathers of arrays that are divided at rest.
        parts: divisions with their candidates.
        sums: of each division what its operators take.
        zero: level of each candidate.

    Returns:
        Of each part the seconds of its candidates.
    """
    columns, rates = resting.prices.columns, resting.prices.rates
    found = [np.zeros(len(rows)) for _, rows in parts]
    asked: list[tuple[Mapping[Bundle, Total], np.ndarray]] = []
    places: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for (division, rows), total, seconds in zip(parts, sums, found, strict=True):
        levels = zero[rows]
        some = [(np.arange(len(rows)), total.sending, total.together)]
        for level in np.unique(levels).tolist():
            gathers = resting.gathers(division, level)
            some.append((np.flatnonzero(levels == level), *gathers))
        for at, alone, together in some:
            points = columns.of[rows[at]]
            asked.append((together, points))
            places.append((seconds, at, alone.at(points)))
    for (seconds, at, alone), more in zip(places, rates.together_s(asked), strict=True):
        seconds[at] += alone + more
    return found
