"""The memory tier of a user's own process, through the agent that it is attached to.

What a trainer of dtft does over its link (`manager.py`), and what only a user's process
needs: it hears when all processes of the job are there, finds a committed step again,
asks for storage, and is told why its agent lets it go. Must not know trees or Orbax.
"""

import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dtft.checkpoint.arena import Arena
from dtft.checkpoint.attach import Attached
from dtft.checkpoint.dialogue import AgentGone
from dtft.checkpoint.link import LinkClosed
from dtft.checkpoint.manager import AgentCheckpointManager
from dtft.checkpoint.slices import Layout
from dtft.checkpoint.snapshot import SnapshotPlan

LEAVE_S = 5.0
NONE = -1
"""No step; users count from 0."""


class NotHeld(LookupError):
    """The agent does not hold this step (any more)."""


class NotBrought(RuntimeError):
    """A step that memory has could not be brought onto the wanted shardings."""


class AttachedMemory(AgentCheckpointManager):
    """This process's steps in the memory of several hosts."""

    def __init__(
        self, attached: Attached, *, slot: int, chunk_bytes: int, directory: Path
    ) -> None:
        """Waits until every process of the job has attached.

        Raises:
            TimeoutError: some did not in time; names them.
            AgentGone: the agent has let go of this process, or has ended.
        """
        self._attached = attached
        self._formed: dict[str, Any] | None = None
        self._note = "the agents of the job to agree"
        self._located: dict[str, Any] | None = None
        self._assembled: dict[str, Any] | None = None
        self._flushed: dict[int, str] = {}
        self._tokens = itertools.count()
        self.storage_errors: list[str] = []
        """Why steps did not reach storage; whoever raises them takes them out."""
        super().__init__(
            attached.link,
            None,
            slot=slot,
            chunk_bytes=chunk_bytes,
            storage_directory=directory,
            deadline_s=attached.deadline_s,
        )
        if not self._dialogue.gone:  # or it was told why already
            self._dialogue.farewell = (
                f"the agent of host {attached.host} (job {attached.job!r}, "
                f"{attached.path}) has ended. Start it again, or another one, and "
                "restart all processes"
            )
        try:
            self._dialogue.wait(lambda: self._formed is not None, "the job")
        except TimeoutError as error:
            self.leave()
            raise TimeoutError(
                f"{attached.deadline_s:.0f} s waiting for {self._note}; limit: "
                "timeouts.start of the agents"
            ) from error
        assert self._formed is not None
        self._formed_step = NONE
        if self._formed["source"] != "init":
            self._formed_step = self._formed["step"]
        self._released = self._committed = self._saved = self._formed_step
        self._attached.link.send(
            "running", step=max(0, self._formed_step), bytes_from_storage=0
        )

    def _take(self, message: dict[str, Any]) -> None:
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
            super()._take(message)

    def announce(self, layout: Layout) -> None:
        """Tells the layout; see `AgentCheckpointManager.announce`."""
        super().announce(layout)
        assert self._order is not None
        if self._order["source"] == "init":
            self._released = self._committed = self._saved = NONE

    # -------------------------------------------------------------------- steps

    @property
    def in_memory(self) -> int | None:
        """The committed step that memory has, if there is one."""
        with self._dialogue.condition:
            step = self._committed
        assert self._formed is not None
        if step == self._formed_step and self._formed["source"] != "memory":
            return None
        return None if step == NONE else step

    @property
    def saved(self) -> int | None:
        """The newest step that was saved or restored here."""
        return None if self._saved == NONE else self._saved

    @property
    def is_replicating(self) -> bool:
        """Whether the step saved last is not safe yet."""
        with self._dialogue.condition:
            return self._released < self._saved

    def check(self) -> None:
        """Raises AgentGone if the agent has let go of this process, or has ended."""
        self._dialogue.check()

    # ------------------------------------------------------------------ restore

    def locate(self, step: int) -> dict[str, Any]:
        """Where a committed step lies: arena, places, digests, layout and items.

        Raises:
            NotHeld: it is not here.
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
        """The leaves of a located step, every byte checked; see `SnapshotPlan.read`."""
        plan = self._plan_of(found["layout"])
        places = np.frombuffer(found["places"], np.uint8)
        return self._read(plan, found, places, abstract)

    def read_on(
        self, step: int, layout: Layout, abstract: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, Any]:
        """As `read`, on slices that this process did not save; the agents bring them.

        Args:
            step: the newest commit.
            layout: how it is wanted; the same on every process.
            abstract: leaf path to shape, dtype and sharding.

        Raises:
            NotBrought: a host was lost meanwhile, memory is short, or a copy is wrong.
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
            places = np.zeros(plan.chunks.num_chunks, np.uint8)
            return self._read(plan, found, places, abstract)
        finally:
            self._dialogue.send("taken")

    def _plan_of(self, layout: str) -> SnapshotPlan:
        return SnapshotPlan(Layout.from_json(layout), self._slot, self._chunk_bytes)

    def _read(
        self,
        plan: SnapshotPlan,
        found: Mapping[str, Any],
        places: np.ndarray,
        abstract: Mapping[str, jax.ShapeDtypeStruct],
    ) -> dict[str, Any]:
        arena = Arena.attach(Path(found["arena"]))
        try:
            memory = arena.view(0, arena.size)
            return plan.read(memory, places, found["digests"], abstract)
        finally:
            arena.close()

    # ------------------------------------------------------------------ storage

    def flush(self, step: int, *, store: bool, limit_s: float) -> str:
        """Waits until a step is committed, and with `store` in storage.

        Returns:
            "" or why it did not reach storage.

        Raises:
            AgentGone: the agent has let go of this process, or has ended.
            TimeoutError: it took too long.
        """
        token = self.ask_storage(step, store=store)
        what = f"step {step} to be {'in storage' if store else 'committed'}"
        self._dialogue.wait(lambda: token in self._flushed, what, limit_s)
        return self._flushed.pop(token)

    def ask_storage(self, step: int, *, store: bool) -> int:
        """As `flush`, without waiting."""
        token = next(self._tokens)
        self._dialogue.send("flush", token=token, step=step, store=store)
        return token

    def leave(self) -> None:
        """Lets go of the agent in good order; what is committed stays in memory.

        The step saved last is waited for, not long: its peers may have gone.
        """
        with contextlib.suppress(AgentGone, TimeoutError):
            what = f"step {self._saved}"
            self._dialogue.wait(lambda: self._released >= self._saved, what, LEAVE_S)
        try:
            self._attached.link.send("left", step=max(0, self._saved))
        except LinkClosed:
            pass
        self._attached.link.close()
        self.close()
