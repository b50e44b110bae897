"""The JAX program of a row of a table of training runs (`table.Row`).

The program is a GPT-like transformer as the row's software runs it. Nothing is run: the
program is traced from shapes, and the planner predicts seconds and memory from the
trace. A kernel of PyTorch is a custom call (`jax.ffi.ffi_call`) that reads and writes
whole arrays, so it moves the bytes of its operands and results. Adding a bias costs
nothing, because other kernels and matmuls do it too. Weights of norms (a ten-thousandth
of a model) are left out.

Sources: arXiv 2104.04473 (the program and its fused kernels), 2205.05198 (what is kept
for the backward pass), 2205.14135 (flash attention).
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dtft.planner.ir import register_kernel
from dtft.planner.software import SoftwareName
from dtft.planner.transformer.model import ParallelLayout, Shape
from dtft.planner.workload import Workload, of_loss

# Dims: B sequences, T and S positions, D hidden, F feed-forward, V vocabulary, N heads,
# H head width, C the three of queries, keys and values (or two of keys and values), K
# heads of keys and values, G heads of queries for each, E experts, P places of a
# sequence's tokens in an expert.


SUM, MASK = jnp.float32, jnp.int8
"""Dtypes of sums and moments, and of dropout masks."""
VOCABULARY_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this number and of `tp`."""
Function = Callable[..., Any]


def kernel(name: str, *results: tuple[jax.Array, Any]) -> Function:
    """Returns a function that calls a kernel of another compiler, such as PyTorch's.

    The function returns one array, or a tuple if the kernel has several results.

    Args:
        name: name of the kernel, without the prefix `dtft_`.
        *results: a pair for each result: an array that has the result's shape, and the
            result's dtype.
    """
    made = [jax.ShapeDtypeStruct(array.shape, dtype) for array, dtype in results]
    call = jax.ffi.ffi_call(f"dtft_{name}", made)

    def run(*operands: jax.Array) -> Any:
        found = call(*operands)
        return found[0] if len(found) == 1 else tuple(found)

    return run


def _no_operations(operands: Any, results: Any, params: Any) -> float:
    del operands, results, params
    return 0.0


def _attention_operations(products: float) -> Function:
    """Makes the function that counts the operations of flash attention.

    The kernels are FlashAttention 1 and 2. On an A100, they skip the scores that the
    causal mask hides, but run at a lower rate than matmuls. Both effects are about
    equally large. So all scores are counted, and the kernels are predicted at the rate
    of matmuls. On newer GPUs, the rate is multiplied by `Efficiency.mma_sync`.

    Args:
        products: half of the number of matmuls between queries, keys, values and
            scores: 1.0 for the two of the forward pass, 2.5 for the five of the
            backward pass.
    """

    def count(operands: Any, results: Any, params: Any) -> float:
        del results, params
        queries = operands[0].shape
        return products * 4.0 * math.prod(queries) * queries[1]

    return count


for _name in (
    "norm", "norm_back", "gelu", "gelu_back", "add", "dropout", "dropout_back",
    "dropout_add", "softmax", "softmax_back", "cast", "subtract", "exp", "loss_back",
    "contiguous", "multiply", "multiply_back", "weigh_back",
):  # fmt: skip
    register_kernel(f"dtft_{_name}", _no_operations)
register_kernel("dtft_flash", _attention_operations(1.0), mma_sync=True)
# Five products: the scores are computed again.
register_kernel("dtft_flash_back", _attention_operations(2.5), mma_sync=True)
# A device has whole groups of heads. G is no dim of keys, so it is not divided.
_GROUPED = "btkgh,btkh,btkh"
register_kernel(
    "dtft_grouped_flash",
    _attention_operations(1.0),
    dims=f"{_GROUPED}->btkgh",
    whole="g",
    mma_sync=True,
)
register_kernel(
    "dtft_grouped_flash_back",
    _attention_operations(2.5),
    dims=f"{_GROUPED},btkgh,btkgh->{_GROUPED}",
    whole="g",
    mma_sync=True,
)
# Context parallelism: each device needs the keys and values of all positions.
for _heads in ("dtft_exchange", "dtft_exchange_back"):
    register_kernel(_heads, _no_operations, dims="btkh->btkh", whole="t")
# Tokens are sorted by expert on their own device, sent to the devices of the experts,
# sorted by expert there; and brought back. A device has the places of its own
# positions, so places are divided like positions (T). Before they are sent, tokens have
# a further dim of size 1: so their dims differ from those after, and the axis `expert`
# divides them by example.
register_kernel("dtft_permute", _no_operations, dims="btd->betqd")
register_kernel("dtft_sort", _no_operations, dims="betqd->ebtd")
register_kernel("dtft_combine", _no_operations, dims="ebtd,btn->btd")
register_kernel("dtft_unpermute", _no_operations, dims="ebtd->btd")


def _differentiable(forward: Function, backward: Function) -> Function:
    """Returns a function with a gradient of its own (`jax.custom_vjp`).

    Args:
        forward: function from the arguments to the result and the residuals, which are
            kept for the backward pass.
        backward: function from the residuals and the gradient of the result to a tuple
            of the gradients of the arguments.
    """

    @jax.custom_vjp
    def run(*args: jax.Array) -> Any:
        return forward(*args)[0]

    run.defvjp(forward, backward)
    return run


def _keeping(name: str, keeps_result: bool = False) -> Function:
    """Returns a function of one array with a kernel for each pass.

    The backward kernel reads the gradient of the result, and the argument or the result
    of the forward kernel, which is kept in memory.

    Args:
        name: name of the forward kernel. The backward kernel has this name and `_back`.
        keeps_result: whether the result of the forward kernel is kept for the backward
            kernel, instead of its argument.
    """

    def forward(x: jax.Array) -> Any:
        y = kernel(name, (x, x.dtype))(x)
        return y, y if keeps_result else x

    def backward(kept: jax.Array, dy: jax.Array) -> Any:
        return (kernel(f"{name}_back", (dy, dy.dtype))(dy, kept),)

    return _differentiable(forward, backward)


def _masked(name: str) -> Function:
    """Returns dropout as a function with a kernel for each pass.

    The forward kernel also writes the mask, which the backward kernel reads.

    Args:
        name: `dropout`, a function of one array; or `dropout_add`, which adds a second
            array to the result.
    """

    def forward(y: jax.Array, *rest: jax.Array) -> Any:
        return kernel(name, (y, y.dtype), (y, MASK))(y, *rest)

    def backward(mask: jax.Array, dz: jax.Array) -> Any:
        dy = kernel("dropout_back", (dz, dz.dtype))(dz, mask)
        return (dy, dz) if name == "dropout_add" else (dy,)

    return _differentiable(forward, backward)


def _alike(name: str, *operands: jax.Array) -> Any:
    """Calls a kernel whose result has the shape and dtype of its first operand."""
    return kernel(name, (operands[0], operands[0].dtype))(*operands)


_contiguous = _differentiable(
    lambda y: (_alike("contiguous", y), None),
    lambda _, dy: (_alike("contiguous", dy),),
)
_flash = _differentiable(
    lambda q, k, v: ((y := _alike("flash", q, k, v)), (q, k, v, y)),
    lambda kept, dy: kernel("flash_back", *((x, x.dtype) for x in kept[:3]))(dy, *kept),
)


def _recomputed(fn: Function) -> Function:
    """Returns a function that is recomputed as a whole in the backward pass.

    PyTorch recomputes in this way. `jax.checkpoint` would not recompute results that
    the gradients do not need.
    """

    def backward(args: Any, dy: Any) -> Any:
        y, back = jax.vjp(fn, *args)
        _, dy = jax.lax.optimization_barrier((y, dy))
        return back(dy)

    return _differentiable(lambda *args: (fn(*args), args), backward)


def _loss_forward(logits: jax.Array, labels: jax.Array) -> Any:
    wide = kernel("cast", (logits, SUM))(logits)
    top = jnp.max(wide, -1)
    less = kernel("subtract", (wide, SUM))(wide)
    each = kernel("exp", (less, SUM))(less)
    picked = jnp.take_along_axis(less, labels[..., None], -1)[..., 0]
    loss = jnp.mean(jnp.log(jnp.sum(each, -1)) + top - picked)
    return loss, (each, jnp.zeros((), logits.dtype))


def _loss_backward(kept: Any, dloss: jax.Array) -> Any:
    each, like = kept
    slope = _alike("loss_back", each)
    dlogits = kernel("cast", (slope, like.dtype))(slope)
    return dlogits * dloss.astype(like.dtype), None


