"""The trainer's client of the memory tier, through the agent of its host.

`AgentCheckpointManager` has the method names of Orbax's CheckpointManager, for dtft's
own trainers. `AttachedMemory` is a subclass for a job whose processes the user starts,
not the agents.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np

from dtft.checkpoint.managers.agent_link import (
    AgentGone,
    Attached,
    Dialogue,
    LinkClosed,
)
from dtft.checkpoint.memory import Arena, CopiedStep, Snapshot, SnapshotPlan
from dtft.checkpoint.replication import Cadence, SnapshotSchedule, Window
from dtft.checkpoint.state import Layout, pack_flags
from dtft.checkpoint.storage import StorageTier, storage_steps

logger = logging.getLogger(__name__)

ITEM = "interval"
"""Name of the JSON item in which a step records its snapshot interval: the number of
steps to the next snapshot. Only jobs with an automatic interval save this item."""
MAX_ITEMS_BYTES = 3 << 20
"""Largest size in msgpack of the JSON items of a step, in bytes. A push sends the items
with the step's digests in one header of at most 16 MiB, and a host reports the items of
up to 4 steps at a time."""


@dataclass(frozen=True, kw_only=True)
class SaveArgs:
    """What one save writes: arrays by leaf path, and JSON values by name (items).

    Also has the wall times in seconds of the steps since the last snapshot, from which
    the leader chooses an automatic snapshot interval.
    """

    arrays: Mapping[str, jax.Array | np.ndarray]
    """Maps leaf path to a global array that is already computed, or to a numpy array
    that every process has whole."""
    items: Mapping[str, Any] = field(default_factory=dict)
    """JSON values saved beside the arrays, such as the data position, by name."""
    window: Window | None = None
    """Wall times of the steps since the last snapshot, from which the leader chooses an
    automatic snapshot interval; None without measurements."""


@dataclass(frozen=True, kw_only=True)
class RestoreArgs:
    """The leaves to restore, by path, with the shape, dtype and sharding of each."""

    abstract: Mapping[str, jax.ShapeDtypeStruct]
    """Maps leaf path to shape, dtype and sharding."""


class AgentCheckpointManager:
    """A trainer's checkpoint manager: steps in the memory of several hosts.

    The trainer copies a step into this host's arena (memory shared with the agent), and
    the agent replicates the step. A step is safe once every host has copied its slices
    (pieces of the state's arrays), and all copies on other hosts are verified. The
    leader then reports the step as safe.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        *,
        slot: int,
        chunk_bytes: int,
        storage_directory: Path,
        cadence: Cadence | None = None,
        automatic: bool = False,
        last: int | None = None,
    ) -> None:
        """Sends nothing yet. The caller passes each message of the agent to `take`.

        Args:
            dialogue: the exchange of messages with the agent.
            slot: the slot (position in the job) of this process.
            chunk_bytes: size of a chunk in bytes; every chunk has its own digest.
            storage_directory: the directory of the storage tier.
            cadence: the steps after which `should_save` is True; by default all steps.
            automatic: whether the leader adapts the snapshot interval. If so, the
                interval after a step is saved among the step's JSON items, and is
                restored with the step.
            last: the last step of the run, which the caller always saves. If `last` is
                given, each save also requests memory for the next step to save. The
                agent assigns this memory when it reports that the saved step is safe.
        """
        self._dialogue = dialogue
        self._slot, self._chunk_bytes = slot, chunk_bytes
        self._storage_directory = storage_directory
        self._order: dict[str, Any] | None = None
        self._room: dict[str, Any] | None = None
        self._last: Snapshot | None = None
        self._digester = ThreadPoolExecutor(1)
        self._digested: Future[None] | None = None
        """Ends when the step saved last is digested; None if nobody waits for it."""
        self._is_closed = False
        self._asked: int | None = None
        self._last_step = last
        self._released = self._committed = self._saved = 0
        self._stop_at: int | None = None
        self._schedule = SnapshotSchedule.of(cadence or Cadence.every(1))
        self._automatic = automatic
        self.released_at = 0.0
        """When the agent last reported a newer step as safe, in seconds by
        `time.monotonic()`; 0 before its first report."""
        self._arena: Arena | None = None
        self._mapping: threading.Thread | None = None
        self.bytes_from_storage = 0
        self.stalls_s: list[float] = []
        """Seconds for which each `save` blocked the training thread."""

    def announce(self, layout: Layout) -> None:
        """Sends the state's layout (mesh and leaves) to the agent, and maps the arena.

        The arena is memory that the agent shares with this process. The agent answers
        with its restore order. The order has the arena's path, the step to restore, and
        the source of that step: memory or storage. It may also say that the job starts
        from the initial state instead of a step.

        Raises:
            TimeoutError: the agent did not answer in time.
            AgentGone: the agent has ended, or has detached this process.
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

    # ---------------------------------------------------- messages of the agent

    def take(self, message: dict[str, Any]) -> None:
        """Stores what one message of the agent says, for use by the other methods.

        `message["op"]` names the kind of message; a message of an unknown kind is
        ignored. The caller must hold the lock `Dialogue.condition`.
        """
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
            room = message["room"]
            if room is not None and room["step"] == self._asked:
                self._room = room

    def _following(self) -> int | None:
        """Returns the step to save next, so that its memory can be requested early.

        It is the next step of the snapshot schedule, but at most the last step of the
        run. Returns None if the last step of the run is unknown or was saved.
        """
        if self._last_step is None or self._saved >= self._last_step:
            return None
        return min(self._schedule.following(self._saved), self._last_step)

    def _ask(self, step: int) -> None:
        self._asked, self._room = step, None
        self._dialogue.queue("stage", step=step)

    # ------------------------------------------------------------- Orbax's shape

    def latest_step(self) -> int | None:
        """Returns the newest committed step.

        Before the first commit of this run, this is the step that the agent has told
        this process to restore. It is None if there is no such step, because the job
        starts from the initial state.
        """
        return self._committed or None

    def all_steps(self) -> tuple[int, ...]:
        """Returns the restorable steps, ascending.

        These are the steps in storage and the step of `latest_step`.
        """
        stored = storage_steps(self._storage_directory)
        return tuple(sorted({*stored, self._committed} - {0}))

    def should_save(self, step: int) -> bool:
        """Whether a snapshot is due after `step`; the same on all hosts.

        All earlier due steps must have been saved and waited for
        (`wait_until_finished`).
        """
        with self._dialogue.condition:
            return self._schedule.is_boundary(step)

    def interval(self) -> int:
        """Returns the snapshot interval after the last saved step, in steps."""
        with self._dialogue.condition:
            return self._schedule.interval(after=self._saved)

    def save(self, step: int, *, args: SaveArgs) -> bool:
        """Copies a step into memory shared with the agent; agents replicate it.

        A chunk (a part of an array's bytes) is not written if its digest is the same as
        in the last two saves. The step then shares the chunk's memory with the last
        save. The arrays may be donated when this method has returned. The copy of a
        large state is digested afterwards, on a background thread, and is then
        replicated.

        Args:
            step: number of the step.
            args: the arrays by leaf path, and the JSON items of the step.

        Returns:
            Always True.

        Raises:
            ValueError: a slice of the layout is not on this host's devices, or the
                items have more than `MAX_ITEMS_BYTES` (3 MiB).
            TimeoutError: the agent did not assign memory for the step in time.
            AgentGone: the agent has ended, or has detached this process.
            RuntimeError: the step saved before could not be digested.
        """
        begun = time.monotonic()
        _refuse_large(step, args.items)
        self._await_digests()
        with self._dialogue.condition:
            if self._asked != step:
                self._ask(step)
        self._dialogue.wait(lambda: self._room is not None, f"room for step {step}")
        copied = self._copy(step, args.arrays)
        with self._dialogue.condition:
            self._saved, self._room = step, None
            self._asked = following = self._following()
            interval = self._schedule.interval(after=step)
        items = dict(args.items) | ({ITEM: interval} if self._automatic else {})
        told = {
            "step": step,
            "items": items,
            "interval": interval,
            "window": vars(args.window) if args.window else None,
            "following": following,
        }
        if copied.has_digests:
            self._hand_over(copied, told)
        else:
            self._digested = self._later(lambda: self._hand_over(copied, told))
        self.stalls_s.append(time.monotonic() - begun)
        return True

    def _later(self, work: Callable[[], None]) -> Future[None]:
        """Runs `work` on the digesting thread; at once if no thread can be started."""
        try:
            ends = self._digester.submit(work)
        except RuntimeError:
            ends = Future[None]()
            try:
                ends.set_result(work())
            except Exception as error:
                ends.set_exception(error)
        ends.add_done_callback(lambda _: self._dialogue.wake())
        return ends

    def _hand_over(self, copied: CopiedStep, told: Mapping[str, Any]) -> None:
        """Digests a copied step, and tells the agent that the step is in its memory.

        `told` has the fields of the message that are known before the digests.
        """
        written = copied.snapshot()
        with self._dialogue.condition:
            if self._is_closed:  # the agent may use the memory for something else
                return
            self._last = written
            self._dialogue.queue(
                "staged",
                digests=written.digests,
                kept=pack_flags(written.kept),
                **told,
            )

    def _await_digests(self, limit_s: float | None = None) -> None:
        """Waits until the step saved last is digested and handed over to the agent.

        `limit_s` is the limit in seconds; by default that of the messages to the agent.

        Raises:
            RuntimeError: the step could not be digested; it counts as not saved.
            TimeoutError: the step was not digested in time.
            AgentGone: the agent has ended, or has detached this process.
        """
        if self._digested is None:
            return
        step = self._saved
        self._dialogue.wait(self._digested.done, f"the digests of step {step}", limit_s)
        error, self._digested = self._digested.exception(), None
        if error is not None:
            with self._dialogue.condition:
                self._saved, self._asked = self._released, None
            raise RuntimeError(
                f"step {step} was copied, but could not be digested: "
                f"{type(error).__name__}: {error}. Save the step again."
            ) from error

    def _copy(
        self, step: int, arrays: Mapping[str, jax.Array | np.ndarray]
    ) -> CopiedStep:
        room, last = self._room, self._last
        assert room is not None and self._arena is not None
        return self._plan.write(
            step,
            arrays,
            self._arena.view(0, self._arena.size),
            np.frombuffer(room["buffers"], np.uint8),
            last if last is not None and last.step == room["base"] else None,
            self._plan.copied(room["copied"]),
        )

    def restore(
        self, step: int | None = None, *, args: RestoreArgs
    ) -> tuple[dict[str, jax.Array], dict[str, Any]] | None:
        """Restores the step that the agent named in its restore order (see `announce`).

        The leader chose this step. The order says whether it is read from this host's
        memory or from storage.

        Args:
            step: the step that the leader chose; None accepts whichever it chose.
            args: shape, dtype and sharding of each leaf.

        Returns:
            The arrays by leaf path, and the JSON items of the step. None if the job
            starts from the initial state.

        Raises:
            ValueError: `step` is not the step that the leader chose, or the leaves in
                storage differ from `args`.
            FileNotFoundError: storage does not have the step, or is not mounted.
            CorruptCopy: a copy in this host's memory is corrupt.
            CheckpointUnreadable: the step in storage cannot be read.
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
        buffers = np.frombuffer(order["buffers"], np.uint8)
        arrays = self._plan.read(memory, buffers, order["digests"], args.abstract)
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
        """Waits until the last saved step is safe: all its copies are verified.

        Raises:
            TimeoutError: the step was not safe in time.
            AgentGone: the agent has ended, or has detached this process.
            RuntimeError: the step could not be digested.
        """
        self._await_digests()
        self._dialogue.wait(
            lambda: self._released >= self._saved, f"step {self._saved}"
        )

    def wait_until_mapped(self) -> None:
        """Waits until all memory shared with the agent is mapped into this process.

        A background thread maps the memory page by page. A save before all pages are
        mapped is slower, because the save maps the pages that it writes.

        Raises:
            TimeoutError: the pages were not mapped in time.
        """
        limit_s = self._dialogue.deadline_s
        if self._mapping is not None:
            self._mapping.join(limit_s)
            if self._mapping.is_alive():
                raise TimeoutError(f"{limit_s:.0f} s mapping the arena; it goes on")

    def close(self) -> None:
        """Unmaps the memory shared with the agent, which keeps the saved steps.

        A step that is not digested yet is given up: its digests are not sent.
        """
        with self._dialogue.condition:
            self._is_closed = True
        self._digester.shutdown(wait=False)
        if self._arena is not None:
            self._arena.close()

    # ---------------------------------------------------------------- for the loop

    def stop_at(self) -> int | None:
        """Returns the step after which all hosts stop, as the leader has ordered.

        None without such an order.
        """
        with self._dialogue.condition:
            return self._stop_at


LEAVE_S = 5.0
NONE = -1
"""Stands for "no step". It is not 0, because a user's job may save a step 0."""


def _refuse_large(step: int, items: Mapping[str, Any]) -> None:
    nbytes = len(msgpack.packb(items) or b"")
    if nbytes > MAX_ITEMS_BYTES:
        raise ValueError(
            f"the items of step {step} (JSON values, metrics, custom metadata) have "
            f"{nbytes} bytes. Allowed: {MAX_ITEMS_BYTES}. Save large values as arrays, "
            "and fewer of the others."
        )


class NotHeld(LookupError):
    """The agent of this host has no copy of the requested step."""


class NotBrought(RuntimeError):
    """The agents could not fetch the slices that the requested shardings need."""


class AttachedMemory(AgentCheckpointManager):
    """The memory tier of one process that the user started, through its host's agent.

    Extends `AgentCheckpointManager`: waits for all processes of the job, finds and
    reads committed steps, requests writes to storage, and reports why the agent has
    detached the process.
    """

    def __init__(
        self, attached: Attached, *, slot: int, chunk_bytes: int, directory: Path
    ) -> None:
        """Waits until every process of the job has attached.

        After an error, this process is detached, so that it can try again.

        Args:
            attached: the link to the agent that has accepted this process.
            slot: the index of this process in the job, which is also its slot.
            chunk_bytes: size of a chunk in bytes; every chunk has its own digest.
            directory: the directory of the storage tier.

        Raises:
            TimeoutError: some processes did not attach in time. The message names these
                processes, if the agent has reported them.
            AgentGone: the agent has ended, or has detached this process.
        """
        self._attached = attached
        self._formed: dict[str, Any] | None = None
        self._note = "the agents of the job to agree"
        self._located: dict[str, Any] | None = None
        self._assembled: dict[str, Any] | None = None
        self._flushed: dict[int, str] = {}
        self._tokens = itertools.count()
        self.storage_errors: list[str] = []
        """Messages of failed writes to storage that were not raised yet."""
        super().__init__(
            Dialogue(attached.link, attached.deadline_s),
            slot=slot,
            chunk_bytes=chunk_bytes,
            storage_directory=directory,
        )
        self._dialogue.start(self.take)
        with self._dialogue.condition:
            if not self._dialogue.gone:  # else the reason is already there
                self._dialogue.farewell = (
                    f"the agent of host {attached.host} (job {attached.job!r}, "
                    f"{attached.path}) has ended. Start it again, or another one, and "
                    "restart all processes"
                )
        try:
            self._take_part()
        except BaseException:  # KeyboardInterrupt too: the agent must be free again
            self._detach()
            raise

    def _take_part(self) -> None:
        """Waits until all processes have attached; tells the agent that this one runs.

        The agent's message that all have attached names the step that can be restored.
        Until the first save, this step counts as the step saved last.

        Raises:
            TimeoutError: some processes did not attach in time.
            AgentGone: the agent has ended, or has detached this process.
        """
        try:
            self._dialogue.wait(lambda: self._formed is not None, "the job")
        except TimeoutError as error:
            raise TimeoutError(
                f"{self._attached.deadline_s:.0f} s waiting for {self._note}; limit: "
                "timeouts.start of the agents"
            ) from error
        assert self._formed is not None
        self._formed_step = NONE
        if self._formed["source"] != "init":
            self._formed_step = self._formed["step"]
        self._released = self._committed = self._saved = self._formed_step
        self._dialogue.send(
            "running", step=max(0, self._formed_step), bytes_from_storage=0
        )

    def take(self, message: dict[str, Any]) -> None:
        """Stores what one message of the agent says, for use by the other methods.

        `message["op"]` names the kind of message; a message of an unknown kind is
        ignored. The caller must hold the lock `Dialogue.condition`.
        """
        op = message["op"]
        if op == "formed":
            self._formed = message
        elif op == "note":
            self._note = message["text"]
        elif op == "located":
            self._located = message
        elif op == "assembled":
            self._assembled = message
        elif op == "flushed":
            self._flushed[message["token"]] = message["error"]
        elif op == "storage_failed":
            self.storage_errors.append(message["error"])
        elif op == "detached":
            self._dialogue.farewell, self._dialogue.gone = message["reason"], True
        else:
            super().take(message)

    def announce(self, layout: Layout) -> None:
        """Sends the state's layout (mesh and leaves) to the agent, and maps the arena.

        The arena is memory that the agent shares with this process. If the agent
        answers that the job starts from the initial state, no step counts as saved or
        committed. The agent also answers so if the step in memory has another layout.
        For the errors, see `AgentCheckpointManager.announce`.
        """
        super().announce(layout)
        assert self._order is not None
        if self._order["source"] == "init":
            self._released = self._committed = self._saved = NONE

    # -------------------------------------------------------------------- steps

    @property
    def in_memory(self) -> int | None:
        """The newest committed step, if it is in the agents' memory.

        None if no step is committed. Also None if the newest committed step is the one
        that could be restored when this process attached, and was only in storage.
        """
        with self._dialogue.condition:
            step = self._committed
        assert self._formed is not None
        if step == self._formed_step and self._formed["source"] != "memory":
            return None
        return None if step == NONE else step

    @property
    def saved(self) -> int | None:
        """The step saved last.

        Before the first save, it is the step that could be restored when this process
        attached. None if there is no such step.
        """
        return None if self._saved == NONE else self._saved

    @property
    def is_replicating(self) -> bool:
        """Whether the step saved last is not safe yet: some copies are not verified."""
        with self._dialogue.condition:
            return self._released < self._saved

    def check(self) -> None:
        """Raises an error that is known, without waiting.

        Raises:
            AgentGone: the agent has ended, or has detached this process.
            RuntimeError: the step saved last could not be digested.
        """
        self._dialogue.check()
        if self._digested is not None and self._digested.done():
            self._await_digests()

    # ------------------------------------------------------------------ restore

    def locate(self, step: int) -> dict[str, Any]:
        """Asks the agent where in the agent's memory a committed step is.

        A chunk is a part of a slice's bytes. Every chunk has several buffers in the
        memory, numbered from 0, so that the memory can keep several steps.

        Returns:
            A dict with `arena`, the path of the shared memory; `buffers`, the number of
            each chunk's buffer, one byte per chunk; `digests`, for each slice 16 bytes
            per chunk; `layout` (mesh and leaves) as JSON; and `items`, the JSON values
            of the step.

        Raises:
            NotHeld: this host's agent does not hold the step.
            TimeoutError: the agent did not answer in time.
            AgentGone: the agent has ended, or has detached this process.
        """
        self._located = None
        self._dialogue.send("locate", step=step)
        self._dialogue.wait(lambda: self._located is not None, f"step {step}")
        assert self._located is not None
        if "error" in self._located:
            raise NotHeld(self._located["error"])
        return self._located

    def read(
        self, found: Mapping[str, Any], abstract: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, Any]:
        """Reads the leaves in `abstract` from a step in this host's memory.

        Every byte is verified.

        Args:
            found: the answer of `locate` for the step.
            abstract: leaf path to shape, dtype and sharding.

        Returns:
            Leaf path to array. A leaf without a sharding is a numpy array.

        Raises:
            CorruptCopy: a slice does not match its digests.
        """
        plan = self._plan_of(found["layout"])
        buffers = np.frombuffer(found["buffers"], np.uint8)
        return self._read(plan, found, buffers, abstract)

    def read_on(
        self, step: int, layout: Layout, abstract: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, Any]:
        """Reads a step in memory onto another layout than the step was saved with.

        The agents fetch the slices that this process needs into temporary shared
        memory, which is freed after the read.

        Args:
            step: the step, which must be the newest commit.
            layout: the requested mesh and leaves; the same on every process.
            abstract: leaf path to shape, dtype and sharding.

        Returns:
            Leaf path to array. A leaf without a sharding is a numpy array.

        Raises:
            NotBrought: the agents could not provide the slices, for instance because
                a host was lost, memory is short, or a copy is corrupt.
            CorruptCopy: a fetched slice was corrupt when it was read.
            TimeoutError: the agent did not answer in time.
            AgentGone: the agent has ended, or has detached this process.
        """
        self._assembled, text = None, layout.to_json()
        self._dialogue.send("want", step=step, layout=text)
        what = f"step {step} on other shardings"
        self._dialogue.wait(lambda: self._assembled is not None, what)
        found = self._assembled
        assert found is not None
        if "error" in found:
            raise NotBrought(
                f"step {step} in memory could not be brought onto the wanted "
                f"shardings: {found['error']}. Restart all processes of the job; with "
                "the shardings of the save each needs its own slices only."
            )
        plan = self._plan_of(text)
        try:
            buffers = np.zeros(plan.chunks.num_chunks, np.uint8)
            return self._read(plan, found, buffers, abstract)
        finally:
            self._dialogue.send("taken")

    def _plan_of(self, layout: str) -> SnapshotPlan:
        return SnapshotPlan(Layout.from_json(layout), self._slot, self._chunk_bytes)

    def _read(
        self,
        plan: SnapshotPlan,
        found: Mapping[str, Any],
        buffers: np.ndarray,
        abstract: Mapping[str, jax.ShapeDtypeStruct],
    ) -> dict[str, Any]:
        arena = Arena.attach(Path(found["arena"]))
        try:
            memory = arena.view(0, arena.size)
            return plan.read(memory, buffers, found["digests"], abstract)
        finally:
            arena.close()

    # ------------------------------------------------------------------ storage

    def flush(self, step: int, *, store: bool, limit_s: float) -> str:
        """Waits until a step is committed, and with `store` also written to storage.

        With `store`, a later step in storage counts, too. If storage has neither the
        step nor a later step, the leader orders an export (a write to storage) of the
        newest commit. An export that is already running is waited for, also without
        `store`.

        Returns:
            "" on success. With `store`, the reason if an export failed during the wait.

        Raises:
            AgentGone: the agent has ended, or has detached this process.
            TimeoutError: the wait took longer than `limit_s` seconds. The message names
                the option that decides the limit, `storage_timeout_s`.
            RuntimeError: the step could not be digested.
        """
        self._await_digests(limit_s)
        token = self.ask_storage(step, store=store)
        what = f"step {step} to be {'in storage' if store else 'committed'}"
        limit = "2 * ReplicatedOptions.storage_timeout_s"
        self._dialogue.wait(lambda: token in self._flushed, what, limit_s, limit)
        return self._flushed.pop(token)

    def ask_storage(self, step: int, *, store: bool) -> int:
        """Asks the agent to report when a step is committed or stored; does not wait.

        The agent answers once the step is committed and no export (a write to storage)
        is running. With `store`, storage must also have the step or a later step, or an
        export must have failed.

        Returns:
            A number that the agent's answer repeats.

        Raises:
            AgentGone: the agent has ended, or has detached this process.
        """
        token = next(self._tokens)
        self._dialogue.send("flush", token=token, step=step, store=store)
        return token

    def leave(self) -> None:
        """Detaches from the agent; committed steps stay in the agents' memory.

        Waits first until the step saved last is safe (all its copies are verified), but
        for at most 5 s (`LEAVE_S`), because the step never becomes safe if peers have
        ended. A step that cannot be digested is given up, and the log says why.
        """
        try:
            self._await_digests(LEAVE_S)
        except (AgentGone, TimeoutError):
            pass
        except RuntimeError as error:
            logger.warning("%s", error)
        with contextlib.suppress(AgentGone, TimeoutError):
            what = f"step {self._saved}"
            self._dialogue.wait(lambda: self._released >= self._saved, what, LEAVE_S)
        try:
            self._attached.link.send("left", step=max(0, self._saved))
        except LinkClosed:
            pass
        self._detach()

    def _detach(self) -> None:
        """Closes the link to the agent, and unmaps the memory that is shared with it.

        `leave` first tells the agent that the process leaves. Without that message, the
        agent tells the leader that the process has gone, if the process already had its
        slot. The job's other processes then do not wait for it.
        """
        self._attached.link.close()
        self._dialogue.close()
        self.close()
