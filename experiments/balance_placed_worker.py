"""One node of `balance_placed.py`: a process that runs its part of a placed step.

Arguments: RANK NUM_NODES FOLDER. In the folder are the Unix sockets of all nodes; the
controller writes commands to stdin as JSON lines and reads answers from stdout. Arrays
go from node to node. Decides nothing.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from dtft.parallel.mpmd import Key

HIDDEN = (512, 1280, 256, 768, 1024, 256, 896, 640)
"""Inner width of each layer: no two neighbours take equally long."""
WIDTH, ROWS, MICROBATCHES = 256, 512, 8
CONNECT_S, STEP_S = 60.0, 120.0
LEARNING_RATE, MOMENTUM = 0.01, 0.9

Form = tuple[int, ...] | str
"""A division of the loss: the number of layers of each node, in a row, or the JSON form
of a placement of its operators."""


def loss(params: Any, batch: Any) -> Any:
    """A stack of unlike residual layers, and the mean square of its result."""
    import jax
    import jax.numpy as jnp

    x = batch["x"]
    for index, layer in enumerate(params):
        with jax.named_scope(f"layer{index}"):
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x - batch["y"]) ** 2)


def make_params() -> list[dict[str, Any]]:
    """The same in every process."""
    import numpy as np

    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Any:
        values = rng.standard_normal((rows, columns), np.float32)
        return values / np.float32(np.sqrt(rows))

    return [
        {"up": matrix(WIDTH, hidden), "down": matrix(hidden, WIDTH) / np.float32(4)}
        for hidden in HIDDEN
    ]


def make_batch() -> dict[str, Any]:
    """The same in every process, and in every step."""
    import numpy as np

    rng = np.random.default_rng(1)
    return {name: rng.standard_normal((ROWS, WIDTH), np.float32) for name in ("x", "y")}


def make_optimizer() -> Any:
    """It has a state that moves with parameters."""
    import optax

    return optax.sgd(LEARNING_RATE, MOMENTUM)


def traced_loss() -> Any:
    """The loss of one microbatch, as the planner sees it."""
    from dtft.planner.ir import trace

    part = {name: rows[: ROWS // MICROBATCHES] for name, rows in make_batch().items()}
    return trace(loss, make_params(), part)


def nodes_of_layers(counts: Sequence[int]) -> tuple[int, ...]:
    """The node of each operator with so many layers on each node."""
    import numpy as np

    from dtft.parallel.mpmd import nodes_of_scopes

    of_layer = np.repeat(np.arange(len(counts)), counts)
    table = {f"layer{index}": int(node) for index, node in enumerate(of_layer)}
    return nodes_of_scopes(traced_loss(), table)


def make_step(form: Form, devices: Sequence[Any]) -> Any:
    """The placed step of a division."""
    from dtft.parallel.mpmd import make_placed_step
    from dtft.placement import Placement

    is_placement = isinstance(form, str)
    return make_placed_step(
        loss,
        make_optimizer(),
        make_params(),
        make_batch(),
        nodes=Placement.from_json(form) if is_placement else nodes_of_layers(form),
        devices=devices,
        microbatches=MICROBATCHES,
        deadline_s=STEP_S,
    )


class Peers:
    """Connections to all other nodes; what comes is kept until it is asked for."""

    def __init__(self, rank: int, num: int, folder: Path, device: Any) -> None:
        """Waits until all nodes are connected.

        Raises:
            TimeoutError: a node cannot be reached.
        """
        self._device = device
        self._arrived: dict[Key, Any] = {}
        self._changed = threading.Condition()
        self._links: dict[int, Any] = {}
        with Listener(str(folder / f"{rank}"), "AF_UNIX", backlog=num) as listener:
            for other in range(rank):
                link = _reached(folder / f"{other}", other)
                link.send(rank)
                self._links[other] = link
            for _ in range(rank + 1, num):
                link = listener.accept()
                self._links[link.recv()] = link
        for link in self._links.values():
            threading.Thread(target=self._listen, args=(link,), daemon=True).start()

    def send(self, key: Key, array: Any, node: int) -> None:
        """Sends an array to a node's process."""
        import numpy as np

        self._links[node].send((tuple(key), np.asarray(array)))

    def receive(self, key: Key, deadline: float) -> Any:
        """An array that another node sent.

        Raises:
            TimeoutError: it did not come.
        """
        import jax

        with self._changed:
            left = deadline - time.monotonic()
            if not self._changed.wait_for(lambda: key in self._arrived, left):
                raise TimeoutError(f"{key} did not come")
            return jax.device_put(self._arrived.pop(key), self._device)

    def _listen(self, link: Any) -> None:
        while True:
            try:
                name, array = link.recv()
            except (EOFError, OSError):  # the other process has ended
                return
            with self._changed:
                self._arrived[Key(*name)] = array
                self._changed.notify_all()


