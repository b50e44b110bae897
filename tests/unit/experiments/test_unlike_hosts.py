"""What the study of unlike hosts is made of: parts of a core, and shares to compare."""

import os
import subprocess

import numpy as np
import pytest

from dtft.balance.load_shares import allocate, makespan
from dtft.balance.speed_estimator import Speeds
from experiments.balance_unlike_worker import neighbours
from experiments.quotas import PREFIX, ROOT, NoQuotasError, quotas


def test_a_group_has_its_part_of_a_core_and_is_removed_with_its_processes() -> None:
    sleeper = subprocess.Popen(["sleep", "30"])
    pid = sleeper.pid
    try:
        with quotas([0.5, 0.25]) as (half, quarter):
            half.enter(pid)
            quarter.limit(0.3)
            groups = sorted(ROOT.glob(f"{PREFIX}{os.getpid()}-*"))
            limits = [(it / "cpu.cfs_quota_us").read_text().strip() for it in groups]
            assert limits == ["5000", "3000"]
            assert (groups[0] / "cgroup.procs").read_text().split() == [str(pid)]
        assert not any(group.exists() for group in groups)
        assert str(pid) in (ROOT / "cgroup.procs").read_text().split()
    except NoQuotasError as error:
        pytest.skip(str(error))
    finally:
        sleeper.kill()
        sleeper.wait()


def test_less_than_a_tenth_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.05"), quotas([0.05]):
        pass


def test_neighbours_are_no_better_than_the_best() -> None:
    unit_s, fixed_s = 1 / np.array([0.15, 0.25, 0.4, 0.6]), np.array([0, 9, 0, 2.0])
    best = tuple(allocate(unit_s, 64, fixed_s=fixed_s).tolist())
    near = neighbours(best, Speeds(fixed_s=fixed_s, unit_s=unit_s, error=0.0), 5)
    assert len(set(near)) == 5 and {sum(it) for it in near} == {64}
    spans = [makespan(it, unit_s, fixed_s) for it in near]
    assert spans == sorted(spans) and spans[0] >= makespan(best, unit_s, fixed_s)
