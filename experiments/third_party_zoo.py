"""The models of `third_party_models.py`: other people's code, installed apart.

Flax models of `transformers`, a transformer of Equinox's layers, and a mixture of
experts in Haiku. Weights are random. `install` puts the packages into a folder of their
own (`.venv/third-party`), because dtft does not depend on them; jax, flax and optax
stay those of `constraints.txt`. Every model has a `small` size, which is run, and a
`medium` size, which is only compiled.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv" / "third-party"
PACKAGES = (
    "transformers==4.49.0", "huggingface-hub==0.30.2", "tokenizers==0.21.4",
    "safetensors==0.8.0", "regex==2026.11.19", "requests==2.34.2", "tqdm==4.70.1",
    "filelock==4.3.1", "urllib3==2.8.0", "idna==3.20", "certifi==2026.10.19.post1",
    "charset-normalizer==3.5.3", "equinox==0.13.8", "jaxtyping==0.3.11",
    "wadler-lindig==0.1.8", "dm-haiku==0.0.17", "jmp==0.0.4", "tabulate==0.10.0",
)  # fmt: skip
"""Transformers, Equinox and Haiku, with what they need and the environment lacks."""
NAMED = ("transformers", "equinox", "dm-haiku")
INSTALL_S = 600.0
"""Longest time that pip may take, in seconds."""
Size = Literal["small", "medium"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model with its training step, as `dtft.plan` takes it."""

    name: str
    start: Callable[[jax.Array], Any]
    """Function from a random key to the parameters; entry step: to the state."""
    batch: Mapping[str, jax.ShapeDtypeStruct]
    limits: Mapping[str, int]
    """Number of classes or tokens of each integer array of the batch."""
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: optax.GradientTransformation | None = None
    step: Callable[[Any, Any], Any] | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of `dtft.plan`, as shapes."""
        start = jax.eval_shape(self.start, jax.random.key(0))
        if self.step is not None:
            return {"step": self.step, "state": start, "batch": self.batch}
        given = {"loss": self.loss, "optimizer": self.optimizer, "params": start}
        return {**given, "batch": self.batch}

    def params(self, state: Any) -> Any:
        """The part of a step's state that is compared: without optimizer state."""
        return {name: part for name, part in state.items() if name != "opt_state"}


def install() -> None:
    """Installs the packages into `FOLDER` if it is missing, and makes them importable.

    Raises:
        RuntimeError: pip failed; the message has the end of its output.
        subprocess.TimeoutExpired: pip took more than `INSTALL_S`.
    """
    if not FOLDER.is_dir():
        part = FOLDER.with_suffix(".part")  # one that was interrupted does not count
        shutil.rmtree(part, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        command += ["-c", str(ROOT / "constraints.txt"), "--target", str(part)]
        ended = subprocess.run(
            [*command, *PACKAGES], capture_output=True, text=True, timeout=INSTALL_S
        )
        if ended.returncode:
            raise RuntimeError(
                f"pip cannot install {', '.join(NAMED)} into {FOLDER}: "
                f"{ended.stderr.strip()[-500:]}"
            )
        part.rename(FOLDER)
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # last: nothing of the environment is replaced
    os.environ["HF_HUB_OFFLINE"] = "1"


def versions() -> str:
    """Names and versions of the packages that the models are from."""
    return ", ".join(f"{name} {version(name)}" for name in NAMED)


def gpt2(size: Size, dtype: Any) -> Model:
    """GPT-2 with tied embeddings; the gradient is clipped by its global norm."""
    transformers: Any = import_module("transformers")

    layers, width, heads, length, rows, words = {
        "small": (2, 64, 8, 32, 16, 256),
        "medium": (4, 768, 12, 1024, 64, 50257),
    }[size]
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=length, vocab_size=words
    )
    model: Any = transformers.FlaxGPT2LMHeadModel(config, dtype=dtype, _do_init=False)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return _language_model("gpt2", model, optimizer, rows, length, words)


