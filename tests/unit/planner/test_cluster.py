"""Clusters as values, shorthand and files; the catalog's figures."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtft.planner.cluster import catalog
from dtft.planner.cluster.catalog import ALIASES, DEVICES, LINKS
from dtft.planner.cluster.hardware import Curve, DeviceType, Link
from dtft.planner.cluster.topology import Cluster, Level, Pool, cluster_from_text


@pytest.mark.parametrize(
    "text, sizes, device, link",
    [
        ("64x8xH100", [8, 64], "h100", "InfiniBand"),
        ("8xA100", [8], "a100", "NVLink"),
        ("2xh100", [2], "h100", "NVLink"),
        ("h100", [], "h100", None),
        ("1x8xa100-40gb", [8], "a100-40gb", "NVLink"),
        ("512xH100", [8, 64], "h100", "InfiniBand"),
        ("jean-zay", [8], "a100", "NVLink"),
        ("48xjean-zay", [8, 48], "a100", "InfiniBand"),
        ("48x4xjean-zay", [4, 48], "a100", "InfiniBand"),
        ("8x4090", [8], "rtx4090", "PCIe"),
        ("16xcpu", [16], "cpu", "loopback"),
        ("4x2xcpu", [2, 4], "cpu", "loopback"),
        ("16x16xv5e", [16, 16], "tpu-v5e", "ICI"),
        ("8x4xv5e", [4, 8], "tpu-v5e", "ICI"),
        ("4xv5e", [2, 2], "tpu-v5e", "ICI"),
        ("512xv5e", [16, 16, 2], "tpu-v5e", "Ethernet"),
        ("2x16x16xv6e", [16, 16, 2], "tpu-v6e", "Ethernet"),
        ("64xTPU_v5p", [4, 4, 4], "tpu-v5p", "ICI"),
        ("8x16x16xv5p", [8, 16, 16], "tpu-v5p", "ICI"),
        ("v7x", [], "tpu-v7x", None),
        ("8xironwood", [2, 2, 2], "tpu-v7x", "ICI"),
        ("128xv7x", [2, 4, 4, 4], "tpu-v7x", "ICI"),
        ("4x2x4x4xtpu7x", [2, 4, 4, 4], "tpu-v7x", "ICI"),
        ("3x4x2x4x4xv7x", [2, 4, 4, 4, 3], "tpu-v7x", "Ethernet"),
        ("4x8xt4", [8, 4], "t4", "Ethernet"),
        ("4x8xl4", [8, 4], "l4", "Ethernet"),
        ("4x8xl40s", [8, 4], "l40s", "Ethernet"),
        ("4x8xA10G", [8, 4], "a10g", "Ethernet"),
        ("8x5090", [8], "rtx5090", "PCIe"),
        ("2x8xRTX PRO 6000 Blackwell", [8, 2], "rtx-pro-6000", "Ethernet"),
        ("16xgh200", [4, 4], "gh200", "InfiniBand"),
        ("72xgb200", [72], "gb200", "NVLink"),
        ("144xGB300_NVL72", [72, 2], "gb300", "InfiniBand"),
        ("16xmi355x", [8, 2], "mi355x", "InfiniBand"),
    ],
)
def test_shorthand(text: str, sizes: list[int], device: str, link: str | None) -> None:
    pool = Cluster.parse(text).uniform
    assert [level.size for level in pool.levels] == sizes
    assert pool.device.name == device
    assert (pool.levels[-1].link.kind if pool.levels else None) == link


def test_a_torus_that_is_no_ring_has_half_the_bandwidth() -> None:
    ring, line = (Cluster.parse(text).uniform for text in ("16x16xv5e", "4x4xv5e"))
    fast, slow = ring.levels[0].link.curve, line.levels[0].link.curve
    assert fast.bandwidth == 2 * slow.bandwidth
    cube = Cluster.parse("4x4x4xv5p").uniform
    assert cube.levels[0].link == catalog.link("ici-v5p")


def test_devices_of_one_chip_are_closer_than_those_of_neighbours() -> None:
    chip, *torus = Cluster.parse("2x4x4x4xv7x").uniform.levels
    assert chip.name == "chip" and all(level.link == torus[0].link for level in torus)
    port = torus[0].link
    assert chip.link.curve.bandwidth > 5 * port.curve.bandwidth / port.shared_by
    assert port.curve == catalog.link("ici-v5p").curve and port.shared_by == 2


def test_two_pools_are_joined_by_the_slower_network() -> None:
    mixed = Cluster.parse("4x8xH100+4x8xA100")
    assert mixed.num_devices == 64 and mixed.between == catalog.link("ib-200g")
    assert mixed.words == "4x8xh100+4x8xa100"
    with pytest.raises(ValueError, match="unlike pools: one SPMD program"):
        _ = mixed.uniform


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3xcpu", "3xcpu by loopback"),
        ("3x1xcpu", "3x1xcpu by loopback"),
        ("cpu+cpu+cpu", "3x1xcpu by loopback"),
        ("3x1xh100", "3x1xh100 by InfiniBand"),
        ("2x8xh100", "2x8xh100 by NVLink and InfiniBand"),
        ("1x1xcpu", "cpu"),
    ],
)
def test_words_tell_hosts_of_one_device_from_devices_of_one_host(
    text: str, words: str
) -> None:
    pool = Cluster.parse(text).uniform
    assert pool.fabric_words == words
    assert Cluster.parse(pool.words).uniform.fabric_words == words


def test_equal_pools_become_a_level() -> None:
    pool = Cluster.parse("2x8xh100+2x8xh100").uniform
    assert [level.size for level in pool.levels] == [8, 2, 2]


@pytest.mark.parametrize(
    "text, said",
    [
        ("8xh10", "is not in the catalog. Did you mean 'h100'? Known: a100, "),
        ("8xg100", "Did you mean"),
        ("8xmi355", "Did you mean 'mi355x'"),
        ("8xmi250x", "Did you mean 'mi355x'"),
        ("8xv7", "Did you mean 'v7x'"),
        ("8xa10", "'a10' is not in the catalog. Did you mean 'a10g'"),
        ("8xrx4090", "'rx4090' is not in the catalog. Known: a100"),
        ("3xv7x", "a chip of tpu-v7x is 2 devices. Allowed: 1 device, an even number"),
        ("4x4x4xv7x", "sizes of which one is 2, such as 2x4x4x4xtpu-v7x"),
        ("8xzzzzzz", "'zzzzzz' is not in the catalog. Known: a100, a100-40gb"),
        ("12xh100", "12 devices do not fill hosts of 8. Allowed: a multiple of 8; or"),
        ("2x2x8xh100", "has 3 sizes. Allowed: hosts and devices"),
        ("0xh100", "0 is no number of hosts or devices. Allowed: whole"),
        ("2x0xh100", "numbers of 1 or more: [HOSTSx]"),
        ("-1xh100", "-1 is no number of hosts"),
        ("1.5xh100", "1.5 is no number of hosts"),
        ("0xh999", "numbers of 1 or more"),
        ("8 x h100", "cannot be read. Did you mean '8xh100'? Allowed: [HOSTSx]"),
        ("2 x 8 x H100", "Did you mean '2x8xh100'"),
        ("8 h100", "Did you mean '8xh100'"),
        ("8*h100", "Did you mean '8xh100'"),
        ("2x8 dgx-h100", "Did you mean '2x8xdgx-h100'"),
        ("h100x8", "Did you mean '8xh100'"),
        ("a100 80GB:4", "Did you mean '4xa100 80gb'"),
        ("4xa100+8 x h100", "Did you mean '8xh100'"),
        ("8 x h10", "is not in the catalog"),
        ("8xtpu", "Name one: tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e, tpu-v7x."),
        ("GPU", "Name one: a100, a100-40gb"),
        ("4xamd", "Name one: mi300x, mi355x."),
        ("8x", "cannot be read"),
        ("", "cannot be read"),
        ("2x2x16x16xv5e", "is a torus of 2 dimensions"),
        ("300xh100+", "do not fill"),
        ("257xv5e", "257 do not divide into 2 pods"),
        ("/nothing.yaml", "cluster file /nothing.yaml: No such file"),
    ],
)
def test_what_cannot_be_read_is_explained(text: str, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        Cluster.parse(text)
    assert said in str(raised.value)


def test_every_device_type_is_listed_to_who_asks_for_an_unknown_one() -> None:
    with pytest.raises(ValueError) as raised:
        catalog.device_type("h300")
    assert all(name in str(raised.value) for name in DEVICES)


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        *[(f"mi{number}", "rocm") for number in (25, 100, 210, 355, 400)],
        *[(f"v{number}", "tpu") for number in (1, 2, 3, 6, 7, 8)],
        *[("tpu-v8i", "tpu"), ("rx7900", "rocm"), ("rx-4090", "rocm")],
        *[(name, "cuda") for name in ("a10", "h20", "l40", "v10", "gb10", "rtx6000")],
    ],
)
def test_a_name_is_never_answered_with_a_device_of_another_vendor(
    name: str, platform: str
) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is not in the catalog") as raised:
        catalog.device_type(name)
    near = re.search(r"Did you mean '([^']+)'", str(raised.value))
    assert near is None or catalog.device_type(near[1]).platform == platform


KINDS = {
    "NVIDIA GB200": "gb200",
    "NVIDIA GB300": "gb300",
    "NVIDIA B200": "b200",
    "NVIDIA B300": None,
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA GH200 144G HBM3e": None,
    "NVIDIA H200": "h200",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A10G": "a10g",
    "NVIDIA A10": None,
    "NVIDIA L4": "l4",
    "NVIDIA L40": None,
    "NVIDIA L40S": "l40s",
    "Tesla T4": "t4",
    "NVIDIA T4G": None,
    "Tesla V100-SXM2-16GB": "v100",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA GeForce RTX 5090 D": None,
    "NVIDIA GeForce RTX 5090 Laptop GPU": None,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": None,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": None,
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI355X": "mi355x",
    "AMD Instinct MI350X": None,
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5p": "tpu-v5p",
    "TPU v5": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
    "TPU v6e": "tpu-v6e",
    "TPU7x": "tpu-v7x",
    "TPU8i": None,
    "cpu": "cpu",
}


@pytest.mark.parametrize(("kind", "name"), KINDS.items())
def test_a_kind_of_jax_is_one_device_type_or_none(kind: str, name: str | None) -> None:
    found = catalog.device_type_of_kind(kind)
    assert (found and found.name) == name


@pytest.mark.parametrize("name", [*catalog.MACHINES, *ALIASES])
def test_every_machine_parses_and_survives_a_file(name: str, tmp_path: Path) -> None:
    cluster = Cluster.parse(f"2x2x{name}")
    assert cluster.num_devices == 4
    path = tmp_path / "cluster.json"
    path.write_text(cluster.to_json())
    again = Cluster.parse(str(path))
    assert again == cluster and again.fingerprint == cluster.fingerprint


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.name)
def test_figures_of_device_types_are_sane_and_have_a_source(device: DeviceType) -> None:
    assert len(device.source) > 10
    assert device.name in catalog.MACHINES
    assert 5e10 <= device.peak("float32") <= max(device.peak_flops.values()) < 2e16
    assert 2**32 < device.memory_bytes < 2**39
    assert 1e10 <= device.memory_bandwidth < 1e13
    # A second or less to read all of it, thousands of cores nowhere.
    assert device.memory_bytes / device.memory_bandwidth < 1.1
    assert device.cores < 400


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.name)
def test_narrower_dtypes_are_no_slower(device: DeviceType) -> None:
    dtypes = (
        "float64", "float32", "tensorfloat32", "bfloat16", "float8_e4m3fn",
        "float4_e2m1fn",
    )  # fmt: skip
    peaks = [device.peak_flops[name] for name in dtypes if name in device.peak_flops]
    assert peaks == sorted(peaks)
    if device.platform != "cpu":
        assert device.peak("bfloat16") >= device.peak("float32")


GENERATIONS = [
    ("t4", "v100", "a100", "h100", "b200", "gb200"),
    ("t4", "l4", "l40s"),
    ("rtx4090", "rtx5090", "rtx-pro-6000"),
    ("mi300x", "mi355x"),
    ("gh200", "gb200", "gb300"),
]


def test_float32_of_cuda_and_of_tensor_cores_are_two_figures() -> None:
    for device in DEVICES.values():
        narrow = device.peak_flops.get("tensorfloat32")
        if narrow is not None:
            assert device.platform == "cuda" and device.peak("float32") == narrow
            assert device.peak("float32", "highest") <= narrow
    assert DEVICES["v100"].peak("float32") == 15.7e12  # before TensorFloat-32
    assert DEVICES["h100"].peak("float32", "highest") == pytest.approx(66.9e12)


@pytest.mark.parametrize("names", GENERATIONS)
def test_faster_generations_are_faster(names: tuple[str, ...]) -> None:
    for dtype in ("float16", "bfloat16"):
        peaks = [DEVICES[name].peak(dtype) for name in names]
        assert peaks == sorted(peaks)


def test_peaks_of_tpus_are_those_of_their_documentation() -> None:
    tpus = ("tpu-v5e", "tpu-v4", "tpu-v5p", "tpu-v6e", "tpu-v7x")
    assert [DEVICES[n].peak("bfloat16") for n in tpus] == [
        197e12,
        275e12,
        459e12,
        918e12,
        1153.5e12,
    ]
    chip = [2 * figure for figure in (DEVICES["tpu-v7x"].memory_bandwidth, 96)]
    assert chip == [7380e9, 192]


@pytest.mark.parametrize("name", LINKS)
def test_figures_of_links_are_sane_and_have_a_source(name: str) -> None:
    port = LINKS[name]
    assert len(port.source) > 10
    assert 1e-7 < port.curve.latency_s < 1e-3
    assert 1e9 <= port.curve.bandwidth / port.shared_by * 8 <= 1e13
    assert port.curve.half_bytes < 1e7


@pytest.mark.parametrize("name", catalog.MACHINES)
def test_machines_are_of_the_catalog_and_have_a_source(name: str) -> None:
    found = catalog.machine(name)
    assert found.device in DEVICES and found.source
    for port in (found.inside, found.outside, found.host_link):
        assert not port or port in LINKS
    inside, outside = LINKS[found.inside], LINKS[found.outside]
    slower = outside.curve.bandwidth / outside.shared_by
    assert (
        inside.curve.bandwidth / inside.shared_by > slower or "example" in found.source
    )


def test_only_examples_lack_kernels() -> None:
    listed = {d.name: d.kernels for d in DEVICES.values() if d.kernels is not None}
    lacking = {name for name, kernels in listed.items() if "matmul" not in kernels}
    assert lacking == {"fpga-u280", "asic-activation", "dpu-bluefield3"}
    assert "convolution" in listed["fpga-u280"]


YAML = """
name: lab
pools:
  - shorthand: 2x8xh100
  - device: a100
    levels:
      - {size: 4, link: nvlink-3, name: devices}
      - size: 2
        link: {kind: Ethernet, latency_s: 20e-6, bandwidth: 12.5e9, shared_by: 4}
    host_link: pcie-4
    host_memory_bytes: 64e9
  - device:
      name: mine
      platform: other
      peak_flops: {float32: 1e12}
      memory_bytes: 8e9
      memory_bandwidth: 1e11
      kernels: [convolution]
      efficiency: {e0: 0.5}
