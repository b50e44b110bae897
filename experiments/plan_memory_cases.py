"""Random models, sizes, meshes and knobs whose memory is predicted and compiled.

Sizes are drawn until a crude count says that a device needs between a tenth and four
fifths of an H100: below, nothing is decided by memory; above, XLA computes parts again
on its own to get below 80 % of the device, and the bytes are no longer those of the
program that was asked for. The crude count is not the planner's, so that what is drawn
does not change with it. Must not know what is compared.
"""

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = {
    "gpt_scan": 5, "llama": 5, "gpt": 4, "mlp": 3, "lora": 2, "vit": 1, "moe": 1,
    "rnn": 1, "user_step": 1,
}  # fmt: skip
"""Models of the tests' zoo, and how often each is drawn. Convolutional ones are not
among them: XLA cannot compile them for a GPU that is not there."""
LEAST, MOST = 8e9, 68e9
"""Bytes, by the crude count."""
Pick = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration."""

    number: int
    family: str
    sizes: Mapping[str, Any]
    pins: Mapping[str, Any]
    """Sizes of axes above 1, `zero`, `microbatches`, `remat`."""
    capacity_ratio: float
    """Memory of the device that it is meant for, as a part of what is assigned."""

    @property
    def held_out(self) -> bool:
        """Whether it was left aside while the model was mended: every second is."""
        return self.number % 2 == 1

    @property
    def words(self) -> str:
        """The whole of it on one line."""
        items = {**self.sizes, **self.pins}.items()
        return f"{self.family} " + " ".join(f"{name}={value}" for name, value in items)

    @property
    def num_devices(self) -> int:
        """Of the mesh."""
        product = 1
        for axis in ("replica", "fsdp", "tensor"):
            product *= self.pins.get(axis, 1)
        return product


def cases(count: int, seed: int) -> list[Case]:
    """The first `count` configurations of a seed."""
    draw = random.Random(seed)
    return [_case(number, draw) for number in range(count)]


def _case(number: int, draw: random.Random) -> Case:
    family = draw.choices(list(FAMILIES), list(FAMILIES.values()))[0]
    while True:
        pins = _pins(family, draw)
        sizes = _SIZES[family](draw.choice, _parts(pins))
        if LEAST <= _crude(family, sizes, pins) <= MOST:
            return Case(
                number=number,
                family=family,
                sizes=sizes,
                pins=pins,
                capacity_ratio=draw.uniform(0.5, 1.5),
            )


def _pins(family: str, draw: random.Random) -> dict[str, Any]:
    tensor = draw.choice((1, 1, 2, 4, 8))
    data = draw.choice((8, 16, 32, 64)) // tensor
    fsdp = draw.choice([n for n in (1, 2, 4, 8, 16, 32, 64) if data % n == 0])
    own_step = family in ("lora", "user_step")  # what the zoo has a step of its own for
    levels = (1, 3) if own_step else (1, 2, 3)
    blocks = family not in ("mlp", "rnn", "user_step", "lora")
    axes = {"replica": data // fsdp, "fsdp": fsdp, "tensor": tensor}
    pins: dict[str, Any] = {axis: size for axis, size in axes.items() if size > 1}
    pins["zero"] = draw.choice(levels) if fsdp > 1 else 0
    pins["microbatches"] = 1 if own_step else draw.choice((1, 1, 2, 4))
    pins["remat"] = draw.choice(("none", "dots", "full")) if blocks else "none"
    return pins


def _parts(pins: Mapping[str, Any]) -> int:
    """What the batch must be a multiple of."""
    data = pins.get("replica", 1) * pins.get("fsdp", 1)
    return max(2, data * pins["microbatches"])


def _mlp(pick: Pick, parts: int) -> dict[str, Any]:
    widths = tuple(pick((1024, 2048, 4096, 8192, 16384)) for _ in range(4))
    return {"batch": parts * pick((4096, 16384, 65536)), "widths": widths}


def _transformer(pick: Pick, parts: int, layers: tuple[int, ...]) -> dict[str, Any]:
    heads = pick((8, 16, 32))
    return {
        "batch": parts * pick((1, 2, 4, 8, 16, 32)),
        "time": pick((512, 1024, 2048)),
        "width": heads * pick((64, 128)),
        "layers": pick(layers),
        "heads": heads,
        "vocabulary": pick((8192, 32768, 65536)),
    }


def _gpt(pick: Pick, parts: int) -> dict[str, Any]:
    return _transformer(pick, parts, (1, 2, 3))


def _gpt_scan(pick: Pick, parts: int) -> dict[str, Any]:
    return _transformer(pick, parts, (4, 8, 16, 32))


def _llama(pick: Pick, parts: int) -> dict[str, Any]:
    sizes = _gpt_scan(pick, parts)
    hidden = pick((2, 3, 4)) * sizes["width"]
    return {**sizes, "kv_heads": 8, "hidden": hidden, "remat": pick((True, False))}


def _moe(pick: Pick, parts: int) -> dict[str, Any]:
    sizes = _transformer(pick, parts, (1, 2))
    return {**sizes, "hidden": 2 * sizes["width"], "experts": 8}


def _lora(pick: Pick, parts: int) -> dict[str, Any]:
    return {**_gpt_scan(pick, parts), "rank": pick((8, 64))}


def _vit(pick: Pick, parts: int) -> dict[str, Any]:
    heads = pick((8, 16))
    return {
        "batch": parts * pick((16, 32, 64, 128)),
        "size": 256,
        "patch": 16,
        "width": heads * 64,
        "layers": pick((2, 3)),
        "heads": heads,
        "classes": 1024,
    }


def _rnn(pick: Pick, parts: int) -> dict[str, Any]:
    return {
        "batch": parts * pick((64, 256, 1024)),
        "time": pick((64, 256)),
        "width": pick((1024, 2048)),
        "vocabulary": 1024,
    }


def _user_step(pick: Pick, parts: int) -> dict[str, Any]:
    return {
        "batch": parts * pick((1024, 4096)),
        "items": pick((1_048_576, 8_388_608)),
        "width": pick((128, 256)),
        "hidden": 512,
    }


_SIZES: Mapping[str, Callable[[Pick, int], dict[str, Any]]] = {
    "mlp": _mlp, "gpt": _gpt, "gpt_scan": _gpt_scan, "llama": _llama, "moe": _moe,
    "lora": _lora, "vit": _vit, "rnn": _rnn, "user_step": _user_step,
}  # fmt: skip


def _crude(family: str, sizes: Mapping[str, Any], pins: Mapping[str, Any]) -> float:
    """Bytes of a device, within a factor of two or so."""
    tensor, fsdp = pins.get("tensor", 1), pins.get("fsdp", 1)
    data = pins.get("replica", 1) * fsdp
    rows = sizes["batch"] / data / pins["microbatches"]
    divided = fsdp if pins["zero"] == 3 else 1
    if family == "mlp":
        widths = sizes["widths"]
        parameters = sum(a * b for a, b in itertools.pairwise(widths))
        kept = 4 * rows * (sum(widths) + 2 * max(widths)) / tensor
        held = 4 * sizes["batch"] / data * widths[0]
        return 16 * parameters / tensor / divided + kept + held
    if family == "user_step":
        parameters = 2 * sizes["items"] * sizes["width"]
        return 16 * parameters / divided + 8 * rows * sizes["batch"]
    width = sizes["width"]
    if family == "rnn":
        return rows * sizes["time"] * width * 4 * 14 / tensor
    time, layers = sizes.get("time", 256), sizes["layers"]
    words = sizes.get("vocabulary", sizes.get("classes", 0))
    parameters = layers * 12 * width**2 + 2 * words * width
    item = 2 if family == "llama" else 4
    tokens = rows * time
    layer = tokens * (24 * width + 3 * sizes["heads"] * time) / tensor
    layer += 4 * tokens * width
    again = pins["remat"] == "full" or (family == "llama" and sizes["remat"])
    kept = tokens * width * layers + layer if again else layer * layers
    logits = 8 * tokens * words / tensor if family != "vit" else 0
    return 4 * item * parameters / tensor / divided + item * kept + logits
