"""Work and memory of one device for a GPT-like transformer, counted from its shape.

Sources: arXiv 2104.04473 (operations, interleaving), 2205.05198 (sequence parallelism,
selective recomputation, activations), 2205.14135 (flash attention).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

# Work of a layer, of the embedding and of the logits with the loss, as Megatron-style
# programs run them.


Recompute = Literal["full", "selective", "none"]
"""Recomputation in the backward pass: `full` of whole layers, `selective` of the
attention core, or none."""

RECOMPUTE: tuple[Recompute, ...] = ("full", "selective", "none")

Dtype = Literal["float16", "bfloat16", "float8_e4m3fn"]
"""Dtype of the matmuls of a layer's weights. With float8 all else (attention, logits,
activations, memory) is bfloat16."""
ITEM_BYTES = 2
"""Bytes of one activation, weight or gradient in fp16 or bf16."""


FORWARD_KERNELS, BACKWARD_KERNELS = 16, 30
"""Number of kernels of one layer's forward and backward pass, with the fused kernels of
2021: masked softmax, bias with GELU, bias with dropout and residual sum."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a decoder-only transformer; feed-forward parts are 4 x `hidden`
    wide."""

    hidden: int
    layers: int
    heads: int
    seq_len: int
    vocab: int

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: attention, feed-forward, biases and norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the word embedding, which the logits share."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """The number of parameters of the model.

        >>> shape = Shape(hidden=4096, layers=36, heads=32, seq_len=2048, vocab=51200)
        >>> round(shape.parameters / 1e9, 2)
        7.47
        """
        rest = (self.seq_len + 2) * self.hidden
        return self.layers * self.layer_parameters + self.embedding_parameters + rest

    def flops(self, sequences: int, recompute: Recompute) -> float:
        """Computes the flops of a step, with recomputation.

        The formula is that of the published tables (`experiments/data/README.md`).

        With full recomputation 96 B s L h^2 (1 + s/6h + V/16Lh), where B is
        `sequences`, s `seq_len`, L `layers`, h `hidden` and V `vocab`. Without
        recomputation 72 replaces 96 and V/12Lh replaces V/16Lh. Selective recomputation
        has 4 B s^2 L h flops more than no recomputation. The recomputation inside flash
        attention is not counted.
        """
        tokens = sequences * self.seq_len
        attention = 4 * self.seq_len * self.hidden
        layer = 24 * self.hidden**2 + attention
        again = {"full": layer, "selective": attention, "none": 0}[recompute]
        logits = 6 * self.hidden * self.vocab
        return float(tokens * (self.layers * (3 * layer + again) + logits))


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Parallel layout of a transformer on devices, with its memory options.

    `tp`, `pp` and `dp` are the degrees of tensor, pipeline and data parallelism. `tp`
    is innermost on the fabric, then `dp`, then `pp`, as in Megatron.
    """

    tp: int
    pp: int
    dp: int
    micro_batch: int
    """Sequences per microbatch of one replica."""
    global_batch: int
    """Sequences per step."""
    virtual_stages: int = 1
    """The number of interleaved parts of each pipeline stage; 1 is plain 1F1B."""
    recompute: Recompute = "full"
    zero: int = 0
    """ZeRO stage, the state divided over `dp`: 1 optimizer state, 2 also gradients, 3
    also parameters."""
    sequence_parallel: bool = False
    """Whether activations between matmuls are divided over `tp` too."""
    flash_attention: bool = False
    """Whether attention scores stay on the chip."""
    dtype: Dtype = "bfloat16"
    gradient_bytes: int = ITEM_BYTES
    """Bytes of one gradient kept over microbatches: 2 (fp16), 4 (fp32 sums), 6 (both).
    """
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage; empty for equal stages."""

    @property
    def sum_bytes(self) -> int:
        """Bytes of one gradient in the sum over microbatches and replicas."""
        return min(self.gradient_bytes, 4)

    @property
    def rest_dtype(self) -> Dtype:
        """Dtype of the matmuls without a layer's weights."""
        return "bfloat16" if self.dtype.startswith("float8") else self.dtype

    @property
    def gpus(self) -> int:
        """The number of devices."""
        return self.tp * self.pp * self.dp

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of one replica in a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    def layers_of(self, shape: Shape) -> tuple[int, ...]:
        """Returns the number of layers of each stage, first to last."""
        return self.stage_layers or (shape.layers // self.pp,) * self.pp


@dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """A batched matmul, run `trips` times: `batch` products of [m, k] by [k, n]."""

    m: int
    n: int
    k: int
    dtype: Dtype
    batch: int = 1
    trips: float = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorCollective:
    """A collective over `tp`; `num_bytes` is of the larger of operand and result."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    num_bytes: int
    trips: int


@dataclass(frozen=True, kw_only=True)
class MicrobatchWork:
    """Work of one device for one microbatch, forward and backward."""

    matmuls: tuple[Matmul, ...]
    num_bytes: float
    """Bytes that operators other than matmuls read and write in device memory."""
    kernels: int
    """The number of kernels, launched one after another."""
    collectives: tuple[TensorCollective, ...] = ()


def layer_work(shape: Shape, layout: ParallelLayout) -> MicrobatchWork:
    """Computes the work of one layer for a microbatch.

    >>> shape = Shape(hidden=4096, layers=36, heads=32, seq_len=2048, vocab=51200)
    >>> layout = ParallelLayout(tp=4, pp=1, dp=1, micro_batch=1, global_batch=1)
    >>> products = layer_work(shape, layout).matmuls
    >>> counted = sum(2 * p.m * p.n * p.k * p.batch * p.trips for p in products)
    >>> counted * 4 == 96 * 2048 * 4096**2 + 16 * 2048**2 * 4096
    True
    """
    passes = 2 if layout.recompute == "full" else 1
    matmuls = (
        *(p for m in _linear(shape, layout) for p in _trained(m, passes)),
        *_attention(shape, layout),
    )
    # 2 all-reduces forward and 2 backward; recomputing the forward pass repeats the
    # forward all-reduces.
    return MicrobatchWork(
        matmuls=matmuls,
        num_bytes=_layer_bytes(shape, layout, passes),
        kernels=FORWARD_KERNELS * passes + BACKWARD_KERNELS,
        collectives=_between(shape, layout, forward=2 * passes, backward=2),
    )


def embedding_work(shape: Shape, layout: ParallelLayout) -> MicrobatchWork:
    """Computes the work of the embedding: look-up, positions and dropout."""
    rows = _tokens(layout, shape) * shape.hidden
    # The gradient is a dense array: set to zero, scattered into, added.
    table = shape.embedding_parameters / layout.tp
    accumulated = ITEM_BYTES + _accumulate_bytes(layout)
    return MicrobatchWork(
        matmuls=(),
        num_bytes=rows * (4 + 6 + 5 + 8) + table * accumulated,
        kernels=12,
        collectives=_between(shape, layout, forward=1, backward=0),
    )


def head_work(shape: Shape, layout: ParallelLayout) -> MicrobatchWork:
    """Computes the work of the head: norm, logits, and cross entropy in fp32."""
    tokens = _tokens(layout, shape)
    width = -(-shape.vocab // layout.tp)
    logits = Matmul(m=tokens, n=width, k=shape.hidden, dtype=layout.rest_dtype)
    # fp16 to fp32 6; maximum 4; subtract 8; exp 8; sum 4; its gradient 8; to fp16 6.
    loss = tokens * (shape.vocab / layout.tp) * (6 + 4 + 8 + 8 + 4 + 8 + 6)
    table = shape.embedding_parameters / layout.tp
    return MicrobatchWork(
        matmuls=tuple(_trained(logits, 1)),
        num_bytes=loss + tokens * shape.hidden * 10 + table * _accumulate_bytes(layout),
        kernels=24,
        collectives=_between(shape, layout, forward=0, backward=1),
    )


# Bytes of one layer per token and hidden unit, 2-byte items, a mask 1 byte. Forward:
# two norms (read, write: 4 each), two sums of residual, bias and dropout (7 each).
_WHOLE_FORWARD = 2 * 4 + 2 * 7
# Two norms (6 each), two dropouts (5) with a sum of two gradients (6), bias gradients
# of the two products whose output is whole.
_WHOLE_BACKWARD = 2 * 6 + 2 * 11 + 4
# Divided by tp: context made contiguous (4), bias and GELU on four times the width.
_SPLIT_FORWARD = 4 + 4 * 4
# The same backward, and bias gradients of the products of widths 3 and 4.
_SPLIT_BACKWARD = 4 + 4 * 6 + 14
# Per token, position attended to and head: softmax (4), dropout (5); backward 6 and 5.
_SCORES_FORWARD, _SCORES_BACKWARD = 9, 11


def _layer_bytes(shape: Shape, layout: ParallelLayout, passes: int) -> float:
    rows = _tokens(layout, shape) * shape.hidden
    whole = passes * _WHOLE_FORWARD + _WHOLE_BACKWARD
    split = passes * _SPLIT_FORWARD + _SPLIT_BACKWARD
    if layout.flash_attention:
        scores = 0.0
    else:
        computed = 1 if layout.recompute == "none" else 2
        per_row = shape.heads * shape.seq_len / shape.hidden
        scores = (computed * _SCORES_FORWARD + _SCORES_BACKWARD) * per_row
    shared = layout.tp if layout.sequence_parallel else 1
    weights = shape.layer_parameters / layout.tp * _accumulate_bytes(layout)
    return rows * (whole / shared + (split + scores) / layout.tp) + weights


def _accumulate_bytes(layout: ParallelLayout) -> int:
    """Counts the bytes per parameter to read a gradient and add it to the sum."""
    return ITEM_BYTES + 2 * layout.sum_bytes


def _linear(shape: Shape, layout: ParallelLayout) -> tuple[Matmul, ...]:
    tokens, hidden, tp = _tokens(layout, shape), shape.hidden, layout.tp
    return (
        Matmul(m=tokens, n=3 * hidden // tp, k=hidden, dtype=layout.dtype),
        Matmul(m=tokens, n=hidden, k=hidden // tp, dtype=layout.dtype),
        Matmul(m=tokens, n=4 * hidden // tp, k=hidden, dtype=layout.dtype),
        Matmul(m=tokens, n=hidden, k=4 * hidden // tp, dtype=layout.dtype),
    )


def _trained(product: Matmul, passes: int) -> Iterator[Matmul]:
    """Yields a matmul, run `passes` times, and one for each operand's gradient."""
    m, n, k, dtype = product.m, product.n, product.k, product.dtype
    yield Matmul(m=m, n=n, k=k, dtype=dtype, trips=passes)
    yield Matmul(m=m, n=k, k=n, dtype=dtype)
    yield Matmul(m=k, n=n, k=m, dtype=dtype)


def _attention(shape: Shape, layout: ParallelLayout) -> tuple[Matmul, ...]:
    """Lists the matmuls of attention, with no saving for causal masks.

    Unfused kernels compute the masked half. Fused kernels skip the masked half, and
    lose about as much time to a lower rate.
    """
    length, width = shape.seq_len, shape.hidden // shape.heads
    batch, dtype = layout.micro_batch * shape.heads // layout.tp, layout.rest_dtype
    if layout.flash_attention:
        # One trip is both products. The backward pass has five products, because it
        # recomputes the scores.
        passes = (2 if layout.recompute == "full" else 1) + 2.5
        sizes = {"m": length, "n": 2 * width, "k": length, "batch": batch}
        return (Matmul(**sizes, dtype=dtype, trips=passes),)
    passes = (1 if layout.recompute == "none" else 2) + 2
    return (
        Matmul(m=length, n=length, k=width, dtype=dtype, batch=batch, trips=passes),
        Matmul(m=length, n=width, k=length, dtype=dtype, batch=batch, trips=passes),
    )


def _between(
    shape: Shape, layout: ParallelLayout, *, forward: int, backward: int
) -> tuple[TensorCollective, ...]:
    """Lists the collectives over `tp`; () with `tp` 1.

    They are all-reduces, or with sequence parallelism all-gathers and reduce-scatters.
    """
    if layout.tp == 1:
        return ()
    size = _tokens(layout, shape) * shape.hidden * ITEM_BYTES
    times = forward + backward
    if not layout.sequence_parallel:
        return (TensorCollective(kind="all_reduce", num_bytes=size, trips=times),)
    # Backward gathers a layer's input once more, for the gradient of the weights.
    return (
        TensorCollective(kind="all_gather", num_bytes=size, trips=times + backward),
        TensorCollective(kind="reduce_scatter", num_bytes=size, trips=times),
    )


def _tokens(layout: ParallelLayout, shape: Shape) -> int:
    return layout.micro_batch * shape.seq_len


# Memory. Mixed precision with Adam: 2 bytes of parameter, `gradient_bytes` of gradient,
# 12 of fp32 master copy and two moments, each divided by ZeRO level.


OPTIMIZER_BYTES = 12
"""Bytes per parameter: fp32 master copy and two fp32 moments of Adam."""
BUCKET_ITEMS = 500_000_000
"""Largest number of items of a buffer in which gradients are reduced or parameters
gathered under ZeRO (DeepSpeed's default `reduce_bucket_size` and
`allgather_bucket_size`)."""
RESERVE_BYTES = 1_000_000_000
"""Bytes of the CUDA context and workspaces; as many again for the communicators of each
of tp, pp and dp that is above 1."""
FRAGMENTATION = 0.05
"""Share of allocated memory that is assumed to be lost to fragmentation."""


def memory(shape: Shape, layout: ParallelLayout) -> Mapping[str, int]:
    """Computes the bytes of a device, by term, of the stage that needs the most memory.

    >>> shape = Shape(hidden=4096, layers=36, heads=32, seq_len=2048, vocab=51200)
    >>> layout = ParallelLayout(tp=4, pp=1, dp=32, micro_batch=16, global_batch=512)
    >>> terms = memory(shape, layout)
    >>> terms["parameters"] / 1e9, terms["optimizer"] / 1e9
    (3.73389312, 22.40335872)
    """
    stages = [stage_memory(shape, layout, stage) for stage in range(layout.pp)]
    return max(stages, key=lambda terms: sum(terms.values()))


def stage_memory(shape: Shape, layout: ParallelLayout, stage: int) -> Mapping[str, int]:
    """Computes the bytes of each device of one pipeline stage, by term."""
    held = stage_parameters(shape, layout, stage)
    parts = [layout.dp if layout.zero >= level else 1 for level in (3, 2, 1)]
    activations = _activations(shape, layout, stage)
    # The update needs fp32 gradients after the activations are freed.
    fp32 = 0 if layout.gradient_bytes >= 4 else 4 * held / parts[2]
    terms = {
        "parameters": ITEM_BYTES * held / parts[0],
        "gradients": layout.gradient_bytes * held / parts[1],
        "optimizer": OPTIMIZER_BYTES * held / parts[2] + max(0, fp32 - activations),
        "activations": activations,
        "buffers": _buffers(shape, layout, held),
    }
    axes = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp))
    fixed = RESERVE_BYTES * (1 + axes)
    terms["reserve"] = fixed + FRAGMENTATION * sum(terms.values())
    return {name: round(value) for name, value in terms.items()}


