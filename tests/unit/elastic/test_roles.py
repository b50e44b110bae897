"""Slots: live hosts keep theirs, spares fill the rest in the order they came."""

from hypothesis import given
from hypothesis import strategies as st

from dtft.elastic.assignment import HostRecord, SlotAssignment, fill_slots, next_epoch
from tests.support.numbered_hosts import entries, record


def assignment(records: list[HostRecord], generation: int = 1) -> SlotAssignment:
    return SlotAssignment(
        generation=generation,
        attempt=1,
        slots=tuple(r.host for r in records),
        incarnations=tuple(r.incarnation for r in records),
        source="init",
        step=0,
        rung=None,
        reason="test",
    )


@given(
    num_slots=st.integers(1, 8),
    num_spares=st.integers(0, 4),
    dead=st.sets(st.integers(0, 11)),
)
def test_survivors_keep_their_slots(num_slots, num_spares, dead):
    everyone = [record(n) for n in range(num_slots + num_spares)]
    live = [r for n, r in enumerate(everyone) if n not in dead]
    filled = fill_slots(entries(everyone[:num_slots]), live, num_slots)
    assert len(filled) == num_slots
    for slot in range(num_slots):
        if slot not in dead:
            assert filled[slot] == everyone[slot]
    used = [r.host for r in filled if r is not None]
    assert len(used) == len(set(used)) == min(num_slots, len(live))


def test_spares_are_taken_in_the_order_they_joined():
    filled = fill_slots(
        entries([record(0), record(1)]), [record(1), record(7), record(5)], 2
    )
    assert filled == (record(5), record(1))


def test_a_host_that_came_back_is_another_host():
    back = record(0, incarnation="b")
    assert fill_slots(entries([record(0)]), [record(3), back], 1) == (back,)
    early = record(1)
    assert fill_slots(entries([record(2)]), [early, record(2, "b")], 1) == (early,)


def test_new_job_fills_slots_in_the_order_of_names():
    hosts = [record(10), record(2), record(1)]
    assert fill_slots([], hosts, 2) == (record(1), record(2))


def test_no_host_left_leaves_the_slot_empty():
    assert fill_slots(entries([record(0), record(1)]), [record(1)], 2) == (
        None,
        record(1),
    )


def test_generation_changes_only_with_the_map():
    old = assignment([record(0), record(1)], generation=4)
    assert next_epoch(old, [record(0), record(1)]) == (4, 2)
    assert next_epoch(old, [record(2), record(1)]) == (5, 1)
    assert next_epoch(old, [record(0, "b"), record(1)]) == (5, 1)


def test_json_round_trips():
    value = assignment([record(0), record(1)])
    assert SlotAssignment.from_json(value.to_json()) == value
    assert HostRecord.from_json(record(3).to_json()) == record(3)