def llama(size: Size, dtype: Any) -> Model:
    """Llama with grouped queries; untied head."""
    transformers: Any = import_module("transformers")

    layers, width, heads, length, rows, words = {
        "small": (2, 64, 8, 32, 16, 256),
        "medium": (3, 2048, 32, 2048, 16, 32000),
    }[size]
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=length,
        vocab_size=words,
    )
    model: Any = transformers.FlaxLlamaForCausalLM(config, dtype=dtype, _do_init=False)
    return _language_model("llama", model, optax.adamw(1e-3), rows, length, words)


def _language_model(
    name: str,
    model: Any,
    optimizer: optax.GradientTransformation,
    rows: int,
    length: int,
    words: int,
) -> Model:
    def loss(params: Any, batch: Any) -> jax.Array:
        logits_BTV = model(batch["tokens"], params=params).logits
        return _cross_entropy(logits_BTV[:, :-1], batch["tokens"][:, 1:])

    return Model(
        name=name,
        start=lambda key: model.init_weights(key, (1, length)),
        batch={"tokens": _ints(rows, length)},
        limits={"tokens": words},
        loss=loss,
        optimizer=optimizer,
    )


def bert(size: Size, dtype: Any) -> Model:
    """BERT with masked tokens and padding; the loss weighs tokens."""
    transformers: Any = import_module("transformers")

    layers, width, heads, length, rows, words = {
        "small": (2, 64, 8, 32, 16, 256),
        "medium": (4, 768, 12, 512, 128, 30522),
    }[size]
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=length,
        vocab_size=words,
    )
    model: Any = transformers.FlaxBertForMaskedLM(config, dtype=dtype, _do_init=False)

    def loss(params: Any, batch: Any) -> jax.Array:
        logits_BTV = model(
            batch["tokens"], attention_mask=batch["mask"], params=params
        ).logits
        return _cross_entropy(logits_BTV, batch["labels"])

    names = ("tokens", "mask", "labels")
    return Model(
        name="bert",
        start=lambda key: model.init_weights(key, (1, length)),
        batch={name: _ints(rows, length) for name in names},
        limits={"tokens": words, "mask": 2, "labels": words},
        loss=loss,
        optimizer=optax.adamw(1e-3),
    )