between: ethernet-100g
"""


def test_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(YAML)
    cluster = Cluster.parse(str(path))
    assert [pool.num_devices for pool in cluster.pools] == [16, 8, 1]
    second, third = cluster.pools[1:]
    assert second.levels[1].link.curve == Curve(latency_s=20e-6, bandwidth=12.5e9)
    assert second.host_memory_bytes == 64_000_000_000
    assert second.host_link == catalog.link("pcie-4")
    assert third.device.efficiency.e0 == 0.5
    assert third.device.kernels == {"convolution"}
    assert cluster_from_text(cluster.to_json()) == cluster


OF_DEVICE = "{{pools: [{{device: {{name: mine, {}}}}}]}}"
OF_LINK = (
    "{{pools: [{{device: a100, levels: [{{size: 4, link: {{kind: Ethernet, latency_s: "
    "1e-5, bandwidth: 1e9, {}}}}}]}}]}}"
)


@pytest.mark.parametrize(
    "text, said",
    [
        ("pools: [{device: h100, hosts: 4}]", "pools[0].hosts does not exist. Allowed"),
        ("pool: []", "cluster.pool does not exist. Allowed: pools"),
        ("pools: [{device: h101}]", "Did you mean 'h100'"),
        ("pools: [{levels: []}]", "pools[0].device is missing"),
        ("pools: 3", "pools=3. Allowed: a list"),
        (
            "pools: [{device: h100, levels: [{size: 1.5, link: nvlink-4}]}]",
            "size=1.5 is no whole number",
        ),
        ("- 1", "Allowed: a mapping"),
        ("pools: [{device: h100}, {device: h100}]", "several and the link between"),
        ("pools: [{device: h100, levels: [{size: 2}]}]", "levels[0].link is missing"),
        (
            "pools: [{device: h100, levels: [{size: 2, link: {kind: NVLink}}]}]",
            "levels[0].link.curve.latency_s is missing",
        ),
        (
            "pools: [{device: h100, levels: [{size: 2, link: nvlink-9}]}]",
            "link 'nvlink-9' is not in the catalog. Did you mean",
        ),
        (
            "pools: [{device: h100, levels: [{size: two, link: nvlink-4}]}]",
            "pools[0].levels[0]: size='two' is no number. Allowed: a whole number",
        ),
        (
            "pools: [{device: h100, levels: [{size: 2, link: {kind: Ethernet, curve: "
            "{latency_s: 1e-5, bandwidth: 1e9}, bandwidth: 2e9}}]}]",
            "levels[0].link has `curve` and beside it bandwidth",
        ),
        ("pools: [{shorthand: h100, device: h100}]", "stands alone"),
        ("{", "neither YAML nor JSON"),
        ("pools: []", "0 pools"),
        (
            "name: a\npools:\n - device: h100\n   levels: []\n   device: a100\n",
            "the key device stands more than once in the mapping that begins in line 3",
        ),
        (
            "{pools: [{device: a100, levels: [{size: 4, link: {kind: Ethernet, "
            "latency_s: 1e-5, bandwidth: 1e9, meeting: {2: 1e-3, 2: 2e-3}}}]}]}",
            "the key 2 stands more than once in the mapping that begins in line 1",
        ),
        (
            "{pools: [{device: a100, levels: [{size: 4, link: {kind: Ethernet, "
            "latency_s: 1e-5, bandwidth: 1e9, meeting: {2: 1e-3, '02': 2e-3}}}]}]}",
            "the key 2 stands more than once in pools[0].levels[0].link.meeting",
        ),
        (
            "{pools: [{device: h100, levels: null}]}",
            "pools[0].levels=None. Allowed: a list of levels, innermost first.",
        ),
        (OF_DEVICE.format("peak_flops: {float32: null}"), "float32=None is no number"),
        (OF_DEVICE.format("peak_flops: 5"), "device.peak_flops=5. Allowed: a mapping"),
        (OF_DEVICE.format("kernels: 5"), "device.kernels=5. Allowed: a list of"),
        (OF_DEVICE.format("kernels: gather"), "device.kernels='gather'. Allowed: a li"),
        (OF_DEVICE.format("tile: 5"), "pools[0].device.tile=5. Allowed: a list of thr"),
        (OF_DEVICE.format("tile: [1, 2]"), "tile=[1, 2]. Allowed: a list of three"),
        (OF_LINK.format("measured: 5"), "link.measured=5. Allowed: a mapping from"),
        (OF_LINK.format("meeting: 5"), "levels[0].link.meeting=5. Allowed: a mapping"),
        (
            OF_LINK.format("measured: {all_reduce: 5}"),
            "link.measured.all_reduce=5. Allowed: a mapping from numbers of devices",
        ),
        (
            OF_LINK.format("meeting: {2.5: 1e-3}"),
            "a number of devices in pools[0].levels[0].link.meeting=2.5 is no whole",
        ),
    ],
)
def test_a_file_that_is_wrong_says_where(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yml"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        Cluster.parse(str(path))
    assert said in str(raised.value) and "cluster.yml" in str(raised.value)


def places(items: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a document, with each key or position in it."""
    keys = items if isinstance(items, dict) else range(len(items))
    for key in list(keys):
        yield items, key
        if isinstance(items[key], dict | list):
            yield from places(items[key])


