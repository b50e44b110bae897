"""How faults are written, and how the drill judges what was left."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.elastic.faults import KINDS, PHASES, Fault, parse_fault
from dtft.train.verdict import samples_exactly_once, surviving_segments

faults = st.builds(
    lambda kind, slots, step, phase: Fault(
        kind=kind,
        slots=tuple(sorted(slots))
        if kind in ("kill-host", "kill-trainer", "corrupt")
        else (),
        step=step,
        phase=None if kind == "scale" else phase,
        replicas=min(slots) + 1 if kind == "scale" else 0,
    ),
    st.sampled_from(KINDS),
    st.sets(st.integers(0, 3), min_size=1),
    st.integers(0, 10**6),
    st.none() | st.sampled_from(PHASES),
)


@given(faults)
def test_text_round_trips(fault):
    assert parse_fault(str(fault), num_slots=4) == fault


@pytest.mark.parametrize(
    "text, hint",
    [
        ("kill-host:1", "KIND"),
        ("kill-hots:1@3", "known: kill-host"),
        ("kill-host:1@3:lunch", "known: compute"),
        ("kill-host@3", "needs a slot"),
        ("kill-leader:1@3", "takes no slot"),
        ("kill-host:4@3", "slots 0 to 3"),
        ("scale@3", "one number of replicas"),
        ("scale:0@3", "1 or more"),
        ("scale:2+3@3", "one number of replicas"),
        ("scale:2@3:commit", "no phase"),
    ],
)
def test_wrong_faults_say_what_is_allowed(text, hint):
    with pytest.raises(ValueError, match=hint):
        parse_fault(text, num_slots=4)


def assignment(generation: int, attempt: int, step: int) -> dict:
    return {
        "event": "assignment",
        "generation": generation,
        "attempt": attempt,
        "step": step,
    }


def test_an_attempt_that_never_ran_leaves_no_segment():
    events = [assignment(1, 1, 0), assignment(2, 1, 5), assignment(2, 2, 5)]
    assert surviving_segments(events, 8) == [((1, 1), 0, 5), ((2, 2), 5, 8)]


def write_samples(folder, entries) -> None:
    (folder / "samples").mkdir(parents=True)
    lines = [
        json.dumps(
            {
                "generation": g,
                "attempt": 1,
                "step": s,
                "slot": 0,
                "rows": rows,
                "ids": [r % 3 for r in rows],
            }
        )
        for g, s, rows in entries
    ]
    (folder / "samples" / "slot0.jsonl").write_text("\n".join(lines) + "\n{torn")


@pytest.mark.parametrize(
    "entries, right",
    [
        ([(1, 1, [0, 1]), (1, 2, [2, 3]), (2, 2, [2, 3])], True),  # redone, used once
        ([(1, 1, [0, 1]), (2, 2, [3, 4])], False),  # skipped
        ([(1, 1, [0, 1]), (1, 2, [2, 3])], False),  # step 2 did not survive
    ],
)
def test_samples_of_the_surviving_history(tmp_path, entries, right):
    write_samples(tmp_path / "control", [(1, 1, [0, 1]), (1, 2, [2, 3])])
    write_samples(tmp_path / "faulted", entries)
    events = [assignment(1, 1, 0), assignment(2, 1, 1)]
    control, faulted = tmp_path / "control", tmp_path / "faulted"
    assert samples_exactly_once(faulted, control, 2, 2, events) is right
