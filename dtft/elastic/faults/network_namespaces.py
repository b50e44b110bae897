"""Network namespaces for a local cluster's hosts, and cuts between hosts.

Every host has two interfaces, on two bridges of this machine: one leads to the other
hosts, one to the store. So a host can be cut off from the store alone. A cut drops
packets silently, like a partition of a real network. To cut a host off in both
directions, its interfaces leave their bridges. To cut one direction, or two hosts from
each other, neighbour (ARP) entries name an unused hardware address. Interfaces stay up
and addresses stay resolved, so a sender gets no error, only no answer. Needs Linux,
root and `ip` (iproute2). Names of namespaces contain the pid of the process that made
them; `remove_leftovers` removes the namespaces of processes that have ended.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtft.elastic.faults.schedule import Reach

PREFIX = "dtft"
NETNS_ETC = Path("/etc/netns")
"""Directory of replacements of `/etc/hosts`: `ip netns exec NAME` uses NAME/hosts."""
NETWORKS = 8192
"""Number of pairs of networks to choose from, 10.64.0.0/24 to 10.127.255.0/24."""
MOST_HOSTS = 100
_GATEWAY = 254
_NOBODY = "02:ff:ff:ff:ff:ff"


class NoNamespacesError(ValueError):
    """This machine cannot cut hosts off; the message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class HostNamespace:
    """One host's network namespace and its interfaces."""

    name: str
    number: int
    """Last number of the host's IP addresses in the hosts' and the store's network."""
    outer: tuple[str, str]
    """Names of the interfaces, outside the namespace, that connect it to two bridges of
    this machine: to the bridge of all hosts, and to the bridge to the store."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkCut:
    """One cut of a host, or of two hosts from each other.

    Two cuts with the same fields are not equal, because both may be in force at once.
    """

    hosts: tuple[str, ...]
    reach: Reach


class HostNamespaces:
    """The namespaces of a cluster's hosts; `close` removes all of them."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """Makes a network namespace for each host.

        Raises:
            NoNamespacesError: this process is not root, the command `ip` is missing or
                fails, this machine has addresses in all networks that hosts could use,
                or there are no hosts or more than 100 (`MOST_HOSTS`).
        """
        check_namespaces()
        remove_leftovers()
        if not 1 <= len(hosts) <= MOST_HOSTS:
            raise NoNamespacesError(
                f"{len(hosts)} hosts with namespaces; allowed: 1 to {MOST_HOSTS}."
            )
        self._base = f"{PREFIX}{os.getpid()}"
        self._bridges = (f"{self._base}b", f"{self._base}s")
        self._networks = _free_networks()
        self._cuts: list[NetworkCut] = []
        """The cuts in force."""
        self._hosts = {
            host: HostNamespace(
                name=f"{self._base}h{number}",
                number=number + 1,
                outer=(f"{self._base}d{number}", f"{self._base}e{number}"),
            )
            for number, host in enumerate(hosts)
        }
        try:
            for side in (0, 1):
                self._add_bridge(side)
            for host in self._hosts.values():
                self._add(host)
        except BaseException:
            self.close()
            raise

    @property
    def store_host(self) -> str:
        """This machine's IP address in the network that leads to the store."""
        return f"{self._networks[1]}.{_GATEWAY}"

    def address(self, host: str) -> str:
        """Returns the host's IP address in the network of the hosts."""
        return f"{self._networks[0]}.{self._hosts[host].number}"

    def prefix(self, host: str) -> tuple[str, ...]:
        """Returns the words `ip netns exec NAME`.

        A command that begins with these words runs in the host's namespace.
        """
        return ("ip", "netns", "exec", self._hosts[host].name)

    def cut(self, host: str, reach: Reach) -> NetworkCut:
        """Drops a host's packets silently, until the cut is undone (`heal`).

        Args:
            host: the host.
            reach: "all": all packets; "store": packets to and from the store; "out":
                packets that the host sends; "in": packets that the host receives;
                "pair": no packets (use `part`, which cuts two hosts off from each
                other).
        """
        return self._begin(NetworkCut(hosts=(host,), reach=reach))

    def part(self, one: str, other: str) -> NetworkCut:
        """Drops the packets between two hosts silently, until the cut is undone."""
        return self._begin(NetworkCut(hosts=(one, other), reach="pair"))

    def heal(self, cut: NetworkCut) -> None:
        """Undoes one cut. Packets that another cut also drops are still dropped."""
        self._cuts = [it for it in self._cuts if it is not cut]
        self._apply(cut)

    def close(self) -> None:
        """Removes this cluster's namespaces, interfaces and files in /etc/netns."""
        _remove(self._base)

    # ------------------------------------------------------------------ cutting

    def _begin(self, cut: NetworkCut) -> NetworkCut:
        self._cuts.append(cut)
        try:
            self._apply(cut)
        except Exception:
            with contextlib.suppress(Exception):
                self.heal(cut)
            raise
        return cut

    def _apply(self, cut: NetworkCut) -> None:
        """Updates the interfaces or ARP entries of the hosts of a cut.

        Sets them as all cuts in force together require. Called after `cut` has come
        into force, and after it has been undone.
        """
        for name in cut.hosts:
            host = self._hosts[name]
            match cut.reach:
                case "all" | "store":
                    self._set_links(name)
                case "out" | "pair":
                    self._set_neighbours(host)
                case "in":
                    self._make_known(host)

    def _set_links(self, name: str) -> None:
        """Connects a host's interfaces to their bridges, except those that are cut off.

        A cut with reach "all" cuts off both interfaces; a cut with reach "store" cuts
        off only the interface to the store.
        """
        reaches = {cut.reach for cut in self._cuts if name in cut.hosts}
        off = "all" in reaches, bool(reaches & {"all", "store"})
        outer = self._hosts[name].outer
        for end, bridge, is_off in zip(outer, self._bridges, off, strict=True):
            where = ("nomaster",) if is_off else ("master", bridge)
            _run("ip", "link", "set", end, *where)

    def _is_dropped(self, sender: int, receiver: int) -> bool:
        """Whether a cut in force drops the packets from `sender` to `receiver`.

        Only cuts of one direction and cuts between two hosts are considered, because
        only these cuts change the sender's ARP entries. `sender` and `receiver` are the
        last numbers of the IP addresses of hosts or bridges.
        """
        for cut in self._cuts:
            numbers = {self._hosts[name].number for name in cut.hosts}
            match cut.reach:
                case "out" if sender in numbers:
                    return True
                case "in" if receiver in numbers:
                    return True
                case "pair" if numbers == {sender, receiver}:
                    return True
        return False

    # ------------------------------------------------------------------- making

    def _add_bridge(self, side: int) -> None:
        bridge, mac = self._bridges[side], self._mac(side, _GATEWAY)
        _run("ip", "link", "add", bridge, "address", mac, "type", "bridge")
        address = f"{self._networks[side]}.{_GATEWAY}/24"
        _run("ip", "addr", "add", address, "dev", bridge)
        _run("ip", "link", "set", bridge, "up")

    def _add(self, host: HostNamespace) -> None:
        etc = NETNS_ETC / host.name
        etc.mkdir(parents=True)
        # gloo binds to the address that the machine's name resolves to.
        own = f"{self._networks[0]}.{host.number}"
        (etc / "hosts").write_text(
            f"127.0.0.1 localhost\n{own} {socket.gethostname()}\n"
        )
        _run("ip", "netns", "add", host.name)
        for side, (bridge, outer) in enumerate(
            zip(self._bridges, host.outer, strict=True)
        ):
            peer = ("peer", "name", f"eth{side}", "netns", host.name)
            _run("ip", "link", "add", outer, "type", "veth", *peer)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            mac = self._mac(side, host.number)
            _batch(
                host.name,
                [
                    f"link set eth{side} address {mac}",
                    f"addr add {self._networks[side]}.{host.number}/24 dev eth{side}",
                    f"link set eth{side} up",
                ],
            )
        _batch(host.name, ["link set lo up"])
        self._set_neighbours(host)
        self._make_known(host)

    def _mac(self, side: int, number: int) -> str:
        """Computes the hardware address (MAC) of the interface with an IP address.

        The address is 02:00, followed by the four numbers of the IP address. `side` is
        0 for the hosts' network and 1 for the store's. `number` is the last number of
        the IP address.
        """
        parts = [int(part) for part in self._networks[side].split(".")] + [number]
        return "02:00:" + ":".join(f"{part:02x}" for part in parts)

    def _set_neighbours(self, host: HostNamespace) -> None:
        """Sets the ARP entries that `host` has for all other hosts and the bridges."""
        others = {it.number for it in self._hosts.values()} - {host.number}
        ends = [(0, number) for number in sorted(others | {_GATEWAY})] + [(1, _GATEWAY)]
        _batch(
            host.name,
            [
                self._neighbour(side, host.number, number, f"eth{side}")
                for side, number in ends
            ],
        )

    def _make_known(self, host: HostNamespace) -> None:
        """Sets the ARP entries that all other hosts and the bridges have for `host`.

        Hosts whose namespace has not been made yet are left out.
        """
        made = set(_names("netns"))
        for other in self._hosts.values():
            if other is not host and other.name in made:
                entry = self._neighbour(0, other.number, host.number, "eth0")
                _batch(other.name, [entry])
        _batch(
            None,
            [
                self._neighbour(side, _GATEWAY, host.number, bridge)
                for side, bridge in enumerate(self._bridges)
            ],
        )

    def _neighbour(self, side: int, sender: int, receiver: int, device: str) -> str:
        """Returns the `ip` command that sets a sender's ARP entry for a receiver.

        The entry names an unused hardware address if a cut drops the packets.

        Args:
            side: 0 for the hosts' network, 1 for the store's.
            sender: last number of the sender's IP address.
            receiver: last number of the receiver's IP address.
            device: the sender's interface to this network.
        """
        dropped = self._is_dropped(sender, receiver)
        where = _NOBODY if dropped else self._mac(side, receiver)
        address = f"{self._networks[side]}.{receiver}"
        return f"neigh replace {address} lladdr {where} dev {device} nud permanent"


