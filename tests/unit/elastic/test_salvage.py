"""What hosts offer at a forced end, and which step of their memory is written."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from dtft.checkpoint.memory.replica_store import ReplicaStore
from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state.digests import digest_root
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.checkpoint.transport.protocol import Credentials
from dtft.checkpoint.transport.server import TransportServer, connect
from dtft.elastic.host.salvage import Holding, NotSalvaged, choose, serve_salvage
from dtft.elastic.transfer.replica_server import Inbox
from tests.support.hosts import stage

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
