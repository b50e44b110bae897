"""When the leader begins to form: the order in which it hears of hosts is open."""

import itertools
from pathlib import Path

import pytest

from dtft.checkpoint.slices import Layout, Leaf, MeshLayout
from dtft.elastic.journal import read_events
from dtft.elastic.membership import View
from dtft.elastic.roles import HostRecord
from tests.elastic.desks import LeaderDesk


def _record(host: str) -> HostRecord:
    return HostRecord(
        host=host, address=f"{host}:1", incarnation=f"{host}-1", joined_ns=0, pid=1
    )


class Desk(LeaderDesk):
    """A leader of two slots."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, _record("a"))
        self.known = {"a": _record("a")}
        self.begin(View(hosts=dict(self.known), leader="a", leader_revision=1))

    def register(self, host: str) -> None:
        self.known[host] = _record(host)
        self.look()

    def look(self, *, stop: bool = False, stored: int = 0) -> None:
        hosts = dict(self.known)
        view = View(
            hosts=hosts, leader="a", leader_revision=1, stop=stop, stored=stored
        )
        self.leader.see(view)

    def answer(self, host: str) -> None:
        for asked, _, fields in list(self.orders):
            if asked == host:
                reply = {"holdings": {}, "corrupt": [], "finished": 0, "layouts": []}
                report = {"op": "holdings", "ballot": fields["ballot"], "items": {}}
                self.leader.hears(host, report | reply)

    def events(self) -> list[str]:
        return [event["event"] for event in read_events(self.directory)]


@pytest.mark.parametrize("order", list(itertools.permutations(["tell", "call"])))
def test_a_host_counts_once_it_is_connected_and_registered(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    desk = Desk(tmp_path)
    try:
        for number, act in enumerate(order):
            assert "forming" not in desk.events(), f"after {number} of {order}"
            desk.register("b") if act == "tell" else desk.leader.connected("b")
        assert {host for host, op, _ in desk.orders if op == "reform"} == {"a", "b"}
        desk.answer("a")
        desk.answer("b")
        assert "waiting_for_host" not in desk.events()
    finally:
        desk.leader.close()


def test_waiting_ends_when_the_store_tells_of_a_connected_host(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    try:
        desk.register("b")
        desk.leader.connected("b")
        desk.leader.lost("b", "test")
        desk.answer("a")
        del desk.known["b"]
        assert desk.events().count("waiting_for_host") == 1
        desk.leader.connected("c")
        assert desk.events().count("forming") == 1
        desk.register("c")
        assert desk.events().count("forming") == 2
    finally:
        desk.leader.close()


def test_a_spare_is_told_what_a_slot_holds(tmp_path: Path) -> None:
    layout = Layout(
        mesh=MeshLayout(axis_names=("replica",), axis_sizes=(2,), slots=(0, 1)),
        leaves=(Leaf(path="w", shape=(4,), dtype="float32"),),
    )
    desk = Desk(tmp_path)
    try:
        desk.register("b")
        desk.leader.connected("b")
        desk.answer("a")
        desk.answer("b")
        ballot = desk.orders[-1][2]["ballot"]
        desk.register("c")
        desk.leader.connected("c")
        desk.leader.written("assignment", ballot, True)
        said = {"op": "layout", "ballot": ballot, "layout": layout.to_json()}
        desk.leader.hears("a", dict(said))
        desk.register("d")
        desk.leader.connected("d")
        told = [(host, fields) for host, op, fields in desk.orders if op == "expect"]
        fields = {"layout": said["layout"], "domains": []}
        assert told == [("c", fields), ("d", fields)]
    finally:
        desk.leader.close()


def test_a_stop_before_anything_is_trained_ends_at_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    try:
        desk.register("b")
        desk.leader.connected("b")
        assert "forming" in desk.events()
        desk.look(stop=True)
        last = read_events(tmp_path)[-1]
        assert (last["event"], last["status"], last["step"]) == ("end", "stopped", 0)
    finally:
        desk.leader.close()


def test_storage_that_vanished_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtft.elastic.rounds.STORAGE_PAUSE_S", 0.0)
    desk = Desk(tmp_path)
    try:
        desk.register("b")
        desk.look(stored=40)
        desk.leader.connected("b")
        desk.answer("a")
        desk.answer("b")
        desk.leader.tick()
        desk.leader.tick()
        said = [e["text"] for e in read_events(tmp_path) if e["event"] == "message"]
        (line,) = [text for text in said if "shows no step now" in text]
        assert f"{tmp_path}/checkpoints had step 40" in line
        assert "assignment" not in desk.events()
        (tmp_path / "checkpoints" / "40").mkdir(parents=True)
        desk.leader.tick()
        assert desk.leader._rounds.phase == "assigning"
        round_ = desk.leader._rounds.current
        assert round_ is not None and round_.assignment is not None
        assert (round_.assignment.source, round_.assignment.step) == ("storage", 40)
    finally:
        desk.leader.close()
