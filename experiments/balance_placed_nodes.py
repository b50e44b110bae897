"""The processes of `balance_placed.py`: started, spoken to, ended.

Decides nothing; must not know what is balanced.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from dtft.elastic.processes import die_with_parent
from experiments.balance_placed_worker import Form, kept, make_params

ROOT = Path(__file__).parents[1]
ANSWER_S = 180.0

Tasks = list[list[Any]]
"""Name, microbatch, ready, start and end of each task of a node."""


class Nodes:
    """The processes, spoken to all at once."""

    def __init__(
        self, processes: Sequence[subprocess.Popen[str]], folder: Path
    ) -> None:
        self.processes, self.folder = processes, folder
        self.ready: set[Form] = set()

    def all(self, *command: Any) -> list[Any]:
        """What all nodes answer.

        Raises:
            TimeoutError: names the node that did not answer.
            RuntimeError: names the node that ended.
        """
        end = time.monotonic() + ANSWER_S
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        return [
            self._answer(n, end, str(command[0])) for n in range(len(self.processes))
        ]

    def _answer(self, node: int, end: float, command: str) -> Any:
        out = self.processes[node].stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            if not selector.select(max(0.0, end - time.monotonic())):
                raise TimeoutError(
                    f"node {node} did not answer {command!r} in {ANSWER_S:g} s"
                )
        line = out.readline()
        if not line:
            raise RuntimeError(f"node {node} ended at {command!r}; its text is above")
        return json.loads(line)

    def prepare(self, forms: Iterable[Form]) -> None:
        """Compiles divisions: each node runs a step of them."""
        for form in forms:
            if form not in self.ready:
                self.all("prepare", form)
                self.all("begin", form, str(self.folder / "nothing"))
                self.all("step")
                self.ready.add(form)

    def change(self, left: Path | None, form: Form, folder: Path) -> float:
        """Goes on with another division; seconds that it took.

        Args:
            left: folder in which nodes leave their state before; None: they forget it.
            form: of the division.
            folder: with the state that they go on with; what is not there begins anew.
        """
        began = time.monotonic()
        if left is not None:
            self.all("leave", str(left))
        self.prepare([form])
        self.all("begin", form, str(folder))
        return time.monotonic() - began

    def params(self, folder: Path) -> list[Any]:
        """Parameters that nodes left in a folder."""
        params = {"params": make_params()}
        return jax.tree.leaves(kept(str(folder), params))

    def steps(self, num: int) -> list[list[Tasks]]:
        """So many steps: of each, the tasks of each node."""
        return [self.all("step") for _ in range(num)]


def step_s(step: Sequence[Tasks]) -> float:
    """Until the last node is done; all begin at the same time."""
    return max(tasks[-1][4] for tasks in step if tasks)


@contextmanager
def started(folder: Path, num: int) -> Iterator[Nodes]:
    """Processes for all nodes, the first on a core and the others on another: moved
    about, they get in each other's way. None outlives this."""
    cpus = sorted(os.sched_getaffinity(0))
    variables = {
        **os.environ,
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "experiments.balance_placed_worker"]
    processes = [
        subprocess.Popen(
            [
                *("taskset", "-c", str(cpus[min(rank, 1) % len(cpus)])),
                *(*command, str(rank), str(num), str(folder)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=variables,
            preexec_fn=die_with_parent,
        )
        for rank in range(num)
    ]
    try:
        yield Nodes(processes, folder)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
