"""Hosts with slow links on one machine: network namespaces, veth pairs, `tc tbf`.

Each host is a network namespace with one interface, `eth0`, whose bandwidth is limited
in both directions; all are on one bridge. Needs root, `ip` and `tc` (iproute2).
Must not know what runs on the hosts.
"""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "dtft-"
NETNS_ETC = Path("/etc/netns")
"""`ip netns exec NAME` lays NETNS_ETC/NAME/hosts over /etc/hosts."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A network namespace with a limited link."""

    name: str
    """Of the namespace."""
    address: str
    """IPv4 address of its eth0."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put in front of a command to run it on this host."""
        return ("ip", "netns", "exec", self.name)


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Limited hosts, and where they reach the machine that holds them."""

    hosts: tuple[Host, ...]
    gateway: str
    """Address of the bridge, for services outside of the hosts (not limited)."""


class CannotLimitError(RuntimeError):
    """This machine does not let us limit links; the text says what is missing."""


@contextmanager
def limited_hosts(count: int, mbit_per_s: float | Sequence[float]) -> Iterator[Hosts]:
    """Hosts whose links carry mbit_per_s in each direction; removed at the end.

    `mbit_per_s` is one number, or one for each host.

    In the hosts this machine's name stands for the host's own address, because gloo
    binds to what the machine's name resolves to, and would otherwise stay on loopback.

    Raises:
        CannotLimitError: not root, or `ip` or `tc` is missing or refuses.
        ValueError: a count outside of 1 to 100, or a bandwidth that is not positive.
    """
    one = isinstance(mbit_per_s, int | float)
    rates = [mbit_per_s] * count if one else list(mbit_per_s)
    if not 1 <= count <= 100 or len(rates) != count or min(rates) <= 0:
        raise ValueError(
            f"count={count}, mbit_per_s={mbit_per_s}. Allowed: 1 to 100 hosts, and a "
            "bandwidth > 0, or one for each host."
        )
    _check_machine()
    remove_leftovers()
    base, bridge = f"{PREFIX}{os.getpid()}", f"{PREFIX}{os.getpid()}b"
    network = f"10.213.{os.getpid() % 250}"
    hosts = tuple(
        Host(name=f"{base}h{i}", address=f"{network}.{i + 1}") for i in range(count)
    )
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{network}.254/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for host, rate in zip(hosts, rates, strict=True):
            _add(host, bridge, rate)
        yield Hosts(hosts=hosts, gateway=f"{network}.254")
    finally:
        _remove(base)


def remove_leftovers() -> None:
    """Takes down what processes of ours that no longer run have left behind."""
    names = "\n".join([*_names("netns"), *_names("link")])
    for pid in {int(found) for found in re.findall(rf"{PREFIX}(\d+)", names)}:
        if not Path(f"/proc/{pid}").exists():
            _remove(f"{PREFIX}{pid}")


def bytes_through(interface: str = "eth0") -> tuple[int, int]:
    """Bytes sent and received by an interface of the namespace this runs in."""
    folder = Path("/sys/class/net") / interface / "statistics"
    sent, received = (
        int((folder / f"{name}_bytes").read_text()) for name in ("tx", "rx")
    )
    return sent, received


def _check_machine() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise CannotLimitError(f"{missing} not found: install the package iproute2.")
    if os.geteuid() != 0:
        raise CannotLimitError("network namespaces need root: run this as root.")


def _add(host: Host, bridge: str, mbit_per_s: float) -> None:
    etc = NETNS_ETC / host.name
    etc.mkdir(parents=True)
    (etc / "hosts").write_text(
        f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n"
    )
    outer = "v".join(host.name.rsplit("h", 1))
    inner = ("ip", "-n", host.name)
    _run("ip", "netns", "add", host.name)
    _run("ip", "link", "add", outer, "type", "veth", "peer", "eth0", "netns", host.name)
    _run("ip", "link", "set", outer, "master", bridge, "up")
    _run(*inner, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _run(*inner, "link", "set", "eth0", "up")
    _run(*inner, "link", "set", "lo", "up")
    # The bucket must hold a segment as the kernel hands it over, 64 KiB.
    burst = max(128 * 1024, int(mbit_per_s * 1e6 / 8 * 0.01))
    limit = ("rate", f"{mbit_per_s}mbit", "burst", str(burst), "latency", "50ms")
    _run("tc", "-n", host.name, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
    _run("tc", "qdisc", "add", "dev", outer, "root", "tbf", *limit)


def _remove(base: str) -> None:
    """Everything whose name begins with base and goes on with a letter."""
    for kind in ("netns", "link"):
        for name in _names(kind):
            if re.match(rf"{base}[a-z]", name):
                # Some are gone already, with the namespace of their other end.
                command = ["ip", kind, "del", name]
                subprocess.run(command, check=False, capture_output=True)
    for folder in NETNS_ETC.glob(f"{base}[a-z]*"):
        shutil.rmtree(folder)


def _names(kind: str) -> list[str]:
    """Of our namespaces or interfaces."""
    command = ("netns", "list") if kind == "netns" else ("-o", "link")
    return re.findall(rf"({PREFIX}\d+[a-z]\d*)", _run("ip", *command))


def _run(*command: str) -> str:
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise CannotLimitError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout
