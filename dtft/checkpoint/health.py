"""How safe a committed step is, from what hosts say they hold. Pure decisions.

For people who look at a job. Must not know connections, etcd or how it is shown.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dtft.checkpoint.commit import Commit, Holdings, locate
from dtft.checkpoint.slices import Layout


@dataclass(frozen=True, kw_only=True)
class SliceCopies:
    """One slice and the hosts that have it."""

    key: str
    num_bytes: int
    hosts: tuple[str, ...]
    copies: int
    """Failure domains that it is in."""


@dataclass(frozen=True, kw_only=True)
class CommitHealth:
    """One commit as live memory has it."""

    step: int
    generation: int
    wanted: int
    """Copies every slice had when it was committed."""
    interval: int = 1
    """Steps until the next commit was to come."""
    slices: tuple[SliceCopies, ...] = ()
    problem: str = ""
    """Why live memory cannot restore it; empty if it can."""

    @property
    def copies(self) -> tuple[int, int]:
        """Copies of the slice with the fewest, and of the one with the most.

        Those in one failure domain count once.
        """
        counts = [piece.copies for piece in self.slices]
        return min(counts, default=0), max(counts, default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the state, each slice counted once."""
        return sum(piece.num_bytes for piece in self.slices)

    @property
    def state(self) -> Literal["healthy", "degraded", "lost"]:
        """Degraded: it can be restored, but slices have fewer copies than wanted."""
        if self.problem:
            return "lost"
        return "healthy" if self.copies[0] >= self.wanted else "degraded"

    def slices_on(self, host: str) -> int:
        """How many slices a host has."""
        return sum(host in piece.hosts for piece in self.slices)


def commit_health(
    commit: Commit,
    layout: Layout | None,
    holdings: Holdings,
    *,
    placed: Sequence[str] = (),
    domains: Mapping[str, str] | None = None,
) -> CommitHealth:
    """What became of one commit.

    Args:
        commit: the record.
        layout: of the running job, if any live host knows it.
        holdings: what live hosts hold.
        placed: per slot the domain by which copies were placed, for messages.
        domains: host to the failure domain in which its copy counts; by default each
            host is one.
    """
    located, reasons = locate([commit], layout, holdings, placed)
    names = domains or {}
    slices: tuple[SliceCopies, ...] = ()
    problem = reasons[0].partition(": ")[2] if reasons else ""
    if located is not None and layout is not None:
        sizes = {piece.key: piece.nbytes for piece in layout.owners}
        slices = tuple(
            SliceCopies(
                key=key,
                num_bytes=sizes[key],
                hosts=located.holders[key],
                copies=len({names.get(host, host) for host in located.holders[key]}),
            )
            for key in sorted(sizes.keys() & located.holders.keys())
        )
    return CommitHealth(
        step=commit.step,
        generation=commit.generation,
        wanted=commit.copies,
        interval=commit.interval,
        slices=slices,
        problem=problem,
    )


def worth_showing(found: Iterable[CommitHealth]) -> Sequence[CommitHealth]:
    """Newest first, and only the best: hosts drop a commit for a newer one.

    A commit that is degraded or lost says something only where no other is better.
    """
    ordered = sorted(found, key=lambda health: health.step, reverse=True)
    for state in ("healthy", "degraded"):
        if best := [health for health in ordered if health.state == state]:
            return best
    return ordered[:1]
