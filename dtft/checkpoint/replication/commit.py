"""Commits: decides when a step is committed and which commit can be restored.

All decisions use only the reports of hosts. A host reports a digest (a hash of the
bytes) for each slice that it has. `StepTracker` decides whether every slice of a step
has enough copies with equal digests. `locate` finds the hosts with copies of a commit's
slices. A commit has a root digest, which is one digest over the digests of all slices.
If hosts report different digests of a slice, `adding_up` uses the root digest to find
the right digest. `commit_health` summarizes a commit for display.
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
"""Largest number of hosts that `adding_up` tries to exclude, one after the other."""


def adding_up(root: str, claims: Claims) -> dict[str, bytes] | None:
    """Chooses one reported digest per slice, so that their root digest is `root`.

    First tries, for each slice, the digest that most hosts report. If the root digest
    of this choice is not `root`, tries again without the reports of one host. Each host
    that reports a slice on whose digest hosts disagree is left out in turn, but at most
    16 hosts (`MAX_SUSPECTS`), in the order of their names. So one host with wrong
    digests is found even with two copies per slice, where there is no majority.

    Reported digests differ if a host keeps the bytes of another step under the commit's
    step. A flipped bit does not change them, because hosts report the digests that they
    recorded when the bytes were written.

    Args:
        root: the commit's root digest, one digest over those of all slices.
        claims: for every slice, by its key, each reported digest with the hosts that
            report it.

    Returns:
        Slice key to digest; None if no tried choice has the root digest `root`.

    In the example, host "a" reports a wrong digest of slice "v", and host "b" the right
    one.

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
    """Chooses the digest that most hosts report for each slice; returns key to digest.

    Args:
        claims: for every slice, by its key, each reported digest with the hosts that
            report it.
        without: a host whose reports are not counted; "" counts the reports of all
            hosts. A slice with a single reported digest gets this digest, even if only
            the host `without` reports it.
    """
    return {
        key: max(told, key=lambda value: sum(host != without for host in told[value]))
        if len(told) > 1
        else next(iter(told))
        for key, told in claims.items()
    }


def dissenters(claims: Claims, chosen: Mapping[str, bytes]) -> tuple[str, ...]:
    """Returns the hosts that report another digest than the chosen one for some slice.

    Args:
        claims: for every slice, by its key, each reported digest with the hosts that
            report it.
        chosen: slice key to digest; has every slice of `claims`.

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
    """The record that all copies of a step exist, so that the step can be restored.

    `generation` is the number of the assignment of hosts to slots at the commit.
    `attempt` counts, from 1, the attempts to start or resume the job with this
    assignment.
    """

    step: int
    generation: int
    attempt: int
    root: str
    """One digest (hash) over the digests of all slices."""
    layout: str
    """`Layout.digest` of the layout (mesh, leaves and config)."""
    holders: tuple[str, ...]
    """The host of each slot when the step was committed."""
    copies: int
    """Number of failure domains in which every slice has at least one copy."""
    share: Share = "full"
    """Which of the slots that own a slice (have it on their devices) copied it to host
    memory: all ("full"), or some of them in rotation ("divided", see `Shares`)."""
    interval: int = 1
    """Planned number of steps from this commit to the next."""

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
    """A list of commits in the memory of this process; it is not stored."""

    _commits: list[Commit] = field(default_factory=list)

    def append(self, commit: Commit) -> None:
        """Records a commit as the newest."""
        self._commits.insert(0, commit)

    def forget(self, step: int) -> None:
        """Removes all commits of `step`; called when the step's bytes are dropped."""
        self._commits = [known for known in self._commits if known.step != step]

    def commits(self) -> tuple[Commit, ...]:
        """Returns the recorded commits, the last recorded first."""
        return tuple(self._commits)


class Divergence(Exception):
    """Two replicas hold different bytes for the same slice of the same step."""


class Mislabelled(Exception):
    """A peer's copy differs from the sender's slices, but both report the same step."""


def push_root(push: Push, digests: Mapping[str, bytes]) -> str:
    """Computes one digest over the digests of all slices of a push.

    Args:
        push: the slices that one slot sends to another.
        digests: slice key to digest; may also have slices that are not pushed.

    Raises:
        KeyError: `digests` lacks a slice of the push.
    """
    return digest_root((piece.key, digests[piece.key]) for piece in push.slices)


