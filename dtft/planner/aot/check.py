"""Compares a plan with its compiled program: whether memory fits, whether bytes agree.

All functions are pure; `compile` makes the programs.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from dtft.planner.aot.hlo import CompiledCollective
from dtft.planner.plan import Collective, Plan

_Key = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the buffers that the compiler assigned on one device."""

    arguments: int
    outputs: int
    temporaries: int
    """Bytes of activations, gradients and buffers that live only within the step."""
    aliased: int
    """Bytes of outputs that reuse the buffers of donated arguments."""
    constants: int = 0
    """Bytes of arrays that the program contains, such as those that the step closes
    over; 0 if XLA has not written its assignment of buffers."""

    @property
    def total(self) -> int:
        """Bytes that the step needs on one device while it runs.

        These are the arguments, the constants, the temporaries, and the outputs that do
        not reuse the buffer of a donated argument.
        """
        return self.floor + self.temporaries

    @property
    def floor(self) -> int:
        """Bytes of all arguments, of outputs with a buffer of their own, and constants.

        Outputs that reuse the buffer of a donated argument are not counted. A step
        needs at least these bytes on every backend.
        """
        return self.arguments + self.outputs - self.aliased + self.constants


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Collectives and memory of a compiled candidate (a plan that may be chosen)."""

    name: str
    target: str
    """`cpu`, or the name of the GPU that the candidate was compiled for."""
    collectives: tuple[CompiledCollective, ...]
    memory: Memory
    seconds: float
    """Seconds of the compilation."""

    @property
    def exact_memory(self) -> bool:
        """Whether the bytes of temporaries are exact; false if the target is `cpu`.

        The CPU compiler has no reduce-scatter, computes 16-bit types in 32 bits, and
        keeps buffers that another backend frees. So only the bytes of arguments and
        outputs are exact for a plan of another backend.
        """
        return self.target != "cpu"


@dataclass(frozen=True, kw_only=True)
class CompileFailure:
    """A candidate that could not be compiled, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a plan fits the memory of a device, with the bytes and the reason."""

    fits: bool
    needed_bytes: int
    """The larger of the plan's and the compiler's estimate of bytes; the plan's if the
    plan was not compiled, or could not be."""
    capacity_bytes: int
    reason: str
    """The verdict in words, with the estimate that it comes from; or why the plan could
    not be compiled."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Predicted and compiled bytes of collectives of one kind along the same axes.

    `predicted_bytes` are those of the plan, `found_bytes` those of the compiled
    program; both are the bytes of all executions in a step.
    """

    kind: str
    axes: tuple[str, ...]
    predicted_bytes: int
    found_bytes: int
    exceptions: tuple[str, ...] = ()
    """Reasons why both numbers may differ although the plan is right."""

    @property
    def difference(self) -> float:
        """Relative error of the predicted bytes: (predicted - found) / found.

        0 if both are 0, infinite if only `found_bytes` is 0.

        >>> one = Agreement(kind="permute", axes=("a",), predicted_bytes=99,
        ...                 found_bytes=100)
        >>> round(one.difference, 6)
        -0.01
        """
        if self.predicted_bytes == self.found_bytes:
            return 0.0
        if self.found_bytes == 0:
            return float("inf")
        return self.predicted_bytes / self.found_bytes - 1


def gate(
    plan: Plan,
    compiled: Compiled | CompileFailure | None,
    capacity: int,
    *,
    reserve: float = 0.05,
) -> Verdict:
    """Decides whether a plan fits: no estimate of its bytes may exceed the capacity.

    One estimate is the plan's own. If the plan was compiled, the other estimate is the
    compiler's bytes without the arguments in host memory, plus the share `reserve` of
    the capacity. For a program compiled for CPU, the compiler's bytes are those of
    arguments and outputs only, because other backends have other temporaries. A plan
    that failed to compile does not fit.

    Args:
        plan: the plan of the candidate, with its predicted bytes.
        compiled: the compiled candidate, or the failure to compile it; None if the
            candidate was not compiled, so that only the plan's bytes count.
        capacity: bytes of memory of one device.
        reserve: share of `capacity` that allocator and libraries keep, 0 to below 1.

    Raises:
        ValueError: `reserve` or `capacity` is out of its range.
    """
    if not 0 <= reserve < 1 or capacity <= 0:
        raise ValueError(
            f"reserve={reserve}, capacity={capacity}: a part of 0 to below 1, and "
            "bytes above 0 are allowed. Give the memory of one device."
        )
    if isinstance(compiled, CompileFailure):
        return Verdict(
            fits=False,
            needed_bytes=plan.memory_bytes,
            capacity_bytes=capacity,
            reason=f"it could not be compiled: {compiled.reason}",
        )
    needs = {"the analytic model": plan.memory_bytes}
    if compiled is not None:
        kept = int(reserve * capacity)
        memory = compiled.memory
        total = memory.total if compiled.exact_memory else memory.floor
        # The compiler counts arguments in host memory too.
        needs[f"compiled for {compiled.target}"] = kept + total - plan.host_bytes
    source, needed = max(needs.items(), key=lambda item: item[1])
    fits = needed <= capacity
    verb = "fits" if fits else "does not fit"
    return Verdict(
        fits=fits,
        needed_bytes=needed,
        capacity_bytes=capacity,
        reason=f"{verb}: {needed:,} of {capacity:,} bytes ({source})",
    )


def compare(plan: Plan, compiled: Compiled) -> tuple[Agreement, ...]:
    """Compares the predicted bytes of collectives with those of the compiled program.

    Returns one entry for each pair of a kind of collective and its mesh axes. The entry
    with the most bytes, predicted or compiled, is first. Bytes are of all executions in
    a step. If the compiler widened a dtype (such as 16 to 32 bits), the bytes are those
    before widening.

    The compiler may replace an all-reduce by a reduce-scatter, or the reverse. If the
    program has fewer bytes of one of them than predicted, and more of the other,
    predicted bytes are moved from the first to the second. `Agreement.exceptions` lists
    such replacements, widened dtypes, and loops with an unknown trip count.
    """
    return agreements(plan.collectives, compiled)


def agreements(
    predicted: Iterable[Collective], compiled: Compiled
) -> tuple[Agreement, ...]:
    """Compares the bytes of predicted collectives with those of a compiled program.

    Returns one entry for each kind of collective over the same mesh axes, the entry
    with the most bytes first. `compare` does the same for a plan, and describes how
    widened dtypes and replaced all-reduces are counted.

    Args:
        predicted: the predicted collectives, such as those of a plan.
        compiled: the compiled program.
    """
    wanted: Counter[_Key] = Counter()
    found: Counter[_Key] = Counter()
    notes: dict[_Key, set[str]] = defaultdict(set)
    for one in predicted:
        wanted[one.kind, tuple(sorted(one.axes))] += one.num_bytes * one.trips
    for one in compiled.collectives:
        key = one.kind, tuple(sorted(one.axes))
        found[key] += one.own_bytes * one.trips
        notes[key].update(_exceptions(one))
    for _, axes in {*wanted, *found}:
        _exchange(wanted, found, notes, axes)
    keys = [key for key in {*wanted, *found} if wanted[key] or found[key]]
    keys.sort(key=lambda key: (-max(wanted[key], found[key]), key))
    return tuple(
        Agreement(
            kind=kind,
            axes=axes,
            predicted_bytes=wanted[kind, axes],
            found_bytes=found[kind, axes],
            exceptions=tuple(sorted(notes[kind, axes])),
        )
        for kind, axes in keys
    )


def _exchange(
    wanted: Counter[_Key],
    found: Counter[_Key],
    notes: dict[_Key, set[str]],
    axes: tuple[str, ...],
) -> None:
    """Moves predicted bytes between all-reduce and reduce-scatter to match the program.

    If the program has fewer bytes of one kind than predicted, and more of the other,
    moves predicted bytes from the first kind to the second: as many as the smaller of
    the two differences.

    XLA's CPU backend has no reduce-scatter. XLA's GPU backend replaces an all-reduce by
    a reduce-scatter if only a part of the result is read. Both add up the same operand,
    so the replacement has equal bytes.

    Args:
        wanted: predicted bytes by kind of collective and mesh axes; changed in place.
        found: bytes of the compiled program by kind and axes.
        notes: exceptions by kind and axes; gets one where bytes were moved.
        axes: the mesh axes to match.
    """
    for first, second in itertools.permutations(("all_reduce", "reduce_scatter")):
        planned, real = (first, axes), (second, axes)
        missing = wanted[planned] - found[planned]
        moved = min(missing, found[real] - wanted[real])
        if moved > 0:
            wanted[planned] -= moved
            wanted[real] += moved
            notes[real].add(f"{second} for {first}")


def _exceptions(one: CompiledCollective) -> Iterable[str]:
    if one.widened:
        yield "widened"
    if not one.trips_known:
        yield "trips unknown"
