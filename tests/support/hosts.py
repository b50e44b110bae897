"""Hosts without trainers: holders in shared memory behind real servers, for tests.

A host serves pushes and fetches with the handlers that agents use; its state is made of
leaves of unlike sizes, chunks are small so that few bytes make many of them.
"""

import collections
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dtft.checkpoint.memory.replica_store import ReplicaStore
from dtft.checkpoint.replication.copy_placement import Push, place_copies
from dtft.checkpoint.state.digests import Parts, chunk_digests
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.checkpoint.transport.connection import Channel
from dtft.checkpoint.transport.protocol import Credentials
from dtft.checkpoint.transport.push import PushedBytes
from dtft.checkpoint.transport.rdma import Nixl
from dtft.checkpoint.transport.server import TransportServer
from dtft.elastic.event_loop import EventLoop
from dtft.elastic.host.edges import Asked
from dtft.elastic.host.listening import handlers
from dtft.elastic.job import AgentConfig
from dtft.elastic.network import Closed, ControlChannel, Heard
from dtft.elastic.transfer import replication
from dtft.elastic.transfer.replica_server import Inbox
from dtft.elastic.transfer.restore_executor import FetchOrder, fetch_into

JOB = Credentials(job="job", secret=b"s" * 32)
CHUNK = 256
EPOCH = (3, 1)
SIZES = {"big": 12_000, "odd": 1_001, "small": 7, "none": 0}


def divided(num_slots: int) -> Layout:
    """Leaves of unlike sizes, each divided over the slots: copies must be pushed."""
    return _layout(num_slots, num_slots, (("slots",),))


def replicated(num_slots: int) -> Layout:
    """The same leaves whole on every slot: every peer can send everything."""
    return _layout(num_slots, 1, ())


def _layout(num_slots: int, parts: int, spec: tuple[tuple[str, ...], ...]) -> Layout:
    mesh = MeshLayout(
        axis_names=("slots",), axis_sizes=(num_slots,), slots=tuple(range(num_slots))
    )
    leaves = tuple(
        Leaf(path=name, shape=(size * parts,), dtype="uint8", spec=spec)
        for name, size in SIZES.items()
    )
    return Layout(mesh=mesh, leaves=leaves)


class AtOnce(EventLoop):
    """In place of an event loop: what is posted is called by whoever posts it."""

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """See `Loop.post`."""
        function(*args)


NOBODY_LEADS = Asked(
    export=lambda answer: answer({"error": "nobody leads here"}),
    scale=lambda replicas, answer: answer({"error": "nobody leads here"}),
    drain=lambda host, answer: answer({"error": "nobody leads here"}),
)


class Host:
    """One slot's holder, served. Its own bytes are a function of step and slice."""

    def __init__(
        self,
        folder: Path,
        slot: int,
        layout: Layout,
        credentials: Credentials = JOB,
        nixl: Nixl | None = None,
    ) -> None:
        """Starts to serve; nothing is held yet."""
        copies = place_copies(layout, 2)
        path = folder / f"arena-{slot}"
        self.slot = slot
        self.holder = ReplicaStore(layout, slot, copies, path=path, chunk_bytes=CHUNK)
        self.epoch: tuple[int, int] = EPOCH
        self.held: list[tuple[int, int]] = []
        self.roots: dict[tuple[int, int], str] = {}
        """Of what is held: what the leader is told of its digests."""
        self.inbox = Inbox(
            epoch=lambda: self.epoch,
            holder=lambda: self.holder,
            held=self._holds,
            nixl=nixl,
        )
        config = AgentConfig(
            job=credentials.job,
            host=f"host-{slot}",
            store="s:1",
            secret=credentials.secret,
            num_slots=layout.mesh.num_slots,
            trainer_command=(),
            run_directory=folder,
            storage_directory=folder / "checkpoints",
            config_digest="",
        )
        self.events: collections.deque[tuple[Any, ...]] = collections.deque(maxlen=9)
        served = handlers(config, self.inbox, AtOnce(), self._accept, NOBODY_LEADS)
        self.server = TransportServer(
            "127.0.0.1:0", credentials, {**served, "echo": echo}
        )
        self.address = self.server.address

    def _holds(self, step: int, source: int, root: str) -> None:
        self.roots[step, source] = root
        self.held.append((step, source))

    def _accept(
        self, hello: dict[str, Any], channel: ControlChannel
    ) -> tuple[Heard, Closed] | None:
        """Hears whoever says a host's name."""
        if not isinstance(hello.get("host"), str):
            return None
        self.events.append(("control", hello["host"], channel))

        def heard(channel: ControlChannel, message: dict[str, Any]) -> None:
            self.events.append(("report", hello["host"], message))

        return heard, lambda channel, reason: None

    def stage(self, step: int) -> None:
        """Writes and digests this slot's bytes of a step, as a trainer does."""
        stage(self.holder, step, lambda key, size: content(step, key, size))

    def wrong(self, only: int | None = None) -> list[str]:
        """Copies that count as verified, but are not what their owner staged.

        With `only` one step's; every copy must have the bytes of its digests anyway.
        """
        good, bad = self.holder.holdings()
        for step, keys in good.items():
            if only not in (None, step):
                continue
            views = self.holder.find(step, list(keys))
            for key, view in zip(keys, views, strict=True):
                if bytes(view) != content(step, key, len(view)):
                    bad.append(f"silent: step {step}: {key}")
        return bad

    @property
    def receiving(self) -> bool:
        """Whether a push is being received into this host's memory."""
        return any(one.users for one in self.holder._hosting.receiving.values())

    def close(self) -> None:
        """Ends the server and frees the memory."""
        self.server.close()
        self.holder.close()