def linear(spec: str, bias_dims: int, narrow: Any) -> Function:
    """Returns a function of an input, a weight and a bias: a matmul with a bias.

    The forward pass does not add the bias, because this takes no time of its own. The
    backward pass computes the gradient of the bias.

    Args:
        spec: spec of the matmul, as for `jnp.einsum`.
        bias_dims: the number of dims of the bias, which are the last dims of the
            result.
        narrow: the dtype of the matmuls' operands.
    """

    def forward(x: jax.Array, w: jax.Array, b: jax.Array) -> Any:
        del b
        return _product(spec, x, w, narrow), (x, w)

    def backward(kept: Any, dy: jax.Array) -> Any:
        bias = jnp.sum(dy, tuple(range(dy.ndim - bias_dims)))
        return *_product_back(spec, narrow, kept, dy), bias

    return _differentiable(forward, backward)


def product(spec: str, narrow: Any) -> Function:
    """Returns a function of an input and a weight: a matmul.

    Args:
        spec: spec of the matmul, as for `jnp.einsum`.
        narrow: the dtype of the matmuls' operands.
    """
    multiply = functools.partial(_product, spec, narrow=narrow)
    if not jnp.issubdtype(narrow, jnp.integer):
        return multiply
    # JAX differentiates no function of integers.
    return _differentiable(
        lambda x, w: (multiply(x, w), (x, w)),
        functools.partial(_product_back, spec, narrow),
    )


def _product(spec: str, x: jax.Array, w: jax.Array, narrow: Any) -> jax.Array:
    """Multiplies `x` and `w` in the dtype `narrow`; the result has the dtype of `x`.

    `spec` is the spec of the matmul, as for `jnp.einsum`. Integers are summed in 32
    bits, as JAX requires.
    """
    operands = x.astype(narrow), w.astype(narrow)
    if not jnp.issubdtype(narrow, jnp.integer):
        return jnp.einsum(spec, *operands, preferred_element_type=x.dtype)
    sums = jnp.einsum(spec, *operands, preferred_element_type=jnp.int32)
    return sums.astype(x.dtype)


def _product_back(spec: str, narrow: Any, kept: Any, dy: jax.Array) -> Any:
    """Returns the gradients of both operands of the matmul `_product`.

    Args:
        spec: spec of the matmul, as for `jnp.einsum`.
        narrow: the dtype of the matmuls' operands.
        kept: the operands of `_product`, which the forward pass has kept.
        dy: the gradient of the result of `_product`.
    """
    left, rest = spec.split(",")
    right, made = rest.split("->")
    x, w = kept
    dx = _product(f"{made},{right}->{left}", dy, w, narrow)
    dw = _product(f"{left},{made}->{right}", x, dy, narrow)
    return dx, dw


def _grouped_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    y = _alike("grouped_flash", q, k, v)
    return y, (q, k, v, y)


def _grouped_backward(kept: Any, dy: jax.Array) -> Any:
    made = ((x, x.dtype) for x in kept[:3])
    return kernel("grouped_flash_back", *made)(*kept, dy)


_grouped_flash = _differentiable(_grouped_forward, _grouped_backward)
_exchange = _differentiable(
    lambda x: (_alike("exchange", x), None),
    lambda _, dy: (_alike("exchange_back", dy),),
)
_multiply = _differentiable(
    lambda x, y: (_alike("multiply", x, y), (x, y)),
    lambda kept, dz: kernel("multiply_back", *((x, x.dtype) for x in kept))(*kept, dz),
)


