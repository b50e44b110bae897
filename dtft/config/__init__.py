"""What an experiment is, as values, and how it is read.

* `experiment`: dataclasses of model, data, mesh, limits. `optimizers`: their configs,
  with schedules and exchange between replicas.
* `loading`: from a config's name and flags to an Experiment, and to `config.json`.
* `log_disk`: the disk that a run's logs lie on.

Imports no JAX: processes that never train read configs too. Data sets are in
`dtft.data`, models' configs in `dtft.models`.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.config.experiment import (
        BalanceConfig,
        CheckpointConfig,
        ClusterConfig,
        Experiment,
        LogConfig,
        MeshConfig,
        PipelineConfig,
        StopConfig,
    )
    from dtft.config.loading import (
        ConfigError,
        diff_configs,
        load_experiment,
        parse_experiment,
        refuse,
        refuse_other,
        to_json,
    )
    from dtft.config.log_disk import Disk
    from dtft.config.optimizers import (
        AdamWConfig,
        MaxAdaBeliefConfig,
        OptimConfig,
        ScheduleConfig,
        SGDConfig,
        ShampooConfig,
        SyncConfig,
    )

_PUBLIC = {
    "AdamWConfig": "optimizers",
    "BalanceConfig": "experiment",
    "CheckpointConfig": "experiment",
    "ClusterConfig": "experiment",
    "ConfigError": "loading",
    "Disk": "log_disk",
    "Experiment": "experiment",
    "LogConfig": "experiment",
    "MaxAdaBeliefConfig": "optimizers",
    "MeshConfig": "experiment",
    "OptimConfig": "optimizers",
    "PipelineConfig": "experiment",
    "SGDConfig": "optimizers",
    "ScheduleConfig": "optimizers",
    "ShampooConfig": "optimizers",
    "StopConfig": "experiment",
    "SyncConfig": "optimizers",
    "diff_configs": "loading",
    "load_experiment": "loading",
    "parse_experiment": "loading",
    "refuse": "loading",
    "refuse_other": "loading",
    "to_json": "loading",
}

__all__ = [
    "AdamWConfig",
    "BalanceConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "ConfigError",
    "Disk",
    "Experiment",
    "LogConfig",
    "MaxAdaBeliefConfig",
    "MeshConfig",
    "OptimConfig",
    "PipelineConfig",
    "SGDConfig",
    "ScheduleConfig",
    "ShampooConfig",
    "StopConfig",
    "SyncConfig",
    "diff_configs",
    "load_experiment",
    "parse_experiment",
    "refuse",
    "refuse_other",
    "to_json",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
