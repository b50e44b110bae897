"""The link between a trainer and the agent of its host: discovery and messages.

A process that the user started calls `attach`, which finds an agent and asks it to
accept the process. A trainer that an agent started calls `hello`, which asks that
agent to accept it. Before any message, the agent and `attach` check that the process at
the other end belongs to the same user or to root. A message is one msgpack map after a
4-byte length; the bytes of the state are in memory that both share (the arena) and are
never sent over the link.
`Dialogue` is the trainer's side: every wait has a limit, and ends at once when the
agent has ended.
"""

import contextlib
import errno
import logging
import os
import pwd
import queue
import re
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgpack

from dtft.checkpoint.memory import DEFAULT_DIRECTORY

logger = logging.getLogger(__name__)

# Both ends of a Unix socket must belong to the same user, or to root.
#
# A process follows the orders of its agent, and an agent gives its memory to the
# attached process. So an agent checks the user of the process at the other end, by the
# kernel's credentials, before it takes a message. A user's process checks these
# credentials of the agent, and the owner of the socket's file and directory.


_CREDENTIALS = struct.Struct("3i")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class ForeignSocket(PermissionError):
    """A socket path that cannot be trusted.

    The path is no socket, or other users can write to its directory. Or the socket, its
    directory or the listening process belongs neither to this process's user nor to
    root.
    """


def check_path(path: Path) -> None:
    """Checks a socket and its directory before a connection to the socket.

    Raises:
        FileNotFoundError: no file exists at `path`.
        ForeignSocket: `path` is no socket, the socket or its directory belongs neither
            to this process's user nor to root, or other users can write to the
            directory.
    """
    directory = path.parent.stat()
    found = path.stat()  # after its directory, so an exchanged directory is noticed
    if not stat.S_ISSOCK(found.st_mode):
        raise ForeignSocket(
            f"{path} is not a socket. Allowed: the socket that an agent names in its "
            "first line. Change DTFT_AGENT_SOCKET or ReplicatedOptions(agent=...)."
        )
    for what, owner in ((path, found.st_uid), (path.parent, directory.st_uid)):
        if owner not in _trusted():
            raise ForeignSocket(
                f"{what} belongs to {user(owner)}, but this process runs as "
                f"{user(os.geteuid())}. Allowed: an agent of this user or of root. "
                f"Start the agent and its processes as the same user, or name another "
                "agent's socket in DTFT_AGENT_SOCKET."
            )
    if directory.st_mode & _OTHERS_WRITE:
        raise ForeignSocket(
            f"{path.parent} has mode {stat.S_IMODE(directory.st_mode):04o}: other "
            "users could put a socket of theirs in the agent's place. Allowed: a "
            f"directory that only its owner writes to. Run `chmod go-w {path.parent}`."
        )


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Returns process id and user id at the other end of a connected Unix socket.

    For the connecting side these are the ids of the listening process.
    """
    size = _CREDENTIALS.size
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def foreign_peer(uid: int) -> str | None:
    """Returns the reason to refuse a process of user `uid`, or None.

    Returns None if `uid` is the user of this process or root.

    >>> foreign_peer(os.geteuid())
    """
    if uid in _trusted():
        return None
    return (
        f"the process at the other end belongs to {user(uid)}, this one to "
        f"{user(os.geteuid())}. Allowed: the same user on both ends, or root. Start "
        "the agent and its processes as the same user."
    )


def user(uid: int) -> str:
    """Formats a user's name and id as text; a user without a name has only the id.

    >>> user(0)
    'user root (0)'
    """
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"


def _trusted() -> tuple[int, int]:
    return os.geteuid(), 0


_LENGTH = struct.Struct("<I")
_LARGEST = 256 << 20
_READ_BYTES = 64 << 10
"""Least number of bytes requested from the socket at once; most messages have fewer."""


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """Gives a short address of a Unix socket, valid until the `with` block ends.

    An address has at most 107 bytes, but the path of a socket may be longer. The
    address is /proc/self/fd/N/NAME, with an open descriptor N of the socket's
    directory and the socket's NAME in it.
    """
    directory = os.open(path.parent, os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen_for_links(path: Path) -> socket.socket:
    """Creates a listening Unix socket at `path`.

    Raises:
        OSError: a file exists at `path`, or its directory does not exist.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _address(path) as address:
        listener.bind(address)
    listener.listen(8)
    return listener


ACCEPT_AGAIN_S = 0.5
"""Pause after a failed `accept`, in seconds."""


