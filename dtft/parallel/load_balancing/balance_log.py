"""Shares of the batch: their record in checkpoints, their log lines and their log file.

A share is the number of microbatches that a replica takes in a step. A round is a
number of steps with the same shares; its last steps are timed, and the next shares are
computed from these times. `to_items` makes the record for a checkpoint, and
`begin_balance` makes the first shares of a run from the record. At the start of a run
and at the end of each round, `BalanceLog` prints a line and appends a record to
`balance.jsonl`, on the leading process only. This module does not import JAX.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from dtft.balance import (
    Balance,
    Counts,
    Microbatches,
    Rules,
    SpeedEstimator,
    UnitTimes,
    waits,
)
from dtft.config import Disk
from dtft.parallel.row_assignment import Sharing

# Nodes are identified by their hosts. A run continues with the recorded shares, and
# with the measured times of hosts that are still in the job. With a new host the search
# for shares begins again.

ITEM = "balance"
"""Key of the checkpoint item (JSON) that has the shares and measured times."""


@dataclass(frozen=True, kw_only=True)
class Begin:
    """The shares with which a run begins, and the measured times of earlier rounds.

    A share is the number of microbatches that a replica takes in a step.
    """

    balance: Balance[Counts]
    is_recorded: bool
    """Whether the shares are the recorded shares of the checkpoint."""
    unknown: tuple[str, ...]
    """Names of the nodes (replicas) without measured times."""


def node_names(hosts_of: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Makes a unique name for every replica from the names of its hosts.

    The names of a replica's hosts, each once, are joined by `+`. A number is added if
    an earlier replica has the same name.

    Args:
        hosts_of: for each replica the names of its hosts, one or several.

    >>> node_names([["a"], ["b", "c"], ["d"], ["d"]])
    ('a', 'b+c', 'd', 'd.1')
    """
    names: dict[str, None] = {}
    for hosts in hosts_of:
        name = first = "+".join(dict.fromkeys(hosts))
        for number in itertools.count(1):
            if name not in names:
                break
            name = f"{first}.{number}"
        names[name] = None
    return tuple(names)


def to_items(balance: Balance[Counts], names: Sequence[str]) -> dict[str, Any]:
    """Makes the checkpoint item that records shares and measured times.

    `begin_balance` reads the item, which contains only values that JSON can hold.

    Args:
        balance: the current shares, and the times of the rounds so far.
        names: the name of each node (replica), from `node_names`.
    """
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


def begin_balance(
    rules: Rules,
    work: Microbatches,
    names: Sequence[str],
    items: Mapping[str, Any],
) -> Begin:
    """Makes the shares with which a run begins, from the items of a checkpoint.

    A share is the number of microbatches that a node (replica) takes in a step. If the
    checkpoint has no record of shares, or a record of another number of microbatches,
    the shares are equal and no measured times are used. Otherwise the run uses the
    first of these that is possible:

    * The recorded shares, if the record has a share for each node, and no share is
      above the node's largest allowed share.
    * The best shares for the recorded times, if the policy is `exact`, and the record
      has times of at least one node of this run.
    * Equal shares.

    Args:
        rules: how this run changes shares, such as the policy.
        work: the microbatches to divide.
        names: the names of the nodes, from `node_names`.
        items: the items of the checkpoint from which the run continues; empty in a new
            run.
    """
    fresh = Balance.begin(work, rules)
    recorded = items.get(ITEM)
    if recorded is None or sum(recorded["shares"]) != work.total:
        # Times of microbatches of another size say nothing about these microbatches.
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


def _known(recorded: Mapping[str, Any], names: Sequence[str]) -> SpeedEstimator:
    """Makes the speed estimates of nodes (replicas) from recorded times.

    The record has times for each division of the microbatches that was tried. A node
    that the record does not name counts as not measured: its share and its number of
    measured steps are 0 in each of these divisions.

    Args:
        recorded: the checkpoint item that `to_items` made.
        names: the names of this run's nodes.
    """
    place = {name: index for index, name in enumerate(recorded["nodes"])}

    def here(values: Sequence[float]) -> Any:
        found = [values[place[name]] if name in place else 0 for name in names]
        return np.asarray(found, float)

    times: dict[tuple[float, ...], UnitTimes] = {}
    for row in recorded.get("tried", ()):  # older checkpoints have no `tried`
        arrays = {it.name: here(row[it.name]) for it in fields(UnitTimes)}
        arrays["num_steps"] = arrays["num_steps"].astype(np.int64)
        times[tuple(here(row["load"]).tolist())] = UnitTimes(**arrays)
    return SpeedEstimator(num_nodes=len(names), times=times)


def _fit(shares: Counts, work: Microbatches) -> bool:
    if shares.size != work.num_nodes:
        return False
    most = work.total if work.cap is None else np.asarray(work.cap)
    return bool((shares <= most).all())


# --------------------------------------------- a line for each round, and balance.jsonl

BALANCE_FILE = "balance.jsonl"
SHOWN = 8
"""Largest number of nodes for which a log line lists the value of each node; for more
nodes it has the least, median and largest value."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Mean times of the timed and the untimed steps of a round, in one process.

    A round is a number of steps with the same division of the batch between replicas.
    The last steps of a round are timed, and a timed step takes longer.
    """

    step_s: float | None
    """Mean seconds of the steps that were not timed. This process's first step does not
    count. None if no step is left."""
    probe_s: float
    """Mean seconds of a timed step."""
    probes: int
    steps: int
    """Number of steps in the round, including the `probes` timed steps."""

    @property
    def share(self) -> float | None:
        """The time that timing costs in a round, as a fraction of an untimed round.

        The cost is how much longer the timed steps took than as many untimed steps. An
        untimed round has the same number of steps, each of `step_s` seconds. The
        fraction is at least 0; None if no untimed step was measured.
        """
        if self.step_s is None:
            return None
        lost = self.probes * (self.probe_s - self.step_s)
        return max(0.0, lost / (self.steps * self.step_s))


class BalanceLog:
    """Log of shares: a printed line and a record in `balance.jsonl` for each event.

    An event is the beginning of a run, or the end of a round of steps. Only the leading
    process prints and writes. A failed write prints a warning.
    """

    def __init__(
        self,
        run_directory: Path,
        epoch: dict[str, int],
        names: Sequence[str],
        *,
        leading: bool,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        """Sets the path of the log; opens no file.

        Args:
            run_directory: directory of `balance.jsonl`.
            epoch: fields that are added to every record: `generation`, the number of
                the assignment of hosts to slots, and `attempt`, the number of the
                trainers' start within this assignment.
            names: names of the nodes (replicas).
            leading: whether this process prints and writes; if not, the log does
                nothing.
            say: function that prints a line.
        """
        self._path, self._epoch, self._names = (
            run_directory / BALANCE_FILE,
            epoch,
            names,
        )
        self._leading, self._say = leading, say
        self._disk = Disk(run_directory)

    def began(self, step: int, begin: Begin, sharing: Sharing) -> None:
        """Logs the shares with which the run begins after step number `step`.

        `begin` has the shares and the measured times of earlier rounds. `sharing` has
        the sizes for the log line: microbatches of a step, rows of a microbatch, and a
        replica's largest share.
        """
        shares = begin.balance.division
        record = {
            "event": "begin",
            "step": step,
            "nodes": list(self._names),
            "shares": shares.tolist(),
            "recorded": begin.is_recorded,
            "unknown": list(begin.unknown),
        }
        self._write(record, begin_line(step, begin, sharing))

    def round(
        self,
        step: int,
        before: Balance[Counts],
        after: Balance[Counts],
        busy_s: np.ndarray,
        cost: Cost,
    ) -> None:
        """Logs a round (a number of steps with the same shares) that has ended.

        Args:
            step: number of the round's last step.
            before: shares and measured times before the round's end.
            after: shares and measured times for the next round, with the reason why
                shares change or not.
            busy_s: seconds of local work in the timed steps, `[steps, replicas]`.
            cost: seconds of timed and untimed steps.
        """
        judged = after.judgement
        assert judged is not None
        record = {
            "event": "round",
            "step": step,
            "round": after.rounds,
            "shares": before.division.tolist(),
            "next": after.division.tolist(),
            "busy_ms": _ms(busy_s.mean(0)),
            "waits_ms": _ms(waits(busy_s).mean(0)),
            "max_wait_ms": round(1e3 * judged.max_wait_s, 3),
            "mean_wait_ms": round(1e3 * judged.mean_wait_s, 3),
            "gain": round(judged.gain, 5),
            "threshold": round(judged.threshold, 5),
            "drifted": [self._names[node] for node in judged.drifted],
            "settled": after.settled,
            "probe_ms": round(1e3 * cost.probe_s, 3),
            "step_ms": None if cost.step_s is None else round(1e3 * cost.step_s, 3),
            "cost": None if cost.share is None else round(cost.share, 5),
        }
        line = round_line(step, before, after, busy_s, cost, self._names)
        self._write(record, line)

    def _write(self, record: dict[str, Any], line: str) -> None:
        if not self._leading:
            return
        self._disk.attempt(lambda: self._say(line))
        self._disk.attempt(lambda: self._append(record))

    def _append(self, record: dict[str, Any]) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps({**self._epoch, **record}) + "\n")


