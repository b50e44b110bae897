"""Other people's models through `dtft.plan`: results of its steps, and their memory.

Flax models of `transformers`, one of Equinox's layers and a mixture of experts in Haiku
(`third_party_zoo.py`), installed apart. A small one of each is planned for eight CPU
devices, with the mesh left to the planner and with given ones, and trained for some
steps with the plan's shardings. The losses and parameters are compared with those of
the same steps by plain `jax.jit` on one device.

Adam divides a gradient by its own size, so it makes an update of full size of rounding
errors: two programs that round differently part. Both are therefore measured from a
third run, of the plain step in float64. An error of parameters is the norm of the
difference by the norm of all updates; `ratio` is the planned step's error by the plain
one's. Up to `ROUNDING` times that error counts as equal. Above it the same plan's step
is run in float64: if that has the plain one's parameters, float32 amplified rounding.

Then a larger one of each is planned for eight H100, and the plan's bytes on a device
are compared with those that XLA's GPU compiler assigns to the same step (extra `aot`;
no GPU is needed). A plan misleads if it says less than the reserve below that:
on a device of some size it would seem to fit, and only `--verify` finds that it does
not. What was compiled is kept in `results/third_party_models_programs.json`, so that a
changed planner is compared again without compiling.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import report
import third_party_zoo as zoo
from plan_memory import layout

import dtft
from dtft.parallel.planning import candidate_of, make_step
from dtft.planner.aot import Compiled, Memory, compile_all, gate
from dtft.planner.memory import RESERVE

MESHES: tuple[Mapping[str, Any], ...] = (
    {},
    {"fsdp": 8, "zero": 1},
    {"fsdp": 8, "zero": 3},
    {"replica": 2, "tensor": 4},
    {"replica": 2, "fsdp": 2, "tensor": 2, "zero": 3, "microbatches": 2,
     "remat": "full"},
)  # fmt: skip
"""Pins; the first plan is all the planner's. Those that a step cannot have are left
out for `resnet`, which is one."""
EXPERTS: Mapping[str, Any] = {"replica": 2, "expert": 4}
STEPS = 3
ROUNDING = 2.0
"""Largest error of a planned step by that of the plain one."""
ROUNDING_64 = 1e-9
"""Largest error of parameters in float64; a wrong sum would be far above it."""
TARGET = "h100"
DEADLINE_S = 570.0
"""Of one compilation."""
KEPT = report.RESULTS / "third_party_models_programs.json"
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What some steps of training leave behind, in host memory."""

    losses: Sequence[float]
    before: Any
    """Parameters (and batch statistics) before the first step."""
    after: Any


@dataclass(frozen=True, kw_only=True)
class Run:
    """A planned step beside the plain one."""

    model: str
    pins: str
    mesh: str
    loss: float
    """Largest relative error of a loss of the planned step, from float64."""
    plain_loss: float
    """The same of the plain step."""
    params: float
    """Error of the planned step's parameters by the norm of all updates."""
    plain_params: float
    rounding: float
    """What rounding the parameters once to float32 is, in the same unit."""
    in_float64: float | None = None
    """Error of the parameters of the same plan's step in float64, where that of float32
    is more than rounding; None where it was not run."""

    @property
    def ratio(self) -> float:
        """Error of the planned step's parameters by that of the plain step's."""
        return self.params / max(self.plain_params, self.rounding)

    @property
    def equal(self) -> bool:
        """Whether loss and parameters differ by no more than rounding.

        Where float32 amplifies rounding, the step in float64 decides.
        """
        if self.in_float64 is not None:
            return self.in_float64 <= ROUNDING_64
        eps = float(jnp.finfo(jnp.float32).eps)
        losses = self.loss <= ROUNDING * max(self.plain_loss, 4 * eps)
        return losses and self.ratio <= ROUNDING


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A plan's memory beside what XLA assigns."""

    model: str
    pins: str
    mesh: str
    predicted: int
    """Bytes of a device without the reserve."""
    assigned: int
    fits_after: bool
    """Whether `--verify` takes the plan for a device that has less than is assigned."""

    @property
    def error(self) -> float:
        """Relative; negative if the plan says too little."""
        return self.predicted / self.assigned - 1

    @property
    def misleads(self) -> bool:
        """Whether there is a device on which it would seem to fit and does not."""
        return self.predicted < (1 - RESERVE) * self.assigned


