"""Process utilities: exit, process groups, ports, free disk space. Linux only."""

import contextlib
import ctypes
import errno
import ipaddress
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: a forked child must not
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.005
CLEANUP_S = 30.0
"""Seconds that a command has, after SIGTERM, to end its own processes."""
_LOWEST_PORT = 10_000


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends; used as `preexec_fn`.

    The kernel sends SIGKILL when the parent *thread* that forked ends, not the parent
    process, so start the child from a thread that outlives the child. The setting
    survives `exec` but does not apply to the child's own children.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run_to_end(command: Sequence[str], limit_s: float, output: IO | int) -> int | None:
    """Runs a command until it ends, and sends it SIGTERM if it must end early.

    The command gets SIGTERM after `limit_s` seconds, and when an exception such as
    KeyboardInterrupt is raised in this call. If it still runs 30 s (`CLEANUP_S`)
    later, it is killed (SIGKILL). If the calling thread ends, even by SIGKILL, the
    kernel sends SIGTERM to the command; no SIGKILL follows in this case.

    Args:
        command: the command and its arguments.
        limit_s: limit in seconds.
        output: file or descriptor for the command's stdout and stderr.

    Returns:
        The return code; None if the command was still running after `limit_s`.
    """
    process = subprocess.Popen(
        command, stdout=output, stderr=output, preexec_fn=_terminate_with_parent
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(CLEANUP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(CLEANUP_S)  # it may be in uninterruptible sleep


def _terminate_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def open_log(path: Path) -> BinaryIO:
    """Opens a log file for appending, or /dev/null if the log file cannot be opened.

    So a process can be started although the disk is full or read-only.
    """
    try:
        return open(path, "ab")
    except OSError:
        return open(os.devnull, "ab")


def ended_with(process: subprocess.Popen) -> int | None:
    """Returns the return code of a child that has ended; None if the child runs.

    Unlike `Popen.poll` this works while another thread waits for the child, and it does
    not reap the child.
    """
    if process.returncode is None:
        try:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            found = os.waitid(os.P_PID, process.pid, options)
        except ChildProcessError:  # another thread reaps it, and is about to say so
            return process.wait()
        if found is not None:
            killed = found.si_code != os.CLD_EXITED
            return -found.si_status if killed else found.si_status
    return process.returncode


def free_port(host: str = "127.0.0.1") -> int:
    """Finds a free TCP port at an IP address of this host; does not reserve the port.

    A host name in place of an address counts as 127.0.0.1, without a lookup. The port
    is below the kernel's range for outgoing connections, if possible. A port in that
    range could be occupied by a client that reconnects while the server restarts.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        host = "127.0.0.1"
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    first_outgoing = int(limits[0])
    for _ in range(100 if first_outgoing > _LOWEST_PORT + 1000 else 0):
        port = random.SystemRandom().randrange(_LOWEST_PORT, first_outgoing)
        if _can_bind(host, port):
            return port
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _can_bind(host: str, port: int) -> bool:
    with socket.socket(_family(host)) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def port_taken(port: int, host: str = "127.0.0.1") -> bool:
    """Whether listening at a TCP port fails, for example because the port is in use.

    `host` is an IP address, or a host name that has an IPv4 address.
    """
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return True
        return False


def room_problem(directory: Path, num_bytes: int) -> str:
    """Returns why a directory cannot take a file of `num_bytes` bytes; "" if it can.

    Allocates a file of this size in the directory, then removes the file.

    >>> room_problem(Path("/nonexistent"), 1)
    '/nonexistent: No such file or directory (errno 2)'
    """
    probe = directory / f".room-{os.getpid()}"
    try:
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(handle, 0, num_bytes)
        finally:
            os.close(handle)
            probe.unlink()
    except OSError as error:
        text = f"{directory}: {error.strerror} (errno {error.errno})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text += f"; {num_bytes >> 20} MiB must be free there"
        return text
    return ""


def state_letter(pid: int) -> str:
    """Returns the kernel's state letter of a process, or "" if the process is gone.

    The letters are those of /proc/PID/stat, such as R (runs) and T (stopped).

    >>> state_letter(os.getpid())
    'R'
    """
    status = _status(pid)
    return status.state if status is not None else ""


def process_alive(pid: int) -> bool:
    """Whether a process exists and has not ended: a zombie is not alive."""
    status = _status(pid)
    return status is not None and status.state not in "ZX"


def kill_group(pid: int, deadline_s: float) -> None:
    """Kills a process group (SIGKILL) and waits until none of its processes runs.

    Does not reap processes; a parent must still wait for its child. Does nothing if the
    group does not exist.

    Args:
        pid: id of the group's leader, which was started with `process_group=0` or a new
            session.
        deadline_s: deadline in seconds.

    Raises:
        ValueError: `pid` is not a group leader, or the group is the caller's own.
        TimeoutError: processes of the group still run after `deadline_s`.
    """
    if pid <= 1 or pid == os.getpgrp():
        raise ValueError(
            f"pid={pid}: must lead a process group other than the caller's; "
            "start the process with process_group=0."
        )
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        if process_alive(pid):
            raise ValueError(
                f"pid={pid}: leads no process group; start it with process_group=0."
            ) from None
        return
    end = time.monotonic() + deadline_s
    while members := _running(lambda status: status.group == pid):
        if time.monotonic() > end:
            raise TimeoutError(
                f"process group {pid}: {members} still run {deadline_s} s after SIGKILL"
            )
        time.sleep(_POLL_S)


def session(leader: int) -> list[int]:
    """Lists the process ids of a POSIX session, that of the session's leader first.

    Leaves out zombies and dead processes. A host's agent is the leader of the session
    that contains all processes of the host.

    Args:
        leader: process id of the session's leader, which is also the session's id.
    """
    found = _running(lambda status: status.session == leader)
    return sorted(found, key=lambda pid: (pid != leader, pid))


@dataclass(frozen=True)
class _Status:
    state: str
    group: int
    session: int


def _running(wanted: Callable[[_Status], bool]) -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = {pid: _status(pid) for pid in pids}
    return [
        pid
        for pid, status in found.items()
        if status is not None and status.state not in "ZX" and wanted(status)
    ]


def _status(pid: int) -> _Status | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name may hold spaces and brackets
    return _Status(fields[0], int(fields[2]), int(fields[3]))
