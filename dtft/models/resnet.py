"""ResNet v1.5: bottleneck blocks with batch normalization, for colour images.

He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016); v1.5 has the
stride in the 3x3 convolution. The model takes images as bytes and normalizes them on
the device, so the transfer has a quarter of the bytes of float32. The batch is one
global array, so batch statistics include all replicas. Depends on no mesh, optimizer or
data set.

Legend: B examples, H height, W width, C channels, F features, N classes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dtft.models.base import ResNetConfig

IMAGE_MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's red, green and blue in [0, 1]."""
IMAGE_DEVIATION = (0.229, 0.224, 0.225)
"""Standard deviation of ImageNet's red, green and blue in [0, 1]."""
EXPANSION = 4
"""Output channels of a bottleneck block, divided by the channels of its 3x3
convolution."""

# Keeps the variance of activations the same from layer to layer (He et al. 2015).
_HE = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


class ResNet(nnx.Module):
    """A convolution, stages of bottleneck blocks, mean over positions, classifier."""

    def __init__(self, config: ResNetConfig, rngs: nnx.Rngs) -> None:
        """Makes the layers of `config` for images with three channels."""
        self.dtype = jnp.dtype(config.compute_dtype)
        self.stem = NormalizedConv(3, config.width, 7, 2, dtype=self.dtype, rngs=rngs)
        blocks, channels = [], config.width
        for stage, depth in enumerate(config.depths):
            inner = config.width * 2**stage
            for index in range(depth):
                stride = 2 if stage and not index else 1
                blocks.append(
                    Bottleneck(channels, inner, stride, dtype=self.dtype, rngs=rngs)
                )
                channels = inner * EXPANSION
        self.blocks = nnx.List(blocks)
        self.classes = nnx.Linear(
            channels,
            config.num_classes,
            kernel_init=nnx.initializers.normal(0.01),
            dtype=self.dtype,
            rngs=rngs,
        )

    def __call__(self, image_BHWC: jax.Array) -> jax.Array:
        """Computes float32 logits [B, N] of uint8 images [B, H, W, 3]."""
        x_BHWC = nnx.relu(self.stem(normalized(image_BHWC).astype(self.dtype)))
        # nnx annotates `padding` as str, but takes pairs like its convolutions.
        pairs: Any = ((1, 1), (1, 1))
        x_BHWC = nnx.max_pool(x_BHWC, (3, 3), (2, 2), padding=pairs)
        for block in self.blocks:
            x_BHWC = block(x_BHWC)
        # bfloat16 has 8 significant bits, too few for a sum over positions.
        x_BF = jnp.mean(x_BHWC, axis=(1, 2), dtype=jnp.float32)
        return self.classes(x_BF.astype(self.dtype)).astype(jnp.float32)


class Bottleneck(nnx.Module):
    """A residual block: 1x1, 3x3 and 1x1 convolutions, added to the block's input."""

    def __init__(
        self, channels: int, inner: int, stride: int, *, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        """Makes layers that map `channels` to 4 x `inner` channels (`EXPANSION`).

        `inner` is the number of channels of the 3x3 convolution, `stride` its stride.
        """
        layer = partial(NormalizedConv, dtype=dtype, rngs=rngs)
        self.reduce = layer(channels, inner, 1, 1)
        self.spatial = layer(inner, inner, 3, stride)
        # Scale 0 makes the new block's branch 0, so a deep network starts as a shallow
        # one.
        self.expand = layer(inner, inner * EXPANSION, 1, 1, scale=0.0)
        unlike = stride != 1 or channels != inner * EXPANSION
        self.shortcut = (
            layer(channels, inner * EXPANSION, 1, stride) if unlike else None
        )

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Applies ReLU to the sum of the convolutions' output and the shortcut.

        The shortcut is the input, or a 1x1 convolution of the input if the output has
        another shape.
        """
        y_BHWC = nnx.relu(self.reduce(x_BHWC))
        y_BHWC = self.expand(nnx.relu(self.spatial(y_BHWC)))
        if self.shortcut is not None:
            x_BHWC = self.shortcut(x_BHWC)
        return nnx.relu(x_BHWC + y_BHWC)


class NormalizedConv(nnx.Module):
    """A convolution without bias, then batch normalization."""

    def __init__(
        self,
        channels: int,
        features: int,
        size: int,
        stride: int,
        *,
        dtype: Any,
        rngs: nnx.Rngs,
        scale: float = 1.0,
    ) -> None:
        """Makes both layers.

        Args:
            channels: input channels.
            features: output channels.
            size: side of the kernel.
            stride: stride of the convolution.
            dtype: dtype in which the convolution computes.
            rngs: random keys of the initial kernel.
            scale: initial scale of the normalization.
        """
        self.conv = nnx.Conv(
            channels,
            features,
            (size, size),
            strides=stride,
            padding=size // 2,
            use_bias=False,
            kernel_init=_HE,
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(
            features,
            momentum=0.9,
            scale_init=nnx.initializers.constant(scale),
            dtype=jnp.float32,
            rngs=rngs,
        )

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Convolves, then normalizes in float32; the result has the input's dtype."""
        return self.norm(self.conv(x_BHWC)).astype(x_BHWC.dtype)


def normalized(image_BHWC: jax.Array) -> jax.Array:
    """Converts uint8 images to float32, normalized by ImageNet's mean and deviation.

    Divides by 255, subtracts the mean of each channel, and divides by the channel's
    standard deviation. In the example one pixel has the value 128 in all channels.

    >>> print(normalized(jnp.full((1, 1, 1, 3), 128, jnp.uint8)).round(1))
    [[[[0.1 0.2 0.4]]]]
    """
    mean_BHWC = jnp.asarray(IMAGE_MEAN, jnp.float32).reshape(1, 1, 1, 3)
    deviation_BHWC = jnp.asarray(IMAGE_DEVIATION, jnp.float32).reshape(1, 1, 1, 3)
    return (image_BHWC.astype(jnp.float32) / 255 - mean_BHWC) / deviation_BHWC
