"""The devices of this process: which there are, and whether freed memory is kept.

`dtft train` runs on them, `dtft plan` plans for them.
"""

import ctypes
import os
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from dtft.config import Experiment

# XLA's CPU backend allocates a step's temporaries anew at each step. The C library maps
# large ones and unmaps them afterwards, so every step begins with page faults: a third
# of a step that has tens of megabytes per device.

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # malloc.h
_PAD_BYTES = 64 * 2**20


def keep_freed(large: bool = False) -> bool:
    """For the rest of this process; its size stays that of its largest moment.

    Args:
        large: also what a thread has of more than 64 MiB at a time: the arenas that the
            C library makes for threads cannot keep that. So all share the process's
            own, for whose one lock the threads that compile wait. Call it before JAX
            makes its devices; threads that are there keep their arenas.

    Returns:
        Whether the C library can (glibc); if not, nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    settings = {
        _MMAP_MAX: 0,
        _TRIM_THRESHOLD: 2**31 - 1,
        _TOP_PAD: _PAD_BYTES,
    }
    if large:
        settings[_ARENA_MAX] = 1
    return all(library.mallopt(name, value) for name, value in settings.items())


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
        large: see `keep_freed`; so that steps take what plans predict.
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