def _experts(shape: Shape) -> tuple[Function, Function]:
    """Returns the functions that bring tokens to experts, and the results back.

    The first function maps tokens to the inputs of experts. The second maps the outputs
    of experts, and the router's weight of each expert for each token, to tokens. Each
    expert gets the same number of tokens of each sequence.
    """
    places = shape.seq_len * shape.top_k // shape.experts

    def given(x_BTD: jax.Array) -> jax.Array:
        batch, _, hidden = x_BTD.shape
        item = functools.partial(jax.ShapeDtypeStruct, dtype=x_BTD.dtype)
        here = item((batch, shape.experts, places, 1, hidden))
        there = item((shape.experts, batch, places, hidden))
        sent = jax.ffi.ffi_call("dtft_permute", here)(x_BTD)
        return jax.ffi.ffi_call("dtft_sort", there)(sent)

    def taken(name: str, y_EBPD: jax.Array, *rest: jax.Array) -> jax.Array:
        _, batch, _, hidden = y_EBPD.shape
        made = jax.ShapeDtypeStruct((batch, shape.seq_len, hidden), y_EBPD.dtype)
        return jax.ffi.ffi_call(f"dtft_{name}", made)(y_EBPD, *rest)

    dispatch = _differentiable(
        lambda x: (given(x), None), lambda _, dy: (taken("unpermute", dy),)
    )
    combine = _differentiable(
        lambda y, shares: (taken("combine", y, shares), (y, shares)),
        lambda kept, dz: (given(dz), _alike("weigh_back", kept[1], dz[..., :1])),
    )
    return dispatch, combine


@dataclass(frozen=True, kw_only=True)
class LayerKernels:
    """Functions for the operations that differ between XLA, Megatron and eager PyTorch.

    `loss_of` builds a transformer's program from them. `KERNELS` has one value of this
    class for each software.
    """

    norm: Function
    gelu: Function
    multiply: Function
    """Function from a gate and another array to their elementwise product."""
    add: Function
    """Function from the output of attention or feed-forward and the residual to their
    sum."""
    drop: Function
    """Dropout of the embedding; without effect if the software has no dropout."""
    softmax: Function
    """Function from attention scores to probabilities, with dropout if the software has
    dropout."""
    contiguous: Function
    """Function that copies the attention output of all heads into one contiguous array.
    """
    flash: Function
    """Flash attention of queries, keys and values `[B, T, N, H]`."""
    grouped_flash: Function
    """Flash attention of queries `[B, T, K, G, H]`, and keys and values `[B, S, K, H]`.
    """
    exchange: Function
    """Function that brings the keys or values of all positions to each device."""
    recompute: Function
    """Function from a function to the same function, recomputed in the backward pass.
    """
    loss: Function
    """Function from logits and labels to the mean loss of all tokens."""


def _same(x: jax.Array) -> jax.Array:
    return x


def _added(y: jax.Array, x: jax.Array) -> jax.Array:
    return _alike("add", y, x)


_EAGER = LayerKernels(
    norm=_keeping("norm"),
    gelu=_keeping("gelu"),
    multiply=_multiply,
    add=_differentiable(lambda y, x: (_added(y, x), None), lambda _, dz: (dz, dz)),
    drop=_same,
    softmax=_keeping("softmax", keeps_result=True),
    contiguous=_contiguous,
    flash=_flash,
    grouped_flash=_grouped_flash,
    exchange=_exchange,
    recompute=_recomputed,
    loss=_differentiable(_loss_forward, _loss_backward),
)
"""PyTorch's own kernels, without dropout, like most models since 2022."""
_drop, _softmax = _masked("dropout"), _EAGER.softmax
_MEGATRON = LayerKernels(
    **{
        **vars(_EAGER),
        "add": _masked("dropout_add"),
        "drop": _drop,
        "softmax": lambda scores: _drop(_softmax(scores)),
    }
)
"""The fused kernels of 2021: masked softmax; bias with GELU; bias, dropout and residual
sum."""


@jax.checkpoint
def _xla_norm(x: jax.Array) -> jax.Array:
    y = x.astype(SUM)
    y = y - jnp.mean(y, -1, keepdims=True)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(
        x.dtype
    )


def _xla_softmax(scores: jax.Array) -> jax.Array:
    length = scores.shape[-1]
    seen = jnp.arange(length)[:, None] >= jnp.arange(length)[None]
    wide = jnp.where(seen[None, None], scores.astype(SUM), -1e30)
    return jax.nn.softmax(wide).astype(scores.dtype)


def _xla_flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _xla_grouped_flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _xla_flash(q.reshape(*q.shape[:2], -1, q.shape[-1]), k, v).reshape(q.shape)


def _xla_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    likely = jax.nn.log_softmax(logits.astype(SUM))
    return -jnp.mean(jnp.take_along_axis(likely, labels[..., None], -1))


