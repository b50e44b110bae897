"""Reports of members: whatever an authenticated host sends, the leader goes on."""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtft.checkpoint.replication.snapshot_interval import Window
from dtft.elastic.host.follower import REPORTED
from dtft.elastic.leader.commit_coordinator import CommitCoordinator
from dtft.elastic.leader.host_registry import HostMonitor
from dtft.elastic.leader.leader import Leader
from dtft.elastic.leader.rendezvous import Phase, Rendezvous
from dtft.elastic.leader.rendezvous_plan import Round, RoundReason
from dtft.elastic.messages.reports import (
    OPTIONAL_REPORT_FIELDS,
    REPORT_FIELDS,
    fault_of_report,
    misfit,
    report_fields,
)
from tests.support.commits import commit_of, layout, value
from tests.support.desks import ASSIGNMENT, Desk, record_of
from tests.support.message_values import ANYTHING

STATE = layout(1, 2)
DIGESTS = [value(piece.key) for piece in STATE.slices(0)]
SLOTS = {"a": 0, "b": 1}
BALLOT = (1, 3)
SOUND: dict[str, dict[str, Any]] = {
    "holdings": {
        "layouts": [STATE.to_json()],
        "holdings": {7: {"w": b"0" * 16}},
        "items": {7: {"data": 1}},
        "corrupt": [],
        "finished": 7,
        "assignment": ASSIGNMENT.to_json(),
        "commits": [commit_of(STATE, 7).to_json()],
        "missed": ["b"],
        "world": 1048577,
        "place": 3,
        "joined": True,
        "prefetched": {1: 4096},
        "reserved": True,
    },
    "serving": {"address": "10.0.0.5:7001", "error": ""},
    "joined": {"world": 1048577},
    "rehearsed": {"world": 1048577, "turn": 3, "formations": [[1, 5], [5, 2]]},
    "keys": {"keys": {"cpu:gloo/1,2/0": "0a0b"}},
    "reached": {"missed": ["b"]},
    "unfit": {"why": "no room in /dev/shm", "layout": STATE.to_json()},
    "fit": {},
    "prepared": {"export_port": 80, "own": 1, "peers": 2, "seconds": 0.5},
    "prepare_failed": {"error": "gone", "corrupt": ["b step 7: w"]},
    "layout": {"layout": STATE.to_json()},
    "running": {"slot": 0, "step": 8, "bytes_from_storage": 0},
    "staged": {"slot": 0, "step": 8, "digests": DIGESTS},
    "held": {"step": 8, "source": 1, "target": 0, "root": "a" * 32},
    "finished": {"slot": 0, "step": 9, "summary": {}},
    "trainer_exit": {"code": -9},
    "failed": {
        "slot": 0,
        "step": 8,
        "phase": "step",
        "error": "ValueError: nan",
        "traceback": "Traceback ...",
        "log": "run/logs/a.trainer.log",
    },
    "progress": {
        "slot": 0,
        "computing": 8,
        "finished": 7,
        "phase": "step",
        "for_s": 1.5,
        "limit_s": 10.0,
        "timeout": "step",
        "state": "R",
        "busy": 0.5,
    },
    "exported": {"step": 8, "ok": False, "error": "full"},
    "fatal": {"message": "no memory", "code": 2},
}


def sound(op: str) -> dict[str, Any]:
    return {"op": op, "ballot": list(BALLOT), **SOUND[op]}


class Busy(Desk):
    """A leader of two slots that can be put into any phase at once."""

    def enter(self, phase: Phase) -> None:
        rendezvous = self.leader._rendezvous
        rendezvous.frozen = False
        for host in SLOTS:
            self.leader.connected(record_of(host))
            self.leader.handle_report(host, {"op": "fit", "ballot": BALLOT})
        rendezvous.current = Round(
            ballot=BALLOT, reasons=[RoundReason("test")], detected=0.0
        )
        rendezvous.assignment = rendezvous.coordinator = None
        if phase in ("preparing", "running"):
            rendezvous.assignment = rendezvous.current.assignment = ASSIGNMENT
        if phase == "running":
            assert rendezvous.assignment is not None
            rendezvous.open_coordinator(STATE, rendezvous.assignment)
        rendezvous.enter(phase, 60.0)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    desk = Busy(tmp_path_factory.mktemp("leader"))
    desk.join("b")
    yield desk
    desk.close()


def test_keys_go_to_the_hosts_of_the_other_slots(desk: Busy) -> None:
    desk.enter("running")
    desk.take("keys")
    desk.leader.handle_report("a", sound("keys"))
    ((host, order),) = desk.take("keys")
    assert host == "b" and order["keys"] == {"cpu:gloo/1,2/0": "0a0b"}
    desk.leader.handle_report("c", sound("keys"))  # has no slot
    desk.leader.handle_report("a", sound("keys") | {"ballot": [1, 1]})
    assert not desk.take("keys")


