"""Checkpoint managers: what a training loop saves to and restores from.

* `replicated`: the public manager, for a stock Orbax loop, set up by `options`;
  `local`: its work in a process of its own; `distributed`: in a job of several
  processes; `save_clock`: what saves cost, for an automatic interval.
* `agent_client`: the trainer's side of the memory tier, through its agent;
  `agent_link`: the Unix socket between them; `progress`: where both are, in shared
  memory. Agents import `agent_link` and `progress`, which import no JAX.

The agent's side is in `dtft.elastic`.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.checkpoint.managers.agent_client import AgentCheckpointManager
    from dtft.checkpoint.managers.agent_client import NotBrought
    from dtft.checkpoint.managers.agent_client import RestoreArgs
    from dtft.checkpoint.managers.agent_client import SaveArgs
    from dtft.checkpoint.managers.agent_link import AGENT_SOCKET
    from dtft.checkpoint.managers.agent_link import AGENT_SOCKET_VARIABLE
    from dtft.checkpoint.managers.agent_link import ATTACHED
    from dtft.checkpoint.managers.agent_link import AgentGone
    from dtft.checkpoint.managers.agent_link import AgentLink
    from dtft.checkpoint.managers.agent_link import LinkClosed
    from dtft.checkpoint.managers.agent_link import NoAgent
    from dtft.checkpoint.managers.agent_link import NotReading
    from dtft.checkpoint.managers.agent_link import Outbox
    from dtft.checkpoint.managers.agent_link import foreign_peer
    from dtft.checkpoint.managers.agent_link import hello
    from dtft.checkpoint.managers.agent_link import listen_for_links
    from dtft.checkpoint.managers.agent_link import serve_links
    from dtft.checkpoint.managers.local import StorageFailed
    from dtft.checkpoint.managers.options import ReplicatedOptions
    from dtft.checkpoint.managers.progress import PHASES
    from dtft.checkpoint.managers.progress import Phase
    from dtft.checkpoint.managers.progress import ProgressBoard
    from dtft.checkpoint.managers.progress import ProgressField
    from dtft.checkpoint.managers.replicated import ReplicatedCheckpointManager

_PUBLIC = {
    "AGENT_SOCKET": "agent_link",
    "AGENT_SOCKET_VARIABLE": "agent_link",
    "ATTACHED": "agent_link",
    "AgentCheckpointManager": "agent_client",
    "AgentGone": "agent_link",
    "AgentLink": "agent_link",
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
