"""What replicas send against how well they train: gradients, moments, and rarely.

Every form on digits (8 replicas) and on DES-LOC's toy (256 replicas), with the traffic
counted as it happens. The replicas are simulated with `jax.vmap`. Usage:

    python experiments/moment_sync.py [--quick]
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from optimizers_on_digits import Split, evaluate, initial, splits

from dtft.optim import (
    average_params,
    max_belief_phases,
    scale_by_max_belief,
    sync_moments,
)
from dtft.optim.per_replica import lift, map_rows
from experiments import report

NAME, AXIS = "moment_sync", "replica"
FACTORS = (0.5, 1.0, 2.0, 4.0, 32**0.5, 8.0, 128**0.5)
"""Learning rates that are tried, as multiples of RATE."""
REPLICAS, SEEDS, STEPS, BATCH, RATE = 8, 3, 400, 96, 3e-3
WORKERS, TOY_STEPS, TOY_RATE, NOISE = 256, 40_000, 1e-3, 1.5


@dataclass(frozen=True, kw_only=True, eq=False)
class Form:
    """What is exchanged, and how often. Hashed by identity: it is a static argument."""

    name: str
    kind: Literal["gradient", "operands", "state"]
    every: Mapping[str, int] = field(default_factory=dict)
    params_every: int = 1
    op: Literal["mean", "max"] = "mean"

    def transform(self, b1: float, b2: float) -> Any:
        """The optimizer, for the inside of a map over the replicas."""
        if self.kind == "gradient":
            return scale_by_max_belief(b1, b2)
        return sync_moments(
            max_belief_phases(b1, b2),
            AXIS,
            mode=self.kind,
            every=self.every,
            op={"nu_max": self.op},
        )

    def sent(self, state: Any) -> jax.Array:
        """What this update sent, in units of the parameters."""
        if self.kind == "gradient":
            return jnp.ones([])
        count = state.inner.count
        due = [count % k == 0 for n, k in self.every.items() if n not in state.taken]
        if self.kind == "state":
            due.append(count % self.params_every == 0)
        due += [number == count for number in state.taken.values()]
        return jnp.sum(jnp.stack(due).astype(jnp.float32))


def forms(rare: int, params: int, second: int) -> tuple[Form, ...]:
    """All that are compared, with the periods of one problem."""
    each = {"mu": 1, "nu_max": 1}
    return (
        Form(name="gradient mean", kind="gradient"),
        Form(name="patent: moments every step", kind="operands", every=each),
        Form(name="patent, maximum by max", kind="operands", every=each, op="max"),
        Form(
            name=f"patent, maximum every {rare}",
            kind="operands",
            every={"mu": 1, "nu_max": rare},
        ),
        Form(
            name=f"state: params and all moments every {params}",
            kind="state",
            every={"mu": params, "nu": params, "nu_max": params},
            params_every=params,
        ),
        Form(
            name=f"state: params, mu every {params}; nu, maximum every {second}",
            kind="state",
            every={"mu": params, "nu": second, "nu_max": second},
            params_every=params,
        ),
    )


def trained(
    form: Form,
    gradient: Callable[[Any, jax.Array, jax.Array], Any],
    start: Any,
    keys: jax.Array,
    rate: jax.typing.ArrayLike,
    decays: tuple[float, float],
    replicas: int,
) -> tuple[Any, jax.Array]:
    """Mean parameters at the end, and what a step sent in the mean.

    Args:
        form: what is exchanged.
        gradient: (parameters, replica, key) to one replica's gradient.
        start: parameters of all replicas at first.
        keys: one per step.
        rate: learning rate.
        decays: b1 and b2.
        replicas: how many.
    """
    transform = form.transform(*decays)
    state = lift(transform.init(start), replicas)
    rows = map_rows(lambda _: 0, state, lambda _: None)

    def one(params: Any, state: Any, index: jax.Array, key: jax.Array) -> Any:
        own = gradient(params, index, key)
        if form.kind == "gradient":
            own = jax.lax.pmean(own, AXIS)
        update, state = transform.update(own, state)
        params = jax.tree.map(lambda p, u: p - rate * u, params, update)
        if form.kind == "state":
            count, every = state.inner.count, form.params_every
            params = average_params(params, count, AXIS, every)
        return params, state

    everyone = jax.vmap(
        one, axis_name=AXIS, in_axes=(0, rows, 0, None), out_axes=(0, rows)
    )

    def step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        params, state = everyone(params, state, jnp.arange(replicas), key)
        return (params, state), form.sent(state)

    spread = jax.tree.map(lambda p: jnp.broadcast_to(p, (replicas, *p.shape)), start)
    (params, _), sent = jax.lax.scan(step, (spread, state), keys)
    return jax.tree.map(lambda p: jnp.mean(p, axis=0), params), jnp.mean(sent)


@partial(jax.jit, static_argnums=(0, 3))
def digits(form: Form, rate: jax.Array, data: Any, steps: int, seed: jax.Array) -> Any:
    """Validation loss, test loss, test accuracy and traffic of one run on digits."""
    fit, validation, test = data
    first, order = jax.random.split(jax.random.key(seed))

    def gradient(params: Any, index: jax.Array, key: jax.Array) -> Any:
        rows = jax.random.choice(key, len(fit.label), (BATCH,), replace=False)
        width = BATCH // REPLICAS
        mine = jax.lax.dynamic_slice_in_dim(rows, index * width, width)
        batch = Split(fit.image[mine], fit.label[mine])
        return jax.grad(lambda p: evaluate(p, batch)[0])(params)

    keys = jax.random.split(order, steps)
    params, sent = trained(
        form, gradient, initial(first), keys, rate, (0.9, 0.999), REPLICAS
    )
    return evaluate(params, validation)[0], *evaluate(params, test), sent


@partial(jax.jit, static_argnums=(0, 2))
def toy(form: Form, rate: jax.Array, steps: int) -> tuple[jax.Array, jax.Array]:
    """Distance to the optimum of Rosenbrock's function, and traffic."""

    def gradient(x: jax.Array, index: jax.Array, key: jax.Array) -> jax.Array:
        distance = x[1] - x[0] ** 2
        exact = jnp.stack([-2 * (1 - x[0]) - 400 * x[0] * distance, 200 * distance])
        return exact + NOISE * jax.random.normal(jax.random.fold_in(key, index), (2,))

    keys = jax.random.split(jax.random.key(0), steps)
    start = jnp.full(2, -0.5)
    x, sent = trained(form, gradient, start, keys, rate, (0.95, 0.99), WORKERS)
    return jnp.linalg.norm(x - 1), sent


