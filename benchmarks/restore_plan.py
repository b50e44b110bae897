"""How long placement and restore plans take on large clusters.

`python benchmarks/restore_plan.py [--hosts 10000] [--leaves 1000] [--copies 2]` prints
one JSON object per case: seconds for `place` and `plan_restore`, the number of routes
and the greatest sender load over the even one. A last line compares the slowest place +
plan_restore with the target of 2 s. No process but this one, and no arrays: everything
is decided from shapes.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dtft.checkpoint.replication import (
    CopyPlacement,
    HeldLeaves,
    Inventory,
    Lost,
    place_copies,
    plan_restore,
)
from dtft.checkpoint.state import Layout, Leaf, MeshLayout, partition_of

MAX_SECONDS = 2.0
RACK, FEED = 32, 2048
"""Hosts of a rack and of a power feed."""

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A commit on some hosts, and a restore onto others."""

    name: str
    old: dict[str, int]
    new: dict[str, int]
    spec: tuple[tuple[str, ...], ...] = (("fsdp",),)
    """Of two leaves in three; the third is on every host."""
    dead: int = 0
    """The first hosts, whose place spares take."""
    reverse: bool = False
    """The order of hosts changes."""
    racks: bool = False


def cases(hosts: int) -> list[Case]:
    """What can happen to a cluster of so many hosts (a multiple of 16)."""
    wide = {"fsdp": hosts}
    hybrid = {"replica": hosts // 8, "fsdp": 8}
    groups = {"replica": 2, "fsdp": hosts // 2}
    hybrid_8 = Case(name="one host lost, hybrid", old=hybrid, new=hybrid, dead=1)
    zero_1 = (("replica",),)
    return [
        hybrid_8,
        Case(name="one host lost, fsdp", old=wide, new=wide, dead=1),
        Case(name="one host lost, zero-1", old=hybrid, new=hybrid, spec=zero_1, dead=1),
        Case(name="order reversed, fsdp", old=wide, new=wide, reverse=True),
        Case(
            name="mesh changed, fsdp 8 to 16",
            old=hybrid,
            new={"replica": hosts // 16, "fsdp": 16},
        ),
        Case(name="shrunk to half, fsdp", old=wide, new={"fsdp": hosts // 2}),
        Case(name="grown by half", old=groups, new={"replica": 3, "fsdp": hosts // 2}),
        Case(
            name="grown by half, racks",
            old=groups,
            new={"replica": 3, "fsdp": hosts // 2},
            racks=True,
        ),
    ]


def layout_of(axes: dict[str, int], case: Case, num_leaves: int) -> Layout:
    """Leaves of many sizes, divisible by what the cases need."""
    num_slots = math.prod(axes.values())
    mesh = MeshLayout(
        axis_names=tuple(axes),
        axis_sizes=tuple(axes.values()),
        slots=tuple(range(num_slots)),
    )
    rows = math.lcm(*case.old.values(), *case.new.values())
    leaves = tuple(
        Leaf(
            path=f"leaf/{i}",
            shape=(rows, 64 + i),
            dtype="float32",
            spec=case.spec if i % 3 else (),
        )
        for i in range(num_leaves)
    )
    return Layout(mesh=mesh, leaves=leaves)


def measure(case: Case, num_leaves: int, copies: int) -> dict:
    """Times one case.

    Raises:
        RuntimeError: the plan says that something is lost, which no case should.
    """
    old = layout_of(case.old, case, num_leaves)
    new = layout_of(case.new, case, num_leaves)
    num_old, num_new = old.mesh.num_slots, new.mesh.num_slots
    hosts = [f"host-{i:05}" for i in range(max(num_old, num_new) + case.dead)]
    after = [*hosts[num_old : num_old + case.dead], *hosts[case.dead :]]
    slots = (after if case.dead else hosts)[:num_new]
    slots = slots[::-1] if case.reverse else slots
    alive = set(hosts[case.dead :])
    domains = (
        {host: f"{i // FEED}/{i // RACK}" for i, host in enumerate(hosts)}
        if case.racks
        else None
    )
    place_s, placement = _timed(lambda: place_copies(old, copies))
    holdings = held_by(placement, hosts[:num_old])
    plan_s, plan = _timed(
        lambda: plan_restore(holdings, new, slots=slots, alive=alive, domains=domains)
    )
    if isinstance(plan, Lost):
        raise RuntimeError(f"{case.name}: {plan.reason}")
    sent = plan.sent.values()
    return {
        "case": case.name,
        "hosts": [num_old, num_new],
        "leaves": num_leaves,
        "place_s": place_s,
        "plan_restore_s": plan_s,
        "routes": len(plan.routes.need),
        "senders": len(sent),
        "uneven": max(sent) * len(sent) / sum(sent),
    }


def held_by(placement: CopyPlacement, hosts: Sequence[str]) -> Inventory:
    """What the hosts of all slots, ascending, hold once every push has arrived."""
    mesh = placement.layout.mesh
    tables = tuple(
        HeldLeaves(
            leaves=table.leaves,
            spec=table.spec,
            holders=tuple(
                tuple(sorted(owners + targets))
                for owners, targets in zip(
                    partition_of(mesh, table.spec).owners, table.targets, strict=True
                )
            ),
        )
        for table in placement.tables
    )
    return Inventory(layout=placement.layout, hosts=tuple(hosts), tables=tables)


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    begun = time.perf_counter()
    result = work()
    return time.perf_counter() - begun, result


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Seconds for large plans.")
    parser.add_argument("--hosts", type=int, default=10_000, help="a multiple of 16")
    parser.add_argument("--leaves", type=int, default=1000)
    parser.add_argument("--copies", type=int, default=2)
    options = parser.parse_args()
    if options.hosts < 16 or options.hosts % 16:
        parser.error(f"--hosts {options.hosts} is not a multiple of 16.")
    slowest = 0.0
    for case in cases(options.hosts):
        found = measure(case, options.leaves, options.copies)
        slowest = max(slowest, found["place_s"] + found["plan_restore_s"])
        print(json.dumps({k: _short(v) for k, v in found.items()}), flush=True)
    verdict = "met" if slowest < MAX_SECONDS else "NOT met"
    print(
        f"slowest place + plan_restore at {options.hosts} hosts x {options.leaves} "
        f"leaves: {slowest:.2f} s (target {MAX_SECONDS:g} s): {verdict}"
    )


def _short(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
