"""How a trainer attaches to the agent of its host, and how a user's process finds one.

One exchange over the agent's Unix socket, before the first message of the memory tier
itself (`link.py` carries both). A trainer that the agent has started names itself by
its process id (`hello`); a user's process says what the job must agree on, too
(`attach`). Decides which agent; must not know arrays or steps.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtft.checkpoint.arena import DEFAULT_DIRECTORY
from dtft.checkpoint.link import Link, LinkClosed
from dtft.checkpoint.socket_owner import ForeignSocket, check_path, foreign_peer

SOCKET = "agent.sock"
VARIABLE = "DTFT_AGENT_SOCKET"
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
class Seen:
    """What an agent says of itself to whoever asks."""

    path: Path
    job: str
    host: str
    taken_by: int
    """Process id of who is attached, 0 for nobody."""


@dataclass(frozen=True, kw_only=True)
class Attached:
    """This process's hold on its agent."""

    link: Link
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


def _ask_in(path: Path, terms: Mapping[str, Any]) -> tuple[Link, dict[str, Any]]:
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
    link: Link, terms: Mapping[str, Any], answer_s: float | None = None
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
    """The socket of this process's agent: named, or the only free one here.

    Raises:
        NoAgent: there is none, or more than one.
    """
    named = given or environment.get(VARIABLE)
    if named:
        return Path(named)
    return only_free(seen_here(DEFAULT_DIRECTORY))


def seen_here(directory: Path) -> list[Seen]:
    """The agents that answer on this machine, by path."""
    found = [ask(path) for path in sorted(directory.glob(f"dtft-*/{SOCKET}"))]
    return [seen for seen in found if seen is not None]


def only_free(agents: Iterable[Seen]) -> Path:
    """The only agent to which nobody is attached.

    >>> taken = Seen(path=Path("/a/agent.sock"), job="j", host="h", taken_by=7)
    >>> only_free([taken])
    Traceback (most recent call last):
    dtft.checkpoint.attach.NoAgent: no agent on this machine is free: h of job 'j' \
(/a/agent.sock) has process 7. Wait until that one has ended, or start another agent.
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
            f"{VARIABLE} or ReplicatedOptions(agent=...) to the path of its socket."
        )
    if agents:
        raise NoAgent(
            f"no agent on this machine is free: {known}. Wait until that one has "
            "ended, or start another agent."
        )
    raise NoAgent(
        f"no agent of this user listens below {DEFAULT_DIRECTORY}. One with another "
        f"--arena_directory is reached by its socket, named in its first line: set "
        f"{VARIABLE} or ReplicatedOptions(agent=...) to it. {_START}"
    )


def ask(path: Path) -> Seen | None:
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
    return Seen(
        path=path, job=answer["job"], host=answer["host"], taken_by=answer["taken_by"]
    )


def own_link(path: Path) -> Link:
    """Connects to the agent at `path`, which is this user's or root's.

    Raises:
        ForeignSocket: it is not; nothing was sent.
        OSError: nobody listens there.
    """
    check_path(path)
    link = Link.connect(path, ANSWER_S)
    try:
        foreign = foreign_peer(link.peer[1])
        if foreign is not None:
            raise ForeignSocket(f"{path}: {foreign}")
    except BaseException:
        link.close()
        raise
    return link


def _connect(path: Path) -> Link:
    try:
        return own_link(path)
    except ForeignSocket as error:
        raise NoAgent(str(error)) from error
    except OSError as error:
        reason = re.sub(r"^\[Errno \d+\] ", "", str(error)).partition(":")[0]
        raise NoAgent(
            f"no agent listens at {path} ({reason}). {_START}; its first line "
            f"names the socket for {VARIABLE}."
        ) from error