@pytest.mark.parametrize(
    "wrong", [None, 5, pytest.param(10**400, id="large"), "x", [None], {2.5: 5}]
)
def test_a_value_of_another_type_is_refused_or_read_wherever_it_stands(
    wrong: Any, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    items = json.loads(cluster_from_text(YAML).to_json())
    del items["pools"][0], items["pools"][0]["levels"][0]
    link = items["pools"][0]["levels"][0]["link"]
    link |= {"measured": {"all_reduce": {"2": link["curve"]}}}
    link |= {"meeting": {"2": 1e-3}, "ahead": {"2": 0.5}}
    errors = {"compute": 0.1, "collectives": 0.2}
    items["pools"][1]["accuracy"] = {"errors": errors, "scales": {"compute": 1.0}}
    for inside, key in places(items):
        right, inside[key] = inside[key], wrong
        path.write_text(yaml.safe_dump(items))
        try:
            assert Cluster.parse(str(path)).words
        except ValueError as error:
            assert "cluster.yaml" in str(error)
        inside[key] = right
    path.write_text(yaml.safe_dump(items))
    assert len(Cluster.parse(str(path)).pools) == 2


def test_a_key_twice_in_json_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(Cluster.parse("8xa100").to_json()[:-1] + ', "name": "mine"}')
    with pytest.raises(ValueError, match="cluster.json: the key name stands more than"):
        Cluster.parse(str(path))


def test_what_meeting_takes_may_stand_in_a_file() -> None:
    text = (
        "{pools: [{device: a100, levels: [{size: 4, link: {kind: Ethernet, latency_s: "
        "1e-5, bandwidth: 1e9, meeting: {2: 1e-3, '4': 2e-3}}}]}]}"
    )
    link = cluster_from_text(text).uniform.levels[0].link
    assert link.meeting == {2: 1e-3, 4: 2e-3}
    with pytest.raises(ValueError, match=r"meeting.2='slow' is no number"):
        cluster_from_text(text.replace("1e-3,", "slow,"))


def test_what_computing_hides_may_stand_in_a_file() -> None:
    text = (
        "{pools: [{device: a100, levels: [{size: 4, link: {kind: Ethernet, latency_s: "
        "1e-5, bandwidth: 1e9, ahead: {2: 0.5}}}]}]}"
    )
    assert cluster_from_text(text).uniform.levels[0].link.ahead == {2: 0.5}
    with pytest.raises(ValueError, match=r"ahead=\{2: 1.5\} of a Ethernet link"):
        cluster_from_text(text.replace("0.5", "1.5"))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match=r"cluster.yaml is no text. Allowed: YAML or"):
        Cluster.parse(str(path))


