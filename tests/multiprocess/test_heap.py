"""Freed memory is kept: measured where it counts, in page faults of a process."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, threading
from dtft.train.devices import keep_freed
word = sys.argv[1]
kept = word != "leave" and keep_freed(large=word == "large")
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64 * 2**20)
    thread = threading.Thread(target=bytearray, args=(96 * 2**20,))
    thread.start(); thread.join()
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
    kept, large = _faults("large")
    if kept == "False":
        pytest.skip("this C library cannot")
    kept, number = _faults("keep")
    assert kept == "True"
    left = _faults("leave")[1]
    assert large < left / 10
    assert number < 0.7 * left  # without what a thread had
