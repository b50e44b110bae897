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
from typing import Any, get_args

import optax

from dtft.collectives import Algorithm, all_reduce
from dtft.collectives.all_reduce import check_algorithm
from dtft.optim.checks import numbers
from dtft.optim.exchange import Reduction
from dtft.optim.moment_sync import Mode, MomentSync
from dtft.optim.phases import Phases

MOMENTS = ("mu", "nu", "nu_max")
"""What mode "state" reduces unless told otherwise: the moments of Max-AdaBelief."""
REFRESH_ABOVE = 16.0
"""A little above the largest update of Max-AdaBelief under a constant gradient, 15.5.

Under one that grows for long, updates with fresh operands are larger too. Operands are
then exchanged at every update, which costs what a period of 1 costs.
"""


def reduce_updates(
    axis_name: str | None, algorithm: Algorithm = "native"
) -> optax.GradientTransformation:
    """Replaces the updates by their mean over the replicas; goes before an optimizer.

    Args:
        axis_name: the replica axis; None for a single replica.
        algorithm: how they are reduced, see `dtft.collectives`.
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
    """An optimizer whose replicas exchange moments instead of gradients.

    `mode="operands"` is the patent's flow. Moments are and stay those of the replica's
    own gradients; what the update is made of (first moment and maximum) is reduced, so
    the update is equal on all replicas. Reducing the first moment before or after its
    correction for bias is the same. An operand with a period of k > 1 is exchanged at
    updates 1, k + 1, 2k + 1, ... and kept; in between all replicas use the kept value,
    corrected for bias as of the update it was taken at, unless `refresh_above` asks for
    a new one.

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
            monotone: a contribution that comes late or twice does no harm. Its
            denominators are never smaller than the mean's.
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
            made anew. None never does it.

    Returns:
        A transform with extra arguments. Its state has `PerReplica` marks, see
        `dtft.optim.per_replica` for what surrounds it.

    Raises:
        ValueError: options that contradict each other.
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
