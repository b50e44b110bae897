"""The cost model: seconds of operators, collectives, pipelines and host transfers.

* `compute`: seconds of matmuls, memory traffic and launches, and a lower bound.
* `operator`: seconds of an operator on a mesh, and of offloaded optimizer state.
* `collectives`: seconds of collectives, by algorithm and levels of the fabric.
* `mesh_topology`: how mesh axes lie on the levels of the fabric.
* `pipeline`: schedules of pipeline stages.
* `calibration`: applies measured figures and past runs to a cluster.
* `fitting`: fits the figures of a calibration to measured times.
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
        sync_skews_s,
    )
    from dtft.planner.cost.compute import (
        added_s,
        at_peak_s,
        launch_s,
        lower_bound_s,
        matmul_s,
        memory_s,
        shape_factor,
    )
    from dtft.planner.cost.fitting import (
        CalibrationFit,
        CollectiveTime,
        ConvolutionTime,
        ElementTime,
        MatmulTime,
        MemoryTime,
        OverlapTime,
        PrefetchTime,
        SyncSkewTime,
        fit_convolutions,
        fit_elements,
        fit_link,
        fit_matmuls,
        fit_memory,
        fit_overlap,
        fit_peak,
        fit_prefetch_overlap,
        fit_sync_skew,
    )
    from dtft.planner.cost.mesh_topology import (
        DeviceGroup,
        DeviceGroups,
        group_of,
        members,
        undominated_orders,
    )
    from dtft.planner.cost.operator import (
        LEAST_OFFLOADED_BYTES,
        Away,
        MeshSpeeds,
        away,
        computing_s,
        runs,
    )
    from dtft.planner.cost.pipeline import SCHEDULES, in_flight, pipeline_s, transfers

_PUBLIC = {
    "Away": "operator",
    "Calibration": "calibration",
    "CalibrationFit": "fitting",
    "CollectiveTime": "fitting",
    "ConvolutionTime": "fitting",
    "DeviceGroup": "mesh_topology",
    "DeviceGroups": "mesh_topology",
    "ElementTime": "fitting",
    "LEAST_OFFLOADED_BYTES": "operator",
    "MatmulTime": "fitting",
    "MemoryTime": "fitting",
    "MeshSpeeds": "operator",
    "OverlapTime": "fitting",
    "PastRun": "calibration",
    "PrefetchTime": "fitting",
    "SCHEDULES": "pipeline",
    "SyncSkewTime": "fitting",
    "added_s": "compute",
    "apply_calibration": "calibration",
    "away": "operator",
    "collective_s": "collectives",
    "collectives_s": "collectives",
    "computing_s": "operator",
    "fit_convolutions": "fitting",
    "fit_elements": "fitting",
    "fit_link": "fitting",
    "fit_matmuls": "fitting",
    "fit_memory": "fitting",
    "fit_overlap": "fitting",
    "fit_peak": "fitting",
    "fit_prefetch_overlap": "fitting",
    "fit_sync_skew": "fitting",
    "group_of": "mesh_topology",
    "hiddens": "collectives",
    "in_flight": "pipeline",
    "launch_s": "compute",
    "learn": "calibration",
    "link_key": "calibration",
    "at_peak_s": "compute",
    "lower_bound_s": "compute",
    "matmul_s": "compute",
    "members": "mesh_topology",
    "memory_s": "compute",
    "pipeline_s": "pipeline",
    "read_log": "calibration",
    "runs": "operator",
    "shape_factor": "compute",
    "sync_skews_s": "collectives",
    "transfers": "pipeline",
    "undominated_orders": "mesh_topology",
}

__all__ = [
    "Away",
    "Calibration",
    "CalibrationFit",
    "CollectiveTime",
    "ConvolutionTime",
    "DeviceGroup",
    "DeviceGroups",
    "ElementTime",
    "LEAST_OFFLOADED_BYTES",
    "MatmulTime",
    "MemoryTime",
    "MeshSpeeds",
    "OverlapTime",
    "PastRun",
    "PrefetchTime",
    "SCHEDULES",
    "SyncSkewTime",
    "added_s",
    "apply_calibration",
    "away",
    "collective_s",
    "collectives_s",
    "computing_s",
    "fit_convolutions",
    "fit_elements",
    "fit_link",
    "fit_matmuls",
    "fit_memory",
    "fit_overlap",
    "fit_peak",
    "fit_prefetch_overlap",
    "fit_sync_skew",
    "group_of",
    "hiddens",
    "in_flight",
    "launch_s",
    "learn",
    "link_key",
    "at_peak_s",
    "lower_bound_s",
    "matmul_s",
    "members",
    "memory_s",
    "pipeline_s",
    "read_log",
    "runs",
    "shape_factor",
    "sync_skews_s",
    "transfers",
    "undominated_orders",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
