"""The process that compiles: `Child` starts it with the devices it needs and kills it
at a deadline.

`python -m dtft.planner.aot.worker FD TARGET NUM_DEVICES` compiles the modules that come
over FD and answers with what each communicates and needs. It ends when the other end of
FD is closed, also in the middle of a compilation.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypedDict

import dtft
from dtft import _jax_internals
from dtft.planner.aot.hlo import CompiledCollective, collectives
from dtft.planner.gc_pause import gc_paused

# The worker compiles in a process of its own and ends it as soon as XLA has written the
# optimized program and its buffer assignment. What follows is machine code, which
# nobody runs: it takes a third of the time on CPU and more than half on a GPU, where it
# also needs `ptxas` of a CUDA installation.


_POLL_S = 0.02
_ANSWER = "answer.json"
# Written before any machine code; by jaxlib 0.12 side by side, in no order.
_REPORT = "*pu_after_optimizations-memory-usage-report.txt"
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
        folder = Path(name).resolve()
        # Forked, it has XLA loaded already, which a new process would take seconds to.
        process = os.fork()
        if not process:
            _compile_and_end(compiled, folder)
        problem = _await(process, folder)
        if _is_written(process, folder):
            return {
                "text": _read_assigned(folder, _PROGRAM),
                "memory": assigned(_read_assigned(folder, _BUFFERS)),
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


def _compile_and_end(
    compiled: Callable[[Mapping[str, Any]], Any], folder: Path
) -> None:
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
    while not _is_written(process, folder):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return f"the compiler crashed (exit code {code})"
        time.sleep(_POLL_S)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return ""


def _is_written(process: int, folder: Path) -> bool:
    """Whether the program and its buffers are there, and XLA has closed the files."""
    found = [list(folder.glob(pattern)) for pattern in (_REPORT, _PROGRAM, _BUFFERS)]
    if not all(found) or len({len(files) for files in found}) > 1:
        return False
    opened = set()
    with contextlib.suppress(OSError):  # it has ended, or this is not Linux
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                opened.add(link.readlink())
    return opened.isdisjoint(path for files in found for path in files)


def _read_assigned(folder: Path, pattern: str) -> str:
    return "\n\n".join(path.read_text() for path in sorted(folder.glob(pattern)))


class CompileResult(TypedDict):
    """What came of a module."""

    collectives: tuple[CompiledCollective, ...]
    memory: dict[str, int]
    """Bytes of one device: arguments, outputs, temporaries, aliased."""
    seconds: float


Answer = CompileResult | str
"""A program, or why there is none."""

_Devices = Callable[[], Sequence[Any]]

# Where machine code is made after all, it need not be fast.
_CPU_OPTIONS = {
    "xla_llvm_disable_expensive_passes": True,
    "xla_backend_optimization_level": 0,
}
# There are as many children as cores: threads of each would only wait for each other.
_GPU_OPTIONS = {"xla_gpu_force_compilation_parallelism": 1}


def main(link: Connection, target: str, num_devices: int) -> None:
    """Answers every module that comes over `link`, until it is closed."""
    modules: SimpleQueue[tuple[bytes, dict[str, int]]] = SimpleQueue()
    threading.Thread(target=_listen, args=(link, modules), daemon=True).start()
    devices, problem = _devices(target, num_devices)
    options = _CPU_OPTIONS if target == "cpu" else _GPU_OPTIONS
    while True:
        module, mesh = modules.get()
        link.send(problem or _read(_compile(module, devices, options), mesh))


def _listen(
    link: Connection, modules: "SimpleQueue[tuple[bytes, dict[str, int]]]"
) -> None:
    """Runs beside the compiler, so that nobody's question is not answered on."""
    try:
        while True:
            modules.put(link.recv())
    except (EOFError, OSError):
        os._exit(0)


def _devices(target: str, num_devices: int) -> tuple[_Devices, str]:
    """How to have the devices, or why they cannot be had.

    GPUs are loaded once; CPU devices have threads, so each fork makes its own.
    """
    import jax
    import jax.extend.backend  # here once, not in each fork

    from dtft.planner.aot import gpu_targets

    if target == "cpu":
        return lambda: jax.devices("cpu")[:num_devices], ""
    try:
        gpus = gpu_targets.fake_gpus(gpu_targets.gpu_target(target), num_devices)
    except (ImportError, ValueError) as error:
        return list, f"{type(error).__name__}: {error}"
    return lambda: gpus, ""


@gc_paused()
def _read(compiled: dict[str, Any] | str, mesh: Mapping[str, int]) -> Answer:
    """Here, not where it is asked for: a text has megabytes, which a pipe has not."""
    if isinstance(compiled, str):
        return compiled
    try:
        found = collectives(compiled["text"], mesh)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return CompileResult(
        collectives=found, memory=compiled["memory"], seconds=compiled["seconds"]
    )


def _compile(
    module: bytes, devices: _Devices, options: Mapping[str, Any]
) -> dict[str, Any] | str:
    return until_assigned(lambda more: _whole(module, devices(), {**options, **more}))


def _whole(
    module: bytes, devices: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any] | str:
    start = time.monotonic()
    try:
        program = _jax_internals.compile_module(module, devices, options)
        stats = program.get_compiled_memory_stats()
        texts = [part.to_string() for part in program.hlo_modules()]
    except Exception as error:  # whatever the compiler says goes to who asked
        return f"{type(error).__name__}: {error}"
    return {
        "text": "\n\n".join(texts),
        "memory": {
            "arguments": stats.argument_size_in_bytes,
            "outputs": stats.output_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
            "aliased": stats.alias_size_in_bytes,
        },
        "seconds": time.monotonic() - start,
    }


# The process that compiles: started with the devices it needs, killed at a deadline.


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
                    *(sys.executable, "-P", "-m", __name__),
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

    def receive(self) -> Answer | None:
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


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
