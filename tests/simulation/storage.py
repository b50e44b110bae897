"""Simulated storage tier and the processes that write to it.

`HostExports` is the real one; the exporter is a part of a world of writers that ends
when all have written. Storage may be slow, full, hung or away.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtft.checkpoint.managers.progress import ProgressBoard
from dtft.checkpoint.storage.export_plan import export_world
from dtft.elastic.host.export import HostExports
from dtft.elastic.job import AgentConfig
from tests.simulation.memory import SimHolder, right
from tests.simulation.network import Process
from tests.simulation.scheduler import Blocked, Scheduler

AWAY_S = 0.5


@dataclass(kw_only=True)
class _Group:
    """The exporters that write one step together."""

    world: int
    members: "dict[int, SimExporter]" = field(default_factory=dict)
    digests: dict[str, bytes] = field(default_factory=dict)


class Storage:
    """The directory that all hosts share."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self.rng = scheduler, scheduler.rng
        self.steps: dict[int, dict[str, bytes]] = {}
        """Step to the digest of each slice."""
        self.away = self.full = self.hung = False
        self.slow_s = 0.0
        self.keep = 3
        self._groups: dict[tuple, _Group] = {}
        self._waiting: list[Callable[[], None]] = []
        self.began: Callable[[int], None] = lambda step: None

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong with it."""
        return not (self.away or self.full or self.hung or self.slow_s > 1)

    def when_well(self, then: Callable[[], None]) -> None:
        """Calls `then` now, or when storage does not hang any more."""
        if self.hung:
            self._waiting.append(then)
        else:
            then()

    def unhang(self) -> None:
        """It answers again."""
        self.hung = False
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            self._scheduler.after(self.rng.uniform(0, 0.5), then)

    def list_steps(self, directory: Path) -> list[int]:
        """As `storage_steps`; hangs while storage does."""
        del directory
        if self.hung:
            raise Blocked(self.when_well)
        return [] if self.away else sorted(self.steps)

    def write(
        self, exporter: "SimExporter", order: Mapping[str, Any], own: Any
    ) -> None:
        """One exporter has its part of a step."""
        self.began(order["step"])
        group_key = (order["step"], order["coordinator"], order["failures"])
        if not order["coordinator"]:
            group_key = (*group_key, exporter.process.host)
        group = self._groups.setdefault(group_key, _Group(world=order["world"]))
        group.members[order["rank"]] = exporter
        group.digests |= own
        if len(group.members) == group.world:
            self._groups.pop(group_key)
            duration = self.rng.uniform(0.05, 0.4) + self.rng.uniform(0, self.slow_s)
            self._scheduler.after(
                duration, self.when_well, lambda: self._finish(group, order["step"])
            )

    def _finish(self, group: _Group, step: int) -> None:
        if not all(it.open and it.process.alive for it in group.members.values()):
            return  # the others wait for it until their limit
        error = ""
        if self.full:
            error = "OSError: [Errno 28] No space left on device"
        elif self.away:
            error = "OSError: [Errno 2] No such file or directory"
        else:
            self.steps[step] = group.digests
            for old in sorted(self.steps)[: -self.keep]:
                del self.steps[old]
        for exporter in group.members.values():
            exporter.answer(
                {"op": "save", "step": step, "ok": not error, "error": error}
            )


class SimExporter:
    """One host's part in writing."""

    def __init__(
        self, storage: Storage, process: Process, emit: Callable[..., None]
    ) -> None:
        self._storage, self.process, self._emit = storage, process, emit
        self.open = self.can_start = True

    def save(
        self,
        order: Mapping[str, Any],
        own: dict[str, bytes],
        refusal: str,
        limit_s: float,
    ) -> None:
        """Begins to write one step, unless there is a `refusal`."""
        step = order["step"]
        self._answered = False
        if not self.can_start:
            self.answer({"ok": False, "error": "no exporter can be started"})
            return
        if refusal:
            self.answer({"op": "save", "step": step, "ok": False, "error": refusal})
            return

        def late() -> None:
            if not self._answered:
                text = f"TimeoutError: step {step} in {limit_s:.0f} s"
                self.answer({"op": "save", "step": step, "ok": False, "error": text})

        loop, rng = self.process.loop, self._storage.rng
        loop.beside(limit_s, late)
        loop.beside(rng.uniform(0.01, 0.1), lambda: self._write(order, own))

    def _write(self, order: Mapping[str, Any], own: dict[str, bytes]) -> None:
        if self.open:
            self._storage.write(self, order, own)

    def answer(self, message: dict[str, Any]) -> None:
        """Says how it went."""
        self._answered = True

        def tell() -> None:
            if self.open:
                self._emit("exporter", self, message)

        self.process.loop.beside(0.001, tell)

    def close(self) -> None:
        """Ends."""
        self.open = False


class SimExportDesk(HostExports):
    """The real desk with simulated exporters."""

    def __init__(
        self,
        config: AgentConfig,
        board: ProgressBoard,
        emit: Callable[..., None],
        exported: Callable[[int, bool, str], None],
        storage: Storage,
        process: Process,
    ) -> None:
        super().__init__(config, None, board, emit, exported)  # type: ignore[arg-type]
        self._storage, self._process = storage, process
        self.cannot_start: Callable[[], bool] = lambda: False
        self.wrong: Callable[[str], None] = lambda text: None

    def _open(self, holder: Any, order: dict[str, Any]) -> Any:
        names = ("rank", "world", "coordinator", "slot")
        opening = {name: order[name] for name in names}
        key = opening | {"holder": str(holder.path)}, order["failures"]
        if self._exporter is not None and self._world == key:
            return self._exporter
        if self._exporter is not None:
            self._exporter.close()
        exporter: Any = SimExporter(self._storage, self._process, self._emit)
        exporter.can_start = not self.cannot_start()
        self._exporter, self._world = exporter, key
        return exporter

    def _save(self, exporter: Any, holder: Any, order: dict[str, Any]) -> None:
        assert isinstance(holder, SimHolder)
        step = order["step"]
        self._board.set("exporting", step)
        own = dict(holder.pinned_digests(self._pinned[step][1]))
        keys = [piece.key for piece in holder.own_slices]
        bad = [key for key in keys if key not in own or (step, key) in holder.corrupt]
        refusal = _misfit(order, holder)
        if bad:
            refusal = f"step {step} is corrupt in this host's memory: {', '.join(bad)}"
        for key in keys:
            if not refusal and own[key] != right(key, step):
                self.wrong(f"step {step} is exported with wrong bytes of {key}")
        exporter.save(order, own, refusal, self._config.timeouts.export)


def _misfit(order: Mapping[str, Any], holder: SimHolder) -> str:
    """Why a real exporter would refuse an order that does not fit the layout."""
    slots = dict(enumerate(export_world(holder.layout).slots))
    if order["world"] == len(slots) and slots.get(order["rank"]) == order["slot"]:
        return ""
    return f"world, rank and slot do not fit the layout: {order}"


def whole(layout: Any, digests: Mapping[str, bytes], step: int) -> bool:
    """Whether a stored step has every slice, with the right bytes."""
    slots = export_world(layout).slots
    pieces = {piece.key for slot in slots for piece in layout.slices(slot)}
    return all(digests.get(key) == right(key, step) for key in pieces)