def serve_links(
    listener: socket.socket, hear: Callable[["AgentLink"], None], send_s: int = 0
) -> None:
    """Accepts connections on a background thread until the listener is shut down.

    The caller ends the thread with `listener.shutdown`; `listener.close` alone does not
    wake it. If a connection cannot be accepted, such as with too many open files, the
    thread pauses (0.5 s, `ACCEPT_AGAIN_S`) and goes on.

    Args:
        listener: the listening socket, from `listen_for_links`.
        hear: called with each new link, on a new thread for each.
        send_s: seconds after which a send fails if the other end does not read; 0 for
            no limit.
    """
    limit = struct.pack("ll", send_s, 0)

    def accept() -> bool:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL):  # closed, shut down
                return False
            raise
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            args = (AgentLink(connection),)
            threading.Thread(target=hear, args=args, daemon=True).start()
        except BaseException:
            connection.close()
            raise
        return True

    def run() -> None:
        is_failing = False
        while True:
            try:
                if not accept():
                    return
                is_failing = False
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread starts
                if not is_failing:
                    logger.warning(
                        "no process can attach: %s; the agent tries again every %.1f s",
                        *(error, ACCEPT_AGAIN_S),
                    )
                is_failing = True
                time.sleep(ACCEPT_AGAIN_S)

    threading.Thread(target=run, daemon=True).start()


def packed(op: str, fields: Mapping[str, Any]) -> bytes:
    """Encodes a message: a 4-byte length, then a msgpack map.

    The map has `fields`, and under "op" the kind of message, `op`.

    Raises:
        TypeError, ValueError, OverflowError: msgpack cannot encode a value.
    """
    body = msgpack.packb({"op": op, **fields})
    assert body is not None
    return _LENGTH.pack(len(body)) + body


class LinkClosed(ConnectionError):
    """The link is unusable: either end closed it, or a message was too long.

    A process that ends closes its end. Also raised for a send that takes too long.
    """


class NotReading(LinkClosed):
    """The other end did not read a message in time (`send_s` of `serve_links`)."""


