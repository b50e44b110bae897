"""Jobs of the user's own processes: when their leader forms, waits, answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.checkpoint.state.digests import digest_root
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.elastic.admission import SERVED, proof_of
from dtft.elastic.assignment import HostRecord
from dtft.elastic.inspect_job import Observer
from dtft.elastic.job_changes import ChangeRefused, scale
from dtft.elastic.seat_policy import fill_by_process, missing
from dtft.elastic.store.view import job_key
from tests.support.desks import LeaderDesk, record_of

LAYOUT = Layout(
    mesh=MeshLayout(axis_names=("x",), axis_sizes=(2,), slots=(0, 1)),
    leaves=(Leaf(path="w", shape=(4,), dtype="uint8", spec=(("x",),)),),
)


def host(name: str, process: int = -1, attached_ns: int = 0) -> HostRecord:
    return record_of(name, process=process, attached_ns=attached_ns)


@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 9)), max_size=8))
def test_every_slot_has_the_last_process_that_claims_it(
    claims: list[tuple[int, int]],
) -> None:
    hosts = [host(f"h{i}", index, ns) for i, (index, ns) in enumerate(claims)]
    filled = fill_by_process(hosts, 4)
    for slot, record in enumerate(filled):
        claiming = [it for it in hosts if it.process == slot]
        assert (record is None) == (not claiming)
        if record is not None:
            assert record.process == slot
            assert record.attached_ns == max(it.attached_ns for it in claiming)
    assert (missing(hosts, 4) == "") == (None not in filled)


class Desk(LeaderDesk):
    """A leader of two processes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, host("a"), served=True, storage_interval=10**6)
        for name in "ab":
            self.register(host(name))
        self.begin()
        self.turn()

    def attach(self, name: str, process: int, ns: int) -> None:
        """A process has attached to a host, or has left it."""
        self.register(host(name, process, ns))
        self.look()
        self.leader.connected(host(name, process, ns))
        self.turn()

    def holdings(self, to: str, fields: dict[str, Any], ns: int, **has: Any) -> None:
        reply = {"layouts": [], "holdings": {}, "items": {}, "corrupt": []} | has
        more = {"finished": 0, "attached_ns": ns, "ballot": fields["ballot"]}
        self.leader.handle_report(to, {"op": "holdings", **reply, **more})

    def reports(self, to: str, op: str, **fields: Any) -> None:
        round_ = self.leader._rendezvous.current
        assert round_ is not None
        self.leader.handle_report(to, {"op": op, "ballot": round_.ballot, **fields})

    def stage(self, step: int) -> None:
        """Each host tells that it has staged its one slice."""
        for slot, to in enumerate("ab"):
            digests = [bytes([slot]) * 16]
            more = {"interval": 1, "window": None}
            self.reports(to, "staged", slot=slot, step=step, digests=digests, **more)

    def hold(self, step: int, right: bool = True) -> None:
        """Each host tells that it holds the other's slice."""
        for source, to in [(1, "a"), (0, "b")]:
            told = bytes([source if right else 9]) * 16
            root = digest_root([(LAYOUT.slices(source)[0].key, told)])
            where = {"source": source, "target": 1 - source}
            self.reports(to, "held", step=step, root=root, **where)

    def writes(self) -> None:
        """What the leader writes is recorded."""
        self.turn()

    def formed(self) -> None:
        """Both processes have attached and go on."""
        self.attach("a", 0, 5)
        self.attach("b", 1, 6)
        for to, fields in self.take("reform"):
            self.holdings(to, fields, {"a": 5, "b": 6}[to])
        self.writes()
        assert [to for to, _ in self.take("prepare")] == ["a", "b"]
        timed = {"seconds": 0.0, "restored": {}}
        for slot, to in enumerate("ab"):
            self.reports(to, "prepared", export_port=1, own=0, peers=0, **timed)
            self.reports(to, "running", slot=slot, step=0, bytes_from_storage=0)


@pytest.fixture
def desk(tmp_path: Path):
    made = Desk(tmp_path)
    yield made
    made.close()


def test_the_job_forms_when_every_process_has_attached(desk: Desk) -> None:
    desk.attach("b", 0, 5)
    assert desk.phase == "idle" and not desk.take("reform")
    desk.attach("a", 1, 6)
    asked = desk.take("reform")
    assert desk.phase == "gathering" and {to for to, _ in asked} == {"a", "b"}
    for to, fields in asked:
        desk.holdings(to, fields, {"b": 5, "a": 6}[to])
    desk.turn()
    assert desk.assignment is not None
    assert desk.assignment.slots == ("b", "a")  # by process, not by name


