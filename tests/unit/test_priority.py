"""Tests of priorities: they sink for one thread only, and never rise."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dtft._priority import LOW_PRIORITY, lower_priority


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_calling_thread_and_its_children_give_way() -> None:
    before = _niceness()
    low = max(LOW_PRIORITY, before)

    def work() -> tuple[int, int]:
        lower_priority()
        with ThreadPoolExecutor(1) as child:
            return _niceness(), child.submit(_niceness).result(30)

    with ThreadPoolExecutor(1) as other:
        assert other.submit(work).result(30) == (low, low)
    assert _niceness() == before


def test_a_job_under_nice_keeps_its_lower_priority() -> None:
    """An unprivileged user could not raise it: the call would fail, and the job."""
    code = (
        "import os; from dtft._priority import lower_priority;"
        "os.nice(max(0, 15 - os.nice(0)));"
        "os.getuid() or os.setuid(65534);"
        "lower_priority(10); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(ended.stdout) == max(15, _niceness())


def test_an_unknown_process_is_told() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait(30)
    with pytest.raises(ProcessLookupError):
        lower_priority(ident=ended.pid)