def begin_line(step: int, begin: Begin, sharing: Sharing) -> str:
    """Makes the log line that says with which shares a run begins.

    The line has the policy, the shares, and whether a checkpoint had these shares. If
    the run continues, it also names the nodes (replicas) without measured times.

    Args:
        step: number of the step that the run continues from; 0 for a new run.
        begin: the shares and measured times.
        sharing: the number and the rows of microbatches, and a replica's largest share.
    """
    why = f"recorded at step {step}" if begin.is_recorded else "to begin with"
    new = ""
    if step and begin.unknown:
        new = f"; {', '.join(begin.unknown)} not measured yet"
    policy, shares = begin.balance.rules.policy, begin.balance.division
    return (
        f"balance {policy}: {sharing.num_microbatches} microbatches of "
        f"{sharing.rows_each} rows, room for {sharing.most} on a replica; shares "
        f"{_row(shares)} {why}{new}"
    )


def round_line(
    step: int,
    before: Balance[Counts],
    after: Balance[Counts],
    busy_s: np.ndarray,
    cost: Cost,
    names: Sequence[str],
) -> str:
    """Makes the log line of a round, a number of steps with the same shares.

    The line has the shares of the round, and each replica's mean milliseconds of
    waiting for the slowest. It names replicas whose speed has changed relative to the
    others, and the fraction of time that measuring took. Last it has the next shares,
    or the reason why the shares stay the same.

    Args:
        step: number of the round's last step.
        before: shares and measured times before the round's end.
        after: shares and measured times for the next round, with the reason why shares
            change or not.
        busy_s: seconds of local work in the timed steps, `[steps, replicas]`.
        cost: seconds of timed and untimed steps.
        names: the name of each replica.
    """
    judged = after.judgement
    assert judged is not None
    longest = float(busy_s.max(1).mean())
    parts = [
        f"balance round {after.rounds} at step {step}: shares {_row(before.division)}",
        f"waits {_row(1e3 * waits(busy_s).mean(0))} ms (largest "
        f"{judged.max_wait_s / longest:.0%}, mean {judged.mean_wait_s / longest:.0%} "
        "of the longest work)",
    ]
    if judged.drifted:
        parts.append(f"another speed: {', '.join(names[it] for it in judged.drifted)}")
    if cost.share is not None:
        parts.append(f"measuring costs {cost.share:.1%}")
    return ", ".join(parts) + f": {_follows(after)}"


def _follows(after: Balance[Counts]) -> str:
    judged = after.judgement
    assert judged is not None
    if judged.changed:
        return f"next {_row(after.division)}"
    word = "settled" if after.settled else "unchanged"
    if not judged.threshold:
        return word
    if judged.gain <= 0:
        return f"{word}, these are the best for the times known"
    why = "noise" if judged.threshold > after.rules.least_gain else "least gain"
    return f"{word}, gain {judged.gain:.1%} below {judged.threshold:.1%} ({why})"


def _row(values: np.ndarray) -> str:
    texts = [f"{value:.0f}" for value in values]
    if len(texts) <= SHOWN:
        return " ".join(texts)
    middle = f"{np.median(values):.0f}"
    return f"{min(values):.0f}/{middle}/{max(values):.0f} (least/median/most)"


def _ms(seconds: np.ndarray) -> list[float]:
    return [round(1e3 * float(value), 3) for value in seconds]
