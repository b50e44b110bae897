"""Ten unlike models: each its loss, its step, and a count of its operations by hand.

Every function takes sizes and returns a `Model` whose arrays are only shapes, so the
largest are as cheap as the smallest. Counts are formulas of the sizes: matmuls and
convolutions, and operations per element where stated.
"""

from collections.abc import Callable

from tests.support.zoo_images import resnet, unet
from tests.support.zoo_language import llama, lora, moe, moe_sorted
from tests.support.zoo_parts import Model
from tests.support.zoo_small import mlp, rnn, user_step
from tests.support.zoo_transformers import gpt, gpt_scan, vit

MODELS: dict[str, Callable[..., Model]] = {
    "mlp": mlp,
    "resnet": resnet,
    "vit": vit,
    "gpt": gpt,
    "gpt_scan": gpt_scan,
    "llama": llama,
    "moe": moe,
    "moe_sorted": moe_sorted,
    "lora": lora,
    "rnn": rnn,
    "unet": unet,
    "user_step": user_step,
}
"""By name; gpt and gpt_scan are one model in two forms, and so are both of experts."""