def check_copy(push: Push, step: int, digests: Mapping[str, bytes], told: str) -> None:
    """Checks that a peer's copy equals the slices that were pushed to it, by digest.

    Args:
        push: the slices, the slot that sent them, and the slot that keeps the copy.
        step: the step of the copy, for messages.
        digests: slice key to the digest that the sender reported. Nothing is checked if
            a slice of the push is not in `digests`.
        told: the `push_root` that the peer reported of its copy: one digest over the
            digests of all its slices.

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
    """Collects the hosts' reports about one step until the step can be committed."""

    layout: Layout
    placement: CopyPlacement
    step: int
    digests: dict[str, bytes] = field(default_factory=dict)
    copied: dict[str, list[int]] = field(default_factory=dict)
    """Slice key to the slots that copied the slice, in the order of their reports."""
    _staged: set[int] = field(default_factory=set)
    _held: dict[tuple[int, int], str] = field(default_factory=dict)
    """Maps (source, target) of each push that arrived to the reported `push_root`."""
    _right: set[tuple[int, int]] = field(default_factory=set)
    """(source, target) of each push whose copy matches the staged slices."""
    _told: tuple[tuple[str, ...], list[bytes]] | None = None
    """Slice keys and digests of the first slot that reported all its slices; None until
    then."""
    _skips: bool = False
    """Whether a slot has skipped some of its slices."""

    def staged(self, slot: int, digests: Sequence[bytes]) -> None:
        """Records that a slot has copied its slices to the memory of its host.

        If the owners of equal slices share the copying (`--checkpoint.share=divided`),
        a slot skips the slices that enough other owners copy.

        Args:
            slot: the slot.
            digests: digest of each of the slot's own slices; empty for a slice that the
                slot did not copy.

        Raises:
            Divergence: another slot has different bytes for one of these slices.
            Mislabelled: a peer has reported a copy of these slices for this step, and
                the copy has other digests.
        """
        keys, values = self.layout.keys(slot), list(digests)
        if self._told != (keys, values):  # usually replicas have equal slices
            self._take(slot, keys, values)
        else:
            for key in keys:
                self.copied[key].append(slot)
        self._staged.add(slot)
        self._compare(slot)

    def _take(self, slot: int, keys: tuple[str, ...], values: list[bytes]) -> None:
        if all(values):
            self._told = self._told or (keys, values)
        else:
            self._skips = True
        for key, value in zip(keys, values, strict=True):
            if not value:
                continue
            known = self.digests.setdefault(key, value)
            copied = self.copied.setdefault(key, [])
            copied.append(slot)
            if known != value:
                raise Divergence(
                    f"step {self.step}: slots {copied[0]} and {slot} have different "
                    f"bytes for {key}. Replicas have diverged; nothing was committed."
                )

    def held(self, source: int, target: int, root: str) -> None:
        """Records that slot `target` has verified its copy of the slices of `source`.

        Args:
            source: slot that has the slices on its devices and sent them.
            target: slot that keeps the copy.
            root: the `push_root` of the copy: one digest over the digests of all its
                slices.

        Raises:
            Mislabelled: slot `source` has reported its slices, and the copy differs.
        """
        self._held[source, target] = root
        self._compare(source)

    def _compare(self, source: int) -> None:
        """Compares the copies that peers have reported with the slices of a slot.

        Does nothing until the slot `source` has reported its slices with `staged`.

        Raises:
            Mislabelled: a copy differs from the slices.
        """
        for push in self.placement.pushes_of(source) if source in self._staged else ():
            pair = push.source, push.target
            if pair in self._held and pair not in self._right:
                check_copy(push, self.step, self.digests, self._held[pair])
                self._right.add(pair)

    @property
    def complete(self) -> bool:
        """Whether the step can be committed.

        True if three conditions hold. Every slot has reported its own slices
        (`staged`). Every slot to which slices are pushed (sent) has reported a verified
        and equal copy (`held`). Each slice was copied to host memory by enough of its
        owners (the slots with the slice on their devices).
        """
        everyone = len(self._staged) == self.layout.mesh.num_slots
        # Evaluated at every report: the check whose cost grows with hosts is last. If
        # every slot has copied all its slices, each slice has all its owners' copies.
        all_right = len(self._right) == len(self.placement.pushes)
        return everyone and all_right and not (self._skips and self._short())

    def _short(self) -> list[str]:
        """Returns the keys of slices that too few owners have copied to host memory.

        The owners of a slice are the slots that have it on their devices. The placement
        requires `effective_copies` copies of the slice. Each slot that the slice is
        pushed to keeps one copy, and owners must make the remaining copies, one each.
        If more copies remain than there are owners, all owners must copy the slice.
        """
        owners, wanted = self.layout.owners, self.placement.effective_copies
        return [
            piece.key
            for piece, slots in self.placement.holders.items()
            if len(self.copied.get(piece.key, ()))
            < min(wanted - len(slots) + len(owners[piece]), len(owners[piece]))
        ]

    @property
    def missing(self) -> str:
        """The snapshots and copies that the commit waits for, as text for messages.

        If all snapshots and copies exist, the text names up to 8 slices that too few
        slots have copied to host memory. "" if the step can be committed.
        """
        slots = sorted(set(range(self.layout.mesh.num_slots)) - self._staged)
        pushes = {(push.source, push.target) for push in self.placement.pushes}
        copies = sorted(pushes - self._right)
        parts = [f"snapshot of slot {slot}" for slot in slots]
        parts += [f"copy of slot {a} on slot {b}" for a, b in copies]
        if not parts:
            parts = [f"another copy of {key}" for key in self._short()[:8]]
        return ", ".join(parts)

    def root(self) -> str:
        """Computes the root digest over the slices reported so far.

        These are all slices once the step is `complete`.
        """
        return digest_root(self.digests.items())


