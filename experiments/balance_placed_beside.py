"""What the divisions that `balance_placed.py` ends with are measured beside.

Contiguous splits, all in turn, and the best of them once more, interleaved with the
divisions; and the same training undivided. Must not know how divisions came about.
"""

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

from experiments.balance_placed_nodes import Nodes, step_s
from experiments.balance_placed_worker import (
    Form,
    loss,
    make_batch,
    make_optimizer,
    make_params,
)

BEST, REPEATS = 3, 8
"""So many of the splits that were best at first are measured so many times more."""
STEPS = 4
"""Of each time, after one that is not counted."""

Measured = Mapping[Form, Sequence[float]]
"""Of each division the seconds of each measured step."""


def splits_beside(
    nodes: Nodes, splits: Sequence[Form], divisions: Sequence[Form]
) -> Measured:
    """Seconds of steps of all splits, of the best again, and of divisions with them."""
    found: dict[Form, list[float]] = {form: [] for form in (*splits, *divisions)}
    _measure(nodes, found, splits)
    first = sorted(splits, key=lambda form: median(found[form]))[:BEST]
    for _ in range(REPEATS):
        _measure(nodes, found, list(dict.fromkeys((*first, *divisions))))
    return found


def _measure(
    nodes: Nodes, found: Mapping[Form, list[float]], forms: Sequence[Form]
) -> None:
    for form in forms:
        nodes.change(None, form, nodes.folder / "nothing")
        found[form].extend(step_s(step) for step in nodes.steps(1 + STEPS)[1:])


def result(measured: Measured, splits: Collection[Form], form: Form) -> dict[str, Any]:
    """How a division compares with the best split of those measured again."""
    most = max(len(seconds) for seconds in measured.values()) // 2
    medians = {
        split: median(measured[split])
        for split in splits
        if len(measured[split]) > most
    }
    best = min(medians, key=lambda split: medians[split])
    own_s = median(measured[form])
    return {
        "step_s": own_s,
        "best": best,
        "best_step_s": medians[best],
        "over_best": own_s / medians[best],
    }


def undivided(num_steps: Collection[int]) -> dict[int, list[Any]]:
    """Parameters after so many steps of the undivided step, as a list of arrays."""
    import jax
    import optax

    optimizer, batch = make_optimizer(), make_batch()

    @jax.jit
    def step(params: Any, opt_state: Any) -> tuple[Any, Any]:
        gradients = jax.grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = make_params()
    opt_state, found = optimizer.init(params), {}
    for number in range(1, max(num_steps) + 1):
        params, opt_state = step(params, opt_state)
        if number in num_steps:
            found[number] = jax.device_get(jax.tree.leaves(params))
    return found