def check_namespaces() -> None:
    """Checks that this machine can cut hosts off.

    Raises:
        NoNamespacesError: this process is not root, or the command `ip` is missing.
    """
    if shutil.which("ip") is None:
        raise NoNamespacesError(
            "cutting a host off needs `ip`, which is not installed: install the "
            "package iproute2, or leave out faults of the kind cut."
        )
    if os.geteuid() != 0:
        raise NoNamespacesError(
            "cutting a host off needs network namespaces, and those need root: run "
            "this as root, or leave out faults of the kind cut."
        )


def remove_leftovers() -> None:
    """Removes namespaces and interfaces of processes that have ended; needs root."""
    for pid in {int(re.findall(r"\d+", name)[0]) for name in existing_namespaces()}:
        if not Path(f"/proc/{pid}").exists():
            _remove(f"{PREFIX}{pid}")


def sweep_namespaces() -> None:
    """Removes namespaces and interfaces of processes that have ended, if it can.

    Does nothing without root or without the command `ip`, and ignores errors of `ip`.
    """
    with contextlib.suppress(NoNamespacesError):
        check_namespaces()
        remove_leftovers()


def existing_namespaces(pid: int | None = None) -> list[str]:
    """Lists the names of the namespaces and interfaces that drills have made.

    Args:
        pid: process id of a drill; None for all drills.
    """
    names = [*_names("netns"), *_names("link")]
    number = r"\d+" if pid is None else str(pid)
    own = re.compile(rf"{PREFIX}{number}[a-z]\d*")
    return [name for name in names if own.fullmatch(name)]


