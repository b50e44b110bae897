"""Who sends which whole slice to whom, when the layout did not change.

Decides from what is needed and what was verified where; balances the bytes over the
hosts that can send them. Pure and deterministic. Must not know steps' meaning, meshes,
addresses or how bytes travel. `restore.py` plans for any other layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dtft.checkpoint.slices import Slice


@dataclass(frozen=True, kw_only=True)
class ExactTransfer:
    """Slices that one host fetches from another."""

    source: str
    target: str
    slices: tuple[Slice, ...]
    """In the order in which the target needs them."""


@dataclass(frozen=True, kw_only=True)
class ExactPlan:
    """Every needed slice, exactly once: there already, or in one transfer."""

    own: Mapping[str, tuple[Slice, ...]]
    """Per needing host the slices it has itself."""
    transfers: tuple[ExactTransfer, ...]
    """By target, then source; at most one for each pair."""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Why no plan exists: slices that no host has."""

    slices: tuple[Slice, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the slices that no host has."""
        return tuple(piece.key for piece in self.slices)


def plan_exact(
    needs: Mapping[str, tuple[Slice, ...]], holders: Mapping[str, tuple[str, ...]]
) -> ExactPlan | Missing:
    """Plans all transfers of a restore.

    Args:
        needs: per host the slices it must have in the end.
        holders: slice key to the live hosts with a verified copy of it.

    Returns:
        The plan, or the slices that keep it from existing.
    """
    wanted = {host: tuple(dict.fromkeys(pieces)) for host, pieces in needs.items()}
    distinct = dict.fromkeys(piece for pieces in wanted.values() for piece in pieces)
    missing = tuple(piece for piece in distinct if not holders.get(piece.key))
    if missing:
        return Missing(slices=missing)
    own = {
        host: tuple(piece for piece in pieces if host in holders[piece.key])
        for host, pieces in wanted.items()
    }
    absent = [
        (host, piece)
        for host, pieces in wanted.items()
        for piece in pieces
        if host not in holders[piece.key]
    ]
    sources = _balanced_sources(absent, holders)
    routes: dict[tuple[str, str], list[Slice]] = {}
    for (host, piece), source in zip(absent, sources, strict=True):
        routes.setdefault((host, source), []).append(piece)
    return ExactPlan(
        own=own,
        transfers=tuple(
            ExactTransfer(
                source=source, target=target, slices=tuple(routes[target, source])
            )
            for target, source in sorted(routes)
        ),
    )


def _balanced_sources(
    absent: list[tuple[str, Slice]], holders: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """A source per absent slice: the largest first, to whoever sends least so far."""
    sent: dict[str, int] = {}
    sources = [""] * len(absent)
    # The sort is stable, so equal sizes stay in the order of need.
    for index in sorted(range(len(absent)), key=lambda i: -absent[i][1].nbytes):
        piece = absent[index][1]
        source = min(holders[piece.key], key=lambda host: (sent.get(host, 0), host))
        sent[source] = sent.get(source, 0) + piece.nbytes
        sources[index] = source
    return sources