def digits_rows(steps: int, num_seeds: int) -> list[list[Any]]:
    """Every form on digits, at the common learning rate and at its own best one.

    The best is that of the lowest validation loss.
    """
    data, rows = splits(), []
    for form in forms(rare=20, params=8, second=16):
        found = {}
        for factor in FACTORS:
            runs = [
                digits(form, jnp.float32(RATE * factor), data, steps, seed)
                for seed in range(num_seeds)
            ]
            found[factor] = np.asarray(runs).mean(axis=0).tolist()
        best = min(FACTORS, key=lambda factor: found[factor][0])
        for factor in dict.fromkeys((1.0, best)):
            _, loss, accuracy, sent = found[factor]
            which = " (best)" if factor == best else ""
            rows.append(
                [
                    *("digits", form.name, f"{factor:.3g}{which}"),
                    *(sent, f"{accuracy:.4f}", loss),
                ]
            )
            print(rows[-1], flush=True)
    return rows


def toy_rows(steps: int) -> list[list[Any]]:
    """Every form on the toy."""
    rows = []
    for form in forms(rare=692, params=192, second=692):
        distance, sent = toy(form, jnp.float32(TOY_RATE), steps)
        rows.append(["toy", form.name, "1", float(sent), "", float(distance)])
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Runs all; writes the table and the figure unless --quick."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few steps, nothing kept")
    if parser.parse_args().quick:
        digits_rows(20, 1)
        toy_rows(200)
        return
    rows = [*digits_rows(STEPS, SEEDS), *toy_rows(TOY_STEPS)]
    report.write(
        NAME,
        title="What replicas exchange: traffic against quality",
        command=f"python experiments/{NAME}.py",
        header=[
            "problem",
            "exchanged",
            "learning rate x",
            "bytes per step / bytes of parameters",
            "test accuracy",
            "test loss, or distance to the optimum",
        ],
        rows=rows,
        figure=figure(rows),
        notes=notes(),
    )


def notes() -> tuple[str, ...]:
    """How it was measured."""
    return (
        f"Digits: a network with one hidden layer, {REPLICAS} replicas with "
        f"{BATCH // REPLICAS} rows each, {STEPS} steps, Max-AdaBelief at {RATE:g} "
        f"times the factor shown; means over {SEEDS} seeds. One test image is 0.0028 "
        "of accuracy. Best: the factor of "
        f"{', '.join(f'{f:.3g}' for f in FACTORS)} with the lowest validation loss.",
        f"Toy (DES-LOC, arXiv 2505.22549): Rosenbrock's function from (-0.5, -0.5), "
        f"{WORKERS} workers, noise {NOISE} on every gradient, {TOY_STEPS} steps at "
        f"{TOY_RATE:g}, b1 0.95, b2 0.99. It shows that rare exchange does no harm, "
        "not that exchange helps: its noise is alike on all workers.",
        "Traffic counts exchanges as they happened: a kept maximum is exchanged early "
        "when an element of the update would exceed 16 (`refresh_above`), which "
        "digits needs whenever a unit or pixel wakes up.",
        "In the last form a replica gets the others' first moment without their "
        "maximum. Where it had no gradient of its own yet (digits: pixels that none of "
        "its few rows lit), it divides by next to nothing: exchange the maximum with "
        "the first moment where gradients are sparse.",
        "Moments of own gradients make steps up to sqrt(replicas) smaller, hence a "
        "higher best learning rate.",
    )


def figure(rows: list[list[Any]]) -> Any:
    """Quality against traffic, a panel per problem."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for axis, problem in zip(axes, ("digits", "toy"), strict=True):
        for _, name, factor, sent, _, value in (r for r in rows if r[0] == problem):
            marker = "^" if "best" in factor else "o"
            label = f"{name}, rate x {factor}"
            axis.plot(sent, value, marker, label=label)
        axis.set(
            xscale="log", xlabel="bytes per step / bytes of parameters", title=problem
        )
        axis.legend(fontsize=6)
    axes[0].set(yscale="log", ylabel="test loss")
    axes[1].set_ylabel("distance to the optimum")
    axes[1].set_ylim(0, 0.8)
    return drawn


if __name__ == "__main__":
    main()