def test_a_process_that_has_stood_down_since_is_waited_for(desk: Desk) -> None:
    desk.attach("a", 0, 5)
    desk.attach("b", 1, 6)
    for to, fields in desk.take("reform"):
        desk.holdings(to, fields, {"a": 5, "b": 0}[to])  # the record is behind
    assert desk.phase == "waiting"
    desk.attach("b", -1, 0)  # its host says so next
    assert desk.phase == "waiting" and not desk.take("reform")
    desk.attach("b", 1, 9)
    assert desk.phase == "gathering"


def test_a_process_that_goes_makes_all_wait_with_the_reason(desk: Desk) -> None:
    desk.formed()
    assert desk.phase == "running"
    desk.reports("b", "process_gone")
    told = desk.take("reform")
    assert {fields["reason"] for _, fields in told} == {"process 1 on b has gone"}
    assert not any(fields["fatal"] for _, fields in told)
    for to, fields in told:
        desk.attach(to, -1, 0)
        desk.holdings(to, fields, 0)
    desk.turn()
    assert desk.phase == "waiting"


def test_what_would_happen_again_lets_the_processes_go_and_ends_nothing(
    desk: Desk,
) -> None:
    desk.formed()
    for to in "ab":
        desk.reports(to, "layout", layout=LAYOUT.to_json())
    desk.leader.handle_report(
        "a", {"op": "fatal", "message": "no memory for the arena"}
    )
    told = desk.take("reform")
    assert told and all(fields["fatal"] for _, fields in told)
    assert told[0][1]["reason"] == "no memory for the arena"
    assert not desk.leader._rendezvous.frozen


def test_a_flush_is_answered_once_the_step_is_committed(desk: Desk) -> None:
    desk.formed()
    for to in "ab":
        desk.reports(to, "layout", layout=LAYOUT.to_json())
    desk.reports("b", "flush", slot=1, token=4, step=0, store=False)
    desk.stage(0)
    assert not desk.take("flushed")
    desk.hold(0)
    assert not desk.take("flushed")  # complete, but not recorded
    desk.writes()
    assert desk.take("release")
    # The first commit is due in storage, too; the flush waits for that as well.
    (order,) = {fields["step"] for _, fields in desk.take("export")}
    for to in "ab":
        desk.reports(to, "exported", step=order, ok=True, error="")
    assert desk.take("flushed") == [("b", {"token": 4, "error": ""})]


def test_a_copy_of_another_step_is_refused_and_all_begin_anew(desk: Desk) -> None:
    desk.formed()
    for to in "ab":
        desk.reports(to, "layout", layout=LAYOUT.to_json())
    desk.stage(0)
    desk.hold(0, right=False)
    assert not desk.leader._records.commits
    reasons = {fields["reason"] for _, fields in desk.take("reform")}
    assert any("slot 1's slices on slot 0 is not of step 0" in it for it in reasons)


def commits(desk: Desk, step: int) -> None:
    """Both processes have saved a step, and it is recorded."""
    desk.stage(step)
    desk.hold(step)
    desk.writes()


def test_an_export_that_is_asked_for_does_not_wait_for_the_next_save(
    desk: Desk,
) -> None:
    answers: list[dict[str, Any]] = []
    desk.formed()
    desk.leader.export_wanted(answers.append)
    assert "nothing was saved" in answers.pop()["error"]
    for to in "ab":
        desk.reports(to, "layout", layout=LAYOUT.to_json())
    commits(desk, 0)
    commits(desk, 1)  # while the first, which is due, is still being written
    desk.leader.export_wanted(answers.append)
    for step in (0, 1):
        assert {told["step"] for _, told in desk.take("export")} == {step}
        assert not answers
        for to in "ab":
            desk.reports(to, "exported", step=step, ok=True, error="")
    assert answers == [{"step": 1}]
    desk.leader.export_wanted(answers.append)
    assert answers.pop() == {"step": 1} and not desk.take("export")


