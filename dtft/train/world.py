"""The JAX processes of a job (the world), and this process's membership in it.

A world has a fixed size: a process index for each slot and, with `cluster.hot_swap`,
more for spares. It then lasts over several formations (assignments of hosts to slots).
After a host is lost, the other processes leave their collectives, keep their state in
host memory, and form a new mesh with the process of a spare.

When a coordination service of JAX ends, JAX aborts all processes that are connected to
it. So on CPU each process has a service of its own. The service behaves as if all
processes of the world were connected to it, and `shared_keys` copies the keys of each
service to the others.

On CPU, XLA makes one gloo context for each ordered tuple of devices, and keeps it. A
context is unusable after one of its processes has died, so each formation needs devices
that no earlier formation has used. Therefore a process has 16 sets (`TURNS`) of CPU
devices, and each formation uses the next set.

On GPUs all processes are connected to one service, which the agent of the first slot's
host starts. XLA aborts a collective once the service reports that one of the
collective's processes has died or was replaced. For the next formation XLA makes a new
NCCL communicator, because a communicator's key includes the incarnation id that JAX
gives each of its processes.
"""

import contextlib
import ctypes
import os
import platform
import re
import select
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dtft import _jax_internals
from dtft.elastic.processes import free_port
from dtft.train.shared_keys import SharedKeys

_FOR_EVER_S = 7 * 86400.0
"""Heartbeat timeout of a service that cannot be lost: it is in the same process."""
_WATCHED = re.compile(
    r"^tfd: *(\d+) events: *([0-9a-f]+) data: *([0-9a-f]+) .* ino:([0-9a-f]+) ",
    re.MULTILINE,
)
"""Matches a watched file descriptor, its events, data and inode in /proc/self/fdinfo of
an epoll instance."""
_C_LIBRARY = ctypes.CDLL(None)


class World:
    """This process's membership in a world: the JAX processes of a job.

    A process can join only one world.
    """

    def __init__(self, publish: Callable[[Mapping[str, str]], None]) -> None:
        """Connects to nothing yet; `join` joins a world.

        `publish` sends keys of this process's coordination service, mapped to values in
        hexadecimal, to the other processes.
        """
        self.number = 0
        """Number of the joined world; 0 before `join`."""
        self.keys = SharedKeys(publish)
        self._sockets = GlooSockets()
        self._service: object = None
        self._index: int | None = None
        """Index of this process in a world that lasts over several formations; None in
        a world of one formation."""
        self._limit_s = 0.0
        """Longest wait for other processes of a formation, in seconds."""
        self._is_shared = False
        """Whether the world lasts over several formations, and all its processes are
        connected to one service."""

    def join(self, order: Mapping[str, Any]) -> None:
        """Connects to a coordination service, and finds JAX's devices.

        If all processes share a service, and the world is for one formation only, this
        waits until all processes have connected. Does nothing if this process is in the
        world already.

        Args:
            order: a message with these fields. `number`: number of the world.
                `address`: host:port of the coordination service, as on accelerators; ""
                starts a service in this process. `size`: number of process indices of
                the world. `index`: index of this process. `heartbeat_s`, `start_s`:
                heartbeat timeout and longest wait for other processes, in seconds.
                `devices`: number of CPU devices of each process. `lasts`: whether the
                world can last over several formations (assignments of hosts to slots).

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
        """Starts a coordination service in this process; returns its host:port.

        The host is a loopback address that is derived from the process id. So two
        processes that look for a free port at the same time do not find the same one.
        """
        pid = os.getpid()
        host = f"127.{1 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}"
        address = f"{host}:{free_port(host)}"
        self._service = _jax_internals.start_coordination_service(
            address, order["size"], _FOR_EVER_S, order["devices"]
        )
        return address

    def write_compilation_cache(self, *, writes: bool) -> None:
        """Sets whether this process writes to JAX's compilation cache.

        Does nothing in a world that ends with its first assignment of hosts to slots;
        there JAX lets process 0 write. All processes read the cache.
        """
        if self._index is not None:
            _jax_internals.write_compilation_cache(self._index, writes=writes)

    def devices(self, indices: Sequence[int], turn: int, per_host: int) -> list[Any]:
        """Returns the devices of the processes that train, in slot order.

        On GPUs waits for the other processes first.

        Args:
            indices: index of the process of each slot.
            turn: number of this assignment of hosts to slots in the world, from 0. On
                CPU each turn has its own set of each process's devices.
            per_host: number of devices in a set; -1 selects all devices of a process,
                as on accelerators.
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
        """Whether this process can train again while an earlier thread still computes.

        The earlier thread computes for an earlier formation (an assignment of hosts to
        slots). The result is True on CPU with one device per process in a formation, if
        the world lasts over several formations: each then uses another device. With
        several devices per process the programs of both formations would wait for each
        other, because XLA begins their collectives one after the other. False on GPUs,
        where all formations use the same devices.

        Args:
            per_host: number of devices of this process in a formation.
        """
        return self._index is not None and not self._is_shared and per_host == 1

    def leave(self) -> None:
        """Makes the collectives of this process fail, by closing gloo's connections.

        Peers that wait for this process get an error, too. May be called from any
        thread, also while the training thread waits in a collective. Does nothing on
        GPUs, where XLA ends a collective once the coordination service reports that one
        of the collective's processes was lost.
        """
        self._sockets.shut_down()

    def left(self) -> None:
        """Stops what the formation that this process has left would still cost it.

        gloo's thread no longer spins on connections that it has not closed, and the
        keys of the formation's collectives are deleted. Call it after `leave`, when the
        training thread has ended or was left behind, and before the next formation.
        """
        self._sockets.make_edge_triggered()
        self.keys.forget()


