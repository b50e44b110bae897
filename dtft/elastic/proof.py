"""Whether the state on a new mesh is the committed one, leaf by leaf. Pure.

Every host reads its restored slices again and tells their digests; here they are held
against those of the commit, which trainers made of the old mesh's bytes before anybody
knew of a new one. Must not know how the bytes travelled.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dtft.checkpoint.replication import Located
from dtft.checkpoint.state import Layout, digest_root

Digests = Mapping[str, bytes]
"""Slice key to the digests of its chunks."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was committed and what was restored."""

    step: int
    committed_root: str
    """Digest over all slices, from the commit record."""
    restored_root: str
    """The same over what the hosts read again on the new mesh; equal if the leaves are
    divided as before."""
    leaves: int
    """Leaves that were compared."""
    differing: tuple[str, ...]
    """Leaves whose bytes differ from the commit's or between hosts; none may."""


def prove(located: Located, layout: Layout, restored: Iterable[Digests]) -> Proof:
    """Compares every leaf of a restored state with the commit.

    Args:
        located: the commit, with the digests of its slices.
        layout: of the new formation.
        restored: what each of its hosts read.
    """
    read: dict[str, set[bytes]] = {}
    for found in restored:
        for key, value in found.items():
            read.setdefault(key, set()).add(value)
    wrong: dict[str, None] = {}
    for piece in layout.owners:
        values = read.get(piece.key, set())
        expected = located.digests.get(piece.key, min(values, default=b""))
        if values != {expected}:
            wrong[piece.path] = None
    return Proof(
        step=located.commit.step,
        committed_root=located.commit.root,
        restored_root=digest_root((key, min(values)) for key, values in read.items()),
        leaves=len(layout.leaves),
        differing=tuple(wrong),
    )
