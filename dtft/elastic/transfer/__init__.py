"""Keeps copies of slices on one host, and transfers slices between hosts.

A slice is a piece of one of the state's arrays.

* `copies`: the arenas (files in shared memory) that outlast the assignment of slots;
  `side_arena`: a step with other shardings, in a separate arena.
* `replication` pushes every step to the peers that keep copies; `replica_server`
  receives pushes and answers fetches; `slot_task`: the leader's order for a slot, and
  the pushers to its peers.
* `restore_executor` carries out every restore plan; `prefetch` lets spare hosts fetch
  in advance the slices that no step changes.

`dtft.elastic.leader` and `dtft.checkpoint` decide which host gets which slice.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.elastic.transfer.copies import Copies
    from dtft.elastic.transfer.prefetch import PrefetchedSlices, Prefetcher
    from dtft.elastic.transfer.replica_server import (
        Inbox,
        serve_digests,
        serve_fetch,
        serve_pushes,
    )
    from dtft.elastic.transfer.replication import Pusher
    from dtft.elastic.transfer.restore_executor import (
        FetchFailed,
        FetchOrder,
        borrow,
        fetch_into,
        restore_copies,
        restore_into,
    )
    from dtft.elastic.transfer.side_arena import Resharding
    from dtft.elastic.transfer.slot_task import SlotTask

_PUBLIC = {
    "Copies": "copies",
    "FetchFailed": "restore_executor",
    "FetchOrder": "restore_executor",
    "Inbox": "replica_server",
    "PrefetchedSlices": "prefetch",
    "Prefetcher": "prefetch",
    "Pusher": "replication",
    "Resharding": "side_arena",
    "SlotTask": "slot_task",
    "borrow": "restore_executor",
    "fetch_into": "restore_executor",
    "restore_copies": "restore_executor",
    "restore_into": "restore_executor",
    "serve_digests": "replica_server",
    "serve_fetch": "replica_server",
    "serve_pushes": "replica_server",
}

__all__ = [
    "Copies",
    "FetchFailed",
    "FetchOrder",
    "Inbox",
    "PrefetchedSlices",
    "Prefetcher",
    "Pusher",
    "Resharding",
    "SlotTask",
    "borrow",
    "fetch_into",
    "restore_copies",
    "restore_into",
    "serve_digests",
    "serve_fetch",
    "serve_pushes",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
