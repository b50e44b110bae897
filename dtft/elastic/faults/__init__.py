"""Fault injection: faults that a drill plays on a local cluster, from outside.

* `schedule`: the faults there are, and how they are written (`kill-host:1@150`).
* `injector` waits for the moment and strikes; `interruptions`: stops, cuts and pauses,
  which end again; `network_namespaces`: hosts that can be cut off from one another.

Nothing here takes part in what it tests; comparing the outcome with an undisturbed run
is `dtft drill`'s.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.elastic.faults.injector import STORE_AWAY_S, FaultInjector, InjectedFault
    from dtft.elastic.faults.interruptions import INTERRUPTIONS, session
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
    "STORE_AWAY_S": "injector",
    "check_namespaces": "network_namespaces",
    "check_together": "schedule",
    "existing_namespaces": "network_namespaces",
    "parse_fault": "schedule",
    "session": "interruptions",
    "sweep_namespaces": "network_namespaces",
}

__all__ = [
    "Fault",
    "FaultInjector",
    "HostNamespaces",
    "INTERRUPTIONS",
    "InjectedFault",
    "STORE_AWAY_S",
    "check_namespaces",
    "check_together",
    "existing_namespaces",
    "parse_fault",
    "session",
    "sweep_namespaces",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
