"""The shares in force as a commit records them, and how a run goes on with them.

Nodes are known by the hosts that they are: a run goes on with the recorded shares, and
with what was learned of the hosts that are still there; where a host is new, the search
for shares is open again. Pure; must not know devices, files or who measures.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from dtft.balance import Balance, Counts, Microbatches, Rules, Tried, UnitTimes

ITEM = "balance"
"""Its name among what a checkpoint holds beside arrays."""


@dataclass(frozen=True, kw_only=True)
class Begin:
    """What a run begins with."""

    balance: Balance[Counts]
    is_recorded: bool
    """Whether the shares are those of the commit."""
    unknown: tuple[str, ...]
    """Nodes of which nothing is known."""


def node_names(hosts_of: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """A name for every replica, by its hosts.

    Args:
        hosts_of: the hosts of each replica, one or several.

    >>> node_names([["a"], ["b", "c"], ["d"], ["d"]])
    ('a', 'b+c', 'd', 'd.1')
    """
    seen: Counter[str] = Counter()
    names: list[str] = []
    for hosts in hosts_of:
        name = "+".join(dict.fromkeys(hosts))
        names.append(f"{name}.{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return tuple(names)


def to_items(balance: Balance[Counts], names: Sequence[str]) -> dict[str, Any]:
    """What a checkpoint records: JSON, from which `begin` goes on."""
    recorded = {
        "policy": balance.rules.policy,
        "nodes": list(names),
        "shares": balance.division.tolist(),
        "weights": balance.weights.tolist(),
        "tried": [
            {"load": list(load), **_arrays(times)}
            for load, times in balance.tried.times.items()
        ],
        "unchanged": balance.unchanged,
        "rounds": balance.rounds,
    }
    return {ITEM: recorded}


def begin(
    rules: Rules,
    work: Microbatches,
    names: Sequence[str],
    items: Mapping[str, Any],
) -> Begin:
    """The shares and the knowledge that a run begins with.

    Recorded shares are replayed where there are as many nodes, whoever they are.
    Otherwise shares are the best for what is known of the nodes (`exact`), or equal.

    Args:
        rules: that now hold.
        work: what is divided.
        names: of the nodes, see `node_names`.
        items: of the checkpoint that the run continues from; empty at the very start.
    """
    fresh = Balance.begin(work, rules)
    recorded = items.get(ITEM)
    if recorded is None or sum(recorded["shares"]) != work.total:
        # Of other microbatches nothing that was measured holds.
        return Begin(balance=fresh, is_recorded=False, unknown=tuple(names))
    tried = _known(recorded, names)
    known = dict(zip(names, tried.known, strict=True))
    unknown = tuple(name for name in names if not known[name])
    shares = np.asarray(recorded["shares"], np.int64)
    weights, replayed = np.asarray(recorded["weights"], float), True
    if not _fit(shares, work):
        any_known = rules.policy == "exact" and len(unknown) < len(names)
        speeds = tried.speeds()
        best = work.best(speeds.unit_s, speeds.fixed_s)
        shares = best if any_known else fresh.division
        weights, replayed = fresh.weights, False
    same = recorded["nodes"] == list(names) and recorded["policy"] == rules.policy
    balance = Balance(
        work=work,
        rules=rules,
        division=shares,
        weights=weights,
        tried=tried,
        unchanged=recorded["unchanged"] if same and replayed else 0,
        rounds=recorded["rounds"],
    )
    return Begin(balance=balance, is_recorded=replayed, unknown=unknown)


def _arrays(times: UnitTimes) -> dict[str, list[float]]:
    return {it.name: getattr(times, it.name).tolist() for it in fields(UnitTimes)}


def _known(recorded: Mapping[str, Any], names: Sequence[str]) -> Tried:
    """What is known of the nodes, found by their names."""
    place = {name: index for index, name in enumerate(recorded["nodes"])}

    def here(values: Sequence[float]) -> Any:
        found = [values[place[name]] if name in place else 0 for name in names]
        return np.asarray(found, float)

    times: dict[tuple[float, ...], UnitTimes] = {}
    for row in recorded.get("tried", ()):  # commits before it was recorded have shares
        arrays = {it.name: here(row[it.name]) for it in fields(UnitTimes)}
        arrays["num_steps"] = arrays["num_steps"].astype(np.int64)
        times[tuple(here(row["load"]).tolist())] = UnitTimes(**arrays)
    return Tried(num_nodes=len(names), times=times)


def _fit(shares: Counts, work: Microbatches) -> bool:
    if shares.size != work.num_nodes:
        return False
    most = work.total if work.cap is None else np.asarray(work.cap)
    return bool((shares <= most).all())
