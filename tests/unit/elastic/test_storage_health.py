"""What is told of failing storage, and when it is tried again."""

import pytest

from dtft.elastic.leader.storage import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SLOW_S,
    StorageHealth,
    advice,
)

FULL = "ValueError: RESOURCE_EXHAUSTED: " + "x" * 900 + ": No space left on device"


def test_repeated_failures_are_counted_not_repeated():
    health = StorageHealth("/nfs/run")
    lines = [health.failed(n, "h1", FULL, now=0.0) or "" for n in range(1, 65)]
    told = [number for number, line in enumerate(lines, start=1) if line]
    assert told == [1, 2, 4, 8, 16, 32, 64]
    for part in ("step 1 ", "/nfs/run", "h1", "No space left", "free space there"):
        assert part in lines[0], lines[0]
    assert "4 times in a row" in lines[3] and len(lines[0]) < 500
    line = health.succeeded(70)
    assert line and "step 70 was written after 64 failed exports" in line
    assert health.succeeded(80) is None
    assert health.failed(90, "h1", FULL, now=0.0)


def test_tries_come_ever_more_rarely_until_one_succeeds():
    health, now, pauses = StorageHealth("/d"), 100.0, []
    assert health.may_try(now)
    for step in range(9):
        health.failed(step, "h", FULL, now)
        since = now
        while not health.may_try(now):
            now += 1.0
        pauses.append(now - since)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert max(pauses) == LONGEST_PAUSE_S
    health.failed(9, "h", FULL, now)
    health.succeeded(10)
    assert health.may_try(now)


def test_slow_storage_is_told_once_for_each_step_in_writing():
    health = StorageHealth("/d")
    assert health.overdue(20, now=1e9) is None
    health.begun(10, now=0.0)
    assert health.overdue(20, now=SLOW_S - 1) is None
    line = health.overdue(30, now=SLOW_S + 1)
    assert line and "export of step 10 has taken 61 s so far, and step 30 is" in line
    assert health.overdue(40, now=SLOW_S + 9) is None
    health.succeeded(10)
    health.begun(50, now=0.0)
    assert health.overdue(60, now=SLOW_S + 1)


@pytest.mark.parametrize(
    "error, told",
    [
        ("OSError: [Errno 13] Permission denied: '/d/3'", "write access"),
        ("StorageMoved: /d was replaced or unmounted while", "mount the file system"),
        ("FileNotFoundError: [Errno 2] No such file or directory", "put the directory"),
        ("TimeoutError: 300 s for 'save' have passed", "may be slow"),
        ("ValueError: something else", "exporter's log"),
    ],
)
def test_advice_fits_the_error(error: str, told: str):
    assert told in advice(error)
