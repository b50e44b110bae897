"""Cuts of hosts in network namespaces, with real packets."""

import os
import shutil
import subprocess
import sys

import pytest

from dtft.elastic.faults import network_namespaces
from dtft.elastic.faults.network_namespaces import HostNamespaces, NoNamespacesError

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
channel.settimeout(0.4)
channel.sendall(b"ping")
assert channel.recv(4) == b"ping"
"""


def python(prefix: tuple[str, ...], program: str, address: str) -> list[str]:
    return [*prefix, sys.executable, "-S", "-c", program, address]


def answers(prefix: tuple[str, ...], address: str) -> str:
    """What a client sees: "yes", or the last line of its error."""
    done = subprocess.run(
        python(prefix, ASK, address), capture_output=True, text=True, timeout=20
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else "yes"


@needs_root
def test_each_cut_separates_what_it_names_and_is_silent():
    network = HostNamespaces(["a", "b"])
    servers = []
    try:
        places = [(network.prefix(it), network.address(it)) for it in "ab"]
        for prefix, address in [*places, ((), network.store_host)]:
            command = python(prefix, ECHO, address)
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            servers.append(server)
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
        (a, address_a), (b, address_b) = places

        def seen() -> tuple[str, ...]:
            pairs = [(a, address_b), (b, address_a), (a, network.store_host)]
            pairs += [(b, network.store_host), ((), address_a)]
            return tuple(answers(*pair) for pair in pairs)

        late = "TimeoutError: timed out"
        whole = ("yes",) * 5
        assert seen() == whole
        network.cut("a", "store")
        assert seen() == ("yes", "yes", late, "yes", "yes")
        network.heal("a")
        for reach in ("all", "out", "in"):
            network.cut("a", reach)
            assert seen() == (late, late, late, "yes", late), reach
            network.heal("a")
            assert seen() == whole
        network.part("a", "b")
        assert seen() == (late, late, "yes", "yes", "yes")
        network.heal("a")
        assert seen() == whole
    finally:
        for server in servers:
            server.kill()
            server.communicate(timeout=10)
        network.close()
    assert network_namespaces.existing_namespaces(os.getpid()) == []


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


def test_without_root_or_tools_cuts_are_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if shutil.which("ip"):
        with pytest.raises(NoNamespacesError, match="need root: run this as root"):
            HostNamespaces(["a"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NoNamespacesError, match="install the package iproute2"):
        HostNamespaces(["a"])
    network_namespaces.sweep_namespaces()  # nothing can be there
