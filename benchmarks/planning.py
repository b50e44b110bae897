"""How long the planner takes: from GPT-2 small on 8 devices to 1T parameters on 4,096.

    python benchmarks/planning.py [--json FILE] [--rounds 5] [--profile]
    python benchmarks/planning.py --cases gpt2-small --verify 16 [--cluster 8xcpu]

Everything is decided from shapes: no array is made, and no device but the host's
processor is there. Each case is planned once to warm up JAX (imports, its caches), then
in `--rounds` fresh questions; their median is what counts, and the first is shown
beside it. An unrolled Flax model is judged by the time that JAX takes to trace its
step, with empty caches like the plan. `--verify` times the compilation of the best
plans instead: for the GPU where the extra `aot` is installed, otherwise for fake CPU
devices. Knows no trainer.
"""

import argparse
import cProfile
import json
import platform
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from dtft.parallel.planning import target_of, verified
from dtft.planner.cluster import Cluster
from dtft.planner.search import decide
from dtft.planner.workload import of_loss

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a cluster, and how soon its plan should be there."""

    name: str
    cluster: str
    batch: int
    time: int
    width: int
    layers: int
    heads: int
    vocabulary: int
    scanned: bool
    """Whether the layers are one `lax.scan`; otherwise each is there by itself."""
    target_s: float | None
    """Seconds from the shapes to the plan; None: no target of its own."""
    model: Literal["gpt", "llama", "flax"] = "gpt"
    """`flax` is a Linen module."""
    target_traces: float | None = None
    """The same, as a multiple of the seconds that tracing the step takes."""


SMALL = {"batch": 8, "time": 1024, "width": 768, "layers": 12, "heads": 12,
         "vocabulary": 50257, "cluster": "8xH100"}  # fmt: skip
# The model of Megatron-LM's largest published run (Narayanan et al. 2021, table 1).
LARGE = {"batch": 3072, "time": 2048, "width": 25600, "layers": 128, "heads": 160,
         "vocabulary": 51200, "cluster": "512x8xH100"}  # fmt: skip
LLAMA = {"batch": 1024, "time": 4096, "width": 4096, "layers": 32, "heads": 32,
         "vocabulary": 32000, "cluster": "8x8xH100"}  # fmt: skip
MEDIUM = {"batch": 64, "time": 1024, "width": 1024, "layers": 24, "heads": 16,
          "vocabulary": 50257, "cluster": "8xH100"}  # fmt: skip
CASES = (
    Case(name="gpt2-small", scanned=False, target_s=1.0, **SMALL),
    Case(name="gpt2-small-scan", scanned=True, target_s=1.0, **SMALL),
    Case(name="llama-7b-scan", scanned=True, target_s=2.0, model="llama", **LLAMA),
    Case(
        name="flax-24-layers",
        scanned=False,
        target_s=None,
        model="flax",
        target_traces=2.0,
        **MEDIUM,
    ),
    Case(name="1T-scan", scanned=True, target_s=2.0, **LARGE),
    Case(name="1T-unrolled", scanned=False, target_s=None, **LARGE),
)


def array(*shape: int) -> jax.ShapeDtypeStruct:
    """Parameters are float32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def gpt_shapes(case: Case) -> Params:
    """Parameters of a GPT, layers stacked where they are scanned."""

    def layer(*stack: int) -> Params:
        head = case.width // case.heads
        return {
            "norm1": array(*stack, case.width),
            "qkv": array(*stack, 3, case.width, case.heads, head),
            "out": array(*stack, case.heads, head, case.width),
            "norm2": array(*stack, case.width),
            "up": array(*stack, case.width, 4 * case.width),
            "down": array(*stack, 4 * case.width, case.width),
        }

    names = [f"{number:03}" for number in range(case.layers)]
    return {
        "embed": array(case.vocabulary, case.width),
        "places": array(case.time, case.width),
        "layers": layer(case.layers) if case.scanned else {n: layer() for n in names},
        "norm": array(case.width),
    }


