"""The JAX devices of this process, and settings of its C library and of XLA.

`dtft train` runs on these devices. `dtft plan` without --cluster plans for them.
"""

import ctypes
import os
import sys
from collections.abc import MutableMapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from dtft.config import Experiment

# XLA's CPU backend allocates a step's temporaries anew at each step. The C library maps
# large temporaries and unmaps them afterwards, so every step has page faults, which
# take a third of the time of a step with tens of megabytes per device.

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # malloc.h
_PAD_BYTES = 64 * 2**20


def keep_freed(large: bool = False) -> bool:
    """Makes the C library keep freed memory, instead of returning it to the kernel.

    Args:
        large: True keeps more than 64 MiB of freed memory per thread, too. The C
            library's arenas for threads cannot keep so much, so all threads then share
            the main arena, and threads that compile wait for the lock of this arena.
            Call this function before JAX makes its devices, because existing threads
            keep their arenas.

    Returns:
        Whether the C library accepted all settings. False without `mallopt` (it is in
        glibc) and outside Linux; then nothing changes.
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


_LEAVING_FLAGS = {
    "xla_gpu_nccl_terminate_on_error": "false",
    "xla_gpu_nccl_async_execution": "true",
    "xla_gpu_nccl_blocking_communicators": "false",
    # Tuning is shared through keys of processes that compile at the same time.
    "xla_gpu_shard_autotuning": "false",
}


def leave_gpu_collectives(environment: MutableMapping[str, str]) -> None:
    """Sets environment variables that let XLA abort collectives on GPUs.

    XLA then aborts a collective after one of its processes was lost. Without these
    variables it waits for the lost process, or ends this process. Must be called before
    JAX looks for devices. Flags and variables that the user has set stay unchanged.

    Args:
        environment: the environment variables of this process, which are changed.

    >>> environment = {"XLA_FLAGS": "--xla_gpu_shard_autotuning=true"}
    >>> leave_gpu_collectives(environment)
    >>> environment["XLA_FLAGS"].split()[:2]
    ['--xla_gpu_shard_autotuning=true', '--xla_gpu_nccl_terminate_on_error=false']
    """
    flags = environment.get("XLA_FLAGS", "")
    added = [f"--{it}={to}" for it, to in _LEAVING_FLAGS.items() if it not in flags]
    environment["XLA_FLAGS"] = " ".join([*flags.split(), *added])
    environment.setdefault("XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", "1")
    # XLA warns at each step of every place of the world that has no process.
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def devices_of(experiment: Experiment) -> list[Any]:
    """Returns this process's devices; on CPU as many as the config's cluster has.

    This number is `cluster.hosts` times `cluster.devices_per_host`, where -1 counts as
    1. So on CPU `dtft train` has the same mesh as `dtft launch`. The number is passed
    to `make_cpu_devices` before JAX looks for devices. Fewer devices are returned if
    the user has set a smaller number. On accelerators all local devices are returned.
    """
    import jax

    cluster = experiment.cluster
    wanted = cluster.hosts * max(cluster.devices_per_host, 1)
    make_cpu_devices(wanted)
    keep_cpu_memory(large=bool(experiment.plan))
    devices = jax.local_devices()
    return devices[:wanted] if devices[0].platform == "cpu" else devices


def keep_cpu_memory(*, large: bool) -> None:
    """Makes the C library keep freed memory (`keep_freed`) if JAX uses only the CPU.

    With an accelerator this function does nothing, because steps do not use the host's
    memory. Must be called before JAX looks for devices.

    Args:
        large: True keeps more than 64 MiB of freed memory per thread, too (see
            `keep_freed`). Set it for a run with a plan, whose steps should take the
            predicted time.
    """
    import jax

    settings: Any = jax.config
    plugins = find_spec("jax_plugins") or find_spec("libtpu")
    others = plugins or entry_points(group="jax_plugins")
    if (settings.jax_platforms or ("all" if others else "cpu")) == "cpu":
        keep_freed(large)


def make_cpu_devices(number: int) -> None:
    """Sets the number of CPU devices in JAX, unless the user has set a number.

    The user sets a number in XLA_FLAGS or `jax_num_cpu_devices`. Must be called before
    JAX looks for devices.
    """
    import jax

    settings: Any = jax.config
    flags = os.environ.get("XLA_FLAGS", "")
    chosen = "xla_force_host_platform_device_count" in flags
    if not chosen and settings.jax_num_cpu_devices < 1:
        jax.config.update("jax_num_cpu_devices", number)
