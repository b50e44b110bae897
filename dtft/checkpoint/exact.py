"""Who sends which whole slice to whom, when the layout did not change.

Decides from what is needed and what was verified where; balances the bytes over the
hosts that can send them. Pure and deterministic. Must not know steps' meaning, meshes,
addresses or how bytes travel. `restore.py` plans for any other layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dtft.checkpoint.slices import Slice

SLACK = 1.2
"""So much more than an even share of all bytes may a host send because it is near."""


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
    needs: Mapping[str, tuple[Slice, ...]],
    holders: Mapping[str, tuple[str, ...]],
    domains: Mapping[str, str] | None = None,
) -> ExactPlan | Missing:
    """Plans all transfers of a restore.

    Args:
        needs: per host the slices it must have in the end.
        holders: slice key to the live hosts with a verified copy of it.
        domains: host to its failure domains, "power/rack"; near hosts send first, as
            long as none of them sends more than `SLACK` times its even share for it
            (or one slice, if that is more).

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
    sources = _balanced_sources(absent, holders, domains or {})
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
    absent: list[tuple[str, Slice]],
    holders: Mapping[str, tuple[str, ...]],
    domains: Mapping[str, str],
) -> list[str]:
    """A source per absent slice: the largest first, to whoever sends least so far.

    Nearness counts before that for those who stay below their share with it.
    """
    sent: dict[str, int] = {}
    sources = [""] * len(absent)
    able = {host for _, piece in absent for host in holders[piece.key]}
    share = SLACK * sum(p.nbytes for _, p in absent) / max(len(able), 1)
    # The sort is stable, so equal sizes stay in the order of need.
    for index in sorted(range(len(absent)), key=lambda i: -absent[i][1].nbytes):
        target, piece = absent[index]
        loads = {host: sent.get(host, 0) for host in holders[piece.key]}
        near = {
            host: _levels_shared(domains.get(host, ""), domains.get(target, ""))
            for host, load in loads.items()
            if not load or load + piece.nbytes <= share
        }
        source = min(loads, key=lambda h: (-near.get(h, 0), loads[h], h))
        sent[source] = loads[source] + piece.nbytes
        sources[index] = source
    return sources


def _levels_shared(one: str, other: str) -> int:
    """So many domains, from the widest on, are the same.

    >>> _levels_shared("p/a", "p/b"), _levels_shared("p/a", ""), _levels_shared("", "")
    (1, 0, 0)
    """
    shared = 0
    for mine, theirs in zip(one.split("/"), other.split("/"), strict=False):
        if not mine or mine != theirs:
            break
        shared += 1
    return shared
