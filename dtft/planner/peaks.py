"""Most bytes alive at a time, of many candidates: activations and gradients.

Decides which course of the program a ZeRO level has (`course`), and looks at its
moments once for all candidates that divide it alike. Must not know seconds, or what
rests in memory throughout.
"""

from functools import cached_property

import numpy as np

from dtft.planner.columns import Columns, distinct
from dtft.planner.course import Course
from dtft.planner.memory import Timeline
from dtft.planner.moments import Moments
from dtft.planner.partition import Division


class Peaks:
    """The fullest moments of one program, under any division."""

    def __init__(self, timeline: Timeline) -> None:
        """Nothing is followed yet.

        Args:
            timeline: of the program.
        """
        self._timeline = timeline

    def of(
        self, division: Division, columns: Columns, points: np.ndarray, zero: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Bytes of a device at the fullest moment.

        Args:
            division: of all of these candidates.
            columns: for which sizes of axes.
            points: of the columns; int [candidates].
            zero: ZeRO levels; int [candidates].

        Returns:
            `activations` and `gradients`; float [candidates].
        """
        courses = {self._course: zero < 3}
        if (zero == 3).any():
            last = self._course_at_level_3
            courses[last] = courses.get(last, False) | (zero == 3)
        found = {name: np.zeros(len(points)) for name in ("activations", "gradients")}
        for course, some in courses.items():
            peaks = _peaks(Moments(course, division), columns, points[some], zero[some])
            found["activations"][some], found["gradients"][some] = peaks
        return found

    @cached_property
    def _course(self) -> Course:
        return Course(self._timeline)

    @cached_property
    def _course_at_level_3(self) -> Course:
        timeline = self._timeline.at_level_3
        return self._course if timeline is self._timeline else Course(timeline)


def _peaks(
    moments: Moments, columns: Columns, points: np.ndarray, zero: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Most bytes at a time of activations and gradients, of points at ZeRO levels."""
    alike = columns.divided(moments.divisors()).of[points]
    first, of = distinct([alike])
    sizes = {axis: column[points[first]] for axis, column in columns.sizes.items()}
    highest = moments.on(sizes)
    found = np.zeros((2, len(points)))
    for level in np.unique(zero).tolist():
        some, peak = zero == level, highest.peak(level)
        found[:, some] = peak.activations[of[some]], peak.gradients[of[some]]
    return found[0], found[1]
