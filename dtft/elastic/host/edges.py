"""What an agent's logic needs of the world, as one value.

Time, threads, connections, the store's watches, files and processes come from here;
`local_edges` makes the real ones. A simulation hands in its own, and runs the same
agent, leader and follower.
"""

import contextlib
import json
from collections.abc import Callable, Iterable
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
    make_memory_directory,
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


class HostServer(Protocol):
    """The port of this host."""

    @property
    def address(self) -> str:
        """host:port for peers."""
        ...

    def close(self) -> None:
        """Ends every connection."""
        ...


class Service(Protocol):
    """JAX's coordination service beside the leader."""

    def start(
        self,
        num_processes: int,
        ready: Callable[[str], None],
        failed: Callable[[str], None],
    ) -> None:
        """Serves a new world; `ready` takes its address, `failed` why there is none."""
        ...

    def end(self) -> None:
        """Ends the world that is served."""
        ...

    def close(self) -> None:
        """Ends everything."""
        ...


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What people may ask a host for over its port."""

    export: Callable[[Answer], None]
    scale: Callable[[int, Answer], None]


@dataclass(frozen=True, kw_only=True)
class Edges:
    """See the module's text."""

    loop: Loop
    mirrors: MirrorSource
    network: Network
    follower: Callable[[Callable[..., None], Callable[..., None]], Follower]
    """Makes this host's follower from `emit` and `report`."""
    listen: Callable[[Inbox, Accept, Asked], HostServer]
    """Opens the port."""
    journal: Callable[[], Journal]
    service: Callable[[], Service]
    list_steps: Callable[[Path], Iterable[int]]
    """Which steps a storage directory holds."""
    close: Callable[[], None]
    """Frees what is left when the agent has ended."""


class NoService:
    """In place of a coordination service where users' processes have one already."""

    def start(
        self,
        num_processes: int,
        ready: Callable[[str], None],
        failed: Callable[[str], None],
    ) -> None:
        """It serves at once."""
        ready("")

    def end(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing runs."""


def local_edges(
    config: AgentConfig, store: Store, trainers: Trainers | None = None
) -> Edges:
    """The edges of an agent on this machine.

    Args:
        config: of the agent.
        store: of the job.
        trainers: listen already, in memory that is there already; by default both are
            made here.

    Raises:
        ValueError: the arena directory is not there.
    """
    if trainers is None:
        make_memory_directory(config.memory_directory)
    (config.run_directory / "logs").mkdir(parents=True, exist_ok=True)
    loop = EventLoop()
    credentials = Credentials(job=config.job, secret=config.secret, tls=config.tls)
    board = ProgressBoard(config.memory_directory / "board", create=True)
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
            if config.seats.has_coordination_service
            else NoService
        ),
        list_steps=storage_steps,
        close=close,
    )


def _write_record(config: AgentConfig, loop: EventLoop) -> None:
    """Leaves the loop's longest calls in the run directory, for drills."""
    record: dict[str, Any] = {"host": config.host, **loop.record()}
    path = config.run_directory / f"loop-{config.host}.json"
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(record) + "\n")