@contextlib.contextmanager
def hosts(
    folder: Path, layout: Layout, credentials: Credentials = JOB
) -> Iterator[list[Host]]:
    """One host for each slot."""
    made: list[Host] = []
    try:
        for slot in range(layout.mesh.num_slots):
            made.append(Host(folder, slot, layout, credentials))
        yield made
    finally:
        for host in made:
            host.close()


def stage(
    holder: ReplicaStore,
    step: int,
    made: Callable[[str, int], bytes],
    kept: bytes = b"",
) -> None:
    """Writes a step as a trainer does; `made` gives the bytes of a key and size."""
    room, chunks, digests = holder.begin_stage(step), holder.map.own, []
    memory = holder.arena.view(0, holder.arena.size)
    buffers = np.frombuffer(room.buffers, np.uint8)
    for index, piece in enumerate(chunks.slices):
        data = made(piece.key, piece.nbytes)
        write(chunks.parts(memory, buffers, index), data)
        digests.append(chunk_digests(data, holder.chunk_bytes))
    holder.staged(step, digests, {"step": step}, kept)


def hand_over(
    source: ReplicaStore,
    target: ReplicaStore,
    push: Push,
    step: int,
    flip: bool = False,
) -> bool:
    """Copies a push from one holder to another, as two hosts do; whether it counts."""
    digests = source.own_digests(step, push.slices)
    found = target.begin_receive(step, source.slot, digests)
    assert found is not None
    for number in np.flatnonzero(found.lacks()).tolist():
        claimed = found.claim([number])
        assert claimed is not None
        (memory,) = claimed
        (memory[:],) = source.push_chunks(step, push, [number])
        if flip and len(memory):
            memory[len(memory) // 2] ^= 1
        found.arrived([number])
    kept = target.received(step, source.slot, found, source.items(step))
    target.end_receive(step, source.slot, found)
    return kept


def write(parts: Parts, data: bytes, at: int = 0) -> None:
    """Overwrites some bytes of what may lie in several pieces."""
    for view in parts.cut(at, at + len(data)):
        view[:], data = data[: len(view)], data[len(view) :]


def content(step: int, key: str, size: int) -> bytes:
    """What a slice holds at a step."""
    return random.Random(f"{step} {key}").randbytes(size)


def digests_of(host: Host, step: int) -> dict[str, bytes]:
    """Digests of the slices that a host owns at a step, whether or not it has them."""
    return {
        piece.key: chunk_digests(content(step, piece.key, piece.nbytes), CHUNK)
        for piece in host.holder.own_slices
    }


def order_after_loss(
    lost: Host, peer: Host, step: int, address: str = ""
) -> FetchOrder:
    """The first host's memory is overwritten; what it must fetch from the second."""
    lost.holder.keep_only(set())
    memory = lost.holder.arena.view(0, lost.holder.arena.size)
    memory[:] = b"?" * len(memory)
    digests = digests_of(lost, step)
    with lost.holder.begin_restore(step, digests, {}) as restoring:
        missing = restoring.missing
    transfer = {
        "host": f"host-{peer.slot}",
        "address": address or peer.address,
        "keys": [piece.key for piece in missing],
    }
    return FetchOrder(step=step, epoch=EPOCH, transfer=transfer, digests=digests)


def restore_order(
    lost: Host, peer: Host, step: int, epoch: tuple[int, int] = EPOCH
) -> dict[str, Any]:
    """The leader's order to restore all slices of a step from one peer."""
    return {
        "generation": epoch[0],
        "attempt": epoch[1],
        "step": step,
        "items": {},
        "read": True,
        "digests": digests_of(lost, step),
        "transfers": [
            {
                "host": f"host-{peer.slot}",
                "address": peer.address,
                "keys": [piece.key for piece in lost.holder.own_slices],
            }
        ],
    }


def fetch_back(
    holder: ReplicaStore, order: FetchOrder, credentials: Credentials, limit_s: float
) -> int:
    """Fetches own slices of an order into the arena; the bytes."""
    pieces = [it for it in holder.own_slices if it.key in order.transfer["keys"]]
    memory = {it.key: holder.own_parts(order.step, it) for it in pieces}
    return fetch_into(memory, order, credentials, holder.chunk_bytes, limit_s)


@contextlib.contextmanager
def recorded_pushes() -> Iterator[list[PushedBytes]]:
    """How every try to push ended, while the context lasts."""
    sent: list[PushedBytes] = []
    real = replication.send_push

    def recording(*arguments: Any) -> PushedBytes:
        sent.append(real(*arguments))
        return sent[-1]

    replication.send_push = recording
    try:
        yield sent
    finally:
        replication.send_push = real


def wait_until(condition: Callable[[], bool], limit_s: float = 40.0) -> None:
    """Waits for what another thread does; fails when it does not come."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def echo(channel: Channel) -> None:
    """Sends every frame back."""
    while True:
        header, payload = channel.receive(10)
        channel.send(header, [payload], timeout_s=10)
