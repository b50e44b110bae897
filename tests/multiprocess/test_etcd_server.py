"""The private etcd, and the process tools below it."""

import importlib.util
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dtft.elastic.processes import (
    die_with_parent,
    free_port,
    kill_group,
    process_alive,
)
from dtft.elastic.store.embedded import EmbeddedEtcd, etcd_binary
from dtft.elastic.store.etcd import EtcdStore
from tests.support.hosts import wait_until


def test_life_of_a_server(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(tmp_path)
    assert etcd.pid == 0
    etcd.kill()
    etcd.start()
    try:
        etcd.wait_ready()
        pid, address = etcd.pid, etcd.address
        assert os.getpgid(pid) == pid and process_alive(pid)
        with pytest.raises(RuntimeError, match=f"process {pid}"):
            etcd.start()
        etcd.kill()
        assert not process_alive(pid) and etcd.pid == 0
        assert (tmp_path / "etcd-data").exists()
        etcd.start()
        etcd.wait_ready()
        assert etcd.address == address and etcd.pid != pid
    finally:
        pid = etcd.pid
        etcd.stop()
    assert not process_alive(pid)
    assert [path.name for path in tmp_path.iterdir()] == ["etcd.log"]
    etcd.stop()


def test_stopped_server_is_killed_in_time(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(tmp_path)
    etcd.start()
    etcd.wait_ready()
    pid = etcd.pid
    os.kill(pid, signal.SIGSTOP)
    etcd.stop(deadline_s=0.3)
    assert not process_alive(pid)


def test_port_in_use_is_told(tmp_path: Path) -> None:
    first = EmbeddedEtcd(tmp_path / "first")
    first.start()
    first.wait_ready()
    port = int(first.address.rpartition(":")[2])
    second = EmbeddedEtcd(tmp_path / "second", client_port=port)
    second.start()
    try:
        # At once, while the first answers for the second, which has not failed yet.
        with pytest.raises(RuntimeError, match="address already in use"):
            second.wait_ready()
    finally:
        second.stop()
        first.stop()


def test_a_server_listens_at_the_address_given_to_it(tmp_path: Path) -> None:
    for host, shown in (("127.0.0.2", "127.0.0.2"), ("::1", "[::1]")):
        etcd = EmbeddedEtcd(tmp_path, host=host)
        assert etcd.obstacle() == ""
        etcd.start()
        try:
            etcd.wait_ready()
            assert etcd.address.startswith(f"{shown}:")
            taken = f"another process listens on {etcd.address}"
            assert etcd.obstacle() == taken
        finally:
            etcd.stop()


def test_the_port_for_clients_is_free_at_the_servers_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.2", 0)) as other:
        taken = other.getsockname()[1]
        tries = itertools.chain((taken,), itertools.count(free_port()))
        monkeypatch.setattr(
            random.SystemRandom, "randrange", lambda *_: next(tries), raising=False
        )
        etcd = EmbeddedEtcd(tmp_path, host="127.0.0.2")
        assert not etcd.address.endswith(f":{taken}")


def test_data_of_an_earlier_run_is_removed(tmp_path: Path) -> None:
    for _ in range(2):
        etcd = EmbeddedEtcd(tmp_path)
        etcd.start()
        etcd.wait_ready()
        store = EtcdStore(etcd.address)
        assert store.get("/stop") is None
        store.put("/stop", b"1")
        store.close()
        etcd.kill()


def test_not_started(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="was not started"):
        EmbeddedEtcd(tmp_path).wait_ready()


def test_settings_do_not_leak_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_LISTEN_METRICS_URLS", "nonsense")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    etcd = EmbeddedEtcd(tmp_path)
    etcd.start()
    try:
        etcd.wait_ready()
        store = EtcdStore(etcd.address)
        assert store.status()
        store.close()
    finally:
        etcd.stop()


def test_missing_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.access(etcd_binary(), os.X_OK)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="--store"):
        etcd_binary()


def test_server_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\n"
        "from dtft.elastic.store.embedded import EmbeddedEtcd\n"
        "etcd = EmbeddedEtcd(pathlib.Path(sys.argv[1]))\n"
        "etcd.start()\n"
        "print(etcd.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert process_alive(pid)
        parent.kill()
    wait_until(lambda: not process_alive(pid))


def test_kill_group_reaches_grandchildren() -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"],
        stdout=subprocess.PIPE,
        process_group=0,
        preexec_fn=die_with_parent,
    ) as leader:
        assert leader.stdout is not None
        grandchild = int(leader.stdout.readline())
        kill_group(leader.pid, 5.0)
        assert not process_alive(leader.pid)
        assert not process_alive(grandchild)
    kill_group(leader.pid, 1.0)


def test_kill_group_refuses() -> None:
    with pytest.raises(ValueError, match="process_group=0"):
        kill_group(os.getpgrp(), 1.0)
    with subprocess.Popen(["sleep", "60"]) as member:
        with pytest.raises(ValueError, match=f"pid={member.pid}"):
            kill_group(member.pid, 1.0)
        member.kill()


def test_free_port_can_be_used_and_is_no_outgoing_one() -> None:
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10
    assert all(port < int(limits[0]) for port in ports)
