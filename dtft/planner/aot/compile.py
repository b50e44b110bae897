"""Compiles candidate plans ahead of time, for devices that this machine lacks.

This process traces and lowers a step over a mesh without devices. The result is a
module of StableHLO with shardings and donations, as `jit` would pass it to XLA. A child
process with the devices (fake CPU devices, or XLA's GPU compiler) compiles the module
and returns its collectives and memory. Several children run at a time, at most one per
core and at most four in all. A child ends when its parent closes the pipe. A child
is killed at the deadline, and replaced if the compiler crashes.
"""

import io
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from dtft.planner.aot import gpu_targets
from dtft.planner.aot.check import Compiled, CompileFailure, Memory
from dtft.planner.aot.worker import TAIL, Answer, Child, wait_for_any

_MAX_CHILDREN = 4
"""Largest number of child processes that compile at a time; each takes about 1 GB of
memory."""


@dataclass(frozen=True, kw_only=True)
class LoweredStep:
    """A candidate's step, lowered with its shardings: what a child process compiles."""

    name: str
    mesh: Mapping[str, int]
    """Map from an axis to its size, slowest-varying axis first."""
    target: str
    """`cpu`, or a name of `gpu_targets.GPU_TARGETS`."""
    module: bytes
    """StableHLO, as MLIR bytecode of this version of JAX."""


def lower(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: Mapping[str, int],
    specs: Sequence[Any],
    out_specs: Any = None,
    donate: Sequence[int] = (),
    target: str = "cpu",
    name: str = "",
) -> LoweredStep:
    """Traces and lowers a step for a mesh of devices that need not exist.

    Args:
        step: a function of arrays, or the result of `jax.jit`; a jitted step keeps its
            shardings of results and its donations, and `out_specs` and `donate` have no
            effect. Constraints inside may be bare `PartitionSpec`s.
        args: positional arguments of the step: trees of arrays or
            `jax.ShapeDtypeStruct`s.
        mesh: map from an axis to its size, slowest-varying axis first.
        specs: for each argument, a `PartitionSpec`, or a tree of `PartitionSpec`s that
            is a prefix of the argument's tree.
        out_specs: a `PartitionSpec` or tree like those of `specs`, for the result; None
            lets XLA choose.
        donate: numbers of the arguments whose buffers the results may reuse.
        target: `cpu`, or the GPU to compile for.
        name: name of the candidate in results.

    Raises:
        ValueError: a spec does not divide its array, `specs` does not have one entry
            per argument, or `target` is unknown.
    """
    platform = platform_of(target)
    devices = AbstractMesh(
        tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh)
    )
    placed = [place(arg, spec, devices) for arg, spec in zip(args, specs, strict=True)]
    jitted: Any = step
    if not hasattr(step, "trace"):
        jitted = jax.jit(
            step, donate_argnums=tuple(donate), **_out_shardings(out_specs, devices)
        )
    with jax.sharding.use_abstract_mesh(devices):
        lowered = jitted.trace(*placed).lower(lowering_platforms=(platform,))
    return candidate(lowered, mesh=mesh, target=target, name=name)


def platform_of(target: str) -> str:
    """Returns JAX's name of the platform to compile for: `cpu`, or `cuda` for a GPU.

    Raises:
        ValueError: `target` is neither `cpu` nor a name of `gpu_targets.GPU_TARGETS`.
    """
    return "cpu" if target == "cpu" else gpu_targets.gpu_target(target).platform


