"""The copies that this host keeps for the job, over all its formations.

One holder at a time; a formation with the same layout and slot goes on with the arena
of the last one, so that copies outlive the trainers. Must not know orders, the leader
or the trainer.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dtft.checkpoint.arena import Arena
from dtft.checkpoint.arena_map import arena_bytes
from dtft.checkpoint.chunks import pack_flags
from dtft.checkpoint.holder import Holder
from dtft.checkpoint.placement import place
from dtft.checkpoint.shares import Shares
from dtft.checkpoint.slices import Layout
from dtft.checkpoint.transport import Credentials
from dtft.elastic.config import AgentConfig
from dtft.elastic.replication import Pusher

logger = logging.getLogger(__name__)


class Copies:
    """This host's holder, None until a layout is known."""

    def __init__(self, config: AgentConfig) -> None:
        """Reserves nothing yet."""
        self._config = config
        self.holder: Holder | None = None
        self._shares: Shares | None = None
        self._reserve: Future[Arena] | None = None
        self._domains: tuple[str, ...] = ()

    def hold(self, layout: Layout, slot: int, domains: Sequence[str] = ()) -> Holder:
        """The holder for a layout and slot; its arena is kept if nothing changed.

        Args:
            layout: of the state.
            slot: this host's.
            domains: per slot the failure domain by which copies are placed; empty if
                every slot is its own.

        Raises:
            OSError: the memory for a new arena is not there.
        """
        old = self.holder
        same = self._domains == (chosen := tuple(domains))
        if old and old.layout.digest == layout.digest and old.slot == slot and same:
            return old
        self.holder, self._shares, self._domains = None, None, chosen
        if old is not None:
            old.close()
        self.holder = Holder(
            layout,
            slot,
            place(layout, self._config.copies, chosen or None),
            path=self._config.memory_directory / "arena",
            chunk_bytes=self._config.chunk_bytes,
            reserved=self._take_reserve(),
        )
        return self.holder

    def share(self, turn: int) -> bytes:
        """Which own slices are copied at a turn, packed; nothing for all of them."""
        holder = self.holder
        assert holder is not None
        if self._config.share == "full":
            return b""
        if self._shares is None:
            copies, domains = self._config.copies, self._domains or None
            self._shares = Shares(holder.layout, copies, domains)
        return pack_flags(self._shares.of(holder.slot, turn))

    def expect(self, layout: Layout) -> None:
        """Reserves memory for a slot of this layout, beside whatever goes on.

        A host that waits then need not spend that time when it is given one. Slots
        need about equally much; one that needs more gets its memory as without this.
        """
        if self.holder is None and self._reserve is None:
            pool = ThreadPoolExecutor(1)
            self._reserve = pool.submit(self._prepare, layout)
            pool.shutdown(wait=False)

    def _prepare(self, layout: Layout) -> Arena:
        needed = arena_bytes(layout, 0, place(layout, self._config.copies))
        path = self._config.memory_directory / "reserve"
        arena = Arena.create(path, max(needed, 1))
        arena.prefault()
        return arena

    def _take_reserve(self) -> Arena | None:
        reserve, self._reserve = self._reserve, None
        try:
            limit_s = self._config.timeouts.restore
            return reserve.result(limit_s) if reserve is not None else None
        except (OSError, TimeoutError) as error:
            logger.warning("memory was not reserved ahead of time: %s", error)
            return None

    def report(self) -> dict[str, Any]:
        """What is held here, read and checked now, for the leader."""
        holder = self.holder
        good, bad = holder.holdings() if holder else ({}, [])
        return {
            "layout": holder.layout.to_json() if holder else "",
            "holdings": good,
            "items": {step: holder.items(step) for step in good} if holder else {},
            "corrupt": [f"{self._config.host} {text}" for text in bad],
        }

    def located(self, step: int, in_memory: bool) -> dict[str, Any]:
        """Where a trainer finds its arena and, if it is there, the state of `step`."""
        holder = self.holder
        assert holder is not None
        return {
            "arena": str(holder.path),
            "places": holder.own_places(step) if in_memory else b"",
            "digests": holder.all_own_digests(step) if in_memory else [],
            "items": holder.items(step) if in_memory else {},
        }

    def pushers(
        self,
        addresses: Sequence[str],
        credentials: Credentials,
        epoch: tuple[int, int],
    ) -> list[Pusher]:
        """One for each copy that a peer keeps; `addresses` are by slot."""
        holder = self.holder
        assert holder is not None
        limit_s = self._config.timeouts.replicate
        return [
            Pusher(holder, push, addresses[push.target], credentials, epoch, limit_s)
            for push in holder.outgoing
        ]

    def close(self) -> None:
        """Frees the memory."""
        if self.holder is not None:
            self.holder.close()
        if (reserve := self._take_reserve()) is not None:
            reserve.close()
            reserve.unlink()
