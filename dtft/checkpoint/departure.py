"""The last check of what leaves memory for storage.

A step has digests from its snapshot on; in storage it has fingerprints. Where the one
kind ends and the other begins, a bit that flipped in memory would get a good
fingerprint. Must not know arenas, nor what writes.
"""

from collections.abc import Iterable, Sequence

from dtft.checkpoint import digest
from dtft.checkpoint.parts import Parts
from dtft.checkpoint.tree import listed


def refuse_corrupt(
    step: int,
    copies: Iterable[tuple[str, Parts, bytes]],
    chunk_bytes: int,
) -> None:
    """Reads the bytes of a step again; call it once the fingerprints are taken.

    Fingerprints taken of right bytes tell of bytes that go wrong later, for ever.

    Args:
        step: the step.
        copies: name, bytes, and the digests that they should have.
        chunk_bytes: bytes under one digest.

    Raises:
        ValueError: a byte is wrong; names up to eight.
    """
    bad = digest.check_copies(copies, chunk_bytes)[1]
    if bad:
        raise ValueError(
            f"step {step} is corrupt in this host's memory, so nothing of it was "
            f"written: {listed(bad)} differ from their digests. The next step is a new "
            "snapshot."
        )


def from_hex(digests: Sequence[str]) -> list[bytes]:
    """Digests out of a JSON message.

    >>> from_hex(["00ff"])
    [b'\\x00\\xff']
    """
    return [bytes.fromhex(text) for text in digests]
