"""Step times of transformers on one GPU, beside what `dtft.plan` predicts.

    python experiments/gpu_steps.py             predicts the steps of the table; no GPU
    python experiments/gpu_steps.py --measure   measures this GPU's rows anew

The table is `data/gpu_steps.jsonl`; `data/README.md` has its columns. A step is the
loss, its gradients and AdamW. It is planned as it was measured: the whole batch at
once, and no rematerialization but the model's own. Nothing here is fitted to the table.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median_high
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from gpu_optimizer import require_gpu
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

import dtft
from dtft.planner.cluster.catalog import device_type_of_kind
from dtft.planner.plan import Plan
from dtft.planner.transformer import judge

TABLE = Path(__file__).parent / "data" / "gpu_steps.jsonl"
TITLE = "Step times of transformers on one GPU, and what dtft.plan predicts"
HEADER = [
    "case", "device", "model", "measured s", "predicted s", "error", "interval s",
    "holds it", "XLA's GiB", "predicted GiB", "error of GiB",
]  # fmt: skip
WARM_UP, TIMED = 3, 10
"""Steps before those that are timed, and timed steps."""
TOKENS = 32000
"""Tokens of batches are below this, also where the vocabulary is larger."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Case:
    """A transformer, and the batch of its step."""

    name: str
    width: int
    layers: int
    heads: int
    length: int
    """Tokens of a sequence."""
    batch: int
    """Sequences of a step."""
    dtype: str = "bfloat16"
    """What layers compute in; parameters are float32."""
    vocabulary: int = 32000
    remat: bool = False
    """Whether each layer is a `jax.checkpoint`."""
    llama: bool = False
    """Whether it has rotary positions, RMS norms and a gated MLP."""
    fused: bool = False
    """Whether attention is `jax.nn.dot_product_attention`: on a GPU cuDNN's kernel."""

    @property
    def words(self) -> str:
        """The case in a cell of the table."""
        kind = "Llama" if self.llama else "GPT"
        text = (
            f"{kind} {self.layers} x {self.width}, {self.heads} heads, "
            f"{self.batch} x {self.length} tokens, {self.dtype}"
        )
        if self.vocabulary != TOKENS:
            text += f", vocabulary {self.vocabulary}"
        if self.remat:
            text += ", remat"
        return text + (", cuDNN" if self.fused else "")


