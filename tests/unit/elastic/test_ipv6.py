"""A job whose hosts have IPv6 addresses only: agents, addresses in orders, ports."""

import socket
from pathlib import Path

from dtft.cli.checkpoint import job_record
from dtft.elastic.assignment import HostRecord, SlotAssignment
from dtft.elastic.inspect_job import Observer
from dtft.elastic.leader.rendezvous_plan import Round, RoundReason, export_addresses
from dtft.elastic.messages.orders import fault_of_order
from dtft.elastic.processes import free_port, port_taken
from dtft.elastic.store.memory import MemoryStore
from tests.support.agents import SECRET, agents, config, joined
from tests.support.hosts import wait_until


def test_two_agents_meet(tmp_path: Path) -> None:
    store = MemoryStore()
    pair = [config(tmp_path, host, bind="[::1]:0") for host in ("a", "b")]
    with agents(store, *pair):
        wait_until(lambda: joined(tmp_path) == {"a", "b"}, 20)
        hosts = job_record(Observer(store, "s:1", "j", SECRET).look())["hosts"]
    assert len(hosts) == 2
    for host in hosts:  # each was connected to and has answered
        assert host["address"].startswith("[::1]:") and not host["error"]


def test_an_export_meets_at_a_hosts_own_address() -> None:
    record = HostRecord(
        host="a", address="[fd00::5]:7000", incarnation="i", joined_ns=0, pid=1
    )
    assignment = SlotAssignment(
        generation=1,
        attempt=1,
        slots=("a",),
        incarnations=("i",),
        source="init",
        step=0,
        rung=None,
        reason="",
    )
    round_ = Round(ballot=(1, 1), reasons=[RoundReason("test")], detected=0.0)
    round_.prepared["a"] = {"export_port": 8000}
    found = export_addresses(round_, assignment, {"a": record})
    assert found == {"a": "[fd00::5]:8000"}
    order = {"op": "export", "step": 1, "slot": 0, "rank": 0, "world": 2}
    order |= {"coordinator": found["a"], "failures": 0, "transfers": [], "digests": {}}
    assert fault_of_order(order) is None


def test_a_free_port_is_free_at_the_address_that_it_is_for() -> None:
    for host in ("127.0.0.1", "::1"):
        port = free_port(host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()


def test_a_port_is_taken_only_while_a_server_listens_there() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        port = free_port(host)
        assert not port_taken(port, host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family):
            assert port_taken(port, host)
