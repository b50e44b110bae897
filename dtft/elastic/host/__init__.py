"""One host of a job: agent process, port, trainers and exports.

* `agent`: the event loop that passes events to `follower` (this host's duties) and to
  the leader; `edges`: an agent's access to time, network, files and processes, which a
  simulation replaces.
* `serve`: an agent for the user's own processes (`--serve-only`).
* `listening`: the host's port; `inspection` and `salvage` answer requests to the port.
* `trainers`, `coordination_service` (with `coordination_process`) and `export` start
  and end processes; `memory_directory`: the host's directory in memory, and its lock.

No module of an agent imports JAX; `coordination_process` is a separate process.
`dtft.elastic.transfer` sends slices between hosts.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.elastic.host.agent import Agent
    from dtft.elastic.host.edges import Service
    from dtft.elastic.host.memory_directory import (
        check_arena_directory,
        check_arena_room,
        check_name,
        sweep_memory,
        swept_line,
    )
    from dtft.elastic.host.salvage import NotSalvaged, Salvage
    from dtft.elastic.host.serve import ServeConfig, ServingHost, base_config

_PUBLIC = {
    "Agent": "agent",
    "NotSalvaged": "salvage",
    "Salvage": "salvage",
    "ServeConfig": "serve",
    "Service": "edges",
    "ServingHost": "serve",
    "base_config": "serve",
    "check_arena_directory": "memory_directory",
    "check_arena_room": "memory_directory",
    "check_name": "memory_directory",
    "sweep_memory": "memory_directory",
    "swept_line": "memory_directory",
}

__all__ = [
    "Agent",
    "NotSalvaged",
    "Salvage",
    "ServeConfig",
    "Service",
    "ServingHost",
    "base_config",
    "check_arena_directory",
    "check_arena_room",
    "check_name",
    "sweep_memory",
    "swept_line",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
