"""A small convolutional classifier of 8x8 grey images. Depends on no mesh or optimizer.

Legend: B examples, H height, W width, C channels, F features.
"""

import jax
from flax import nnx

from dtft.models.base import CNNConfig


class CNN(nnx.Module):
    """3x3 convolutions, all but the first with stride 2, then two dense layers."""

    def __init__(self, config: CNNConfig, rngs: nnx.Rngs) -> None:
        """Makes the layers of `config` for 8x8 images with one channel."""
        widths = (1, *config.channels)
        self.convolutions = nnx.List(
            [
                nnx.Conv(a, b, (3, 3), strides=2 if index else 1, rngs=rngs)
                for index, (a, b) in enumerate(zip(widths, widths[1:], strict=False))
            ]
        )
        side = 8
        for _ in config.channels[1:]:
            side = -(-side // 2)
        flat = side * side * config.channels[-1]
        self.hidden = nnx.Linear(flat, config.hidden, rngs=rngs)
        self.classes = nnx.Linear(config.hidden, config.num_classes, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Computes logits [B, classes] of images [B, 8, 8, 1]."""
        for convolution in self.convolutions:
            x_BHWC = nnx.relu(convolution(x_BHWC))
        x_BF = x_BHWC.reshape(x_BHWC.shape[0], -1)
        return self.classes(nnx.relu(self.hidden(x_BF)))
