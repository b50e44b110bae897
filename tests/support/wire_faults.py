"""Single faults on the wire and in memory, by the thousand: detected or survived.

    python -m tests.support.wire_faults --cases 5000 --seed 0

runs cases against real servers and holders, and prints a tally by kind of fault. A case
is *survived* if everything arrived and is right, *detected* if the receiver said that
it has not got it (and then got it once the fault was over). It is *silent* if wrong
bytes count as verified anywhere, a *hang* if it outlasted its deadline, and *lost* if
nothing arrives any more though the fault is over.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import logging
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax

from dtft.checkpoint.transport import connection, fetch
from tests.support.fault_bench import LIMIT_S, Bench
from tests.support.fault_proxy import Kind
from tests.support.hosts import CHUNK, divided, hosts, replicated
from tests.support.memory_faults import in_memory
from tests.support.peer_processes import killed_in_fetch, killed_in_push

HANG_S = 20.0
"""When a transfer with a fault in it counts as a hang: its deadline, and what a busy
machine may add."""
KINDS: tuple[Kind, ...] = (
    *("flip", "flip", "flip", "flip", "truncate", "reset", "drop", "duplicate"),
    *("reorder", "replay", "stall", "slow", "kill"),
)
OTHERS: dict[str, Callable[[Bench, random.Random], tuple[str, str, bool]]] = {
    "old connection": Bench.old_connection,
    "old generation": Bench.old_generation,
    "memory": in_memory,
    "killed in fetch": killed_in_fetch,
    "killed in push": killed_in_push,
}
"""Scenarios with faults of their own."""
SCENARIOS = (
    *("fetch", "fetch", "fetch", "push", "push", "report", "two killed"),
    *("memory", "memory", "killed in fetch", "killed in push"),
    *("old connection", "old generation"),
)
EVERY_FIELD = 3000
"""So many cases must flip a bit in each field of each scenario."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one case ended."""

    scenario: str
    kind: str
    """The fault; of a flip on the wire also the field."""
    result: str
    """survived, detected, not reached, silent, hang or lost."""
    waited_s: float
    """What the transfer with the fault in it took."""
    note: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return self.result in ("survived", "detected", "not reached")


def case(bench: Bench, number: int, seed: int) -> Outcome:
    """Runs one case."""
    rng = random.Random(f"{seed} {number}")
    scenario = rng.choice(SCENARIOS)
    bench.waited_s = 0.0
    if scenario in OTHERS:
        kind, result, fired = OTHERS[scenario](bench, rng)
    else:
        kind, result, fired = _on_the_wire(bench, scenario, rng)
    if not fired and result in ("survived", "detected"):
        result = "not reached"
    if wrong := bench.wrong():
        result = "silent"
    elif bench.waited_s > HANG_S:
        result = "hang"
    return Outcome(
        scenario=scenario,
        kind=kind,
        result=result.partition(":")[0],
        waited_s=bench.waited_s,
        note=f"case {number}: {wrong[:2]} {result}",
    )


def _on_the_wire(
    bench: Bench, scenario: str, rng: random.Random
) -> tuple[str, str, bool]:
    base = "fetch" if scenario == "two killed" else scenario
    kind: Kind = "kill" if scenario == "two killed" else rng.choice(KINDS)
    fault = bench.fault(base, kind, rng)
    with bench.proxy(base, fault) as proxy:
        run = bench.two_killed if scenario == "two killed" else getattr(bench, base)
        result = run(proxy)
        fired = proxy.fired.is_set()
    label = f"flip {fault.place.field}" if kind == "flip" else kind
    return label, result, fired


Tally = collections.Counter[tuple[str, str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What many cases came to."""

    tally: Tally
    """How many of each scenario and kind ended how."""
    wrong: list[str]
    late_s: float
    """How far a transfer outlasted its deadline at most; below 0: none did."""
    fields: set[tuple[str, str]]
    """Scenario and field of every place where a bit could flip."""

    @property
    def missing(self) -> list[str]:
        """Fields of which no bit was flipped."""
        hit = {(s, k) for s, k, result in self.tally if result != "not reached"}
        left = {(s, f) for s, f in self.fields if (s, f"flip {f}") not in hit}
        return sorted(f"{scenario}: {field}" for scenario, field in left)


def run(cases: int, seed: int, folder: Path, workers: int = 4) -> Found:
    """Runs cases.

    They mostly wait, so several run at a time, each worker on hosts of its own.
    """
    usual = (connection.SILENCE_S, fetch.BEGIN_S, fetch.RANGE_BYTES, fetch.STREAM_BYTES)
    connection.SILENCE_S, fetch.BEGIN_S = 0.4, 0.8
    fetch.RANGE_BYTES = fetch.STREAM_BYTES = 8 * CHUNK
    try:
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            jobs = [
                pool.submit(_work, range(one, cases, workers), seed, folder / str(one))
                for one in range(workers)
            ]
            parts = [job.result() for job in jobs]
    finally:
        connection.SILENCE_S, fetch.BEGIN_S, *sizes = usual
        fetch.RANGE_BYTES, fetch.STREAM_BYTES = sizes
    return Found(
        tally=sum((part.tally for part in parts), Tally()),
        wrong=[text for part in parts for text in part.wrong],
        late_s=max(part.late_s for part in parts),
        fields=set().union(*(part.fields for part in parts)),
    )


def _work(numbers: range, seed: int, folder: Path) -> Found:
    tally, wrong, late_s = Tally(), [], -LIMIT_S
    (folder / "replicas").mkdir(parents=True)
    (folder / "pair").mkdir()
    with hosts(folder / "replicas", replicated(3)) as replicas:
        with hosts(folder / "pair", divided(2)) as pair:
            bench = Bench(replicas, pair)
            for number in numbers:
                outcome = case(bench, number, seed)
                late_s = max(late_s, outcome.waited_s - LIMIT_S)
                if not outcome.good:
                    wrong.append(str(outcome))
                tally[outcome.scenario, outcome.kind, outcome.result] += 1
            bench.still_works()
            fields = {(s, p.field) for s in bench.places for p in bench.places[s]}
    return Found(tally=tally, wrong=wrong, late_s=late_s, fields=fields)


def main() -> None:
    """Prints the tally; ends with 1 if a fault was silent, hung or lost something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4, help="cases at a time")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    logging.disable(logging.CRITICAL)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found = run(options.cases, options.seed, Path(folder), options.workers)
    for (scenario, kind, result), count in sorted(found.tally.items()):
        print(f"{scenario:15} {kind:18} {result:12} {count:6}")
    totals = collections.Counter[str]()
    for (_, _, result), count in found.tally.items():
        totals[result] += count
    print(f"seed {options.seed}, {options.cases} cases: {dict(sorted(totals.items()))}")
    missing = found.missing if options.cases >= EVERY_FIELD else []
    print(f"fields of which no bit was flipped: {found.missing or 'none'}")
    print(f"latest end of a transfer: {found.late_s:+.2f} s from its deadline")
    print(f"wrong: {len(found.wrong)}; {time.monotonic() - begun:.0f} s")
    print("\n".join(found.wrong[:20]))
    raise SystemExit(bool(found.wrong or missing))


if __name__ == "__main__":
    main()
