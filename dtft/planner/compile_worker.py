"""The child of `compiling`: compiles modules that it is sent, and reads the programs.

`python -m dtft.planner.compile_worker FD TARGET NUM_DEVICES`. It ends when the other
end of FD is closed, also in the middle of a compilation. Must not know what the modules
are for.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypedDict

from dtft import _jax_internals
from dtft.planner.hlo_collectives import CompiledCollective, collectives
from dtft.planner.uncollected import uncollected


class Program(TypedDict):
    """What came of a module."""

    collectives: tuple[CompiledCollective, ...]
    memory: dict[str, int]
    """Bytes of one device: arguments, outputs, temporaries, aliased."""
    seconds: float


Answer = Program | str
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

    from dtft.planner import gpu_targets

    if target == "cpu":
        return lambda: jax.devices("cpu")[:num_devices], ""
    try:
        gpus = gpu_targets.devices(gpu_targets.target(target), num_devices)
    except (ImportError, ValueError) as error:
        return list, f"{type(error).__name__}: {error}"
    return lambda: gpus, ""


@uncollected()
def _read(compiled: dict[str, Any] | str, mesh: Mapping[str, int]) -> Answer:
    """Here, not where it is asked for: a text has megabytes, which a pipe has not."""
    if isinstance(compiled, str):
        return compiled
    try:
        found = collectives(compiled["text"], mesh)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return Program(
        collectives=found, memory=compiled["memory"], seconds=compiled["seconds"]
    )


def _compile(
    module: bytes, devices: _Devices, options: Mapping[str, Any]
) -> dict[str, Any] | str:
    from dtft.planner.assigned_program import until_assigned

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


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
