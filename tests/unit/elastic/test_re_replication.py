"""After a loss copies are pushed again, and only then the job calls itself healthy."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.replication.commit import Mislabelled, StepTracker
from dtft.checkpoint.replication.copy_placement import Spread
from dtft.elastic.assignment import HostRecord, SlotAssignment
from dtft.elastic.leader.events import Journal, read_events
from dtft.elastic.leader.re_replication import (
    ReReplication,
    ReReplicator,
    re_replication_of,
)
from dtft.elastic.leader.recovery import decide
from dtft.elastic.leader.rendezvous_plan import Round, lost
from dtft.elastic.store.view import View
from dtft.elastic.transfer.replication import Pusher
from tests.support.commits import HOSTS, commit_of, holdings_of, layout, root_of
from tests.support.hosts import (
    EPOCH,
    JOB,
    divided,
    hosts,
    order_after_loss,
    wait_until,
)
from tests.support.obedient_desk import ObedientDesk

SHAPES = [(1, 4), (2, 2), (4, 1)]


def after_loss(
    shape: tuple[int, int], dead: int, domains: Mapping[str, str] | None = None
) -> tuple[ReReplication, Round, tuple[str, ...]]:
    state = layout(*shape)
    holdings = holdings_of(state, 2, 7)
    del holdings[HOSTS[dead]]
    slots = tuple("spare" if slot == dead else h for slot, h in enumerate(HOSTS))
    round_ = Round(ballot=(1, 2), reasons=[lost("b")], detected=0.0)
    round_.reply("h3", {"layouts": [state.to_json()], "corrupt": [], "finished": 7})
    round_.decision = decide(
        commits=[commit_of(state, 7)],
        layout=state,
        holdings=holdings,
        slots=slots,
        storage_steps=[],
    )
    round_.assignment = SlotAssignment(
        generation=2,
        attempt=1,
        slots=slots,
        incarnations=slots,
        source="memory",
        step=7,
        rung=2,
        reason="",
    )
    located = round_.decision.located
    assert located is not None
    placement = Spread().place(state)
    repair = re_replication_of(
        7, placement, slots, located.holders, domains or {}, 5.0, located.digests
    )
    return repair, round_, slots


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dead", range(4))
def test_what_is_pushed_again_brings_the_copies_up(
    shape: tuple[int, int], dead: int
) -> None:
    repair, round_, slots = after_loss(shape, dead)
    state = layout(*shape)
    decision = round_.decision
    assert decision is not None and decision.located is not None
    held = {key: set(found) for key, found in decision.located.holders.items()}
    for piece, owners in state.owners.items():
        held[piece.key] |= {slots[slot] for slot in owners}
    for push in repair.pushes:
        assert slots[push.target] == "spare"
        for piece in push.slices:
            assert slots[push.source] in held[piece.key]
            held[piece.key].add(slots[push.target])
    assert all(len(found & set(slots)) >= 2 for found in held.values())
    # Data-parallel owners hold everything: nothing is missing there.
    assert bool(repair.pushes) == (shape == (1, 4)) == (repair.copies < 2)
    assert repair.whole == (not repair.pushes)


def test_copies_are_counted_by_domain_and_on_hosts_with_slots_only() -> None:
    racks = {"h0": "1", "h1": "2", "h2": "1", "h3": "2"}
    apart = {"spare": "1", **racks}
    assert after_loss((2, 2), 0)[0].copies == 2
    assert after_loss((2, 2), 0, apart)[0].copies == 1  # replicas share a rack
    assert after_loss((4, 1), 0, apart)[0].copies == 2
    state = layout(1, 4)
    elsewhere = {piece.key: ("far",) for piece in state.owners}
    repair = re_replication_of(7, Spread().place(state), HOSTS, elsewhere, {}, 5.0, {})
    assert repair.copies == 1 and len(repair.pushes) == 4


def test_held_pushes_count_for_their_step_only() -> None:
    repair, _, _ = after_loss((1, 4), 1)
    (push,) = repair.pushes
    assert (push.source, push.target) == (0, 1) and repair.targets(0) == [1]
    assert repair.degraded_line(2) == (
        "degraded: slices of step 7 have 1 of 2 copies; 32 B are pushed again to 1 host"
    )
    repair.held(8, 0, 1, root_of(push))
    assert not repair.whole
    repair.held(7, 0, 1, root_of(push))
    assert repair.whole
    assert repair.healthy_line(2, 0, 7.5) == (
        "healthy again: every slice has 2 copies, 32 B re-replicated in 2.50 s"
    )
    assert "step 9 was committed with 2 copies" in repair.healthy_line(2, 9, 7.5)


class Desk:
    """A re-replicator whose orders are written down."""

    def __init__(self, directory: Path, racks: Mapping[str, str] | None = None) -> None:
        self.orders: list[tuple[str, str, dict[str, Any]]] = []
        self.journal = Journal(directory, "h0")
        self.re_replicator = ReReplicator(
            self.journal,
            lambda host, op, **fields: self.orders.append((host, op, fields)),
            lambda: 7.0,
        )
        self.directory = directory
        self.view = View(
            hosts={host: record(host, racks) for host in (*HOSTS, "spare")}
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        self.journal.close(20)  # waits until all is written
        return [e for e in read_events(self.directory) if e["event"] == kind]

    def said(self) -> str:
        return "\n".join(event["text"] for event in self.events("message"))


def record(host: str, racks: Mapping[str, str] | None) -> HostRecord:
    label = f"rack={racks[host]}" if racks else ""
    return HostRecord(
        host=host, address="", incarnation=host, joined_ns=0, pid=1, domain=label
    )


def test_a_job_is_healthy_once_the_copies_are_back(tmp_path: Path) -> None:
    desk, (_, round_, _) = Desk(tmp_path), after_loss((1, 4), 1)
    desk.view = View(hosts=desk.view.hosts, assignment=round_.assignment)
    desk.re_replicator.begin(round_, desk.view)
    fields = {"ballot": (1, 2), "step": 7, "targets": [1]}
    assert desk.orders == [("h0", "replicate", fields)]
    assert "degraded" in desk.said() and "healthy" not in desk.said()
    (push,) = (it for it in Spread().place(layout(1, 4)).pushes if it.target == 1)
    root = root_of(push)
    with pytest.raises(Mislabelled, match="slot 1 is not of step 7"):
        desk.re_replicator.held(round_, 7, 0, 1, "f" * 32)
    desk.re_replicator.held(None, 7, 0, 1, root)  # of another formation
    assert desk.events("replicated") == []
    desk.re_replicator.held(round_, 7, 0, 1, root)
    assert "healthy again: every slice has 2 copies" in desk.said()
    (event,) = desk.events("replicated")
    assert (event["healthy"], event["copies"], event["num_bytes"]) == (True, 2, 32)
    desk.re_replicator.committed(round_, 8)
    assert len(desk.events("replicated")) == 1


def test_the_leader_counts_copies_on_the_hosts_that_have_slots_now(
    tmp_path: Path,
) -> None:
    with contextlib.closing(ObedientDesk(tmp_path, hosts=3)) as desk:
        desk.lose("h1")
        desk.loop.turn_until(lambda: desk.phase == "running")  # faster than the watch
        view = desk.leader.view.assignment
        assert view is not None and view.slots == ("h0", "h1")
        assert desk.assignment is not None and desk.assignment.slots == ("h0", "h2")
        (*_, event) = [it for it in desk.events() if it["event"] == "replicated"]
        assert (event["copies"], event["copies_asked"]) == (2, 2)


def test_a_newer_commit_makes_it_healthy_too(tmp_path: Path) -> None:
    desk, (_, round_, _) = Desk(tmp_path), after_loss((1, 4), 1)
    desk.view = View(hosts=desk.view.hosts, assignment=round_.assignment)
    desk.re_replicator.begin(round_, desk.view)
    desk.re_replicator.committed(round_, 8)
    assert "step 8 was committed with 2 copies" in desk.said()


def test_a_spare_in_its_partners_rack_leaves_the_job_degraded(tmp_path: Path) -> None:
    racks = {"h0": "1", "h1": "2", "h2": "1", "h3": "2", "spare": "1"}
    desk, (_, round_, _) = Desk(tmp_path, racks), after_loss((1, 4), 1)
    assert round_.assignment is not None
    spread = Spread(copies=2, level="rack", domains=("1", "2", "1", "2"))
    round_.assignment = SlotAssignment(**{**vars(round_.assignment), "spread": spread})
    desk.view = View(hosts=desk.view.hosts, assignment=round_.assignment)
    desk.re_replicator.begin(round_, desk.view)
    (push,) = (it for it in spread.place(layout(1, 4)).pushes if it.target == 1)
    desk.re_replicator.held(round_, 7, 0, 1, root_of(push))
    (event,) = desk.events("replicated")
    assert (event["healthy"], event["copies"], event["copies_asked"]) == (False, 1, 2)
    assert "healthy again" not in desk.said()


def test_replicated_layouts_are_healthy_at_once(tmp_path: Path) -> None:
    desk, (_, round_, _) = Desk(tmp_path), after_loss((4, 1), 2)
    desk.view = View(hosts=desk.view.hosts, assignment=round_.assignment)
    desk.re_replicator.begin(round_, desk.view)
    (event,) = desk.events("replicated")
    assert event["healthy"] and event["num_bytes"] == 0
    assert desk.orders == [] and desk.said() == ""


def test_a_push_of_another_step_under_this_ones_number_is_noticed(
    tmp_path: Path,
) -> None:
    state = divided(2)
    with hosts(tmp_path, state) as (source, target):
        tracker = StepTracker(state, source.holder.placement, 8)
        for step in (7, 8):
            source.stage(step)
        tracker.staged(source.slot, source.holder.all_own_digests(8))
        own, (push,) = source.holder._own, source.holder.outgoing
        pusher = Pusher(source.holder, push, target.address, JOB, EPOCH, 10.0)
        right, own.copies[8] = own.copies[8], own.copies[7]  # a program's error
        try:
            pusher.offer(8)
            wait_until(lambda: target.held == [(8, source.slot)])
        finally:
            pusher.close()
            own.copies[8] = right
        assert target.holder.holdings()[1] == []  # every bit is as it was sent
        with pytest.raises(Mislabelled, match="is not of step 8"):
            tracker.held(source.slot, target.slot, target.roots[8, source.slot])


def test_a_restored_step_is_pushed_to_the_new_host(tmp_path: Path) -> None:
    with hosts(tmp_path, divided(2)) as (kept, lost):
        for host in (kept, lost):
            host.stage(7)
        (push,) = kept.holder.outgoing
        order_after_loss(lost, kept, 7)
        pusher = Pusher(kept.holder, push, lost.address, JOB, EPOCH, 10.0)
        try:
            assert pusher.target == lost.slot
            pusher.offer(7)
            wait_until(lambda: lost.held == [(7, kept.slot)])
        finally:
            pusher.close()
        # A copy that rots is found, forgotten, and can be sent again.
        (parts,) = lost.holder.find(7, [push.slices[0].key])
        parts.views[0][0] ^= 1
        assert any("step 7: big" in text for text in lost.holder.holdings()[1])
        again = Pusher(kept.holder, push, lost.address, JOB, EPOCH, 10.0)
        try:
            again.offer(7)
            wait_until(lambda: len(lost.held) == 2)
        finally:
            again.close()
        hosted = {f"step 7: {piece.key}" for piece in push.slices}
        assert hosted.isdisjoint(lost.holder.holdings()[1])