def stage_parameters(shape: Shape, layout: ParallelLayout, stage: int) -> float:
    """Counts the parameters on each device of a stage, before ZeRO divides them.

    The first stage and the last stage each hold the embedding.
    """
    layers = layout.layers_of(shape)[stage] * shape.layer_parameters
    held = layers + (2 * shape.hidden if stage == layout.pp - 1 else 0)
    if stage in (0, layout.pp - 1):
        held += shape.embedding_parameters
    if stage == 0:
        held += shape.seq_len * shape.hidden
    return held / layout.tp


def kept_layers(shape: Shape, layout: ParallelLayout, stage: int) -> float:
    """Counts the layers whose activations a stage keeps at its peak.

    A layer counts once for each microbatch. 1F1B keeps at most pp - stage microbatches.
    With v `virtual_stages` above 1, the first stage keeps at most pp + (pp - 1) / v
    microbatches (arXiv 2205.05198, section 4.2.3).
    """
    pp, chunks, layers = layout.pp, layout.virtual_stages, layout.layers_of(shape)
    if chunks == 1:
        return layers[stage] * min(layout.num_microbatches, pp - stage)
    # Chunks under way: v for each of pp microbatches, and pp - 1 of the warm-up.
    warm_up = (pp - stage - 1) * 2 + (chunks - 1) * pp + 1
    return layers[stage] / chunks * min(layout.num_microbatches * chunks, warm_up)


