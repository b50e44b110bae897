"""All use of private JAX API, behind a version check.

The coordination service as a process of its own (so that no trainer is special), a
trainer's connection to it, and the address of a CPU array's buffer. Nothing else in
dtft may import ``jax._src`` or ``jaxlib``'s private modules.
"""

import ctypes
import math
from typing import Any

import jax

_TESTED = ((0, 10), (0, 13))
"""First tested version, and the first one that was not tested."""


def check_version(version: str | None = None) -> None:
    """Refuses a JAX whose private API dtft was not tested with.

    Raises:
        RuntimeError: names the version found and the allowed range.
    """
    found = version or jax.__version__
    numbers = tuple(int(part) for part in found.split(".")[:2])
    if not _TESTED[0] <= numbers < _TESTED[1]:
        raise RuntimeError(
            f"jax {found} is installed, but dtft was tested with 0.10 to 0.12: "
            "install the versions of constraints.txt."
        )


def start_coordination_service(
    address: str, num_processes: int, heartbeat_s: float
) -> Any:
    """Starts JAX's coordination service here; it lives as long as the result."""
    check_version()
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    return _jax.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=max(1, math.ceil(heartbeat_s)),
        shutdown_timeout=5,
        recoverable=True,
    )


def join_world(
    address: str,
    *,
    process_id: int,
    num_processes: int,
    heartbeat_s: float,
    timeout_s: float,
) -> None:
    """`jax.distributed.initialize` without a service in process 0.

    Args:
        address: host:port of the coordination service.
        process_id: dense id of this process.
        num_processes: size of the world, fixed for the life of the service.
        heartbeat_s: JAX heartbeat in seconds.
        timeout_s: how long to wait for the service.
    """
    check_version()
    from jax._src import distributed
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    client = _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=math.ceil(timeout_s),
        use_compression=True,
        heartbeat_timeout=max(1, math.ceil(heartbeat_s)),
    )
    client.connect()
    state = distributed.global_state
    state.client = client
    state.process_id = process_id
    state.num_processes = num_processes
    state.coordinator_address = address


def cpu_buffer(array: jax.Array) -> memoryview:
    """The bytes of a ready single-device CPU array, without taking a reference.

    `np.asarray` would keep a view on the array, and a view cancels donation. The result
    is valid only while the array is neither deleted nor donated: use it at once.
    """
    size = array.size * array.dtype.itemsize
    address = array.unsafe_buffer_pointer()
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
