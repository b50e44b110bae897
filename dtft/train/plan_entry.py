"""`dtft.plan`: from a user's step or loss and a cluster to a plan, in one call.

Decides which of the two entries is meant and what `cluster` stands for. Runs nothing;
must not know how a plan is found or run.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax

from dtft.planner.cluster import Cluster
from dtft.planner.cost import Calibration, apply_calibration
from dtft.planner.search import PINS, decide, did_you_mean
from dtft.planner.workload import Question, of_loss, of_step
from dtft.train import trial as trials
from dtft.train.plan_arguments import Step, checked_loss, checked_step, entry_of
from dtft.train.plan_verify import first_fitting, verified
from dtft.train.planning import RunnablePlan


def plan(
    *,
    step: Step | None = None,
    state: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    params: Any = None,
    batch: Any = None,
    cluster: Cluster | str | Path | None = None,
    calibration: Calibration | str | Path | None = None,
    what_if: bool = False,
    trial: int = 0,
    verify: int = 0,
    **pins: Any,
) -> RunnablePlan:
    """How to shard a training step on a cluster, how fast it will be, whether it fits.

    Nothing is run and no array is made, but for a trial. Either a whole step,
    `plan(step=, state=, batch=)`, run with `.jit(step)`; or a loss, `plan(loss=,
    optimizer=, params=, batch=)`, run with `dtft.train.make_step`, which may also
    accumulate gradients over microbatches and compute parts of the loss again.

    Args:
        step: `step(state, batch) -> (state, anything)`.
        state: tree of arrays or ShapeDtypeStructs.
        loss: `loss(params, batch)`: a scalar, or a scalar and auxiliary values. It must
            be a mean over the batch: with `microbatches` above 1, which the planner may
            choose, what is taken is the mean of the parts' losses and gradients. Of a
            sum over the batch that would be one part's share, the sum divided by
            `microbatches`; pin `microbatches=1` for such a loss.
        optimizer: an optax transformation.
        params: tree of arrays or ShapeDtypeStructs.
        batch: the same; the first dim of each leaf is that of examples.
        cluster: such as `64x8xH100`, the path of a description, a Cluster, or None for
            the devices that JAX has. In a job of several processes a plan for as many
            devices as the job has leaves none of them out.
        calibration: what `dtft calibrate` measured on such devices, or the path of its
            file; its figures replace those of the catalog.
        what_if: looks also at knobs that cannot be run here.
        trial: runs so many of the best on the devices here, and takes the fastest.
        verify: how many of the best plans are compiled, for devices that need not
            exist; the first whose compiled memory fits is taken.
        **pins: knobs that are given: sizes of axes (`tensor=8`), `microbatches`,
            `remat`, `zero`, `offload`, `order` of the axes on the fabric; what-if:
            `virtual_stages` and `schedule` of a pipeline.

    Returns:
        The best plan.

    Raises:
        ValueError: arguments of neither or both entries, pins that cannot be met, an
            unknown device type, a calibration of another one; or nothing fits: by how
            much, and what would make it fit.
    """
    _check_knobs(pins, trial, verify)
    given = {
        "step": step, "state": state, "loss": loss, "optimizer": optimizer,
        "params": params, "batch": batch,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    question = _question(given)
    where = _cluster(cluster)
    if calibration is not None:
        where = apply_calibration(where, _calibration(calibration))
    whole = _of_this_job(where)
    decision = decide(question, where, pins, what_if=what_if, whole=whole)
    if trial:
        decision = trials.trial(decision, given, trial)[0].decision
    if verify:
        found = verified(decision, given, num=verify)
        decision = first_fitting(found).decision
    return RunnablePlan.of(decision.plan, decision)


def _check_knobs(pins: Mapping[str, Any], trial: Any, verify: Any) -> None:
    if unknown := [name for name in pins if name not in PINS]:
        raise ValueError(
            f"{unknown[0]}= is neither an argument nor a knob."
            f"{did_you_mean(unknown[0])} Knobs: {', '.join(PINS)}; arguments: step, "
            "state, batch, or loss, optimizer, params, batch; and cluster, "
            "calibration, what_if, trial, verify."
        )
    for name, number in (("trial", trial), ("verify", verify)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(
                f"{name}={number!r}. Allowed: how many of the best plans, such as "
                f"{name}=4, or 0."
            )
    if trial and verify:
        raise ValueError(
            f"trial={trial} and verify={verify}: what is run here needs no proof that "
            "it fits. Give one of them."
        )


def _calibration(given: Any) -> Calibration:
    if isinstance(given, str | Path):
        return Calibration.read(given)
    if not isinstance(given, Calibration):
        raise ValueError(
            f"calibration={given!r}. Allowed: the path of a file that `dtft calibrate "
            "--out` wrote, or a dtft.planner.Calibration."
        )
    return given


def _cluster(cluster: Any) -> Cluster:
    if cluster is None:
        return Cluster.from_devices(jax.devices())
    if isinstance(cluster, str | Path):
        return Cluster.parse(str(cluster))
    if not isinstance(cluster, Cluster):
        raise ValueError(
            f"cluster={cluster!r}. Allowed: text such as '64x8xH100', the path of a "
            "description, a dtft.planner.Cluster (of JAX's devices: "
            "dtft.planner.Cluster.from_devices(devices)), or None for the devices here."
        )
    return cluster


def _of_this_job(cluster: Cluster) -> bool:
    """Whether it is of several processes, each of which has to take part."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return False
    return cluster.num_devices == jax.device_count()


def _question(given: dict[str, Any]) -> Question:
    """What is asked, from the arguments that are not None."""
    entry = entry_of(given)
    try:
        if entry == "step":
            step = checked_step(given["step"], given["state"])
            return of_step(**{**given, "step": step})
        return of_loss(**{**given, "loss": checked_loss(given["loss"])})
    except Exception as error:
        error.add_note(_TRACED[entry])
        raise


_TRACED = {
    "step": "This was raised while dtft.plan traced step(state, batch).",
    "loss": "This was raised while dtft.plan traced loss(params, batch), its gradient "
    "and optimizer.update(gradients, optimizer_state, params). A loss must not change "
    "what it closes over: with NNX, nnx.merge(graphdef, params, rest, copy=True).",
}
"""A note for errors of what is the user's."""
