"""One of several gloo processes that record when gradients are ready and reduced.

`triggers.py` starts it: RANK NUM_PROCESSES ADDRESS DIRECTORY DELAY_S. It answers with
one JSON object: for each trigger, events in seconds on the monotonic clock, which
all processes share; and the reduced gradients of each trigger, as nested lists.

Callbacks inside the compiled programs note `ready <layer>`, when the device has its own
gradient of a layer, and `reduced <layer>`, when it has the mean (trigger `layer` only:
the others have all means when they are `done`). The host notes `commanded` (trigger
`host` only) and `done`.

The last process is late with its gradient of layer 0, the last one that a backward pass
makes: it waits until every other process has come as far as the trigger lets it, which
they tell through files in DIRECTORY, and then DELAY_S more. So the order of events does
not hang on the load of the machine.

Shape suffixes: B rows, D features, L layers.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dtft.collectives.gradients import (
    HostCommanded,
    Trigger,
    reduce_in_backward,
    reduced_gradients,
)
from experiments import worlds

B, D, L = 16, 8, 3
AWAITED: dict[Trigger, str] = {
    "host": "ready 0",
    "device": "ready 0",
    "layer": "reduced 1",
}
"""How far the others come without the late process's gradient of layer 0."""
DEADLINE_S = 60.0


class Recorder:
    """Events of the step that is recorded now, and the lateness of one process."""

    def __init__(self, rank: int, num: int, directory: Path, delay_s: float) -> None:
        self.rank, self.num = rank, num
        self.directory, self.delay_s = directory, delay_s
        self.trigger: Trigger | None = None
        self.events: dict[str, float] = {}

    def note(self, event: str) -> None:
        """Remembers when an event was, and tells the other processes of it."""
        if self.trigger is not None:
            self.events[event] = time.monotonic()
            self._file(self.rank, event).touch()

    def on_device(self, event: str, layer: Any) -> np.ndarray:
        """Called by the program; what uses its answer is held up."""
        name = f"{event} {int(layer)}"
        if self.rank == self.num - 1 and name == "ready 0" and self.trigger:
            self._be_late(AWAITED[self.trigger])
        self.note(name)
        return np.zeros((), np.float32)

    def _be_late(self, awaited: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not all(self._file(r, awaited).exists() for r in range(self.num - 1)):
            if time.monotonic() > end:
                raise TimeoutError(f"{self.trigger}: not all came to {awaited!r}")
            time.sleep(0.01)
        time.sleep(self.delay_s)

    def _file(self, rank: int, event: str) -> Path:
        return self.directory / f"{self.trigger} {rank} {event}"


def noted(recorder: Recorder, event: str) -> Callable[[Any, jax.Array], Any]:
    """An identity of a layer whose backward pass notes when its gradient is there."""

    @jax.custom_vjp
    def identity(w: jax.Array, layer: jax.Array) -> jax.Array:
        return w

    def forward(w: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w, layer

    def backward(layer: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
        # The callback waits for the gradient, and whoever uses it for the callback.
        zero = io_callback(
            lambda i, _: recorder.on_device(event, i),
            jax.ShapeDtypeStruct((), jnp.float32),
            layer,
            gradient[0, 0],
        )
        return gradient + zero, None

    identity.defvjp(forward, backward)
    return identity


def loss(
    w_LDD: jax.Array,
    batch: dict[str, jax.Array],
    of_layer: Callable[[jax.Array, jax.Array], jax.Array] = lambda w, _: w,
) -> jax.Array:
    """A scan over layers, so that no compiler flag decides where reductions lie."""

    def body(x_BD: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return jnp.tanh(x_BD @ of_layer(*layer)), None

    x_BD, _ = jax.lax.scan(body, batch["x"], (w_LDD, jnp.arange(L)))
    return jnp.mean((x_BD - batch["y"]) ** 2)


def gradients_of(recorder: Recorder, mesh: Mesh, trigger: Trigger) -> Any:
    """The trigger's function; for `host` one that notes the command."""
    ready, reduced = noted(recorder, "ready"), noted(recorder, "reduced")

    def reduced_here(w: jax.Array, layer: jax.Array) -> jax.Array:
        return ready(reduce_in_backward(reduced(w, layer), "replica"), layer)

    def recorded(params: dict[str, jax.Array], batch: Any) -> jax.Array:
        here = reduced_here if trigger == "layer" else ready
        return loss(params["layers"], batch, here)

    if trigger != "host":
        names = ("layers",) if trigger == "layer" else ()
        return reduced_gradients(
            recorded, mesh, "replica", trigger=trigger, reduced_by_loss=names
        )
    function = HostCommanded(recorded, mesh, "replica")

    def in_phases(params: Any, batch: Any) -> Any:
        rows = function.local_gradients(params, batch)
        function.await_command(rows)
        recorder.note("commanded")
        return function.reduce(rows)

    return in_phases


def data() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The layers' weights [L, D, D] and the batch of all processes."""
    random = np.random.default_rng(0)
    w_LDD = random.normal(size=(L, D, D)).astype(np.float32)
    x_BD, y_BD = random.normal(size=(2, B, D)).astype(np.float32)
    return w_LDD, {"x": x_BD, "y": y_BD}


def record(
    recorder: Recorder, mesh: Mesh, trigger: Trigger
) -> tuple[dict[str, float], list[Any]]:
    """One step to compile and connect, then the one that counts."""
    w_LDD, host_batch = data()
    params = {"layers": _placed(w_LDD, mesh, PartitionSpec())}
    rows = PartitionSpec("replica")
    batch = {name: _placed(value, mesh, rows) for name, value in host_batch.items()}
    function = gradients_of(recorder, mesh, trigger)
    jax.block_until_ready(function(params, batch))
    recorder.trigger, recorder.events = trigger, {}
    recorder.note("begun")
    _, gradients = jax.block_until_ready(function(params, batch))
    recorder.note("done")
    recorder.trigger = None
    return recorder.events, np.asarray(gradients["layers"]).tolist()


def _placed(value: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)


def main(rank: int, num: int, address: str, directory: Path, delay_s: float) -> None:
    """Joins the world, records every trigger, prints the events."""
    worlds.join(rank, num, address)
    mesh = jax.make_mesh((num,), ("replica",), (AxisType.Auto,))
    recorder = Recorder(rank, num, directory, delay_s)
    recorded = {name: record(recorder, mesh, name) for name in get_args(Trigger)}
    events = {name: pair[0] for name, pair in recorded.items()}
    gradients = {name: pair[1] for name, pair in recorded.items()}
    worlds.answer({"events": events, "gradients": gradients})


if __name__ == "__main__":
    _, a_rank, a_num, an_address, a_directory, a_delay_s = sys.argv
    main(int(a_rank), int(a_num), an_address, Path(a_directory), float(a_delay_s))
