"""Optax transforms that exchange gradients or moments between replicas.

The transforms take an explicit axis name and run inside `jax.shard_map` (or `jax.vmap`)
over the replica axis. They decide which arrays are reduced over the replicas at which
step. `sync_moments` depends on an optimizer in two phases (`Phases`). No transform may
depend on meshes or the training loop.

`reduce_updates` is the default: the mean gradient goes into any optimizer. With
`sync_moments` every replica adds its **local** gradient to its moments, and replicas
exchange moments. The first moment is linear in the gradients, so the mean of the
replicas' first moments is the first moment of the mean gradient. The second moment is
not linear. With g_i the gradient and m_i the first moment of replica i:

    mean_i (g_i - m_i)^2 = (mean_i g_i - mean_i m_i)^2 + Var_i(g_i - m_i)

If noise dominates, the left side is N times the square on the right for N replicas:
**steps are sqrt(N) times smaller** than with averaged gradients. A change from
`reduce_updates` to `sync_moments` needs up to sqrt(N) times the learning rate.

| transform | bytes per step, in units of the parameters |
|---|---|
| `reduce_updates` | 1 |
| `sync_moments(mode="operands")`, every step | 2 |
| the same, `every={"mu": 1, "nu_max": k}` | 1 + 1/k |
| `sync_moments(mode="state")` and `average_params` | the sum of 1/period |

The sum in the last row is over the moments and the parameters.

Parameters stay bit-identical on all replicas as long as every operand of the update (a
moment that the update is computed from) is reduced or replicated. A collective ends
only if every replica enters it. So the number of updates must be equal on all replicas,
and an exchange must be commanded on all replicas or on none.
"""

from collections.abc import Mapping
from typing import Any, get_args

import optax

from dtft.collectives import Algorithm, all_reduce
from dtft.collectives.all_reduce import check_algorithm
from dtft.optim.checks import numbers
from dtft.optim.exchange import Reduction
from dtft.optim.moment_sync import Mode, MomentSync
from dtft.optim.phases import Phases

MOMENTS = ("mu", "nu", "nu_max")
"""Fields of the optimizer state that `sync_moments(mode="state")` reduces by default:
the moments of Max-AdaBelief."""
REFRESH_ABOVE = 16.0
"""Default of `sync_moments(refresh_above=...)`, a limit for the elements of an update
before its multiplication by the learning rate.

16 is a little above 15.5, the largest update of Max-AdaBelief for a constant gradient
at the default betas. For a gradient that grows over many steps, updates from newly
reduced moments exceed 16 too. Moments are then reduced at every update, as with a
period of 1.
"""


