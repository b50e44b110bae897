"""``python -m tests.simulation``: runs the simulation from the command line.

``--random N --seed S --jobs J``: N random schedules. ``--matrix``: every kind of fault.
``--replay SEED [--trace]``: one schedule again, event by event. ``--scale 1000 4000``:
what commits and rendezvous cost a leader of so many hosts.
"""

import argparse
import gc
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterable

from tests.simulation.faults import matrix
from tests.simulation.runs import Outcome, run, run_seed, tidy


def main() -> int:
    """Runs what the arguments ask for; returns the exit code."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets has to be the same
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(
            sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        )
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument("--part", default="", help="only matrix entries with this text")
    parser.add_argument("--first", type=int, help="only so many of the matrix")
    parser.add_argument("--shuffle", type=int, help="seed of the matrix's order")
    parser.add_argument(
        "--replay", metavar="SEED", help="a seed, or mNUMBER of the matrix"
    )
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--shown", type=int, default=20, help="failures shown in full")
    parser.add_argument("--scale", type=int, nargs="*", metavar="HOSTS")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    gc.disable()
    if asked.replay is not None:
        return _replay(asked.replay, asked.trace)
    if asked.scale is not None:
        from tests.simulation.scale import report

        return report(asked.scale or [1000, 4000], profiled=asked.profile)
    if asked.matrix:
        names = [
            str(number)
            for number, (sizes, faults) in enumerate(matrix())
            if asked.part in f"{faults[0].text()} spares={sizes['spares']}"
        ]
        if asked.shuffle is not None:
            random.Random(asked.shuffle).shuffle(names)
        names = names[: asked.first]
        return _many(_matrix_entry, names, asked.jobs, asked.seconds, asked.shown)
    seeds = [str(seed) for seed in range(asked.seed, asked.seed + asked.random)]
    return _many(_random_entry, seeds, asked.jobs, asked.seconds, asked.shown)


def _random_entry(name: str) -> Outcome:
    tidy()
    return run_seed(int(name))


def _matrix_entry(name: str) -> Outcome:
    tidy()
    sizes, faults = _all_entries()[int(name)]
    return run(int(name), sizes, faults)


_entries: list = []


def _all_entries() -> list:
    if not _entries:
        _entries.extend(matrix())
    return _entries


def _replay(name: str, trace: bool) -> int:
    show: Callable[[str], None] | None = print if trace else None
    if name.startswith("m"):
        sizes, faults = _all_entries()[int(name[1:])]
        outcome = run(int(name[1:]), sizes, faults, trace=True, show=show)
    else:
        outcome = run_seed(int(name), trace=True, show=show)
    _show(outcome)
    print(f"trace {outcome.trace_hash}")
    return int(bool(outcome.violations))


def _show(outcome: Outcome) -> None:
    print(
        f"seed {outcome.seed}: {outcome.virtual_s:.1f} virtual s, {outcome.events} "
        f"events, {outcome.commits} commits, result {outcome.result or 'none'}"
    )
    for fault in outcome.faults:
        print(f"  fault {fault}")
    for violation in outcome.violations:
        print(f"  VIOLATION {violation}")
    sys.stdout.flush()


def _many(
    one: Callable[[str], Outcome],
    names: list[str],
    jobs: int,
    seconds: float,
    shown: int,
) -> int:
    begun, count, failing = time.monotonic(), 0, []
    virtual = 0.0
    for outcome in _outcomes(one, names, jobs):
        count += 1
        virtual += outcome.virtual_s
        if outcome.violations:
            failing.append(outcome.seed)
            if len(failing) <= shown:
                _show(outcome)
        if count % 1000 == 0:
            took = time.monotonic() - begun
            print(f"{count} runs, {len(failing)} failing, {took:.0f} s", flush=True)
        if time.monotonic() > begun + seconds:
            break
    took = time.monotonic() - begun
    print(
        f"{count} schedules, {virtual:.0f} virtual s in {took:.1f} s "
        f"({took * 1e3 / max(count, 1):.1f} ms each), {len(failing)} failing"
    )
    if failing:
        print("failing:", *failing[:200])
    return int(bool(failing))


def _outcomes(
    one: Callable[[str], Outcome], names: list[str], jobs: int
) -> Iterable[Outcome]:
    if jobs == 1:
        yield from map(one, names)
        return
    with multiprocessing.Pool(jobs, maxtasksperchild=200) as pool:
        yield from pool.imap_unordered(one, names, chunksize=10)


if __name__ == "__main__":
    sys.exit(main())
