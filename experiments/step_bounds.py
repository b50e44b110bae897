"""How large the step of Max-AdaBelief gets, and what clipping the update changes.

The maximum bounds the step where gradients no longer grow. Where they grow for long it
does nothing, and the step reaches a thousand learning rates; `optax.clip` after the
transform bounds it whatever the gradients do. Rows are gradients of one coordinate, and
a small network that is trained on scikit-learn's digits. Usage:

    python experiments/step_bounds.py [--quick]
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dtft.optim import scale_by_max_belief
from experiments import report

NAME = "step_bounds"
BOUND = 16.0
"""Largest update, in learning rates: a little above 15.5, the largest that
Max-AdaBelief makes of a constant gradient."""
STEPS = 10_000
TRANSFORMS: dict[str, Any] = {
    "adabelief": optax.scale_by_belief(),
    "amsgrad": optax.scale_by_amsgrad(),
    "max_adabelief": scale_by_max_belief(),
    "max_adabelief, clipped": optax.chain(scale_by_max_belief(), optax.clip(BOUND)),
}


def gradients(steps: int) -> dict[str, np.ndarray]:
    """Gradients [steps] of one coordinate, by what they are."""
    ramp, t = np.linspace(0.01, 1, steps), np.arange(steps)
    noise = np.random.default_rng(0).normal(size=steps)
    return {
        "constant": np.ones(steps),
        "ramp .01 to 1": ramp,
        "the same, 1 % noise": ramp * (1 + 0.01 * noise),
        "the same, 10 % noise": ramp * (1 + 0.1 * noise),
        "the same, 100 % noise": ramp * (1 + noise),
        f"sine of period {steps}": np.sin(2 * np.pi * t / steps),
        "noise": noise,
    }


def largest_update(transform: Any, of: np.ndarray) -> float:
    """The largest |update| before the learning rate."""

    def step(state: Any, gradient: jax.Array) -> tuple[Any, jax.Array]:
        update, state = transform.update(gradient, state)
        return state, jnp.abs(update)

    with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
        run: Callable[..., Any] = jax.jit(
            lambda g: jnp.max(jax.lax.scan(step, transform.init(g[0]), g)[1])
        )
        return float(run(jnp.asarray(of, jnp.float32)))


def trained(transform: Any, epochs: int, seeds: int) -> Callable[[float], Any]:
    """Learning rate to test accuracies [seeds] and largest |update|s of networks."""
    (images, labels), (test_images, test_labels) = digits()

    def logits(params: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ params["in"]) @ params["out"]

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits(params, images[rows]), labels[rows]
        )
        return jnp.mean(losses)

    def one(key: jax.Array, rate: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(key, 3)
        params = {
            "in": jax.random.normal(keys[0], (64, 64)) / 8,
            "out": jax.random.normal(keys[1], (64, 10)) / 8,
        }

        def step(carry: Any, key: jax.Array) -> Any:
            params, state = carry
            rows = jax.random.choice(key, len(labels), (128,))
            updates, state = transform.update(jax.grad(loss)(params, rows), state)
            size = jnp.max(jnp.asarray([jnp.abs(u).max() for u in updates.values()]))
            params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
            return (params, state), size

        order = jax.random.split(keys[2], epochs * len(labels) // 128)
        (params, _), sizes = jax.lax.scan(step, (params, transform.init(params)), order)
        found = jnp.argmax(logits(params, test_images), axis=-1)
        return jnp.mean(found == test_labels), jnp.max(sizes)

    every: Callable[..., Any] = jax.jit(jax.vmap(one, in_axes=(0, None)))
    return lambda rate: every(jax.random.split(jax.random.key(0), seeds), rate)


def digits() -> Any:
    """Pixels in [0, 1] and labels, 1,400 rows to train and the rest to test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(labels))
    x, y = jnp.asarray(images[rows] / 16, jnp.float32), jnp.asarray(labels[rows])
    return (x[:1400], y[:1400]), (x[1400:], y[1400:])


def main() -> None:
    """Runs every row; writes the table unless --quick."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1,000 steps, one seed")
    quick = parser.parse_args().quick
    rows = [
        [name, *(f"{largest_update(t, of):.3g}" for t in TRANSFORMS.values())]
        for name, of in gradients(1000 if quick else STEPS).items()
    ]
    seeds = 1 if quick else 5
    with jax.numpy_dtype_promotion("standard"):
        networks = [trained(t, 3 if quick else 40, seeds) for t in TRANSFORMS.values()]
        for rate in (1e-3, 1e-2):
            runs = [network(rate) for network in networks]
            cells = [f"{max(s):.3g} ({100 * np.mean(a):.1f} %)" for a, s in runs]
            rows.append([f"digits, learning rate {rate:g}", *cells])
    header = ["gradient", *TRANSFORMS]
    if quick:
        print("\n".join(report.table(header, rows)))
        return
    report.write(
        NAME,
        title="The largest update, in learning rates",
        command=f"python experiments/{NAME}.py",
        header=header,
        rows=rows,
        notes=(
            f"Default betas and eps; {STEPS} steps of one coordinate, float32. "
            f"Clipped: `optax.chain(scale_by_max_belief(), optax.clip({BOUND}))`, "
            "before the learning rate. Digits: a network of 64 hidden units, 40 epochs "
            f"of batches of 128, the largest update of {seeds} seeds and their mean "
            "test accuracy.",
            "Where no update is larger than the bound, clipping changes no bit. Where "
            "gradients grow for long it is what bounds the step; the maximum is not.",
        ),
    )


if __name__ == "__main__":
    main()
