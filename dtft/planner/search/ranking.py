"""Candidates with their time and memory: what fits, and in which order they are ranked.

Values, and the ranking; how they come about is `search`'s business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dtft.planner.search.space import Space
from dtft.planner.spmd import ShardingAssignment

TERMS = ("compute", "collectives", "bubble", "optimizer", "offload", "launch")
MEMORY = ("parameters", "gradients", "optimizer", "activations", "batch", "reserve")
IDLE = 4.0
"""How many times faster a mesh must be whose devices repeat each other's work.

It stands for fewer devices: worth taking where sending takes far longer than computing
all (slow links), and not where it may be an error of the prediction, which for small
messages is up to this much.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Priced:
    """Every candidate of a space with its time and memory."""

    space: Space
    terms: Mapping[str, np.ndarray]
    """Seconds by term; each one entry per candidate."""
    memory: Mapping[str, np.ndarray]
    """Bytes of a device by term."""
    divisions: Sequence[ShardingAssignment]
    """Which axes divide which dims, for all candidates."""
    division: np.ndarray
    """For each candidate which of the divisions it has."""
    idle: np.ndarray
    """Candidates with an axis that divides no product: devices that repeat the work
    of others. bool."""
    host: np.ndarray
    """Bytes of host memory that each device needs."""
    host_capacity: int
    capacity: int

    def division_of(self, at: int) -> ShardingAssignment:
        """Which axes divide which dims in a candidate."""
        return self.divisions[self.division[at]]

    def where(self, rows: np.ndarray) -> "Priced":
        """Some of the candidates."""

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

    @cached_property
    def step_s(self) -> np.ndarray:
        """Seconds of a step; of a rounded-up batch the part that was asked for."""
        return np.sum([self.terms[name] for name in TERMS], axis=0)

    @cached_property
    def worth_s(self) -> np.ndarray:
        """Seconds by which candidates are ranked; see `IDLE`."""
        return np.where(self.idle, IDLE * self.step_s, self.step_s)

    @cached_property
    def memory_bytes(self) -> np.ndarray:
        """Bytes of a device."""
        return np.sum([self.memory[name] for name in MEMORY], axis=0)

    @cached_property
    def fits(self) -> np.ndarray:
        """Which candidates have room."""
        roomy = self.memory_bytes <= self.capacity
        return roomy & (self.host <= self.host_capacity)

    @cached_property
    def ranking(self) -> np.ndarray:
        """Candidates that fit before those that do not; faster before slower.

        What does not fit is ordered by how little it lacks, idle devices last. Ties:
        fewer bytes, then fewer microbatches, then the order of the space.
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
    """To nine digits: sums in another order must not decide a ranking."""
    with np.errstate(divide="ignore"):
        digits = np.floor(np.log10(np.maximum(values, 1e-300)))
    scale = 10.0 ** (digits - 9)
    return np.round(values / scale) * scale


def joined(one: Priced, other: Priced) -> Priced:
    """The candidates of both, of the same pool and orders."""

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