@dataclass(frozen=True, kw_only=True)
class Located:
    """A commit that can be restored: each slice has a verified copy on a live host."""

    commit: Commit
    digests: Mapping[str, bytes]
    """Slice key to digest."""
    holders: Mapping[str, tuple[str, ...]]
    """Slice key to the hosts that hold a verified copy with this digest."""
    odd: tuple[str, ...] = ()
    """Hosts whose copy of at least one slice of this step has another digest than the
    digest in `digests`."""


Holdings = Mapping[str, Mapping[int, Mapping[str, bytes]]]
"""Host -> step -> slice key -> digest of a copy that was verified on that host."""


def locate(
    commits: Iterable[Commit],
    layout: Layout | None,
    holdings: Holdings,
    placed: Sequence[str] = (),
) -> tuple[Located | None, list[str]]:
    """Finds the newest commit that can be restored from the memory of live hosts.

    Args:
        commits: recorded commits, newest first.
        layout: the layout (mesh, leaves and config) of the running job; None if no live
            host knows it, and then no commit can be restored.
        holdings: for each live host and step, the digest of each slice, by its key, of
            which the host has verified a copy.
        placed: the failure domain of each slot, as given to `place_copies`; empty if no
            domains were given. Used only to name, in a reason, the hosts that held a
            lost slice.

    Returns:
        The located commit, or None if no commit can be restored; and the reasons, one
        for each commit that was tried and cannot be restored.
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
    """The copies of one slice (identified by its key) of a commit, for display."""

    key: str
    num_bytes: int
    hosts: tuple[str, ...]
    copies: int
    """Number of failure domains that have a copy."""


@dataclass(frozen=True, kw_only=True)
class CommitHealth:
    """The copies of one commit in the memory of live hosts, for display."""

    step: int
    generation: int
    wanted: int
    """Number of failure domains in which every slice had a copy at the commit."""
    interval: int = 1
    """Steps from this commit to the next, as planned at the commit."""
    slices: tuple[SliceCopies, ...] = ()
    problem: str = ""
    """Why the memory of live hosts cannot restore the commit; empty if it can."""

    @property
    def copies(self) -> tuple[int, int]:
        """The least and the greatest number of copies of any slice.

        Copies in the same failure domain count once. If the commit is lost, the result
        is (0, 0).
        """
        counts = [piece.copies for piece in self.slices]
        return min(counts, default=0), max(counts, default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the state, each slice counted once; 0 if the commit is lost."""
        return sum(piece.num_bytes for piece in self.slices)

    @property
    def state(self) -> Literal["healthy", "degraded", "lost"]:
        """State of the commit in the memory of live hosts.

        A lost commit cannot be restored from memory. A degraded commit can, but some
        slices have copies in fewer failure domains than when the step was committed
        (`wanted`).
        """
        if self.problem:
            return "lost"
        return "healthy" if self.copies[0] >= self.wanted else "degraded"

    def slices_on(self, host: str) -> int:
        """Counts the slices of which `host` has a copy; 0 if the commit is lost."""
        return sum(host in piece.hosts for piece in self.slices)


def commit_health(
    commit: Commit,
    layout: Layout | None,
    holdings: Holdings,
    *,
    placed: Sequence[str] = (),
    domains: Mapping[str, str] | None = None,
) -> CommitHealth:
    """Counts the copies of each slice of a commit in the memory of live hosts.

    Args:
        commit: the commit.
        layout: the layout (mesh, leaves and config) of the running job; None if no live
            host knows it, and then the commit counts as lost.
        holdings: for each live host and step, the digest of each slice, by its key, of
            which the host has verified a copy.
        placed: the failure domain of each slot, as given to `place_copies`; empty if no
            domains were given. Used only for the text of `CommitHealth.problem`.
        domains: host to its failure domain; a host without an entry is a domain of its
            own. The copies of a slice in one domain count as one copy.
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
    """Selects the commits to display, newest first.

    Selects all healthy commits. If there are none, selects all degraded commits. If all
    commits are lost, selects only the newest. Hosts drop the copies of older commits
    when newer commits exist, so a degraded commit is no problem while there is a
    healthy one.
    """
    ordered = sorted(found, key=lambda health: health.step, reverse=True)
    for state in ("healthy", "degraded"):
        if best := [health for health in ordered if health.state == state]:
            return best
    return ordered[:1]
