"""Commits: when a step is committed, which commit can be restored, and its health.

All decisions use only the reports of hosts. `StepTracker` decides whether every slice
of a step has enough copies with equal digests. `locate` finds the hosts with copies of
a commit's slices. `adding_up` resolves contradictory digests with the commit's root
digest. `commit_health` summarizes a commit for display.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dtft.checkpoint.replication.copy_placement import CopyPlacement, Push, place_copies
from dtft.checkpoint.state import Layout, digest_root

Claims = Mapping[str, Mapping[bytes, Sequence[str]]]
"""Slice key -> digest -> the hosts that report this digest."""

MAX_SUSPECTS = 16
"""Most hosts that are excluded in turn to resolve contradictory digests."""


def adding_up(root: str, claims: Claims) -> dict[str, bytes] | None:
    """Finds the digest of each slice that matches the commit's root digest.

    Tries the majority of the hosts first. With two copies of a slice there is no
    majority, so then each host with a disputed slice is excluded in turn; this finds
    one wrong host, in any number of slices. Hosts verify their bytes against their own
    digests, so bit flips cause no contradiction. A host that keeps bytes of another
    step under the commit's step causes a contradiction.

    Args:
        root: digest over the digests of all slices, from the commit.
        claims: reported digests of every slice.

    Returns:
        Slice key to digest; None if no tried combination matches the root.

    >>> right, wrong = {"u": b"1", "v": b"2"}, {"u": b"1", "v": b"3"}
    >>> told = {"u": {b"1": ["a", "b"]}, "v": {b"3": ["a"], b"2": ["b"]}}
    >>> adding_up(digest_root(right.items()), told) == right
    True
    >>> adding_up(digest_root({"u": b"9"}.items()), told) is None
    True
    """
    most = _most(claims, "")
    if digest_root(most.items()) == root:
        return most
    disputed = {key: told for key, told in claims.items() if len(told) > 1}
    lists = [hosts for told in disputed.values() for hosts in told.values()]
    for host in sorted({host for hosts in lists for host in hosts})[:MAX_SUSPECTS]:
        chosen = most | _most(disputed, host)
        if digest_root(chosen.items()) == root:
            return chosen
    return None


def _most(claims: Claims, without: str) -> dict[str, bytes]:
    """The digest of each slice that most hosts report, excluding the host `without`."""
    return {
        key: max(told, key=lambda value: sum(host != without for host in told[value]))
        if len(told) > 1
        else next(iter(told))
        for key, told in claims.items()
    }


def dissenters(claims: Claims, chosen: Mapping[str, bytes]) -> tuple[str, ...]:
    """The hosts that report another digest than the chosen one for any slice.

    >>> dissenters({"v": {b"3": ["a"], b"2": ["b"]}}, {"v": b"2"})
    ('a',)
    """
    odd = {
        host
        for key, told in claims.items()
        if len(told) > 1
        for value, hosts in told.items()
        if value != chosen[key]
        for host in hosts
    }
    return tuple(sorted(odd))


Share = Literal["full", "divided"]


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The record that makes a step restorable; a few hundred bytes as JSON."""

    step: int
    generation: int
    attempt: int
    root: str
    """Root digest over the digests of all slices."""
    layout: str
    """Digest of the layout, which has mesh, leaves and config."""
    holders: tuple[str, ...]
    """The host of each slot when the step was committed."""
    copies: int
    """Least number of copies of every slice."""
    share: Share = "full"
    """Whether every slot copied all its slices ("full") or its share ("divided")."""
    interval: int = 1
    """Steps from this commit to the next."""

    def to_json(self) -> str:
        """Encodes the commit as JSON; inverse of `from_json`."""
        return json.dumps(vars(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Commit":
        """Parses a commit from JSON; inverse of `to_json`."""
        raw = json.loads(text)
        return cls(**{**raw, "holders": tuple(raw["holders"])})


@dataclass
class MemoryCommitLog:
    """The commits that a process knows, kept in its memory."""

    _commits: list[Commit] = field(default_factory=list)

    def append(self, commit: Commit) -> None:
        """Records a commit."""
        self._commits.insert(0, commit)

    def forget(self, step: int) -> None:
        """Removes the commits of a step whose bytes are no longer kept."""
        self._commits = [known for known in self._commits if known.step != step]

    def commits(self) -> tuple[Commit, ...]:
        """The recorded commits, newest first."""
        return tuple(self._commits)


class Divergence(Exception):
    """Two replicas hold different bytes for the same slice of the same step."""


class Mislabelled(Exception):
    """A copy's bytes are not those of the step under which it is reported."""


def push_root(push: Push, digests: Mapping[str, bytes]) -> str:
    """Computes one digest over the digests of all slices of a push.

    Raises:
        KeyError: `digests` lacks a slice of the push.
    """
    return digest_root((piece.key, digests[piece.key]) for piece in push.slices)


def check_copy(push: Push, step: int, digests: Mapping[str, bytes], told: str) -> None:
    """Compares a target's reported copy of a push with the staged slices.

    Args:
        push: the push that made the copy.
        step: the step of the copy, for messages.
        digests: slice key to the digest of the staged slice. A push with a slice that
            is not in `digests` is not compared.
        told: the `push_root` that the target's host reported.

    Raises:
        Mislabelled: the digests differ.
    """
    known = all(piece.key in digests for piece in push.slices)
    if known and push_root(push, digests) != told:
        raise Mislabelled(
            f"the copy of slot {push.source}'s slices on slot {push.target} is not of "
            f"step {step}, though both hosts say so: it is refused"
        )


@dataclass
class StepTracker:
    """Collects the reports of one step until it can be committed."""

    layout: Layout
    placement: CopyPlacement
    step: int
    digests: dict[str, bytes] = field(default_factory=dict)
    copied: dict[str, list[int]] = field(default_factory=dict)
    """Slice key to the slots that copied the slice, in the order of their reports."""
    _staged: set[int] = field(default_factory=set)
    _held: dict[tuple[int, int], str] = field(default_factory=dict)
    """Source and target of each push that arrived, to the reported `push_root`."""
    _right: set[tuple[int, int]] = field(default_factory=set)
    """Source and target of each push whose copy matches the staged slices."""

    def staged(self, slot: int, digests: Sequence[bytes]) -> None:
        """Records that a slot's slices, or its share, are in its host's memory.

        Args:
            slot: the slot.
            digests: digest of each of the slot's own slices; empty for a slice that the
                slot did not copy.

        Raises:
            Divergence: another slot has different bytes for one of these slices.
            Mislabelled: a peer holds different bytes under this step's number.
        """
        pieces = self.layout.slices(slot)
        for piece, value in zip(pieces, digests, strict=True):
            if not value:
                continue
            known = self.digests.setdefault(piece.key, value)
            copied = self.copied.setdefault(piece.key, [])
            copied.append(slot)
            if known != value:
                raise Divergence(
                    f"step {self.step}: slots {copied[0]} and {slot} have different "
                    f"bytes for {piece.key}. Replicas have diverged; nothing was "
                    "committed."
                )
        self._staged.add(slot)
        self._compare(slot)

    def held(self, source: int, target: int, root: str) -> None:
        """Records that the host of slot `target` holds a verified copy of a push.

        Args:
            source: slot that owns the slices.
            target: slot that keeps the copy.
            root: the copy's `push_root`.

        Raises:
            Mislabelled: the copy differs from the slices that slot `source` has staged.
        """
        self._held[source, target] = root
        self._compare(source)

    def _compare(self, source: int) -> None:
        """Compares the peers' copies of a slot with its staged slices, once staged."""
        for push in self.placement.pushes_of(source) if source in self._staged else ():
            pair = push.source, push.target
            if pair in self._held and pair not in self._right:
                check_copy(push, self.step, self.digests, self._held[pair])
                self._right.add(pair)

    @property
    def complete(self) -> bool:
        """Whether every slot has staged and every slice has its verified copies."""
        everyone = len(self._staged) == self.layout.mesh.num_slots
        # Evaluated at every report: the check whose cost grows with hosts is last.
        all_right = len(self._right) == len(self.placement.pushes)
        return everyone and all_right and not self._short()

    def _short(self) -> list[str]:
        """Keys of the slices that too few of their owners have copied."""
        owners, wanted = self.layout.owners, self.placement.effective_copies
        return [
            piece.key
            for piece, slots in self.placement.holders.items()
            if len(self.copied.get(piece.key, ()))
            < min(wanted - len(slots) + len(owners[piece]), len(owners[piece]))
        ]

    @property
    def missing(self) -> str:
        """The snapshots and copies that are still missing, as text for messages."""
        slots = sorted(set(range(self.layout.mesh.num_slots)) - self._staged)
        pushes = {(push.source, push.target) for push in self.placement.pushes}
        copies = sorted(pushes - self._right)
        parts = [f"snapshot of slot {slot}" for slot in slots]
        parts += [f"copy of slot {a} on slot {b}" for a, b in copies]
        if not parts:
            parts = [f"another copy of {key}" for key in self._short()[:8]]
        return ", ".join(parts)

    def root(self) -> str:
        """The root digest over all slices."""
        return digest_root(self.digests.items())


@dataclass(frozen=True, kw_only=True)
class Located:
    """A commit of which live hosts hold a verified copy of every slice."""

    commit: Commit
    digests: Mapping[str, bytes]
    """Slice key to digest."""
    holders: Mapping[str, tuple[str, ...]]
    """Slice key to the hosts that hold a verified copy with this digest."""
    odd: tuple[str, ...] = ()
    """Hosts that hold different bytes under the commit's step for some slice."""


Holdings = Mapping[str, Mapping[int, Mapping[str, bytes]]]
"""Host -> step -> slice key -> digest of a copy that was verified on that host."""


def locate(
    commits: Iterable[Commit],
    layout: Layout | None,
    holdings: Holdings,
    placed: Sequence[str] = (),
) -> tuple[Located | None, list[str]]:
    """Finds the newest commit that can be restored completely from live memory.

    Args:
        commits: recorded commits, newest first.
        layout: the layout of the running job; None if no live host knows it.
        holdings: verified copies of the live hosts.
        placed: the failure domain of each slot by which copies were placed, for
            messages; empty if every slot was a domain of its own.

    Returns:
        The located commit or None, and a reason for each newer commit that was skipped.
    """
    reasons = []
    for commit in commits:
        if layout is None or layout.digest != commit.layout:
            reasons.append(f"step {commit.step}: no live host knows its layout")
            continue
        found, reason = _locate_one(commit, layout, holdings, placed)
        if found is not None:
            return found, reasons
        reasons.append(f"step {commit.step}: {reason}")
    return None, reasons


def _locate_one(
    commit: Commit, layout: Layout, holdings: Holdings, placed: Sequence[str]
) -> tuple[Located | None, str]:
    claims: dict[str, dict[bytes, list[str]]] = {}
    wanted = {piece.key for piece in layout.owners}
    for host in sorted(holdings):
        for key, value in holdings[host].get(commit.step, {}).items():
            if key in wanted:  # hosts may hold slices of another layout
                claims.setdefault(key, {}).setdefault(value, []).append(host)
    lost = [piece for piece in layout.owners if piece.key not in claims]
    if lost:
        slots = place_copies(layout, commit.copies, placed or None).holders[lost[0]]
        former = ", ".join(commit.holders[slot] for slot in slots)
        return None, (
            f"{len(lost)} of {len(layout.owners)} slices have no verified copy left; "
            f"the {len(slots)} holders of {lost[0].key} were {former}"
        )
    chosen = adding_up(commit.root, claims)
    if chosen is None:
        return None, "the digests found do not add up to the committed root"
    holders = {key: tuple(claims[key][value]) for key, value in chosen.items()}
    odd = dissenters(claims, chosen)
    return Located(commit=commit, digests=chosen, holders=holders, odd=odd), ""


@dataclass(frozen=True, kw_only=True)
class SliceCopies:
    """The copies of one slice of a commit."""

    key: str
    num_bytes: int
    hosts: tuple[str, ...]
    copies: int
    """Number of failure domains that have a copy."""


@dataclass(frozen=True, kw_only=True)
class CommitHealth:
    """Health of one commit in live memory, for display."""

    step: int
    generation: int
    wanted: int
    """Least copies of every slice when the step was committed."""
    interval: int = 1
    """Steps from this commit to the next, as planned at the commit."""
    slices: tuple[SliceCopies, ...] = ()
    problem: str = ""
    """The reason why live memory cannot restore the commit; empty if it can."""

    @property
    def copies(self) -> tuple[int, int]:
        """The least and the greatest number of copies of any slice.

        Copies in the same failure domain count once.
        """
        counts = [piece.copies for piece in self.slices]
        return min(counts, default=0), max(counts, default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the state, each slice counted once."""
        return sum(piece.num_bytes for piece in self.slices)

    @property
    def state(self) -> Literal["healthy", "degraded", "lost"]:
        """State of the commit.

        "lost" cannot be restored from live memory. "degraded" can be restored, but some
        slices have fewer copies than wanted.
        """
        if self.problem:
            return "lost"
        return "healthy" if self.copies[0] >= self.wanted else "degraded"

    def slices_on(self, host: str) -> int:
        """The number of slices of which a host has a copy."""
        return sum(host in piece.hosts for piece in self.slices)


def commit_health(
    commit: Commit,
    layout: Layout | None,
    holdings: Holdings,
    *,
    placed: Sequence[str] = (),
    domains: Mapping[str, str] | None = None,
) -> CommitHealth:
    """Computes the health of one commit.

    Args:
        commit: the commit.
        layout: the layout of the running job; None if no live host knows it.
        holdings: verified copies of the live hosts.
        placed: the failure domain of each slot by which copies were placed, for
            messages.
        domains: host to the failure domain in which its copy counts; a host without an
            entry is a domain of its own.
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
    """Selects the commits to display, newest first: only those in the best state.

    Hosts drop older commits for newer ones. So a degraded or lost commit matters only
    if no commit is in a better state. If all are lost, only the newest is selected.
    """
    ordered = sorted(found, key=lambda health: health.step, reverse=True)
    for state in ("healthy", "degraded"):
        if best := [health for health in ordered if health.state == state]:
            return best
    return ordered[:1]
