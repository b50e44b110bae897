"""The storage tier: writes, reads and inspects the steps of a storage directory.

* `directory`: the storage tier, a directory of Orbax checkpoints.
* `orbax_manager`: the Orbax manager that the storage tier uses.
* `stored_steps`: reads and verifies steps.
* `job_layout`: divides a user's tree of arrays into slices per process, and rebuilds
  the tree's structure.
* `exporter`: the program of the process that writes steps.
* `exporter_client`: starts an exporter process and sends steps to it.
* `export_plan`: chooses the slots that write a step.
* `inspect`: lists, describes, verifies and copies steps for `dtft checkpoint`.
* `step_directories`: lists the complete steps of a directory.
* `directory_lock`: a lock for one writer at a time.

`export_plan`, `exporter_client`, `inspect`, `step_directories` and `directory_lock`
import neither JAX nor Orbax when they are loaded. `dtft.checkpoint.managers` and
`dtft.elastic` decide when a step is written.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.checkpoint.storage.directory import StorageTier, compare_steps
    from dtft.checkpoint.storage.directory_lock import StorageBusy, alone_in
    from dtft.checkpoint.storage.export_plan import export_world
    from dtft.checkpoint.storage.exporter_client import (
        EXPORTER_START_S,
        ExporterProcess,
        Hear,
    )
    from dtft.checkpoint.storage.inspect import (
        checkpoints_in,
        copy_step,
        describe_step,
        list_steps,
        pick_step,
        verify_step,
    )
    from dtft.checkpoint.storage.job_layout import (
        config_of,
        dynamic_part,
        layout_difference,
        layout_of,
        moved_leaf,
        record_in,
        same_slices,
    )
    from dtft.checkpoint.storage.step_directories import storage_steps
    from dtft.checkpoint.storage.stored_steps import StoredSteps

_PUBLIC = {
    "EXPORTER_START_S": "exporter_client",
    "ExporterProcess": "exporter_client",
    "Hear": "exporter_client",
    "StorageBusy": "directory_lock",
    "StorageTier": "directory",
    "StoredSteps": "stored_steps",
    "alone_in": "directory_lock",
    "checkpoints_in": "inspect",
    "compare_steps": "directory",
    "config_of": "job_layout",
    "copy_step": "inspect",
    "describe_step": "inspect",
    "dynamic_part": "job_layout",
    "export_world": "export_plan",
    "layout_difference": "job_layout",
    "layout_of": "job_layout",
    "list_steps": "inspect",
    "moved_leaf": "job_layout",
    "pick_step": "inspect",
    "record_in": "job_layout",
    "same_slices": "job_layout",
    "storage_steps": "step_directories",
    "verify_step": "inspect",
}

__all__ = [
    "EXPORTER_START_S",
    "ExporterProcess",
    "Hear",
    "StorageBusy",
    "StorageTier",
    "StoredSteps",
    "alone_in",
    "checkpoints_in",
    "compare_steps",
    "config_of",
    "copy_step",
    "describe_step",
    "dynamic_part",
    "export_world",
    "layout_difference",
    "layout_of",
    "list_steps",
    "moved_leaf",
    "pick_step",
    "record_in",
    "same_slices",
    "storage_steps",
    "verify_step",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