class AgentLink:
    """One end of the link between an agent and a process of its host.

    Sending is thread-safe; only one thread may receive.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Wraps a connected stream socket."""
        self._socket = connection
        self._lock = threading.Lock()
        self._received = bytearray()
        """Bytes that were received and are not part of a message yet."""

    @classmethod
    def connect(cls, path: Path, timeout_s: float) -> "AgentLink":
        """Connects to the agent that listens at `path`.

        Raises:
            OSError: no process listens, or connecting takes longer than `timeout_s`.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            with _address(path) as address:
                connection.connect(address)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(None)
        return cls(connection)

    def send(self, op: str, **fields: Any) -> None:
        """Sends one message of the kind `op`, with `fields`.

        Raises:
            LinkClosed: either end is closed, or the send takes longer than the limit
                that `receive` has set on the socket.
            NotReading: the other end does not read within `send_s` seconds, the limit
                that `serve_links` has set.
            TypeError, ValueError, OverflowError: msgpack cannot encode a field.
        """
        self.send_packed(packed(op, fields))

    def send_packed(self, message: bytes) -> None:
        """Sends a message that `packed` has encoded.

        Raises:
            LinkClosed: either end is closed, or the send takes longer than the limit
                that `receive` has set on the socket.
            NotReading: the other end does not read within `send_s` seconds, the limit
                that `serve_links` has set.
        """
        try:
            with self._lock:
                self._socket.sendall(message)
        except BlockingIOError as error:  # SO_SNDTIMEO, see `serve_links`
            raise NotReading("nothing was read at the other end") from error
        except OSError as error:
            raise LinkClosed(f"sending failed: {error}") from error

    def send_now(self, message: bytes) -> bytes:
        """Sends as much of a message from `packed` as is possible without waiting.

        Returns:
            The bytes that were not sent. These are b"" if the whole message was sent,
            and the whole message if another thread is sending, the socket takes nothing
            now, or the link is closed.
        """
        if not self._lock.acquire(blocking=False):
            return message
        try:
            return message[self._socket.send(message, socket.MSG_DONTWAIT) :]
        except OSError:
            return message
        finally:
            self._lock.release()

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Waits for the next message and decodes it.

        Args:
            timeout_s: limit of every wait for bytes, in seconds; None for no limit. The
                limit remains set on the socket, also for sends.

        Raises:
            LinkClosed: either end is closed, or the message exceeds 256 MiB.
            TimeoutError: no bytes arrived within `timeout_s`.
        """
        try:
            if self._socket.gettimeout() != timeout_s:  # setting it is a system call
                self._socket.settimeout(timeout_s)
        except OSError as error:
            raise LinkClosed("the link was closed here") from error
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _LARGEST:
            raise LinkClosed(f"message of {length} bytes refused, at most {_LARGEST}")
        return msgpack.unpackb(self._exactly(length), strict_map_key=False)

    def _exactly(self, size: int) -> bytes:
        while len(self._received) < size:
            room = min(max(size - len(self._received), _READ_BYTES), 1 << 20)
            try:
                part = self._socket.recv(room)
            except TimeoutError:
                raise
            except OSError as error:
                raise LinkClosed(f"receiving failed: {error}") from error
            if not part:
                raise LinkClosed("the other end closed the link")
            self._received += part
        found = bytes(self._received[:size])
        del self._received[:size]
        return found

    def wait_closed(self) -> None:
        """Waits until the other end is closed, without receiving messages."""
        ended = select.poll()
        ended.register(self._socket, select.POLLRDHUP)
        ended.poll()

    @property
    def peer(self) -> tuple[int, int]:
        """Process id and user id at the other end, as reported by the kernel.

        Raises:
            OSError: the link was closed here.
        """
        return peer_of(self._socket)

    def close(self) -> None:
        """Closes the socket; `receive` raises LinkClosed in a waiting thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()


class Outbox:
    """A queue of messages that a thread sends in order, so that callers never wait.

    A send on the thread of the caller could delay the caller. A send wakes the other
    process, which on a busy machine may run before the caller continues. A send to a
    process that does not read blocks, and would block an event loop.
    """

    def __init__(
        self,
        link: AgentLink,
        failed: Callable[[LinkClosed], None] | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """Starts the thread.

        Args:
            link: the link to send over.
            failed: called once on the thread when a send fails; the thread then ends.
                By default a failure is not reported, because `receive` of the same link
                then raises LinkClosed.
            at_once: whether `send` sends a message on the calling thread if no other
                message waits and the socket takes the message without waiting. This
                saves a switch to the sending thread, but the other process may run
                before the caller continues.
        """
        self._link, self._failed, self._at_once = link, failed, at_once
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        """Number of messages that the thread has not sent yet."""
        self._closes_link = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, op: str, *, at_once: bool = False, **fields: Any) -> None:
        """Queues one message of the kind `op`, or sends it now.

        It is sent now only if `at_once` was given here or to `__init__`, no other
        message waits and the socket takes the message without waiting.

        Raises:
            TypeError, ValueError, OverflowError: msgpack cannot encode a field.
        """
        message = packed(op, fields)
        with self._lock:
            if (at_once or self._at_once) and not self._waiting:
                message = self._link.send_now(message)
                if not message:
                    return
            self._waiting += 1
            self._messages.put(message)

    def close(self, *, link: bool = False) -> None:
        """Makes the thread end once it has sent all queued messages; does not wait.

        With `link`, the thread then closes the link.
        """
        self._closes_link = self._closes_link or link
        with self._lock:
            self._waiting += 1  # a later message is not sent at once either
            self._messages.put(None)

    def join(self, limit_s: float) -> None:
        """Waits until the thread has ended, for at most `limit_s` seconds.

        Returns also if the thread then still runs.
        """
        self._thread.join(limit_s)

    def _run(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                self._link.send_packed(message)
                with self._lock:
                    self._waiting -= 1
        except LinkClosed as error:
            if self._failed is not None:
                self._failed(error)
        if self._closes_link:
            self._link.close()


# Attaching is one exchange over the agent's Unix socket, before the messages of the
# memory tier over the same link. A trainer that the agent has started sends its process
# id (`hello`); a user's process also sends the terms that all processes of the job must
# agree on (`attach`).


AGENT_SOCKET = "agent.sock"
AGENT_SOCKET_VARIABLE = "DTFT_AGENT_SOCKET"
TAKEN_S = 2.0
"""Seconds for which `attach` tries again if another process is attached to the agent,
or if no agent or several are free. An agent's former process may just have ended."""
ATTACHED = "attached"
"""Kind of the answer of an agent that accepts a process; else "refused"."""
ANSWER_S = 10.0
"""Limit of connecting to an agent, and of its answer to `attach`, in seconds."""

_START = (
    "Start one per host: dtft agent --serve-only --store HOST:PORT --job NAME "
    "--secret-file FILE"
)


