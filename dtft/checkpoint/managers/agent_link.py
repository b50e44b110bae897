"""The link between a trainer and the agent of its host: how it is found, and the
messages.

`attach` finds an agent for a user's process; a trainer that the agent started says
`hello`. Each side first checks that the other belongs to the same user. A message is
one msgpack map with a 4-byte length before it; bytes of state are in the arena and
never travel here. `Dialogue` is a process's side: every wait has a limit, and ends at
once when the agent has gone.
"""

import contextlib
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

import msgpack

from dtft.checkpoint.memory import DEFAULT_DIRECTORY

# Whether the two ends of a Unix socket belong to the same user.
#
# A process tells its agent where its state is, and does what the agent says; an agent
# hands its memory to who attaches. So each side checks the other's user before it says
# anything: by the owner of the socket's file and directory, and by what the kernel
# knows of the process at the other end. root counts as everybody.


_CREDENTIALS = struct.Struct("3i")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class ForeignSocket(PermissionError):
    """A socket, or the process behind it, is not this user's; says what to do."""


def check_path(path: Path) -> None:
    """Checks who made a socket, before it is connected to.

    Raises:
        FileNotFoundError: there is none.
        ForeignSocket: another user owns it or its directory, or could exchange it.
    """
    directory = path.parent.stat()
    found = path.stat()  # after its directory: who exchanged that is noticed
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
    """Process id and user id at the other end of a connected Unix socket.

    At the end that connected they are those of who listens.
    """
    size = _CREDENTIALS.size
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def foreign_peer(uid: int) -> str | None:
    """Why the process of a user is not talked to; None for this user's and root's.

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
    """A user, for people.

    >>> user(0)
    'user root (0)'
    """
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"


def _trusted() -> tuple[int, int]:
    return os.geteuid(), 0


# The local link between a trainer and its agent: messages over a Unix socket.
#
# One msgpack map per message with a 4-byte length before it. Bytes of state never
# travel here; they are in the arena. What the messages mean is not known here.


_LENGTH = struct.Struct("<I")
_LARGEST = 256 << 20


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """An address for a Unix socket at any path; they may only have 107 bytes."""
    directory = os.open(path.parent, os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen_for_links(path: Path) -> socket.socket:
    """A listening Unix socket at `path`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _address(path) as address:
        listener.bind(address)
    listener.listen(8)
    return listener


