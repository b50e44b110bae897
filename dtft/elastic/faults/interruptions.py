"""What a drill begins and can end again: stopped processes, cut hosts, a paused store.

Each interruption is a pair of actions on a local cluster, by signals or by the hosts'
network namespaces. Who is hit, and when, is decided by `injector`.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtft.elastic.faults.network_namespaces import HostNamespaces
from dtft.elastic.faults.schedule import Fault
from dtft.elastic.local_cluster import LocalCluster
from dtft.elastic.processes import process_alive

INTERRUPTIONS = ("stop-agent", "stop-host", "stop-trainer", "cut", "pause-store")
"""Kinds of faults that last, and end after their seconds."""


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """One fault that has begun."""

    pids: tuple[int, ...]
    """stop-trainer, stop-agent: the processes that are stopped."""
    end: Callable[[], None]
    """Undoes it; what has died meanwhile stays dead."""

    @property
    def gone(self) -> bool:
        """Whether all processes that it stopped have been killed by somebody."""
        return bool(self.pids) and not any(map(process_alive, self.pids))


def begin(
    fault: Fault,
    hosts: Sequence[str],
    cluster: LocalCluster,
    network: HostNamespaces | None,
    trainer_pids: Sequence[int],
) -> Interruption:
    """Stops, cuts or pauses at once.

    Args:
        fault: of one of the kinds in `INTERRUPTIONS`.
        hosts: whom it hits.
        cluster: whose processes they are.
        network: the hosts' namespaces; needed for cuts.
        trainer_pids: the training processes of the hosts, for stop-trainer.
    """
    match fault.kind:
        case "stop-agent":
            return _stopped([cluster.agents[host].pid for host in hosts])
        case "stop-trainer":
            return _stopped(trainer_pids)
        case "stop-host":
            pids = [pid for host in hosts for pid in session(cluster.agents[host].pid)]
            return _stopped(pids)
        case "cut":
            assert network is not None
            if fault.reach == "pair":
                network.part(*hosts)
            else:
                for host in hosts:
                    network.cut(host, fault.reach)
            return Interruption(pids=(), end=lambda: _heal(network, hosts))
        case "pause-store":
            return _store_paused(cluster)
        case _:
            raise ValueError(f"{fault} is over at once; allowed: {INTERRUPTIONS}")


def session(leader: int) -> list[int]:
    """The processes of a session, its leader first: those of one host."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found.append(int(path.parent.name))
    return sorted(found, key=lambda pid: (pid != leader, pid))


def _stopped(pids: Sequence[int]) -> Interruption:
    stopped = tuple(pid for pid in pids if pid)
    for pid in stopped:
        _send(pid, signal.SIGSTOP)

    def end() -> None:
        for pid in reversed(stopped):  # an agent sees its trainers run
            _send(pid, signal.SIGCONT)

    return Interruption(pids=stopped, end=end)


def _store_paused(cluster: LocalCluster) -> Interruption:
    """Stops etcd; its supervisor, which would restart it, lets it be meanwhile."""
    cluster.etcd.supervised = False
    stopped = _stopped([cluster.etcd.pid])

    def end() -> None:
        stopped.end()
        cluster.etcd.supervised = True

    return Interruption(pids=stopped.pids, end=end)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _heal(network: HostNamespaces, hosts: Sequence[str]) -> None:
    for host in hosts:
        network.heal(host)
