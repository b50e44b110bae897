"""An agent's edges: its access to time, network, store, files and processes.

`local_edges` makes the real edges of this machine. A simulation passes its own edges,
and runs the same agent, leader and follower.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dtft.checkpoint.managers import ProgressBoard
from dtft.checkpoint.storage import storage_steps
from dtft.checkpoint.transport import Credentials
from dtft.elastic.event_loop import EventLoop, Loop
from dtft.elastic.host.coordination_service import CoordinationService
from dtft.elastic.host.follower import Follower, local_follower
from dtft.elastic.host.listening import listen
from dtft.elastic.host.memory_directory import (
    make_host_memory,
    remove_memory_directory,
)
from dtft.elastic.host.trainers import Trainers
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader import Answer, Journal
from dtft.elastic.network import (
    Closed,
    ControlChannel,
    Heard,
    Message,
    Network,
    TcpNetwork,
)
from dtft.elastic.store import MirrorSource, Store, ThreadMirrors
from dtft.elastic.transfer import Inbox

Accept = Callable[[Message, ControlChannel], tuple[Heard, Closed] | None]
"""Maps a connecting host's first message, and the connection, to the callbacks for its
further messages and for its end; None refuses the connection."""


class HostServer(Protocol):
    """The server at this host's port."""

    @property
    def address(self) -> str:
        """Address host:port for peers."""
        ...

    def close(self) -> None:
        """Stops listening and ends every connection."""
        ...


class Service(Protocol):
    """JAX's coordination service, to which the trainers of one world connect.

    A world is a set of JAX processes that run collectives together.
    """

    def start(
        self,
        num_processes: int,
        ready: Callable[[str], None],
        failed: Callable[[str], None],
    ) -> None:
        """Starts to serve a new world of `num_processes` JAX processes.

        Calls `ready` with the service's address once it serves, or `failed` with a
        reason.
        """
        ...

    def give_up(self, places: Sequence[int]) -> None:
        """Makes the service treat some processes of the world as lost.

        `places` are the indices of these processes in the world.
        """
        ...

    def end(self) -> None:
        """Ends the service of the current world."""
        ...

    def close(self) -> None:
        """Ends all processes of the service."""
        ...


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Handlers of users' requests at a host's port.

    A user may ask to export a step to storage, to change the number of replicas, or to
    let a host leave the job (drain it). The last argument of each handler is the
    function that sends the answer. The first argument of `scale` is the number of
    replicas, and that of `drain` the name of the host.
    """

    export: Callable[[Answer], None]
    scale: Callable[[int, Answer], None]
    drain: Callable[[str, Answer], None]


@dataclass(frozen=True, kw_only=True)
class Edges:
    """An agent's access to time, network, store, files and processes.

    `local_edges` makes the real ones of this machine; a simulation passes other
    objects.
    """

    loop: Loop
    mirrors: MirrorSource
    network: Network
    follower: Callable[[Callable[..., None], Callable[..., None]], Follower]
    """Makes the `Follower`, which carries out orders, from two functions: `emit` posts
    an event of this host to the loop, and `report` sends a report to the leader."""
    listen: Callable[[Inbox, Accept, Asked], HostServer]
    """Opens this host's port: serves copies from the `Inbox`, accepts connections of
    hosts, and passes on users' requests. Raises ValueError if it cannot be opened."""
    journal: Callable[[], Journal]
    service: Callable[[], Service]
    list_steps: Callable[[Path], Iterable[int]]
    """Lists the steps in a storage directory."""
    close: Callable[[], None]
    """Unmaps the progress board, removes the memory directory (this host's copies), and
    writes a record of the loop's longest calls; called at the agent's end."""


class NoService:
    """Replaces `CoordinationService` if the job's processes start their own service."""

    def start(
        self,
        num_processes: int,
        ready: Callable[[str], None],
        failed: Callable[[str], None],
    ) -> None:
        """Calls `failed` with the reason at once: this job has no such service."""
        failed("the processes of this job start their own")

    def give_up(self, places: Sequence[int]) -> None:
        """Does nothing: no process runs."""

    def end(self) -> None:
        """Does nothing: no process runs."""

    def close(self) -> None:
        """Does nothing: no process runs."""


def local_edges(
    config: AgentConfig, store: Store, trainers: Trainers | None = None
) -> Edges:
    """Makes the real `Edges` of an agent on this machine.

    Args:
        config: the agent's settings.
        store: the job's store.
        trainers: trainers whose socket is open in a memory directory that
            `make_host_memory` has made; by default the directory is made here and the
            follower makes its trainers.

    Raises:
        ValueError: the arena directory does not exist, a live agent or another user
            has the memory directory, or the file system is full.
    """
    if trainers is None:
        make_host_memory(config.memory_directory, config.timeouts.start)
    (config.run_directory / "logs").mkdir(parents=True, exist_ok=True)
    loop = EventLoop()
    credentials = Credentials(job=config.job, secret=config.secret, tls=config.tls)
    board = ProgressBoard(config.memory_directory / "board")
    network = TcpNetwork(loop, credentials, config.timeouts.connect)

    def follower(emit: Callable[..., None], report: Callable[..., None]) -> Follower:
        shared = config, credentials, board, loop, network
        return local_follower(*shared, emit, report, trainers)

    def close() -> None:
        board.close()
        remove_memory_directory(config.memory_directory)
        _write_record(config, loop)

    return Edges(
        loop=loop,
        mirrors=ThreadMirrors(store),
        network=network,
        follower=follower,
        listen=lambda inbox, accept, asked: listen(
            config, credentials, inbox, loop, accept, asked
        ),
        journal=lambda: Journal(config.run_directory, config.host),
        service=(
            (lambda: CoordinationService(config, loop))
            if config.is_served_by_one
            else NoService
        ),
        list_steps=storage_steps,
        close=close,
    )


def _write_record(config: AgentConfig, loop: EventLoop) -> None:
    """Writes the event loop's longest calls to `loop-HOST.json` in the run directory.

    Drills read this file. An OSError is ignored.
    """
    record: dict[str, Any] = {"host": config.host, **loop.record()}
    path = config.run_directory / f"loop-{config.host}.json"
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(record) + "\n")