def meshes(model: zoo.Model) -> Iterator[Mapping[str, Any]]:
    """Pins that a model is planned with."""
    knobs = () if model.step is None else ("microbatches", "remat")
    for pins in MESHES:
        yield {name: pin for name, pin in pins.items() if name not in knobs}
    if model.name == "experts":
        yield EXPERTS


def words(pins: Mapping[str, Any]) -> str:
    """Pins on one line."""
    return " ".join(f"{name}={pin}" for name, pin in pins.items()) or "none"


def runs(name: str, *, quick: bool = False) -> Iterator[Run | str]:
    """Plans and trains the small model; a text for what cannot be planned or run."""
    model = zoo.MODELS[name]("small", jnp.float32)
    # In host memory, because a planned step donates its state.
    start = jax.device_get(jax.jit(model.start)(jax.random.key(0)))
    batches = made(model)[: 1 if quick else None]
    exact, plain = _exact(name, start, batches), plainly(model, start, batches)
    for pins in list(meshes(model))[: 1 if quick else None]:
        try:
            plan = dtft.plan(**model.given, cluster="8xcpu", **pins)
            found = planned(model, plan, start, batches)
        except Exception as error:  # of any model: the table says so
            yield f"{name}, {words(pins)}: {type(error).__name__}: {error}"
            continue
        run = compared(name, words(pins), _mesh(plan), exact, plain, found)
        if not run.equal:
            error = _error_in_float64(name, pins, start, batches, exact)
            run = replace(run, in_float64=error)
        yield run


def _error_in_float64(
    name: str, pins: Mapping[str, Any], start: Any, batches: Any, exact: Trained
) -> float:
    """Error of the parameters if planned and run in float64."""
    batches = [_wide(batch) for batch in jax.device_get(batches)]
    jax.config.update("jax_enable_x64", True)
    try:
        model, start = zoo.MODELS[name]("small", jnp.float64), _wide(start)
        state = "params" if model.step is None else "state"
        like = jax.eval_shape(lambda: (start, batches[0]))
        given = {**model.given, state: like[0], "batch": like[1]}
        plan = dtft.plan(**given, cluster="8xcpu", **pins)
        found = planned(model, plan, start, batches)
    finally:
        jax.config.update("jax_enable_x64", False)
    return compared(name, "", "", exact, exact, found).params


def _exact(name: str, start: Any, batches: Sequence[Any]) -> Trained:
    """The plain step in float64, from the same values."""
    batches = jax.device_get(batches)
    jax.config.update("jax_enable_x64", True)
    try:
        model = zoo.MODELS[name]("small", jnp.float64)
        return plainly(model, _wide(start), [_wide(batch) for batch in batches])
    finally:
        jax.config.update("jax_enable_x64", False)


