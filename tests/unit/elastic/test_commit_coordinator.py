"""The leader's commit coordinator: commits, releases and exports of one formation."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.replication.commit import Commit
from dtft.checkpoint.replication.copy_placement import Shares
from dtft.checkpoint.replication.snapshot_interval import (
    Automatic,
    Cadence,
    SnapshotSchedule,
)
from dtft.elastic.assignment import SlotAssignment
from dtft.elastic.leader.commit_coordinator import GRACE_S, CommitCoordinator
from dtft.elastic.leader.storage import FIRST_PAUSE_S, StorageHealth
from tests.support.commits import HOSTS, layout, root_of, value
from tests.support.desks import agent_config


class Desk:
    """A commit coordinator with everything that it does written down."""

    def __init__(self, replica: int, fsdp: int, **changes: Any) -> None:
        state = layout(replica, fsdp)
        self.state, self.sent, self.recorded = state, [], []
        self.health, self.now = StorageHealth("/nowhere"), 0.0
        slots = HOSTS[: state.mesh.num_slots]
        config = agent_config(Path("/nowhere"), "h0", num_slots=len(slots), **changes)
        self.assignment = SlotAssignment(
            generation=3,
            attempt=2,
            slots=slots,
            incarnations=slots,
            source="memory",
            step=10,
            rung=2,
            reason="test",
        )
        self.coordinator = CommitCoordinator(
            config,
            state,
            self.assignment,
            stored=10,
            export_addresses={host: f"{host}:9" for host in slots},
            addresses={host: f"{host}:1" for host in slots},
            record=self.recorded.append,
            send=lambda host, op, **fields: self.sent.append((host, op, fields)),
            health=self.health,
            clock=lambda: self.now,
        )

    def stage(self, step: int) -> None:
        for slot in range(self.state.mesh.num_slots):
            digests = [value(p.key) for p in self.state.slices(slot)]
            self.coordinator.staged(slot, step, digests)

    def hold(self, step: int) -> None:
        for push in self.coordinator.placement.pushes:
            self.coordinator.held(step, push.source, push.target, root_of(push))

    def commit(self, step: int) -> None:
        self.stage(step)
        self.hold(step)
        self.coordinator.written(self.recorded[-1])

    def ops(self, op: str) -> list[tuple[str, dict]]:
        return [(host, fields) for host, found, fields in self.sent if found == op]


def test_a_step_is_recorded_once_every_copy_is_verified():
    desk = Desk(1, 4)
    desk.stage(11)
    assert desk.recorded == [] and "copy of slot" in desk.coordinator.waiting_for()
    desk.hold(11)
    (commit,) = desk.recorded
    assert (commit.step, commit.generation, commit.attempt) == (11, 3, 2)
    assert commit.copies == 2 and desk.ops("release") == []
    desk.coordinator.written(commit)
    assert [host for host, _ in desk.ops("release")] == list(HOSTS)
    assert all(fields["committed"] for _, fields in desk.ops("release"))
    told = {Commit.from_json(fields["commit"]) for _, fields in desk.ops("release")}
    assert told == {replace(commit, holders=())}
    assert desk.coordinator.committed == 11 and desk.coordinator.pending is None


def test_a_store_outage_releases_without_committing():
    desk = Desk(2, 1)
    desk.stage(11)
    desk.coordinator.delayed(desk.recorded[0])
    assert not any(fields["committed"] for _, fields in desk.ops("release"))
    assert desk.coordinator.committed == 10 and desk.coordinator.pending is not None


def test_a_step_whose_copies_are_gone_when_it_is_recorded_is_not_exported():
    desk = Desk(2, 1, storage_interval=1)
    for step in (11, 12, 13):
        desk.stage(step)
        desk.coordinator.delayed(desk.recorded[-1])
    desk.coordinator.written(desk.recorded[0])  # it was under way while the store hung
    assert desk.ops("export") == [] and desk.coordinator.committed == 11
    desk.coordinator.written(desk.recorded[2])
    assert [fields["step"] for _, fields in desk.ops("export")] == [13]


def test_export_is_ordered_from_the_fewest_hosts_when_due():
    desk = Desk(2, 2, storage_interval=5)
    for step in range(11, 16):
        desk.stage(step)
        desk.coordinator.written(desk.recorded[-1])
    orders = desk.ops("export")
    assert [(h, o["step"], o["rank"], o["world"]) for h, o in orders] == [
        ("h0", 15, 0, 2),
        ("h1", 15, 1, 2),
    ]
    assert {fields["coordinator"] for _, fields in orders} == {"h0:9"}
    assert desk.coordinator.export_answer("h0", 15, True) is None
    assert desk.coordinator.exporting == 15
    assert desk.coordinator.export_answer("h1", 15, True) is True
    assert desk.coordinator.exporting is None


def test_hosts_that_are_left_export_for_those_that_are_gone():
    desk = Desk(2, 2)
    held = {
        host: {piece.key: b"" for piece in desk.state.slices(slot)}
        for slot, host in enumerate(HOSTS)
    }
    assert desk.coordinator.export_from(12, {"h0", "h3"}, held)
    orders = [(host, o["slot"], o["rank"]) for host, o in desk.ops("export")]
    assert orders == [("h0", 0, 0), ("h3", 1, 1)]
    assert not desk.coordinator.export_from(12, {"h0", "h2"}, held)


def test_an_answer_to_an_order_that_was_replaced_does_not_count():
    desk = Desk(2, 2)
    held = {
        host: {piece.key: b"" for piece in desk.state.slices(slot)}
        for slot, host in enumerate(HOSTS)
    }
    assert desk.coordinator.export_from(12, set(HOSTS), held)
    assert desk.coordinator.export_from(12, {"h0", "h3"}, held)
    first, _, second, _ = (order["failures"] for _, order in desk.ops("export"))
    assert desk.coordinator.export_answer("h0", 12, True, first) is None
    assert desk.coordinator.export_answer("h3", 12, True, first) is None
    assert desk.coordinator.export_answer("h0", 12, True, second) is None
    assert desk.coordinator.export_answer("h3", 12, True, second) is True


def test_a_failed_export_is_tried_again_after_a_pause():
    desk = Desk(2, 1, storage_interval=1)
    desk.commit(11)
    assert desk.coordinator.export_answer("h0", 11, False) is False
    desk.health.failed(11, "h0", "full", desk.now)
    assert (
        desk.coordinator.export_failures(11) == 1
        and desk.coordinator.export_failures(12) == 0
    )
    desk.commit(12)
    assert desk.coordinator.exporting is None
    desk.now += FIRST_PAUSE_S
    desk.commit(13)
    assert desk.coordinator.exporting == 13
    assert [fields["failures"] for _, fields in desk.ops("export")] == [0, 1]


def test_a_step_due_while_another_is_written_is_overdue():
    desk = Desk(2, 1, storage_interval=5)
    desk.commit(15)
    desk.commit(19)
    assert desk.coordinator.exporting == 15 and desk.coordinator.overdue is None
    desk.commit(20)
    assert desk.coordinator.overdue == 20
    desk.coordinator.export_answer("h0", 15, True)
    desk.commit(21)
    assert desk.coordinator.exporting == 21 and desk.coordinator.overdue is None


def test_an_export_that_nobody_answers_is_given_up():
    desk = Desk(1, 2, storage_interval=1)
    desk.commit(11)
    desk.coordinator.export_answer("h0", 11, True)
    desk.now += 300
    assert desk.coordinator.silent_export() is None
    desk.now += GRACE_S
    assert desk.coordinator.silent_export() == (11, "h1")
    assert desk.coordinator.export_answer("h1", 11, False) is False
    assert desk.coordinator.silent_export() is None


def test_writers_borrow_what_was_not_their_turn_to_copy():
    desk = Desk(3, 1, share="divided", storage_interval=5)
    shares = Shares(desk.state, copies=2)
    turn = next(turn for turn in range(3) if not shares.of(0, turn).all())
    for slot in range(3):
        mine = zip(desk.state.slices(slot), shares.of(slot, turn), strict=True)
        digests = [value(piece.key) if copied else b"" for piece, copied in mine]
        desk.coordinator.staged(slot, 15, digests)
    (commit,) = desk.recorded
    assert commit.share == "divided"
    desk.coordinator.written(commit)
    (order,) = [fields for _, fields in desk.ops("export")]
    lacking = [
        piece.key
        for piece, copied in zip(desk.state.slices(0), shares.of(0, turn), strict=True)
        if not copied
    ]
    assert lacking
    asked = [key for one in order["transfers"] for key in one["keys"]]
    assert sorted(asked) == sorted(order["digests"]) == sorted(lacking)
    assert order["digests"] == {key: value(key) for key in lacking}
    sources = sorted({one["host"] for one in order["transfers"]})
    assert "h0" not in sources
    assert desk.ops("lend") == [(host, {"step": 15}) for host in sources]
    assert desk.coordinator.export_answer("h0", 15, True)
    assert desk.ops("lend")[len(sources) :] == [
        (host, {"step": -1}) for host in sources
    ]


@pytest.mark.parametrize("interval", [1, 4])
def test_stop_names_a_boundary_that_no_trainer_has_passed(interval):
    desk = Desk(2, 1, cadence=Cadence.every(interval))
    desk.coordinator.stopping = True
    desk.stage(12)
    desk.coordinator.written(desk.recorded[-1])
    assert {f["stop_at"] for _, f in desk.ops("release")} == {12 + interval}


def windows(step_s: float, snapshot_s: float, interval: int) -> dict[str, float]:
    """What a trainer measures when replication ends within the third step."""
    affected = min(3, interval)
    quiet = interval - affected
    return {
        "affected_steps": affected,
        "affected_s": affected * step_s + snapshot_s,
        "quiet_steps": quiet,
        "quiet_s": quiet * step_s,
        "stall_s": snapshot_s / 2,
    }


def test_an_automatic_interval_is_told_before_any_trainer_needs_it():
    allowed = Automatic(budget=0.01, maximum=32)
    cadence = Cadence(interval=1, period=32)
    desk = Desk(2, 1, cadence=cadence, automatic=allowed)
    trainers = [SnapshotSchedule.of(cadence), SnapshotSchedule.of(cadence)]
    step, previous, used = 11, 10, []
    while step < 400:
        for slot, trainer in enumerate(trainers):
            # Each goes on alone up to its next boundary: it must be the other's.
            following = next(
                s for s in itertools.count(previous + 1) if trainer.is_boundary(s)
            )
            assert following == step
            interval = trainer.interval(after=step)
            window = windows(0.1, 0.01, step - previous)
            digests = [value(p.key) for p in desk.state.slices(slot)]
            desk.coordinator.staged(slot, step, digests, interval, window)
        desk.hold(step)
        desk.coordinator.written(desk.recorded[-1])
        _, told = desk.ops("release")[-1]
        trainers = [_tell(trainer, told["changes"]) for trainer in trainers]
        used.append(desk.recorded[-1].interval)
        previous, step = (
            step,
            next(s for s in itertools.count(step + 1) if trainers[0].is_boundary(s)),
        )
    assert used[:8] == [1] * 8 and max(used) == 16 and used[-1] == 16
    assert desk.coordinator.intervals.reach == 16
    assert sum(a != b for a, b in itertools.pairwise(used)) == 1


def _tell(
    trainer: SnapshotSchedule, changes: Sequence[tuple[int, int]]
) -> SnapshotSchedule:
    for after, interval in changes:
        trainer = trainer.changed(interval, after=after)
    return trainer


def test_a_restored_job_goes_on_with_the_interval_of_its_commit():
    allowed = Automatic(budget=0.01, maximum=32)
    cadence = Cadence(interval=1, period=32)
    desk = Desk(2, 1, cadence=cadence, automatic=allowed)
    desk.coordinator.stopping = True
    assert desk.coordinator.intervals.reach == 32
    desk.coordinator.intervals.resumed(
        desk.assignment, [replace(commit(10), interval=8)]
    )
    assert desk.coordinator.intervals.reach == 8
    for slot in range(2):
        digests = [value(p.key) for p in desk.state.slices(slot)]
        desk.coordinator.staged(slot, 16, digests, 8, windows(0.1, 0.01, 8))
    desk.hold(16)
    assert desk.recorded[-1].interval == 8 and desk.coordinator.stop_at == 24
    assert (
        desk.coordinator.intervals.changes == ()
        and desk.coordinator.intervals.reach == 8
    )


def commit(step: int) -> Commit:
    return Commit(
        step=step,
        generation=1,
        attempt=1,
        root="",
        layout="",
        holders=(),
        copies=2,
    )