def _activations(shape: Shape, layout: ParallelLayout, stage: int) -> float:
    """Computes the bytes of activations on a device of a stage (arXiv 2205.05198).

    A layer has s b h (10 + 24/t + 5 a s/(h t)) bytes, where s is `seq_len`, b
    `micro_batch`, h `hidden`, a `heads` and t `tp`. With sequence parallelism 34/t
    replaces 10 + 24/t; with flash attention the last summand is 0. Selective
    recomputation keeps the last summand for one layer only. Full recomputation keeps
    the inputs of layers, and everything of one layer. The first stage also has dropout
    masks of the embedding, the last stage also the logits and their gradient.
    """
    rows = layout.micro_batch * shape.seq_len * shape.hidden
    tp, whole = layout.tp, layout.tp if layout.sequence_parallel else 1
    scores = 5 * shape.heads * shape.seq_len / shape.hidden
    if layout.flash_attention:
        scores = 0.0
    live = rows * (10 / whole + (24 + scores) / tp)
    kept = kept_layers(shape, layout, stage)
    if layout.recompute == "full":
        total = kept * rows * ITEM_BYTES / whole + live
    elif layout.recompute == "selective":
        total = kept * rows * (10 / whole + 24 / tp) + rows * scores / tp
    else:
        total = kept * live
    # The embedding's dropout mask of each microbatch; the logits in fp16 and fp32 and
    # the gradient of the latter.
    in_flight = min(layout.num_microbatches, layout.pp - stage)
    total += rows / whole * in_flight if stage == 0 else 0
    if stage == layout.pp - 1:
        tokens = layout.micro_batch * shape.seq_len
        total += tokens * (2 + 4 + 4) * shape.vocab / tp + rows * 4 / whole
    return total


def _buffers(shape: Shape, layout: ParallelLayout, held: float) -> float:
    """Computes the bytes of buffers: stage transfers, ZeRO buckets, gathered layers."""
    rows = layout.micro_batch * shape.seq_len * shape.hidden
    total = 4 * rows * ITEM_BYTES if layout.pp > 1 else 0
    if layout.zero == 0 or layout.dp == 1:
        return total
    if layout.zero < 3:
        return total + 2 * ITEM_BYTES * min(held, BUCKET_ITEMS)
    # Two gathered layers, the current and the next, and the gradient of one layer
    # before its reduction.
    return total + 3 * ITEM_BYTES * shape.layer_parameters / layout.tp