def test_every_sound_report_is_taken(desk: Busy) -> None:
    assert SOUND.keys() == REPORT_FIELDS.keys()
    for op in SOUND:
        assert fault_of_report(sound(op)) is None
        assert misfit("a", sound(op), SLOTS, STATE) is None
        desk.enter("running")
        desk.leader.handle_report("a", sound(op))


@pytest.mark.parametrize("op", sorted(REPORT_FIELDS.keys() - {"fatal"}))
def test_the_table_names_what_the_leader_takes(op: str) -> None:
    others = {
        "staged": CommitCoordinator.staged,
        "unfit": HostMonitor.unfit,
        "fit": HostMonitor.fit,
        "reached": Rendezvous.reached,
        "serving": Rendezvous.serving,
        "keys": Rendezvous.keys,
        "rehearsed": Rendezvous.rehearsed,
    }
    method = others.get(op) or getattr(Leader, f"_on_{op}")
    handler = inspect.signature(method).parameters.values()
    takes = {p.name for p in handler if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert takes - {"self", "host"} <= REPORT_FIELDS[op].keys()
    if not any(p.kind is p.VAR_KEYWORD for p in handler):
        assert REPORT_FIELDS[op].keys() - {"ballot"} <= takes


def test_the_table_names_what_is_told_of_a_staged_step() -> None:
    assert set(REPORTED) <= REPORT_FIELDS["staged"].keys()
    window = dataclasses.asdict(Window(affected_steps=1, affected_s=0.5))
    full = sound("staged") | {"interval": 4, "window": window}
    assert fault_of_report(full) is None and report_fields(full)["window"] == window
    for wrong in [
        {"interval": 0},
        {"window": {}},
        {"window": window | {"more": 1}},
        {"window": window | {"affected_steps": 0.5}},
        {"window": window | {"stall_s": float("nan")}},
    ]:
        assert (fault_of_report(full | wrong) or "").startswith("staged: ")


@pytest.mark.parametrize("op", sorted(SOUND))
def test_a_field_that_is_left_out_is_named(op: str) -> None:
    for name in REPORT_FIELDS[op].keys() - OPTIONAL_REPORT_FIELDS.get(op, frozenset()):
        message = sound(op)
        del message[name]
        assert fault_of_report(message) == f"{op}: no {name}"


WRONG = [
    ("b", {**sound("staged")}, "b has slot 1, not 0"),
    ("c", {**sound("running")}, "c has no slot"),
    ("a", {**sound("held"), "source": 2}, "there is no slot 2"),
    ("a", {**sound("held"), "target": 1}, "a has slot 0, not 1"),
    ("a", {**sound("staged"), "digests": DIGESTS[:1]}, "1 digests instead of 2"),
    ("a", {**sound("layout"), "layout": layout(2, 2).to_json()}, "4 slots instead"),
]


@pytest.mark.parametrize(("host", "message", "reason"), WRONG)
def test_what_does_not_fit_the_formation_is_dropped(
    desk: Busy, host: str, message: dict[str, Any], reason: str
) -> None:
    assert fault_of_report(message) is None
    assert reason in (misfit(host, message, SLOTS, STATE) or "")
    desk.enter("running")
    desk.leader.handle_report(host, dict(message))
    round_, coordinator = (
        desk.leader._rendezvous.current,
        desk.leader._rendezvous.coordinator,
    )
    assert round_ is not None and round_.running == set()
    assert coordinator is not None and coordinator.waiting_for() == "the next step"


NAMES = sorted({name for fields in REPORT_FIELDS.values() for name in fields})
PHASES: list[Phase] = ["gathering", "waiting", "assigning", "preparing", "running"]


@given(
    host=st.sampled_from(["a", "b", "c"]),
    op=st.sampled_from(sorted(REPORT_FIELDS)),
    phase=st.sampled_from(PHASES),
    changes=st.dictionaries(
        st.sampled_from([*NAMES, "op", "x"]),
        ANYTHING,
        max_size=3,
    ),
    left_out=st.sets(st.sampled_from(NAMES), max_size=2),
)
@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
def test_no_report_ends_the_leader(
    desk: Busy,
    host: str,
    op: str,
    phase: Phase,
    changes: dict[str, Any],
    left_out: set[str],
) -> None:
    desk.enter(phase)
    message = {k: v for k, v in sound(op).items() if k not in left_out} | changes
    desk.leader.handle_report(host, dict(message))
    desk.leader.tick()
    # A later sound report still counts.
    desk.enter("running")
    desk.leader.handle_report("a", sound("running") | {"news": 1})
    assert desk.leader._rendezvous.current is not None
    assert desk.leader._rendezvous.current.running == {"a"}


def test_a_report_without_an_op_is_dropped() -> None:
    for message in ({}, {"op": 7}, {"op": "close"}, {"op": ["held"]}):
        assert fault_of_report(message) is not None