def plainly(model: zoo.Model, start: Any, batches: Sequence[Any]) -> Trained:
    """Trains with `jax.jit` on one device."""
    step: Any = model.step
    if model.step is None:
        optimizer: Any = model.optimizer
        loss: Any = model.loss

        def of_loss(state: Any, batch: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(state["params"], batch)
            updates, after = optimizer.update(
                gradients, state["opt_state"], state["params"]
            )
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt_state": after}, value

        step, start = of_loss, {"params": start, "opt_state": optimizer.init(start)}
    return _trained(model, jax.jit(step), start, batches)


def planned(
    model: zoo.Model, plan: dtft.Plan, start: Any, batches: Sequence[Any]
) -> Trained:
    """Trains with a plan."""
    if model.step is None:
        loss: Any = model.loss
        optimizer: Any = model.optimizer
        step = make_step(loss, optimizer, plan)
    else:
        step = plan.jit(model.step)
    return _trained(model, step, step.init(start), batches)


def made(model: zoo.Model) -> list[dict[str, jax.Array]]:
    """Random batches, one for each step."""
    keys = jax.random.split(jax.random.key(1), STEPS)
    return [
        {
            name: jax.random.randint(key, like.shape, 0, model.limits[name])
            if name in model.limits
            else jax.random.normal(key, like.shape, jnp.float32)
            for name, like in model.batch.items()
        }
        for key in keys
    ]


def compared(
    name: str, pins: str, mesh: str, exact: Trained, plain: Trained, found: Trained
) -> Run:
    """Measures both float32 runs from the one in float64."""
    moved = _norm(jax.tree.map(lambda a, b: a - b, exact.after, exact.before))
    eps = float(jnp.finfo(jnp.float32).eps)
    return Run(
        model=name,
        pins=pins,
        mesh=mesh,
        loss=_loss_error(found, exact),
        plain_loss=_loss_error(plain, exact),
        params=_distance(found.after, exact.after) / moved,
        plain_params=_distance(plain.after, exact.after) / moved,
        rounding=eps * _norm(exact.after) / moved,
    )


def _trained(
    model: zoo.Model, step: Any, state: Any, batches: Sequence[Any]
) -> Trained:
    before, losses = jax.device_get(model.params(state)), []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return Trained(
        losses=losses, before=before, after=jax.device_get(model.params(state))
    )


def _wide(tree: Any) -> Any:
    """Floating-point arrays as float64."""
    return jax.tree.map(
        lambda a: a.astype("float64") if jnp.issubdtype(a.dtype, jnp.floating) else a,
        tree,
    )


def _norm(tree: Any) -> float:
    leaves = [leaf.astype("float64") for leaf in jax.tree.leaves(tree)]
    return float(sum((leaf**2).sum() for leaf in leaves)) ** 0.5


def _distance(one: Any, other: Any) -> float:
    return _norm(jax.tree.map(lambda a, b: a.astype("float64") - b, one, other))


def _loss_error(found: Trained, exact: Trained) -> float:
    pairs = zip(found.losses, exact.losses, strict=True)
    return max(abs(loss / right - 1) for loss, right in pairs)


def _mesh(plan: dtft.Plan) -> str:
    axes = " ".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1)
    knobs = plan.knobs
    return f"{axes} zero={knobs.zero} parts={knobs.microbatches} remat={knobs.remat}"


def fits(name: str, kept: dict[str, Any]) -> Iterator[Fit | str]:
    """Plans the medium model for GPUs, compiles what is not kept, and compares."""
    model = zoo.MODELS[name]("medium", jnp.bfloat16)
    given = model.given
    for pins in meshes(model):
        try:
            plan = dtft.plan(**given, cluster=f"1x8x{TARGET}", **pins)
        except ValueError as error:
            yield f"{name}, {words(pins)}: no plan: {error}"
            continue
        key = f"{name} {words(pins)}"
        if kept.get(key, {}).get("layout") != layout(plan):
            kept[key] = {"layout": layout(plan), **_compiled(plan, given, key)}
            KEPT.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")
        if "failure" in kept[key]:
            yield f"{name}, {words(pins)}: not compiled: {kept[key]['failure']}"
        else:
            yield _fit(name, words(pins), plan, Memory(**kept[key]["memory"]))


def _compiled(plan: dtft.Plan, given: Mapping[str, Any], name: str) -> dict[str, Any]:
    one = candidate_of(plan, given, target=TARGET, name=name)
    (result,) = compile_all([one], deadline_s=DEADLINE_S)
    if not isinstance(result, Compiled):
        return {"failure": result.reason[:200]}
    return {"memory": asdict(result.memory)}


def _fit(name: str, pins: str, plan: dtft.Plan, memory: Memory) -> Fit:
    compiled = Compiled(
        name=name, target=TARGET, collectives=(), memory=memory, seconds=0.0
    )
    return Fit(
        model=name,
        pins=pins,
        mesh=_mesh(plan),
        predicted=plan.memory_bytes - plan.memory["reserve"],
        assigned=memory.total,
        fits_after=gate(plan, compiled, memory.total - 1, reserve=RESERVE).fits,
    )