def _free_networks() -> tuple[str, str]:
    """Finds two networks without an address of this machine; returns their prefixes.

    A prefix is the first three numbers, such as "10.64.0".

    Raises:
        NoNamespacesError: there are no such networks.
    """
    taken = set(re.findall(r"inet (\d+\.\d+\.\d+)\.", _run("ip", "-o", "-4", "addr")))
    for offset in range(NETWORKS):
        number = 2 * ((os.getpid() + offset) % NETWORKS)
        pair = tuple(
            f"10.{64 + (number + side) // 256}.{(number + side) % 256}"
            for side in (0, 1)
        )
        if not taken & set(pair):
            return pair[0], pair[1]
    raise NoNamespacesError("this machine has addresses in all of 10.64.0.0/10.")


def _remove(base: str) -> None:
    """Removes one process's interfaces, namespaces and folders in /etc/netns.

    `base` is "dtft" and the process id, such as "dtft4711". Names that begin with
    `base` and a letter belong to this process.
    """
    for kind in ("link", "netns"):
        for name in _names(kind):
            if re.match(rf"{base}[a-z]", name):
                # An interface disappears with the namespace of its other end.
                _run("ip", kind, "del", name, check=False)
    for folder in NETNS_ETC.glob(f"{base}[a-z]*"):
        shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # other programs have files there
        NETNS_ETC.rmdir()


def _names(kind: str) -> list[str]:
    """Lists the names of namespaces or interfaces that drills have made.

    `kind` is "netns" for namespaces and "link" for interfaces.
    """
    command = ("netns", "list") if kind == "netns" else ("-o", "link")
    return re.findall(rf"\b({PREFIX}\d+[a-z]\d*)\b", _run("ip", *command))


def _batch(namespace: str | None, commands: Sequence[str]) -> None:
    where = ("-n", namespace) if namespace else ()
    _run("ip", *where, "-batch", "-", text="\n".join(commands) + "\n")


def _run(*command: str, text: str = "", check: bool = True) -> str:
    result = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        input=text,
        timeout=30,
        process_group=0,  # the terminal's Ctrl-C does not reach it
    )
    if check and result.returncode:
        raise NoNamespacesError(
            f"cutting a host off needs network namespaces, but `{' '.join(command)}` "
            f"says: {result.stderr.strip()}"
        )
    return result.stdout
