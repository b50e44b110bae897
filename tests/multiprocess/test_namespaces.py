"""Cuts of hosts in network namespaces, with real packets."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from dtft.elastic.faults import network_namespaces
from dtft.elastic.faults.interruptions import Interruption, begin
from dtft.elastic.faults.network_namespaces import HostNamespaces, NoNamespacesError
from dtft.elastic.faults.schedule import parse_fault
from dtft.elastic.local_cluster import LocalCluster

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
)
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
while True:
    channel, _ = server.accept()
    channel.sendall(channel.recv(4))
    channel.close()
"""
ASK = """
import socket, sys
channel = socket.create_connection((sys.argv[1], 7000), timeout=0.4)
channel.settimeout(15)  # the kernel has connected them; the server may be slow
channel.sendall(b"ping")
assert channel.recv(4) == b"ping"
"""


def python(prefix: tuple[str, ...], program: str, address: str) -> list[str]:
    return [*prefix, sys.executable, "-S", "-c", program, address]


def answers(prefix: tuple[str, ...], address: str) -> str:
    """What a client sees: "yes", or the last line of its error."""
    done = subprocess.run(
        python(prefix, ASK, address), capture_output=True, text=True, timeout=30
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else "yes"


LATE = "TimeoutError: timed out"
WHOLE = ("yes",) * 5


@pytest.fixture
def network() -> Iterator[HostNamespaces]:
    """Two hosts, a and b; on both and at the store a server answers."""
    made = HostNamespaces(["a", "b"])
    servers = []
    try:
        places = [(made.prefix(it), made.address(it)) for it in "ab"]
        for prefix, address in [*places, ((), made.store_host)]:
            command = python(prefix, ECHO, address)
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            servers.append(server)
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
        yield made
    finally:
        for server in servers:
            server.kill()
            server.communicate(timeout=10)
        made.close()
    assert network_namespaces.existing_namespaces(os.getpid()) == []


def seen(network: HostNamespaces) -> tuple[str, ...]:
    """What a sees of b, b of a, a and b of the store, and the store of a."""
    (a, address_a), (b, address_b) = (
        (network.prefix(it), network.address(it)) for it in "ab"
    )
    pairs = [(a, address_b), (b, address_a), (a, network.store_host)]
    pairs += [(b, network.store_host), ((), address_a)]
    with ThreadPoolExecutor(len(pairs)) as pool:
        return tuple(pool.map(lambda pair: answers(*pair), pairs))


def cut(network: HostNamespaces, hosts: str, reach: str) -> Interruption:
    """Begins a cut as a drill does."""
    fault = parse_fault(f"cut:{'0+1' if len(hosts) == 2 else '0'}@1:{reach}:5", 2)
    return begin(fault, list(hosts), cast(LocalCluster, None), network, [])


@needs_root
def test_each_cut_separates_what_it_names_and_is_silent(network):
    assert seen(network) == WHOLE
    begun = cut(network, "a", "store")
    assert seen(network) == ("yes", "yes", LATE, "yes", "yes")
    begun.end()
    for reach in ("all", "out", "in"):
        begun = cut(network, "a", reach)
        assert seen(network) == (LATE, LATE, LATE, "yes", LATE), reach
        begun.end()
        assert seen(network) == WHOLE
    begun = cut(network, "ab", "pair")
    assert seen(network) == (LATE, LATE, "yes", "yes", "yes")
    begun.end()
    assert seen(network) == WHOLE


@needs_root
def test_a_cut_of_several_hosts_that_fails_cuts_none(network):
    fault = parse_fault("cut:0+1@1:5", 2)
    with pytest.raises(KeyError, match="stranger"):
        begin(fault, ["a", "stranger"], cast(LocalCluster, None), network, [])
    assert seen(network) == WHOLE


@needs_root
@pytest.mark.parametrize(
    "lasting, ended",
    [
        (("b", "in"), ("a", "out")),
        (("b", "out"), ("a", "in")),
        (("b", "all"), ("a", "all")),
        (("ab", "pair"), ("a", "all")),
        (("b", "in"), ("ab", "pair")),
        (("a", "store"), ("a", "all")),
        (("a", "in"), ("a", "in")),
    ],
)
def test_a_cut_lasts_though_another_one_ends(network, lasting, ended):
    alone = cut(network, *lasting)
    expected = seen(network)
    assert LATE in expected
    alone.end()
    for first, second in ((lasting, ended), (ended, lasting)):
        both = [cut(network, *first), cut(network, *second)]
        both.pop((first, second).index(ended)).end()
        assert seen(network) == expected
        both.pop().end()
        assert seen(network) == WHOLE


@needs_root
def test_what_a_killed_drill_left_is_swept_at_the_next_start():
    program = (
        "from dtft.elastic.faults.network_namespaces import HostNamespaces as H\n"
        "import os, signal\n"
        "H(['a']); print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", program]
    left = subprocess.run(command, capture_output=True, text=True, timeout=30)
    pid = int(left.stdout)
    assert network_namespaces.existing_namespaces(pid)
    network_namespaces.sweep_namespaces()
    assert not network_namespaces.existing_namespaces(pid)
    assert not list(network_namespaces.NETNS_ETC.glob(f"dtft{pid}*"))


@needs_root
@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.4])
def test_an_interrupted_drill_leaves_no_namespace_though_its_parent_ends_it_too(
    after_s: float,
) -> None:
    program = (
        "import os, time\n"
        "from dtft.drills.options import end_at_signals\n"
        "from dtft.elastic.faults.network_namespaces import HostNamespaces as H\n"
        "end_at_signals(); print(os.getpid(), flush=True)\n"
        "network = H('abcdefgh')\n"
        "try: time.sleep(30)\n"
        "finally: network.close()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as drill:
        assert drill.stdout is not None
        pid = int(drill.stdout.readline())
        time.sleep(after_s)
        os.killpg(pid, signal.SIGINT)  # as Ctrl-C does
        for _ in range(20):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.05)
        drill.wait(30)
    assert not network_namespaces.existing_namespaces(pid)
    assert not list(network_namespaces.NETNS_ETC.glob(f"dtft{pid}*"))


def test_without_root_or_tools_cuts_are_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if shutil.which("ip"):
        with pytest.raises(NoNamespacesError, match="need root: run this as root"):
            HostNamespaces(["a"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NoNamespacesError, match="install the package iproute2"):
        HostNamespaces(["a"])
    network_namespaces.sweep_namespaces()  # nothing can be there
