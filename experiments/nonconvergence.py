"""Adam and AdaBelief go to the wrong end of [-1, 1]; with the maximum they do not.

Online linear losses f_t(x) = c_t x on [-1, 1], where a rare large gradient points
downhill towards the optimum x = -1 and frequent small ones point away (Reddi et al.,
2018). An optimizer that forgets the rare one goes to +1. Usage:

    python experiments/nonconvergence.py [--quick]
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax

from dtft.optim import scale_by_max_belief
from experiments import report

NAME = "nonconvergence"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Gradients and settings of one row."""

    rare: float
    """The gradient of every `period`-th step, the first included."""
    usual: float
    """The gradient of the other steps."""
    period: int
    b1: float
    b2: float
    rate: float
    """The learning rate of step t is rate / sqrt(t)."""
    steps: int
    eps: float = 1e-16
    eps_root: float = 1e-16

    def __str__(self) -> str:
        return f"{self.rare:+g} every {self.period}th step, else {self.usual:+g}"


PROBLEMS = (
    Problem(rare=10, usual=-1, period=10, b1=0.5, b2=0.5, rate=0.5, steps=10_000),
    Problem(rare=1010, usual=-10, period=101, b1=0.9, b2=0.99, rate=1, steps=100_000),
    Problem(rare=1010, usual=-10, period=101, b1=0.9, b2=0.99, rate=0.5, steps=100_000),
    Problem(rare=1010, usual=-10, period=101, b1=0.9, b2=0.9, rate=0.5, steps=1000_000),
)


def transforms(problem: Problem) -> dict[str, Any]:
    """The compared optimizers without their learning rate, by name."""
    b1, b2 = problem.b1, problem.b2
    eps, root = problem.eps, problem.eps_root
    return {
        "adam": optax.scale_by_adam(b1, b2),
        "adabelief": optax.scale_by_belief(b1, b2, eps, root),
        "amsgrad": optax.scale_by_amsgrad(b1, b2),
        "max_adabelief": scale_by_max_belief(b1, b2, eps, root),
        "max_adabelief, bias_correct_max=False": scale_by_max_belief(
            b1, b2, eps, root, bias_correct_max=False
        ),
    }


def trajectory(problem: Problem, transform: Any, points: int = 100) -> np.ndarray:
    """Mean of x over each of `points` equal parts of the run, from x = 0."""

    def step(carry: tuple[jax.Array, Any], t: jax.Array) -> tuple[Any, jax.Array]:
        x, state = carry
        rare = jnp.equal(t % problem.period, 1)
        gradient = jnp.where(rare, problem.rare, problem.usual).astype(x.dtype)
        update, state = transform.update(gradient, state)
        rate = problem.rate / jnp.sqrt(t.astype(x.dtype))
        x = jnp.clip(x - rate * update, -1.0, 1.0)
        return (x, state), x

    def part(carry: tuple[jax.Array, Any], t: jax.Array) -> tuple[Any, jax.Array]:
        carry, xs = jax.lax.scan(step, carry, t)
        return carry, jnp.mean(xs)

    times = jnp.arange(1, problem.steps + 1).reshape(points, -1)
    start = jnp.zeros([])
    with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
        run: Callable[..., Any] = jax.jit(lambda c: jax.lax.scan(part, c, times)[1])
        return np.asarray(run((start, transform.init(start))))


def end(means: np.ndarray) -> float:
    """Mean of x over the last tenth of the steps; the optimum is -1."""
    return float(np.mean(means[-len(means) // 10 :]))


def main() -> None:
    """Runs every row; writes the table and the figure unless --quick."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first row only")
    quick = parser.parse_args().quick
    problems = PROBLEMS[:1] if quick else PROBLEMS
    runs = [
        {name: trajectory(p, t) for name, t in transforms(p).items()} for p in problems
    ]
    header = ["gradient", "b1, b2", "learning rate", "steps", *runs[0]]
    rows = [
        [str(p), f"{p.b1}, {p.b2}", f"{p.rate}/sqrt(t)", f"{p.steps:.0e}"]
        + [f"{end(means):+.3f}" for means in run.values()]
        for p, run in zip(problems, runs, strict=True)
    ]
    if quick:
        print("\n".join(report.table(header, rows)))
        return
    report.write(
        NAME,
        title="Where the optimizers end: mean x of the last tenth, optimum -1",
        command=f"python experiments/{NAME}.py",
        header=header,
        rows=rows,
        figure=figure(problems, runs),
        notes=(
            "Every run starts at x = 0 and is clipped to [-1, 1]; float32. +1 is the "
            "worst point, -1 the best. Adam and AMSGrad with eps 1e-8, the others with "
            "eps = eps_root = 1e-16. Deterministic: there is one run per cell.",
        ),
    )


def figure(problems: Any, runs: Any) -> Any:
    """x against the step, one panel per row of the table."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, len(problems), figsize=(15, 3.5), sharey=True)
    for axis, problem, run in zip(axes, problems, runs, strict=True):
        for name, means in run.items():
            steps = (np.arange(len(means)) + 1) * problem.steps / len(means)
            axis.plot(steps, means, label=name)
        axis.set(
            title=f"{problem}\nb = {problem.b1}, {problem.b2}, "
            f"rate {problem.rate}/sqrt(t)",
            xlabel="step",
            xscale="log",
        )
        axis.title.set_fontsize(8)
    axes[0].set_ylabel("x (optimum -1)")
    axes[-1].legend(fontsize=7)
    return drawn


if __name__ == "__main__":
    main()
