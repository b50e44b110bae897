"""The JAX processes of a job (the world), and this process's membership in it.

A world has a fixed number of processes: those of the hosts with slots and those of the
spares. It lasts over several formations: when a host is lost, the other processes leave
their collectives, keep their state in host memory, and form a new mesh with a spare's
process.

JAX's coordination service aborts all processes that are connected to it when it ends.
So on CPU each process has a service of its own, which believes that all processes of
the world are connected to it, and the services have the same keys (`shared_keys`).

On CPU, XLA keeps a gloo context for each ordered tuple of devices and never makes it
again. A context in which a member has died is of no use, so each formation needs
devices that no formation before has used. Therefore a process has `TURNS` sets of CPU
devices, and each formation uses the next set.

On GPUs all processes are connected to one service, which a host's agent runs. XLA gives
up (NCCL: aborts) a collective once the service says that a process in it has died or
was replaced. It makes a new NCCL communicator for the next formation, because the lives
of the processes in it are part of its name.
"""

import contextlib
import os
import re
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from dtft import _jax_internals
from dtft.elastic.processes import free_port
from dtft.train.shared_keys import SharedKeys

_FOR_EVER_S = 7 * 86400.0
"""Heartbeat timeout of a service that cannot be lost: it is in the same process."""
_WATCHED = re.compile(r"^tfd: *(\d+) .* ino:([0-9a-f]+) ", re.MULTILINE)
"""A watched descriptor and its inode, in the kernel's description of an epoll."""


class World:
    """This process's membership in a world; at most one in the life of a process."""

    def __init__(self, publish: Callable[[Mapping[str, str]], None]) -> None:
        """Joins nothing yet; `publish` is that of `SharedKeys`."""
        self.number = 0
        """Number of the joined world; 0 before `join`."""
        self.keys = SharedKeys(publish)
        self._sockets = GlooSockets()
        self._service: object = None
        self._index: int | None = None
        """Index of this process in a world that lasts; None in others."""
        self._limit_s = 0.0
        """Longest wait for other processes of a formation, in seconds."""
        self._is_shared = False
        """Whether one service is for all processes of a world that lasts."""

    def join(self, order: Mapping[str, Any]) -> None:
        """Connects to a coordination service, and finds the devices.

        With an address, as on accelerators, returns when all processes have connected.
        Does nothing if this process is in the world already.

        Args:
            order: `number`, `address` of the coordination service, "" for one of this
                process's own, `size` in processes, `index` of this process, the
                limits `heartbeat_s` and `start_s` in seconds, `devices`, the number of
                CPU devices of each process, and `lasts`, whether the world can last
                over several formations.

        Raises:
            ValueError: this process is in another world.
        """
        if self.number == order["number"]:
            return
        if self.number:
            raise ValueError(
                f"world {order['number']} cannot be joined: this process is in world "
                f"{self.number}. A process joins one world in its life."
            )
        is_own = not order["address"]
        _jax_internals.join_world(
            self._serve(order) if is_own else order["address"],
            process_id=order["index"],
            num_processes=order["size"],
            heartbeat_s=_FOR_EVER_S if is_own else order["heartbeat_s"],
            timeout_s=order["start_s"],
        )
        self._limit_s = order["start_s"]
        self._is_shared = order["lasts"] and not is_own
        found = threading.Event()
        if self._is_shared:
            arguments = order["index"], order["size"], found
            threading.Thread(
                target=_jax_internals.publish_devices, args=arguments, daemon=True
            ).start()
        try:
            with self._sockets.found():
                jax.devices()
        finally:
            found.set()
        self._index = order["index"] if order["lasts"] else None
        self.number = order["number"]
        if is_own:
            self.keys.start()

    def _serve(self, order: Mapping[str, Any]) -> str:
        """Starts a coordination service in this process; returns its address.

        The address is a loopback address that no other process uses, so that two
        processes that look for a free port at once do not find the same.
        """
        pid = os.getpid()
        host = f"127.{1 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}"
        address = f"{host}:{free_port(host)}"
        self._service = _jax_internals.start_coordination_service(
            address, order["size"], _FOR_EVER_S, order["devices"]
        )
        return address

    def write_compilation_cache(self, *, writes: bool) -> None:
        """Sets whether this process writes to JAX's compilation cache; all others of
        the formation read. In a world that does not last, process 0 writes."""
        if self._index is not None:
            _jax_internals.write_compilation_cache(self._index, writes=writes)

    def devices(self, indices: Sequence[int], turn: int, per_host: int) -> list[Any]:
        """Returns the devices of a formation, in slot order.

        On GPUs waits for the formation's other processes first.

        Args:
            indices: index of the process of each slot.
            turn: number of the set of devices, from 0.
            per_host: number of devices in a set; -1: all devices of a process, as on
                accelerators.
        """
        if self._is_shared:
            _jax_internals.know_processes(indices, self._limit_s)
        by_process: dict[int, list[Any]] = {index: [] for index in indices}
        for device in sorted(jax.devices(), key=lambda it: it.id):
            if device.process_index in by_process:
                by_process[device.process_index].append(device)
        chosen = (
            slice(turn * per_host, (turn + 1) * per_host)
            if per_host > 0
            else slice(None)
        )
        return [device for found in by_process.values() for device in found[chosen]]

    def has_room_beside(self, per_host: int) -> bool:
        """Whether a formation can begin while a thread still computes for another one.

        So it is on CPU if each formation has one device of this process: it is another
        device each time. Programs with several devices of a process would wait for each
        other, because XLA begins their collectives one after the other. On GPUs all
        formations have the same devices.

        Args:
            per_host: number of devices of this process in a formation.
        """
        return self._index is not None and not self._is_shared and per_host == 1

    def leave(self) -> None:
        """Ends the collectives of this process with an error, at once and for ever.

        Peers that wait for this process get an error, too. May be called from any
        thread, also while the training thread waits in a collective. On GPUs does
        nothing: XLA ends them once the service has given up one of the processes.
        """
        self._sockets.shut_down()


