"""When a step counts as committed, and which commit can be restored.

Decides, from reports alone: is every slice of a step in enough places with equal
digests, what the commit record says, and which slices of a commit are where. Pure
values; must not know connections, etcd or the clock.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from dtft.checkpoint.claims import adding_up, dissenters
from dtft.checkpoint.digest import digest_root
from dtft.checkpoint.placement import Placement, Push, place
from dtft.checkpoint.slices import Layout

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
        return json.dumps(asdict(self), sort_keys=True)

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
    placement: Placement
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
        slots = place(layout, commit.copies, placed or None).holders[lost[0]]
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
