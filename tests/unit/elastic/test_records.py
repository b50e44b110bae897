"""What the leader writes: fenced, in order; no step waits for a store that hangs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.replication.commit import Commit
from dtft.elastic.leader.events import Journal, read_events
from dtft.elastic.leader.records import ASSIGNMENT_PATIENCE_S, PATIENCE_S, Records
from dtft.elastic.store.api import StoreFull
from dtft.elastic.store.membership import Membership
from dtft.elastic.store.memory import MemoryStore
from dtft.elastic.store.view import View, job_key, read_commits, read_view
from tests.support.desks import record_of
from tests.support.virtual_loop import VirtualLoop, VirtualMirrors
from tests.support.virtual_world import Door


def commit_of(step: int) -> Commit:
    return Commit(
        step=step,
        generation=1,
        attempt=1,
        root="",
        layout="",
        holders=("h0",),
        copies=2,
    )


class Desk:
    """The records of a leader, with everything that they tell written down."""

    def __init__(self, directory: Path) -> None:
        self.loop, self.directory = VirtualLoop(), directory
        self.store = MemoryStore(self.loop.now)
        self.door = Door(self.store)
        self.member = Membership(
            *(self.door, VirtualMirrors(self.store, self.loop), "j", record_of("h0")),
            *(5.0, self.loop),
            on_view=lambda view: None,
            on_lapse=lambda: None,
            on_store=lambda up: None,
            on_replaced=lambda by: None,
        )
        self.written: list[tuple[str, Any]] = []
        self.delayed: list[Any] = []
        self.committing: list[int] = []
        self.journal = Journal(directory, "h0")
        self.records = Records(
            *(self.member, self.take_key(), [], self.loop, self.journal, "s:1"),
            on_written=lambda label, value: self.written.append((label, value)),
            on_delayed=self._delayed,
            on_committing=self.committing.append,
        )

    def _delayed(self, label: str, value: Any) -> None:
        self.delayed.append(value.step if label == "commit" else value)

    def take_key(self, host: str = "h0") -> View:
        """A host has the leader key from now on."""
        self.store.delete(job_key("j", "m/leader"))
        self.store.put(job_key("j", "m/leader"), host.encode())
        return read_view(self.store, "j")[0]

    def commit(self, step: int) -> None:
        self.records.commit(commit_of(step))

    @property
    def stored(self) -> list[int]:
        """Steps of the commits that the store has."""
        return [commit.step for commit in read_commits(self.store, "j")]

    def said(self) -> list[str]:
        self.journal.close(20)
        return [event["text"] for event in read_events(self.directory)]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.records.close()


def test_a_commit_is_recorded_with_the_one_before_it(desk: Desk) -> None:
    for step in (1, 2, 3):
        desk.commit(step)
        desk.loop.turn()
    assert desk.stored == [3, 2] and not desk.delayed
    assert desk.written == [("commit", commit_of(step)) for step in (1, 2, 3)]
    assert desk.committing == [1, 2, 3]
    desk.loop.turn(10)
    assert not desk.delayed and not desk.said()


def test_a_store_that_hangs_delays_the_first_commit_briefly_and_others_at_once(
    desk: Desk,
) -> None:
    desk.commit(1)
    desk.loop.turn()
    desk.loop.hold("records")
    desk.commit(2)
    desk.loop.turn(PATIENCE_S - 0.1)
    assert not desk.delayed
    desk.loop.turn(0.2)
    assert desk.delayed == [2] and desk.records.away
    for step in (3, 4, 5):
        desk.commit(step)
        assert desk.delayed[-1] == step
    desk.loop.turn(20)
    assert desk.delayed == [2, 3, 4, 5] and desk.stored == [1]
    desk.loop.let_go("records")
    desk.loop.turn(1)
    # What was under way is recorded, then the newest; what waited between is replaced.
    assert [value.step for _, value in desk.written] == [1, 2, 5]
    # Hosts keep the last commit that they were told of, so the record does as well.
    assert desk.stored == [5, 1] and not desk.records.away
    away, back = desk.said()
    assert "s:1 does not answer; training goes on" in away
    assert back.startswith("the store answers again")


def test_an_assignment_that_waits_for_the_store_is_told_once(desk: Desk) -> None:
    desk.records.put("assignment", (1, 1), "assignment", "{}")
    desk.loop.turn(10)
    assert desk.written == [("assignment", (1, 1))] and not desk.delayed
    desk.loop.hold("records")
    desk.records.put("assignment", (1, 2), "assignment", "{}")
    desk.loop.turn(ASSIGNMENT_PATIENCE_S - 0.1)
    assert not desk.delayed
    desk.loop.turn(10)
    assert desk.delayed == [(1, 2)]
    desk.loop.let_go("records")
    desk.loop.turn(1)
    assert desk.written[-1] == ("assignment", (1, 2))


def test_a_commit_is_recorded_with_one_that_was_recorded_while_it_waited(
    desk: Desk,
) -> None:
    desk.commit(1)
    desk.loop.turn()
    desk.loop.hold("records")
    desk.commit(2)
    desk.loop.turn(0.1)
    desk.commit(3)  # hosts keep 2: nobody was told to go on without the store
    desk.loop.let_go("records")
    desk.loop.turn(0.1)
    assert desk.stored == [3, 2] and not desk.delayed
    assert [commit.step for commit in desk.records.commits] == [3, 2]


def test_a_commit_that_fails_late_is_not_told_of_again(desk: Desk) -> None:
    desk.loop.hold("records")
    desk.commit(1)
    desk.loop.turn(1)
    desk.commit(2)
    assert desk.delayed == [1, 2]
    desk.door.shut = True
    desk.loop.let_go("records")
    desk.loop.turn(5)
    assert desk.delayed == [1, 2]


def test_a_store_that_refuses_is_asked_until_it_answers(desk: Desk) -> None:
    desk.door.shut = True
    for step in (1, 2, 3):
        desk.commit(step)
        desk.loop.turn(0.05)
    assert desk.delayed == [1, 2, 3]
    desk.loop.turn(20)
    desk.door.shut = False
    desk.loop.turn(1)
    assert [value.step for _, value in desk.written] == [3]
    desk.commit(4)
    desk.loop.turn()
    assert desk.written[-1] == ("commit", commit_of(4)) and desk.delayed == [1, 2, 3]


def test_a_write_whose_answer_was_lost_is_written_again(desk: Desk) -> None:
    desk.door.lost = ["txn"]
    desk.commit(1)
    desk.loop.turn(1)
    assert desk.stored == [1] and desk.written == [("commit", commit_of(1))]


def test_of_each_kind_of_write_the_newest_is_kept(desk: Desk) -> None:
    desk.loop.hold("records")
    desk.records.put("assignment", "first", "assignment", "{}")
    desk.records.put("stored", 5, "stored", "5")
    desk.commit(6)
    desk.records.put("stored", 6, "stored", "6")
    desk.loop.turn(5)
    desk.loop.let_go("records")
    desk.loop.turn(1)
    assert [label for label, _ in desk.written] == ["assignment", "commit", "stored"]
    assert read_view_stored(desk) == 6


def read_view_stored(desk: Desk) -> int:
    pair = desk.store.get(job_key("j", "m/stored"))
    assert pair is not None
    return int(pair.value)


def test_what_the_fence_refused_waits_for_a_renewed_term(desk: Desk) -> None:
    view = desk.take_key()  # the leader's lease ran out, and it has the key again
    desk.commit(1)
    desk.loop.turn(5)
    assert not desk.stored and not desk.written
    desk.records.see(view)
    desk.loop.turn(1)
    assert desk.stored == [1] and desk.written == [("commit", commit_of(1))]


def test_a_store_that_refuses_a_write_is_there_again(desk: Desk) -> None:
    desk.door.shut = True
    desk.commit(1)
    desk.loop.turn(1)
    assert desk.records.away
    desk.take_key("h1")
    desk.door.shut = False
    desk.loop.turn(5)
    assert not desk.records.away and not desk.stored


def test_a_term_that_was_renewed_while_a_write_was_refused_is_used_at_once(
    desk: Desk,
) -> None:
    desk.loop.hold("records")
    desk.commit(1)
    desk.loop.turn()
    desk.records.see(desk.take_key())
    desk.loop.let_go("records")
    desk.loop.turn(1)
    assert desk.stored == [1]


def test_nothing_is_written_over_another_leader(desk: Desk) -> None:
    desk.take_key("h1")
    for step in (1, 2):
        desk.commit(step)
        desk.loop.turn(5)
    assert not desk.stored and not desk.written
    assert desk.delayed == [2] or desk.delayed == [1, 2]


def test_a_full_store_is_made_room_in(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    txn = desk.store.txn

    def full(*arguments: Any) -> bool:
        if not calls:
            raise StoreFull("database space exceeded")
        return txn(*arguments)

    monkeypatch.setattr(desk.store, "txn", full)
    monkeypatch.setattr(desk.store, "reclaim", lambda: calls.append("reclaim"))
    desk.commit(1)
    desk.loop.turn(1)
    assert calls == ["reclaim"] and desk.stored == [1]


def test_commits_that_only_hosts_know_count(desk: Desk) -> None:
    desk.commit(3)
    desk.records.learn([commit_of(4), commit_of(3), commit_of(2)])
    assert [commit.step for commit in desk.records.commits] == [4, 3]
    assert desk.records.last_step == 4


def test_a_closed_writer_says_nothing_more(desk: Desk) -> None:
    desk.loop.hold("records")
    desk.commit(1)
    desk.loop.turn(0.1)
    desk.records.close()
    desk.loop.let_go("records")
    desk.loop.turn(5)
    assert not desk.written and not desk.delayed
