"""The child process that compiles: `Child` starts it, and kills it at a deadline.

`python -m dtft.planner.aot.worker FD TARGET NUM_DEVICES` receives modules over the file
descriptor FD, compiles each module, and answers with its collectives and memory. The
process ends when the other end of FD is closed, also during a compilation.
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

# The worker compiles in a fork, and kills the fork as soon as XLA has written the
# optimized program and its buffer assignment. XLA would then make machine code, which
# is never run. Machine code takes a third of the time for CPU. For a GPU it takes more
# than half of the time, and needs `ptxas` of a CUDA installation.


_POLL_S = 0.02
_ANSWER = "answer.json"
# Files that XLA writes before any machine code; jaxlib 0.12 writes them in any order.
_REPORT = "*pu_after_optimizations-memory-usage-report.txt"
_PROGRAM = "*pu_after_optimizations.txt"
_BUFFERS = "*pu_after_optimizations-buffer-assignment.txt"
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.MULTILINE)


def until_assigned(compiled: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Compiles in a fork of this process, and kills the fork once buffers are assigned.

    XLA has then written the program's text and its buffer assignment to files. The
    machine code, which XLA would generate next, is not needed.

    This process must not have a client of XLA with threads, such as the client of CPU
    devices, because a fork does not have the threads of its parent.

    Args:
        compiled: function that compiles with further XLA options, given by name. It
            returns a dict with `text`, `memory` and `seconds`, or the text of an error.

    Returns:
        A dict, made from the files that XLA wrote: `text` is that of the program,
        `memory` has the bytes of one device (as `assigned` returns them), and `seconds`
        is the duration. If XLA did not write all files: the value that `compiled`
        returned in the fork, or a text with the exit code if the fork crashed.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dtft-xla-") as name:
        folder = Path(name).resolve()
        # A fork has XLA loaded already; a new process would need seconds to load XLA.
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
    """Reads the bytes of one device from the text of XLA's buffer assignment.

    An allocation marked `parameter` counts as arguments, `maybe-live-out` as outputs,
    and one with both marks also as aliased. `preallocated-temp` counts as temporaries,
    and `constant` as constants.

    >>> assigned("allocation 0: size 8, parameter 0, shape |f32[2]|, maybe-live-out:\\n"
    ...          "allocation 1: size 4, parameter 1, shape |f32[]|:\\n"
    ...          "allocation 2: size 16, constant:\\n"
    ...          "allocation 3: size 64, preallocated-temp:")
    {'arguments': 12, 'outputs': 8, 'temporaries': 64, 'aliased': 8, 'constants': 16}
    """
    names = ("arguments", "outputs", "temporaries", "aliased", "constants")
    found: dict[str, int] = dict.fromkeys(names, 0)
    for size, kind in _ALLOCATION.findall(text):
        is_argument, is_output = ", parameter " in kind, "maybe-live-out" in kind
        found["arguments"] += int(size) * is_argument
        found["outputs"] += int(size) * is_output
        found["aliased"] += int(size) * (is_argument and is_output)
        found["temporaries"] += int(size) * ("preallocated-temp" in kind)
        found["constants"] += int(size) * (", constant" in kind)
    return found


def _compile_and_end(
    compiled: Callable[[Mapping[str, Any]], Any], folder: Path
) -> None:
    """Compiles in the forked process, writes the result, and ends the process.

    `compiled` compiles with further XLA options (`until_assigned`). Its result is
    written to `folder` as JSON; XLA writes its files there, too.
    """
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
    """Waits until XLA has written its files to `folder`, and kills the process.

    Returns ''. If the process ends before XLA has written the files, returns a text
    with its exit code.
    """
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
    """Returns whether XLA has written its files, and `process` has closed them.

    The files, in `folder`, have the program, the buffer assignment and a memory report.
    """
    found = [list(folder.glob(pattern)) for pattern in (_REPORT, _PROGRAM, _BUFFERS)]
    if not all(found) or len({len(files) for files in found}) > 1:
        return False
    opened = set()
    with contextlib.suppress(OSError):  # the process ended, or this is not Linux
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                opened.add(link.readlink())
    return opened.isdisjoint(path for files in found for path in files)


def _read_assigned(folder: Path, pattern: str) -> str:
    return "\n\n".join(path.read_text() for path in sorted(folder.glob(pattern)))


class CompileResult(TypedDict):
    """Collectives and memory of a compiled module, and the seconds to compile it."""

    collectives: tuple[CompiledCollective, ...]
    memory: dict[str, int]
    """Bytes of one device: arguments, outputs, temporaries, aliased, constants."""
    seconds: float


Answer = CompileResult | str
"""What a child sends for a module: the result of its compilation, or the text of an
error."""

_Devices = Callable[[], Sequence[Any]]

# If XLA makes machine code before the kill, the code need not be fast.
_CPU_OPTIONS = {
    "xla_llvm_disable_expensive_passes": True,
    "xla_backend_optimization_level": 0,
}
# There are as many children as cores, so each child compiles with one thread.
_GPU_OPTIONS = {"xla_gpu_force_compilation_parallelism": 1}
_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
"""XLA options for a second compilation after an internal error.

