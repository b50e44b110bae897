"""The shape of a GPT-like transformer, and its parallel layout on devices."""

from dataclasses import dataclass, replace
from typing import Literal

from dtft.planner.ir import item_bits
from dtft.planner.software import EAGER, MEGATRON, XLA, Software, SoftwareName

Recompute = Literal["full", "selective", "none"]
"""Recomputation in the backward pass: `full` of whole layers, `selective` of the
attention core, or none."""

RECOMPUTE: tuple[Recompute, ...] = ("full", "selective", "none")

Dtype = Literal["float16", "bfloat16", "float8_e4m3fn", "float4_e2m1fn", "int8"]
"""Dtype of the matmuls of a layer's weights. If it is narrower than 16 bits, all else
(attention, logits, activations, memory) is bfloat16."""
ITEM_BYTES = 2
"""Bytes of one activation, weight or gradient in fp16 or bf16."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a decoder-only transformer."""

    hidden: int
    layers: int
    heads: int
    seq_len: int
    vocab: int
    ffn: int = 0
    """Width of feed-forward parts; 0 is 4 x `hidden`."""
    gated: bool = False
    """Whether feed-forward parts have a gate (SwiGLU): three matrices, not two."""
    kv_heads: int = 0
    """The number of heads of keys and values, each shared by a group of query heads; 0
    for as many as `heads`."""
    experts: int = 1
    """The number of feed-forward parts of a layer, of which each token uses `top_k`."""
    top_k: int = 1

    @property
    def ffn_width(self) -> int:
        """Inner width of one feed-forward part; with experts, of one expert."""
        return self.ffn or 4 * self.hidden

    @property
    def kv_width(self) -> int:
        """Width of the keys of all heads; values are as wide."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def attention_parameters(self) -> int:
        """The number of parameters in the attention matrices of one layer.

        Biases are left out.
        """
        return 2 * self.hidden * (self.hidden + self.kv_width)

    @property
    def expert_parameters(self) -> int:
        """The number of parameters in the matrices of one feed-forward part of a layer.

        With experts, each expert is such a part. Biases are left out.
        """
        return (3 if self.gated else 2) * self.hidden * self.ffn_width

    @property
    def router_parameters(self) -> int:
        """The number of parameters with which a layer chooses the experts of a token.

        0 for one expert.
        """
        return self.hidden * self.experts if self.experts > 1 else 0

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of one layer.

        The sum of attention, feed-forward parts, the router of experts, biases and
        norms. Experts have no biases.
        """
        biases = 2 * self.hidden + 2 * self.kv_width
        if self.experts == 1:
            biases += self.expert_parameters // self.hidden - self.ffn_width
            biases += self.hidden
        parts = self.experts * self.expert_parameters + self.router_parameters
        return self.attention_parameters + parts + biases + 4 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """The number of parameters of the word embedding, which the logits share."""
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

        The formula is that of the published tables (`experiments/data/README.md`). With
        full recomputation it is 96 B s L h^2 (1 + s/6h + V/16Lh), where B is
        `sequences`, s `seq_len`, L `layers`, h `hidden` and V `vocab`. Without
        recomputation 72 replaces 96 and V/12Lh replaces V/16Lh. Selective recomputation
        has 4 B s^2 L h flops more than no recomputation. The recomputation inside flash
        attention is not counted.

        The formula assumes 12 h^2 parameters in the matrices of a layer. With another
        feed-forward width, fewer heads of keys and values, or experts, the parameters
        of the matrices that a token uses replace 12 h^2.
        """
        tokens = sequences * self.seq_len
        attention = 4 * self.seq_len * self.hidden
        used = self.top_k * self.expert_parameters + self.router_parameters
        layer = 2 * (self.attention_parameters + used) + attention
        again = {"full": layer, "selective": attention, "none": 0}[recompute]
        logits = 6 * self.hidden * self.vocab
        return float(tokens * (self.layers * (3 * layer + again) + logits))


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Parallel layout of a transformer on devices, with its memory options.

    `tp`, `cp`, `ep`, `dp` and `pp` are the degrees of tensor, context, expert, data and
    pipeline parallelism. `tp` is innermost on the fabric, then `cp`, `ep`, `dp`, `pp`,
    as in Megatron.
    """

    tp: int
    pp: int
    dp: int
    micro_batch: int
    """Sequences per microbatch of one replica."""
    global_batch: int
    """Sequences per step."""
    cp: int = 1
    """Context parallelism: devices that divide the positions of each sequence."""
    ep: int = 1
    """Expert parallelism: of `dp` devices, how many divide the experts."""
    virtual_stages: int = 1
    """The number of chunks of layers on each pipeline stage (interleaving); 1 is plain
    1F1B."""
    recompute: Recompute = "full"
    zero: int = 0
    """ZeRO stage, the state divided over `dp`: 1 optimizer state, 2 also gradients, 3
    also parameters."""
    sequence_parallel: bool = False
    """Whether activations between matmuls are divided over `tp` too."""
    flash_attention: bool = False
    """Whether attention is one kernel, whose scores stay on the chip."""
    dtype: Dtype = "bfloat16"
    gradient_bytes: int = ITEM_BYTES
    """Bytes kept over microbatches for the gradient of one parameter: 2 (fp16), 4 (fp32
    sums), 6 (both)."""
    stage_layers: tuple[int, ...] = ()
    """The number of layers of each pipeline stage, first to last; empty if all stages
    have equally many."""
    software: SoftwareName = "megatron"
    """The software that runs the step."""

    @property
    def rules(self) -> Software:
        """How the layout's software runs the step: its kernels, overlap, gradient sums.

        These are the rules of `software`, with two fields set for this layout.
        `sum_bytes`, the bytes of an element of gradient sums, is `gradient_bytes`, but
        at most 4; it stays 0 for software without a kernel for the sums.
        `splits_positions` is true with sequence parallelism and `tp` above 1.
        """
        rules = {"xla": XLA, "megatron": MEGATRON, "eager": EAGER}[self.software]
        parts = self.sequence_parallel and self.tp > 1
        sums = min(self.gradient_bytes, 4) if rules.sum_bytes else 0
        return replace(rules, sum_bytes=sums, splits_positions=parts)

    @property
    def rest_dtype(self) -> Dtype:
        """Dtype of matmuls without a layer's weights, such as attention and logits.

        bfloat16 if `dtype` is narrower than 16 bits, else `dtype`.
        """
        return self.dtype if item_bits(self.dtype) == 16 else "bfloat16"

    @property
    def gpus(self) -> int:
        """The number of devices: `tp`, `pp`, `dp` and `cp` multiplied.

        `ep` adds none: it divides the devices of `dp`.
        """
        return self.tp * self.pp * self.dp * self.cp

    @property
    def replicas(self) -> int:
        """The number of devices along `dp` with equal experts: `dp` divided by `ep`.

        ZeRO divides state over this number of devices.
        """
        return self.dp // self.ep

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of one replica in a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    def layers_of(self, shape: Shape) -> tuple[int, ...]:
        """Returns the number of layers of each pipeline stage, first to last."""
        return self.stage_layers or (shape.layers // self.pp,) * self.pp
