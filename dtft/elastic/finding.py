"""Which memory answers a fetch: of the newest formation, or of a former one.

Must not know who asks, nor how the bytes are sent.
"""

from collections.abc import Sequence

from dtft.checkpoint.memory import Holder
from dtft.checkpoint.state import Parts
from dtft.checkpoint.transport import WireError


def cut_out(slices: Sequence[Parts], spans: object) -> list[Parts]:
    """Of each slice the bytes that are asked for.

    Raises:
        WireError: the spans are not inside the slices.
    """
    found = list(spans) if isinstance(spans, list | tuple) else []
    if len(found) != len(slices):
        raise WireError("a fetch has not one span for each key")
    parts = []
    for one, span in zip(slices, found, strict=True):
        pair = list(span) if isinstance(span, list | tuple) else []
        if len(pair) != 2 or any(type(number) is not int for number in pair):
            raise WireError("a fetch's span is not (start, stop)")
        if not 0 <= pair[0] <= pair[1] <= one.nbytes:
            raise WireError(f"a fetch's span {pair} is not inside its slice")
        parts.append(Parts(one.cut(*pair)))
    return parts


def find_copies(
    holders: Sequence[Holder | None], step: int, keys: Sequence[str]
) -> list[Parts]:
    """The bytes of the named slices of a step, from whichever holder has each.

    The last one that has a slice counts: that of the former formation, since the first
    may be waiting for that very slice.

    Raises:
        KeyError: a slice is not held here for that step.
    """
    here: dict[str, Parts] = {}
    for holder in holders:
        if holder is not None:
            here |= holder.here(step)
    return [here[key] for key in keys]
