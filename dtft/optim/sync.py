"""What replicas of an optimizer exchange: gradients, or moments in one of two forms.

Decides which array is reduced at which step, by transforms with an explicit axis name
for use inside `jax.shard_map` (or `jax.vmap`) over the replica axis. Knows the phases
of an optimizer, not which optimizer; must not know meshes or the training loop.

`reduce_updates` is the default: the mean gradient, then any optimizer. `sync_moments`
lets every replica fold its **own** gradient into its moments and exchanges moments.
The first moment is linear in the gradients, so the mean of the replicas' first moments
is that of the mean gradient. The second is not. With g_i and m_i of replica i:

    mean_i (g_i - m_i)^2 = (mean_i g_i - mean_i m_i)^2 + Var_i(g_i - m_i)

Where noise dominates the left side is N times the square on the right: **steps shrink
by sqrt(N)** against gradient averaging over N replicas. Going over from one to the
other needs up to sqrt(N) times the learning rate.

| form | bytes per step, in units of the parameters |
|---|---|
| `reduce_updates` | 1 |
| `sync_moments(mode="operands")`, every step | 2 |
| the same, `every={"mu": 1, "nu_max": k}` | 1 + 1/k |
| `sync_moments(mode="state")` and `average_params` | the sum of 1/period |

Replicas stay bit-identical as long as every operand of the update is reduced or
replicated. Every replica must come to every collective: periods count equal steps and
a commanded exchange is commanded on all of them, or the collective never ends.
"""

from collections.abc import Mapping
from typing import Any

import optax

from dtft.collectives import Algorithm, all_reduce
from dtft.optim.exchange import Reduction
from dtft.optim.moment_sync import Mode, MomentSync
from dtft.optim.phases import Phases

EVERY_STEP: dict[Mode, dict[str, int]] = {
    "operands": {"mu": 1, "nu_max": 1},
    "state": {"mu": 1, "nu": 1, "nu_max": 1},
}
"""What `sync_moments` reduces unless told otherwise: the moments of Max-AdaBelief."""


def reduce_updates(
    axis_name: str | None, algorithm: Algorithm = "native"
) -> optax.GradientTransformation:
    """Replaces the updates by their mean over the replicas; goes before an optimizer.

    Args:
        axis_name: the replica axis; None for a single replica.
        algorithm: how they are reduced, see `dtft.collectives`.
    """

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: Any = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        return all_reduce(updates, axis_name, algorithm=algorithm), state

    return optax.GradientTransformation(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def sync_moments(
    phases: Phases,
    axis_name: str | None,
    *,
    mode: Mode = "operands",
    every: Mapping[str, int] | None = None,
    op: Mapping[str, Reduction] | None = None,
    decay: Mapping[str, float] | None = None,
    algorithm: Algorithm = "native",
    commanded: bool = False,
    refresh_above: float | None = 16.0,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose replicas exchange moments instead of gradients.

    `mode="operands"` is the patent's flow. Moments are and stay those of the replica's
    own gradients; what the update is made of (first moment and maximum) is reduced, so
    the update is equal on all replicas. Reducing the first moment before or after its
    correction for bias is the same. An operand with a period of k > 1 is exchanged at
    updates 1, k + 1, 2k + 1, ... and kept; in between all replicas use the kept value,
    unless `refresh_above` asks for a new one.

    `mode="state"` replaces the moments themselves by their reduction, each at the
    updates its own period divides (DES-LOC, arXiv 2505.22549). The update is made from
    the replica's own moments and gradient, so parameters drift apart between exchanges
    and have a period of their own: `average_params`. Where gradients are sparse give
    the maximum the period of the first moment: a replica that has had no gradient for
    a coordinate, but is given the others' first moment for it, divides by next to
    nothing (`experiments/moment_sync.py` shows it).

    Args:
        phases: the optimizer; its state is a NamedTuple with a field `count`.
        axis_name: the replica axis; None for a single replica.
        mode: see above.
        every: per field of the state its period in updates; 0 for only on command. In
            mode "operands" it must name every field the update is made of. Default:
            every step, the moments of Max-AdaBelief.
        op: per field "mean" (default) or "max". The maximum by "max" is idempotent and
            monotone: a contribution that comes late or twice does no harm. It makes
            denominators a few per cent larger than the mean does.
        decay: per field with a period the decay its correction for bias uses, if it is
            corrected (Max-AdaBelief: b1 for `mu`, b2 for `nu_max`). A kept operand is
            then corrected for the update it was taken at, not for the present one.
        algorithm: how arrays are reduced, see `dtft.collectives`.
        commanded: whether `update` takes `sync`, an int32 scalar that is **equal on all
            replicas**: other than 0 it makes all of `every` be exchanged, in addition
            to the periods. If it differs, some replicas enter a collective that the
            others never come to: a deadlock.
        refresh_above: mode "operands" keeps operands between exchanges. Where a
            coordinate had no gradient yet when its maximum was taken (a dead unit, a
            rare token), the kept maximum is next to zero and the first gradient would
            make a step of a million learning rates. So when an element of the update
            is larger than this, kept operands are exchanged at once and the update is
            made anew. 16 is a little above the largest update of Max-AdaBelief under a
            steady gradient; None never does it.

    Returns:
        A transform with extra arguments. Its state has `PerReplica` marks, see
        `dtft.optim.per_replica` for what surrounds it.

    Raises:
        ValueError: options that contradict each other.
    """
    chosen = dict(EVERY_STEP[mode] if every is None else every)
    ops: dict[str, Reduction] = dict(op or {})
    decays = dict(decay or {})
    _check(mode, chosen, ops, decays, commanded)
    sync = MomentSync(
        phases,
        axis_name,
        mode,
        chosen,
        ops,
        decays,
        algorithm,
        commanded=commanded,
        refresh_above=refresh_above,
    )
    update = sync.operands if mode == "operands" else sync.replace_state
    return optax.GradientTransformationExtraArgs(sync.init, update)  # pyright: ignore[reportArgumentType]


def _check(
    mode: Mode,
    every: dict[str, int],
    op: dict[str, Reduction],
    decay: dict[str, float],
    commanded: bool,
) -> None:
    for name, period in every.items():
        if period < 0 or (period == 0 and not commanded):
            raise ValueError(
                f"every[{name!r}]={period} is not a period. Allowed: 1 or more, or "
                "with commanded=True also 0 for only on command. Change it."
            )
    for text, names in (("op", op), ("decay", decay)):
        if unknown := sorted(names.keys() - every.keys()):
            raise ValueError(
                f"{text} names {unknown}, which every={every} does not reduce. "
                f"Remove them from {text}, or give them a period."
            )
    if decay and mode == "state":
        raise ValueError(
            f"decay={decay} has no effect with mode='state': no operand is kept there. "
            "Remove it."
        )
    if commanded and all(period == 1 for period in every.values()):
        raise ValueError(
            f"commanded=True has no effect with every={every}: all of it is exchanged "
            "at every update. Set a period above 1, or 0 for only on command."
        )
