"""A job of unlike hosts, shares learned, that loses a host; `make drills` runs it."""

import os
import threading
from pathlib import Path

import pytest

from dtft.elastic.leader.events import read_events
from experiments.quotas import NoQuotasError, Quota, quotas
from tests.support.harness import drill, is_rung

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


class SlowHosts(threading.Thread):
    """Puts hosts into groups, each when it trains: once a run has had some events."""

    def __init__(self, run: Path, when: dict[str, tuple[str, int, Quota]]) -> None:
        super().__init__(daemon=True)
        self._directory, self.waiting = run, dict(when)
        self.ended = threading.Event()

    def run(self) -> None:
        while self.waiting and not self.ended.wait(0.1):
            events = [event["event"] for event in read_events(self._directory)]
            for host, (kind, count, quota) in list(self.waiting.items()):
                if events.count(kind) >= count:
                    for pid in processes_of(host, self._directory):
                        quota.enter(pid)
                    del self.waiting[host]


def test_a_lost_host_is_replaced_by_a_slower_one(tmp_path):
    try:
        with quotas([0.25, 0.15]) as (slow, slower):
            when = {"host-2": ("commit", 5, slow), SPARE: ("recovery", 1, slower)}
            hosts = SlowHosts(tmp_path / "faulted", when)
            hosts.start()
            try:
                record = drill(
                    *(tmp_path, "digits_cnn", "--hosts", "3", "--stop.steps", "140"),
                    *("--data.global_batch", "480", "--balance", "exact"),
                    *("--balance.microbatches", "48", "--balance.every", "10"),
                    *("--checkpoint.storage_interval", "50", "--spares", "1"),
                    *("--fault", "kill-host:1@65"),
                )
            finally:
                hosts.ended.set()
                hosts.join()
    except NoQuotasError as error:
        pytest.skip(str(error))
    assert not hosts.waiting
    (recovery,) = record["recoveries"]
    assert is_rung(recovery, 2) and recovery["bytes_from_storage"] == 0
    first, after = record["shares"]
    assert first["shares"] == [16, 16, 16] and first["found"][2] < 16
    assert after["step"] == recovery["restored_step"]
    assert after["replayed"] and after["unknown"] == [SPARE]
    assert f"shares {' '.join(map(str, after['shares']))} replayed" in record["output"]
    assert sum(after["found"]) == 48 and after["found"][1] < after["shares"][1]
    assert after["found"][1] < after["found"][0]