CASES = (
    Case(name="base", width=1024, layers=12, heads=16, length=1024, batch=16),
    Case(
        name="base-f32", width=1024, layers=12, heads=16, length=1024, batch=8,
        dtype="float32",
    ),
    Case(name="wide", width=4096, layers=4, heads=32, length=1024, batch=4),
    Case(
        name="remat", width=2048, layers=12, heads=16, length=1024, batch=8,
        remat=True,
    ),
    Case(
        name="llama", width=2048, layers=8, heads=16, length=2048, batch=4,
        llama=True,
    ),
    Case(
        name="llama-fused", width=2048, layers=8, heads=16, length=2048, batch=4,
        llama=True, fused=True,
    ),
    Case(name="long", width=1024, layers=6, heads=16, length=4096, batch=2),
    Case(name="small", width=512, layers=6, heads=8, length=256, batch=64),
    Case(
        name="vocab", width=1024, layers=2, heads=16, length=512, batch=32,
        vocabulary=128000,
    ),
    Case(name="deep", width=768, layers=24, heads=12, length=1024, batch=8),
    Case(
        name="fused-long", width=2048, layers=4, heads=16, length=8192, batch=1,
        llama=True, fused=True,
    ),
    Case(
        name="fused-remat", width=2048, layers=16, heads=16, length=2048, batch=8,
        llama=True, fused=True, remat=True,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row of the table; sizes are of XLA's compiled step."""

    case: Case
    step_s: float
    """Mean of `TIMED` steps, of which only the last is waited for."""
    blocked_s: float
    """Median of `TIMED` steps, each of which is waited for."""
    compile_s: float
    loss: float
    """Of the last step."""
    xla_flops: float | None
    """XLA's own count; far below what a step computes."""
    xla_bytes: float | None
    """XLA's own count of bytes accessed."""
    temporary_bytes: int
    argument_bytes: int
    """Parameters, optimizer state and batch; the results take the place of these."""
    process_peak_bytes: int | None
    """The most that the process ever had on the device: of all cases up to this one."""
    device: str
    """JAX's `device_kind`."""
    jax: str

    @property
    def memory_bytes(self) -> int:
        """Bytes that XLA assigned."""
        return self.temporary_bytes + self.argument_bytes

    def to_json(self) -> str:
        """One line of the table."""
        row = asdict(self)
        return json.dumps({**row.pop("case"), **row})

    @classmethod
    def from_json(cls, line: str) -> "Measurement":
        """Reads what `to_json` writes.

        >>> line = '{"name": "a", "width": 8, "layers": 1, "heads": 2, "length": 4, '
        >>> line += '"batch": 2, "step_s": 0.5, "blocked_s": 0.5, "compile_s": 1.0, '
        >>> line += '"loss": 1.0, "xla_flops": null, "xla_bytes": null, '
        >>> line += '"temporary_bytes": 2, "argument_bytes": 1, '
        >>> line += '"process_peak_bytes": null, "device": "NVIDIA H200", "jax": "1"}'
        >>> found = Measurement.from_json(line)
        >>> found.case.width, found.memory_bytes
        (8, 3)
        """
        row = json.loads(line)
        shape = {f.name: row.pop(f.name) for f in fields(Case) if f.name in row}
        return cls(case=Case(**shape), **row)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured step and its plan."""

    measured: Measurement
    plan: Plan

    @property
    def predicted_s(self) -> float:
        """Seconds of the step."""
        return self.plan.prediction.step_s

    @property
    def error(self) -> float:
        """Relative, of seconds; positive if the plan is too slow."""
        return self.predicted_s / self.measured.step_s - 1

    @property
    def holds(self) -> bool:
        """Whether the interval of the prediction has the measured seconds in it."""
        said = self.plan.prediction
        return said.low_s <= self.measured.step_s <= said.high_s

    @property
    def memory_bytes(self) -> int:
        """Predicted bytes without the reserve."""
        return self.plan.memory_bytes - self.plan.memory["reserve"]

    @property
    def memory_error(self) -> float:
        """Relative; positive if the plan says too much."""
        return self.memory_bytes / self.measured.memory_bytes - 1


# ------------------------------------------------------------------- the model


def arrays(case: Case) -> tuple[Any, Any]:
    """Shapes of the parameters and of the batch."""

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    num, width, each = case.layers, case.width, case.width // case.heads
    hidden = 8 * width // 3 // 256 * 256 if case.llama else 4 * width
    layers = {
        "qkv": floats(num, width, 3, case.heads, each),
        "out": floats(num, case.heads, each, width),
        "up": floats(num, width, hidden),
        "down": floats(num, hidden, width),
        "g1": floats(num, width),
        "g2": floats(num, width),
    }
    if case.llama:
        layers["gate"] = floats(num, width, hidden)
    params = {
        "embed": floats(case.vocabulary, width),
        "head": floats(width, case.vocabulary),
        "g": floats(width),
        "layers": layers,
    }
    tokens = jax.ShapeDtypeStruct((case.batch, case.length), jnp.int32)
    return params, {"x": tokens, "y": tokens}


def tokens_of(case: Case) -> dict[str, np.ndarray]:
    """A batch of random tokens."""
    rng, high = np.random.default_rng(0), min(TOKENS, case.vocabulary)
    return {
        name: rng.integers(0, high, shape.shape, shape.dtype)
        for name, shape in arrays(case)[1].items()
    }


def loss_of(case: Case, *, cudnn: bool) -> Callable[[Any, Any], jax.Array]:
    """The loss: cross entropy of the next token.

    Args:
        case: the model.
        cudnn: whether attention of a fused case is cuDNN's kernel; otherwise it is
            XLA's, which runs without a GPU.
    """
    dtype = jnp.dtype(case.dtype)

    def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
        exact = x.astype(jnp.float32)
        if not case.llama:
            exact = exact - exact.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt((exact * exact).mean(-1, keepdims=True) + 1e-5)
        return (exact * scale * gain).astype(x.dtype)

    def rotary(x: jax.Array) -> jax.Array:
        half = x.shape[-1] // 2
        at = jnp.arange(x.shape[1])[:, None]
        angle = at / 10000.0 ** (jnp.arange(half) / half)
        cos = jnp.cos(angle)[None, :, None].astype(x.dtype)
        sin = jnp.sin(angle)[None, :, None].astype(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if case.fused:
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation="cudnn" if cudnn else "xla"
            )
        scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / (case.width // case.heads) ** 0.5
        mask = jnp.tril(jnp.ones((case.length, case.length), bool))
        scores = jnp.where(mask, scores.astype(jnp.float32), -1e9)
        return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores).astype(dtype), v)

    def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        matrices = {k: v for k, v in params.items() if k not in ("g1", "g2")}
        w = jax.tree.map(lambda a: a.astype(dtype), matrices)
        h = norm(x, params["g1"])
        q, k, v = (jnp.einsum("btd,dhk->bthk", h, w["qkv"][:, i]) for i in range(3))
        if case.llama:
            q, k = rotary(q), rotary(k)
        x = x + jnp.einsum("bthk,hkd->btd", attention(q, k, v), w["out"])
        h = norm(x, params["g2"])
        up = h @ w["up"]
        up = jax.nn.silu(h @ w["gate"]) * up if case.llama else jax.nn.gelu(up)
        return x + up @ w["down"], None

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"].astype(dtype)[batch["x"]]
        body = jax.checkpoint(layer) if case.remat else layer
        x, _ = jax.lax.scan(body, x, params["layers"])
        logits = norm(x, params["g"]) @ params["head"].astype(dtype)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["y"]
        ).mean()

    return loss


def optimizer() -> optax.GradientTransformation:
    """Of every case."""
    return optax.adamw(1e-4)


# ------------------------------------------------------- measure and predict


def measure(case: Case, *, cudnn: bool) -> Measurement:
    """Times steps on JAX's first device.

    Args:
        case: the model.
        cudnn: as in `loss_of`.
    """
    loss, solver = loss_of(case, cudnn=cudnn), optimizer()
    params = jax.tree.map(
        lambda s: jax.random.normal(jax.random.key(1), s.shape) * 0.02, arrays(case)[0]
    )
    batch = jax.tree.map(jnp.asarray, tokens_of(case))
    state = jax.jit(solver.init)(params)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = solver.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    start = time.perf_counter()
    run = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()
    compile_s = time.perf_counter() - start
    value, blocked = jnp.zeros(()), []
    for _ in range(WARM_UP + TIMED):
        start = time.perf_counter()
        params, state, value = run(params, state, batch)
        value.block_until_ready()
        blocked.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(TIMED):
        params, state, value = run(params, state, batch)
    value.block_until_ready()
    step_s = (time.perf_counter() - start) / TIMED
    device = jax.devices()[0]
    memory: Any = run.memory_analysis()
    cost: Any = run.cost_analysis() or {}
    return Measurement(
        case=case,
        step_s=step_s,
        blocked_s=median_high(blocked[WARM_UP:]),
        compile_s=compile_s,
        loss=float(value),
        xla_flops=cost.get("flops"),
        xla_bytes=cost.get("bytes accessed"),
        temporary_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        process_peak_bytes=(device.memory_stats() or {}).get("peak_bytes_in_use"),
        device=device.device_kind,
        jax=jax.__version__,
    )


def cluster_of(device: str) -> str:
    """One device of a `device_kind`, as `dtft.plan` reads it.

    Raises:
        ValueError: the catalog has no such device.

    >>> cluster_of("NVIDIA H200")
    '1xh200'
    """
    known = device_type_of_kind(device)
    if known is None:
        raise ValueError(
            f"device {device!r} is not in the planner's catalog. Add it to "
            "dtft/planner/cluster/catalog.py."
        )
    return f"1x{known.name}"


def predict(case: Case, cluster: str) -> Plan:
    """The plan of the step that is measured; the planner may choose nothing else."""
    params, batch = arrays(case)
    return dtft.plan(
        loss=loss_of(case, cudnn=True),
        optimizer=optimizer(),
        params=params,
        batch=batch,
        cluster=cluster,
        microbatches=1,
        remat="none",
        zero=0,
    )


def rows(table: Path = TABLE) -> list[Row]:
    """Plans every step of the table."""
    lines = table.read_text().splitlines()
    return [
        Row(measured=found, plan=predict(found.case, cluster_of(found.device)))
        for found in map(Measurement.from_json, lines)
    ]


# ------------------------------------------------------------------ the report


def cells(row: Row) -> list[object]:
    """One row of the report."""
    said = row.plan.prediction
    return [
        row.measured.case.name,
        cluster_of(row.measured.device).removeprefix("1x"),
        row.measured.case.words,
        row.measured.step_s,
        row.predicted_s,
        f"{row.error:+.1%}",
        f"{said.low_s:.4g} to {said.high_s:.4g}",
        "yes" if row.holds else "no",
        f"{row.measured.memory_bytes / GIB:.2f}",
        f"{row.memory_bytes / GIB:.2f}",
        f"{row.memory_error:+.1%}",
    ]


def verdict(some: Sequence[Row]) -> str:
    """How far off the predictions of some rows are."""
    errors = [row.error for row in some]
    slow = sum(error > 0 for error in errors)
    predicted = np.array([row.predicted_s for row in some])
    measured = np.array([row.measured.step_s for row in some])
    judged = judge(predicted, measured, [True] * len(some))
    return (
        f"`dtft.plan` is too slow in {slow} of {len(some)} cases: errors are from "
        f"{min(errors):+.1%} to {max(errors):+.1%}, the median absolute error is "
        f"{judged.median_error:.1%}. {sum(row.holds for row in some)} of {len(some)} "
        f"intervals hold the measured time. Concordance {judged.concordance_5:.3f}, "
        f"of {judged.num_pairs_5} pairs that differ by more than 5 %."
    )


def memory_verdict(some: Sequence[Row]) -> str:
    """How far off the memory of some rows is."""
    errors = [row.memory_error for row in some]
    return (
        f"Errors of memory are from {min(errors):+.1%} to {max(errors):+.1%}, the "
        f"median absolute error is {np.median(np.abs(errors)):.1%}."
    )


def by_device(found: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each device."""
    apart: dict[str, list[Row]] = {}
    for row in found:
        apart.setdefault(row.measured.device, []).append(row)
    return apart


def notes(found: Sequence[Row]) -> list[str]:
    """What the reader must know to judge the table."""
    apart = [row.measured.blocked_s / row.measured.step_s - 1 for row in found]
    return [
        *(
            f"{device}: {verdict(some)} {memory_verdict(some)}"
            for device, some in by_device(found).items()
        ),
        f"`measured s` is the mean of {TIMED} steps in a row, of one run of each case. "
        f"Steps that were waited for one by one took {min(apart):+.1%} to "
        f"{max(apart):+.1%} beside it. `error` is predicted / measured - 1. "
        "`XLA's GiB` is what the compiler assigned: arguments and temporaries. "
        "`predicted GiB` is without the reserve. Predictions do not use the table. "
        f"Their constants: {found[0].plan.prediction.source}.",
    ]


def figure_of(found: Sequence[Row]) -> Figure:
    """Predicted over measured seconds, each with its interval."""
    figure = Figure(figsize=(5.5, 5))
    axes = figure.subplots()
    for device, some in by_device(found).items():
        said = [row.plan.prediction for row in some]
        axes.errorbar(
            [row.measured.step_s for row in some],
            [one.step_s for one in said],
            yerr=[
                [one.step_s - one.low_s for one in said],
                [one.high_s - one.step_s for one in said],
            ],
            fmt="o",
            markersize=4,
            linewidth=0.8,
            label=device,
        )
    both = [s for row in found for s in (row.measured.step_s, row.predicted_s)]
    line = [0.85 * min(both), 1.15 * max(both)]
    axes.plot(line, line, "k-", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, s per step")
    axes.set(ylabel="predicted by dtft.plan, with its interval, s per step")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.legend(fontsize=8)
    return figure


def figures(row: Row) -> dict[str, Any]:
    """What `--json` writes of a row."""
    said = row.plan.prediction
    return {
        "case": row.measured.case.name,
        "device": row.measured.device,
        "measured_s": row.measured.step_s,
        "predicted_s": row.predicted_s,
        "low_s": said.low_s,
        "high_s": said.high_s,
        "terms_s": dict(said.terms),
        "assigned_bytes": row.measured.memory_bytes,
        "predicted_bytes": row.memory_bytes,
    }


def main() -> None:
    """Measures the table, or predicts what it has and writes the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--measure", action="store_true", help=f"on this GPU, into data/{TABLE.name}"
    )
    what.add_argument("--quick", action="store_true", help="only print the table")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if options.measure:
        here = require_gpu("gpu_steps").device_kind
        table = map(Measurement.from_json, TABLE.read_text().splitlines())
        lines = [one.to_json() for one in table if one.device != here]
        for case in CASES:
            lines.append(measure(case, cudnn=True).to_json())
            print(lines[-1], flush=True)  # kept if a later case fails
        TABLE.write_text("\n".join(lines) + "\n")
        return

    jax.config.update("jax_platforms", "cpu")
    found = rows()
    if options.json:
        options.json.write_text(json.dumps([figures(row) for row in found], indent=1))
    if options.quick:
        print("\n".join(report.table(HEADER, map(cells, found))))
        return
    measured = [row.measured for row in found]
    machines = {f"one {each.device} with jax {each.jax}" for each in measured}
    report.write(
        "gpu_steps",
        title=TITLE,
        command="python experiments/gpu_steps.py",
        header=HEADER,
        rows=map(cells, found),
        figure=figure_of(found),
        notes=notes(found),
        machine=f"{' and '.join(sorted(machines))}; the predictions depend on no "
        "machine, and are of these versions",
    )


if __name__ == "__main__":
    main()
