"""All use of private JAX API, behind a version check.

The coordination service as a process of its own (so that no trainer is special), a
trainer's connection to it and what is told through it, the address of a CPU array's
buffer, the compilation of a module that another process lowered, and which arguments a
loop carries. Nothing else in dtft may import ``jax._src`` or ``jaxlib``'s private
modules.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

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


def told_by_first(key: str, text: str, timeout_s: float) -> str:
    """The text that process 0 of the world has; it may take its time to make it.

    Through the coordination service: a collective would give up after seconds.

    Args:
        key: what is told, once in the life of the service.
        text: of process 0; that of others does not count.
        timeout_s: how long the others wait.
    """
    check_version()
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        return text
    if distributed.global_state.process_id == 0:
        client.key_value_set(key, text, allow_overwrite=True)
        return text
    return client.blocking_key_value_get(key, math.ceil(1e3 * timeout_s))


def cpu_buffer(array: jax.Array) -> memoryview:
    """The bytes of a ready single-device CPU array, without taking a reference.

    `np.asarray` would keep a view on the array, and a view cancels donation. The result
    is valid only while the array is neither deleted nor donated: use it at once.
    """
    size = array.size * array.dtype.itemsize
    address = array.unsafe_buffer_pointer()
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def compile_module(
    module: bytes, devices: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Compiles what `jit` lowered, as `jit` would, for devices of one's choice.

    Args:
        module: StableHLO with shardings, as MLIR bytecode of this version of JAX.
        devices: in the order of the mesh; those of a topology need not exist.
        options: of XLA, such as `{"xla_backend_optimization_level": 0}`.

    Returns:
        XLA's executable, with `hlo_modules()` and `get_compiled_memory_stats()`.
    """
    check_version()
    from jax._src.interpreters import mlir
    from jax._src.lib import (
        _jax,  # pyright: ignore[reportPrivateImportUsage]
        xla_client,  # pyright: ignore[reportPrivateImportUsage]
    )
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax.extend.backend import get_compile_options

    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        settings = get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.asarray(devices, dtype=object).reshape(1, -1),
            env_options_overrides=dict(options),
            backend=devices[0].client,
        )
        arguments, results = _is_placed(parsed, ir)
        build = settings.executable_build_options
        build.allow_spmd_sharding_propagation_to_parameters = [
            not placed for placed in arguments
        ]
        build.allow_spmd_sharding_propagation_to_output = [
            not placed for placed in results
        ]
        where = xla_client.DeviceList(tuple(devices))
        client = devices[0].client
        only = isinstance(client, _jax.CompileOnlyPyClient)
        compile_ = client.compile if only else client.compile_and_load
        return compile_(parsed, executable_devices=where, compile_options=settings)


def scan_arguments(eqn: Any) -> tuple[int, int]:
    """How many arguments of a `scan` are constants, and how many the carry has.

    They come first, in this order. Newer versions of JAX have no numbers of them among
    the parameters, but the trees of the arguments (0.12: `ft_in`).
    """
    if "ft_in" in eqn.params:
        constants, carry, _ = eqn.params["ft_in"].unpack()
        return len(constants), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def _is_placed(module: Any, ir: Any) -> tuple[list[bool], list[bool]]:
    """Of each argument and result of a module, whether its sharding is given."""
    main = next(
        op for op in module.body.operations if op.attributes["sym_name"].value == "main"
    )

    def placed(attributes: str, count: int) -> list[bool]:
        if attributes not in main.attributes:
            return [False] * count
        return [
            "sdy.sharding" in one or "mhlo.sharding" in one
            for one in ir.ArrayAttr(main.attributes[attributes])
        ]

    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    return (
        placed("arg_attrs", len(kind.inputs)),
        placed("res_attrs", len(kind.results)),
    )
