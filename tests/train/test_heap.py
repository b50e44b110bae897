"""Freed memory is kept: measured where it counts, in page faults of a process."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, threading
from dtft.train.heap import keep_freed
kept = sys.argv[1] == "keep" and keep_freed()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for mib in (64, 48, 24):
        thread = threading.Thread(target=bytearray, args=(mib * 2**20,))
        thread.start(); thread.join()
        bytearray(mib * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults())
"""


def _faults(word: str) -> tuple[str, int]:
    command = [sys.executable, "-c", PROGRAM, word]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    )
    kept, number = done.stdout.split()
    return kept, int(number)


def test_memory_that_was_freed_is_used_again() -> None:
    kept, number = _faults("keep")
    if kept == "False":
        pytest.skip("this C library cannot")
    assert number < _faults("leave")[1] / 10
