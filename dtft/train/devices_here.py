"""The devices of this process: what `dtft train` runs on, and `dtft plan` plans for.

Must not know what is run on them, or other processes.
"""

import os
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from dtft.train.experiment import Experiment
from dtft.train.heap import keep_freed


def devices_of(experiment: Experiment) -> list[Any]:
    """This process's devices; on CPU as many as the experiment's whole cluster has.

    So `dtft train` computes on CPU with the mesh that `dtft launch` would have.
    """
    import jax

    cluster = experiment.cluster
    wanted = cluster.hosts * max(cluster.devices_per_host, 1)
    make_cpu_devices(wanted)
    keep_cpu_memory(large=bool(experiment.plan))
    devices = jax.local_devices()
    return devices[:wanted] if devices[0].platform == "cpu" else devices


def keep_cpu_memory(*, large: bool) -> None:
    """Keeps freed memory for the next step if JAX can only find the CPU.

    Must be called before JAX looks for devices. With an accelerator it changes
    nothing: there the host's memory is not that of the step.

    Args:
        large: see `heap.keep_freed`; so that steps take what plans predict.
    """
    import jax

    settings: Any = jax.config
    plugins = find_spec("jax_plugins") or find_spec("libtpu")
    others = plugins or entry_points(group="jax_plugins")
    if (settings.jax_platforms or ("all" if others else "cpu")) == "cpu":
        keep_freed(large)


def make_cpu_devices(number: int) -> None:
    """How many devices JAX makes of the CPU, unless the user has said so.

    Must be called before JAX looks for devices.
    """
    import jax

    settings: Any = jax.config
    flags = os.environ.get("XLA_FLAGS", "")
    chosen = "xla_force_host_platform_device_count" in flags
    if not chosen and settings.jax_num_cpu_devices < 1:
        jax.config.update("jax_num_cpu_devices", number)
