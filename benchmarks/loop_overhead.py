"""Compares a step of `dtft train` with a step of a plain jitted Flax and optax loop.

    python benchmarks/loop_overhead.py

Same model, data, optimizer and batch, one process, one device; the two take turns in
one run, so that a busy machine slows both alike. `plain` is what one would write by
hand: rows by index from arrays in memory, one jitted donating step, the loss printed
every 10 steps, no checkpoints. `train` is `dtft.train.loop.run` as `dtft train` calls
it, with metrics files, checks for NaN and its log. `saves` is `plain` with an
asynchronous Orbax checkpoint every 50 steps, and `exports` is `train` with its default
one, every 50 steps too. Prints the median wall time of a step of each turn, and the
median ratio of `train` to `plain`, and of `exports` to `saves`, in one round.
"""

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=3")

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dtft.config import Experiment, load_experiment
from dtft.train import LocalRuntime, run

CASES = {
    "digits_cnn, 1 device": ("digits_cnn", "--cluster.hosts", "1"),
    "digits_cnn, 3 devices": ("digits_cnn",),
    "chars_transformer, 1 device": (
        *("chars_transformer", "--cluster.hosts", "1", "--mesh.fsdp", "1"),
        *("--data.global_batch", "96"),
    ),
}
"""Configs. `dtft train` runs digits_cnn, whose config has three hosts, on three devices
of one CPU. The batch of the last makes a step of about 100 ms."""
LOG_EVERY = 10
SAVE_EVERY = 50
BESIDE = {"plain": "plain", "train": "plain", "saves": "saves", "exports": "saves"}
"""Which way each one is compared with."""


def experiment_of(case: str, steps: int, directory: str, interval: int) -> Experiment:
    """The config of a case, to its last step."""
    name, *options = CASES[case]
    given = {
        "--stop.steps": steps,
        "--log.run_dir": directory,
        "--log.tensorboard": False,
        "--checkpoint.storage_interval": interval,
        "--log.every": LOG_EVERY,
    }
    words = [str(word) for pair in given.items() for word in pair]
    return load_experiment(name, [*options, *words], "loop_overhead")


class Timed(LocalRuntime):
    """Notes when each step is handed to the device."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self.at: list[float] = []

    def dispatched(self, step: int) -> None:
        """Notes it."""
        super().dispatched(step)
        self.at.append(time.perf_counter())


def trained(case: str, steps: int, warm: int, interval: int) -> float:
    """Seconds of a step of dtft's loop."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = experiment_of(case, steps, f"{folder}/run", interval)
        runtime = Timed(experiment)
        with contextlib.redirect_stdout(io.StringIO()):
            run(experiment, runtime)
    return (runtime.at[-1] - runtime.at[warm]) / (steps - 1 - warm)


def plain(case: str, steps: int, warm: int, interval: int = 0) -> float:
    """Seconds of a step of a loop written by hand."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = experiment_of(case, steps, f"{folder}/run", 0)
        if not interval:
            return by_hand(experiment, steps, warm, lambda step, state: None)
        options = ocp.CheckpointManagerOptions(
            save_interval_steps=interval, max_to_keep=experiment.checkpoint.storage_keep
        )
        with ocp.CheckpointManager(f"{folder}/saved", options=options) as manager:

            def save(step: int, state: Any) -> None:
                if step and manager.should_save(step):
                    # On CPUs Orbax reads buffers that the next step donates.
                    copy = jax.tree.map(jax.numpy.copy, state)
                    manager.save(step, args=ocp.args.StandardSave(copy))

            return by_hand(experiment, steps, warm, save)


def by_hand(
    experiment: Experiment, steps: int, warm: int, save: Callable[[int, Any], None]
) -> float:
    """Seconds of a step."""
    columns: Any = experiment.data.load()[0]
    optimizer = experiment.optim.build(None)
    model = experiment.model.build(nnx.Rngs(experiment.seed))
    graph, params = nnx.split(model, nnx.Param)
    opt_state = optimizer.init(params)

    @jax.jit
    def loss_of(params: Any, batch: Any) -> Any:
        losses, metrics = experiment.model.loss(nnx.merge(graph, params), batch)
        return losses.mean(), {k: v.mean() for k, v in metrics.items()}

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(
            params, batch
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        norm = optax.tree.norm(grads)
        metrics = {**metrics, "loss": loss, "grad_norm": norm}
        return optax.apply_updates(params, updates), opt_state, metrics

    compiled = jax.jit(step, donate_argnums=(0, 1))
    count = len(next(iter(columns.values())))
    size = experiment.data.global_batch
    devices = np.asarray(jax.devices()[: experiment.cluster.hosts])
    mesh = jax.sharding.Mesh(devices, ("rows",))
    by_rows = NamedSharding(mesh, PartitionSpec("rows"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    params, opt_state = jax.device_put((params, opt_state), everywhere)
    generator = np.random.default_rng(experiment.seed)
    order, at, sink = generator.permutation(count), [], io.StringIO()
    place = 0
    for number in range(steps):
        if place + size > count:
            order, place = generator.permutation(count), 0
        rows = order[place : place + size]
        place += size
        batch = {name: column[rows] for name, column in columns.items()}
        batch = jax.device_put(batch, by_rows)
        params, opt_state, metrics = compiled(params, opt_state, batch)
        at.append(time.perf_counter())
        if number % LOG_EVERY == 0:
            print(number, float(metrics["loss"]), file=sink)
        save(number, (params, opt_state))
    return (at[-1] - at[warm]) / (steps - 1 - warm)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm", type=int, default=50)
    parser.add_argument("--case", choices=CASES, action="append")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        for case in options.case or CASES:
            measure(case, options)


def measure(case: str, options: argparse.Namespace) -> None:
    """Times the turns of one case and prints them."""
    steps = (
        options.steps if case.startswith("digits_cnn") else max(options.steps // 4, 40)
    )
    warm = min(options.warm, steps // 3)
    ways: dict[str, Callable[[], float]] = {
        "plain": lambda: plain(case, steps, warm),
        "train": lambda: trained(case, steps, warm, 0),
        "saves": lambda: plain(case, steps, warm, SAVE_EVERY),
        "exports": lambda: trained(case, steps, warm, SAVE_EVERY),
    }
    turns = []
    for turn in range(options.rounds):  # each goes first as often as the others
        names = [*ways][turn % len(ways) :] + [*ways][: turn % len(ways)]
        turns.append({name: ways[name]() for name in names})
    for name in ways:
        times = [turn[name] for turn in turns]
        ratios = [turn[name] / turn[BESIDE[name]] for turn in turns]
        print(
            f"{case:28s} {name:8s} {1e3 * statistics.median(times):8.2f} ms a step, "
            f"{statistics.median(ratios):5.2f} x {BESIDE[name]} "
            f"({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
