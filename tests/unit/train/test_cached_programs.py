"""Programs in JAX's compilation cache: one entry for all devices, never half of one.

`tests/conftest.py` calls `share_cached_programs` for all tests.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import lru_cache
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft import _jax_internals
from tests.support.cache_hits import cache_hits


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """JAX's cache in an empty directory."""
    names = (
        "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
    )  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
        jax.config.update(name, value)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def product(devices: list[Any], x: np.ndarray) -> np.ndarray:
    """Sums the squares of rows that some devices share."""
    mesh = Mesh(np.array(devices).reshape(2, 2), ("a", "b"))
    rows = NamedSharding(mesh, PartitionSpec(("a", "b")))
    program = jax.jit(
        lambda x: jnp.cumsum(x @ x.T, axis=0), in_shardings=rows, out_shardings=rows
    )
    made = program(jax.device_put(x, rows))
    assert made.sharding.mesh.devices.tolist() == mesh.devices.tolist()
    return np.asarray(made)


def test_one_entry_serves_all_devices(cache: Path) -> None:
    devices = jax.devices()
    assert len(devices) >= 8
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    first = product(devices[:4], x)
    made = {path.name for path in cache.iterdir()}
    assert any(name.startswith("jit__lambda") for name in made)
    with cache_hits() as found:
        for some in (devices[4:8], [devices[i] for i in (5, 1, 3, 2)]):
            np.testing.assert_array_equal(product(some, x), first)
    assert len(found) >= 2
    assert {path.name for path in cache.iterdir()} == made


def test_another_processor_has_entries_of_its_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.ones((8, 8), np.float32)
    product(jax.devices()[:4], x)
    num = len(list(cache.iterdir()))
    monkeypatch.setattr(_jax_internals, "_processor", lambda: "another")
    with cache_hits() as found:
        product(jax.devices()[4:8], x)
    assert not found and len(list(cache.iterdir())) > num


def test_an_entry_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    entries = lru_cache.LRUCache(str(tmp_path), max_size=-1)
    entries.put("one", b"first")
    entries.put("one", b"second")  # the same program, of another process
    assert entries.get("one") == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["one-cache"]


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    entries = lru_cache.LRUCache(str(tmp_path), max_size=-1)
    monkeypatch.setattr(type(entries.path), "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        entries.put("one", b"first")
    assert not list(tmp_path.iterdir()) and entries.get("one") is None


def test_a_cache_with_a_limit_keeps_it(tmp_path: Path) -> None:
    pytest.importorskip("filelock")
    entries = lru_cache.LRUCache(str(tmp_path), max_size=10)
    entries.put("one", b"123456")
    entries.put("two", b"123456")
    assert entries.get("one") is None and entries.get("two") == b"123456"
