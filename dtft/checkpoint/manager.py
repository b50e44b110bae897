"""The trainer's side of the memory tier, in the shape of Orbax's CheckpointManager.

`save` copies a step into this host's arena and returns; the agent replicates it and the
leader commits it. `restore` hands back what the agent was told to restore. Talks to its
own agent only; must not know peers, placement or etcd.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dtft.checkpoint.arena import Arena
from dtft.checkpoint.cadence import Cadence, Schedule
from dtft.checkpoint.chunks import pack_flags
from dtft.checkpoint.dialogue import Dialogue
from dtft.checkpoint.interval import Window
from dtft.checkpoint.link import Link
from dtft.checkpoint.slices import Layout
from dtft.checkpoint.snapshot import Snapshot, SnapshotPlan
from dtft.checkpoint.storage import StorageTier
from dtft.checkpoint.storage_steps import storage_steps

ITEM = "interval"
"""The item of a commit that says in how many steps the next one follows."""


@dataclass(frozen=True, kw_only=True)
class SaveArgs:
    """What a commit holds."""

    arrays: Mapping[str, jax.Array | np.ndarray]
    """Leaf path to global array, all ready; or to a numpy array of all processes."""
    items: Mapping[str, Any] = field(default_factory=dict)
    """What is not an array, as JSON values: data position and so on."""
    window: Window | None = None
    """What the steps since the last snapshot took, for an automatic interval."""


@dataclass(frozen=True, kw_only=True)
class RestoreArgs:
    """What is wanted back."""

    abstract: Mapping[str, jax.ShapeDtypeStruct]
    """Leaf path to shape, dtype and sharding."""


class AgentCheckpointManager:
    """Every saved step in several hosts' memory; see the module's text."""

    def __init__(
        self,
        link: Link,
        layout: Layout | None,
        *,
        slot: int,
        chunk_bytes: int,
        storage_directory: Path,
        deadline_s: float,
        cadence: Cadence | None = None,
        automatic: bool = False,
        last: int | None = None,
    ) -> None:
        """Announces the layout, if it is known, as `announce` does.

        Args:
            link: to the agent.
            layout: of the state.
            slot: whose slices these are.
            chunk_bytes: bytes under one digest.
            storage_directory: of the storage tier.
            deadline_s: limit of every wait for the agent.
            cadence: after which steps `should_save`; by default after every step.
            automatic: the leader changes the interval; commits hold it.
            last: the last step of all, which is saved whatever the cadence is. If it is
                given, room for a step is asked for when the one before it is safe.

        Raises:
            TimeoutError: the agent did not answer in time.
            AgentGone: the agent has ended.
        """
        self._dialogue = Dialogue(link, deadline_s)
        self._slot, self._chunk_bytes = slot, chunk_bytes
        self._storage_directory = storage_directory
        self._order: dict[str, Any] | None = None
        self._room: dict[str, Any] | None = None
        self._last: Snapshot | None = None
        self._asked: int | None = None
        self._last_step = last
        self._released = self._committed = self._saved = 0
        self._stop_at: int | None = None
        self._schedule = Schedule.of(cadence or Cadence.every(1))
        self._automatic = automatic
        self.released_at = 0.0
        """When the newest step became safe, on the monotonic clock."""
        self._arena: Arena | None = None
        self._mapping: threading.Thread | None = None
        self.bytes_from_storage = 0
        self.stalls_s: list[float] = []
        """Seconds that each `save` held up the training thread."""
        self._dialogue.start(self._take)
        if layout is not None:
            self.announce(layout)

    def announce(self, layout: Layout) -> None:
        """Tells the layout and waits for what the agent was told to restore.

        Raises:
            TimeoutError: the agent did not answer in time.
            AgentGone: the agent has ended.
        """
        self._plan = SnapshotPlan(layout, self._slot, self._chunk_bytes)
        self._dialogue.send("layout", layout=layout.to_json())
        self._dialogue.wait(
            lambda: self._order is not None, "the agent's restore order"
        )
        assert self._order is not None
        self._arena = Arena.attach(Path(self._order["arena"]))
        self._released = self._committed = self._saved = self._order["step"]
        if self._order["source"] != "memory":
            self._mapping = self._arena.prefault()

    # -------------------------------------------------------- what the agent says

    def _take(self, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "restore":
            self._order = message
        elif op == "room" and message["step"] == self._asked:
            self._room = message
        elif op == "release":
            if message["step"] > self._released:
                self._released, self.released_at = message["step"], time.monotonic()
            if message["committed"]:
                self._committed = max(self._committed, message["step"])
            self._stop_at = message["stop_at"]
            for after, interval in message["changes"]:
                self._schedule = self._schedule.changed(interval, after=after)
            if message["step"] == self._saved and self._asked is None:
                self._ask_ahead()

    def _ask_ahead(self) -> None:
        """Asks for room for the next step, while the devices compute it."""
        if self._last_step is not None and self._saved < self._last_step:
            following = self._schedule.following(self._saved)
            self._ask(min(following, self._last_step))

    def _ask(self, step: int) -> None:
        self._asked, self._room = step, None
        self._dialogue.queue("stage", step=step)

    # ------------------------------------------------------------- Orbax's shape

    def latest_step(self) -> int | None:
        """The newest step that can be restored: commits, else what was restored."""
        return self._committed or None

    def all_steps(self) -> tuple[int, ...]:
        """Steps on offer: the last commit and what storage holds, ascending."""
        stored = storage_steps(self._storage_directory)
        return tuple(sorted({*stored, self._committed} - {0}))

    def should_save(self, step: int) -> bool:
        """Whether a snapshot is taken after `step`; equal on all hosts.

        To be asked once every boundary before `step` was saved and waited for.
        """
        with self._dialogue.condition:
            return self._schedule.is_boundary(step)

    def interval(self) -> int:
        """Steps from the last saved step to the next."""
        with self._dialogue.condition:
            return self._schedule.interval(after=self._saved)

    def save(self, step: int, *, args: SaveArgs) -> bool:
        """Copies a step into this host's arena; the rest happens elsewhere.

        What did not change since the last save is not written. The arrays may be
        donated as soon as this returns.
        """
        begun = time.monotonic()
        with self._dialogue.condition:
            if self._asked != step:
                self._ask(step)
        self._dialogue.wait(lambda: self._room is not None, f"room for step {step}")
        self._last = written = self._write(step, args.arrays)
        with self._dialogue.condition:
            self._saved, self._asked = step, None
        interval = self.interval()
        items = dict(args.items) | ({ITEM: interval} if self._automatic else {})
        self._dialogue.queue(
            "staged",
            step=step,
            digests=written.digests,
            kept=pack_flags(written.kept),
            items=items,
            interval=interval,
            window=asdict(args.window) if args.window else None,
        )
        self.stalls_s.append(time.monotonic() - begun)
        return True

    def _write(
        self, step: int, arrays: Mapping[str, jax.Array | np.ndarray]
    ) -> Snapshot:
        room, last = self._room, self._last
        assert room is not None and self._arena is not None
        return self._plan.write(
            step,
            arrays,
            self._arena.view(0, self._arena.size),
            np.frombuffer(room["places"], np.uint8),
            last if last is not None and last.step == room["base"] else None,
            self._plan.copied(room["copied"]),
        )

    def restore(
        self, step: int | None = None, *, args: RestoreArgs
    ) -> tuple[dict[str, jax.Array], dict[str, Any]] | None:
        """The state the leader chose for this formation, or None for a fresh start.

        Raises:
            ValueError: `step` is not the one that the leader chose.
            CorruptCopy: a copy in this host's memory is corrupt; all hosts must form
                anew, and this copy will not be offered again.
        """
        order = self._order
        assert order is not None
        if step is not None and step != order["step"]:
            raise ValueError(
                f"step={step} is not on offer: all hosts restore step {order['step']}."
            )
        if order["source"] == "init":
            return None
        if order["source"] == "memory":
            arrays, items = self._from_memory(order, args), order["items"]
        else:
            arrays, items = self._from_storage(order["step"], args)
        if self._automatic:
            interval = items.get(ITEM, self._schedule.interval(after=order["step"]))
            with self._dialogue.condition:
                self._schedule = self._schedule.changed(interval, after=order["step"])
        return arrays, items

    def _from_memory(
        self, order: Mapping[str, Any], args: RestoreArgs
    ) -> dict[str, jax.Array]:
        assert self._arena is not None
        memory = self._arena.view(0, self._arena.size)
        places = np.frombuffer(order["places"], np.uint8)
        arrays = self._plan.read(memory, places, order["digests"], args.abstract)
        self._last = self._plan.recalled(order["step"], order["digests"])
        self._mapping = self._arena.prefault()
        return arrays

    def _from_storage(
        self, step: int, args: RestoreArgs
    ) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        storage = StorageTier(self._storage_directory, read_only=True)
        try:
            arrays, items = storage.restore(step, dict(args.abstract))
        finally:
            storage.close()
        self.bytes_from_storage = sum(piece.nbytes for piece in self._plan.slices)
        return arrays, items

    def wait_until_finished(self) -> None:
        """Waits until the last saved step is safe in memory."""
        self._dialogue.wait(
            lambda: self._released >= self._saved, f"step {self._saved}"
        )

    def wait_until_mapped(self) -> None:
        """Waits until the arena is mapped here: saves before that take longer.

        Raises:
            TimeoutError: it is not in time.
        """
        limit_s = self._dialogue.deadline_s
        if self._mapping is not None:
            self._mapping.join(limit_s)
            if self._mapping.is_alive():
                raise TimeoutError(f"{limit_s:.0f} s mapping the arena; it goes on")

    def close(self) -> None:
        """Detaches from the arena; its bytes stay."""
        self._dialogue.close()
        if self._arena is not None:
            self._arena.close()

    # ---------------------------------------------------------------- for the loop

    def stop_at(self) -> int | None:
        """The step after which all hosts shall stop, if a stop was asked for."""
        with self._dialogue.condition:
            return self._stop_at
