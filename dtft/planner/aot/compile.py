"""Compiles candidates ahead of time, for devices that this machine does not have.

A step is traced and lowered here, over a mesh without devices; what comes out is a
module of StableHLO with its shardings and donations, the same that `jit` would hand to
XLA. A child process that has the devices (as many fake CPU devices as needed, or XLA's
GPU compiler) compiles it and sends back what it communicates and needs; as many as
there are cores do so at a time. A child ends by itself when nobody listens, is killed
at the deadline, and is replaced when the compiler crashes.
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
"""Each takes about 1 GB."""


@dataclass(frozen=True, kw_only=True)
class LoweredStep:
    """A step with its shardings, lowered: all that a compiler needs of it."""

    name: str
    mesh: Mapping[str, int]
    """Axis name to size, slowest-varying first."""
    target: str
    """`cpu`, or a name of `gpu_targets.TARGETS`."""
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
        step: a function of arrays, or what `jax.jit` made of one (then `out_specs` and
            `donate` are its own). Constraints inside may be bare `PartitionSpec`s.
        args: its positional arguments: trees of arrays or `jax.ShapeDtypeStruct`s.
        mesh: axis name to size, slowest-varying first.
        specs: for each argument a `PartitionSpec`, or a tree of them that begins the
            argument's tree.
        out_specs: the same for the result; None for what XLA chooses.
        donate: numbers of the arguments whose buffers the results may take.
        target: `cpu`, or the GPU to compile for.
        name: what the candidate is called in results.

    Raises:
        ValueError: JAX refuses it, such as a spec that does not divide its array; or
            `target` is unknown.
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
    """JAX's name of what to lower for: `cpu`, or `cuda` for a GPU.

    Raises:
        ValueError: there is no such target.
    """
    return "cpu" if target == "cpu" else gpu_targets.gpu_target(target).platform


def candidate(
    lowered: jax.stages.Lowered, *, mesh: Mapping[str, int], target: str, name: str = ""
) -> LoweredStep:
    """What JAX has lowered already, for the platform of the target.

    Args:
        lowered: over a mesh of these axes, with or without devices.
        mesh: axis name to size, slowest-varying first.
        target: `cpu`, or the GPU to compile for.
        name: what the candidate is called in results.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    code = io.BytesIO()
    module.operation.write_bytecode(code)
    return LoweredStep(
        name=name, mesh=dict(mesh), target=target, module=code.getvalue()
    )


def place(tree: Any, specs: Any, mesh: Any) -> Any:
    """Shapes of `tree` with shardings of `specs` on `mesh`; `specs` may be a prefix."""
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
    """Compiles candidates in child processes, several at a time where there are cores.

    A generator is asked for the next candidate while children compile those before.
    Children are started per target, and one more whenever a compiler crashed.

    Args:
        candidates: of `lower`; give a mesh of any size.
        deadline_s: seconds for all of them, starting the children included. What is
            not compiled by then is a failure.
        coming: target and number of devices of candidates that are not made yet:
            children start while the first of them is.

    Returns:
        One result per candidate, in their order, but for the last ones if the deadline
        passed before they were made.
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
    """Candidates on their way through several lanes, all for the same devices."""

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
        """Children for the first of these that are for the same devices."""
        for devices in coming[: _num_children()]:
            if devices == coming[0]:
                self._lanes.append(_Lane(devices, self._end, self._deadline_s))

    def add(self, candidate: LoweredStep) -> None:
        """Gives it to the child that has least to do; holds it while all have enough.

        What a child was given stays its own, however long that takes: so it is given
        as little as will do until the next candidate is made.
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
        """Hands out what is held, to children with less than so many to do."""
        while self._held:
            lane = min(self._lanes, key=lambda lane: lane.num_waiting)
            if lane.num_waiting >= most:
                break
            lane.add(*self._held.popleft())

    def finish(self) -> None:
        """Waits for all that was added; takes what comes first, from any child."""
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
    """Candidates on their way through one child after another, first in first out."""

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
        """Takes the answers that are there."""
        while self._waiting and self.child.has_answer():
            answer = self.child.receive()
            if answer is None and time.monotonic() >= self._end:
                answer = f"not compiled within deadline_s={self._deadline_s:g} seconds"
            elif answer is None:  # it crashed of one; the others get a new child
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
