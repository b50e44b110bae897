"""Speed of element-wise work on one GPU, beside what the planner assumes.

    python experiments/gpu_elementwise.py             computes the shares; no GPU
    python experiments/gpu_elementwise.py --measure   measures the table anew

The planner divides the bytes that fused kernels move (`dtft.planner.ir.moved_bytes`) by
a share of the memory's bandwidth (`Efficiency.memory`). This study measures the share:
the bytes of the compiled program's kernels, over the measured seconds, over the
bandwidth of the catalog. The bytes that the planner counts stand beside it. The table
is `data/gpu_elementwise.jsonl`. Nothing is fitted to it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from gpu_optimizer import require_gpu
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tests` are beside this folder

from dtft.planner.aot.hlo import parse  # noqa: E402
from dtft.planner.cluster.catalog import device_type_of_kind  # noqa: E402
from dtft.planner.ir import moved_bytes, trace  # noqa: E402
from tests.support.hlo import kernel_bytes  # noqa: E402

TABLE = Path(__file__).parent / "data" / "gpu_elementwise.jsonl"
TITLE = "Speed of element-wise work on one GPU"
CALLS, TURNS = 20, 5
"""Calls of a turn, of which only the last is waited for; turns, of which the median
counts."""
HEADER = [
    "work", "device", "GB compiled", "GB counted", "ms measured", "share of bandwidth",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Work:
    """A function without matmuls, and the shapes of its arguments."""

    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]

    def counted_bytes(self) -> float:
        """Bytes that the planner counts."""
        return sum(moved_bytes(trace(self.function, *self.arguments)).values())


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    centred = y - y.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return (centred * scale * gain).astype(x.dtype)


def _softmax(scores: jax.Array) -> jax.Array:
    length = scores.shape[-1]
    mask = jnp.tril(jnp.ones((length, length), bool))
    seen = jnp.where(mask, scores.astype(jnp.float32), -1e9)
    return jax.nn.softmax(seen).astype(scores.dtype)


def _rotary(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] / 10000.0 ** (
        jnp.arange(half, dtype=jnp.float32) / half
    )
    cos, sin = (f(angle)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    ).mean()


def _adamw(g: jax.Array, mean: jax.Array, square: jax.Array, p: jax.Array) -> Any:
    mean = 0.9 * mean + 0.1 * g
    square = 0.999 * square + 0.001 * g * g
    update = mean / 0.9 / (jnp.sqrt(square / 0.99) + 1e-8) + 1e-4 * p
    return mean, square, p - 1e-4 * update


def _with_gradient(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The function, and its gradient for a further argument, its cotangent."""

    def both(cotangent: jax.Array, *arguments: jax.Array) -> Any:
        result, gradient = jax.vjp(function, *arguments)
        return result, gradient(cotangent)

    return both


def works() -> Mapping[str, Work]:
    """All works, by name."""

    def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    x, gain = array(16, 4096, 2048), array(2048, dtype="float32")
    hidden, heads = array(16, 2048, 8192), array(8, 4096, 32, 128)
    scores, logits = array(8, 16, 2048, 2048), array(8192, 32000)
    labels = array(8192, dtype="int32")
    state = array(2**27, dtype="float32")
    return {
        "sum, bfloat16": Work(function=lambda a, b: a + b, arguments=(x, x)),
        "sum, float32": Work(function=lambda a, b: a + b, arguments=(state, state)),
        "GELU": Work(function=jax.nn.gelu, arguments=(hidden,)),
        "GELU and its gradient": Work(
            function=_with_gradient(jax.nn.gelu), arguments=(hidden, hidden)
        ),
        "layer norm": Work(function=_norm, arguments=(x, gain)),
        "layer norm and its gradient": Work(
            function=_with_gradient(_norm), arguments=(x, x, gain)
        ),
        "causal softmax": Work(function=_softmax, arguments=(scores,)),
        "causal softmax and its gradient": Work(
            function=_with_gradient(_softmax), arguments=(scores, scores)
        ),
        "rotary positions": Work(function=_rotary, arguments=(heads,)),
        "cross entropy and its gradient": Work(
            function=jax.value_and_grad(_entropy), arguments=(logits, labels)
        ),
        "AdamW": Work(function=_adamw, arguments=(state,) * 4),
    }


