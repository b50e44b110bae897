"""Hosts that live through thousands of single faults, and the transfers that are hit.

`wire_faults.py` runs the cases; `memory_faults.py` and `peer_processes.py` have faults
that are not on the wire, for the same hosts.
"""

import random
import socket
import time
from collections.abc import Callable
from typing import Any

from dtft.checkpoint.transport.dialing import parse_address
from dtft.checkpoint.transport.server import connect
from dtft.elastic.transfer.replication import Pusher
from dtft.elastic.transfer.restore_executor import restore_into
from tests.support.fault_proxy import Fault, FaultProxy, Kind, Place
from tests.support.hosts import (
    EPOCH,
    JOB,
    Host,
    digests_of,
    order_after_loss,
    wait_until,
)

LIMIT_S = 2.0
"""Deadline of a transfer with a fault in it."""
PUSH_S = 0.7
"""Deadline of a push with a fault in it."""
REPORT_S = 0.5
"""Deadline of a message with a fault in it."""
AGAIN_S = 30.0
"""Deadline of a transfer without one, which nothing disturbs but a busy machine."""
TRIES = 5
"""So often is something tried that nothing disturbs."""
STEP = 1


class Bench:
    """Hosts that live through all cases: two sources, one that lost its memory, and a
    pair that pushes."""

    def __init__(self, replicas: list[Host], pair: list[Host]) -> None:
        """Stages a step where it is needed, and records a clean run of each."""
        self.lost, *self.peers = replicas
        self.sender, self.receiver = pair
        for host in replicas:
            host.stage(STEP)
        self.step, self.waited_s = STEP, 0.0
        self.places: dict[str, list[Place]] = {}
        self.old: dict[str, dict[Any, bytes]] = {}
        for scenario in ("fetch", "push", "report"):
            proxy = self.undisturbed(scenario)
            self.places[scenario] = list(proxy.places)
            self.old[scenario] = dict(proxy.messages)

    def proxy(self, scenario: str, fault: Fault | None) -> FaultProxy:
        """A proxy before the host that serves in a scenario."""
        target = self.peers[0] if scenario == "fetch" else self.receiver
        return FaultProxy(target.address, fault)

    def undisturbed(self, scenario: str) -> FaultProxy:
        """A scenario without a fault; a busy machine may be silent for too long.

        Raises:
            AssertionError: it does not work.
        """
        outcome = ""
        for _ in range(TRIES):
            with self.proxy(scenario, None) as proxy:
                outcome = getattr(self, scenario)(proxy)
            if outcome == "survived":
                return proxy
        raise AssertionError(f"{scenario} without a fault: {outcome}")

    def fault(self, scenario: str, kind: Kind, rng: random.Random) -> Fault:
        """Somewhere in a scenario's messages; every field is hit equally often."""
        fields = sorted({place.field for place in self.places[scenario]})
        field = rng.choice(fields)
        place = rng.choice([p for p in self.places[scenario] if p.field == field])
        old = b""
        if kind == "replay":
            key = rng.choice(sorted(self.old[scenario]))
            old = self.old[scenario][key]
        return Fault(kind=kind, place=place, bit=rng.randrange(place.size * 8), old=old)

    def wrong(self) -> list[str]:
        """Copies on any host that count as verified and are not what was staged."""
        hosts = [self.lost, *self.peers, self.sender, self.receiver]
        return [text for host in hosts for text in host.wrong()]

    def still_works(self) -> None:
        """Everything again, without a fault.

        Raises:
            AssertionError: something does not arrive any more.
        """
        for scenario in ("fetch", "report"):
            self.undisturbed(scenario)
        assert self.push_again() == "detected"

    # -------------------------------------------------------------- scenarios

    def fetch(self, proxy: FaultProxy) -> str:
        """Half of the slices through the proxy, half from another peer beside it."""
        addresses = [proxy.address, self.peers[1].address]
        outcome = self.restore(addresses, _limit(proxy, LIMIT_S))
        return "survived" if "error" not in outcome else self.fetch_again()

    def two_killed(self, proxy: FaultProxy) -> str:
        """Both peers die at the same moment."""
        with FaultProxy(self.peers[1].address) as other:
            proxy.on_fault = other.kill
            outcome = self.restore([proxy.address, other.address])
        if "error" not in outcome:
            return "survived"  # both had sent everything before
        return self.fetch_again()

    def fetch_again(self) -> str:
        """What the leader does: it plans anew, from a holder that has not failed."""
        begun = time.monotonic()
        while True:
            outcome = self.restore([self.peers[1].address] * 2, AGAIN_S)
            if "error" not in outcome:
                return "detected"
            if time.monotonic() - begun > AGAIN_S:
                return f"lost: {outcome['error']}"

    def restore(
        self,
        addresses: list[str],
        limit_s: float = LIMIT_S,
        digests: dict[str, bytes] | None = None,
        epoch: tuple[int, int] = EPOCH,
    ) -> dict[str, Any]:
        """Has the host that lost its memory fetch from two peers.

        Args:
            addresses: of the two.
            limit_s: the deadline.
            digests: what the order says, if not what is right.
            epoch: of the order.
        """
        order = order_after_loss(self.lost, self.peers[0], STEP)
        keys = order.transfer["keys"]
        half = [[k for k in keys if k.startswith("big")]]
        half.append([k for k in keys if k not in half[0]])
        transfers = [
            {"host": f"host-{i}", "address": address, "keys": some}
            for i, (address, some) in enumerate(zip(addresses, half, strict=True))
        ]
        digests = digests or digests_of(self.lost, STEP)
        ordered = {"step": STEP, "digests": digests, "items": {}}
        ordered |= {"transfers": transfers, "read": True}
        ordered |= {"generation": epoch[0], "attempt": epoch[1]}
        begun = time.monotonic()
        outcome = restore_into(self.lost.holder, ordered, "lost", JOB, limit_s)
        if limit_s == LIMIT_S:  # the one with the fault
            self.waited_s = time.monotonic() - begun
        return outcome

    def refused(self, said: Callable[[dict[str, Any]], bool], **order: Any) -> bool:
        """Whether a restore fails for the reason that is `said`.

        On a busy machine it may fail because nobody answers in time: then once more.
        """
        for _ in range(TRIES):
            addresses = [peer.address for peer in self.peers]
            outcome = self.restore(addresses, AGAIN_S, **order)
            if "error" not in outcome:
                return False
            if said(outcome):
                return True
        return False

    def push(self, proxy: FaultProxy) -> str:
        """A step and the next one to the peer that hosts their copies."""
        limits = _limit(proxy, PUSH_S), _limit(proxy, LIMIT_S)
        if self.pushed(proxy.address, 2, *limits):
            return "survived"
        return self.push_again()

    def push_again(self) -> str:
        """The next step, which nothing disturbs, must arrive."""
        arrived = self.pushed(self.receiver.address, 1, AGAIN_S, AGAIN_S)
        return "detected" if arrived else "lost: no push arrives any more"

    def pushed(
        self, address: str, count: int, push_s: float, limit_s: float, age: int = 0
    ) -> bool:
        """Stages and pushes the next steps; whether all are there by a deadline.

        Args:
            address: of the receiver.
            count: how many steps.
            push_s: the deadline of one push.
            limit_s: the deadline of all.
            age: so many generations ago the sender was told its epoch.
        """
        (push,) = self.sender.holder.outgoing
        epoch = (EPOCH[0] - age, EPOCH[1])
        pusher = Pusher(self.sender.holder, push, address, JOB, epoch, push_s)
        begun, self.receiver.held[:] = time.monotonic(), []
        wanted = [(self.step + number, 0) for number in range(1, count + 1)]
        for step, _ in wanted:
            self.sender.stage(step)
            pusher.offer(step)
        self.step += count
        while wanted[-1] not in self.receiver.held:
            time.sleep(0.001)
            if time.monotonic() - begun > limit_s:
                break
        pusher.close()
        arrived = all(one in self.receiver.held for one in wanted)
        for host in (self.sender, self.receiver):
            host.holder.drop_before(self.step, keep=set())
        wait_until(lambda: not self.receiver.receiving, AGAIN_S)
        return arrived

    def report(self, proxy: FaultProxy) -> str:
        """Messages and their echoes, as control messages travel."""
        limit_s = _limit(proxy, REPORT_S)
        try:
            with connect(proxy.address, JOB, {"op": "echo"}, limit_s) as link:
                for number in range(4):
                    message = {"op": "staged", "n": number}
                    link.send(message, timeout_s=limit_s)
                    answer, _ = link.receive(limit_s)
                    if answer != message:
                        return "silent"
        except (OSError, TimeoutError):
            return "detected"
        return "survived"

    def old_connection(self, rng: random.Random) -> tuple[str, str, bool]:
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
                    return "replay", "hang", True
        if target.holder.holdings() != before or len(heard) > 72:
            return "replay", "silent", True
        return "replay", "detected", True

    def old_generation(self, rng: random.Random) -> tuple[str, str, bool]:
        """A sender, or a leader's order, that has not heard of a new generation."""
        age = rng.randrange(1, EPOCH[0] + 1)
        if rng.random() < 0.5:
            arrived = self.pushed(self.receiver.address, 1, PUSH_S, 0.05, age)
            return "push", "silent" if arrived else self.push_again(), True
        told = "is older than this host's"
        epoch = (EPOCH[0] - age, EPOCH[1])
        if not self.refused(lambda it: told in it["error"], epoch=epoch):
            return "order", "silent", True
        return "order", self.fetch_again(), True


def _limit(proxy: FaultProxy, with_fault_s: float) -> float:
    return AGAIN_S if proxy.fault is None else with_fault_s
