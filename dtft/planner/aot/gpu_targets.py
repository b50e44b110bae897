"""Descriptions of GPUs for XLA's compiler, to compile on a machine without a GPU.

The figures, except the memory of the H200, are from openxla/xla,
`xla/backends/gpu/target_config/specs`. The compiler is JAX's CUDA plugin, in the
packages of the extra `aot`. The packages are installed in the Python environment, or
in the environment's folder `aot` (by `make test`). A plugin in the environment itself
prints a traceback in every JAX process that does not set JAX_PLATFORMS; a plugin in the
folder does not. A compiled program shows communication, memory and kernels, but no
times.
"""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
INSTALL = (
    "pip install 'dtft[aot]' (jax-cuda13-plugin and jax-cuda13-pjrt; Linux, no CUDA "
    "and no driver needed)"
)

_COMMON = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_memory}
  shared_memory_per_block_optin: {shared_memory_optin}
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2_cache}
  device_memory_size: {memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{description}"
"""
_HOPPER = {
    "shared_memory": 233472,
    "shared_memory_optin": 232448,
    "cores": 132,
    "fpus": 128,
    "clock_ghz": 1.98,
    "l2_cache": 52428800,
    "capability": 9,
}
_AMPERE = {
    "shared_memory": 167936,
    "shared_memory_optin": 166912,
    "cores": 108,
    "fpus": 64,
    "clock_ghz": 1.41,
    "l2_cache": 41943040,
    "capability": 8,
}


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """A GPU that XLA can compile for."""

    name: str
    memory_bytes: int
    config: str
    """Text of XLA's GpuTargetConfigProto."""
    platform: str = "cuda"
    """JAX's name of the platform."""


def _target(name: str, description: str, **figures: Any) -> GpuTarget:
    config = _COMMON.format(description=description, **figures)
    return GpuTarget(name=name, memory_bytes=figures["memory"], config=config)


GPU_TARGETS: Mapping[str, GpuTarget] = {
    target.name: target
    for target in (
        _target(
            "a100",
            "NVIDIA A100-SXM4-80GB",
            memory=85_100_068_864,
            bandwidth=2_039_040_000_000,
            **_AMPERE,
        ),
        _target(
            "h100",
            "NVIDIA H100 80GB HBM3",
            memory=84_942_979_072,
            bandwidth=3_352_320_000_000,
            **_HOPPER,
        ),
        _target(
            "h200",
            "NVIDIA H200",
            memory=141_000_000_000,
            bandwidth=4_800_000_000_000,
            **_HOPPER,
        ),
    )
}


def gpu_target(name: str) -> GpuTarget:
    """Looks up a GPU by name.

    Raises:
        ValueError: the name is not in `GPU_TARGETS`.
    """
    if name not in GPU_TARGETS:
        raise ValueError(
            f"target={name!r} is no GPU to compile for. Allowed: "
            f"{', '.join(GPU_TARGETS)}; or cpu, which needs no extra package."
        )
    return GPU_TARGETS[name]


def is_gpu_compiler_installed() -> bool:
    """Returns whether XLA's GPU compiler is installed, without loading it."""
    return any(_found(plugin) for plugin in PLUGINS)


def load_gpu_compiler() -> None:
    """Registers XLA's GPU compiler with JAX in this process.

    Must be called once only: JAX reports an error on a second registration.

    Raises:
        ImportError: the compiler is not installed; the message says how to install it.
    """
    plugin = next(filter(_found, PLUGINS), None)
    if plugin is None:
        raise ImportError(
            f"XLA's GPU compiler is not installed, here or in {_folders()[-1]}. "
            f"Install it: {INSTALL}."
        )
    # Keeps the plugin from looking for CUDA, if JAX_PLATFORMS is not cpu.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    sys.path.append(_folders()[-1])
    try:
        importlib.import_module(plugin).initialize()
    finally:
        sys.path.pop()
        del os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"]


def fake_gpus(gpu: GpuTarget, count: int, per_host: int = 8) -> Sequence[Any]:
    """Makes `count` devices of a GPU type to compile for, without real GPUs.

    Each host has `per_host` devices. If `count` is smaller, one host has all devices.

    Raises:
        ImportError: the compiler is not installed; the message says how to install it.
        ValueError: `count` is above `per_host` and not a multiple of `per_host`.
    """
    from jax.experimental import topologies

    _register()
    hosts, local = (1, count) if count <= per_host else (count // per_host, per_host)
    if hosts * local != count:
        raise ValueError(
            f"count={count} GPUs are no whole hosts of per_host={per_host}. Give a "
            "multiple of it, or at most one host."
        )
    return topologies.get_topology_desc(
        platform="cuda", target_config=gpu.config, topology=f"1x{hosts}x{local}"
    ).devices


def _folders() -> list[str]:
    return [*sys.path, str(Path(sys.prefix) / "aot")]


def _found(plugin: str) -> bool:
    parts = plugin.split(".")
    return any(Path(folder, *parts).is_dir() for folder in _folders())


@cache
def _register() -> None:
    import jax

    jax.devices()  # registers a plugin that is installed among the other packages
    if not _is_registered():
        load_gpu_compiler()


def _is_registered() -> bool:
    from jax.experimental import topologies

    try:
        topologies.get_topology_desc(
            platform="cuda", target_config=GPU_TARGETS["h200"].config, topology="1x1x1"
        )
    except NotImplementedError:
        return False
    return True