def _run_row(run: Run) -> list[Any]:
    return [
        run.model,
        run.pins,
        run.mesh,
        f"{run.plain_loss:.1e}",
        f"{run.loss:.1e}",
        f"{run.plain_params:.1e}",
        f"{run.params:.1e}",
        f"{run.ratio:.2f}",
        "" if run.in_float64 is None else f"{run.in_float64:.0e}",
        "yes" if run.equal else "NO",
    ]


def _fit_row(fit: Fit) -> list[Any]:
    return [
        fit.model,
        fit.pins,
        fit.mesh,
        f"{fit.predicted / MIB:.0f}",
        f"{fit.assigned / MIB:.0f}",
        f"{fit.error:+.1%}",
        "YES" if fit.misleads else "no",
        "YES" if fit.fits_after else "no",
    ]


RUN_HEADER = [
    "model", "pins", "plan", "loss: plain", "planned", "params: plain", "planned",
    "ratio", "in float64", "equal",
]  # fmt: skip
FIT_HEADER = [
    "model", "pins", "plan", "predicted MiB", "assigned MiB", "error", "misleads",
    "after verify",
]  # fmt: skip


def notes(run: Sequence[Run], fit: Sequence[Fit], failed: Sequence[str]) -> list[str]:
    """What the tables say, in sentences."""
    equal = sum(one.equal for one in run)
    texts = [f"{equal} of {len(run)} planned runs are equal to the plain step's."]
    if fit:
        errors = sorted(abs(one.error) for one in fit)
        texts += [
            "\n".join(report.table(FIT_HEADER, map(_fit_row, fit))),
            f"Memory of {len(fit)} programs: median error "
            f"{statistics.median(errors):.1%}, worst {errors[-1]:.1%}; "
            f"{sum(one.misleads for one in fit)} say more than the reserve of "
            f"{RESERVE:.0%} too little; {sum(one.fits_after for one in fit)} would be "
            "taken by `--verify` for a device that has one byte less than is assigned.",
        ]
    if failed:
        texts += ["Without a figure:", "\n".join(f"* {text}" for text in failed)]
    return texts


def main() -> None:
    """Installs the packages, runs and compiles everything, and writes the tables."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", choices=zoo.MODELS, help="this one, no table kept")
    options.add_argument("--quick", action="store_true", help="one plan, not compiled")
    options.add_argument("--only", choices=("runs", "memory"), help="no table kept")
    given = options.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    # Fast to compile; what XLA does with a program stays the same.
    jax.config.update("jax_disable_most_optimizations", True)
    zoo.install()
    names = [given.model] if given.model else list(zoo.MODELS)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    run: list[Run] = []
    fit: list[Fit] = []
    failed: list[str] = []
    for name in names:
        made: list[Run | Fit | str] = []
        if given.only != "memory":
            made += _shown(runs(name, quick=given.quick))
        if given.only != "runs" and not given.quick:
            made += _shown(fits(name, kept))
        run += [one for one in made if isinstance(one, Run)]
        fit += [one for one in made if isinstance(one, Fit)]
        failed += [one for one in made if isinstance(one, str)]
    if given.model or given.quick or given.only:
        print("\n".join(report.table(RUN_HEADER, map(_run_row, run))))
        print("\n\n".join(notes(run, fit, failed)))
        return
    report.write(
        "third_party_models",
        title="Other people's models: results of planned steps, and their memory",
        command="python experiments/third_party_models.py",
        header=RUN_HEADER,
        rows=map(_run_row, run),
        notes=[*notes(run, fit, failed), f"Models of {zoo.versions()}."],
    )


def _shown(made: Iterator[Any]) -> Iterator[Any]:
    """Prints what is found as it is found; the table comes at the end."""
    for one in made:
        print(one, flush=True)
        yield one


if __name__ == "__main__":
    main()
