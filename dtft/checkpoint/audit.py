"""Reads one host's copies again and compares digests, while training goes on.

Takes no lock while it reads: a version that is dropped meanwhile is left out, not taken
for corrupt. Must not know who asks.
"""

from dtft.checkpoint import digest
from dtft.checkpoint.holder import Holder


def audit(holder: Holder, step: int) -> tuple[dict[str, bytes], list[str]] | None:
    """Checks every copy of a step.

    Returns:
        Slice key to digest of each good copy, and the keys of bad ones; None if the
        step was dropped or replaced before all was read.
    """
    copies = holder.copies(step)
    found = digest.check_copies(copies, holder.chunk_bytes)
    known = [(key, expected) for key, _, expected in copies]
    now = [(key, expected) for key, _, expected in holder.copies(step)]
    if not copies or now[: len(known)] != known:
        return None
    return found
