"""Slow hosts on one machine: processes that get a part of a core (cgroup v1, cpu).

A group's processes together run for `share` of every period of 10 ms, so a step of a
tenth of a second sees an even speed. Needs root. Must not know what the processes do.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup/cpu")
PREFIX = "dtft-quota-"
PERIOD_US = 10_000
REMOVE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A group of processes with a limited CPU."""

    path: str
    """Of the group, as every process of this machine finds it: `ip netns exec` hides
    /sys, so it leads through the process that made the group."""

    def limit(self, share: float) -> None:
        """From now on the group's processes get this part of one core."""
        (Path(self.path) / "cpu.cfs_quota_us").write_text(f"{share * PERIOD_US:.0f}")

    def enter(self, pid: int = 0) -> None:
        """Puts a process with all of its threads into the group; 0 is this one."""
        (Path(self.path) / "cgroup.procs").write_text(str(pid))


class NoQuotasError(RuntimeError):
    """This machine does not let us limit CPUs; the text says what is missing."""


@contextmanager
def quotas(shares: Sequence[float]) -> Iterator[tuple[Quota, ...]]:
    """A group for each share of a core; removed at the end.

    Raises:
        NoQuotasError: not root, or no cgroup v1 with the cpu controller.
        ValueError: a share below 0.1: less than a millisecond in every period.
    """
    if not shares or min(shares) < 0.1:
        raise ValueError(f"shares={list(shares)}. Allowed: one or more, each >= 0.1.")
    if (
        not (ROOT / "cpu.cfs_quota_us").exists()
        and not (ROOT / "cgroup.procs").exists()
    ):
        raise NoQuotasError(f"{ROOT} is no cgroup v1 hierarchy with cpu quotas.")
    remove_leftovers()
    base = f"{PREFIX}{os.getpid()}"
    groups = [ROOT / f"{base}-{index}" for index in range(len(shares))]
    try:
        for group in groups:
            _make(group)
        found = tuple(
            Quota(path=f"/proc/{os.getpid()}/root{group}") for group in groups
        )
        for quota, share in zip(found, shares, strict=True):
            quota.limit(share)
        yield found
    finally:
        with contextlib.ExitStack() as removals:  # each is tried, whatever others do
            for group in groups:
                removals.callback(_remove, group)


def remove_leftovers() -> None:
    """Takes down what processes of ours that no longer run have left behind."""
    for group in ROOT.glob(f"{PREFIX}*"):
        found = re.match(rf"{PREFIX}(\d+)-", group.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(group)


def _make(group: Path) -> None:
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    except OSError as error:
        raise NoQuotasError(f"{group}: {error.strerror}; run this as root.") from None


def _remove(group: Path) -> None:
    """Lets the group's processes run free, and removes it.

    Raises:
        TimeoutError: it is still in use after some seconds.
    """
    end = time.monotonic() + REMOVE_S
    while group.exists():
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                (ROOT / "cgroup.procs").write_text(pid)
        try:
            group.rmdir()
        except OSError as error:  # processes that are ending still count for a moment
            if time.monotonic() > end:
                raise TimeoutError(f"{group}: {error.strerror}") from error
            time.sleep(0.02)
