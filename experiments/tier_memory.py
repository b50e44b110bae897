"""What processes of `memory_tier_vs_orbax.py` have in memory, and memory put in place.

Samples, waits and touches; must not know tiers, hosts or states.
"""

import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path

MAPPED_S = 120.0
SAMPLE_S = 0.005


class AnonymousMemory(threading.Thread):
    """Samples the anonymous memory of groups of processes until it is stopped."""

    def __init__(self) -> None:
        """Samples nothing until `watch`."""
        super().__init__(daemon=True)
        self._groups: list[list[int]] = []
        self._samples: list[tuple[float, list[int]]] = []
        self._ended = threading.Event()

    def watch(self, groups: list[list[int]]) -> None:
        """Begins to sample: per host its processes."""
        self._groups = groups
        self.start()

    def run(self) -> None:
        """Samples every few milliseconds."""
        while not self._ended.wait(SAMPLE_S):
            sums = [sum(map(_anonymous, pids)) for pids in self._groups]
            self._samples.append((time.monotonic(), sums))

    def stop(self) -> None:
        """Ends the sampling."""
        self._ended.set()
        if self.is_alive():
            self.join()

    def peaks(self, windows: list[tuple[float, float]]) -> list[int]:
        """Per host the most bytes within its window of monotonic time."""
        return [
            max(
                (sums[host] for at, sums in self._samples if begin <= at <= end),
                default=0,
            )
            for host, (begin, end) in enumerate(windows)
        ]


def await_mapped(pid: int, size: Callable[[], int]) -> None:
    """Waits until a process has mapped the shared memory that was reserved.

    A job has that after its first seconds, and a spare long before it is needed.

    Args:
        pid: of the process.
        size: how many bytes were reserved so far, 0 for none.

    Raises:
        RuntimeError: it has not in time.
    """
    end = time.monotonic() + MAPPED_S
    while time.monotonic() < end:
        if (wanted := size()) and resident(pid, "RssShmem") >= wanted:
            return
        time.sleep(SAMPLE_S)
    raise RuntimeError(f"process {pid} has not mapped its memory in {MAPPED_S:.0f} s")


def warm_memory(num_bytes: int) -> None:
    """Touches memory and frees it, so that the next who takes it finds it in place.

    A virtual machine may give free memory back to its host after seconds. To get it
    again takes time, whoever asks first, and is no matter of either tier.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, num_bytes, flags=flags) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            memory[offset] = 1


def _anonymous(pid: int) -> int:
    return resident(pid, "RssAnon")


def resident(pid: int, kind: str) -> int:
    """Bytes of a kind (`RssAnon`, `RssShmem`) that a process has mapped."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) << 10
    return 0  # the process has ended but was not waited for
