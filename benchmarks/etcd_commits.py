"""Writes commits to a private etcd with a small quota, exactly as a leader does.

    python benchmarks/etcd_commits.py --commits 100000 --quota-mib 8

Prints the commits per second and the size of etcd's database on the way; exit code 1
if a commit could not be recorded. One commit is written after the other, as in a job.
"""

import argparse
import json
import queue
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from dtft.checkpoint.replication import Commit
from dtft.elastic.assignment import HostRecord
from dtft.elastic.event_loop import EventLoop
from dtft.elastic.leader import Journal, Records
from dtft.elastic.store import (
    EmbeddedEtcd,
    EtcdStore,
    Membership,
    StoreAddress,
    ThreadMirrors,
    View,
)

LEASE_S = 5.0
TICK_S = 0.1
LIMIT_S = 60.0
"""A commit that is not recorded by then counts as lost."""


class Writing:
    """A leader without a job: its membership, and its records in the store."""

    def __init__(self, store: EtcdStore, directory: Path, hosts: int) -> None:
        """Registers, becomes leader, and commits nothing yet."""
        self._views: queue.Queue[View] = queue.Queue()
        self._recorded: queue.Queue[int] = queue.Queue()
        self._loop = EventLoop()
        self._hosts = tuple(f"host-{number}" for number in range(hosts))
        record = HostRecord(
            host="host-0", address="127.0.0.1:1", incarnation="a", joined_ns=0, pid=1
        )
        self.membership = Membership(
            *(store, ThreadMirrors(store), "commits", record, LEASE_S, self._loop),
            on_view=self._see,
            on_lapse=lambda: None,
            on_store=lambda up: None,
            on_replaced=lambda by: None,
        )
        self.membership.start()
        self._loop.post(self._tick)
        self._thread = threading.Thread(target=self._loop.run, daemon=True)
        self._thread.start()
        while (view := self._views.get(timeout=LIMIT_S)).leader != "host-0":
            pass
        self.records = Records(
            *(self.membership, view, [], self._loop),
            *(Journal(directory, "host-0"), "etcd"),
            on_written=lambda label, value: self._recorded.put(value.step),
            on_delayed=lambda label, value: None,
            on_committing=lambda step: None,
        )

    def _see(self, view: View) -> None:
        if view.leader is None:
            self.membership.campaign()
        self._views.put(view)

    def _tick(self) -> None:
        self.membership.tick()
        self._loop.call_later(TICK_S, self._tick)

    def commit(self, step: int) -> None:
        """Records one commit and waits for it.

        Raises:
            queue.Empty: it was not recorded in time.
        """
        commit = Commit(
            step=step,
            generation=1,
            attempt=1,
            root=f"{step:032x}",
            layout="0" * 32,
            holders=self._hosts,
            copies=2,
        )
        self._loop.post(self.records.commit, commit)
        while self._recorded.get(timeout=LIMIT_S) < step:
            pass

    def close(self) -> None:
        """Ends the threads."""
        self._loop.stop()
        self._thread.join(LIMIT_S)
        self.records.close()
        self.membership.close()


def run(
    commits: int, quota_bytes: int, hosts: int, directory: Path, every: int
) -> dict[str, Any]:
    """Writes the commits; returns the figures, printing some every `every` commits."""
    etcd = EmbeddedEtcd(directory, quota_bytes=quota_bytes)
    etcd.start()
    try:
        etcd.wait_ready(30.0)
        store = EtcdStore(StoreAddress.parse(etcd.address, private=True))
        writing = Writing(store, directory, hosts)
        begun, largest = time.monotonic(), 0
        for step in range(1, commits + 1):
            writing.commit(step)
            if step % every == 0 or step == commits:
                size, used = store.database_bytes()
                largest = max(largest, size)
                rate = step / (time.monotonic() - begun)
                print(
                    f"{step} commits, {rate:.0f}/s, database {size / 2**20:.2f} MiB "
                    f"({used / 2**20:.2f} MiB in use)",
                    flush=True,
                )
        recorded = writing.membership.commits()[0].step
        seconds = time.monotonic() - begun
        writing.close()
        store.close()
    finally:
        etcd.stop()
    return {
        "commits": commits,
        "recorded": recorded,
        "hosts": hosts,
        "quota_bytes": quota_bytes,
        "largest_database_bytes": largest,
        "commits_per_s": commits / seconds,
    }


def main() -> int:
    """Reads the arguments and prints the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commits", type=int, default=100_000)
    parser.add_argument("--quota-mib", type=float, default=8.0)
    parser.add_argument("--hosts", type=int, default=4, help="named in each commit")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    quota_bytes = int(options.quota_mib * 2**20)
    with tempfile.TemporaryDirectory(prefix="dtft-commits-") as directory:
        try:
            every = max(options.commits // 20, 1)
            found = run(
                options.commits, quota_bytes, options.hosts, Path(directory), every
            )
        except queue.Empty as error:
            print(f"a commit was not recorded: {error!r}", file=sys.stderr)
            return 1
    print(json.dumps(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
