"""Bytes that training a transformer needs on its fullest device, by term.

Mixed precision with Adam: 2 bytes of parameter, `gradient_bytes` of gradient, 12 of
fp32 master copy and two moments, each divided as the ZeRO stage says. Counting only:
must not know devices or seconds. Reference section 7; activations arXiv 2205.05198.
"""

from collections.abc import Mapping

from dtft.planner.transformer import ITEM_BYTES, Layout, Shape

OPTIMIZER_BYTES = 12
"""Per parameter: fp32 master copy, two fp32 moments of Adam."""
BUCKET_ITEMS = 500_000_000
"""Largest buffer in which gradients are reduced or parameters gathered under ZeRO
(DeepSpeed's default `reduce_bucket_size` and `allgather_bucket_size`)."""
RESERVE_BYTES = 1_000_000_000
"""CUDA context, workspaces; as much again for communicators of each of tp, pp, dp."""
FRAGMENTATION = 0.05
"""Of what the program allocates: lost between blocks (reference section 7: 3-8 %)."""


def memory(shape: Shape, layout: Layout) -> Mapping[str, int]:
    """Bytes of the fullest stage's devices, by term.

    >>> shape = Shape(hidden=4096, layers=36, heads=32, seq_len=2048, vocab=51200)
    >>> layout = Layout(tp=4, pp=1, dp=32, micro_batch=16, global_batch=512)
    >>> terms = memory(shape, layout)
    >>> terms["parameters"] / 1e9, terms["optimizer"] / 1e9
    (3.73389312, 22.40335872)
    """
    stages = [stage_memory(shape, layout, stage) for stage in range(layout.pp)]
    return max(stages, key=lambda terms: sum(terms.values()))


def stage_memory(shape: Shape, layout: Layout, stage: int) -> Mapping[str, int]:
    """Bytes of each device of one pipeline stage, by term."""
    held = stage_parameters(shape, layout, stage)
    parts = [layout.dp if layout.zero >= level else 1 for level in (3, 2, 1)]
    activations = _activations(shape, layout, stage)
    # The update takes fp32 gradients when activations are gone.
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


def stage_parameters(shape: Shape, layout: Layout, stage: int) -> float:
    """Parameters of each device of a stage before ZeRO divides them.

    First and last stage hold the embedding; both do where they are not the same.
    """
    layers = layout.layers_of(shape)[stage] * shape.layer_parameters
    held = layers + (2 * shape.hidden if stage == layout.pp - 1 else 0)
    if stage in (0, layout.pp - 1):
        held += shape.embedding_parameters
    if stage == 0:
        held += shape.seq_len * shape.hidden
    return held / layout.tp


def kept_layers(shape: Shape, layout: Layout, stage: int) -> float:
    """Layers, times microbatches, whose activations a stage keeps at its peak.

    1F1B keeps min(m, pp - stage) microbatches; interleaved the first stage keeps
    1 + (pp - 1)/(pp v) times as many as pp (arXiv 2205.05198, section 4.2.3).
    """
    pp, chunks, layers = layout.pp, layout.virtual_stages, layout.layers_of(shape)
    if chunks == 1:
        return layers[stage] * min(layout.num_microbatches, pp - stage)
    # Chunks under way: v for each of pp microbatches, and pp - 1 of the warm-up.
    warm_up = (pp - stage - 1) * 2 + (chunks - 1) * pp + 1
    return layers[stage] / chunks * min(layout.num_microbatches * chunks, warm_up)


def _activations(shape: Shape, layout: Layout, stage: int) -> float:
    """arXiv 2205.05198: s b h (10 + 24/t + 5 a s/(h t)) bytes per layer; 34/t with
    sequence parallelism; full recomputation keeps inputs and one live layer."""
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


def _buffers(shape: Shape, layout: Layout, held: float) -> float:
    """What is received and sent: stages, buckets of ZeRO, gathered layers."""
    rows = layout.micro_batch * shape.seq_len * shape.hidden
    total = 4 * rows * ITEM_BYTES if layout.pp > 1 else 0
    if layout.zero == 0 or layout.dp == 1:
        return total
    if layout.zero < 3:
        return total + 2 * ITEM_BYTES * min(held, BUCKET_ITEMS)
    # This layer and the next one gathered, the gradient of one before it is reduced.
    return total + 3 * ITEM_BYTES * shape.layer_parameters / layout.tp
