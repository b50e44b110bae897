"""What a compiled program shows of a plan: whether it fits, whether its bytes agree.

Pure: `compile` makes the programs.
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
    """Bytes of one device, as the compiler assigned them."""

    arguments: int
    outputs: int
    temporaries: int
    """Activations, gradients and buffers that live inside of the step."""
    aliased: int
    """Of the outputs, what takes the place of donated arguments."""

    @property
    def total(self) -> int:
        """Bytes that the step needs while it runs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def floor(self) -> int:
        """Bytes of what goes in and out: on every backend at least this."""
        return self.arguments + self.outputs - self.aliased


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A candidate as it was compiled."""

    name: str
    target: str
    """`cpu`, or the GPU it was compiled for."""
    collectives: tuple[CompiledCollective, ...]
    memory: Memory
    seconds: float
    """What compiling took."""

    @property
    def exact_memory(self) -> bool:
        """Whether temporaries are those of the machine that will run it.

        The CPU compiler has no reduce-scatter, computes 16-bit types in 32 bits and
        keeps what another backend frees: only its arguments and outputs are exact.
        """
        return self.target != "cpu"


@dataclass(frozen=True, kw_only=True)
class CompileFailure:
    """A candidate that could not be compiled."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a plan fits, and by what."""

    fits: bool
    needed_bytes: int
    """The largest of what the plan says and what the compiler found."""
    capacity_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Bytes of one kind of communication along the same axes, in one step."""

    kind: str
    axes: tuple[str, ...]
    predicted_bytes: int
    found_bytes: int
    exceptions: tuple[str, ...] = ()
    """Why the two may differ although the plan is right."""

    @property
    def difference(self) -> float:
        """(predicted - found) / found; infinite if nothing was found.

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
    """Whether a plan fits: no estimate of its bytes is above the capacity.

    One estimate is the analytic model's. The other is the compiler's plus the reserve,
    if the plan was compiled. Of a program compiled for CPU only arguments and outputs
    count, because the temporaries of the CPU backend are not those of another backend.
    A plan that failed to compile does not fit.

    Args:
        plan: what the analytic model says of the candidate.
        compiled: the candidate compiled; None if it was not, then the plan's own number
            decides.
        capacity: bytes of one device.
        reserve: part of `capacity` that allocator and libraries keep, 0 to below 1.

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
        # What the compiler says of arguments includes those in host memory.
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
    """Bytes predicted and found per kind and axes, largest first.

    Bytes are those of all executions in a step, in the program's own types. An
    all-reduce and a reduce-scatter of the same operand count alike; where the compiler
    has one for the other, or a wider type, an exception says so.
    """
    return agreements(plan.collectives, compiled)


def agreements(
    predicted: Iterable[Collective], compiled: Compiled
) -> tuple[Agreement, ...]:
    """`compare` for collectives that are not in a plan yet."""
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
    """Compares a sum that is divided afterwards with one that is divided at once.

    CPU has no reduce-scatter; GPU makes one of an all-reduce whose result only a part
    of is read. Both add up the same operand, so the bytes are the same.
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
