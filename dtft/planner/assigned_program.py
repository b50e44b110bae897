"""A program read as soon as XLA has assigned its memory.

What XLA does after that is machine code: nobody runs it here, it takes a third of the
time for CPU and more than half of it for a GPU, and there it needs `ptxas` of a CUDA
installation. So a process of its own compiles, XLA writes down the program and its
buffers when both are final, and the process is ended there. Must not know what programs
are for.
"""

import json
import os
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_POLL_S = 0.02
_ANSWER = "answer.json"
# Written after the program and its buffers, before any machine code.
_LAST = "*pu_after_optimizations-memory-usage-report.txt"
_PROGRAM = "*pu_after_optimizations.txt"
_BUFFERS = "*pu_after_optimizations-buffer-assignment.txt"
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.MULTILINE)


def until_assigned(compiled: Callable[[Mapping[str, Any]], Any]) -> Any:
    """What `compiled` would return, without waiting for machine code.

    It runs in a fork of this process, which must not have made a client of XLA that
    has threads (such as that of CPU devices): a fork has none of them.

    Args:
        compiled: compiles with additional options of XLA; returns a dict with `text`,
            `memory` and `seconds`, or words of why there is none.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dtft-xla-") as name:
        folder = Path(name)
        # Forked, it has XLA loaded already, which a new process would take seconds to.
        process = os.fork()
        if not process:
            _compile(compiled, folder)
        problem = _await(process, folder)
        if any(folder.glob(_LAST)):
            return {
                "text": _read(folder, _PROGRAM),
                "memory": assigned(_read(folder, _BUFFERS)),
                "seconds": time.monotonic() - start,
            }
        answer = folder / _ANSWER
        return json.loads(answer.read_text()) if answer.exists() else problem


def assigned(text: str) -> dict[str, int]:
    """Bytes of one device, from XLA's list of its buffers.

    >>> assigned("allocation 0: size 8, parameter 0, shape |f32[2]|, maybe-live-out:\\n"
    ...          "allocation 1: size 4, parameter 1, shape |f32[]|:\\n"
    ...          "allocation 2: size 64, preallocated-temp:")
    {'arguments': 12, 'outputs': 8, 'temporaries': 64, 'aliased': 8}
    """
    found: Counter[str] = Counter(arguments=0, outputs=0, temporaries=0, aliased=0)
    for size, kind in _ALLOCATION.findall(text):
        is_argument, is_output = ", parameter " in kind, "maybe-live-out" in kind
        found["arguments"] += int(size) * is_argument
        found["outputs"] += int(size) * is_output
        found["aliased"] += int(size) * (is_argument and is_output)
        found["temporaries"] += int(size) * ("preallocated-temp" in kind)
    return dict(found)


def _compile(compiled: Callable[[Mapping[str, Any]], Any], folder: Path) -> None:
    """The forked process; never returns."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
        (folder / _ANSWER).write_text(json.dumps(compiled(options)))
    finally:
        os._exit(0)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)


def _await(process: int, folder: Path) -> str:
    """Waits until all is written or the process has ended; says how it ended."""
    while not any(folder.glob(_LAST)):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return f"the compiler crashed (exit code {code})"
        time.sleep(_POLL_S)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return ""


def _read(folder: Path, pattern: str) -> str:
    return "\n\n".join(path.read_text() for path in sorted(folder.glob(pattern)))