class NoAgent(RuntimeError):
    """No agent accepts this process; the message has the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class SeenAgent:
    """An agent's description of itself, which `ask` returns.

    It has the path of the agent's socket, the names of its job and host, and the
    process id of the process that is attached to the agent, if any.
    """

    path: Path
    job: str
    host: str
    taken_by: int
    """Process id of the attached process; 0 if no process is attached."""


@dataclass(frozen=True, kw_only=True)
class Attached:
    """A process's link to the agent that has accepted it.

    Also has the path of the agent's socket, and the agent's names of its job and host.
    """

    link: AgentLink
    path: Path
    job: str
    host: str
    deadline_s: float
    """Limit of every wait for the agent, in seconds."""


def attach(given: str | None, terms: Mapping[str, Any]) -> Attached:
    """Attaches to an agent, without waiting for the other processes of the job.

    Args:
        given: path of the agent's socket, or None to search for it.
        terms: the fields of the first message: "process", the index of this process,
            and "terms", the settings that must be equal on all processes of the job;
            made by `distributed.terms_of`.

    Raises:
        NoAgent: no agent answers, the agent refuses, or `given` is None and several
            agents have no attached process. The message gives the remedy.
    """
    until = time.monotonic() + TAKEN_S
    path = _found(given, until)
    link, answer = _ask_in(path, terms)
    while answer.get("taken") and time.monotonic() < until:
        link.close()
        time.sleep(0.1)
        link, answer = _ask_in(path, terms)
    if answer["op"] != ATTACHED:
        link.close()
        raise NoAgent(str(answer.get("error", answer)))
    return Attached(
        link=link,
        path=path,
        job=answer["job"],
        host=answer["host"],
        deadline_s=answer["deadline_s"],
    )


def _found(given: str | None, until: float) -> Path:
    while True:
        try:
            return find(given, os.environ)
        except NoAgent:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _ask_in(path: Path, terms: Mapping[str, Any]) -> tuple[AgentLink, dict[str, Any]]:
    """Connects to the agent that listens at `path`; asks it to accept this process.

    Args:
        path: path of the agent's socket.
        terms: the fields of the first message: "process", the index of this process,
            and "terms", the settings that must be equal on all processes of the job.

    Returns:
        The link, and the agent's answer: a message of the kind "attached", or of the
        kind "refused" with the reason.

    Raises:
        NoAgent: no agent answers, or the socket cannot be trusted.
    """
    link = _connect(path)
    try:
        return link, hello(link, terms, ANSWER_S)
    except (LinkClosed, TimeoutError) as error:
        link.close()
        raise NoAgent(
            f"the agent at {path} does not take processes of others ({error}). {_START}"
        ) from error


def hello(
    link: AgentLink, terms: Mapping[str, Any], answer_s: float | None = None
) -> dict[str, Any]:
    """Asks the agent at the other end of a link to accept this process.

    Args:
        link: the link to the agent; all later messages use it, too.
        terms: the fields of the first message: "process", the index of this process,
            and "terms", the settings that must be equal on all processes of the job;
            empty for a trainer that the agent has started.
        answer_s: limit of the wait in seconds. None: no limit, for a trainer that the
            agent has started and that ends with the agent.

    Returns:
        The agent's answer: a message of the kind "attached", or of the kind "refused"
        with the reason.

    Raises:
        LinkClosed: the agent closes the link without an answer.
        TimeoutError: the agent does not answer in time.
    """
    link.send("attach", pid=os.getpid(), **terms)
    return link.receive(answer_s)


def find(given: str | None, environment: Mapping[str, str]) -> Path:
    """Finds the socket of this process's agent.

    The path is `given`, else that in the environment variable `DTFT_AGENT_SOCKET`, else
    the socket of the only agent on this machine without an attached process.

    Raises:
        NoAgent: no path is given, and no agent, or more than one, is without an
            attached process.
    """
    named = given or environment.get(AGENT_SOCKET_VARIABLE)
    if named:
        return Path(named)
    return only_free(seen_here(DEFAULT_DIRECTORY))


def seen_here(directory: Path) -> list[SeenAgent]:
    """Returns the descriptions of all agents below `directory`, sorted by path.

    Asks each socket `dtft-*/agent.sock`. An agent that does not answer is left out.
    """
    found = [ask(path) for path in sorted(directory.glob(f"dtft-*/{AGENT_SOCKET}"))]
    return [seen for seen in found if seen is not None]


def only_free(agents: Iterable[SeenAgent]) -> Path:
    """Returns the socket of the only agent without an attached process.

    Raises:
        NoAgent: no agent, or more than one, is without an attached process.

    >>> taken = SeenAgent(path=Path("/a/agent.sock"), job="j", host="h", taken_by=7)
    >>> only_free([taken])
    Traceback (most recent call last):
    dtft.checkpoint.managers.agent_link.NoAgent: no agent on this machine is free: h \
