"""dtft's memory tier and Orbax's peer-to-peer checkpoints, interleaved in one run.

Four hosts on loopback keep the same states with the same trainer code: a replicated
one, one divided over `fsdp`, and ZeRO-1. Measured: what a save costs the training
thread and the step, how long until it is complete, and how long until every host has
the arrays back after one host's memory was lost. Beside it what the machine can do:
memory copies and raw TCP under the same load.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dtft.elastic.host.trainers import TUNABLES, with_streamed_copies
from dtft.elastic.processes import free_port
from dtft.elastic.store import EmbeddedEtcd, EtcdStore, Store
from experiments import report, tier_raw
from experiments.tier_figures import (
    FIGURES,
    Figures,
    median_figures,
    restoring_figures,
    saving_figures,
    summary,
)
from experiments.tier_hosts import OrbaxHosts, OurHosts
from experiments.tier_memory import AnonymousMemory
from experiments.tier_report import explain, figure, header, table_rows, targets
from experiments.tier_task import (
    LAYOUTS,
    NUM_HOSTS,
    Task,
    host_bytes,
    needed_bytes,
    num_rows,
)
from experiments.worlds import run_world

SIDES = ("ours", "orbax_p2p")
SIZES = {64: tuple(LAYOUTS), 512: tuple(LAYOUTS), 2048: ("fsdp", "zero1")}
"""MiB -> layouts of a full run."""
COPIES = 2
LOST = 1
"""The host whose memory is lost."""
MEMORY = Path("/dev/shm")
WORLD_S = 600.0
STUCK_S = 300.0
"""Orbax's hosts may wait for each other when a restore fails on one of them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured."""

    rounds: int
    """Times that both sides take turns; the medians over rounds are reported."""
    saves: int
    """Saves timed one by one in each round; the first is left out."""
    step_s: float
    """Wanted seconds of a step."""

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("saves", 2), ("step_s", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(
                    f"{name}={value} is too small. Allowed: {least} or more. Set "
                    f"--{name.replace('_', '-')} {least} or more."
                )


class Side:
    """One side's hosts in one round, from empty to restored."""

    def __init__(
        self, side: str, layout: str, mib: int, settings: Settings, store: Store
    ) -> None:
        """Starts what the side needs beside the trainers."""
        self._side, self._layout, self._mib = side, layout, mib
        self._settings = settings
        self._directory = Path(tempfile.mkdtemp(prefix="dtft-tier-", dir=MEMORY))
        if side == "ours":
            self._hosts = OurHosts(self._directory, NUM_HOSTS, COPIES, store)
        else:
            self._hosts = OrbaxHosts(self._directory, NUM_HOSTS)

    def measure(self) -> Figures:
        """Saves, loses a host, restores; what fails is recorded as `error`."""
        found: Figures = dict.fromkeys(FIGURES)
        try:
            saved = self._save(found)
            self._hosts.lose(LOST)
            self._restore(saved, found)
        except (TimeoutError, RuntimeError) as error:
            last_line = str(error).rstrip().rpartition("\n")[2]
            found["error"] = self._hosts.error or last_line
        return found

    def close(self) -> None:
        """Ends every process and frees the memory."""
        self._hosts.close()

    def _save(self, found: Figures) -> list[Figures]:
        saved, memory = self._world("save", WORLD_S)
        found |= saving_figures(saved)
        found["pushed_bytes"] = self._hosts.pushed_bytes
        found["arena_bytes"] = self._hosts.memory_bytes()
        off = memory.peaks([tuple(one["off_window"]) for one in saved])
        on = memory.peaks([tuple(one["on_window"]) for one in saved])
        found["peak_rss_anon_bytes"] = max(on)
        growths = [b - a for a, b in zip(off, on, strict=True)]
        found["rss_anon_growth_bytes"] = max(growths)
        return saved

    def _restore(self, saved: list[Figures], found: Figures) -> None:
        restored, memory = self._world("restore", STUCK_S)
        found |= restoring_figures(restored, saved)
        windows = [tuple(one["window"]) for one in restored]
        found["restore_peak_rss_anon_bytes"] = max(memory.peaks(windows))
        found |= self._hosts.restored(LOST)

    def _world(
        self, phase: str, limit_s: float
    ) -> tuple[list[Figures], AnonymousMemory]:
        task = Task(
            side=self._side,
            phase=phase,
            layout=self._layout,
            mib=self._mib,
            directory=str(self._directory),
            saves=self._settings.saves,
            step_s=self._settings.step_s,
        )
        memory = AnonymousMemory()
        keepers = self._hosts.pids()

        def watch(pids: list[int]) -> None:
            pairs = zip(pids, keepers, strict=True)
            memory.watch([[pid, *([own] if own else [])] for pid, own in pairs])

        self._hosts.begin()
        tunables = with_streamed_copies(os.environ.get(TUNABLES, ""))  # as agents do
        try:
            answers = run_world(
                "experiments.tier_trainer",
                [[task.to_json()]] * NUM_HOSTS,
                address=f"127.0.0.1:{free_port()}",
                deadline_s=limit_s,
                environment={TUNABLES: tunables},
                started=watch,
            )
        finally:
            memory.stop()
        return answers, memory


def measure_row(layout: str, mib: int, settings: Settings, store: Store) -> Figures:
    """One row: both sides in turns, and the machine's own speed after each turn."""
    needed, free = needed_bytes(layout, mib), free_bytes()
    if needed > free:
        error = f"needs about {needed >> 20} MiB of memory, free are {free >> 20}"
        blank = {**dict.fromkeys(FIGURES), "error": error}
        return {"layout": layout, "mib": mib, **{side: blank for side in SIDES}}
    rounds: dict[str, list[Figures]] = {side: [] for side in SIDES}
    for number in range(settings.rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            one = Side(side, layout, mib, settings, store)
            try:
                rounds[side].append(one.measure())
            finally:
                one.close()
            if side == "ours":
                size = host_bytes(layout, mib)
                rounds[side][-1] |= machine_speed(size, rounds[side][-1])
    medians = {side: median_figures(found) for side, found in rounds.items()}
    return {"layout": layout, "mib": mib, **medians}


def free_bytes() -> int:
    """Memory that the machine has free, by its own estimate."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/meminfo has no line MemAvailable")


def machine_speed(size: int, ours: Figures) -> Figures:
    """Copies as large as a snapshot; raw TCP as large and as loaded as the restore.

    While a lost host fetches, every other host loads its own copy: so do as many
    processes beside the raw connections.

    Args:
        size: bytes of the state on each host.
        ours: figures of a round; `flows` is taken out.
    """
    copied = tier_raw.memcpy_bytes_per_s(size, NUM_HOSTS, MEMORY)
    found = {"memcpy_bytes_per_s": copied, "memcpy_s": size / copied}
    found["local_bytes"] = size
    flows = ours.pop("flows", [])
    if flows:
        loads = [size] * (NUM_HOSTS - 1)
        rate = tier_raw.tcp_bytes_per_s(flows, loads, MEMORY)
        idle = tier_raw.tcp_bytes_per_s(flows)
        found |= {"raw_tcp_bytes_per_s": rate, "raw_tcp_s": sum(flows) / rate}
        found |= {"raw_tcp_unloaded_bytes_per_s": idle}
    return found


@contextlib.contextmanager
def private_store() -> Iterator[Store]:
    """An etcd for the commits, as a job on one machine has it."""
    with tempfile.TemporaryDirectory(prefix="dtft-tier-etcd-") as directory:
        etcd = EmbeddedEtcd(Path(directory))
        try:
            etcd.start()
            etcd.wait_ready(30.0)
            store = EtcdStore(etcd.address)
            yield store
            store.close()
        finally:
            etcd.stop()


def main() -> int:
    """Measures; prints the table and the targets; writes them for a full run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, help="one size only: of the global state")
    parser.add_argument("--json", type=Path, help="write the JSON object here")
    parser.add_argument("--rounds", type=int, default=3, help="turns of both sides")
    parser.add_argument("--saves", type=int, default=6, help="timed in each turn")
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds of a step")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        settings = Settings(
            rounds=options.rounds, saves=options.saves, step_s=options.step_s
        )
        sizes = SIZES
        if options.mib is not None:
            sizes = {options.mib: SIZES.get(options.mib, tuple(LAYOUTS))}
        for mib in sizes:
            num_rows(mib)
    except ValueError as error:
        parser.error(str(error))
    rows = []
    with private_store() as store:
        for mib, layouts in sizes.items():
            for layout in layouts:
                rows.append(measure_row(layout, mib, settings, store))
                print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(summary(rows), indent=1) + "\n")
    show(rows, settings, keep=options.mib is None)
    return 1 if any(row["ours"].get("error") for row in rows) else 0


def show(rows: list[Figures], settings: Settings, *, keep: bool) -> None:
    """Prints the table and the targets, and keeps them if the run was a full one."""
    notes = explain(rows, settings.rounds, settings.step_s)
    if keep:
        report.write(
            "memory_tier_vs_orbax",
            title="The memory tier beside Orbax's peer-to-peer checkpoints",
            command="python -m experiments.memory_tier_vs_orbax"
            f" --rounds {settings.rounds} --saves {settings.saves}"
            f" --step-s {settings.step_s:g}",
            header=header(),
            rows=table_rows(rows),
            figure=figure(rows),
            notes=notes,
        )
    else:
        print("\n".join(report.table(header(), table_rows(rows))))
    print("\n".join(target.line() for target in targets(rows)))


if __name__ == "__main__":
    raise SystemExit(main())
