"""Compiles for a GPU that is not there, with XLA's own GPU compiler.

Needs the two packages of the extra `aot`, in this environment or in the folder `aot`
inside of it, where `make test` puts them: installed among the others, the plugin would
print a traceback in every JAX process that does not set JAX_PLATFORMS. Proves the
structure of a program (kernels, copies, communication, memory), never a time.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

PLUGIN = "jax_plugins.xla_cuda13"

# The figures of openxla/xla, xla/backends/gpu/target_config/specs/h200.txtpb.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 141000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""


@cache
def devices(count: int) -> Sequence[Any]:
    """`count` H200s of one host, to compile for; skips the test if that cannot be."""
    _register()
    return topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology=f"1x1x{count}"
    ).devices


def mesh(**sizes: int) -> Mesh:
    """A mesh of H200s with axes of these names and sizes."""
    shape = tuple(sizes.values())
    grid = np.asarray(devices(int(np.prod(shape)))).reshape(shape)
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def on_one(tree: Any) -> Any:
    """The shapes of `tree`, on one H200."""
    sharding = SingleDeviceSharding(devices(1)[0])
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree
    )


@cache
def _register() -> None:
    jax.devices()  # what is installed registers itself here, and only once
    try:
        topologies.get_topology_desc(
            platform="cuda", target_config=H200, topology="1x1x1"
        )
    except NotImplementedError:
        _load()


def _load() -> None:
    folder = str(Path(sys.prefix) / "aot")
    sys.path.append(folder)
    # The plugin otherwise looks for a CUDA installation, unless JAX_PLATFORMS is cpu.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    try:
        importlib.import_module(PLUGIN).initialize()
    except ImportError:
        pytest.skip(
            "jax-cuda13-plugin and jax-cuda13-pjrt (extra aot) are not installed: "
            f"no GPU compiler here or in {folder}. `make test` installs them."
        )
    finally:
        sys.path.remove(folder)
        del os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"]