def normed(x_BTD: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm in float32."""
    y = x_BTD.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
    return (y * scale[None, None]).astype(jnp.bfloat16)


def next_token(logits_BTV: jax.Array, labels_BT: jax.Array) -> jax.Array:
    """The mean cross entropy."""
    likely = jax.nn.log_softmax(logits_BTV.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(likely, labels_BT[..., None], axis=-1))


Loss = Callable[[Any, Any], jax.Array]


def gpt_loss(case: Case) -> Loss:
    """Next-token loss of the GPT, computed in bfloat16."""

    def layer(x_BTD: jax.Array, params: Params) -> tuple[jax.Array, None]:
        p = {name: one.astype(jnp.bfloat16) for name, one in params.items()}
        y = normed(x_BTD, params["norm1"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, p["qkv"][i]) for i in range(3))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32)
        scores = scores * (q.shape[-1] ** -0.5)
        seen = jnp.arange(case.time)[:, None] >= jnp.arange(case.time)[None]
        scores = jnp.where(seen[None, None], scores, -1e30)
        shares = jax.nn.softmax(scores).astype(jnp.bfloat16)
        mixed = jnp.einsum("bnts,bsnh->btnh", shares, v)
        x_BTD = x_BTD + jnp.einsum("btnh,nhd->btd", mixed, p["out"])
        y = normed(x_BTD, params["norm2"])
        return x_BTD + jax.nn.gelu(y @ p["up"]) @ p["down"], None

    def loss(params: Params, batch: Params) -> jax.Array:
        embed = params["embed"].astype(jnp.bfloat16)
        places = params["places"].astype(jnp.bfloat16)
        x_BTD = embed[batch["tokens"]] + places[None]
        if case.scanned:
            x_BTD, _ = jax.lax.scan(layer, x_BTD, params["layers"])
        else:
            for one in params["layers"].values():
                x_BTD, _ = layer(x_BTD, one)
        return next_token(normed(x_BTD, params["norm"]) @ embed.T, batch["labels"])

    return loss


def llama_shapes(case: Case) -> Params:
    """Parameters of a Llama, layers stacked: gated MLP of width 11008 for 4096."""
    head, hidden = case.width // case.heads, case.width * 43 // 16
    layer = {
        "norm1": (case.width,), "qkv": (3, case.width, case.heads, head),
        "out": (case.heads, head, case.width), "norm2": (case.width,),
        "gate": (case.width, hidden), "up": (case.width, hidden),
        "down": (hidden, case.width),
    }  # fmt: skip
    return {
        "embed": array(case.vocabulary, case.width),
        "layers": {name: array(case.layers, *shape) for name, shape in layer.items()},
        "norm": array(case.width),
        "head": array(case.width, case.vocabulary),
    }


def llama_loss(case: Case) -> Loss:
    """Next-token loss of the Llama: rotary positions and cuDNN's attention."""

    def rotary(x_BTNH: jax.Array) -> jax.Array:
        half = x_BTNH.shape[-1] // 2
        rates = 10000.0 ** (-jnp.arange(half) / half)
        angle = jnp.arange(case.time).astype(jnp.float32)[:, None] * rates[None]
        cos, sin = (f(angle)[None, :, None].astype(x_BTNH.dtype)
                    for f in (jnp.cos, jnp.sin))  # fmt: skip
        a, b = x_BTNH[..., :half], x_BTNH[..., half:]
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def layer(x_BTD: jax.Array, params: Params) -> tuple[jax.Array, None]:
        p = {name: one.astype(jnp.bfloat16) for name, one in params.items()}
        y = normed(x_BTD, params["norm1"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, p["qkv"][i]) for i in range(3))
        mixed = jax.nn.dot_product_attention(
            rotary(q), rotary(k), v, is_causal=True, implementation="cudnn"
        )
        x_BTD = x_BTD + jnp.einsum("btnh,nhd->btd", mixed, p["out"])
        y = normed(x_BTD, params["norm2"])
        return x_BTD + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def loss(params: Params, batch: Params) -> jax.Array:
        x_BTD = params["embed"].astype(jnp.bfloat16)[batch["tokens"]]
        x_BTD, _ = jax.lax.scan(layer, x_BTD, params["layers"])
        head = params["head"].astype(jnp.bfloat16)
        return next_token(normed(x_BTD, params["norm"]) @ head, batch["labels"])

    return loss


class FlaxBlock(nn.Module):
    """A transformer block of Flax's own layers."""

    heads: int

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the block's output, of the shape of `x_BTD`."""
        y = nn.LayerNorm()(x_BTD)
        seen = nn.make_causal_mask(jnp.ones(x_BTD.shape[:2]))
        attention = nn.MultiHeadDotProductAttention(num_heads=self.heads)
        x_BTD = x_BTD + attention(y, y, mask=seen)
        width = x_BTD.shape[-1]
        y = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x_BTD)))
        return x_BTD + nn.Dense(width)(y)


