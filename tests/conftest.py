"""Set before the first device is touched: CPU, eight devices, strict promotion."""

import logging
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

from dtft.elastic.etcd_server import EmbeddedEtcd
from dtft.elastic.processes import free_port

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
logging.getLogger("absl").setLevel(logging.WARNING)

# How long an example takes says more about the machine's load than about the code.
settings.register_profile(
    "untimed",
    settings.default,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")


@pytest.fixture(name="free_port")
def a_free_port() -> int:
    """A TCP port on this machine that was free a moment ago."""
    return free_port()


@pytest.fixture
def quick_compiles() -> Iterator[None]:
    """Machine code is made fast, not fast code: what XLA does with a program stays."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    """A private etcd that serves."""
    server = EmbeddedEtcd(tmp_path / "etcd")
    server.start()
    server.wait_ready()
    yield server
    server.stop()
