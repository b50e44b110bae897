"""The process that compiles: started with the devices it needs, killed at a deadline.

Must not know candidates or what becomes of the answers.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe, connection
from pathlib import Path

import dtft
from dtft.planner import compile_worker

_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_HUGE_PAGES = "glibc.malloc.hugetlb"
"""A tunable of glibc: with huge pages XLA takes less processor time (of the 16 plans of
`benchmarks/planning.py --cases gpt2-small --verify 16` 6 %). Others ignore it."""
TAIL = 2000
"""Characters of an error that are kept."""


class Child:
    """A process that compiles what it is sent; killed at `end` (monotonic seconds)."""

    def __init__(self, target: str, num_devices: int, end: float) -> None:
        self.devices = target, num_devices
        self._log = tempfile.TemporaryFile()
        self._link, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", compile_worker.__name__),
                    *(str(theirs.fileno()), target, str(num_devices)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment(num_devices),
                pass_fds=[theirs.fileno()],
            )
        # Once it is killed every wait for it ends, with an error or the end of file.
        self._timer = threading.Timer(max(0.0, end - time.monotonic()), self._kill)
        self._timer.daemon = True
        self._timer.start()

    def send(self, module: bytes, mesh: Mapping[str, int]) -> None:
        """Asks for a module to be compiled; answers come in the same order."""
        with contextlib.suppress(OSError):  # it is gone: `receive` will say so
            self._link.send((module, dict(mesh)))

    def has_answer(self) -> bool:
        """Whether `receive` would not wait."""
        try:
            return self._link.poll()
        except OSError:
            return True

    def receive(self) -> compile_worker.Answer | None:
        """The next answer; None if the process is gone."""
        try:
            return self._link.recv()
        except (EOFError, OSError):
            return None

    def stop(self) -> str:
        """Ends it; the end of what it wrote to its log."""
        self._timer.cancel()
        self._kill()
        self._link.close()
        code = self._process.wait()
        with self._log as log:
            log.seek(0)
            text = log.read().decode(errors="replace").strip()
        return text[-TAIL:] or f"exit code {code}"

    def _kill(self) -> None:
        self._process.kill()


def wait_for_any(children: Sequence[Child]) -> None:
    """Until one of them has an answer, or is gone; all are at their deadline."""
    connection.wait([child._link for child in children])


def environment(num_devices: int) -> dict[str, str]:
    """This process's own, without what would choose other devices; with huge pages."""
    kept = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    flags = [
        flag
        for flag in kept.get("XLA_FLAGS", "").split()
        if not flag.startswith(_DEVICE_COUNT)
    ]
    tunables = [t for t in kept.get("GLIBC_TUNABLES", "").split(":") if t]
    if not any(one.startswith(_HUGE_PAGES) for one in tunables):
        tunables.append(f"{_HUGE_PAGES}=1")
    root = str(Path(dtft.__file__).parents[1])
    return {
        **kept,
        "GLIBC_TUNABLES": ":".join(tunables),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*flags, f"{_DEVICE_COUNT}={num_devices}"]),
        "PYTHONPATH": os.pathsep.join(filter(None, [root, kept.get("PYTHONPATH")])),
    }