def serve_links(
    listener: socket.socket, hear: Callable[["AgentLink"], None], send_s: int = 0
) -> None:
    """Hears whoever connects, each on a thread of its own, until the listener ends.

    Args:
        listener: from `listen_for_links`.
        hear: is given each link.
        send_s: a peer that does not read for so many seconds fails the send to it; 0
            for no limit.
    """

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            limit = struct.pack("ll", send_s, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            link = AgentLink(connection)
            threading.Thread(target=hear, args=(link,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def packed(op: str, fields: Mapping[str, Any]) -> bytes:
    """A message as it is sent.

    Raises:
        TypeError, ValueError, OverflowError: a value cannot be sent.
    """
    body = msgpack.packb({"op": op, **fields})
    assert body is not None
    return _LENGTH.pack(len(body)) + body


class LinkClosed(ConnectionError):
    """The process at the other end has gone."""


class NotReading(LinkClosed):
    """The process at the other end is there, but has read nothing for the limit."""


class AgentLink:
    """One connected end; sending is thread-safe, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        """Wraps a connected stream socket."""
        self._socket = connection
        self._lock = threading.Lock()

    @classmethod
    def connect(cls, path: Path, timeout_s: float) -> "AgentLink":
        """Connects to the agent that listens at `path`."""
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
        """Sends one message.

        Raises:
            LinkClosed: the other end has gone.
            NotReading: it does not read; only with a limit, see `serve`.
        """
        self.send_packed(packed(op, fields))

    def send_packed(self, message: bytes) -> None:
        """As `send`, of what `packed` made."""
        try:
            with self._lock:
                self._socket.sendall(message)
        except BlockingIOError as error:  # SO_SNDTIMEO, see `serve`
            raise NotReading("nothing was read at the other end") from error
        except OSError as error:
            raise LinkClosed(f"sending failed: {error}") from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Waits for the next message; the other end's death ends the wait.

        Args:
            timeout_s: limit of every wait for bytes, also of those after this one.

        Raises:
            LinkClosed: the other end has gone.
            TimeoutError: nothing came within `timeout_s`.
        """
        try:
            self._socket.settimeout(timeout_s)
        except OSError as error:
            raise LinkClosed("the link was closed here") from error
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _LARGEST:
            raise LinkClosed(f"message of {length} bytes refused, at most {_LARGEST}")
        return msgpack.unpackb(self._exactly(length), strict_map_key=False)

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(min(size - len(parts), 1 << 20))
            except TimeoutError:
                raise
            except OSError as error:
                raise LinkClosed(f"receiving failed: {error}") from error
            if not part:
                raise LinkClosed("the other end closed the link")
            parts += part
        return bytes(parts)

    def wait_closed(self) -> None:
        """Waits until the other end has gone; takes nothing from who receives here."""
        ended = select.poll()
        ended.register(self._socket, select.POLLRDHUP)
        ended.poll()

    @property
    def peer(self) -> tuple[int, int]:
        """Process id and user id at the other end, from the kernel.

        Raises:
            OSError: the link was closed here.
        """
        return peer_of(self._socket)

    def close(self) -> None:
        """Closes the socket; a receiving thread gets LinkClosed."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()


class Outbox:
    """Sends on a thread of its own, in order: whoever has more to do goes on at once.

    A send wakes the other end, which on a busy machine runs before the sender does; and
    one to a process that does not read waits, which an event loop must not.
    """

    def __init__(
        self, link: AgentLink, failed: Callable[[LinkClosed], None] | None = None
    ) -> None:
        """Starts the thread.

        Args:
            link: to send over.
            failed: called once on the thread, which then ends, when a send fails. By
                default nobody is told: whoever receives from the link knows.
        """
        self._link, self._failed = link, failed
        self._messages: queue.Queue[bytes | None] = queue.Queue()
        self._closes_link = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, op: str, **fields: Any) -> None:
        """Queues one message. What cannot be sent is refused here: see `packed`."""
        self._messages.put(packed(op, fields))

    def close(self, *, link: bool = False) -> None:
        """Ends the thread once everything is sent, and with `link` the link then."""
        self._closes_link = self._closes_link or link
        self._messages.put(None)

    def join(self, limit_s: float) -> None:
        """Waits until the thread has ended, but not longer than `limit_s`."""
        self._thread.join(limit_s)

    def _run(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                self._link.send_packed(message)
        except LinkClosed as error:
            if self._failed is not None:
                self._failed(error)
        if self._closes_link:
            self._link.close()


# How a trainer attaches to the agent of its host, and how a user's process finds one.
#
# One exchange over the agent's Unix socket, before the first message of the memory tier
# itself (a link carries both). A trainer that the agent has started names itself by
# its process id (`hello`); a user's process says what the job must agree on, too
# (`attach`). Decides which agent.


AGENT_SOCKET = "agent.sock"
AGENT_SOCKET_VARIABLE = "DTFT_AGENT_SOCKET"
TAKEN_S = 2.0
"""The former process of an agent may just have ended: so long it is asked again."""
ATTACHED = "attached"
"""The answer of an agent that takes a process; `refused` is the other."""
ANSWER_S = 10.0
"""An agent answers at once; one that does not has hung."""

_START = (
    "Start one per host: dtft agent --serve-only --store HOST:PORT --job NAME "
    "--secret-file FILE"
)


class NoAgent(RuntimeError):
    """There is no agent that takes this process."""


@dataclass(frozen=True, kw_only=True)
class SeenAgent:
    """What an agent says of itself to whoever asks."""

    path: Path
    job: str
    host: str
    taken_by: int
    """Process id of who is attached, 0 for nobody."""


@dataclass(frozen=True, kw_only=True)
class Attached:
    """This process's hold on its agent."""

    link: AgentLink
    path: Path
    job: str
    host: str
    deadline_s: float
    """Limit of every wait for the agent."""


def attach(given: str | None, terms: Mapping[str, Any]) -> Attached:
    """Attaches to an agent; the rest of the job may still be missing.

    Args:
        given: path of the agent's socket, or None to look for it.
        terms: what the job must agree on, and who this process is.

    Raises:
        NoAgent: there is none, or it refuses; says what to do.
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
    """Asks an agent to take this process; its answer."""
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
    """Asks the agent at the end of a link to take this process.

    Args:
        link: to the agent; it carries everything after this, too.
        terms: see `attach`; nothing for a trainer that the agent has started.
        answer_s: limit of the wait; None for a child of the agent, which ends with it.

    Returns:
        The agent's answer: `attached`, or `refused` with its reason.

    Raises:
        LinkClosed: it does not take this process, and says nothing.
        TimeoutError: it does not answer in time.
    """
    link.send("attach", pid=os.getpid(), **terms)
    return link.receive(answer_s)


def find(given: str | None, environment: Mapping[str, str]) -> Path:
    """Finds the socket of this process's agent.

    Takes `given`, else the environment variable, else the socket of the only free agent
    on this machine.

    Raises:
        NoAgent: no agent, or more than one, is free.
    """
    named = given or environment.get(AGENT_SOCKET_VARIABLE)
    if named:
        return Path(named)
    return only_free(seen_here(DEFAULT_DIRECTORY))


def seen_here(directory: Path) -> list[SeenAgent]:
    """The agents that answer on this machine, by path."""
    found = [ask(path) for path in sorted(directory.glob(f"dtft-*/{AGENT_SOCKET}"))]
    return [seen for seen in found if seen is not None]


def only_free(agents: Iterable[SeenAgent]) -> Path:
    """The only agent to which nobody is attached.

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
    """What the agent at `path` says of itself; None if none that serves answers."""
    try:
        link = own_link(path)
    except OSError:  # also one that is another user's
        return None
    try:
        link.send("who")
        answer = link.receive(2.0)
    except (LinkClosed, TimeoutError):
        return None  # an agent that has trainers of its own closes the link
    finally:
        link.close()
    return SeenAgent(
        path=path, job=answer["job"], host=answer["host"], taken_by=answer["taken_by"]
    )


def own_link(path: Path) -> AgentLink:
    """Connects to the agent at `path`, which is this user's or root's.

    Raises:
        ForeignSocket: it is not; nothing was sent.
        OSError: nobody listens there.
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


# A process's talk with its agent: what it says, hears and waits for, until one ends.
#
# Every wait has a limit and ends at once when the agent has gone. What the messages
# mean is said in `agent_client`.


LAST_WORDS_S = 1.0
"""Once the link is closed, the agent's reason for it is waited for so long."""


class AgentGone(RuntimeError):
    """The agent of this process has ended, or has let go of it; says why."""


class Dialogue:
    """One link to an agent. `condition` guards what messages change."""

    def __init__(self, link: AgentLink, deadline_s: float) -> None:
        """Says nothing yet and does not listen; limits every wait to `deadline_s`."""
        self.condition = threading.Condition()
        self.gone = False
        """Whether the agent has ended, or has let go of this process."""
        self.farewell = "this host's agent has ended"
        """Why, if it is gone or should go without a word."""
        self._link, self.deadline_s = link, deadline_s
        self._outbox = Outbox(link)

    def start(self, take: Callable[[dict[str, Any]], None]) -> None:
        """Listens from now on; `take` gets each message while `condition` is held."""
        threading.Thread(target=self._hear, args=(take,), daemon=True).start()

    def _hear(self, take: Callable[[dict[str, Any]], None]) -> None:
        try:
            while True:
                message = self._link.receive()
                with self.condition:
                    take(message)
                    self.condition.notify_all()
        except LinkClosed:
            with self.condition:
                self.gone = True
                self.condition.notify_all()

    def check(self) -> None:
        """Raises AgentGone if the agent has let go of this process, or has ended."""
        with self.condition:
            if self.gone:
                raise AgentGone(self.farewell)

    def wait(
        self, ready: Callable[[], bool], what: str, limit_s: float | None = None
    ) -> None:
        """Waits until messages have made something true.

        Args:
            ready: whether it is; called while `condition` is held.
            what: is waited for, for the error.
            limit_s: by default the dialogue's.

        Raises:
            TimeoutError: it did not become true in time.
            AgentGone: the agent has ended.
        """
        limit_s = limit_s or self.deadline_s
        with self.condition:
            self.condition.wait_for(lambda: self.gone or ready(), timeout=limit_s)
            if self.gone:
                raise AgentGone(self.farewell)
            if not ready():
                raise TimeoutError(
                    f"{limit_s:.0f} s waiting for {what}; limit: timeouts.start"
                )

    def send(self, op: str, **fields: Any) -> None:
        """Sends a message now.

        Raises:
            AgentGone: the agent has ended.
        """
        try:
            self._link.send(op, **fields)
        except LinkClosed as error:
            with self.condition:  # the last words may still be on their way here
                self.condition.wait_for(lambda: self.gone, timeout=LAST_WORDS_S)
            raise AgentGone(self.farewell) from error

    def queue(self, op: str, **fields: Any) -> None:
        """Sends a message soon, in order with others that are queued; never fails."""
        self._outbox.send(op, **fields)

    def close(self) -> None:
        """Ends the queue once everything in it is sent; the link stays open."""
        self._outbox.close()
