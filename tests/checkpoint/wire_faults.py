"""Single faults on the wire, by the thousand: each is detected or survived.

    python -m tests.checkpoint.wire_faults --cases 3000 --seed 0

runs cases against real servers and holders, and prints a tally by kind of fault. A case
is *survived* if everything arrived and is right, *detected* if the receiver said that
it has not got it (and then got it once the fault was over). It is *silent* if wrong
bytes count as verified anywhere, and a *hang* if it outlasted its deadline.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import logging
import random
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from dtft.checkpoint import channel, fetch
from dtft.checkpoint.transport import connect, parse_address
from dtft.elastic.replication import Pusher
from dtft.elastic.restoring import restore_into
from tests.checkpoint.fault_proxy import Fault, FaultProxy, Kind, Place
from tests.checkpoint.hosts import (
    CHUNK,
    EPOCH,
    JOB,
    Host,
    digests_of,
    divided,
    hosts,
    order_after_loss,
    replicated,
)

LIMIT_S = 2.0
"""Deadline of a transfer with a fault in it."""
PUSH_S = 0.7
"""Deadline of a push with a fault in it."""
AGAIN_S = 30.0
"""Deadline of the transfer after it, which nothing disturbs but a busy machine."""
HANG_S = 20.0
"""When a transfer with a fault in it counts as a hang: its deadline, and what a busy
machine may add."""
STEP = 1
KINDS: tuple[Kind, ...] = (
    *("flip", "flip", "flip", "flip", "truncate", "reset", "drop", "duplicate"),
    *("reorder", "replay", "stall", "slow", "kill"),
)
SCENARIOS = ("fetch", "fetch", "push", "report", "two killed", "old connection")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one case ended."""

    fired: bool
    result: str
    """survived, detected, silent or hang"""
    seconds: float
    note: str = ""


class Bench:
    """Hosts that live through all cases: two sources, one that lost its memory, and a
    pair that pushes."""

    def __init__(self, replicas: list[Host], pair: list[Host]) -> None:
        """Stages a step where it is needed, and records a clean run of each."""
        self.lost, *self.peers = replicas
        self.sender, self.receiver = pair
        for host in replicas:
            host.stage(STEP)
        self._step, self._waited_s = STEP, 0.0
        self.places: dict[str, list[Place]] = {}
        self.old: dict[str, dict[Any, bytes]] = {}
        for scenario in ("fetch", "push", "report"):
            with self._proxy(scenario, None) as proxy:
                outcome = getattr(self, scenario)(proxy)
                assert outcome == "survived", (scenario, outcome)
                self.places[scenario] = list(proxy.places)
                self.old[scenario] = dict(proxy.messages)

    def _proxy(self, scenario: str, fault: Fault | None) -> FaultProxy:
        target = self.peers[0] if scenario == "fetch" else self.receiver
        return FaultProxy(target.address, fault)

    def case(self, number: int, seed: int) -> tuple[str, str, Outcome]:
        """Runs one case; returns its scenario, its kind of fault and its outcome."""
        rng = random.Random(f"{seed} {number}")
        scenario = rng.choice(SCENARIOS)
        base = "fetch" if scenario == "two killed" else scenario
        begun, self._waited_s = time.monotonic(), 0.0
        if scenario == "old connection":
            kind, result, fired = "replay", self.old_connection(rng), True
        else:
            kind = "kill" if scenario == "two killed" else rng.choice(KINDS)
            fault = self._fault(base, kind, rng)
            with self._proxy(base, fault) as proxy:
                result = (
                    self.two_killed(proxy)
                    if scenario == "two killed"
                    else getattr(self, base)(proxy)
                )
                fired = proxy.fired.is_set()
        seconds = time.monotonic() - begun
        wrong = [
            text
            for host in self._all()
            for text in host.wrong()
            if host is not self.lost or not result.startswith("lost")
        ]
        if wrong:
            result = "silent"
        elif (self._waited_s or seconds) > HANG_S:
            result = "hang"
        note = f"case {number}: {wrong[:2]}" if wrong else ""
        return (
            scenario,
            kind,
            Outcome(fired=fired, result=result, seconds=seconds, note=note),
        )

    def _all(self) -> list[Host]:
        return [self.lost, *self.peers, self.sender, self.receiver]

    def _fault(self, scenario: str, kind: Kind, rng: random.Random) -> Fault:
        fields = sorted({place.field for place in self.places[scenario]})
        field = rng.choice(fields)  # so that rare fields are hit as often as common
        place = rng.choice([p for p in self.places[scenario] if p.field == field])
        old = b""
        if kind == "replay":
            key = rng.choice(sorted(self.old[scenario]))
            old = self.old[scenario][key]
        return Fault(kind=kind, place=place, bit=rng.randrange(place.size * 8), old=old)

    # -------------------------------------------------------------- scenarios

    def fetch(self, proxy: FaultProxy) -> str:
        """Half of the slices through the proxy, half from another peer beside it."""
        outcome = self._restore([proxy.address, self.peers[1].address])
        if "error" not in outcome:
            return "survived"
        return self._again()

    def two_killed(self, proxy: FaultProxy) -> str:
        """Both peers die at the same moment."""
        with FaultProxy(self.peers[1].address) as other:
            proxy.on_fault = other.kill
            outcome = self._restore([proxy.address, other.address])
        if "error" not in outcome:
            return "survived"  # both had sent everything before
        return self._again()

    def _again(self) -> str:
        """What the leader does: it plans anew, from a holder that has not failed."""
        begun = time.monotonic()
        while True:
            outcome = self._restore([self.peers[1].address] * 2, AGAIN_S)
            if "error" not in outcome:
                return "detected"
            if time.monotonic() - begun > AGAIN_S:
                return f"lost: {outcome['error']}"

    def _restore(
        self, addresses: list[str], limit_s: float = LIMIT_S
    ) -> dict[str, Any]:
        order = order_after_loss(self.lost, self.peers[0], STEP)
        keys = order.transfer["keys"]
        half = [[k for k in keys if k.startswith("big")]]
        half.append([k for k in keys if k not in half[0]])
        transfers = [
            {"host": f"host-{i}", "address": address, "keys": some}
            for i, (address, some) in enumerate(zip(addresses, half, strict=True))
        ]
        digests = digests_of(self.lost, STEP)
        ordered = {"step": STEP, "digests": digests, "items": {}}
        ordered |= {"transfers": transfers}
        ordered |= {"generation": EPOCH[0], "attempt": EPOCH[1]}
        begun = time.monotonic()
        outcome = restore_into(self.lost.holder, ordered, "lost", JOB, limit_s)
        if limit_s == LIMIT_S:  # the one with the fault
            self._waited_s = time.monotonic() - begun
        return outcome

    def push(self, proxy: FaultProxy) -> str:
        """A step and the next one to the peer that hosts their copies."""
        first, second = self._step + 1, self._step + 2
        self._step = second
        (push,) = self.sender.holder.outgoing
        pusher = Pusher(self.sender.holder, push, proxy.address, JOB, EPOCH, PUSH_S)
        begun, self.receiver.held[:] = time.monotonic(), []
        for step in (first, second):
            self.sender.stage(step)
            pusher.offer(step)
        wanted = [(first, 0), (second, 0)]
        while wanted[-1] not in self.receiver.held:
            time.sleep(0.001)
            if time.monotonic() - begun > LIMIT_S:
                break
        pusher.close()
        held = self.receiver.held
        survived = all(one in held for one in wanted)
        for host in (self.sender, self.receiver):
            host.holder.drop_before(second, keep=set())
        return "survived" if survived else "detected"

    def report(self, proxy: FaultProxy) -> str:
        """Messages and their echoes, as control messages travel."""
        try:
            with connect(proxy.address, JOB, {"op": "echo"}, 0.5) as link:
                for number in range(4):
                    message = {"op": "staged", "n": number}
                    link.send(message, timeout_s=0.5)
                    answer, _ = link.receive(0.5)
                    if answer != message:
                        return "silent"
        except (OSError, TimeoutError):
            return "detected"
        return "survived"

    def old_connection(self, rng: random.Random) -> str:
        """Says again, word for word, what a client said on an earlier connection."""
        scenario = rng.choice(("push", "fetch", "report"))
        said = self.old[scenario]
        up = [said[key] for key in sorted(said) if key[:2] == (0, "up")]
        target = self.peers[0] if scenario == "fetch" else self.receiver
        before, heard = target.holder.holdings(), b""
        with socket.create_connection(parse_address(target.address), 5) as stranger:
            try:
                stranger.sendall(b"".join(up))
                stranger.shutdown(socket.SHUT_WR)
                while part := stranger.recv(65536):
                    heard += part
            except OSError as error:  # the server may hang up at any point
                if isinstance(error, TimeoutError):
                    return "hang"
        if target.holder.holdings() != before or len(heard) > 72:
            return "silent"
        return "detected"


