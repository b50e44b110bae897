"""The cluster that JAX's devices are, from attributes alone."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import pytest

from dtft.planner.cluster.catalog import DEVICES
from dtft.planner.cluster.topology import Cluster, Pool


@dataclass(frozen=True, kw_only=True)
class FoundDevice:
    """What JAX says of a device."""

    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"
    process_index: int = 0
    stats: dict[str, Any] = field(default_factory=dict)

    def memory_stats(self) -> dict[str, Any]:
        return self.stats


@dataclass(frozen=True, kw_only=True)
class FoundTpu(FoundDevice):
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    coords: tuple[int, int, int] = (0, 0, 0)
    slice_index: int = 0
    core_on_chip: int = 0


GIB = 2**30


def parsed(text: str) -> Pool:
    return Cluster.parse(text).uniform


def test_devices_of_hosts() -> None:
    devices = [FoundDevice(process_index=n // 8) for n in range(32)]
    pool = Cluster.from_devices(devices, host_memory_bytes=1024 * GIB).uniform
    assert [level.size for level in pool.levels] == [8, 4]
    assert pool.device == DEVICES["h100"] and pool.host_memory_bytes == 128 * GIB
    assert pool.levels == parsed("4x8xh100").levels


def test_the_memory_that_a_device_says_it_has_counts() -> None:
    device = FoundDevice(stats={"bytes_limit": 60 * GIB})
    pool = Cluster.from_devices([device], host_memory_bytes=GIB).uniform
    assert pool.device.memory_bytes == 60 * GIB and pool.levels == ()


def test_devices_of_a_torus() -> None:
    devices = [
        FoundTpu(coords=(x, y, 0), process_index=(x // 2 + y) // 2)
        for y in range(8)
        for x in range(4)
    ]
    devices = [replace(d, process_index=n // 8) for n, d in enumerate(devices)]
    pool = Cluster.from_devices(devices, host_memory_bytes=GIB).uniform
    assert [level.size for level in pool.levels] == [4, 8]
    assert pool.device.name == "tpu-v5e" and pool.levels[0].link.kind == "ICI"


@pytest.mark.parametrize("texts", [("8xv5e", "2x4xv5e", "4x2xv5e"), ("3x2x4xv5e",)])
def test_the_same_torus_has_the_same_words_and_levels(texts: tuple[str, ...]) -> None:
    num_slices = Cluster.parse(texts[0]).num_devices // 8
    devices = [
        FoundTpu(coords=(x, y, 0), process_index=number, slice_index=number)
        for number in range(num_slices)
        for y in range(4)
        for x in range(2)
    ]
    found = Cluster.from_devices(devices, host_memory_bytes=GIB).uniform
    for text in texts:
        assert parsed(text).fabric_words == found.fabric_words
        assert parsed(text).levels == found.levels
    assert parsed(found.words).levels == found.levels


def test_two_devices_of_each_chip_are_the_innermost_level() -> None:
    devices = [
        FoundTpu(
            device_kind="TPU7x",
            coords=(x, y, 0),
            core_on_chip=core,
            process_index=y // 2,
        )
        for y in range(4)
        for x in range(2)
        for core in range(2)
    ]
    pool = Cluster.from_devices(devices, host_memory_bytes=960 * GIB).uniform
    assert [(level.size, level.name) for level in pool.levels][0] == (2, "chip")
    assert pool.num_devices == 16 and pool.host_link is None
    assert pool.levels == parsed("2x2x4xv7x").levels == parsed(pool.words).levels
    half = [device for device in devices if device.core_on_chip == 0]
    pool = Cluster.from_devices(half, host_memory_bytes=GIB).uniform
    assert [level.size for level in pool.levels] == [2, 4]


def test_devices_of_cpu_share_the_memory_of_the_machine() -> None:
    cpu = FoundDevice(platform="cpu", device_kind="cpu")
    pool = Cluster.from_devices([cpu] * 8, host_memory_bytes=16 * GIB).uniform
    assert pool.device.memory_bytes == 2 * GIB and pool.host_link is None
    processes = [replace(cpu, process_index=n) for n in range(4)]
    pool = Cluster.from_devices(processes, host_memory_bytes=16 * GIB).uniform
    assert [(level.size, level.name) for level in pool.levels] == [(4, "hosts")]
    assert pool.device.memory_bytes == 4 * GIB
    assert pool.words == "4x1xcpu" and pool.levels == parsed("4x1xcpu").levels
    one = Cluster.from_devices([cpu] * 4, host_memory_bytes=16 * GIB).uniform
    assert one.fabric_words == parsed("4xcpu").fabric_words != pool.fabric_words


def test_the_devices_of_this_process() -> None:
    cluster = Cluster.from_devices(jax.devices())
    assert cluster.num_devices == len(jax.devices())
    assert cluster.uniform.device.name == "cpu"


@pytest.mark.parametrize(
    "devices, said",
    [
        ([], "devices is empty"),
        (
            [FoundDevice(device_kind="NVIDIA H300")],
            "'NVIDIA H300' is not in the catalog",
        ),
        ([FoundDevice(), FoundDevice(device_kind="NVIDIA B200")], "of 2 types"),
        (
            [FoundDevice(), FoundDevice(), FoundDevice(process_index=1)],
            "unlike numbers of devices (2 x 0, 1 x 1)",
        ),
    ],
)
def test_devices_that_make_no_cluster(devices: list[Any], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        Cluster.from_devices(devices)
    assert said in str(raised.value)
