"""Configs of models: the base class and the models of this package.

A config builds the module and computes its loss, so that the training loop is the same
for every model. Do not import JAX at module level: commands that never train read
configs too.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import jax
    from flax import nnx

Batch = dict[str, Any]
"""Map from the name of a field to an array with the examples in dim 0."""


@dataclass(frozen=True, kw_only=True)
class EqualLayers:
    """A sequence of equal layers, which can be cut into pipeline stages."""

    name: str
    """Name of the module's attribute, an `nnx.List`. Each layer maps the output of the
    layer before to an array of the same shape, with the examples in dim 0."""
    count: int
    """Number of layers."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Base of all model configs.

    `short_name` names the class in `config.json`, independently of its module. If a
    subclass sets no `short_name`, `config.json` has its module and class name.
    """

    short_name: ClassVar[str] = ""

    @property
    def layers(self) -> EqualLayers | None:
        """The model's sequence of equal layers; None if the model has none."""
        return None

    def before_layers(self, model: Any, batch: Batch) -> "jax.Array":
        """Computes the input of the first of the equal layers from a batch.

        In a pipeline `model` is the module without its equal layers.

        Raises:
            NotImplementedError: the model has no equal layers.
        """
        raise NotImplementedError(f"{type(self).__name__} has no equal layers.")

    def after_layers(
        self, model: Any, last: "jax.Array", batch: Batch
    ) -> "tuple[jax.Array, dict[str, jax.Array]]":
        """Computes losses and metrics from the output of the last equal layer.

        `last` is this output. The result has the form of that of `loss`. In a pipeline
        `model` is the module without its equal layers.

        Raises:
            NotImplementedError: the model has no equal layers.
        """
        raise NotImplementedError(f"{type(self).__name__} has no equal layers.")

    def build(self, rngs: "nnx.Rngs") -> "nnx.Module":
        """Makes the module; equal `rngs` give equal parameters.

        Raises:
            NotImplementedError: the class does not override this method.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no build(). Use a subclass of ModelConfig, "
            "such as dtft.models.base.CNNConfig, as the experiment's model."
        )

    def loss(
        self, model: Any, batch: Batch
    ) -> "tuple[jax.Array, dict[str, jax.Array]]":
        """Computes losses per example [B] or token [B, T], and metrics of this shape.

        Training minimizes the mean loss over the global batch, and logs the means of
        the loss and of the metrics.

        Raises:
            NotImplementedError: the class does not override this method.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss().")


@dataclass(frozen=True, kw_only=True)
class CNNConfig(ModelConfig):
    """Config of a small convolutional classifier of 8x8 grey images."""

    short_name: ClassVar[str] = "cnn"

    channels: tuple[int, ...] = (16, 32)
    """Output channels of each 3x3 convolution; all but the first halve the image."""
    hidden: int = 64
    """Width of the dense layer before the classes."""
    num_classes: int = 10
    """Number of classes."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.channels) <= 4 or min(self.channels) < 1:
            raise ValueError(
                f"model.channels={self.channels} is not usable. Allowed: one to four "
                "positive numbers: each after the first halves the 8x8 image."
            )
        _positive("model", hidden=self.hidden, num_classes=self.num_classes)

    def build(self, rngs: "nnx.Rngs") -> "nnx.Module":
        """Makes the module; equal `rngs` give equal parameters."""
        from dtft.models.cnn import CNN

        return CNN(self, rngs)

    def loss(
        self, model: Any, batch: Batch
    ) -> "tuple[jax.Array, dict[str, jax.Array]]":
        """Computes cross entropy and accuracy, each with one value per example."""
        from dtft.models.losses import classification

        return classification(model(batch["image"]), batch["label"])


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(ModelConfig):
    """Config of a residual network with bottleneck blocks for colour images.

    He et al., "Deep Residual Learning for Image Recognition" (2016), in version 1.5:
    the stride is in the 3x3 convolution. The default is ResNet-50. Images of any size
    are accepted.
    """

    short_name: ClassVar[str] = "resnet"

    depths: tuple[int, ...] = (3, 4, 6, 3)
    """Number of blocks of each stage; each stage after the first halves the image."""
    width: int = 64
    """Channels after the first convolution; stage s = 0, 1, ... ends with
    width x 4 x 2**s channels."""
    num_classes: int = 1000
    """Number of classes."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations; parameters, statistics and the loss are float32."""

    def __post_init__(self) -> None:
        if not self.depths or min(self.depths) < 1:
            raise ValueError(
                f"model.depths={self.depths} is not usable. Allowed: one or more "
                "positive numbers, the blocks of each stage. Set --model.depths."
            )
        _positive("model", width=self.width, num_classes=self.num_classes)

    def build(self, rngs: "nnx.Rngs") -> "nnx.Module":
        """Makes the module; equal `rngs` give equal parameters."""
        from dtft.models.resnet import ResNet

        return ResNet(self, rngs)

    def loss(
        self, model: Any, batch: Batch
    ) -> "tuple[jax.Array, dict[str, jax.Array]]":
        """Computes cross entropy and accuracy, each with one value per example."""
        from dtft.models.losses import classification

        return classification(model(batch["image"]), batch["label"])


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """Config of a small causal transformer over characters."""

    short_name: ClassVar[str] = "transformer"

    vocabulary: int = 128
    """Number of different tokens; 128 is ASCII."""
    context: int = 64
    """Largest number of tokens in a sequence."""
    num_layers: int = 2
    """Number of blocks."""
    width: int = 64
    """Width of the residual stream."""
    num_heads: int = 4
    """Number of attention heads; a divisor of `width`."""

    def __post_init__(self) -> None:
        _positive("model", **vars(self))
        if self.width % self.num_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} does not divide model.width="
                f"{self.width}. Set --model.num_heads to a divisor of it."
            )

    def build(self, rngs: "nnx.Rngs") -> "nnx.Module":
        """Makes the module; equal `rngs` give equal parameters."""
        from dtft.models.transformer import Transformer

        return Transformer(self, rngs)

    @property
    def layers(self) -> EqualLayers:
        """The transformer's blocks."""
        return EqualLayers(name="blocks", count=self.num_layers)

    def before_layers(self, model: Any, batch: Batch) -> "jax.Array":
        """Embeds the tokens of the batch, all but the last of each row."""
        return model.embed(batch["tokens"][:, :-1])

    def after_layers(
        self, model: Any, last: "jax.Array", batch: Batch
    ) -> "tuple[jax.Array, dict[str, jax.Array]]":
        """Computes cross entropy and accuracy of predicting each next token."""
        from dtft.models.losses import classification

        return classification(model.head(last), batch["tokens"][:, 1:])

    def loss(
        self, model: Any, batch: Batch
    ) -> "tuple[jax.Array, dict[str, jax.Array]]":
        """Computes cross entropy and accuracy of predicting each next token."""
        last_BTD = model.through(self.before_layers(model, batch))
        return self.after_layers(model, last_BTD, batch)


def _positive(section: str, **values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(
                f"{section}.{name}={value} is not positive. "
                f"Set --{section}.{name} to 1 or more."
            )