def reduce_updates(
    axis_name: str | None, algorithm: Algorithm = "native"
) -> optax.GradientTransformation:
    """Makes a transform that replaces updates by their mean over the replicas.

    Chain the transform before an optimizer.

    Args:
        axis_name: the replica axis; None for a single replica.
        algorithm: all-reduce algorithm of `dtft.collectives`; "native" is XLA's.
    """
    check_algorithm(algorithm)

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: Any = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        mean = all_reduce(updates, axis_name, op="mean", algorithm=algorithm)
        return mean, state

    return optax.GradientTransformation(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def sync_moments(
    phases: Phases,
    axis_name: str | None,
    *,
    mode: Mode = "operands",
    every: Mapping[str, int] | None = None,
    op: Mapping[str, Reduction] | None = None,
    algorithm: Algorithm = "native",
    commanded: bool = False,
    refresh_above: float | None = REFRESH_ABOVE,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer whose replicas exchange moments instead of gradients.

    `mode="operands"` (called the patent's flow in `experiments/`): each replica's state
    keeps the moments of its local gradients. The operands of the update (first moment
    and maximum) are reduced, so the update is equal on all replicas. Reducing the first
    moment before or after its correction for bias gives the same result. An operand
    with a period of k > 1 is reduced at updates 1, k + 1, 2k + 1, ... Between these
    updates all replicas use the last reduced value, unless `refresh_above` triggers a
    new reduction. The bias of this value is corrected with the number of the update in
    which it was reduced.

    `mode="state"` replaces each moment in the state by its reduction, at updates that
    are multiples of the moment's period (DES-LOC, arXiv 2505.22549). The update is made
    from the replica's moments and local gradient, so parameters drift apart between
    exchanges: average the parameters with `average_params`. If gradients are sparse,
    give the maximum the same period as the first moment. Otherwise a replica without a
    gradient for a coordinate gets a nonzero first moment from other replicas and
    divides it by a maximum near 0 (shown by `experiments/moment_sync.py`).

    Args:
        phases: the optimizer; its state is a NamedTuple with a field `count`.
        axis_name: the replica axis; None for a single replica.
        mode: see above.
        every: field of the state to its period in updates; 0 for only on command (in
            mode "operands" also at update 1 and by `refresh_above`). In mode "operands"
            `every` must name every operand of the update. Default: a period of 1 for
            all operands, or in mode "state" for the moments of Max-AdaBelief.
        op: field of the state to its reduction, "mean" (default) or "max". `nu_max`
            reduced by "max" is never smaller than reduced by "mean", and with
            `mode="state"` decreases on no replica.
        algorithm: all-reduce algorithm of `dtft.collectives`; "native" is XLA's.
        commanded: whether `update` takes the argument `sync`, an int32 scalar that is
            **equal on all replicas**. A value other than 0 exchanges all fields of
            `every`, in addition to the periods. If the values differ, some replicas
            enter a collective that the others never enter: a deadlock.
        refresh_above: mode "operands" only. If an element of the update, before its
            multiplication by the learning rate, exceeds this in magnitude, the operands
            from earlier reductions are reduced at once and the update is computed
            again. With None a coordinate without a gradient at the last reduction (a
            rare token, say) is divided by a maximum near 0, and its first gradient
            makes a step of a million times the learning rate.

    Returns:
        A transform with extra arguments. Its state has `PerReplica` marks;
        `dtft.optim.per_replica` converts such a state for `jax.shard_map`.

    Raises:
        ValueError: an option is unknown or out of range, or options are incompatible.
    """
    _check_mode(phases, mode)
    for argument, given in {"every": every, "op": op}.items():
        _check_per_field(argument, given, phases)
    if every is None:
        every = dict.fromkeys(phases.operands if mode == "operands" else MOMENTS, 1)
    chosen = dict(every)
    ops: dict[str, Reduction] = dict(op or {})
    _check(phases, mode, chosen, ops, refresh_above)
    _check_periods(chosen, commanded)
    check_algorithm(algorithm)
    sync = MomentSync(
        phases,
        axis_name,
        mode,
        chosen,
        ops,
        algorithm,
        commanded=commanded,
        refresh_above=refresh_above,
    )
    update = sync.operands if mode == "operands" else sync.replace_state
    return optax.GradientTransformationExtraArgs(sync.init, update)  # pyright: ignore[reportArgumentType]


def _check_mode(phases: Phases, mode: str) -> None:
    if not isinstance(phases, Phases):
        raise ValueError(
            f"phases={phases!r} is not an optimizer in two phases. A whole optax "
            "transform cannot be taken apart: pass `max_belief_phases(...)`, and chain "
            "the learning rate after sync_moments."
        )
    if mode not in get_args(Mode):
        raise ValueError(
            f"mode={mode!r} is unknown. Allowed: 'operands' (the patent's flow) or "
            "'state' (DES-LOC)."
        )


def _check_per_field(argument: str, given: Any, phases: Phases) -> None:
    if given is not None and not isinstance(given, Mapping):
        value = given if argument == "op" else 1
        example = dict.fromkeys(phases.operands, value)
        raise ValueError(
            f"{argument}={given!r} does not say which field it is for. Allowed: a dict "
            f"by fields of the optimizer's state, or None. Write {argument}={example}, "
            "say."
        )


def _check(
    phases: Phases,
    mode: Mode,
    every: dict[str, int],
    op: dict[str, Reduction],
    refresh_above: float | None,
) -> None:
    if mode == "operands" and every:
        if missing := sorted(set(phases.operands) - every.keys()):
            raise ValueError(
                f"every={every} leaves out {missing}, which the update is made of: the "
                "replicas' parameters would part. Give each a period."
            )
    if unknown := sorted(op.keys() - every.keys()):
        raise ValueError(
            f"op names {unknown}, which every={every} does not reduce. "
            "Remove them from op, or give them a period."
        )
    for name, how in op.items():
        if how not in get_args(Reduction):
            raise ValueError(
                f"op[{name!r}]={how!r} is unknown. Allowed: {get_args(Reduction)}."
            )
    known = [] if refresh_above is None else numbers("refresh_above", refresh_above)
    if mode == "state" and refresh_above not in (None, REFRESH_ABOVE):
        raise ValueError(
            f"refresh_above={refresh_above} has no effect with mode='state': no "
            "operand is kept there. Leave it out."
        )
    if not all(each > 0 for each in known):
        raise ValueError(
            f"refresh_above={refresh_above} would exchange at every update. Allowed: "
            "above 0 (16 is a good value), or None for never."
        )


def _check_periods(every: dict[str, int], commanded: bool) -> None:
    for name, period in every.items():
        least = 0 if commanded else 1
        if not isinstance(period, int) or period < least:
            raise ValueError(
                f"every[{name!r}]={period!r} is not a period. Allowed: whole numbers, "
                "1 or more, or with commanded=True also 0 for only on command."
            )
    if not every:
        raise ValueError(
            "every={} exchanges nothing. Name fields of the optimizer's state, such as "
            "{'mu': 1, 'nu_max': 1}, or leave it out."
        )
    if commanded and all(period == 1 for period in every.values()):
        raise ValueError(
            f"commanded=True has no effect with every={every}: all of it is exchanged "
            "at every update. Set a period above 1, or 0 for only on command."
        )
