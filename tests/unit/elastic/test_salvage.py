"""What hosts offer at a forced end, and which step of their memory is written."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.memory.replica_store import ReplicaStore
from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state.digests import chunk_digests, digest_root
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.checkpoint.transport.protocol import Credentials
from dtft.checkpoint.transport.server import TransportServer, connect
from dtft.elastic.host import salvage
from dtft.elastic.host.salvage import (
    CHUNK_BYTES,
    Holding,
    NotSalvaged,
    Salvage,
    choose,
    serve_salvage,
    undivided,
    write_address,
)
from dtft.elastic.transfer.replica_server import Inbox
from tests.support.hosts import JOB, Host, hosts, replicated, stage

MESH = MeshLayout(axis_names=("fsdp",), axis_sizes=(2,), slots=(0, 1))
LAYOUT = Layout(
    mesh=MESH,
    leaves=(Leaf(path="w", shape=(4,), dtype="int8", spec=(("fsdp",),)),),
)
FIRST, SECOND = "w[0:2]:int8", "w[2:4]:int8"


def holding(
    host: str, held: Mapping[int, Mapping[str, bytes]], epoch: tuple[int, int] = (1, 1)
) -> Holding:
    return Holding(
        host=host,
        address="127.0.0.1:1",
        epoch=epoch,
        layout=LAYOUT.to_json(),
        chunk_bytes=16,
        held=held,
        items={step: {"step": step} for step in held},
    )


def root(*digests: bytes) -> str:
    return digest_root(zip((FIRST, SECOND), digests, strict=True))


def test_the_newest_complete_step_is_chosen() -> None:
    a = holding("a", {7: {FIRST: b"1"}, 8: {FIRST: b"3"}})
    b = holding("b", {7: {SECOND: b"2"}})
    chosen = choose([a, b], {7: root(b"1", b"2")}, above=5)
    assert chosen.step == 7 and chosen.items == {"step": 7}
    assert {key: it.host for key, it in chosen.sources.items()} == {
        FIRST: "a",
        SECOND: "b",
    }


def test_a_step_that_storage_has_is_not_written_again() -> None:
    both = holding("a", {7: {FIRST: b"1", SECOND: b"2"}})
    with pytest.raises(NotSalvaged, match="no step after 7"):
        choose([both], {}, above=7)


def test_bytes_that_are_not_the_commits_are_not_used() -> None:
    wrong = holding("a", {7: {FIRST: b"9", SECOND: b"2"}})
    right = holding("b", {7: {FIRST: b"1"}})
    chosen = choose([wrong, right], {7: root(b"1", b"2")}, above=0)
    assert chosen.sources[FIRST].host == "b"
    with pytest.raises(NotSalvaged, match="do not add up"):
        choose([wrong], {7: root(b"1", b"2")}, above=0)


def test_a_step_that_was_not_recorded_needs_one_formation_that_agrees() -> None:
    a = holding("a", {8: {FIRST: b"1", SECOND: b"2"}}, epoch=(1, 2))
    former = holding("b", {8: {SECOND: b"9"}}, epoch=(1, 1))
    assert choose([a, former], {}, above=0).step == 8
    odd = holding("b", {8: {SECOND: b"9"}}, epoch=(1, 2))
    with pytest.raises(NotSalvaged, match="different bytes"):
        choose([a, odd], {}, above=0)


def test_nobody_and_nothing_are_said() -> None:
    with pytest.raises(NotSalvaged, match="no host answered"):
        choose([], {}, above=0)
    with pytest.raises(NotSalvaged, match="1 of 2 slices"):
        choose([holding("a", {8: {FIRST: b"1"}})], {}, above=0)


@pytest.mark.parametrize("when", ["before its copies are listed", "after that"])
def test_a_step_that_is_dropped_meanwhile_is_not_offered(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = ReplicaStore(
        LAYOUT, 0, place_copies(LAYOUT, 1), path=tmp_path / "arena", chunk_bytes=16
    )
    for step in (7, 8):
        stage(holder, step, lambda key, size: bytes(size))
    listed = holder.copies

    def copies(step: int) -> list:
        if when == "after that":
            found = listed(step)
            holder.keep_only({8})
            return found
        holder.keep_only({8})
        return listed(step)

    monkeypatch.setattr(holder, "copies", copies)
    inbox = Inbox(epoch=lambda: (1, 1), holder=lambda: holder, held=lambda *_: None)
    secret = Credentials(job="j", secret=b"s" * 32)
    handlers = {"salvage": lambda channel: serve_salvage(channel, inbox)}
    with (
        contextlib.closing(holder),
        contextlib.closing(TransportServer("127.0.0.1:0", secret, handlers)) as server,
        connect(server.address, secret, {"op": "salvage"}, 5.0) as channel,
    ):
        told, _ = channel.receive(5.0)
        channel.send({"done": True}, timeout_s=5.0)
    (offered,) = told["holders"]
    assert list(offered["held"]) == list(offered["items"]) == [8]


class Exporter:
    """In place of the exporter process: says of each step that it is stored."""

    saved: bytes
    """The digests of the newest step, in the order of its arrays."""

    def __init__(self, opening: Any, log_path: Path, hear: Callable[..., None]) -> None:
        self._hear = hear

    def save(self, made: Callable[[], dict[str, Any]], limit_s: float) -> None:
        fields = made()
        Exporter.saved = b"".join(map(bytes.fromhex, fields["digests"]))
        self._hear(self, {"ok": True, "step": fields["step"]})

    def close(self) -> None:
        """Nothing runs."""


def corrupt(host: Host, key: str) -> None:
    """Flips a byte of a host's newest copy of a slice, in its memory."""
    view = host.holder.here(max(host.holder.steps()))[key].views[0]
    view[len(view) // 2] ^= 1


@pytest.mark.parametrize("recorded", [True, False])
def test_corrupt_copies_are_left_out_of_the_next_choice(
    recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(salvage, "start_exporter", Exporter)
    monkeypatch.setattr(salvage, "ASK_S", 20.0)
    layout = replicated(2)
    (tmp_path / "checkpoints").mkdir()
    with hosts(tmp_path, layout) as (a, b):
        for host in (a, b):
            stage(host.holder, 7, lambda key, size: bytes(size))
            memory = tmp_path / f"host-{host.slot}"
            memory.mkdir()
            write_address(memory, host.address, tls=False)
        recorded_digests = {key: it for key, _, it in a.holder.copies(7) if it}
        roots = {7: digest_root(recorded_digests.items())} if recorded else {}
        work = Salvage(
            job=JOB.job,
            secret=JOB.secret,
            memory_directories={f"host-{it}": tmp_path / f"host-{it}" for it in (0, 1)},
            scratch=tmp_path / "dtft-salvage",
            storage_directory=tmp_path / "checkpoints",
            storage_keep=2,
            log_path=tmp_path / "log",
        )
        keys = [it.key for it in layout.slices(0) if it.nbytes > 7]
        corrupt(a, keys[0])
        corrupt(b, keys[1])
        assert work.run(roots, 40.0) == 7
        whole = [bytes(it.nbytes) for it in undivided(layout).slices(0)]
        assert Exporter.saved == b"".join(
            chunk_digests(it, CHUNK_BYTES) for it in whole
        )
        corrupt(b, keys[0])
        with pytest.raises(
            NotSalvaged, match=f"corrupt copies: host-0 step 7: {keys[0][:3]}"
        ):
            work.run(roots, 40.0)
