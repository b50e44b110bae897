"""Words of a plan in a sentence each: its terms, its memory, the values of its knobs.

Text only, printed where the words are, so that nobody has to look them up. Must not
know how a plan is found.
"""

from collections.abc import Mapping

from dtft.planner.plan import Knobs

TERMS: Mapping[str, str] = {
    "compute": "matmuls and all else of the model, forward and backward, on one device",
    "collectives": "what computing beside them does not hide",
    "bubble": "stages that wait for the first or the last microbatches",
    "optimizer": "the update: gradients, parameters and its state, read and written",
    "offload": "optimizer state, copied from host memory and back",
    "launch": "starting the operators one by one: the same for the smallest arrays",
    "step": "",
}
"""Terms of a step's seconds."""

MEMORY: Mapping[str, str] = {
    "parameters": "at rest",
    "gradients": "at the moment that needs most",
    "optimizer": "its state, at rest",
    "activations": "the same moment: kept for the backward pass, gathered, worked on",
    "batch": "the arrays that are fed",
    "reserve": "kept free for what is not predicted",
    "needed": "",
    "capacity": "",
}
"""Terms of a device's memory."""

ZERO: Mapping[int, str] = {
    0: "each device has its parameters, gradients and optimizer state whole; only "
    "other axes than fsdp divide them",
    1: "optimizer state is divided along fsdp",
    2: "optimizer state and gradients are divided along fsdp; parameters are not",
    3: "parameters, gradients and optimizer state are divided along fsdp; parameters "
    "are gathered where they are used",
}
"""Levels of ZeRO."""

REMAT: Mapping[str, str] = {
    "none": "the backward pass computes nothing again",
    "dots": "the backward pass computes again all but the results of matmuls",
    "full": "the backward pass computes again all but the inputs of blocks",
}
"""Rematerialization."""


def knobs_in_words(knobs: Knobs) -> tuple[str, ...]:
    """What the knobs beside the mesh mean; those at rest are left out.

    >>> knobs_in_words(Knobs(zero=1))
    ('zero=1: optimizer state is divided along fsdp',)
    """
    found = [f"zero={knobs.zero}: {ZERO[knobs.zero]}"]
    if knobs.remat != "none":
        found.append(f"remat={knobs.remat}: {REMAT[knobs.remat]}")
    if knobs.microbatches > 1:
        found.append(
            f"microbatches={knobs.microbatches}: the batch goes through in so many "
            "parts, one after another, and their gradients are added up"
        )
    return tuple(found)
