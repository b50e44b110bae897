"""The copies that this host keeps for the job, over all its formations.

A formation is one assignment of hosts to the job's slots. An arena is a file in shared
memory with the copies that a host keeps while it has one slot.

A formation whose layout, slot and failure domains equal those of an arena reuses this
arena, so copies outlive the trainers. Any other formation gets a new arena. Former
arenas with copies of the restored step stay until the new formation has committed a
step, because they may hold the only copies of the last commit.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from dtft.checkpoint.memory import Arena, ReplicaStore, arena_bytes
from dtft.checkpoint.replication import Shares, place_copies
from dtft.checkpoint.state import Layout, items_are_right, pack_flags
from dtft.checkpoint.transport import Credentials
from dtft.elastic.job import AgentConfig
from dtft.elastic.transfer.prefetch import PrefetchedSlices
from dtft.elastic.transfer.replication import Pusher

logger = logging.getLogger(__name__)

FREED_S, FREED_AGAIN_S = 10.0, 0.1
"""Seconds until the memory of copies that were freed for a slot must be available, and
between two tries to allocate it."""


class Copies:
    """All copies that this host keeps, in one holder for each layout and slot.

    A holder is a `ReplicaStore`, with its memory. A layout has the mesh and the arrays
    of the state. When the host gets another slot, a former holder is kept as long as a
    restore may need its copies.
    """

    freed_s = FREED_S
    """Seconds for which freed memory is awaited."""

    def __init__(self, config: AgentConfig) -> None:
        """Reserves no memory yet."""
        self._config = config
        self.holder: ReplicaStore | None = None
        """Holder for the newest assignment of slots. None until the layout is known,
        after an allocation that failed, and after `free`."""
        self._shares: dict[ReplicaStore, Shares] = {}
        self.former: tuple[ReplicaStore, ...] = ()
        """Holders for former assignments of slots. A restore of the last commit may
        need their copies."""
        self.prefetched = PrefetchedSlices()
        """Slices that this host, as a spare, has fetched ahead."""
        self._reserve: Arena | None = None
        self._placed: dict[ReplicaStore, tuple[str, ...]] = {}
        self.epoch: tuple[int, int] = (0, 0)
        """(generation, attempt) of the leader's newest order that gave a slot to this
        host. A restore for an older order may still run; `hold` raises OSError when
        this restore calls it."""
        self.has_slot = False
        """Whether this host has this slot still. If not, a restore for it may run."""
        self._lock = threading.Lock()  # an abandoned restore may still call `hold`

    def hold(
        self,
        layout: Layout,
        slot: int,
        domains: Sequence[str] = (),
        keep: int | None = None,
        epoch: tuple[int, int] | None = None,
        *,
        may_free: bool = False,
    ) -> ReplicaStore:
        """Returns the holder for a layout, slot and domains; makes one if none exists.

        Args:
            layout: layout of the state (its mesh and arrays) for which the slot was
                assigned.
            slot: this host's slot.
            domains: the failure domain of each slot, by which copies are placed; empty
                if every slot is its own domain.
            keep: the step to restore. Other holders with copies of this step drop later
                steps and stay until a step is committed; all further holders are
                closed. None: every other holder is closed.
            epoch: (generation, attempt) of the leader's command to this host that needs
                the holder; by default the epoch of the newest command.
            may_free: whether the holders that stay for `keep` are closed if there is
                too little memory beside them, as other hosts have their copies too.

        Raises:
            OSError: not enough memory for a new arena, a newer command of the leader
                has arrived, or the slot of the command was lost.
        """
        with self._lock:
            if self.is_over(epoch):
                raise OSError(f"the order of epoch {epoch} is not the newest")
            return self._hold(layout, slot, tuple(domains), keep, epoch, may_free)

    def is_over(self, epoch: tuple[int, int] | None) -> bool:
        """Whether this host does not have the slot of an order any more.

        `epoch` is the order's (generation, attempt); None, for the newest order, gives
        False.
        """
        return epoch is not None and (epoch < self.epoch or not self.has_slot)

    def _hold(
        self,
        layout: Layout,
        slot: int,
        domains: tuple[str, ...],
        keep: int | None,
        epoch: tuple[int, int] | None,
        may_free: bool,
    ) -> ReplicaStore:
        known = [it for it in (self.holder, *self.former) if it is not None]
        wanted = layout.digest, slot, domains
        same = [
            it
            for it in known
            if (it.layout.digest, it.slot, self._placed[it]) == wanted
        ]
        others = tuple(it for it in known if it not in same)
        former = tuple(it for it in others if keep in it.steps())
        # A holder that is kept serves peers on other threads also while others close.
        self.holder, self.former = same[0] if same else None, former
        if keep is not None:
            for one in former:
                # The new formation recomputes uncommitted steps, with other bits.
                one.drop_after(keep)
        for one in others:
            if one not in former:
                self._drop(one)
        if self.holder is None:
            try:
                made = self._make(layout, slot, domains)
            except OSError:
                if not may_free or not former or self.is_over(epoch):
                    raise
                self.former = ()
                for one in former:
                    self._drop(one)
                made = self._make_later(layout, slot, domains, epoch)
            if self.is_over(epoch):
                made.close()  # `free` may have run already
                raise OSError(f"the slot of the order of epoch {epoch} was lost")
            self.holder = made
        self._placed[self.holder] = domains
        return self.holder

    def _make_later(
        self,
        layout: Layout,
        slot: int,
        domains: tuple[str, ...],
        epoch: tuple[int, int] | None,
    ) -> ReplicaStore:
        """Makes a holder once the memory of freed holders can be had.

        A process that ends, or a fetch that a peer has begun, may still map them. Tries
        for 10 s (`FREED_S`), but not after the slot of `epoch` was lost. Meanwhile the
        caller has the lock; the event loop does not take it before a holder exists.

        Raises:
            OSError: not enough memory until then.
        """
        end = time.monotonic() + self.freed_s
        while True:
            try:
                return self._make(layout, slot, domains)
            except OSError:
                if self.is_over(epoch) or time.monotonic() >= end:
                    raise
            time.sleep(FREED_AGAIN_S)

    def _drop(self, holder: ReplicaStore) -> None:
        self._placed.pop(holder, None)
        holder.close()

    def _make(
        self, layout: Layout, slot: int, domains: tuple[str, ...]
    ) -> ReplicaStore:
        directory = self._config.memory_directory
        paths = (directory / f"arena{'-' * bool(n)}{n or ''}" for n in range(100))
        return ReplicaStore(
            layout,
            slot,
            place_copies(layout, self._config.copies, domains or None),
            path=next(path for path in paths if not path.exists()),
            chunk_bytes=self._config.chunk_bytes,
            reserved=self._take_reserve(),
        )

    def share(self, turn: int) -> bytes:
        """Chooses which of its own slices this host copies at a snapshot.

        A replicated slice is owned by several hosts. If --checkpoint.share is
        "divided", another one of them copies it from its devices at each snapshot.

        Args:
            turn: number of the snapshot since the slot was assigned, from 0.

        Returns:
            One bit for each of the slot's slices, eight to a byte: whether this host
            copies the slice (`unpack_flags` reads the bits). b"" if every owner copies
            all of its slices at each snapshot (--checkpoint.share is "full").
        """
        holder = self.holder
        assert holder is not None
        if self._config.share == "full":
            return b""
        if holder not in self._shares:
            domains = self._placed[holder] or None
            shares = Shares(holder.layout, self._config.copies, domains)
            self._shares = {holder: shares}
        return pack_flags(self._shares[holder].of(holder.slot, turn))

    def committed(self) -> None:
        """Frees the holders of former assignments of slots, with their copies.

        Called when a step has been committed since the newest assignment.
        """
        with self._lock:
            former, self.former = self.former, ()
        for one in former:
            self._drop(one)

    def holders(self) -> list[ReplicaStore]:
        """Lists all holders, first the holder for the newest assignment of slots."""
        return [it for it in (self.holder, *self.former) if it is not None]

    def holding(self, step: int, slot: int | None = None) -> ReplicaStore | None:
        """Returns a holder with copies of `step`, preferably the one made for `slot`.

        If no holder has the step, returns the holder for the newest assignment of
        slots, which may be None.
        """
        having = [it for it in self.holders() if step in it.steps()]
        fit = [it for it in having if it.slot == slot]
        return next(iter([*fit, *having]), self.holder)

    def free(self, epoch: tuple[int, int]) -> None:
        """Frees all holders, with their copies, of a host without a slot.

        Called when a step has been committed since this host lost its slot. Does
        nothing if a newer order has given it a slot meanwhile: `epoch` is the value
        that `self.epoch` had when the host had none.
        """
        if not self.holders():
            return  # and `expect`, which holds the lock, may still allocate
        with self._lock:
            if epoch != self.epoch or self.has_slot:
                return
            old, self.holder, self.former = self.holders(), None, ()
        for one in old:
            self._drop(one)

    def expect(self, layout: Layout, domains: Sequence[str] = ()) -> None:
        """Reserves memory for a slot of this layout; returns once it is allocated.

        A spare host with this reserve can take a slot without waiting for memory. All
        slots need about the same amount. If a slot needs more than the reserve, memory
        is allocated when the host takes the slot. Does nothing if this host has a
        holder, or a reserve that is as large already; a smaller one is replaced.

        Raises:
            OSError: not enough memory; names bytes needed and available.
        """
        with self._lock:
            if self.holder is not None:
                return
            needed = self._needed_bytes(layout, tuple(domains))
            if self._reserve is not None and self._reserve.size >= needed:
                return
            self._free_reserve()
            self._reserve = self._prepare(needed)

    def _needed_bytes(self, layout: Layout, domains: tuple[str, ...]) -> int:
        placement = place_copies(layout, self._config.copies, domains or None)
        return max(1, arena_bytes(layout, 0, placement))

    def _prepare(self, nbytes: int) -> Arena:
        path = self._config.memory_directory / "reserve"
        arena = Arena.create(path, nbytes)
        try:
            arena.prefault()
        except OSError:
            arena.close()
            arena.unlink()
            raise
        return arena

    def _take_reserve(self) -> Arena | None:
        reserve, self._reserve = self._reserve, None
        return reserve

    def report(self, read: bool = True) -> dict[str, Any]:
        """Makes this host's report about all of its copies, for the leader.

        Leaves out a step that is dropped, and a holder that is closed, meanwhile.

        Args:
            read: whether the copies are read now and checked against their digests.

        Returns:
            `layouts`: each holder's layout as JSON. `holdings`: maps step, then slice
            key, to the digests of the copy. `complete`: maps step to the slots all of
            whose own slices are on this host. `items`: maps step to the JSON items of
            its checkpoint. `corrupt`: a text for each corrupt copy. `prefetched`: maps
            slot to the number of prefetched bytes of its slices. `reserved`: whether
            memory for a slot is reserved.
        """
        holders = self.holders()
        held: dict[int, dict[str, bytes]] = {}
        items: dict[int, dict[str, Any]] = {}
        complete: dict[int, list[int]] = {}
        corrupt: list[str] = []
        for holder in holders:
            try:
                good, bad = holder.holdings(read)
            except ValueError:
                if holder in self.holders():
                    raise
                continue  # a newer assignment of slots has closed it
            for step, digests in good.items():
                try:
                    beside = holder.items(step)
                except KeyError:  # a restore of another step has dropped it
                    continue
                held[step] = digests | held.get(step, {})
                if all(piece.key in digests for piece in holder.own_slices):
                    complete.setdefault(step, []).append(holder.slot)
                if not items_are_right(beside):
                    corrupt.append(f"{self._config.host} step {step}: its items")
                    beside = {}
                items[step] = beside or items.get(step, {})
            corrupt += [f"{self._config.host} {text}" for text in bad]
        return {
            "layouts": [holder.layout.to_json() for holder in holders],
            "holdings": held,
            "complete": complete,
            "items": items,
            "corrupt": corrupt,
            "prefetched": self.prefetched.report(),
            "reserved": self._reserve is not None,
        }

    def located(self, step: int, in_memory: bool) -> dict[str, Any]:
        """Returns where the trainer finds the state of a step.

        Args:
            step: the step.
            in_memory: whether the trainer loads the step from this host's memory.

        Returns:
            `arena`: path of the shared memory, which has several buffers for each
            chunk. `buffers`: for each chunk of the slot's own slices, the number of the
            buffer that has the chunk's bytes at this step, as one byte. `digests`: for
            each own slice, the digests of its chunks. `items`: the step's JSON items.
            All but `arena` are empty if `in_memory` is False.
        """
        holder = self.holder
        assert holder is not None
        return {
            "arena": str(holder.path),
            "buffers": holder.own_buffers(step) if in_memory else b"",
            "digests": holder.all_own_digests(step) if in_memory else [],
            "items": holder.items(step) if in_memory else {},
        }

    def pushers(
        self,
        addresses: Sequence[str],
        credentials: Credentials,
        epoch: tuple[int, int],
    ) -> list[Pusher]:
        """Makes a pusher for each peer that keeps copies of this host's slices.

        Args:
            addresses: address of each slot's host.
            credentials: the job's credentials.
            epoch: (generation, attempt) of the assignment of slots.
        """
        holder = self.holder
        assert holder is not None
        limit_s = self._config.timeouts.replicate
        return [
            Pusher(holder, push, addresses[push.target], credentials, epoch, limit_s)
            for push in holder.outgoing
        ]

    def close(self) -> None:
        """Frees the memory of all holders, of the reserve and of prefetched slices."""
        self.prefetched.clear()
        for one in (self.holder, *self.former):
            if one is not None:
                one.close()
        self._free_reserve()

    def _free_reserve(self) -> None:
        if (reserve := self._take_reserve()) is not None:
            reserve.close()
            reserve.unlink()