def test_the_fingerprint_is_of_figures_not_of_names() -> None:
    one = Cluster.parse("2x8xh100")
    assert replace(one, name="other").fingerprint == one.fingerprint
    pool = one.uniform
    faster = replace(pool.device, memory_bandwidth=pool.device.memory_bandwidth * 2)
    changed = Cluster(pools=(replace(pool, device=faster),))
    assert changed.fingerprint != one.fingerprint
    assert Cluster.parse("dgx-h100").fingerprint == Cluster.parse("8xh100").fingerprint


def test_values_that_nothing_has_are_refused() -> None:
    curve = Curve(latency_s=0, bandwidth=1)
    with pytest.raises(ValueError, match="bandwidth=0"):
        Curve(latency_s=0, bandwidth=0)
    with pytest.raises(ValueError, match="'Token' is no kind of link. Allowed: NVLink"):
        Link(kind="Token", curve=curve, source="")  # pyright: ignore
    with pytest.raises(ValueError, match="shared_by=0"):
        Link(kind="UPI", curve=curve, shared_by=0, source="")
    with pytest.raises(ValueError, match="are no collectives"):
        Link(kind="UPI", curve=curve, source="", measured={"x": {8: curve}})  # pyright: ignore
    with pytest.raises(ValueError, match="size=0"):
        Level(size=0, link=Link(kind="UPI", curve=curve, source=""))
    with pytest.raises(ValueError, match="overlap_kappa"):
        replace(DEVICES["cpu"].efficiency, overlap_kappa=0.5)
    with pytest.raises(ValueError, match="memory_bytes=0"):
        replace(DEVICES["cpu"], memory_bytes=0)
    with pytest.raises(ValueError, match="one pool, or several"):
        Cluster(pools=(Pool(device=DEVICES["cpu"]), Pool(device=DEVICES["h100"])))


