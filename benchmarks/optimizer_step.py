"""Time and bytes of one optimizer update, ours against optax's, on this machine.

    python benchmarks/optimizer_step.py [--quick] [--json FILE]

Every optimizer's jitted, donated update runs in turn within each round, and a ratio is
taken within the round, so that whatever else the machine does hits all of them. The
ratio of the minima over the rounds is that of undisturbed updates. Bytes are those the
compiled program's operations read and write.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dtft.optim import max_adabelief

OURS = "max_adabelief"
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    OURS: max_adabelief,
    "optax.adabelief": optax.adabelief,
    "optax.amsgrad": optax.amsgrad,
}
MILLION = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tree of parameters and how often its update is timed."""

    parameters: int
    """Trained numbers, all float32."""
    leaves: int
    """Arrays they are divided into; their sizes differ."""
    rounds: int
    """Times that each optimizer's turn comes."""
    steps: int
    """Updates in a turn."""


CASES = (
    Case(parameters=MILLION, leaves=200, rounds=15, steps=32),
    Case(parameters=16 * MILLION, leaves=1, rounds=15, steps=4),
    Case(parameters=8 * MILLION, leaves=1, rounds=15, steps=8),
    Case(parameters=8 * MILLION, leaves=16, rounds=15, steps=8),
    Case(parameters=64 * MILLION, leaves=1, rounds=9, steps=2),
    Case(parameters=64 * MILLION, leaves=16, rounds=9, steps=2),
)
QUICK = (
    Case(parameters=MILLION, leaves=1, rounds=3, steps=2),
    Case(parameters=MILLION, leaves=16, rounds=3, steps=2),
    Case(parameters=MILLION, leaves=200, rounds=3, steps=2),
)


def sizes(total: int, leaves: int) -> list[int]:
    """Unlike sizes, multiples of 128, that add up to `total`.

    >>> sizes(1024, 1), sizes(1024, 3)
    ([1024], [128, 256, 640])
    """
    weight = leaves * (leaves + 1) // 2
    parts = [total * i // weight // 128 * 128 for i in range(1, leaves)]
    return [*parts, total - sum(parts)]


class Update:
    """One optimizer's compiled update, and the parameters and state it works on."""

    def __init__(self, make: Callable[..., Any], shapes: Sequence[int]) -> None:
        """Compiles; allocates the state."""
        self._optimizer = make(1e-3)
        params = [jnp.zeros(n) for n in shapes]
        self._carried = (params, self._optimizer.init(params))
        abstract = jax.eval_shape(lambda: (self._carried, params))
        self.compiled = jax.jit(self._step, donate_argnums=0).lower(*abstract).compile()

    def seconds(self, gradients: Any, steps: int) -> float:
        """Mean wall time of an update over `steps` of them."""
        start = time.perf_counter()
        for _ in range(steps):
            self._carried = self.compiled(self._carried, gradients)
        jax.block_until_ready(self._carried)
        return (time.perf_counter() - start) / steps

    def _step(self, carried: Any, gradients: Any) -> Any:
        params, state = carried
        with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
            updates, state = self._optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state


def measure(case: Case) -> dict[str, Any]:
    """The figures of one case, by optimizer."""
    shapes = sizes(case.parameters, case.leaves)
    keys = jax.random.split(jax.random.key(0), case.leaves)
    draw = jax.jit(lambda key, n: jax.random.normal(key, (n,)), static_argnums=1)
    gradients = [draw(key, n) for key, n in zip(keys, shapes, strict=True)]
    updates = {name: Update(make, shapes) for name, make in OPTIMIZERS.items()}
    for update in updates.values():
        update.seconds(gradients, 1)
    names = list(updates)
    seen: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(case.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seen[name].append(updates[name].seconds(gradients, case.steps))
    accessed = {
        name: _bytes_accessed(update.compiled) / case.parameters
        for name, update in updates.items()
    }
    return {**asdict(case), "optimizers": summarize(seen, accessed)}


def summarize(
    seen: dict[str, list[float]], accessed: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """Median time, bytes per parameter, our time over each other's by round and minima.

    >>> figures = summarize({OURS: [2.0, 3.0, 9.0], "other": [1.0, 2.0, 3.0]},
    ...                     {OURS: 36.0, "other": 28.0})
    >>> figures["other"]["ours_over_it"], figures["other"]["step_s"]
    (2.0, 2.0)
    >>> figures["other"]["ratio_of_minima"]
    2.0
    """
    figures = {}
    for name, times in seen.items():
        ratios = [ours / its for ours, its in zip(seen[OURS], times, strict=True)]
        figures[name] = {
            "step_s": median(times),
            "bytes_per_parameter": accessed[name],
            "ours_over_it": median(ratios),
            "ratio_of_minima": min(seen[OURS]) / min(times),
            "ratios": ratios,
        }
    return figures


def _bytes_accessed(compiled: Any) -> float:
    return compiled.cost_analysis()["bytes accessed"]


def _line(case: dict[str, Any], name: str) -> str:
    figures = case["optimizers"][name]
    ratios = figures["ratios"]
    return (
        f"{case['parameters'] // MILLION:>5} Mi {case['leaves']:>7} {name:<16} "
        f"{figures['step_s'] * 1e3:>9.2f} {figures['bytes_per_parameter']:>8.1f} "
        f"{figures['ours_over_it']:>8.3f} {figures['ratio_of_minima']:>7.3f}  "
        f"{min(ratios):.2f} to {max(ratios):.2f}"
    )


def main() -> None:
    """Measures every case, prints a table and writes the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small and inexact")
    parser.add_argument(
        "--json", type=Path, default=Path("runs/bench/optimizer_step.json")
    )
    options = parser.parse_args()
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, optax {optax.__version__}, {device.device_kind}")
    print(
        "  params  leaves optimizer          ms/step  B/param  ours/it  minima  rounds"
    )
    results = []
    for case in QUICK if options.quick else CASES:
        results.append(measure(case))
        for line in map(partial(_line, results[-1]), OPTIMIZERS):
            print(line, flush=True)
    figures = {
        "jax": jax.__version__,
        "optax": optax.__version__,
        "device": device.device_kind,
        "cases": results,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
