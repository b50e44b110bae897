"""When a step counts as committed, which commit can be restored, and how safe it is.

Decided from reports alone: whether every slice of a step is in enough places with equal
digests (`StepTracker`), which slices of a commit are where (`locate`), whom to believe
where hosts contradict each other (`adding_up`), and what a person is told
(`commit_health`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dtft.checkpoint.replication.copy_placement import CopyPlacement, Push, place_copies
from dtft.checkpoint.state import Layout, digest_root

# Whom to believe where hosts contradict each other about a commit's bytes.
#
# Each host has checked its bytes against its own digests, so a flipped bit is no claim;
# a host that keeps another step's bytes under the commit's number is. The commit's root
# digest says which claims are of it.


Claims = Mapping[str, Mapping[bytes, Sequence[str]]]
"""Slice key -> digest -> the hosts that say so."""

MAX_SUSPECTS = 16
"""So many hosts are left out in turn, where hosts contradict each other."""


def adding_up(root: str, claims: Claims) -> dict[str, bytes] | None:
    """The digest of each slice that the commit is of; None if that is not found.

    What most hosts say; with two copies of a slice there is no majority. One host that
    is wrong, in as many slices as it likes, is then found by leaving it out.

    Args:
        root: digest over the digests of all slices, from the commit.
        claims: of every slice.

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
    """What most hosts say of each slice, but for one of them."""
    return {
        key: max(told, key=lambda value: sum(host != without for host in told[value]))
        if len(told) > 1
        else next(iter(told))
        for key, told in claims.items()
    }


def dissenters(claims: Claims, chosen: Mapping[str, bytes]) -> tuple[str, ...]:
    """The hosts that say something else of some slice.

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
    """The record that makes a step restorable. Only a few hundred bytes."""

    step: int
    generation: int
    attempt: int
    root: str
    """Digest over every slice's digest."""
    layout: str
    """Digest of the layout, which names mesh, leaves and config."""
    holders: tuple[str, ...]
    """The host of each slot when the step was committed."""
    copies: int
    """Copies every slice has at least."""
    share: Share = "full"
    """Whether every slot copied all its slices, or its share of them."""
    interval: int = 1
    """Steps from this commit to the next."""

    def to_json(self) -> str:
        """JSON; inverse of `from_json`."""
        return json.dumps(vars(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Commit":
        """Reads what `to_json` wrote."""
        raw = json.loads(text)
        return cls(**{**raw, "holders": tuple(raw["holders"])})


@dataclass
class MemoryCommitLog:
    """The commits that a process knows, until it ends."""

    _commits: list[Commit] = field(default_factory=list)

    def append(self, commit: Commit) -> None:
        """Records a commit."""
        self._commits.insert(0, commit)

    def forget(self, step: int) -> None:
        """Drops the commits of a step whose bytes are not kept any more."""
        self._commits = [known for known in self._commits if known.step != step]

    def commits(self) -> tuple[Commit, ...]:
        """The recorded commits, newest first."""
        return tuple(self._commits)


class Divergence(Exception):
    """Two replicas hold different bytes for the same slice of the same step."""


class Mislabelled(Exception):
    """A copy is of other bytes than the step that it is said to be of."""


def push_root(push: Push, digests: Mapping[str, bytes]) -> str:
    """One digest over what a push brings, given every slice's.

    Raises:
        KeyError: a slice's digest is not known.
    """
    return digest_root((piece.key, digests[piece.key]) for piece in push.slices)


def check_copy(push: Push, step: int, digests: Mapping[str, bytes], told: str) -> None:
    """Compares what a host says that it holds of a push with what was staged.

    Args:
        push: which copy.
        step: of which step.
        digests: slice key to the digest of what was staged; a push of slices that are
            not among them cannot be compared.
        told: the digest that the host told, see `push_root`.

    Raises:
        Mislabelled: they differ.
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
    """Slice key to the slots that copied it, in the order of their reports."""
    _staged: set[int] = field(default_factory=set)
    _held: dict[tuple[int, int], str] = field(default_factory=dict)
    """Source and target of each push that arrived, to the digest that was told."""
    _right: set[tuple[int, int]] = field(default_factory=set)
    """Those that were compared with what the source staged."""

    def staged(self, slot: int, digests: Sequence[bytes]) -> None:
        """A slot has its own slices in its host's memory, or its share of them.

        Args:
            slot: the slot.
            digests: per own slice; empty for one that it did not copy.

        Raises:
            Divergence: another slot has other bytes for one of these slices.
            Mislabelled: a peer holds other bytes under this step's number.
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
        """The host of slot `target` holds a verified copy of a push.

        Raises:
            Mislabelled: it is not of what slot `source` has staged; see `push_root`.
        """
        self._held[source, target] = root
        self._compare(source)

    def _compare(self, source: int) -> None:
        """What peers hold of a slot with what that slot has staged, once it has."""
        for push in self.placement.pushes_of(source) if source in self._staged else ():
            pair = push.source, push.target
            if pair in self._held and pair not in self._right:
                check_copy(push, self.step, self.digests, self._held[pair])
                self._right.add(pair)

    @property
    def complete(self) -> bool:
        """Every slice has its verified holders."""
        everyone = len(self._staged) == self.layout.mesh.num_slots
        # Asked at every report: what costs more with every host comes last.
        all_right = len(self._right) == len(self.placement.pushes)
        return everyone and all_right and not self._short()

    def _short(self) -> list[str]:
        """Keys of slices that too few slots copied."""
        owners, wanted = self.layout.owners, self.placement.effective_copies
        return [
            piece.key
            for piece, slots in self.placement.holders.items()
            if len(self.copied.get(piece.key, ()))
            < min(wanted - len(slots) + len(owners[piece]), len(owners[piece]))
        ]

    @property
    def missing(self) -> str:
        """What is still waited for, for messages."""
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
    """A commit whose every slice was found, verified, on some live host."""

    commit: Commit
    digests: Mapping[str, bytes]
    """Slice key to digest."""
    holders: Mapping[str, tuple[str, ...]]
    """Slice key to the hosts that hold a good copy."""
    odd: tuple[str, ...] = ()
    """Hosts that hold other bytes under the commit's step; they are no holders."""


Holdings = Mapping[str, Mapping[int, Mapping[str, bytes]]]
"""host -> step -> slice key -> digest of a copy that was verified on that host."""


def locate(
    commits: Iterable[Commit],
    layout: Layout | None,
    holdings: Holdings,
    placed: Sequence[str] = (),
) -> tuple[Located | None, list[str]]:
    """The newest commit that live memory can restore completely.

    Args:
        commits: recorded commits, newest first.
        layout: the layout of the running job, if any host knows it.
        holdings: what live hosts hold, verified.
        placed: per slot the failure domain by which copies were placed, for messages;
            empty if every slot was its own.

    Returns:
        The located commit or None, and a reason for each commit passed over.
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
            if key in wanted:  # hosts may hold what another layout divides otherwise
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


# How safe a committed step is, from what hosts say they hold. Pure decisions.
#
# For people who look at a job.


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
