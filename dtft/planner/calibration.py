"""Calibrations: measured scalars of a device type and fabric, their file, their use.

Decides what a calibration may be applied to and how exact it is. Must not know how
anything is measured (`dtft.train.calibrate`) or fitted (`calibration_fit`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtft.planner import versioned
from dtft.planner.accuracy import UNCALIBRATED, Accuracy
from dtft.planner.cluster import Cluster, Level, Pool
from dtft.planner.device import Efficiency
from dtft.planner.links import Link

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What `dtft calibrate` found on one type of device in one fabric.

    Never carry one to another cluster: scalars that rank plans well on one rank them
    badly on another (reference section 3).
    """

    device: str
    """Name of the device type, as in the catalog."""
    fabric: tuple[str, ...]
    """`link_key` of each level measured, innermost first."""
    num_devices: int
    """Devices that were busy while it was measured."""
    software: str
    """Versions that it holds for, such as `jax 0.10.2`."""
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    efficiency: Efficiency
    links: Mapping[str, Link] = field(default_factory=dict)
    """`link_key` of the catalog's link to the measured one."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Scalar to its relative standard error."""
    residuals: Mapping[str, float] = field(default_factory=dict)
    """What was fitted (`matmul`, `memory`, ...) to its median relative error."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Level 2: term of a prediction to the factor that past runs gave."""
    num_runs: int = 0
    """Level 2: past runs behind `scales`."""

    @property
    def level(self) -> int:
        """1 measured, 2 also fitted to past runs (0, the catalog, has no file)."""
        return 2 if self.scales else 1

    @property
    def source(self) -> str:
        """Where the constants come from, in a line."""
        runs = f", {self.num_runs} past runs" if self.num_runs else ""
        what = f"{self.num_devices} x {self.device}, {self.software}{runs}"
        return f"calibration level {self.level} ({what})"

    @property
    def term_errors(self) -> Mapping[str, float]:
        """Relative error of a prediction's terms; see `Accuracy.interval_s`.

        Past runs, where there are some, say it of the whole step.
        """
        if self.num_runs:
            return dict.fromkeys(UNCALIBRATED, self.residuals["runs"])
        matmul = self.residuals.get("matmul", UNCALIBRATED["compute"])
        shared = [v for k, v in self.residuals.items() if k.startswith("collectives")]
        return {
            "compute": max(matmul, self.residuals.get("memory", 0.0)),
            "collectives": max(shared, default=UNCALIBRATED["collectives"]),
        }

    def to_json(self) -> str:
        """The calibration as JSON, versioned."""
        return versioned.write(self, SCHEMA)

    @classmethod
    def read(cls, path: str | Path) -> "Calibration":
        """The calibration of a file that `dtft calibrate --out` wrote.

        Raises:
            ValueError: it cannot be read, or is not a calibration.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except OSError as error:
            raise ValueError(
                f"calibration {path} cannot be read ({error.strerror}). Allowed: a "
                "file that `dtft calibrate --out` wrote."
            ) from None

    @classmethod
    def from_json(cls, text: str) -> "Calibration":
        """The calibration of `to_json`.

        Raises:
            ValueError: no JSON, another version, or not a calibration.
        """
        return versioned.read(
            text,
            Calibration,
            name="calibration",
            schema=SCHEMA,
            again="Measure again with `dtft calibrate`.",
            check=_check,
        )


def _check(calibration: Calibration) -> None:
    """Refuses what past runs did not say of themselves.

    Raises:
        ValueError: names the field.
    """
    if calibration.num_runs and "runs" not in calibration.residuals:
        raise ValueError(
            f"num_runs={calibration.num_runs}, and residuals has no 'runs'. Allowed: "
            "both, or none"
        )


def link_key(link: Link) -> str:
    """What identifies a link of the catalog.

    >>> from dtft.planner.catalog import link
    >>> link_key(link("ib-400g")), link_key(link("opa-100g-half"))
    ('InfiniBand 48 GB/s', 'InfiniBand 11.5 GB/s for 2')
    """
    shared = f" for {link.shared_by}" if link.shared_by > 1 else ""
    return f"{link.kind} {link.curve.bandwidth / 1e9:g} GB/s{shared}"


def apply(cluster: Cluster, calibration: Calibration) -> Cluster:
    """The cluster with measured figures in place of the catalog's.

    Pools of other device types and links that were not measured stay as they are.

    Raises:
        ValueError: no pool of the cluster has the device type, or none of its links
            was measured though some were.
    """
    like = [pool.device.name == calibration.device for pool in cluster.pools]
    if not any(like):
        names = ", ".join(sorted({pool.device.name for pool in cluster.pools}))
        raise ValueError(
            f"the calibration is of {calibration.device}, the cluster {cluster.words} "
            f"has {names}. Measure there with `dtft calibrate`, or leave it out."
        )
    keys = {link_key(level.link) for pool in cluster.pools for level in pool.levels}
    if calibration.links and keys and not keys & set(calibration.links):
        raise ValueError(
            f"the calibration is of {', '.join(calibration.links)}, the cluster "
            f"{cluster.words} has {', '.join(sorted(keys))}. Never carry a calibration "
            "to another fabric: measure there with `dtft calibrate`."
        )
    pools = tuple(
        _pool(pool, calibration) if fits else pool
        for pool, fits in zip(cluster.pools, like, strict=True)
    )
    return replace(cluster, pools=pools)


def _pool(pool: Pool, calibration: Calibration) -> Pool:
    device = replace(
        pool.device,
        peak_flops=calibration.peak_flops,
        memory_bandwidth=calibration.memory_bandwidth,
        efficiency=calibration.efficiency,
        source=calibration.source,
    )
    levels = tuple(_level(level, calibration) for level in pool.levels)
    accuracy = Accuracy(
        source=calibration.source,
        errors=dict(calibration.term_errors),
        scales=dict(calibration.scales),
    )
    return replace(pool, device=device, levels=levels, accuracy=accuracy)


def _level(level: Level, calibration: Calibration) -> Level:
    link = calibration.links.get(link_key(level.link), level.link)
    return replace(level, link=link)
