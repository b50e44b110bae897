"""The leading agent: turns hosts' reports into commits, recoveries and orders.

* `leadership` makes a `leader` when this host gets the leader key. It ends the `leader`
  when another host leads or has led meanwhile, when the store has lost data, or when
  this host releases the key. `records`: the leader's writes to the store, which the
  store refuses once another host leads. `events`: the printed messages and the event
  log.
* Connected hosts: `host_registry`. Formations (which host gets which slot, and what it
  restores): `rendezvous` with `rendezvous_plan` and `recovery`, `failure_account` with
  `failure_budget`, `re_replication`, `scaling` with `sizes`. End of the job:
  `shutdown`.
* Commits and storage: `commit_coordinator`, `export_plan`, `export_requests`,
  `storage`. Requests in jobs whose processes the user starts: `served_requests` with
  `reshard`.

The package `host` passes in the sockets, the processes and the event loop.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.elastic.leader.events import EventReader, Journal, read_events
    from dtft.elastic.leader.export_requests import Answer, serve_export
    from dtft.elastic.leader.leader import Leader
    from dtft.elastic.leader.leadership import Leadership
    from dtft.elastic.leader.records import Records
    from dtft.elastic.leader.recovery import RecoveryDecision, decide, fetches_for
    from dtft.elastic.leader.scaling import AGAIN, serve_change
    from dtft.elastic.leader.storage import newest_stored

_PUBLIC = {
    "AGAIN": "scaling",
    "Answer": "export_requests",
    "EventReader": "events",
    "Journal": "events",
    "Leader": "leader",
    "Leadership": "leadership",
    "Records": "records",
    "RecoveryDecision": "recovery",
    "decide": "recovery",
    "fetches_for": "recovery",
    "newest_stored": "storage",
    "read_events": "events",
    "serve_export": "export_requests",
    "serve_change": "scaling",
}

__all__ = [
    "AGAIN",
    "Answer",
    "EventReader",
    "Journal",
    "Leader",
    "Leadership",
    "Records",
    "RecoveryDecision",
    "decide",
    "fetches_for",
    "newest_stored",
    "read_events",
    "serve_export",
    "serve_change",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
