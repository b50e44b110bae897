"""Reversible faults of a drill: suspended processes, cut networks, full directories.

A drill is a run with planned faults. A paused store and read-only storage are
reversible faults, too. `begin` begins a fault and returns an `Interruption`, which can
undo the fault. A fault consists of signals, changes of the hosts' network namespaces,
mounts, or a file that fills a file system. The module `injector` decides the victims
and the moment.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dtft.elastic.faults.full_disks import (
    memory_full,
    storage_full,
    storage_read_only,
)
from dtft.elastic.faults.network_namespaces import HostNamespaces
from dtft.elastic.faults.schedule import Fault
from dtft.elastic.local_cluster import LocalCluster
from dtft.elastic.processes import process_alive, session

OF_DIRECTORIES = ("full-storage", "readonly-storage", "full-memory")
"""Kinds of faults that make the storage directory full or read-only, or the arena
directory full. The drill undoes them at its end, even if their duration is not over."""
INTERRUPTIONS = (
    *("stop-agent", "stop-host", "stop-trainer", "cut", "pause-store"),
    *OF_DIRECTORIES,
)
"""Kinds of faults that `begin` can begin and `Interruption.end` can undo."""


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """One fault that has begun, and the function that undoes it."""

    pids: tuple[int, ...]
    """Process ids of the processes that the fault suspended (SIGSTOP); may be empty."""
    end: Callable[[], None]
    """Undoes the fault; suspended processes that have died meanwhile stay dead."""

    @property
    def gone(self) -> bool:
        """Whether every process that the fault suspended (SIGSTOP) has died.

        False for a fault that suspends no process, such as a network cut.
        """
        return bool(self.pids) and not any(map(process_alive, self.pids))


def begin(
    fault: Fault,
    hosts: Sequence[str],
    cluster: LocalCluster,
    network: HostNamespaces | None,
    trainer_pids: Sequence[int],
) -> Interruption:
    """Begins a fault at once; returns the `Interruption` that can undo it.

    Args:
        fault: a stop, a cut, a pause of the store, or a full or read-only directory.
        hosts: names of the hosts that the fault hits; for a cut between two hosts
            (reach "pair"), these two. Ignored by faults of the store and of
            directories.
        cluster: the local cluster of these hosts.
        network: the hosts' network namespaces; needed for cuts only.
        trainer_pids: process ids of the hosts' trainers; used for stop-trainer only.

    Raises:
        ValueError: the fault is of a kind that cannot be undone; full-memory would have
            to fill a file system of more than 1 GiB; or a command `ip`, which makes a
            cut, failed.
        RuntimeError: a mount of full-storage or readonly-storage failed.
    """
    match fault.kind:
        case "stop-agent":
            return stopped([cluster.agents[host].pid for host in hosts])
        case "stop-trainer":
            return stopped(trainer_pids)
        case "stop-host":
            pids = [pid for host in hosts for pid in session(cluster.agents[host].pid)]
            return stopped(pids)
        case "cut":
            assert network is not None
            with contextlib.ExitStack() as undone:  # heals the cuts made, if one fails
                if fault.reach == "pair":
                    undone.callback(network.heal, network.part(*hosts))
                else:
                    for host in hosts:
                        undone.callback(network.heal, network.cut(host, fault.reach))
                return Interruption(pids=(), end=undone.pop_all().close)
        case "pause-store":
            return _store_paused(cluster)
        case "full-storage":
            end = storage_full(cluster.options.storage_directory)
            return Interruption(pids=(), end=end)
        case "readonly-storage":
            end = storage_read_only(cluster.options.storage_directory)
            return Interruption(pids=(), end=end)
        case "full-memory":
            end = memory_full(cluster.options.arena_directory)
            return Interruption(pids=(), end=end)
        case _:
            raise ValueError(f"{fault} is over at once; allowed: {INTERRUPTIONS}")


def stopped(pids: Sequence[int]) -> Interruption:
    """Suspends processes (SIGSTOP); ignores process id 0 and processes that have ended.

    Ending the returned interruption resumes the processes (SIGCONT), the last first.
    """
    found = tuple(pid for pid in pids if pid)
    for pid in found:
        _send(pid, signal.SIGSTOP)

    def end() -> None:
        for pid in reversed(found):  # an agent continues after its trainers
            _send(pid, signal.SIGCONT)

    return Interruption(pids=found, end=end)


def _store_paused(cluster: LocalCluster) -> Interruption:
    """Pauses etcd (SIGSTOP), and keeps its supervisor from restarting it meanwhile."""
    cluster.etcd.supervised = False
    paused = stopped([cluster.etcd.pid])

    def end() -> None:
        paused.end()
        cluster.etcd.supervised = True

    return Interruption(pids=paused.pids, end=end)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
