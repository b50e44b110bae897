"""Plans how the newest commit of a running job is resharded; used by the leader.

A user's process may request a step on other shardings than the saved shardings.
`ReshardPlans` keeps the newest commit's layout, digests and holders, and computes for
each host the regions (parts of old slices) that make up its new slices.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dtft.checkpoint.replication import (
    Commit,
    CopyPlacement,
    Located,
    RestorePlan,
    inventory_of,
    plan_restore,
)
from dtft.checkpoint.state import Layout, digest_root
from dtft.elastic.leader.recovery import regions_to


class NotPlanned(Exception):
    """The step cannot be resharded as requested; the message has the reason."""


class ReshardPlans:
    """Plans how the newest commit of one formation is restored on other shardings.

    A formation is an assignment of hosts to slots. A plan has the transfers to all
    hosts. The newest plan is kept, because each host requests its part separately.
    """

    def __init__(self, located: Located | None, layout: Layout | None) -> None:
        """Starts with the commit that was restored from memory.

        Args:
            located: this commit, with the holders and digests of its slices; None if
                the state was not restored from memory.
            layout: the commit's layout (mesh and leaves of the state); None if
                `located` is.
        """
        self._located, self._layout = located, layout
        self._staged: dict[int, dict[int, Sequence[bytes]]] = {}
        """Step -> slot -> the digests of the slot's slices."""
        self._newest: (
            tuple[Commit, CopyPlacement, dict[int, Sequence[bytes]]] | None
        ) = None
        self._planned: tuple[tuple[str, ...], RestorePlan] | None = None

    def staged(self, slot: int, step: int, digests: Sequence[bytes]) -> None:
        """Records the digests of a slot's slices in its snapshot of `step`.

        `digests` has one digest for each slice, in the order of the slices in
        `Layout.slices(slot)`.
        """
        self._staged.setdefault(step, {})[slot] = digests

    def committed(self, commit: Commit, placement: CopyPlacement) -> None:
        """Makes `commit` the commit that is resharded on request.

        Ignores a commit unless every slot has reported its digests in this formation.
        Holders and digests of the slices are computed only when a process requests the
        step. `placement` says which slots keep which copies.
        """
        staged = self._staged.get(commit.step, {})
        if len(staged) < len(commit.holders):
            return  # staged in an earlier formation
        self._newest = commit, placement, staged
        self._staged = {
            step: known for step, known in self._staged.items() if step > commit.step
        }

    def _settle(self) -> None:
        """Computes which hosts hold the newest commit's slices, and their digests.

        Does nothing if both are computed already.

        Raises:
            NotPlanned: the reported digests do not match the commit.
        """
        if self._newest is None:
            return
        (commit, placement, staged), self._newest = self._newest, None
        layout = placement.layout
        digests = {
            piece.key: value
            for slot, values in staged.items()
            for piece, value in zip(layout.slices(slot), values, strict=True)
        }
        if digest_root(digests.items()) != commit.root:
            raise NotPlanned(f"step {commit.step} is not what was committed")
        holders = {
            piece.key: tuple(commit.holders[slot] for slot in slots)
            for piece, slots in placement.holders.items()
        }
        self._located = Located(commit=commit, digests=digests, holders=holders)
        self._layout, self._planned = layout, None

    def order_for(
        self,
        host: str,
        step: int,
        wanted: Layout,
        *,
        slots: Sequence[str],
        addresses: Mapping[str, str],
        domains: Mapping[str, str],
    ) -> dict[str, Any]:
        """Computes the fields of one host's `assemble` order.

        By this order the host makes its slices in the requested layout (mesh and leaves
        of the state) from parts of the committed slices.

        Args:
            host: the host of one of the slots.
            step: the step that the host's process requested.
            wanted: the requested layout; its leaves are the commit's leaves or some of
                them.
            slots: the host of each slot.
            addresses: host to host:port, of the hosts that may send slices.
            domains: host to its failure domains; near hosts are preferred as senders.

        Returns:
            "step": the step. "regions": the parts of committed slices to read, a dict
            for each host that holds them. "digests": for each committed slice that is
            read, maps its key to its digest.

        Raises:
            NotPlanned: the step is not the newest commit, its leaves do not fit the
                layout, the digests that hosts reported do not match the commit, or a
                needed slice is on none of the hosts in `addresses`.
        """
        plan = self._plan(step, wanted, slots, addresses.keys(), domains)
        assert self._located is not None
        known = self._located.digests
        return {
            "step": step,
            "regions": regions_to(plan, addresses, host),
            "digests": {key: known[key] for key in plan.read_by(host)},
        }

    def _plan(
        self,
        step: int,
        wanted: Layout,
        slots: Sequence[str],
        alive: Collection[str],
        domains: Mapping[str, str],
    ) -> RestorePlan:
        self._settle()
        located, layout = self._located, self._layout
        if located is None or layout is None or located.commit.step != step:
            newest = "none" if located is None else f"step {located.commit.step}"
            raise NotPlanned(f"the newest commit in memory is {newest}, not {step}")
        asked = wanted.digest, *sorted(alive)
        if self._planned is not None and self._planned[0] == asked:
            return self._planned[1]
        holdings = inventory_of(layout, located.holders)
        try:
            plan = plan_restore(
                holdings,
                wanted,
                slots=slots,
                alive=alive,
                domains=domains,
            )
        except ValueError as error:
            raise NotPlanned(str(error)) from error
        if not isinstance(plan, RestorePlan):
            raise NotPlanned(plan.reason)
        self._planned = asked, plan
        return plan
