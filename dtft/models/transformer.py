"""A small causal transformer. Depends on no mesh, optimizer or data set.

Legend: B examples, T positions, D width, N heads, H width of a head.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from dtft.models.base import TransformerConfig


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        """Makes a projection to queries, keys and values, and an output projection."""
        self.num_heads = config.num_heads
        self.project = nnx.Linear(
            config.width, 3 * config.width, use_bias=False, rngs=rngs
        )
        self.out = nnx.Linear(config.width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Lets each position attend to itself and to earlier positions."""
        batch, length, width = x_BTD.shape
        qkv = self.project(x_BTD).reshape(batch, length, 3, self.num_heads, -1)
        q_BTNH, k_BTNH, v_BTNH = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed_BTNH = jax.nn.dot_product_attention(
            q_BTNH, k_BTNH, v_BTNH, is_causal=True
        )
        return self.out(mixed_BTNH.reshape(batch, length, width))


class Block(nnx.Module):
    """Attention and a two-layer perceptron, both residual with normalized inputs."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        """Makes the layers; the perceptron's inner width is 4 x `config.width`."""
        self.norm_attention = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.norm_mlp = nnx.RMSNorm(config.width, rngs=rngs)
        self.up = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.down = nnx.Linear(4 * config.width, config.width, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Adds the attention's output to `x_BTD`, then adds the perceptron's output."""
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD))
        return x_BTD + self.down(nnx.gelu(self.up(self.norm_mlp(x_BTD))))


class Transformer(nnx.Module):
    """Token and position embeddings, blocks, a norm and a projection to logits."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        """Makes the layers; sequences have up to `config.context` tokens."""
        self.tokens = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.logits = nnx.Linear(
            config.width, config.vocabulary, use_bias=False, rngs=rngs
        )

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Computes logits [B, T, vocabulary] of the next token at every position."""
        return self.head(self.through(self.embed(tokens_BT)))

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Embeds tokens and positions: [B, T] -> [B, T, D], the first block's input."""
        places = jnp.arange(tokens_BT.shape[1])[None]
        return self.tokens(tokens_BT) + self.positions(places)

    def through(self, x_BTD: jax.Array) -> jax.Array:
        """Applies all blocks one after the other."""
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD

    def head(self, x_BTD: jax.Array) -> jax.Array:
        """Computes logits [B, T, vocabulary] from the last block's output."""
        return self.logits(self.norm(x_BTD))
