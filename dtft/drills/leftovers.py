"""Leftovers of an ended job on this machine: processes, sockets, memory, etcd's data.

Names the leftovers but does not remove them. Works on Linux only.
"""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from dtft.elastic.local_cluster import LocalCluster
from dtft.elastic.processes import session

MARK = "DTFT_DRILL"
"""Environment variable of every process of a drill's cluster: the name of its job."""
GRACE_S = 5.0
"""Seconds that `of_ended_hosts` gives processes and memory of ended hosts to vanish."""


def of_ended_hosts(cluster: LocalCluster, grace_s: float = GRACE_S) -> list[str]:
    """Describes the leftovers of hosts whose agents have ended, a text for each.

    Leftovers are processes of these hosts, and their memory directories.

    Args:
        cluster: the cluster, before it is closed: closing removes all leftovers.
        grace_s: seconds to wait for the leftovers to vanish.
    """
    end = time.monotonic() + grace_s
    while (found := _of_ended_hosts(cluster)) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _of_ended_hosts(cluster: LocalCluster) -> list[str]:
    found = []
    for host in cluster.poll():
        pids = session(cluster.agents[host].pid)
        found += [f"process {pid} of {host}: {_command(pid)}" for pid in pids]
        if (directory := cluster.memory_directory(host)).exists():
            found.append(f"memory of {host}: {directory}")
    return found


def of_job(job: str, arena_directory: Path, run_directory: Path) -> list[str]:
    """Describes the leftovers of a job whose cluster was closed, a text for each.

    Looks for processes and sockets of the job, its files in `arena_directory` (shared
    memory), and etcd's data in `run_directory`.
    """
    found = [f"process {pid}: {_command(pid)}" for pid in _marked(job)]
    found += [f"memory: {path}" for path in arena_directory.glob(f"*{job}*")]
    found += [f"socket: {name}" for name in _sockets(job)]
    found += [f"store: {path}" for path in (run_directory / "etcd").glob("*-data*")]
    return found


def _marked(job: str) -> list[int]:
    """Lists the process ids of a job, by an environment variable of its processes.

    All processes of a job inherit DTFT_DRILL with the job's name. Processes with an
    unreadable environment are left out.
    """
    mark, found = f"{MARK}={job}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _sockets(job: str) -> list[str]:
    """Lists the names of Unix sockets that contain the job's name."""
    lines: Sequence[str] = Path("/proc/net/unix").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if job in line})


def _command(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "?"
    return line.replace(b"\0", b" ").decode(errors="replace").strip()
