"""Plans for a commit that is held by rows and wanted by columns, on three hosts."""

from dtft.checkpoint.replication.commit import Commit
from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state.digests import digest_root
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.elastic.leader.reshard import ReshardPlans

MESH = MeshLayout(axis_names=("x",), axis_sizes=(3,), slots=(0, 1, 2))
HOSTS = ("a", "b", "c")
ADDRESSES = {host: f"{host}:1" for host in HOSTS}


def layout(*spec: tuple[str, ...]) -> Layout:
    """The layout of one leaf, divided as `spec` says."""
    leaf = Leaf(path="w", shape=(3, 6), dtype="uint8", spec=spec)
    return Layout(mesh=MESH, leaves=(leaf,))


ROWS, COLUMNS = layout(("x",)), layout((), ("x",))


def commit(step: int, digests: dict[str, bytes]) -> Commit:
    """The commit of a step whose slices have these digests."""
    return Commit(
        step=step,
        generation=1,
        attempt=1,
        root=digest_root(digests.items()),
        layout=ROWS.digest,
        holders=HOSTS,
        copies=2,
    )


def saved(*steps: int, slots: int = 3) -> ReshardPlans:
    """Every slot has staged its row of each step, and all were committed."""
    made = ReshardPlans(None, None)
    for step in steps:
        digests: dict[str, bytes] = {}
        for slot in range(slots):
            value = bytes([step, slot]) * 8
            made.staged(slot, step, [value])
            digests[ROWS.slices(slot)[0].key] = value
        made.committed(commit(step, digests), place_copies(ROWS, 2))
    return made


def order(plans: ReshardPlans, host: str, step: int, wanted: Layout = COLUMNS):
    """What a host is told that wants a step on other slices."""
    return plans.order_for(
        *(host, step, wanted), slots=HOSTS, addresses=ADDRESSES, domains={}
    )