def measured(work: Work) -> tuple[float, int]:
    """Seconds of a call on JAX's first device, and bytes of the compiled kernels."""
    rng = np.random.default_rng(0)
    arguments = [
        jnp.asarray(rng.integers(0, 1000, each.shape, np.int32))
        if each.dtype == jnp.int32
        else jax.random.uniform(jax.random.key(place), each.shape, each.dtype)
        for place, each in enumerate(work.arguments)
    ]
    run = jax.jit(work.function).lower(*arguments).compile()
    for _ in range(3):
        jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(TURNS):
        begin, result = time.perf_counter(), None
        for _ in range(CALLS):
            result = run(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begin) / CALLS)
    return median(times), kernel_bytes(parse(run.as_text()))


def main() -> None:
    """Measures the table, or computes the shares and writes the report."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument(
        "--measure", action="store_true", help=f"on this GPU, into data/{TABLE.name}"
    )
    if parser.parse_args().measure:
        require_gpu("gpu_elementwise")
        device = jax.devices()[0].device_kind
        lines = []
        for name, work in works().items():
            seconds, size = measured(work)
            row = {"work": name, "s": seconds, "compiled_bytes": size}
            row |= {"device": device, "jax": jax.__version__}
            lines.append(json.dumps(row))
            print(lines[-1], flush=True)  # kept if a later one fails
        TABLE.write_text("\n".join(lines) + "\n")
        return
    jax.config.update("jax_platforms", "cpu")
    counted = {name: work.counted_bytes() for name, work in works().items()}
    table = [json.loads(line) for line in TABLE.read_text().splitlines()]
    shares: dict[str, list[float]] = {}
    assumed: dict[str, float] = {}
    lines = []
    for row in table:
        device = device_type_of_kind(row["device"])
        if device is None:
            raise ValueError(f"{row['device']!r} is not in the planner's catalog.")
        share = row["compiled_bytes"] / row["s"] / device.memory_bandwidth
        shares.setdefault(row["device"], []).append(share)
        assumed[row["device"]] = device.efficiency.memory
        lines.append(
            [
                row["work"],
                row["device"],
                f"{row['compiled_bytes'] / 1e9:.2f}",
                f"{counted[row['work']] / 1e9:.2f}",
                f"{1e3 * row['s']:.3f}",
                f"{share:.2f}",
            ]
        )
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for name, some in shares.items():
        axes.plot(some, "o", markersize=4, label=name)
        axes.axhline(assumed[name], color="black", linewidth=0.8)
    axes.set_xticks(range(len(counted)), list(counted), rotation=60, ha="right")
    axes.set(ylabel="share of bandwidth", ylim=(0, 1.1))
    axes.legend(fontsize=8)
    figure.tight_layout()
    machines = sorted({f"one {row['device']} with jax {row['jax']}" for row in table})
    report.write(
        "gpu_elementwise",
        title=TITLE,
        command="python experiments/gpu_elementwise.py",
        header=HEADER,
        rows=lines,
        figure=figure,
        notes=[
            *(
                f"{name}: shares from {min(some):.2f} to {max(some):.2f}, median "
                f"{median(some):.2f}; the planner assumes {assumed[name]:.2f} (the "
                "line of the figure)."
                for name, some in shares.items()
            ),
            "`GB compiled` are the bytes of the kernels of XLA's program; those of the "
            "H100's rows were compiled afterwards by jax 0.10.2, without a GPU. `GB "
            "counted` are by the planner's rules of fusion. Median of "
            f"{TURNS} turns of {CALLS} calls in a row. AdamW is counted here as plain "
            "operators; in a step, the planner counts an optimizer's update once.",
        ],
        machine=f"{' and '.join(machines)}; the counts depend on no machine, and are "
        "of these versions",
    )


if __name__ == "__main__":
    main()
