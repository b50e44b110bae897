"""Seconds: how long operators, collectives, pipelines and transfers take on a cluster.

* `compute`: matmuls, bytes through memory, launches, a lower bound; `operator`: an
  operator's seconds, offloaded state.
* `collectives`: all-reduce and the others by algorithm and levels; `mesh_topology`: how
  mesh axes lie on the fabric.
* `pipeline`: schedules of stages.
* `calibration`: measured figures and past runs put on a cluster; `fitting`: those
  figures from measured times.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.planner.cost.calibration import (
        Calibration,
        PastRun,
        apply_calibration,
        learn,
        link_key,
        read_log,
    )
    from dtft.planner.cost.collectives import (
        collective_s,
        collectives_s,
        hiddens,
        meetings_s,
    )
    from dtft.planner.cost.compute import (
        added_s,
        launch_s,
        lower_bound_s,
        matmul_s,
        memory_s,
        shape_factor,
    )
    from dtft.planner.cost.fitting import (
        AheadTime,
        BehindTime,
        CollectiveTime,
        ConvolutionTime,
        ElementTime,
        Fit,
        MatmulTime,
        MemoryTime,
        OverlapTime,
        fit_ahead,
        fit_convolutions,
        fit_elements,
        fit_link,
        fit_matmuls,
        fit_meeting,
        fit_memory,
        fit_overlap,
        fit_peak,
    )
    from dtft.planner.cost.mesh_topology import (
        Group,
        Groups,
        group_of,
        members,
        undominated_orders,
    )
    from dtft.planner.cost.operator import (
        LEAST_OFFLOADED_BYTES,
        Away,
        Speeds,
        away,
        computing_s,
        runs,
    )
    from dtft.planner.cost.pipeline import SCHEDULES, in_flight, pipeline_s, transfers

_PUBLIC = {
    "AheadTime": "fitting",
    "Away": "operator",
    "BehindTime": "fitting",
    "Calibration": "calibration",
    "CollectiveTime": "fitting",
    "ConvolutionTime": "fitting",
    "ElementTime": "fitting",
    "Fit": "fitting",
    "Group": "mesh_topology",
    "Groups": "mesh_topology",
    "LEAST_OFFLOADED_BYTES": "operator",
    "MatmulTime": "fitting",
    "MemoryTime": "fitting",
    "OverlapTime": "fitting",
    "PastRun": "calibration",
    "SCHEDULES": "pipeline",
    "Speeds": "operator",
    "added_s": "compute",
    "apply_calibration": "calibration",
    "away": "operator",
    "collective_s": "collectives",
    "collectives_s": "collectives",
    "computing_s": "operator",
    "fit_ahead": "fitting",
    "fit_convolutions": "fitting",
    "fit_elements": "fitting",
    "fit_link": "fitting",
    "fit_matmuls": "fitting",
    "fit_meeting": "fitting",
    "fit_memory": "fitting",
    "fit_overlap": "fitting",
    "fit_peak": "fitting",
    "group_of": "mesh_topology",
    "hiddens": "collectives",
    "in_flight": "pipeline",
    "launch_s": "compute",
    "learn": "calibration",
    "link_key": "calibration",
    "lower_bound_s": "compute",
    "matmul_s": "compute",
    "meetings_s": "collectives",
    "members": "mesh_topology",
    "memory_s": "compute",
    "pipeline_s": "pipeline",
    "read_log": "calibration",
    "runs": "operator",
    "shape_factor": "compute",
    "transfers": "pipeline",
    "undominated_orders": "mesh_topology",
}

__all__ = [
    "AheadTime",
    "Away",
    "BehindTime",
    "Calibration",
    "CollectiveTime",
    "ConvolutionTime",
    "ElementTime",
    "Fit",
    "Group",
    "Groups",
    "LEAST_OFFLOADED_BYTES",
    "MatmulTime",
    "MemoryTime",
    "OverlapTime",
    "PastRun",
    "SCHEDULES",
    "Speeds",
    "added_s",
    "apply_calibration",
    "away",
    "collective_s",
    "collectives_s",
    "computing_s",
    "fit_ahead",
    "fit_convolutions",
    "fit_elements",
    "fit_link",
    "fit_matmuls",
    "fit_meeting",
    "fit_memory",
    "fit_overlap",
    "fit_peak",
    "group_of",
    "hiddens",
    "in_flight",
    "launch_s",
    "learn",
    "link_key",
    "lower_bound_s",
    "matmul_s",
    "meetings_s",
    "members",
    "memory_s",
    "pipeline_s",
    "read_log",
    "runs",
    "shape_factor",
    "transfers",
    "undominated_orders",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