def vit(size: Size, dtype: Any) -> Model:
    """ViT: a convolution makes patches, and one token stands for the image."""
    transformers: Any = import_module("transformers")

    layers, width, heads, pixels, patch, rows, classes = {
        "small": (2, 64, 8, 32, 8, 16, 16),
        "medium": (4, 768, 12, 224, 16, 512, 1000),
    }[size]
    config = transformers.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=pixels,
        patch_size=patch,
        num_labels=classes,
    )
    model: Any = transformers.FlaxViTForImageClassification(
        config, dtype=dtype, _do_init=False
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        logits_BC = model(batch["pixels"], params=params).logits
        return _cross_entropy(logits_BC, batch["labels"])

    return Model(
        name="vit",
        start=lambda key: model.init_weights(key, (1, pixels, pixels, 3)),
        batch={"pixels": _floats(rows, 3, pixels, pixels), "labels": _ints(rows)},
        limits={"labels": classes},
        loss=loss,
        optimizer=optax.adamw(1e-3),
    )


def whisper(size: Size, dtype: Any) -> Model:
    """Whisper: two convolutions over time, an encoder, a decoder across from it."""
    transformers: Any = import_module("transformers")

    layers, width, heads, frames, length, rows, words = {
        "small": (2, 64, 8, 32, 16, 16, 256),
        "medium": (2, 512, 8, 1500, 448, 64, 51865),
    }[size]
    config = transformers.WhisperConfig(
        encoder_layers=layers,
        decoder_layers=layers,
        d_model=width,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=frames,
        max_target_positions=length,
        vocab_size=words,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model: Any = transformers.FlaxWhisperForConditionalGeneration(
        config, dtype=dtype, _do_init=False
    )
    bands = config.num_mel_bins

    def loss(params: Any, batch: Any) -> jax.Array:
        logits_BTV = model(
            batch["sound"], decoder_input_ids=batch["tokens"], params=params
        ).logits
        return _cross_entropy(logits_BTV[:, :-1], batch["tokens"][:, 1:])

    return Model(
        name="whisper",
        start=lambda key: model.init_weights(key, (1, bands, 2 * frames)),
        batch={
            "sound": _floats(rows, bands, 2 * frames),
            "tokens": _ints(rows, length),
        },
        limits={"tokens": words},
        loss=loss,
        optimizer=optax.adamw(1e-3),
    )


def resnet(size: Size, dtype: Any) -> Model:
    """ResNet as an opaque step: batch statistics, momentum."""
    transformers: Any = import_module("transformers")

    embedding, widths, depths, pixels, rows, classes = {
        "small": (16, (32, 64), (1, 2), 32, 32, 16),
        "medium": (64, (256, 512, 1024, 2048), (1, 1, 2, 1), 224, 256, 1000),
    }[size]
    config = transformers.ResNetConfig(
        embedding_size=embedding,
        hidden_sizes=list(widths),
        depths=list(depths),
        num_labels=classes,
    )
    model: Any = transformers.FlaxResNetForImageClassification(
        config, dtype=dtype, _do_init=False, input_shape=(1, pixels, pixels, 3)
    )
    optimizer = optax.sgd(1e-2, momentum=0.9)

    def start(key: jax.Array) -> Any:
        weights = model.init_weights(key, (1, pixels, pixels, 3))
        return {**weights, "opt_state": optimizer.init(weights["params"])}

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            weights = {"params": params, "batch_stats": state["batch_stats"]}
            output, after = model(batch["pixels"], params=weights, train=True)
            value = _cross_entropy(output.logits, batch["labels"])
            return value, after["batch_stats"]

        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(
            state["params"]
        )
        updates, opt_state = optimizer.update(gradients, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        after = {"params": params, "batch_stats": stats, "opt_state": opt_state}
        return after, value

    return Model(
        name="resnet",
        start=start,
        batch={"pixels": _floats(rows, 3, pixels, pixels), "labels": _ints(rows)},
        limits={"labels": classes},
        step=step,
    )


def equinox(size: Size, dtype: Any) -> Model:
    """A transformer of Equinox's own layers, each mapped over tokens and rows."""
    eqx: Any = import_module("equinox")

    layers, width, heads, length, rows, words = {
        "small": (2, 64, 8, 32, 16, 256),
        "medium": (3, 1024, 16, 1024, 64, 32000),
    }[size]
    transformer = _equinox_transformer(layers, width, heads, length, words)
    shapes = eqx.filter_eval_shape(transformer, jax.random.key(0))
    _, static = eqx.partition(
        shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        logits_BTV = jax.vmap(eqx.combine(params, static))(batch["tokens"])
        return _cross_entropy(logits_BTV[:, :-1], batch["tokens"][:, 1:])

    return Model(
        name="equinox",
        start=lambda key: eqx.filter(transformer(key), eqx.is_array),
        batch={"tokens": _ints(rows, length)},
        limits={"tokens": words},
        loss=loss,
        optimizer=optax.adamw(1e-3),
    )


@functools.cache
def _equinox_transformer(
    layers: int, width: int, heads: int, length: int, words: int
) -> Any:
    """The class of the model, once: the same parameters are trees of the same class."""
    eqx: Any = import_module("equinox")

    class Block(eqx.Module):
        norms: Any
        attention: Any
        perceptron: Any

        def __init__(self, key: jax.Array) -> None:
            first, second = jax.random.split(key)
            self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
            self.attention = eqx.nn.MultiheadAttention(heads, width, key=first)
            self.perceptron = eqx.nn.MLP(width, width, 4 * width, 1, key=second)

        def __call__(self, x_TD: jax.Array, mask_TT: jax.Array) -> jax.Array:
            y_TD = jax.vmap(self.norms[0])(x_TD)
            x_TD = x_TD + self.attention(y_TD, y_TD, y_TD, mask=mask_TT)
            return x_TD + jax.vmap(self.perceptron)(jax.vmap(self.norms[1])(x_TD))

    class Transformer(eqx.Module):
        tokens: Any
        positions: jax.Array
        blocks: Any
        head: Any

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key, layers + 3)
            self.tokens = eqx.nn.Embedding(words, width, key=keys[0])
            self.positions = 0.02 * jax.random.normal(keys[1], (length, width))
            self.blocks = [Block(key) for key in keys[3:]]
            self.head = eqx.nn.Linear(width, words, key=keys[2])

        def __call__(self, tokens_T: jax.Array) -> jax.Array:
            x_TD = jax.vmap(self.tokens)(tokens_T) + self.positions
            mask_TT = jnp.tril(jnp.ones((length, length), bool))
            for block in self.blocks:
                x_TD = block(x_TD, mask_TT)
            return jax.vmap(self.head)(x_TD)

    return Transformer


def experts(size: Size, dtype: Any) -> Model:
    """A mixture of experts in Haiku: two of eight for each token, with a capacity."""
    hk: Any = import_module("haiku")

    layers, width, length, rows, words, count = {
        "small": (2, 64, 32, 16, 256, 8),
        "medium": (2, 1024, 1024, 64, 32000, 8),
    }[size]

    def mixture(x_BTD: jax.Array, name: str) -> jax.Array:
        scores_BTE = jax.nn.softmax(hk.Linear(count, name=f"{name}_router")(x_BTD))
        best_BTK, chosen_BTK = jax.lax.top_k(scores_BTE, 2)
        capacity = 2 * length // count
        hot_BTKE = jax.nn.one_hot(chosen_BTK, count, dtype=x_BTD.dtype)
        used_BTE = hot_BTKE.sum(2)
        place_BTE = (jnp.cumsum(used_BTE, 1) - 1) * used_BTE
        slots_BTEC = used_BTE[..., None] * jax.nn.one_hot(
            place_BTE, capacity, dtype=x_BTD.dtype
        )
        gates_BTE = jnp.einsum("btk,btke->bte", best_BTK, hot_BTKE)
        initial = hk.initializers.VarianceScaling()
        up_EDF = hk.get_parameter(
            f"{name}_up", (count, width, 4 * width), init=initial
        ).astype(dtype)
        down_EFD = hk.get_parameter(
            f"{name}_down", (count, 4 * width, width), init=initial
        ).astype(dtype)
        sent_EBCD = jnp.einsum("btec,btd->ebcd", slots_BTEC, x_BTD)
        inner_EBCF = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", sent_EBCD, up_EDF))
        back_EBCD = jnp.einsum("ebcf,efd->ebcd", inner_EBCF, down_EFD)
        weights_BTEC = slots_BTEC * gates_BTE[..., None]
        return jnp.einsum("btec,ebcd->btd", weights_BTEC, back_EBCD)

    def forward(tokens_BT: jax.Array) -> jax.Array:
        x_BTD = hk.Embed(words, width)(tokens_BT).astype(dtype)
        mask_11TT = jnp.tril(jnp.ones((1, 1, length, length), bool))
        initial = hk.initializers.VarianceScaling()
        for layer in range(layers):
            y_BTD = hk.LayerNorm(-1, True, True, name=f"before_{layer}")(x_BTD)
            attend = hk.MultiHeadAttention(
                8, width // 8, w_init=initial, model_size=width, name=f"heads_{layer}"
            )
            x_BTD = x_BTD + attend(y_BTD, y_BTD, y_BTD, mask=mask_11TT)
            y_BTD = hk.LayerNorm(-1, True, True, name=f"between_{layer}")(x_BTD)
            x_BTD = x_BTD + mixture(y_BTD, f"experts_{layer}")
        return hk.Linear(words, name="head")(x_BTD)

    model = hk.without_apply_rng(hk.transform(forward))

    def start(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, length), jnp.int32))

    def loss(params: Any, batch: Any) -> jax.Array:
        logits_BTV = model.apply(params, batch["tokens"])
        return _cross_entropy(logits_BTV[:, :-1], batch["tokens"][:, 1:])

    tokens = _ints(rows, length)
    return Model(
        name="experts",
        start=start,
        batch={"tokens": tokens},
        limits={"tokens": words},
        loss=loss,
        optimizer=optax.adamw(1e-3),
    )


MODELS: Mapping[str, Callable[[Size, Any], Model]] = {
    "gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit, "whisper": whisper,
    "resnet": resnet, "equinox": equinox, "experts": experts,
}  # fmt: skip
"""Functions of a size and the dtype that the model computes in."""


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    each = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), labels
    )
    return each.mean()


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