def candidate(
    lowered: jax.stages.Lowered, *, mesh: Mapping[str, int], target: str, name: str = ""
) -> LoweredStep:
    """Makes a `LoweredStep` from a step that JAX has lowered.

    Args:
        lowered: the step, lowered for the target's platform over a mesh of these axes,
            with or without devices.
        mesh: map from an axis to its size, slowest-varying axis first.
        target: `cpu`, or the GPU to compile for.
        name: name of the candidate in results.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    code = io.BytesIO()
    module.operation.write_bytecode(code)
    return LoweredStep(
        name=name, mesh=dict(mesh), target=target, module=code.getvalue()
    )


def place(tree: Any, specs: Any, mesh: Any) -> Any:
    """Makes ShapeDtypeStructs of the arrays of `tree`, with shardings on `mesh`.

    `specs` is a tree of PartitionSpecs that is a prefix of `tree`.
    """
    shardings = _shardings(specs, mesh)
    return jax.tree.map(
        lambda sharding, part: jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=sharding
            ),
            part,
        ),
        shardings,
        tree,
    )


def compile_all(
    candidates: Iterable[LoweredStep],
    *,
    deadline_s: float = 60.0,
    coming: Sequence[tuple[str, int]] = (),
) -> tuple[Compiled | CompileFailure, ...]:
    """Compiles candidate plans in child processes, several at a time.

    If `candidates` is a generator, children compile while it makes the next candidate.
    Each child compiles for one target (`cpu` or a GPU) and number of devices. A child
    that crashed is replaced.

    Args:
        candidates: results of `lower`, for meshes of any size.
        deadline_s: seconds for all candidates, including the start of children. A
            candidate that is not compiled in time is a failure.
        coming: target and number of devices of each candidate that is to be made, so
            that children start while the first candidate is made.

    Returns:
        One result per candidate, in the order of candidates. Candidates that the
        generator had not made before the deadline have no result.
    """
    run = _CompileQueue(deadline_s)
    try:
        run.start(coming)
        for candidate in candidates:
            if run.over:
                break
            run.add(candidate)
        run.finish()
    finally:
        run.stop()
    return tuple(run.results[number] for number in sorted(run.results))


class _CompileQueue:
    """Gives candidate plans to child processes that compile, and collects the results.

    All children compile for the same target (`cpu` or a GPU) and number of devices. For
    a candidate with another target or number, the children finish their candidates and
    are replaced.
    """

    def __init__(self, deadline_s: float) -> None:
        self.results: dict[int, Compiled | CompileFailure] = {}
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s
        self._lanes: list[_Lane] = []
        self._held: deque[tuple[int, LoweredStep]] = deque()
        self._added = 0

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def start(self, coming: Sequence[tuple[str, int]]) -> None:
        """Starts children before the first candidate is made.

        `coming` has the target and number of devices of each candidate that is to be
        made. Only its first entries count: as many as children may run (one per core,
        at most four). Starts a child for the first entry, and another child for each
        further entry that is equal to the first.
        """
        for devices in coming[: _num_children()]:
            if devices == coming[0]:
                self._lanes.append(_Lane(devices, self._end, self._deadline_s))

    def add(self, candidate: LoweredStep) -> None:
        """Queues a candidate for a child that has fewer than two without a result.

        First starts another child if all children have candidates without a result, and
        more children are allowed. Of several children, the one with the fewest such
        candidates gets the new one. If every child has two, the new candidate waits in
        this process, because a sent candidate cannot move to another child.
        """
        if self._lanes and self._lanes[0].devices != _devices(candidate):
            self.finish()
            self.stop()
        for lane in self._lanes:
            lane.collect(self.results)
        if len(self._lanes) < _num_children() and all(
            lane.num_waiting for lane in self._lanes
        ):
            lane = _Lane(_devices(candidate), self._end, self._deadline_s)
            self._lanes.append(lane)
        self._held.append((self._added, candidate))
        self._added += 1
        self._give(most=2)

    def _give(self, most: int) -> None:
        """Sends waiting candidates to children until each child has `most` candidates.

        The candidate that has waited longest is sent first, to the child that has the
        fewest candidates without a result.
        """
        while self._held:
            lane = min(self._lanes, key=lambda lane: lane.num_waiting)
            if lane.num_waiting >= most:
                break
            lane.add(*self._held.popleft())

    def finish(self) -> None:
        """Waits until all candidates that were added have results."""
        self._give(most=1)
        while busy := [lane for lane in self._lanes if lane.num_waiting]:
            wait_for_any([lane.child for lane in busy])
            for lane in busy:
                lane.collect(self.results)
            self._give(most=1)

    def stop(self) -> None:
        for lane in self._lanes:
            lane.stop()
        self._lanes.clear()


class _Lane:
    """One child process, and the candidates sent to it that have no result yet.

    If the child crashes, the first of these candidates gets a failure as its result,
    and a new child gets the others.
    """

    def __init__(self, devices: tuple[str, int], end: float, deadline_s: float) -> None:
        self.devices = devices
        self._end, self._deadline_s = end, deadline_s
        self._waiting: deque[tuple[int, LoweredStep]] = deque()
        self.child = Child(*devices, end)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, number: int, candidate: LoweredStep) -> None:
        self._waiting.append((number, candidate))
        self._send(candidate)

    def collect(self, results: dict[int, Compiled | CompileFailure]) -> None:
        """Adds the results that have arrived to `results`, without waiting.

        A key is the number of a candidate, from 0 in the order in which candidates were
        added. If the child crashed, its first candidate gets a failure, and a new child
        gets the others. After the deadline, candidates without an answer get a failure.
        """
        while self._waiting and self.child.has_answer():
            answer = self.child.receive()
            if answer is None and time.monotonic() >= self._end:
                answer = f"not compiled within deadline_s={self._deadline_s:g} seconds"
            elif answer is None:  # the first candidate crashed the child
                answer = f"the compiler crashed: {self.child.stop()}"
                self.child = Child(*self.devices, self._end)
                for _, candidate in list(self._waiting)[1:]:
                    self._send(candidate)
            number, candidate = self._waiting.popleft()
            results[number] = _result(candidate, answer)

    def stop(self) -> None:
        self.child.stop()

    def _send(self, candidate: LoweredStep) -> None:
        self.child.send(candidate.module, candidate.mesh)


def _num_children() -> int:
    return min(_MAX_CHILDREN, os.cpu_count() or 1)


def _devices(candidate: LoweredStep) -> tuple[str, int]:
    return candidate.target, math.prod(candidate.mesh.values())


def _result(candidate: LoweredStep, answer: Answer) -> Compiled | CompileFailure:
    if isinstance(answer, str):
        return CompileFailure(name=candidate.name, reason=answer[:TAIL])
    return Compiled(
        name=candidate.name,
        target=candidate.target,
        collectives=answer["collectives"],
        memory=Memory(**answer["memory"]),
        seconds=answer["seconds"],
    )


def _out_shardings(out_specs: Any, mesh: AbstractMesh) -> dict[str, Any]:
    if out_specs is None:
        return {}
    return {"out_shardings": _shardings(out_specs, mesh)}


def _shardings(specs: Any, mesh: Any) -> Any:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda part: isinstance(part, PartitionSpec),
    )
