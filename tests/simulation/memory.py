"""Simulated memory of hosts: what is held of which step, as digests alone.

`Copies` and its rules are the real ones; what lies in an arena is a digest per slice
here. The state is known beforehand (`right`): the digest of a slice at a step follows
from its name and the step, so that a wrong step, or wrong bytes, are noticed.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dtft.checkpoint.memory.own_copies import Room
from dtft.checkpoint.replication.commit import push_root
from dtft.checkpoint.replication.copy_placement import CopyPlacement, Push, place_copies
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout, Slice
from dtft.elastic.job import AgentConfig
from dtft.elastic.transfer.copies import Copies
from dtft.elastic.transfer.restore_executor import FetchFailed
from tests.simulation.network import Port, Process, Wire
from tests.simulation.scheduler import Deferred

OWN_BUFFERS, HOSTED_BUFFERS = 4, 3
RETRY_S = 0.1
HOLD_S = (0.0005, 0.1)
"""Seconds until memory for a slot is allocated."""


@functools.lru_cache(maxsize=65536)
def right(key: str, step: int) -> bytes:
    """The digest of a slice after a step."""
    return hashlib.blake2b(f"{key}@{step}".encode(), digest_size=16).digest()


@functools.lru_cache(maxsize=64)
def layout_from(text: str) -> Layout:
    """As `Layout.from_json`; equal layouts are made once."""
    return Layout.from_json(text)


@functools.lru_cache(maxsize=64)
def placed(layout_text: str, copies: int, domains: tuple[str, ...]) -> CopyPlacement:
    """As `place`; once for all hosts."""
    return place_copies(layout_from(layout_text), copies, domains or None)


@functools.lru_cache(maxsize=64)
def _json_of(layout: Layout) -> str:
    return layout.to_json()


@functools.lru_cache(maxsize=65536)
def _outgoing(layout_text: str, copies: int, domains: tuple[str, ...], slot: int):
    return tuple(
        it for it in placed(layout_text, copies, domains).pushes if it.source == slot
    )


@functools.lru_cache(maxsize=64)
def job_layout(num_slots: int) -> Layout:
    """A state of two leaves: one divided over all slots, one that each has."""
    mesh = MeshLayout(
        axis_names=("replica", "fsdp"),
        axis_sizes=(1, num_slots),
        slots=tuple(range(num_slots)),
    )
    divided = Leaf(path="w", shape=(num_slots,), dtype="float32", spec=(("fsdp",),))
    whole = Leaf(path="b", shape=(2,), dtype="float32")
    return Layout(mesh=mesh, leaves=(divided, whole))


class SimHolder:
    """What `ReplicaStore` is asked for, on digests."""

    chunk_bytes = 1 << 22

    def __init__(
        self,
        layout: Layout,
        slot: int,
        placement: CopyPlacement,
        outgoing: tuple[Push, ...],
        path: Path,
    ) -> None:
        self.layout, self.slot, self.placement, self.path = (
            layout,
            slot,
            placement,
            path,
        )
        self.own_slices = layout.slices(slot)
        self.outgoing = outgoing
        self._own: dict[int, dict[str, bytes]] = {}
        self._items: dict[int, dict[str, Any]] = {}
        self._hosted: dict[int, dict[int, dict[str, bytes]]] = {}
        self._pins: dict[int, tuple[int, dict[str, bytes]]] = {}
        self._next_pin = 0
        self._staging: int | None = None
        self.corrupt: set[tuple[int, str]] = set()
        """Steps and keys whose bytes do not match their digests any more."""
        self.closed = False

    # ------------------------------------------------------------- own slices

    def begin_stage(self, step: int) -> Room:
        """See `ReplicaStore.begin_stage`."""
        self._staging = step
        pinned = {at for at, _ in self._pins.values()} - set(self._own)
        if len(set(self._own) - {step}) + len(pinned) >= OWN_BUFFERS:
            raise RuntimeError(f"no free buffer for step {step}: {sorted(self._own)}")
        return Room(base=-1, buffers=b"")

    def staged(
        self, step: int, digests: Sequence[bytes], items: dict, kept: bytes = b""
    ) -> None:
        """See `ReplicaStore.staged`."""
        del kept
        keys = [piece.key for piece in self.own_slices]
        self._own[step] = dict(zip(keys, digests, strict=True))
        self._items[step] = items
        self.corrupt -= {(step, key) for key in keys}

    def own_digests(self, step: int, slices: Sequence[Slice]) -> list[bytes]:
        """See `ReplicaStore.own_digests`."""
        return [self._own[step][piece.key] for piece in slices]

    def all_own_digests(self, step: int) -> list[bytes]:
        """See `ReplicaStore.all_own_digests`."""
        return self.own_digests(step, self.own_slices)

    def own_buffers(self, step: int) -> bytes:
        """See `ReplicaStore.own_buffers`."""
        assert step in self._own
        return b""

    def items(self, step: int) -> dict[str, Any]:
        """See `ReplicaStore.items`."""
        return self._items.get(step, {})

    # ---------------------------------------------------------- hosted slices

    def receive(self, push: Push, step: int, told: Mapping[str, bytes], items: dict):
        """Takes a push; None if there is no buffer or other bytes are here.

        Returns:
            Whether it became a copy by this call.
        """
        mine = self._hosted.setdefault(push.source, {})
        if step in mine:
            return False if mine[step] == told else None
        if len(mine) >= HOSTED_BUFFERS:
            return None
        mine[step] = dict(told)
        self._items.setdefault(step, items)
        return True

    def has_received(self, step: int, source: int, told: Mapping[str, bytes]) -> bool:
        """Whether these very bytes are here."""
        return self._hosted.get(source, {}).get(step) == told

    # -------------------------------------------------------------- retention

    def keep_only(self, steps: set[int]) -> None:
        """See `ReplicaStore.keep_only`."""
        self._drop(lambda step: step in steps)

    def drop_after(self, step: int) -> None:
        """See `ReplicaStore.drop_after`."""
        self._drop(lambda one: one <= step)

    def drop_before(self, step: int, keep: set[int]) -> None:
        """See `ReplicaStore.drop_before`."""
        self._drop(lambda one: one >= step or one in keep)

    def _drop(self, needed: Callable[[int], bool]) -> None:
        self._own = {step: it for step, it in self._own.items() if needed(step)}
        for source, steps in self._hosted.items():
            kept = {step: it for step, it in steps.items() if needed(step)}
            self._hosted[source] = kept
        self._items = {
            step: it for step, it in self._items.items() if step in self.steps()
        }

    def pin(self, step: int) -> int:
        """See `ReplicaStore.pin`."""
        digests = self._own[step]
        self._next_pin += 1
        self._pins[self._next_pin] = step, digests
        return self._next_pin

    def unpin(self, pin: int) -> None:
        """See `ReplicaStore.unpin`."""
        self._pins.pop(pin, None)

    def pinned_digests(self, pin: int) -> dict[str, bytes]:
        """What a pinned copy has."""
        return self._pins[pin][1]

    # --------------------------------------------------------------- verified

    def steps(self) -> tuple[int, ...]:
        """See `ReplicaStore.steps`."""
        hosted = {step for steps in self._hosted.values() for step in steps}
        return tuple(sorted(hosted | set(self._own)))

    @property
    def newest_step(self) -> int:
        """The newest step of which something is here, 0 for none."""
        return max(self.steps(), default=0)

    def here(self, step: int) -> dict[str, bytes]:
        """Every slice of a step, by key."""
        found: dict[str, bytes] = {}
        for steps in self._hosted.values():
            found |= steps.get(step, {})
        return found | self._own.get(step, {})

    def holdings(
        self, read: bool = True
    ) -> tuple[dict[int, dict[str, bytes]], list[str]]:
        """See `ReplicaStore.holdings`."""
        found = {step: self.here(step) for step in self.steps()}
        bad = []
        if read:
            for step, key in sorted(self.corrupt):
                if found.get(step, {}).pop(key, None) is not None:
                    bad.append(f"step {step}: {key}")
                    self._forget(step, key)
        return found, bad

    def _forget(self, step: int, key: str) -> None:
        for steps in [*self._hosted.values(), self._own]:
            if key in steps.get(step, {}):
                if steps is self._own:
                    steps[step] = {k: v for k, v in steps[step].items() if k != key}
                else:
                    del steps[step]
        self.corrupt.discard((step, key))

    # ---------------------------------------------------------------- restore

    def begin_restore(
        self, step: int, digests: Mapping[str, bytes], items: dict, read: bool = True
    ) -> list[Slice]:
        """As `ReplicaStore.begin_restore`; returns the slices that are missing."""
        self.keep_only({step})
        own = dict(self._own.get(step, {}))
        hosted = [it.get(step, {}) for it in self._hosted.values()]
        missing = []
        for piece in self.own_slices:
            key, good = piece.key, digests.get(piece.key)
            wrong = good is None or (read and (step, key) in self.corrupt)
            if own.get(key) == good and not wrong:
                continue
            own.pop(key, None)
            if (
                good is not None
                and not wrong
                and good in [it.get(key) for it in hosted]
            ):
                own[key] = good
            else:
                missing.append(piece)
        self._own[step], self._items[step] = own, items
        return missing

    def restored(self, step: int, digests: Mapping[str, bytes]) -> None:
        """As `Restoring.restored`, of the step's only copy."""
        self._own.setdefault(step, {}).update(digests)
        self.corrupt -= {(step, key) for key in digests}

    def close(self) -> None:
        """See `ReplicaStore.close`."""
        self.closed = True