Tally = collections.Counter[tuple[str, str, str]]


def run(
    cases: int, seed: int, folder: Path, workers: int = 4
) -> tuple[Tally, list[str]]:
    """Runs cases; returns how many ended how, and what is wrong.

    Cases mostly wait, so several run at a time, each worker on hosts of its own.
    """
    usual = (channel.SILENCE_S, fetch.BEGIN_S, fetch.RANGE_BYTES)
    channel.SILENCE_S, fetch.BEGIN_S, fetch.RANGE_BYTES = 0.4, 0.8, 8 * CHUNK
    try:
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            jobs = [
                pool.submit(_work, range(one, cases, workers), seed, folder / str(one))
                for one in range(workers)
            ]
            parts = [job.result() for job in jobs]
    finally:
        channel.SILENCE_S, fetch.BEGIN_S, fetch.RANGE_BYTES = usual
    tally = sum((part[0] for part in parts), Tally())
    return tally, [text for part in parts for text in part[1]]


def _work(numbers: range, seed: int, folder: Path) -> tuple[Tally, list[str]]:
    tally, wrong = Tally(), []
    (folder / "replicas").mkdir(parents=True)
    (folder / "pair").mkdir()
    with hosts(folder / "replicas", replicated(3)) as replicas:
        with hosts(folder / "pair", divided(2)) as pair:
            bench = Bench(replicas, pair)
            for number in numbers:
                scenario, kind, outcome = bench.case(number, seed)
                result = outcome.result if outcome.fired else "not reached"
                if outcome.result not in ("survived", "detected"):
                    result = outcome.result
                    wrong.append(f"{number} {scenario} {kind}: {outcome}")
                tally[scenario, kind, result] += 1
    return tally, wrong


def main() -> None:
    """Prints the tally; ends with 1 if a fault was silent or hung."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tally, wrong = run(options.cases, options.seed, Path(folder))
    for (scenario, kind, result), count in sorted(tally.items()):
        print(f"{scenario:15} {kind:10} {result:12} {count:6}")
    totals = collections.Counter[str]()
    for (_, _, result), count in tally.items():
        totals[result] += count
    print(f"seed {options.seed}, {options.cases} cases: {dict(sorted(totals.items()))}")
    print(f"wrong: {len(wrong)}; {time.monotonic() - begun:.0f} s")
    print("\n".join(wrong[:20]))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
