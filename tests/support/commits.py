"""Commits of a small state on up to four hosts, and what these hosts hold of it."""

from dtft.checkpoint.replication.commit import Commit, push_root
from dtft.checkpoint.replication.copy_placement import Push, Spread, place_copies
from dtft.checkpoint.state.digests import digest_root
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.elastic.assignment import SlotAssignment

HOSTS = ("h0", "h1", "h2", "h3")


def layout(replica: int, fsdp: int) -> Layout:
    """The layout of a state of two leaves, of which one is divided."""
    slots = tuple(range(replica * fsdp))
    mesh = MeshLayout(
        axis_names=("replica", "fsdp"), axis_sizes=(replica, fsdp), slots=slots
    )
    leaves = (
        Leaf(path="w", shape=(8, 4), dtype="float32", spec=(("fsdp",),)),
        Leaf(path="b", shape=(3,), dtype="float32"),
    )
    return Layout(mesh=mesh, leaves=leaves)


def value(key: str) -> bytes:
    """The digest of a slice: its own key, in 16 bytes."""
    return key.encode().ljust(16, b".")[:16]


def root_of(push: Push) -> str:
    """What a host says of a copy that is right."""
    return push_root(push, {piece.key: value(piece.key) for piece in push.slices})


def commit_of(state: Layout, step: int) -> Commit:
    """The commit of a step of which there are two copies."""
    keys = [piece.key for piece in state.owners]
    return Commit(
        step=step,
        generation=1,
        attempt=1,
        root=digest_root((key, value(key)) for key in keys),
        layout=state.digest,
        holders=HOSTS[: state.mesh.num_slots],
        copies=2,
    )


def assignment(spread: Spread) -> SlotAssignment:
    """The assignment of the four hosts that restored step 7 from memory."""
    return SlotAssignment(
        generation=1,
        attempt=1,
        slots=HOSTS,
        incarnations=HOSTS,
        source="memory",
        step=7,
        rung=1,
        reason="",
        spread=spread,
    )


def holdings_of(state: Layout, copies: int, step: int) -> dict:
    """What each host holds when every copy of a step is there."""
    placement = place_copies(state, copies)
    found: dict[str, dict[int, dict[str, bytes]]] = {}
    for slot in range(state.mesh.num_slots):
        pieces = (*state.slices(slot), *placement.hosted(slot))
        found[HOSTS[slot]] = {step: {p.key: value(p.key) for p in pieces}}
    return found
