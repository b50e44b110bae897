"""The coordination store: a job's keys in etcd, and access to them.

* `api`: values, errors and the `Store` protocol (leases, transactions, watches);
  `address`: members, TLS, user and key prefix of a store.
* `etcd` (over `etcd_wire`) implements the protocol through etcd's JSON gateway;
  `memory` implements the protocol in one process, for tests.
* `embedded` runs a private etcd; `supervision` restarts the private etcd.
* `mirror` keeps a local copy of the job's keys; `view` parses these keys into a `View`.
* `membership` registers this host, holds the leader key and fences a leader's writes.

`leader` and `host` decide how the job reacts to changes in the store.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.elastic.store.address import StoreAddress
    from dtft.elastic.store.api import Compare, Put, Store, StoreFull, StoreUnavailable
    from dtft.elastic.store.embedded import EmbeddedEtcd
    from dtft.elastic.store.etcd import EtcdStore, version_warning
    from dtft.elastic.store.membership import Membership, claim
    from dtft.elastic.store.mirror import MirrorSource, ThreadMirrors
    from dtft.elastic.store.supervision import SupervisionLimits, Supervisor
    from dtft.elastic.store.view import View, job_key, read_commits, read_view

_PUBLIC = {
    "Compare": "api",
    "EmbeddedEtcd": "embedded",
    "EtcdStore": "etcd",
    "Membership": "membership",
    "MirrorSource": "mirror",
    "Put": "api",
    "Store": "api",
    "StoreAddress": "address",
    "StoreFull": "api",
    "StoreUnavailable": "api",
    "SupervisionLimits": "supervision",
    "Supervisor": "supervision",
    "ThreadMirrors": "mirror",
    "View": "view",
    "claim": "membership",
    "job_key": "view",
    "read_commits": "view",
    "read_view": "view",
    "version_warning": "etcd",
}

__all__ = [
    "Compare",
    "EmbeddedEtcd",
    "EtcdStore",
    "Membership",
    "MirrorSource",
    "Put",
    "Store",
    "StoreAddress",
    "StoreFull",
    "StoreUnavailable",
    "SupervisionLimits",
    "Supervisor",
    "ThreadMirrors",
    "View",
    "claim",
    "job_key",
    "read_commits",
    "read_view",
    "version_warning",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