def test_json_is_plain() -> None:
    items = json.loads(Cluster.parse("8xfpga-u280").to_json())
    assert items["pools"][0]["device"]["kernels"] == [
        "convolution", "elementwise", "layout",
    ]  # fmt: skip


@pytest.mark.parametrize("text", [3, None])
def test_what_is_no_text_is_no_cluster(text: Any) -> None:
    with pytest.raises(ValueError, match="is no text, but a .*Allowed: such as"):
        Cluster.parse(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("8xB200-SXM", "'b200'?"),
        ("8xa100-40gb-sxm4", "'a100-40gb'?"),
        ("2xnvl72", "'gb200-nvl72' or 'gb300-nvl72'?"),
    ],
)
def test_a_longer_or_shorter_name_is_answered_with_those_that_it_has(
    text: str, meant: str
) -> None:
    with pytest.raises(ValueError, match=f"Did you mean {re.escape(meant)}"):
        Cluster.parse(text)


def test_figures_that_are_no_numbers_are_refused() -> None:
    device = "{name: x, platform: cuda, memory_bytes: 8e10, memory_bandwidth: .nan, "
    text = "pools: [{device: " + device + "peak_flops: {float32: 1e13}}}]"
    with pytest.raises(ValueError, match="memory_bandwidth=nan"):
        cluster_from_text(text)
