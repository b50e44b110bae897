"""What a model is to the training loop, and the configs of the models shipped here.

A config says how a module is built and what its loss is, so that the loop knows no
model. Must stay free of jax imports at module level: configs are read by commands
that never train.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import jax
    from flax import nnx

Batch = dict[str, Any]
"""Field name to array; every array has the examples in dim 0."""


@dataclass(frozen=True, kw_only=True)
class EqualLayers:
    """The part of a model that can be cut into stages: equal layers in a row."""

    name: str
    """The module's attribute, an `nnx.List`; each layer is called with what the one
    before it gave, an array of the same shape with the examples in dim 0."""
    count: int
    """How many there are."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Base of all model configs.

    `short_name` is the name of a class in `config.json`, wherever its module is; a
    subclass without one of its own is named by its module and name.
    """

    short_name: ClassVar[str] = ""

    @property
    def layers(self) -> EqualLayers | None:
        """Its equal layers; None for a model that is not such a row."""
        return None

    def before_layers(self, model: Any, batch: Batch) -> "jax.Array":
        """What the first layer is called with; `model` has no layers here."""
        raise NotImplementedError(f"{type(self).__name__} has no equal layers.")

    def after_layers(
        self, model: Any, last: "jax.Array", batch: Batch
    ) -> "tuple[jax.Array, dict[str, jax.Array]]":
        """As `loss`, from what the last layer gave; `model` has no layers here."""
        raise NotImplementedError(f"{type(self).__name__} has no equal layers.")

    def build(self, rngs: "nnx.Rngs") -> "nnx.Module":
        """Makes the module; equal `rngs` give equal parameters.

        Raises:
            NotImplementedError: on the base class, which is no model.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no build(). Use a subclass of ModelConfig, "
            "such as dtft.models.base.CNNConfig, as the experiment's model."
        )

    def loss(
        self, model: Any, batch: Batch
    ) -> "tuple[jax.Array, dict[str, jax.Array]]":
        """Losses per example ([B]) or per token ([B, T]), and metrics of that shape.

        Their means over the global batch are what is optimized and logged.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss().")


@dataclass(frozen=True, kw_only=True)
class CNNConfig(ModelConfig):
    """A small convolutional classifier of 8x8 grey images."""

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
        """Makes the module."""
        from dtft.models.cnn import CNN

        return CNN(self, rngs)

    def loss(
        self, model: Any, batch: Batch
    ) -> "tuple[jax.Array, dict[str, jax.Array]]":
        """Cross entropy and accuracy per example."""
        from dtft.models.losses import classification

        return classification(model(batch["image"]), batch["label"])


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(ModelConfig):
    """A residual network with bottleneck blocks (version 1.5) for colour images.

    He et al., "Deep Residual Learning for Image Recognition" (2016), with the stride
    in the 3x3 convolution. The default is ResNet-50. Any image size will do.
    """

    short_name: ClassVar[str] = "resnet"

    depths: tuple[int, ...] = (3, 4, 6, 3)
    """Blocks of each stage; each stage after the first halves the image."""
    width: int = 64
    """Channels after the first convolution; stage s ends with width x 4 x 2**s."""
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
        """Makes the module."""
        from dtft.models.resnet import ResNet

        return ResNet(self, rngs)

    def loss(
        self, model: Any, batch: Batch
    ) -> "tuple[jax.Array, dict[str, jax.Array]]":
        """Cross entropy and accuracy per example."""
        from dtft.models.losses import classification

        return classification(model(batch["image"]), batch["label"])


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """A small causal transformer over characters."""

    short_name: ClassVar[str] = "transformer"

    vocabulary: int = 128
    """Number of different tokens; 128 is ASCII."""
    context: int = 64
    """Most tokens seen at once."""
    num_layers: int = 2
    """Number of blocks."""
    width: int = 64
    """Width of the residual stream."""
    num_heads: int = 4
    """Attention heads."""

    def __post_init__(self) -> None:
        _positive("model", **vars(self))
        if self.width % self.num_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} does not divide model.width="
                f"{self.width}. Set --model.num_heads to a divisor of it."
            )

    def build(self, rngs: "nnx.Rngs") -> "nnx.Module":
        """Makes the module."""
        from dtft.models.transformer import Transformer

        return Transformer(self, rngs)

    @property
    def layers(self) -> EqualLayers:
        """Its blocks."""
        return EqualLayers(name="blocks", count=self.num_layers)

    def before_layers(self, model: Any, batch: Batch) -> "jax.Array":
        """The embedded tokens."""
        return model.embed(batch["tokens"][:, :-1])

    def after_layers(
        self, model: Any, last: "jax.Array", batch: Batch
    ) -> "tuple[jax.Array, dict[str, jax.Array]]":
        """Cross entropy and accuracy per token, predicting each token's successor."""
        from dtft.models.losses import classification

        return classification(model.head(last), batch["tokens"][:, 1:])

    def loss(
        self, model: Any, batch: Batch
    ) -> "tuple[jax.Array, dict[str, jax.Array]]":
        """As `after_layers`, of the whole model."""
        last_BTD = model.through(self.before_layers(model, batch))
        return self.after_layers(model, last_BTD, batch)


def _positive(section: str, **values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(
                f"{section}.{name}={value} is not positive. "
                f"Set --{section}.{name} to 1 or more."
            )
