"""Fault injection: carries out the faults of `dtft drill` on a local cluster.

* `schedule`: the kinds of faults and their notation (`kill-host:1@150`).
* `injector` waits for the moment of each fault and carries the fault out.
* `interruptions` begins and undoes faults that last for a time: stopped processes, cut
  networks, a paused store, full or read-only directories.
* `full_disks` makes storage full or read-only, and shared memory full.
* `network_namespaces` makes the network namespaces in which hosts can be cut off.

A drill runs a job with faults, and `dtft drill` compares the outcome with an
undisturbed run. This package takes no part in the recovery of the job.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.elastic.faults.full_disks import (
        check_mounts,
        small_memory,
        unmount_below,
    )
    from dtft.elastic.faults.injector import STORE_AWAY_S, FaultInjector, InjectedFault
    from dtft.elastic.faults.interruptions import (
        INTERRUPTIONS,
        OF_DIRECTORIES,
    )
    from dtft.elastic.faults.network_namespaces import (
        HostNamespaces,
        check_namespaces,
        existing_namespaces,
        sweep_namespaces,
    )
    from dtft.elastic.faults.schedule import Fault, check_together, parse_fault

_PUBLIC = {
    "Fault": "schedule",
    "FaultInjector": "injector",
    "HostNamespaces": "network_namespaces",
    "INTERRUPTIONS": "interruptions",
    "InjectedFault": "injector",
    "OF_DIRECTORIES": "interruptions",
    "STORE_AWAY_S": "injector",
    "check_mounts": "full_disks",
    "check_namespaces": "network_namespaces",
    "check_together": "schedule",
    "existing_namespaces": "network_namespaces",
    "parse_fault": "schedule",
    "small_memory": "full_disks",
    "sweep_namespaces": "network_namespaces",
    "unmount_below": "full_disks",
}

__all__ = [
    "Fault",
    "FaultInjector",
    "HostNamespaces",
    "INTERRUPTIONS",
    "InjectedFault",
    "OF_DIRECTORIES",
    "STORE_AWAY_S",
    "check_mounts",
    "check_namespaces",
    "check_together",
    "existing_namespaces",
    "parse_fault",
    "small_memory",
    "sweep_namespaces",
    "unmount_below",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