def test_a_job_that_serves_has_the_size_that_its_user_gave_it(desk: Desk) -> None:
    known = {"secret": proof_of(b"x" * 16, "j"), "config": f"{SERVED} --copies 2"}
    desk.store.put(job_key("j", "m/fingerprint"), json.dumps(known).encode())
    observer = Observer(desk.store, "s:1", "j", b"x" * 16)
    with pytest.raises(ChangeRefused, match="whoever starts them decides how many"):
        scale(observer, 3, 10.0)  # nobody leads it yet
    answers: list[dict[str, Any]] = []
    desk.leader.scaling_wanted(3, answers.append)
    assert answers[0]["code"] == 2 and "--serve-only" in answers[0]["error"]


def test_after_the_last_goodbye_the_job_waits_for_other_processes(desk: Desk) -> None:
    desk.formed()
    desk.reports("a", "finished", slot=0, step=0)
    assert desk.phase == "running"
    desk.reports("b", "finished", slot=1, step=0)
    for to, fields in desk.take("reform"):
        desk.attach(to, -1, 0)
        desk.holdings(to, fields, 0)
    desk.turn()
    assert desk.phase == "waiting" and not desk.leader._rendezvous.frozen


DIGESTS = {piece.key: bytes([n]) * 16 for n, piece in enumerate(LAYOUT.owners)}


def saved(desk: Desk) -> None:
    """Step 0 is committed, and in storage; step 1 is committed."""
    desk.formed()
    for to in "ab":
        desk.reports(to, "layout", layout=LAYOUT.to_json())
    for step in (0, 1):
        desk.stage(step)
        desk.hold(step)
        desk.writes()
        ordered = desk.take("export")
        for to, fields in ordered:
            desk.reports(to, "exported", step=fields["step"], ok=True, error="")
        if ordered:
            desk.writes()


def replied(desk: Desk, *without: str) -> None:
    """No process is attached; hosts say what they hold, one slot's slices whole."""
    for name in "ab":
        desk.register(host(name))
        desk.leader.connected(host(name))
    desk.look()
    for to, fields in desk.take("reform"):
        slot = "ab".index(to)
        has = {"layouts": [LAYOUT.to_json()], "export_port": 70 + slot}
        has |= {"holdings": {1: DIGESTS}, "complete": {1: [slot]}}
        desk.holdings(to, fields, 0, **({} if to in without else has))
    desk.turn()


def test_the_newest_commit_is_exported_while_no_process_runs(desk: Desk) -> None:
    saved(desk)
    for slot, to in enumerate("ab"):
        desk.reports(to, "finished", slot=slot, step=1)
    replied(desk)
    assert desk.phase == "waiting" and not desk.take("export")
    heard: list[dict[str, Any]] = []
    desk.leader.export_wanted(heard.append)
    replied(desk)  # they are asked anew: some may have gone
    orders = dict(desk.take("export"))
    assert {to: (it["step"], it["slot"], it["rank"]) for to, it in orders.items()} == {
        "a": (1, 0, 0),
        "b": (1, 1, 1),
    }
    assert {it["coordinator"] for it in orders.values()} == {"a:70"}
    desk.leader.export_wanted(heard.append)  # it is being written
    assert not heard and not desk.take("reform")
    for to in "ab":
        desk.reports(to, "exported", step=1, ok=True, error="")
    assert heard == [{"step": 1}] * 2 and desk.phase == "waiting"
    (desk.config.storage_directory / "1").mkdir(parents=True)
    desk.leader.export_wanted(heard.append)
    replied(desk)
    assert heard[2:] == [{"step": 1}] and not desk.take("export")


def test_an_export_between_runs_ends_when_the_processes_attach(desk: Desk) -> None:
    saved(desk)
    desk.reports("b", "process_gone")
    heard: list[dict[str, Any]] = []
    desk.leader.export_wanted(heard.append)
    replied(desk)
    assert len(desk.take("export")) == 2
    desk.attach("a", 0, 7)
    desk.attach("b", 1, 8)
    for to, fields in desk.take("reform"):
        desk.holdings(to, fields, {"a": 7, "b": 8}[to])
    desk.turn()
    assert "the processes have attached again" in heard[0]["error"]


def test_a_step_whose_host_is_gone_says_how_to_bring_it_to_storage(desk: Desk) -> None:
    saved(desk)
    desk.reports("b", "process_gone")
    heard: list[dict[str, Any]] = []
    desk.leader.export_wanted(heard.append)
    replied(desk, "b")
    assert "b had the slices of slot 1 and is gone" in heard[0]["error"]
    assert "start an agent in its place" in heard[0]["error"]
    assert not desk.take("export")
