"""Priced candidates: their time and memory, which of them fit, and their ranking.

`search` predicts the time and memory. This module ranks the candidates by them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dtft.planner.search.space import Space
from dtft.planner.spmd import ShardingAssignment

TERMS = ("compute", "collectives", "bubble", "optimizer", "offload", "launch")
MEMORY = (
    "parameters", "gradients", "optimizer", "activations", "batch", "constants",
    "reserve",
)  # fmt: skip
IDLE = 4.0
"""Factor on the step time of a mesh with redundant work, when meshes are ranked.

Devices of such a mesh repeat the work of other devices, as if fewer devices were used.
The mesh is worth selecting where communication takes far longer than computing
everything on each device (slow links). A gain below this factor may be an error of the
prediction, which is off by up to this factor for small messages.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Priced:
    """Every candidate of a space, with its time and memory.

    `space` has the candidates. `capacity` is the bytes of memory of a device,
    `host_capacity` the bytes of its host's memory that a device may use.
    """

    space: Space
    terms: Mapping[str, np.ndarray]
    """Predicted seconds of a step for each of `TERMS`; float [candidates] each."""
    memory: Mapping[str, np.ndarray]
    """Predicted bytes on a device for each of `MEMORY`; float [candidates] each."""
    divisions: Sequence[ShardingAssignment]
    """The distinct divisions of all candidates: which axes divide which dims."""
    division: np.ndarray
    """Position in `divisions` of each candidate's division; int [candidates]."""
    idle: np.ndarray
    """Whether a candidate has an axis that divides less than 1 % (`NEARLY_NONE`) of the
    work of matmuls, convolutions and kernels, so that some devices repeat the work of
    others; bool [candidates]."""
    host: np.ndarray
    """Bytes of host memory that each device needs; [candidates]."""
    host_capacity: int
    capacity: int

    def division_of(self, at: int) -> ShardingAssignment:
        """Returns which mesh axes divide which dims in a candidate.

        Args:
            at: the index of the candidate.
        """
        return self.divisions[self.division[at]]

    def memory_of(self, at: int) -> dict[str, float]:
        """Returns the bytes of a candidate on a device by term (`MEMORY`).

        The term `constants` is left out if it is 0. `at` is the index of the candidate.
        """
        found = {name: float(self.memory[name][at]) for name in MEMORY}
        return {n: each for n, each in found.items() if each or n != "constants"}

    def where(self, rows: np.ndarray) -> "Priced":
        """Returns the candidates that indices or a mask select."""

        def some(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: column[rows] for name, column in columns.items()}

        return replace(
            self,
            space=self.space.where(rows),
            terms=some(self.terms),
            memory=some(self.memory),
            division=self.division[rows],
            idle=self.idle[rows],
            host=self.host[rows],
        )

    def preferring(self, other: "Priced", rows: np.ndarray) -> "Priced":
        """Returns all candidates, some of them with the better of two divisions.

        A division says which mesh axes divide which dims; time and memory depend on it.
        The division of `other` is the better one in two cases:

        * It fits in memory, and the division of this object does not fit or ranks
          behind it (has a larger `worth_s`).
        * Neither division fits, and only that of this object leaves devices idle.

        Args:
            other: the same candidates with other divisions.
            rows: indices of the candidates to compare, for which `other` has time and
                memory; int [rows]. All others keep their division.
        """
        better = other.fits & (~self.fits | (other.worth_s < self.worth_s))
        better |= ~other.fits & ~self.fits & self.idle & ~other.idle
        taken = np.zeros(len(self.idle), bool)
        taken[rows] = better[rows]

        def either(one: np.ndarray, two: np.ndarray) -> np.ndarray:
            return np.where(taken, two, one)

        def each(
            one: Mapping[str, np.ndarray], two: Mapping[str, np.ndarray]
        ) -> dict[str, np.ndarray]:
            return {name: either(column, two[name]) for name, column in one.items()}

        moved = other.division + len(self.divisions)
        return replace(
            self,
            terms=each(self.terms, other.terms),
            memory=each(self.memory, other.memory),
            divisions=(*self.divisions, *other.divisions),
            division=either(self.division, moved),
            idle=either(self.idle, other.idle),
            host=either(self.host, other.host),
        )

    @cached_property
    def step_s(self) -> np.ndarray:
        """Seconds of a step, the sum of its terms; float [candidates].

        If the batch was rounded up, its padding is not counted.
        """
        return np.sum([self.terms[name] for name in TERMS], axis=0)

    @cached_property
    def worth_s(self) -> np.ndarray:
        """Seconds by which candidates are ranked; float [candidates].

        These are the seconds of a step (`step_s`), multiplied by 4 (`IDLE`) for
        candidates with devices that repeat the work of others (`idle`).
        """
        return np.where(self.idle, IDLE * self.step_s, self.step_s)

    @cached_property
    def memory_bytes(self) -> np.ndarray:
        """Bytes on a device, the sum of its terms; float [candidates]."""
        return np.sum([self.memory[name] for name in MEMORY], axis=0)

    @cached_property
    def fits(self) -> np.ndarray:
        """Whether a candidate fits in device and host memory; bool [candidates]."""
        roomy = self.memory_bytes <= self.capacity
        return roomy & (self.host <= self.host_capacity)

    @cached_property
    def ranking(self) -> np.ndarray:
        """Positions of the candidates, best first; int [candidates].

        Candidates that fit in memory are first, by their seconds (`worth_s`). The
        others follow by their bytes on a device; of these, candidates with devices that
        repeat the work of others (`idle`) are last. Equal candidates are ordered by
        bytes, then by the number of microbatches, then as in `space`.
        """
        first = np.where(self.fits, self.worth_s, self.memory_bytes)
        keys = (
            np.arange(len(first)),
            self.space.columns["microbatches"],
            np.round(self.memory_bytes),
            _rounded(first),
            self.idle & ~self.fits,
            ~self.fits,
        )
        return np.lexsort(keys)


def _rounded(values: np.ndarray) -> np.ndarray:
    """Rounds values to ten significant digits.

    Rounding errors of sums then do not decide the ranking.
    """
    with np.errstate(divide="ignore"):
        digits = np.floor(np.log10(np.maximum(values, 1e-300)))
    scale = 10.0 ** (digits - 9)
    return np.round(values / scale) * scale


def joined(one: Priced, other: Priced) -> Priced:
    """Concatenates two sets of candidates on the same pool into one set.

    Both sets must have the same orders of axes (`Space.orders`).
    """

    def both(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
        return {name: np.concatenate([first[name], second[name]]) for name in first}

    return replace(
        one,
        space=one.space.joined(other.space),
        terms=both(one.terms, other.terms),
        memory=both(one.memory, other.memory),
        divisions=(*one.divisions, *other.divisions),
        division=np.concatenate([one.division, other.division + len(one.divisions)]),
        idle=np.concatenate([one.idle, other.idle]),
        host=np.concatenate([one.host, other.host]),
    )