def broken_collective(error: Exception) -> Exception | None:
    """Returns the JaxRuntimeError of a collective; None for other errors.

    Any JaxRuntimeError is returned unchanged, because a collective may have caused it.
    A ValueError of gloo is converted to a JaxRuntimeError: JAX raises a ValueError if
    the computation runs on the calling thread.
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
        """Starts without sockets; `found` finds them."""
        self._listening: set[int] = set()
        self._loops: set[int] = set()
        self._shut: set[tuple[int, int]] = set()
        """File descriptor and inode of each connection that was shut down."""

    @contextlib.contextmanager
    def found(self) -> Iterator[None]:
        """Finds the epoll instance that gloo makes during the `with` block.

        `shut_down` then shuts down the connections that this instance watches, or none
        if gloo made none.
        """
        before = _listening_sockets()
        yield
        self._listening = _listening_sockets() - before
        self._loops = {
            loop for loop in _epolls() if self._listening & _watched(loop).keys()
        }

    def shut_down(self) -> None:
        """Shuts down the receiving side of all connections to peers.

        Connections that other threads use are included. gloo's own thread then closes
        the connections. The sending side stays open until then, because gloo loses a
        send that is the first to find a closed connection, and the sending thread would
        wait until gloo's timeout.
        """
        for loop in self._loops:
            for descriptor, watched in _watched(loop).items():
                if descriptor not in self._listening:
                    _shut_down(descriptor, watched.inode)
                    self._shut.add((descriptor, watched.inode))

    def make_edge_triggered(self) -> None:
        """Ends the reports of events on connections that gloo cannot close.

        If a collective fails after it has told a peer that its buffer is ready, the
        peer's data arrives when the buffer no longer exists. gloo then neither reads
        the data nor finds that the connection is shut down. Its epoll instance reports
        the connection again at once (it is level-triggered), so that gloo's thread
        occupies one core for as long as the process lives.

        This makes connections that `shut_down` has shut down, and that the instance
        still watches, edge-triggered: each is reported once more, and afterwards only
        if new data or an error arrives. They stay open, and gloo can still close them.
        """
        shut, self._shut = self._shut, set()
        for loop in self._loops:
            for descriptor, watched in _watched(loop).items():
                if (descriptor, watched.inode) in shut:
                    _make_edge_triggered(loop, descriptor, watched)


class _EpollEvent(ctypes.Structure):
    """The C library's `struct epoll_event`; `data` is a pointer to gloo's handler."""

    _pack_ = 1 if platform.machine() in ("x86_64", "AMD64") else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


_EPOLL_CTL_MOD = 3
"""Operation of epoll_ctl(2) that changes the events of a watched descriptor."""


def _make_edge_triggered(loop: int, descriptor: int, watched: "_Watched") -> None:
    """Makes an epoll instance report a descriptor only if new events occur.

    Not with `select.epoll.modify`, which would replace gloo's pointer to its handler.
    """
    event = _EpollEvent(watched.events | select.EPOLLET, watched.data)
    # An error is ignored: the descriptor was closed meanwhile.
    _C_LIBRARY.epoll_ctl(loop, _EPOLL_CTL_MOD, descriptor, ctypes.byref(event))


def _shut_down(descriptor: int, inode: int) -> None:
    """Shuts down a socket's receiving side, if `descriptor` still belongs to `inode`.

    Does nothing if the descriptor was closed or reused.
    """
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


class _Watched(NamedTuple):
    """What an epoll instance has stored about a file descriptor that it watches."""

    events: int
    data: int
    inode: int


def _watched(loop: int) -> dict[int, _Watched]:
    """Maps each file descriptor that an epoll instance watches to what it has stored.

    `loop` is the file descriptor of the epoll instance. Empty if it was closed.
    """
    try:
        text = Path(f"/proc/self/fdinfo/{loop}").read_text()
    except OSError:  # closed meanwhile
        return {}
    return {
        int(fd): _Watched(*(int(field, 16) for field in fields))
        for fd, *fields in _WATCHED.findall(text)
    }
