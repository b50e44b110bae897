"""A job of unlike hosts, shares learned, that loses a host; `make drills` runs it."""

import os
import threading
from pathlib import Path

import pytest

from dtft.elastic.journal import read_events
from experiments.quotas import NoQuotasError, Quota, quotas
from tests.drills.harness import drill

pytestmark = [pytest.mark.drill, pytest.mark.drill_all, pytest.mark.timeout(300)]
SPARE = "host-3"


def processes_of(host: str, run: Path) -> list[int]:
    """Every process of a local cluster's host."""
    leaders, sessions = set(), {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_text().split("\0")
            sessions[int(name)] = os.getsid(int(name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if {"agent", "--host-name", host, str(run)} <= set(words):
            leaders.add(int(name))
    return [pid for pid, session in sessions.items() if session in leaders]


class SlowHost(threading.Thread):
    """Puts a host into a group as soon as it trains."""

    def __init__(self, host: str, run: Path, quota: Quota) -> None:
        super().__init__(daemon=True)
        self._host, self._run, self._quota = host, run, quota
        self.done, self.ended = threading.Event(), threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.1):
            events = read_events(self._run)
            if any(event["event"] == "recovery" for event in events):
                for pid in processes_of(self._host, self._run):
                    self._quota.enter(pid)
                self.done.set()
                return


def test_a_lost_host_is_replaced_by_a_slower_one(tmp_path):
    try:
        with quotas([0.15]) as (slow,):
            slower = SlowHost(SPARE, tmp_path / "faulted", slow)
            slower.start()
            try:
                record = drill(
                    *(tmp_path, "digits_cnn", "--hosts", "3", "--stop.steps", "150"),
                    *("--data.global_batch", "480", "--balance", "exact"),
                    *("--balance.microbatches", "48", "--balance.every", "10"),
                    *("--checkpoint.storage_interval", "50", "--spares", "1"),
                    *("--fault", "kill-host:1@45"),
                )
            finally:
                slower.ended.set()
                slower.join()
    except NoQuotasError as error:
        pytest.skip(str(error))
    assert slower.done.is_set()
    (recovery,) = record["recoveries"]
    assert recovery["rung"] == 2 and recovery["bytes_from_storage"] == 0
    first, after = record["shares"]
    assert after["replayed"] and after["unknown"] == [SPARE]
    assert after["step"] == recovery["restored_step"]
    assert first["shares"] == [16, 16, 16] and sum(after["found"]) == 48
    others = [after["found"][slot] for slot in (0, 2)]
    assert after["found"][1] < min(others) and after["found"][1] < after["shares"][1]
    assert f"shares {' '.join(map(str, after['shares']))} replayed" in record["output"]
