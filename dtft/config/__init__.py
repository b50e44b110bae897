"""The config of an experiment: its dataclasses, and how it is loaded.

* `experiment`: dataclasses of mesh, cluster, checkpoints and limits. `optimizers`:
  optimizer configs, with schedules and exchange between replicas.
* `loading`: makes an Experiment from a config's name and flags, and writes it as JSON.
* `log_disk`: writes to the disk of a run's logs.

This package does not import JAX, because processes that never train read configs too.
Configs of data sets are in `dtft.data`, configs of models in `dtft.models`.
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
