"""The cluster: devices, links between the devices, and the speeds of both.

* `hardware`: the figures of a device type and of a link, and their accuracy.
* `catalog`: devices, links and machines by name, with the sources of their figures.
* `topology`: `Cluster`, made of pools and levels, read from a shorthand (`64x8xH100`),
  a YAML or JSON file, or JAX's devices.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.planner.cluster.catalog import (
        MACHINES,
        canonical_name,
        device_type,
        machine,
    )
    from dtft.planner.cluster.hardware import (
        CARRIED_OVER,
        CATALOG,
        INTERVAL_SHARE,
        UNCALIBRATED,
        Accuracy,
        CollectiveKind,
        Curve,
        DeviceType,
        Efficiency,
        Link,
        LinkKind,
        Platform,
        ProductRate,
    )
    from dtft.planner.cluster.topology import Cluster, Level, Pool, parse_pool

_PUBLIC = {
    "Accuracy": "hardware",
    "CARRIED_OVER": "hardware",
    "CATALOG": "hardware",
    "Cluster": "topology",
    "CollectiveKind": "hardware",
    "Curve": "hardware",
    "DeviceType": "hardware",
    "Efficiency": "hardware",
    "INTERVAL_SHARE": "hardware",
    "Level": "topology",
    "Link": "hardware",
    "LinkKind": "hardware",
    "MACHINES": "catalog",
    "Platform": "hardware",
    "Pool": "topology",
    "ProductRate": "hardware",
    "UNCALIBRATED": "hardware",
    "canonical_name": "catalog",
    "device_type": "catalog",
    "machine": "catalog",
    "parse_pool": "topology",
}

__all__ = [
    "Accuracy",
    "CARRIED_OVER",
    "CATALOG",
    "Cluster",
    "CollectiveKind",
    "Curve",
    "DeviceType",
    "Efficiency",
    "INTERVAL_SHARE",
    "Level",
    "Link",
    "LinkKind",
    "MACHINES",
    "Platform",
    "Pool",
    "ProductRate",
    "UNCALIBRATED",
    "canonical_name",
    "device_type",
    "machine",
    "parse_pool",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