def _reached(path: Path, other: int) -> Any:
    """A connection to a node that may not listen yet."""
    end = time.monotonic() + CONNECT_S
    while True:
        try:
            return Client(str(path), "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"node {other} did not listen for {CONNECT_S:g} s"
                ) from None
            time.sleep(0.02)


def kept(folder: str, state: Any) -> Any:
    """A state with the arrays that nodes left in a folder in place of its own."""
    import jax
    import numpy as np

    from dtft.checkpoint.state import to_paths

    leaves = [
        np.load(file) if (file := _file(folder, path)).exists() else leaf
        for path, leaf in to_paths(state).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _file(folder: str, path: str) -> Path:
    return Path(folder) / f"{path.replace('/', '.')}.npy"


class Worker:
    """The node's steps, one for each division that was asked for, and its state."""

    def __init__(self, rank: int, num: int, peers: Peers, device: Any) -> None:
        self._rank, self._peers = rank, peers
        self._devices = [device] * num
        self._steps: dict[Form, Any] = {}
        self._state: Any = None
        self._batch = make_batch()
        self._now: Any = None
        """The step in force."""

    def prepare(self, form: Any) -> None:
        """Makes a division's step, once; `begin` comes before it is run."""
        form = form if isinstance(form, str) else tuple(form)
        if form not in self._steps:
            self._steps[form] = make_step(form, self._devices)

    def begin(self, form: Any, folder: str) -> None:
        """Changes to a division; the state is what nodes left in the folder."""
        import jax

        self._now = self._steps[form if isinstance(form, str) else tuple(form)]
        state = self._now.init(make_params())
        self._state = jax.block_until_ready(self._now.moved(kept(folder, state)))

    def leave(self, folder: str) -> None:
        """Writes the arrays that are updated here to the folder."""
        import numpy as np

        from dtft.checkpoint.state import to_paths

        homes = to_paths(self._now.homes)
        for path, leaf in to_paths(self._state).items():
            if homes[path] == self._rank:
                np.save(_file(folder, path), np.asarray(leaf))

    def step(self) -> list[list[Any]]:
        """Runs one step: name, microbatch, ready, start and end of each task."""
        self._state, spans = self._now.run_node(
            self._rank, self._state, self._batch, self._peers
        )
        return [[s.name, s.microbatch, s.ready_s, s.start_s, s.end_s] for s in spans]


def main() -> None:
    """Answers commands until stdin ends."""
    import jax

    rank, num, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(folder / f"programs{rank}"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    device = jax.devices()[0]
    worker = Worker(rank, num, Peers(rank, num, folder, device), device)
    commands: Mapping[str, Any] = {
        "prepare": worker.prepare,
        "begin": worker.begin,
        "leave": worker.leave,
        "step": worker.step,
    }
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(commands[name](*arguments)), flush=True)
    os._exit(0)  # threads that listen have nothing to finish


if __name__ == "__main__":
    main()