class _Reserve:
    """Memory that a spare keeps ready."""

    size = 1

    def close(self) -> None:
        """Frees it."""

    def unlink(self) -> None:
        """Frees it."""


class SimPusher:
    """As `Pusher`, in virtual time."""

    def __init__(
        self,
        copies: "SimCopies",
        push: Push,
        address: str,
        epoch: tuple[int, int],
        limit_s: float,
    ) -> None:
        self._copies, self._push, self._address = copies, push, address
        assert isinstance(copies.holder, SimHolder)
        self._holder = copies.holder
        self.target = push.target
        self.paced: Callable[[int], None] | None = None
        self._epoch, self._limit_s = epoch, limit_s
        self._steps: list[int] = []
        self._busy = self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of one push."""
        return sum(piece.nbytes for piece in self._push.slices)

    def offer(self, step: int) -> None:
        """Queues a staged step."""
        self._steps.append(step)
        if not self._busy:
            self._busy = True
            self._begin()

    def close(self) -> None:
        """Stops."""
        self._closed = True

    def _begin(self) -> None:
        if not self._steps or self._closed:
            self._busy = False
            return
        step = self._steps.pop(0)
        process = self._copies.process
        until = process.loop.now() + self._limit_s
        delay = self._copies.rng.uniform(0.002, 0.03)
        process.loop.beside(delay, lambda: self._try(step, until))

    def _try(self, step: int, until: float) -> None:
        left = until - self._copies.process.loop.now()
        if self._closed or left <= 0:
            self._begin()
            return
        keys = [piece.key for piece in self._push.slices]
        try:
            sent = dict(
                zip(
                    keys, self._holder.own_digests(step, self._push.slices), strict=True
                )
            )
        except KeyError:
            self._begin()  # dropped: a newer commit made it needless
            return
        corrupt = any((step, key) in self._holder.corrupt for key in keys)
        items, push, epoch = self._holder.items(step), self._push, self._epoch

        def taken(port: Port) -> bool:
            return receive_push(port, push, step, epoch, sent, items, corrupt)

        def done(value: bool | None, error: Exception | None) -> None:
            if value:
                self._begin()
            else:
                del error
                loop = self._copies.process.loop
                loop.beside(RETRY_S, lambda: self._try(step, until))

        self._copies.wire.call(
            self._copies.process, self._address, taken, min(left, 5.0), done
        )


def receive_push(
    port: Port,
    push: Push,
    step: int,
    epoch: tuple[int, int],
    sent: Mapping[str, bytes],
    items: dict,
    corrupt: bool,
) -> bool:
    """As `inbox._receive_push`: whether the peer is done with it."""
    inbox = port.inbox
    holder: Any = inbox.holder()  # a `SimHolder`
    if holder is None or epoch != inbox.epoch():
        return epoch < inbox.epoch()
    if holder.has_received(step, push.source, sent):
        return True
    if corrupt:
        return False  # the digests do not match what arrives
    new = holder.receive(push, step, sent, items)
    if new:
        inbox.held(step, push.source, push_root(push, sent))
    return bool(new) or holder.has_received(step, push.source, sent)


class SimCopies(Copies):
    """The real rules of which holder is kept, on simulated memory."""

    freed_s = 0.0  # nothing here keeps the memory of what was freed

    def __init__(self, config: AgentConfig, process: Process, wire: Wire) -> None:
        super().__init__(config)
        self.process, self.wire, self.rng = process, wire, wire.rng
        self.full: Callable[[], bool] = lambda: False
        """Whether there is no memory to be had."""
        self.most = 0
        """How many arenas there is memory for; 0: for any number."""
        self._paths = 0

    def _make(self, layout: Layout, slot: int, domains: tuple[str, ...]) -> Any:
        if self._take_reserve() is None:
            self._need_memory()
        self._paths += 1
        path = self._config.memory_directory / f"arena-{self._paths}"
        text, copies = _json_of(layout), self._config.copies
        outgoing = _outgoing(text, copies, domains, slot)
        return SimHolder(
            layout_from(text), slot, placed(text, copies, domains), outgoing, path
        )

    def _need_memory(self) -> None:
        used = len(self.holders()) + (self._reserve is not None)
        if self.full() or 0 < self.most <= used:
            raise OSError("no memory: 100 bytes are needed, 0 are available")

    def _needed_bytes(self, layout: Layout, domains: tuple[str, ...]) -> int:
        del layout, domains
        return _Reserve.size

    def _prepare(self, nbytes: int) -> Any:
        del nbytes
        self._need_memory()
        return _Reserve()

    def pushers(self, addresses: Sequence[str], credentials: Any, epoch: Any) -> Any:
        """See `Copies.pushers`."""
        holder = self.holder
        assert isinstance(holder, SimHolder)
        limit_s = self._config.timeouts.replicate
        return [
            SimPusher(self, push, addresses[push.target], epoch, limit_s)
            for push in holder.outgoing
        ]

    # ---------------------------------------------------------------- restore

    def restore(self, order: dict[str, Any]) -> Deferred:
        """As `restore_copies`, on a thread: fetches from all peers at once."""
        outcome = Deferred()
        delay_s = self.rng.uniform(*HOLD_S)
        self.process.loop.beside(delay_s, lambda: self._restore(order, outcome))
        return outcome

    def _restore(self, order: dict[str, Any], outcome: Deferred) -> None:
        layout, step = layout_from(order["layout"]), order["step"]
        epoch = order["generation"], order["attempt"]
        slot, domains = order["slot"], order["domains"]
        try:
            may_free = order.get("may_free", False)
            found = self.hold(
                *(layout, slot, domains), keep=step, epoch=epoch, may_free=may_free
            )
        except OSError as error:
            outcome.resolve({"fatal": str(error)})
            return
        holder = cast(SimHolder, found)
        told = step, order["digests"], order["items"], order["read"]
        missing = self._adopt(holder, order, holder.begin_restore(*told))
        transfers = order["transfers"]
        planned = {key for transfer in transfers for key in transfer["keys"]}
        if surprise := [it.key for it in missing if it.key not in planned]:
            text = f"own copies of {surprise} are missing or corrupt"
            bad = [f"{self._config.host} step {step}: {key}" for key in surprise]
            outcome.resolve({"error": text, "host": "", "corrupt": bad})
            return
        self._fetch_all(holder, order, outcome)

    def _adopt(
        self, holder: SimHolder, order: dict[str, Any], missing: list[Slice]
    ) -> list[Slice]:
        step, left = order["step"], []
        for piece in missing:
            good = order["digests"].get(piece.key)
            for old in self.former:
                assert isinstance(old, SimHolder)
                here = old.here(step).get(piece.key)
                if (
                    good is not None
                    and here == good
                    and (step, piece.key) not in old.corrupt
                ):
                    holder.restored(step, {piece.key: good})
                    break
            else:
                left.append(piece)
        return left

    def _fetch_all(
        self, holder: SimHolder, order: dict[str, Any], outcome: Deferred
    ) -> None:
        transfers, step = order["transfers"], order["step"]
        waiting = len(transfers)
        begun = self.process.loop.now()
        epoch = order["generation"], order["attempt"]

        def finish() -> None:
            seconds = self.process.loop.now() - begun
            own = sum(piece.nbytes for piece in holder.own_slices)
            outcome.resolve({"own": own, "peers": 0, "s": seconds})

        def one(transfer: dict[str, Any]) -> None:
            def find(port: Port) -> dict[str, bytes]:
                return serve_fetch(port, step, transfer, epoch, order["digests"])

            def done(value: dict[str, bytes] | None, error: Exception | None) -> None:
                nonlocal waiting
                if value is None:
                    bad = error.corrupt if isinstance(error, FetchFailed) else ()
                    outcome.resolve(
                        {
                            "error": f"from {transfer['host']}: {error}",
                            "host": transfer["host"],
                            "corrupt": list(bad),
                        }
                    )
                    return
                holder.restored(step, value)
                waiting -= 1
                if not waiting:
                    finish()

            limit_s = self._config.timeouts.restore
            self.wire.call(self.process, transfer["address"], find, limit_s, done)

        if not transfers:
            finish()
        for transfer in transfers:
            one(transfer)


def serve_fetch(
    port: Port,
    step: int,
    transfer: Mapping[str, Any],
    epoch: tuple[int, int],
    digests: Mapping[str, bytes],
) -> dict[str, bytes]:
    """As `inbox.serve_fetch`, with the check of digests by whoever fetches."""
    inbox = port.inbox
    if epoch < inbox.epoch():
        raise FetchFailed(transfer["host"], "the order is older than this host's")
    found: dict[str, bytes] = {}
    holders: list[Any] = [inbox.holder(), *inbox.former()]
    for holder in [it for it in holders if it is not None]:
        here = holder.here(step)
        for key in transfer["keys"]:
            if key in here and key not in found:
                if (step, key) in holder.corrupt or here[key] != digests[key]:
                    bad = [f"{transfer['host']} step {step}: {key}"]
                    raise FetchFailed(transfer["host"], f"{key} is corrupt", bad)
                found[key] = here[key]
    lacking = [key for key in transfer["keys"] if key not in found]
    if lacking:
        raise FetchFailed(transfer["host"], f"lacks {lacking} of step {step}")
    return found
