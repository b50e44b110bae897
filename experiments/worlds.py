"""Worlds of real processes: starts workers over gloo, collects one JSON from each.

Knows nothing of what the workers do. A worker is a module that is run with the
arguments RANK NUM_PROCESSES ADDRESS and its own, calls `join`, ends with `answer`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dtft.elastic.processes import die_with_parent

ROOT = Path(__file__).parents[1]
HEARTBEAT_S = 60.0


def run_world(
    module: str,
    arguments: Sequence[Sequence[str]],
    *,
    address: str,
    deadline_s: float,
    prefixes: Sequence[Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
    started: Callable[[list[int]], None] | None = None,
) -> list[Any]:
    """Runs one process per entry of `arguments`; returns their answers by rank.

    Every process is ended when this returns or raises.

    Args:
        module: to run with `python -m`, importable from the repository's root.
        arguments: of each rank, after RANK NUM_PROCESSES ADDRESS.
        address: host:port for JAX's coordination service, reachable by all.
        deadline_s: for the whole world.
        prefixes: a command to run each process with, for example `ip netns exec NAME`.
        environment: variables set beside those of this process.
        started: called with the process ids by rank, once all have begun.

    Raises:
        RuntimeError: a process failed; with its last lines.
        TimeoutError: not all ended in time; names the ranks that had not.
    """
    end = time.monotonic() + deadline_s
    num = len(arguments)
    prefixes = prefixes or [()] * num
    variables = {**os.environ, **(environment or {})}
    service = _start(variables, (), "dtft.elastic.host.coordination_process")
    processes = []
    try:
        assert service.stdin is not None
        service.stdin.write(f"{address} {num} {HEARTBEAT_S} 0\n")
        service.stdin.flush()
        for rank, (own, prefix) in enumerate(zip(arguments, prefixes, strict=True)):
            place = (str(rank), str(num), address)
            processes.append(_start(variables, prefix, module, *place, *own))
        if started is not None:
            started([process.pid for process in processes])
        _wait(processes, end)
        return [json.loads(p.communicate()[0].splitlines()[-1]) for p in processes]
    finally:
        for process in [*processes, service]:
            process.kill()
        for process in [*processes, service]:
            process.communicate()


def join(rank: int, num: int, address: str) -> None:
    """In a worker: one CPU device, joined to the world over gloo."""
    import jax

    from dtft import _jax_internals

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    _jax_internals.join_world(
        address,
        process_id=rank,
        num_processes=num,
        heartbeat_s=HEARTBEAT_S,
        timeout_s=60,
    )


def answer(value: Any) -> NoReturn:
    """In a worker: prints the answer and ends at once, without a farewell to anyone."""
    print(json.dumps(value), flush=True)
    os._exit(0)


def _start(
    variables: Mapping[str, str], prefix: Sequence[str], module: str, *arguments: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=variables,
        preexec_fn=die_with_parent,
    )


def _wait(processes: list[subprocess.Popen[str]], end: float) -> None:
    while running := [r for r, p in enumerate(processes) if p.poll() is None]:
        _check(processes)  # the others would wait for the one that failed
        if time.monotonic() > end:
            raise TimeoutError(f"ranks {running} did not end by the deadline")
        time.sleep(0.05)
    _check(processes)


def _check(processes: list[subprocess.Popen[str]]) -> None:
    for rank, process in enumerate(processes):
        if process.poll():
            _, errors = process.communicate()
            raise RuntimeError(
                f"rank {rank} failed ({process.returncode}): {errors[-2000:]}"
            )