_XLA = LayerKernels(
    norm=_xla_norm,
    gelu=jax.checkpoint(jax.nn.gelu),
    multiply=jnp.multiply,
    add=jnp.add,
    drop=_same,
    softmax=_xla_softmax,
    contiguous=_same,
    flash=_xla_flash,
    grouped_flash=_xla_grouped_flash,
    exchange=_same,
    recompute=jax.checkpoint,
    loss=_xla_loss,
)
KERNELS: Mapping[SoftwareName, LayerKernels] = {
    "xla": _XLA, "megatron": _MEGATRON, "eager": _EAGER,
}  # fmt: skip
"""The kernels of each software."""


def _attention_of(shape: Shape, layout: ParallelLayout) -> Function:
    """Returns the attention function of a layout's software and options.

    The function maps queries, keys and values to each head's weighted sums of values.
    """
    run = KERNELS[layout.software]
    is_grouped = shape.kv_heads not in (0, shape.heads)

    def scores(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        shares = run.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        return run.contiguous(jnp.einsum("bnts,bsnh->btnh", shares, v))

    def grouped_scores(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        each = jnp.einsum("btkgh,bskh->bkgts", q, k)
        shares = run.softmax(each.reshape(len(q), -1, *each.shape[3:]))
        mixed = jnp.einsum("bkgts,bskh->btkgh", shares.reshape(each.shape), v)
        return run.contiguous(mixed)

    if layout.flash_attention:
        mix = run.grouped_flash if is_grouped else run.flash
        if layout.cp == 1:
            return mix
        return lambda q, k, v: mix(q, run.exchange(k), run.exchange(v))
    mix = grouped_scores if is_grouped else scores
    return run.recompute(mix) if layout.recompute == "selective" else mix


def loss_of(shape: Shape, layout: ParallelLayout) -> Function:
    """Returns the function `loss(params, batch)` of a training run's program.

    The function scans over the layers.
    """
    run = KERNELS[layout.software]
    attend = _attention_of(shape, layout)
    specs = {
        "qkv": ("btd,dcnh->btcnh", 3), "out": ("btnh,nhd->btd", 1),
        "grouped_qkv": ("btd,dkgh->btkgh", 3), "grouped_out": ("btkgh,kghd->btd", 1),
        "up": ("btd,df->btf", 1), "gated_up": ("btd,dcf->btcf", 2),
        "down": ("btf,fd->btd", 1),
    }  # fmt: skip
    linears = {name: linear(*spec, layout.dtype) for name, spec in specs.items()}
    dispatch, combine = _experts(shape)

    def layer(x_BTD: jax.Array, params: Any) -> jax.Array:
        def project(name: str, x: jax.Array) -> jax.Array:
            return linears[name](x, params[name], params[f"{name}_bias"])

        def of_experts(name: str, spec: str, x: jax.Array) -> jax.Array:
            return product(spec, layout.dtype)(x, params[name])

        def activated(y: jax.Array) -> jax.Array:
            if not shape.gated:
                return run.gelu(y)
            return run.multiply(run.gelu(y[..., 0, :]), y[..., 1, :])

        y = run.norm(x_BTD)
        if "qkv" in params:
            qkv_BTCNH = project("qkv", y)
            mixed = project("out", attend(*(qkv_BTCNH[:, :, at] for at in range(3))))
        else:
            y = project("grouped_qkv", y)
            mixed = attend(y[..., :-2, :], y[..., -2, :], y[..., -1, :])
            mixed = project("grouped_out", mixed)
        x_BTD = run.add(mixed, x_BTD)
        y = run.norm(x_BTD)
        if shape.experts == 1:
            y = activated(project("gated_up" if shape.gated else "up", y))
            return run.add(project("down", y), x_BTD)
        logits_BTE = jnp.einsum("btd,de->bte", y, params["router"])
        shares_BTE = jax.nn.softmax(logits_BTE)
        spec = "ebpd,edcf->ebpcf" if shape.gated else "ebpd,edf->ebpf"
        y_EBPF = activated(of_experts("up", spec, dispatch(y)))
        made = combine(of_experts("down", "ebpf,efd->ebpd", y_EBPF), shares_BTE)
        return run.add(made, x_BTD)

    if layout.recompute == "full":
        layer = run.recompute(layer)

    def loss(params: Any, batch: Any) -> jax.Array:
        x_BTD = run.drop(params["embed"][batch["tokens"]] + params["places"][None])
        x_BTD, _ = jax.lax.scan(
            lambda x, p: (layer(x, p), None), x_BTD, params["layers"]
        )
        logits_BTV = jnp.einsum("btd,vd->btv", run.norm(x_BTD), params["embed"])
        return run.loss(logits_BTV, batch["labels"])

    return loss


def parameters_of(shape: Shape, layout: ParallelLayout) -> Any:
    """Returns the parameters of a run's program, as a tree of ShapeDtypeStructs."""
    hidden, heads, wide = shape.hidden, shape.heads, shape.ffn_width
    width = hidden // heads
    multiple = math.lcm(VOCABULARY_MULTIPLE, layout.tp)
    vocabulary = -(-shape.vocab // multiple) * multiple
    groups = shape.kv_heads or heads
    if groups == heads:
        layer: dict[str, tuple[int, ...]] = {
            "qkv": (hidden, 3, heads, width), "qkv_bias": (3, heads, width),
            "out": (heads, width, hidden), "out_bias": (hidden,),
        }  # fmt: skip
    else:
        each = heads // groups
        layer = {
            "grouped_qkv": (hidden, groups, each + 2, width),
            "grouped_qkv_bias": (groups, each + 2, width),
            "grouped_out": (groups, each, width, hidden), "grouped_out_bias": (hidden,),
        }  # fmt: skip
    widened = (2, wide) if shape.gated else (wide,)
    if shape.experts == 1:
        up = "gated_up" if shape.gated else "up"
        layer |= {
            up: (hidden, *widened), f"{up}_bias": widened,
            "down": (wide, hidden), "down_bias": (hidden,),
        }  # fmt: skip
    else:
        layer |= {
            "up": (shape.experts, hidden, *widened),
            "down": (shape.experts, wide, hidden),
            "router": (hidden, shape.experts),
        }
    item = functools.partial(jax.ShapeDtypeStruct, dtype=layout.rest_dtype)
    return {
        "embed": item((vocabulary, hidden)),
        "places": item((shape.seq_len, hidden)),
        "layers": {name: item((shape.layers, *of)) for name, of in layer.items()},
    }


def batch_of(shape: Shape, layout: ParallelLayout) -> Any:
    """Returns the batch of a run's program, tokens and labels, as ShapeDtypeStructs."""
    tokens = jax.ShapeDtypeStruct((layout.global_batch, shape.seq_len), jnp.int32)
    return {"tokens": tokens, "labels": tokens}


def mixed_adam() -> optax.GradientTransformation:
    """Returns Adam with a float32 copy of the parameters, and two float32 moments."""

    def init(params: Any) -> Any:
        wide = jax.tree.map(lambda x: jnp.zeros(x.shape, SUM), params)
        return {"first": wide, "second": wide, "copy": wide}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        g = jax.tree.map(lambda x: x.astype(SUM), updates)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], g)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["second"], g)

        def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return p - 1e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p)

        copy = jax.tree.map(moved, state["copy"], first, second)
        updates = jax.tree.map(lambda x, p: x.astype(p.dtype) - p, copy, params)
        return updates, {"first": first, "second": second, "copy": copy}

    return optax.GradientTransformation(init, update)


@functools.lru_cache(maxsize=32)
def _traced(shape: Shape, layout: ParallelLayout) -> Workload:
    with jax.numpy_dtype_promotion("standard"):
        return of_loss(
            loss_of(shape, layout),
            mixed_adam(),
            parameters_of(shape, layout),
            batch_of(shape, layout),
            layout.rules,
        )


def workload_of(shape: Shape, layout: ParallelLayout) -> Workload:
    """Traces the step of a training run; runs with the same program share one trace."""
    program = {
        name: getattr(layout, name)
        for name in (
            "global_batch", "recompute", "flash_attention", "dtype", "gradient_bytes",
            "software",
        )
    }  # fmt: skip
    parts = layout.sequence_parallel and layout.tp > 1
    # All `tp` that divide the padded vocabulary have one program.
    tp = layout.tp if VOCABULARY_MULTIPLE % layout.tp else 1 + parts
    return _traced(
        shape,
        ParallelLayout(
            **program,
            tp=tp,
            pp=1,
            dp=1,
            cp=1 + (layout.cp > 1),
            micro_batch=1,
            sequence_parallel=parts,
        ),
    )
