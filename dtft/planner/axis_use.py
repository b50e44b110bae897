"""What each axis of a plan's mesh is there for: where it lies, how much it divides.

Pure; decides nothing. Must not know seconds or bytes.
"""

from dtft.planner.axis_layout import group_of
from dtft.planner.partition import PRODUCTS, Division
from dtft.planner.plan import AxisUse
from dtft.planner.search import Search
from dtft.planner.space import Candidate


def axes_used(
    search: Search, candidate: Candidate, division: Division
) -> dict[str, AxisUse]:
    """The axes of a candidate's mesh that are larger than 1.

    Args:
        search: has the program and the devices.
        candidate: its mesh, outermost axis first.
        division: which axes divide what.
    """
    shares = work_divided(search, division)
    found = {}
    for axis, size in candidate.mesh.items():
        if size > 1:
            group = group_of(search.pool, candidate.mesh, axis)
            kinds = [link.kind for link in group.links]
            found[axis] = AxisUse(
                levels=tuple(zip(group.sizes, kinds, strict=True)),
                # Stages share the layers, whatever divides their operators.
                work=1.0 if axis == "stage" else shares.get(axis, 0.0),
            )
    return found


def work_divided(search: Search, division: Division) -> dict[str, float]:
    """For each axis the share of the operations of products that it divides.

    Of all operations, where there is no product.
    """
    works = search.works(division)
    heavy = [pair for pair in works if pair[0].operator.kind in PRODUCTS] or works
    total = sum(group.operator.flops * group.times for group, _ in heavy)
    shares: dict[str, float] = {}
    for group, work in heavy:
        share = group.operator.flops * group.times / total if total else 0.0
        for axis in work.divided_by:
            shares[axis] = shares.get(axis, 0.0) + share
    return {axis: min(1.0, share) for axis, share in shares.items()}