def broken_collective(error: Exception) -> Exception | None:
    """Returns the error of a collective or of another computation as JaxRuntimeError.

    JAX raises ValueError if the computation runs on the calling thread. Returns None
    for other errors.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return error
    if isinstance(error, ValueError) and "Gloo" in str(error):
        return jax.errors.JaxRuntimeError(str(error)).with_traceback(
            error.__traceback__
        )
    return None


class GlooSockets:
    """The TCP sockets of this process's gloo collectives.

    gloo makes one listening socket and one epoll instance for a process. The epoll
    instance watches this socket and all connections to peers. Other sockets of the
    process, such as that of the coordination service, are in other epoll instances.
    """

    def __init__(self) -> None:
        """Knows no socket yet."""
        self._listening: set[int] = set()
        self._loops: set[int] = set()

    @contextlib.contextmanager
    def found(self) -> Iterator[None]:
        """Finds the epoll instance that gloo makes during the `with` block."""
        before = _listening_sockets()
        yield
        self._listening = _listening_sockets() - before
        self._loops = {
            loop for loop in _epolls() if self._listening & _watched(loop).keys()
        }

    def shut_down(self) -> None:
        """Ends the receiving side of all connections to peers, also those in use by
        other threads; gloo's own thread then closes them.

        Sending goes on until then: if a thread that sends is the first to find its
        connection closed, gloo forgets that send, and the thread waits for it until
        gloo's timeout.
        """
        for loop in self._loops:
            for descriptor, inode in _watched(loop).items():
                if descriptor not in self._listening:
                    _shut_down(descriptor, inode)


def _shut_down(descriptor: int, inode: int) -> None:
    """Ends the receiving side of a socket, if `descriptor` is still that of `inode`."""
    with contextlib.suppress(OSError):  # closed meanwhile
        copy = os.dup(descriptor)
        try:
            status = os.fstat(copy)
            if status.st_ino == inode and stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=copy) as connection:
                    copy = -1
                    connection.shutdown(socket.SHUT_RD)
        finally:
            if copy >= 0:
                os.close(copy)


def _listening_sockets() -> set[int]:
    found: set[int] = set()
    for descriptor in _descriptors("socket:"):
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(descriptor)) as it:
                if it.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(descriptor)
    return found


def _epolls() -> list[int]:
    return list(_descriptors("anon_inode:[eventpoll]"))


def _descriptors(kind: str) -> Iterable[int]:
    """Yields this process's file descriptors whose link in /proc begins with `kind`."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith(kind):
                yield int(name)


def _watched(loop: int) -> dict[int, int]:
    """Maps each file descriptor that an epoll instance watches to its inode."""
    try:
        text = Path(f"/proc/self/fdinfo/{loop}").read_text()
    except OSError:  # closed meanwhile
        return {}
    return {int(fd): int(inode, 16) for fd, inode in _WATCHED.findall(text)}