of job 'j' (/a/agent.sock) has process 7. Wait until that one has ended, or start \
another agent.
    """
    agents = list(agents)
    free = [agent for agent in agents if not agent.taken_by]
    if len(free) == 1:
        return free[0].path
    known = "; ".join(
        f"{agent.host} of job {agent.job!r} ({agent.path})"
        + (f" has process {agent.taken_by}" if agent.taken_by else "")
        for agent in (free or agents)
    )
    if free:
        raise NoAgent(
            f"{len(free)} agents on this machine are free: {known}. Say which one: set "
            f"{AGENT_SOCKET_VARIABLE} or ReplicatedOptions(agent=...) to the path of "
            "its socket."
        )
    if agents:
        raise NoAgent(
            f"no agent on this machine is free: {known}. Wait until that one has "
            "ended, or start another agent."
        )
    raise NoAgent(
        f"no agent of this user listens below {DEFAULT_DIRECTORY}. One with another "
        f"--arena_directory is reached by its socket, named in its first line: set "
        f"{AGENT_SOCKET_VARIABLE} or ReplicatedOptions(agent=...) to it. {_START}"
    )


def ask(path: Path) -> SeenAgent | None:
    """Asks the agent at `path` for its description.

    Returns:
        The description. None if no agent listens, if 2 s pass without a byte of the
        answer, if the socket cannot be trusted, or if the agent gives no description.
        An agent gives none if it only serves trainers that it started, if it refuses
        this user, or if it has another version.
    """
    try:
        link = own_link(path)
    except OSError:  # also ForeignSocket
        return None
    try:
        link.send("who")
        answer = link.receive(2.0)
        return SeenAgent(
            path=path,
            job=answer["job"],
            host=answer["host"],
            taken_by=answer["taken_by"],
        )
    except (LinkClosed, TimeoutError):
        return None  # an agent that started its own trainers closes the link
    except (KeyError, TypeError, ValueError):
        return None  # a refusal, or another version's answer
    finally:
        link.close()


def own_link(path: Path) -> AgentLink:
    """Connects to the agent at `path` if it belongs to this user or to root.

    Raises:
        ForeignSocket: the socket cannot be trusted; no message was sent.
        OSError: no process listens at `path`.
    """
    check_path(path)
    link = AgentLink.connect(path, ANSWER_S)
    try:
        foreign = foreign_peer(link.peer[1])
        if foreign is not None:
            raise ForeignSocket(f"{path}: {foreign}")
    except BaseException:
        link.close()
        raise
    return link


def _connect(path: Path) -> AgentLink:
    try:
        return own_link(path)
    except ForeignSocket as error:
        raise NoAgent(str(error)) from error
    except OSError as error:
        reason = re.sub(r"^\[Errno \d+\] ", "", str(error)).partition(":")[0]
        raise NoAgent(
            f"no agent listens at {path} ({reason}). {_START}; its first line "
            f"names the socket for {AGENT_SOCKET_VARIABLE}."
        ) from error


LAST_WORDS_S = 1.0
"""Longest wait in seconds, after a failed send, for a message in which the agent says
why it has ended or has detached this process."""


class AgentGone(RuntimeError):
    """The agent has ended or has detached this process; the message has the reason.

    Also raised after a message from the agent that this process could not handle.
    """


class Dialogue:
    """A process's exchange of messages with its agent over one link.

    Every wait has a limit. A wait ends at once if the agent has ended, or has sent a
    message that this process cannot handle; after such a message nothing is received. A
    thread given to `interrupt` gets an error from its waits and sends. The lock
    `condition` guards the state that messages change. The module `agent_client` defines
    the messages.
    """

    def __init__(self, link: AgentLink, deadline_s: float) -> None:
        """Sends and receives nothing yet.

        `deadline_s` is the default limit of `wait`, in seconds.
        """
        self.condition = threading.Condition()
        self.gone = False
        """Whether the agent has ended or has detached this process, or this process
        could not handle a message from the agent."""
        self.farewell = "this host's agent has ended"
        """The message of `AgentGone`; a default until the agent sends a reason."""
        self._link, self.deadline_s = link, deadline_s
        self._outbox = Outbox(link)
        self._interrupted = WeakKeyDictionary[threading.Thread, type[Exception]]()
        """Maps each interrupted thread to the type of the error that it gets. An error
        object, kept here, would keep the thread's frames and their objects alive."""

    def start(self, take: Callable[[dict[str, Any]], None]) -> None:
        """Starts a thread that receives messages and passes each to `take`.

        `take` is called with the lock `condition` held. If it raises an exception, the
        thread ends, and every wait raises AgentGone. The link stays open.
        """
        threading.Thread(target=self._hear, args=(take,), daemon=True).start()

    def _hear(self, take: Callable[[dict[str, Any]], None]) -> None:
        reason = ""
        try:
            while True:
                message = self._link.receive()
                with self.condition:
                    take(message)
                    self.condition.notify_all()
        except LinkClosed:
            pass
        except Exception as error:
            reason = (
                "a message of this host's agent could not be taken: "
                f"{type(error).__name__}: {error}"
            )
            logger.exception("%s", reason)
        finally:
            with self.condition:
                if reason and not self.gone:
                    self.farewell = reason
                self.gone = True
                self.condition.notify_all()

    def interrupt(self, thread: threading.Thread, error: type[Exception]) -> None:
        """Makes later waits, sends and checks of a thread raise an `error`.

        The methods are `wait`, `send`, `queue` and `check`. A wait in progress on this
        thread ends at once and raises the error, too.
        """
        with self.condition:
            self._interrupted[thread] = error
            self.condition.notify_all()

    def check(self) -> None:
        """Does nothing if the calling thread can go on with the agent, else raises.

        Raises:
            AgentGone: the agent has ended, or has detached this process.
            Exception: the error that `interrupt` set for the calling thread, if any.
        """
        with self.condition:
            if self.gone:
                raise AgentGone(self.farewell)
            self._raise_interruption()

    def _raise_interruption(self) -> None:
        error = self._interrupted.get(threading.current_thread())
        if error is not None:
            raise error()

    def wait(
        self,
        ready: Callable[[], bool],
        what: str,
        limit_s: float | None = None,
        limit: str = "timeouts.start",
    ) -> None:
        """Waits until `ready` returns True, checked after each message.

        Args:
            ready: the awaited condition; called with the lock `condition` held.
            what: the awaited event, for the text of the TimeoutError.
            limit_s: limit in seconds; by default `deadline_s`.
            limit: name of the option that sets the limit, for the text of the
                TimeoutError.

        Raises:
            TimeoutError: `ready` did not return True in time.
            AgentGone: the agent has ended, or has detached this process.
            Exception: the error that `interrupt` set for the calling thread, if any.
        """
        limit_s = self.deadline_s if limit_s is None else limit_s
        thread = threading.current_thread()
        with self.condition:
            self.condition.wait_for(
                lambda: self.gone or thread in self._interrupted or ready(),
                timeout=limit_s,
            )
            if self.gone:
                raise AgentGone(self.farewell)
            self._raise_interruption()
            if not ready():
                text = f"{limit_s:.0f} s waiting for {what}; limit: {limit}"
                raise TimeoutError(text)

    def wake(self) -> None:
        """Makes each `wait` in progress check its condition, as after a message."""
        with self.condition:
            self.condition.notify_all()

    def send(self, op: str, **fields: Any) -> None:
        """Sends a message of the kind `op` on the calling thread, which may block.

        Raises:
            AgentGone: the agent has ended, or has detached this process.
            Exception: the error that `interrupt` set for the calling thread, if any.
        """
        with self.condition:
            self._raise_interruption()
        try:
            self._link.send(op, **fields)
        except LinkClosed as error:
            with self.condition:  # the agent's reason may not have been received yet
                self.condition.wait_for(lambda: self.gone, timeout=LAST_WORDS_S)
            raise AgentGone(self.farewell) from error

    def queue(self, op: str, *, at_once: bool = False, **fields: Any) -> None:
        """Queues a message of the kind `op` for the sending thread; never blocks.

        The thread sends queued messages in order. With `at_once`, the calling thread
        sends the message if no other waits and the socket takes it without waiting.

        Raises:
            Exception: the error that `interrupt` set for the calling thread, if any.
        """
        with self.condition:
            self._raise_interruption()
        self._outbox.send(op, at_once=at_once, **fields)

    def close(self) -> None:
        """Ends the sending thread after all queued messages; the link stays open."""
        self._outbox.close()
