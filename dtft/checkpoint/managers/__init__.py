"""Checkpoint managers: a training loop saves steps to a manager and restores from it.

* `replicated`: the public manager, for a loop written for stock Orbax; `options`: its
  options; `local`: its implementation for one process; `distributed`: its
  implementation for a job of several processes; `save_clock`: measures the cost of
  saves for an automatic interval.
* `agent_client`: the trainer's client of the memory tier, through the host's agent;
  `agent_link`: the Unix socket between trainer and agent; `progress`: a board in shared
  memory on which both write their progress. Agents import `agent_link` and `progress`,
  which import no JAX.

The agent's side is in `dtft.elastic`.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.checkpoint.managers.agent_client import (
        AgentCheckpointManager,
        NotBrought,
        RestoreArgs,
        SaveArgs,
    )
    from dtft.checkpoint.managers.agent_link import (
        AGENT_SOCKET,
        AGENT_SOCKET_VARIABLE,
        ATTACHED,
        AgentGone,
        AgentLink,
        Dialogue,
        LinkClosed,
        NoAgent,
        NotReading,
        Outbox,
        foreign_peer,
        hello,
        listen_for_links,
        serve_links,
    )
    from dtft.checkpoint.managers.local import StorageFailed
    from dtft.checkpoint.managers.options import ReplicatedOptions
    from dtft.checkpoint.managers.progress import (
        PHASES,
        Phase,
        ProgressBoard,
        ProgressField,
    )
    from dtft.checkpoint.managers.replicated import ReplicatedCheckpointManager

_PUBLIC = {
    "AGENT_SOCKET": "agent_link",
    "AGENT_SOCKET_VARIABLE": "agent_link",
    "ATTACHED": "agent_link",
    "AgentCheckpointManager": "agent_client",
    "AgentGone": "agent_link",
    "AgentLink": "agent_link",
    "Dialogue": "agent_link",
    "LinkClosed": "agent_link",
    "NoAgent": "agent_link",
    "NotBrought": "agent_client",
    "NotReading": "agent_link",
    "Outbox": "agent_link",
    "PHASES": "progress",
    "Phase": "progress",
    "ProgressBoard": "progress",
    "ProgressField": "progress",
    "ReplicatedCheckpointManager": "replicated",
    "ReplicatedOptions": "options",
    "RestoreArgs": "agent_client",
    "SaveArgs": "agent_client",
    "StorageFailed": "local",
    "foreign_peer": "agent_link",
    "hello": "agent_link",
    "listen_for_links": "agent_link",
    "serve_links": "agent_link",
}

__all__ = [
    "AGENT_SOCKET",
    "AGENT_SOCKET_VARIABLE",
    "ATTACHED",
    "AgentCheckpointManager",
    "AgentGone",
    "AgentLink",
    "Dialogue",
    "LinkClosed",
    "NoAgent",
    "NotBrought",
    "NotReading",
    "Outbox",
    "PHASES",
    "Phase",
    "ProgressBoard",
    "ProgressField",
    "ReplicatedCheckpointManager",
    "ReplicatedOptions",
    "RestoreArgs",
    "SaveArgs",
    "StorageFailed",
    "foreign_peer",
    "hello",
    "listen_for_links",
    "serve_links",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
