"""Set before the first device is touched: CPU, eight devices, strict promotion.

Programs are compiled fast (`support/fast_compilation.py`), and each of them once for
all processes of tests. `make drills` runs programs as users compile them.
"""

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

from dtft._jax_internals import share_cached_programs
from dtft.elastic.processes import free_port
from dtft.elastic.store.embedded import EmbeddedEtcd
from tests.support.fast_compilation import SWITCH, with_fast_flags, without_fast_flags

os.environ["XLA_FLAGS"] = with_fast_flags(os.environ.get("XLA_FLAGS", ""))
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
logging.getLogger("absl").setLevel(logging.WARNING)
# Tracing makes many objects, and jax keeps many: at the usual intervals the garbage
# collector takes 2 to 9 % of the processor time. Programs are in cycles: not "never".
gc.set_threshold(10_000, 20, 10)

PROGRAMS = "DTFT_TEST_PROGRAMS"
"""Environment variable with the directory of compiled programs, for workers."""

# How long an example takes says more about the machine's load than about the code.
settings.register_profile(
    "untimed",
    settings.default,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores, as many tests wait for processes or leases."""
    return min(4, len(os.sched_getaffinity(0)) + 1)


def pytest_configure(config: pytest.Config) -> None:
    """Compiled programs are kept until the tests end; all workers share them."""
    directory = os.environ.get(PROGRAMS)
    if directory is None:  # not a worker
        directory = tempfile.mkdtemp(prefix="dtft-test-programs-")
        os.environ[PROGRAMS] = directory
        config.add_cleanup(_forget_programs)
    jax.config.update("jax_compilation_cache_dir", directory)
    share_cached_programs()


def pytest_collection_finish() -> None:
    """From now on the garbage collector leaves out modules and tests."""
    gc.collect()
    gc.freeze()


def _forget_programs() -> None:
    shutil.rmtree(os.environ.pop(PROGRAMS))


@pytest.fixture
def fast_programs() -> Iterator[None]:
    """Fast code instead of code that is made fast: for tests that compute for long."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def default_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts compile programs as users compile them."""
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setenv("XLA_FLAGS", without_fast_flags(os.environ["XLA_FLAGS"]))


@pytest.fixture
def with_float64() -> Iterator[None]:
    """Arrays are float64, in threads too: two ways of computing round alike."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(name="free_port")
def a_free_port() -> int:
    """A TCP port on this machine that was free a moment ago."""
    return free_port()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    """A private etcd that serves."""
    server = EmbeddedEtcd(tmp_path / "etcd")
    server.start()
    server.wait_ready()
    yield server
    server.stop()