Triton cannot divide some shapes into tiles, such as the 197 tokens of a ViT. On a GPU,
XLA's autotuner then takes cuBLAS; without a GPU there is no autotuner, and XLA fails.
"""


def main(link: Connection, target: str, num_devices: int) -> None:
    """Compiles each module from `link` and sends back the result; never returns.

    `link` is the connection to the parent. `target` is `cpu`, or the name of the GPU to
    compile for. `num_devices` is the number of devices to compile for. The process ends
    when the other end of `link` is closed.
    """
    modules: SimpleQueue[tuple[bytes, dict[str, int]]] = SimpleQueue()
    threading.Thread(target=_listen, args=(link, modules), daemon=True).start()
    devices, problem = _devices(target, num_devices)
    options = _CPU_OPTIONS if target == "cpu" else _GPU_OPTIONS
    while True:
        module, mesh = modules.get()
        retry = {} if target == "cpu" else _WITHOUT_TRITON
        link.send(problem or _read(_compile(module, devices, options, retry), mesh))


def _listen(
    link: Connection, modules: "SimpleQueue[tuple[bytes, dict[str, int]]]"
) -> None:
    """Queues the modules from `link`, in a thread of its own.

    Ends the process when the other end of `link` is closed.
    """
    try:
        while True:
            modules.put(link.recv())
    except (EOFError, OSError):
        os._exit(0)


def _devices(target: str, num_devices: int) -> tuple[_Devices, str]:
    """Returns a function that makes the devices to compile for, and an error text.

    The text is '' if the devices can be made; otherwise the function returns []. Fake
    GPUs are made once, by this process. CPU devices have threads, which a fork does not
    inherit, so each fork (`until_assigned`) calls the function for devices of its own.
    """
    import jax
    import jax.extend.backend  # imported once here, not in each fork

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
    """Makes the answer for a module: collectives and memory of its compiled program.

    The child finds the collectives in the program's text, because the megabytes of this
    text are too much to send over the pipe.

    Args:
        compiled: the result of `_compile`; the text of an error is returned unchanged.
        mesh: map from an axis to its size, slowest-varying axis first.

    Returns:
        The answer, or the text of an error if the program's text cannot be read.
    """
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
    module: bytes,
    devices: _Devices,
    options: Mapping[str, Any],
    retry: Mapping[str, Any],
) -> dict[str, Any] | str:
    """Compiles a module for devices that `devices` makes, with XLA's `options`.

    After an internal error of XLA, compiles the module once more with `retry` as
    further options.

    Returns:
        A dict with the program's `text`, its `memory` in bytes and the `seconds` of the
        compilation. After an error, the text of the error; if both compilations fail,
        the text of the first error.
    """

    def compiled(options: Mapping[str, Any]) -> dict[str, Any] | str:
        return until_assigned(
            lambda more: _whole(module, devices(), {**options, **more})
        )

    first = compiled(options)
    if not retry or not isinstance(first, str) or "INTERNAL" not in first:
        return first
    again = compiled({**options, **retry})
    return first if isinstance(again, str) else again


def _whole(
    module: bytes, devices: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any] | str:
    start = time.monotonic()
    try:
        program = _jax_internals.compile_module(module, devices, options)
        stats = program.get_compiled_memory_stats()
        texts = [part.to_string() for part in program.hlo_modules()]
    except Exception as error:  # the parent reports any error of the compiler
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


# The parent's handle of the child process.


_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_HUGE_PAGES = "glibc.malloc.hugetlb"
"""Name of glibc's tunable for huge pages. Other C libraries ignore the tunable. Huge
pages save 6 % of XLA's processor time (measured with `benchmarks/planning.py --cases
gpt2-small --verify 16`)."""
TAIL = 2000
"""Largest number of characters of a compiler's error or log in a result."""


class Child:
    """Handle of a child process that compiles modules.

    The process is killed at the time `end`, in seconds of `time.monotonic`.
    """

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
        # After the kill, every wait for the child ends with an error or end of file.
        self._timer = threading.Timer(max(0.0, end - time.monotonic()), self._kill)
        self._timer.daemon = True
        self._timer.start()

    def send(self, module: bytes, mesh: Mapping[str, int]) -> None:
        """Sends a module to compile; answers arrive in the order of modules.

        `mesh` maps each mesh axis of the module to its size.

        Does nothing if the process has ended; `receive` then returns None.
        """
        with contextlib.suppress(OSError):  # `receive` reports an ended process
            self._link.send((module, dict(mesh)))

    def has_answer(self) -> bool:
        """Returns whether `receive` would return without waiting."""
        try:
            return self._link.poll()
        except OSError:
            return True

    def receive(self) -> Answer | None:
        """Waits for the next answer; returns None if the process has ended."""
        try:
            return self._link.recv()
        except (EOFError, OSError):
            return None

    def stop(self) -> str:
        """Kills the process; returns the last 2000 characters of its output.

        The number is `TAIL`. Returns a text with the exit code if there is no output.
        """
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
    """Waits until one child has an answer or has ended.

    The wait is over at a child's deadline at the latest, because the child is then
    killed.
    """
    connection.wait([child._link for child in children])


def environment(num_devices: int) -> dict[str, str]:
    """Makes the environment variables of a child process.

    The child has `num_devices` fake CPU devices, JAX for CPU only, this package on its
    import path, and huge pages in glibc's malloc unless the user has set them. Other
    variables, except JAX_NUM_CPU_DEVICES, are copied from this process.
    """
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
