"""Which rung: own memory, peers' memory, storage, or the initial state."""

import pytest

from dtft.checkpoint.replication.commit import (
    Divergence,
    Mislabelled,
    StepTracker,
    locate,
    push_root,
)
from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.elastic.assignment import SlotAssignment
from dtft.elastic.leader.recovery import RecoveryReport, decide, fetches_for
from dtft.elastic.leader.rendezvous_plan import (
    Round,
    RoundReason,
    death,
    lost,
    main_reason,
    next_round,
)
from tests.support.commits import HOSTS, commit_of, holdings_of, layout, root_of, value


def test_all_alive_is_rung_1_and_moves_nothing():
    state = layout(1, 4)
    decision = decide(
        commits=[commit_of(state, 7)],
        layout=state,
        holdings=holdings_of(state, 2, 7),
        slots=HOSTS,
        storage_steps=[5],
    )
    assert (decision.rung, decision.source, decision.step) == (1, "memory", 7)
    assert decision.plan is not None and decision.plan.transfers == ()


@pytest.mark.parametrize("replica, fsdp", [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("dead", range(4))
def test_one_host_lost_is_rung_2_and_the_spare_gets_exactly_its_slices(
    replica, fsdp, dead
):
    state = layout(replica, fsdp)
    holdings = holdings_of(state, 2, 7)
    del holdings[HOSTS[dead]]
    slots = tuple("spare" if slot == dead else h for slot, h in enumerate(HOSTS))
    decision = decide(
        commits=[commit_of(state, 7)],
        layout=state,
        holdings=holdings,
        slots=slots,
        storage_steps=[],
    )
    assert (decision.rung, decision.step) == (2, 7)
    addresses = {host: "x:1" for host in HOSTS}
    assert decision.plan is not None
    wanted = fetches_for(decision.plan, addresses, "spare")["transfers"]
    keys = sorted(key for entry in wanted for key in entry["keys"])
    assert keys == sorted(piece.key for piece in state.slices(dead))
    assert HOSTS[dead] not in {entry["host"] for entry in wanted}


def test_both_holders_lost_is_rung_3_at_the_step_storage_has():
    state = layout(1, 4)
    holdings = holdings_of(state, 2, 7)
    del holdings["h2"], holdings["h3"]
    decision = decide(
        commits=[commit_of(state, 7)],
        layout=state,
        holdings=holdings,
        slots=("h0", "h1", "s0", "s1"),
        storage_steps=[2, 5],
    )
    assert (decision.rung, decision.source, decision.step) == (3, "storage", 5)
    assert "no verified copy" in decision.passed_over[0]


def test_nothing_anywhere_starts_anew():
    decision = decide(
        commits=[], layout=None, holdings={}, slots=HOSTS, storage_steps=[]
    )
    assert (decision.rung, decision.source, decision.step) == (3, "init", 0)


def test_an_older_commit_serves_when_the_newest_is_lost_or_quarantined():
    state = layout(2, 2)
    old, new = holdings_of(state, 2, 6), holdings_of(state, 2, 7)
    both = {host: {**old[host], **new[host]} for host in HOSTS}

    def chosen(holdings: dict, quarantined: set[int]) -> int:
        return decide(
            commits=[commit_of(state, 7), commit_of(state, 6)],
            layout=state,
            holdings=holdings,
            slots=HOSTS,
            storage_steps=[],
            quarantined=quarantined,
        ).step

    assert chosen(old, set()) == 6
    assert chosen(both, set()) == 7
    assert chosen(both, {7}) == 6


def test_digests_that_do_not_add_up_are_not_restored():
    state = layout(1, 4)
    holdings = holdings_of(state, 2, 7)
    key = state.slices(0)[0].key
    for held in holdings.values():
        if key in held[7]:
            held[7][key] = b"x" * 16
    located, reasons = locate([commit_of(state, 7)], state, holdings)
    assert located is None and "root" in reasons[0]


@pytest.mark.parametrize("liar", HOSTS)
def test_a_host_with_another_steps_bytes_is_no_source(liar: str) -> None:
    state = layout(1, 4)
    holdings = holdings_of(state, 2, 7)
    for key in holdings[liar][7]:
        holdings[liar][7][key] = b"step 6".ljust(16)
    located, _ = locate([commit_of(state, 7)], state, holdings)
    assert located is not None and located.odd == (liar,)
    assert located.digests == {piece.key: value(piece.key) for piece in state.owners}
    assert all(liar not in hosts for hosts in located.holders.values())


@pytest.mark.parametrize("first", ["staged", "held"])
def test_a_copy_of_another_step_completes_nothing(first: str) -> None:
    state = layout(1, 2)
    tracker = StepTracker(state, place_copies(state, 2), 3)
    push = tracker.placement.pushes[0]
    wrong = push_root(push, {piece.key: b"step 2".ljust(16) for piece in push.slices})
    staged = [value(p.key) for p in state.slices(push.source)]
    acts = {
        "staged": lambda: tracker.staged(push.source, staged),
        "held": lambda: tracker.held(push.source, push.target, wrong),
    }
    acts.pop(first)()
    with pytest.raises(Mislabelled, match=f"slot {push.target} is not of step 3"):
        acts.popitem()[1]()
    assert f"slot {push.source} on slot {push.target}" in tracker.missing


def test_a_step_is_complete_only_with_every_copy():
    state = layout(1, 2)
    placement = place_copies(state, 2)
    tracker = StepTracker(state, placement, 3)
    for slot in range(2):
        tracker.staged(slot, [value(p.key) for p in state.slices(slot)])
    assert not tracker.complete and "copy of slot" in tracker.missing
    for push in placement.pushes:
        tracker.held(push.source, push.target, root_of(push))
    assert tracker.complete and tracker.missing == ""


def test_diverged_replicas_are_named():
    state = layout(2, 1)
    tracker = StepTracker(state, place_copies(state, 2), 3)
    tracker.staged(0, [value(p.key) for p in state.slices(0)])
    with pytest.raises(Divergence, match="slots 0 and 1.*w"):
        tracker.staged(1, [b"y" * 16 for _ in state.slices(1)])


def test_report_counts_lost_steps_and_says_everything():
    report = RecoveryReport(
        fault="h1 (slot 1) was lost",
        generation=2,
        attempt=1,
        rung=2,
        source="memory",
        restored_step=149,
        last_finished_step=150,
        detect_s=0.02,
        restore_s=0.1,
        total_s=2.5,
        bytes_from_own_memory=2048,
        bytes_from_peers=1024,
        bytes_from_storage=0,
        processes_restarted=4,
    )
    assert report.steps_lost == 1
    for part in (
        "h1 (slot 1) was lost",
        "rung 2",
        "step 149",
        "1.0 KiB",
        "1 steps lost",
    ):
        assert part in report.line()


def test_causes_come_before_consequences():
    slots = {"a": 0, "b": 1}
    reasons = [death(slots, "a", 1), death(slots, "b", -9)]
    assert main_reason(reasons) == "trainer of slot 1 on b killed by signal 9"
    assert main_reason([*reasons, lost("b")]) == "b was lost"
    assert main_reason(reasons[:1]) == "trainer of slot 0 on a ended with code 1"
    said = RoundReason("the trainer says: host-9 was lost")  # a text decides nothing
    assert main_reason([said, *reasons]) == main_reason(reasons)


def round_with(rung: int | str | None, reported: bool) -> Round:
    made = Round(ballot=(1, 1), reasons=[lost("a")], detected=5.0)
    made.reported, made.last_finished = reported, 7
    if not isinstance(rung, str):
        made.assignment = SlotAssignment(
            generation=1,
            attempt=1,
            slots=HOSTS,
            incarnations=HOSTS,
            source="memory",
            step=0,
            rung=rung,
            reason="",
        )
    return made


@pytest.mark.parametrize(
    "old, detected, reasons",
    [
        (None, 9.0, 1),
        (round_with(None, reported=False), 9.0, 1),  # lost before the job's first step
        (round_with(2, reported=True), 9.0, 1),  # the last recovery is over
        (round_with(2, reported=False), 5.0, 2),  # lost during a recovery
        (round_with("undecided", reported=False), 5.0, 2),
        (round_with(0, reported=False), 5.0, 2),
    ],
)
def test_a_failed_recovery_goes_on_in_the_next_round(old, detected, reasons):
    new = next_round(old, (1, 2), [lost("b")], now=9.0, read=False)
    assert (new.detected, len(new.reasons)) == (detected, reasons)
    assert new.last_finished == (7 if reasons == 2 else 0)
    assert new.read == (reasons == 2)  # a corrupt copy may have been why it failed
    assert next_round(None, (1, 2), [RoundReason("served")], now=9.0, read=True).read