class FlaxGpt(nn.Module):
    """A stack of blocks, each there by itself."""

    case: Case

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the logits."""
        x_BTD = nn.Embed(self.case.vocabulary, self.case.width)(tokens_BT)
        for _ in range(self.case.layers):
            x_BTD = FlaxBlock(self.case.heads)(x_BTD)
        return nn.Dense(self.case.vocabulary)(nn.LayerNorm()(x_BTD))


def flax_loss(case: Case) -> Loss:
    """Next-token loss of the Flax model."""

    def loss(params: Any, batch: Params) -> jax.Array:
        logits = FlaxGpt(case).apply(params, batch["tokens"])
        assert isinstance(logits, jax.Array)
        return next_token(logits, batch["labels"])

    return loss


def asked_of(case: Case) -> dict[str, Any]:
    """What is planned: the arguments of `dtft.plan`."""
    ints = jax.ShapeDtypeStruct((case.batch, case.time), jnp.int32)
    match case.model:
        case "gpt":
            loss, params = gpt_loss(case), gpt_shapes(case)
        case "llama":
            loss, params = llama_loss(case), llama_shapes(case)
        case "flax":
            loss = flax_loss(case)
            params = jax.eval_shape(FlaxGpt(case).init, jax.random.key(0), ints)
    return {
        "loss": loss,
        "optimizer": optax.adamw(1e-4),
        "params": params,
        "batch": {"tokens": ints, "labels": ints},
    }


def tracing_s(asked: dict[str, Any]) -> float:
    """Seconds that JAX takes to trace loss, gradients and update, from nothing."""
    loss, solver = asked["loss"], asked["optimizer"]

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = solver.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.eval_shape(solver.init, asked["params"])
    jax.clear_caches()
    begun = time.perf_counter()
    jax.make_jaxpr(step)(asked["params"], state, asked["batch"])
    return time.perf_counter() - begun


def plan_once(case: Case) -> dict[str, Any]:
    """Traces and decides, from nothing."""
    asked = asked_of(case)
    tracing = 0.0
    if case.target_traces is not None:
        tracing = tracing_s(asked)
        jax.clear_caches()
    begun = time.perf_counter()
    question = of_loss(**asked)
    traced = time.perf_counter()
    decision = decide(question, Cluster.parse(case.cluster))
    decided = time.perf_counter()
    plan = decision.plan
    return {
        "trace_s": traced - begun,
        "decide_s": decided - traced,
        "whole_s": decided - begun,
        "jax_trace_s": tracing,
        "candidates": sum(len(one.priced.space) for one in decision.found.values()),
        "remats": list(decision.found),
        "plan": {**plan.mesh, "microbatches": plan.knobs.microbatches,
                 "remat": plan.knobs.remat, "zero": plan.knobs.zero},
        "step_s": plan.prediction.step_s,
    }  # fmt: skip


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """The first time, and the median of the times after it."""
    first = plan_once(case)
    seen = [plan_once(case) for _ in range(rounds)]
    times = {name: median(one[name] for one in seen) for name in first if "_s" in name}
    parameters = sum(one.size for one in jax.tree.leaves(asked_of(case)["params"]))
    target_s = case.target_s
    if case.target_traces is not None:
        target_s = case.target_traces * times["jax_trace_s"]
    return {**first, **times, "case": case.name, "cluster": case.cluster,
            "parameters": parameters, "first_s": first["whole_s"],
            "target_s": target_s}  # fmt: skip


def main() -> None:
    """Measures every case, prints a table and writes the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("runs/bench/planning.json"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    parser.add_argument("--verify", type=int, metavar="N", help="of the best N plans")
    parser.add_argument("--cluster", help="instead of the cases' own")
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {platform.machine()}, {platform.system()}")
    cases = [case for case in CASES if case.name in options.cases]
    if options.cluster:
        cases = [replace(case, cluster=options.cluster) for case in cases]
    if options.verify:
        for case in cases:
            _verify(case, options.verify)
        return
    print("case             parameters candidates  trace s decide s  whole s  (first)")
    results = []
    for case in cases:
        if options.profile:
            _profile(case)
            continue
        one = measure(case, options.rounds)
        results.append(one)
        target = one["target_s"]
        met = target is not None and one["whole_s"] <= target
        verdict = ""
        if target is not None:
            verdict = f"  target {target:.2f} s: {'met' if met else 'MISSED'}"
        if one["jax_trace_s"]:
            verdict += f" (JAX traces it in {one['jax_trace_s']:.2f} s)"
        print(
            f"{case.name:<16} {one['parameters'] / 1e9:>8.2f} B "
            f"{one['candidates']:>10,} {one['trace_s']:>8.2f} {one['decide_s']:>8.2f} "
            f"{one['whole_s']:>8.2f} {one['first_s']:>8.2f}{verdict}",
            flush=True,
        )
        print(f"  {one['plan']}: {one['step_s']:.4g} s a step")
    if results:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _verify(case: Case, num: int) -> None:
    asked = asked_of(case)
    decision = decide(of_loss(**asked), Cluster.parse(case.cluster))
    begun = time.perf_counter()
    compiled = verified(decision, asked, num=num)
    took = time.perf_counter() - begun
    print(
        f"{case.name}: {len(compiled)} plans compiled for {target_of(decision)} in "
        f"{took:.1f} s"
    )


def _profile(case: Case) -> None:
    plan_once(case)
    with cProfile.Profile() as profile:
        plan_once(case)
    pstats.Stats(profile).sort_stats("cumulative").print_stats(60)
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
