"""Plays faults on a local cluster, from outside, by signals.

Reads the hosts' progress boards to find the moment, freezes the victims, makes sure the
moment has not passed, and kills. Knows processes and boards; must not know models, nor
take part in what it tests.
"""

import functools
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dtft.checkpoint.board import Board, Field
from dtft.elastic.etcd import EtcdStore
from dtft.elastic.faults import Fault, in_order
from dtft.elastic.inspect_job import Observer
from dtft.elastic.journal import read_events
from dtft.elastic.launch import LocalCluster
from dtft.elastic.membership import job_key
from dtft.elastic.scale_job import scale

POLL_S = 0.0003
STORE_AWAY_S = 5.0
FIRST_EXPORT_S = 50.0  # below `timeouts.stage`: held trainers are not taken for hung
SCALE_S = 240.0
_PHASE_FIELD: dict[str, Field] = {
    "replicate": "replicating",
    "commit": "committing",
    "export": "exporting",
    "recovery": "recovering",
}


@dataclass(kw_only=True)
class Strike:
    """One fault as it really happened."""

    fault: Fault
    hosts: tuple[str, ...] = ()
    at: float = 0.0
    """Wall-clock time of the blow."""
    finished: int = 0
    """Last step that any trainer had finished at that moment."""
    computing: int = 0
    committed: int = 0
    steps_seen: tuple[int, int] = (0, 0)
    """kill-store: last finished step when the store went, and when it came back."""
    corrupted_bytes: int = 0
    reply: dict[str, Any] = field(default_factory=dict)
    """scale: what whoever asked was told; empty until then."""


class Striker(threading.Thread):
    """Plays the faults, one after the other, while a cluster runs."""

    def __init__(
        self,
        cluster: LocalCluster,
        faults: Sequence[Fault],
        *,
        seed: int,
        rejoin_s: float | None,
    ) -> None:
        """`rejoin_s`: seconds after which a killed host comes back, or None."""
        super().__init__(daemon=True)
        self._cluster = cluster
        self._faults = in_order(faults)
        self._random = random.Random(seed)
        self._rejoin_s = rejoin_s
        self._cancelled = threading.Event()
        self.strikes: list[Strike] = []
        self.error: str | None = None
        self._boards: dict[str, Board] = {}
        self._slots: tuple[str, ...] = ()
        self._read_at = 0.0

    def run(self) -> None:
        """Plays every fault."""
        pending = list(self._faults)
        corrupting: list[Fault] = []
        try:
            while pending and not self._cancelled.is_set():
                fault = pending.pop(0)
                if fault.kind == "corrupt":
                    corrupting.append(fault)
                    continue
                self._play(fault, corrupting)
                corrupting = []
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def stop(self) -> None:
        """Gives up faults that have not struck."""
        self._cancelled.set()

    @property
    def done(self) -> bool:
        """Every fault has struck, and every request for a size was answered."""
        expected = [fault for fault in self._faults if fault.kind != "corrupt"]
        open_ = [it for it in self.strikes if it.fault.kind == "scale" and not it.reply]
        return len(self.strikes) == len(expected) and not open_

    # ------------------------------------------------------------------ looking

    def _look(self) -> None:
        """Learns the slots anew, at most every 20 ms."""
        if time.monotonic() < self._read_at + 0.02:
            return
        self._read_at = time.monotonic()
        for event in read_events(self._cluster.options.run_directory):
            if event["event"] == "assignment":
                self._slots = tuple(event["slots"])

    def _board(self, host: str) -> Board | None:
        if host not in self._boards:
            path = self._cluster.memory_directory(host) / "board"
            if not path.exists() or path.stat().st_size == 0:
                return None
            self._boards[host] = Board(path)
        return self._boards[host]

    def _cell(self, host: str, name: Field) -> int:
        board = self._board(host)
        return board.get(name) if board else 0

    def _most(self, name: Field) -> int:
        hosts = list(self._cluster.agents)
        return max((self._cell(host, name) for host in hosts), default=0)

    def _victims(self, fault: Fault) -> tuple[str, ...]:
        if fault.kind == "kill-leader":
            return (self._leader(),)
        if fault.kind == "kill-store":
            return ()
        return tuple(self._slots[slot] for slot in fault.slots)

    def _leader(self) -> str:
        store = EtcdStore(self._cluster.store_address)
        try:
            pair = store.get(job_key(self._cluster.options.job, "m/leader"))
        finally:
            store.close()
        if pair is None:
            raise RuntimeError("there is no leader to kill")
        return pair.value.decode()

    def _reached(self, fault: Fault) -> bool:
        if max(fault.slots, default=-1) >= len(self._slots):
            return False  # the job has not grown so far yet
        if fault.phase == "recovery":
            started = bool(self.strikes) or fault.step == 0
            return started and self._most("recovering") == 1
        if not self._slots or self._most("computing") < fault.step:
            return False
        if fault.phase in _PHASE_FIELD:
            reached = self._most(_PHASE_FIELD[fault.phase])
            return reached > 0 if fault.phase == "export" else reached >= fault.step
        return True

    # ----------------------------------------------------------------- striking

    def _play(self, fault: Fault, corrupting: Sequence[Fault]) -> None:
        while not self._cancelled.is_set():
            self._look()
            if self._reached(fault) and self._try(fault, corrupting):
                return
            time.sleep(POLL_S)

    def _try(self, fault: Fault, corrupting: Sequence[Fault]) -> bool:
        """Freezes, looks again, and strikes; False if the moment had passed."""
        if fault.kind == "kill-store":
            self._kill_store(fault)
            return True
        if fault.kind == "scale":
            self._scale(fault)
            return True
        victims = self._victims(fault)
        if any(host not in self._cluster.agents for host in victims):
            return False
        if fault.phase is None:
            time.sleep(self._random.uniform(0.0, 0.05))
        if fault.phase == "stored":
            self._hold_until_stored(victims)
        for host in victims:
            self._cluster.signal_host(host, signal.SIGSTOP)
        if fault.phase == "collective" or corrupting:
            time.sleep(0.15)  # the others arrive in the collective, and stay there
        elif fault.phase in _PHASE_FIELD and not self._reached(fault):
            for host in victims:
                self._cluster.signal_host(host, signal.SIGCONT)
            return False
        self._strike(fault, victims, corrupting)
        return True

    def _hold_until_stored(self, victims: tuple[str, ...]) -> None:
        """Stops the victims' trainers; their agents go on, and so does the export."""
        for pid in filter(None, (self._cell(it, "trainer_pid") for it in victims)):
            os.kill(pid, signal.SIGSTOP)
        end = time.monotonic() + FIRST_EXPORT_S
        while not self._cancelled.is_set():
            events = read_events(self._cluster.options.run_directory)
            if any(event["event"] == "export" and event["ok"] for event in events):
                return
            if time.monotonic() > end:
                raise TimeoutError(f"nothing was exported in {FIRST_EXPORT_S} s")
            time.sleep(0.05)

    def _strike(
        self, fault: Fault, victims: tuple[str, ...], corrupting: Sequence[Fault]
    ) -> None:
        strike = Strike(fault=fault, hosts=victims)
        for other in corrupting:
            for host in self._victims(other):
                strike.corrupted_bytes += self._corrupt(host)
        strike.finished = self._most("finished")
        strike.computing, strike.committed = (
            self._most("computing"),
            self._most("committed"),
        )
        strike.at = time.time()
        if fault.kind == "kill-trainer":
            self._kill_trainers(victims)
        else:
            for host in victims:
                self._boards.pop(host, None)
                self._cluster.kill_host(host)
                self._come_back(host)
        self.strikes.append(strike)

    def _kill_trainers(self, victims: tuple[str, ...]) -> None:
        for host in victims:
            os.kill(self._cell(host, "trainer_pid"), signal.SIGKILL)
            self._cluster.signal_host(host, signal.SIGCONT)

    def _come_back(self, host: str) -> None:
        if self._rejoin_s is not None:
            start = functools.partial(self._cluster.start_host, host)
            timer = threading.Timer(self._rejoin_s, self._cluster.call_soon, (start,))
            timer.daemon = True
            timer.start()

    def _corrupt(self, host: str) -> int:
        """Flips one byte in every 4 KiB of a host's arena; returns how many."""
        flipped = 0
        memory_directory = self._cluster.memory_directory(host)
        for path in (*memory_directory.glob("arena*"), memory_directory / "reserve"):
            if not path.exists():
                continue
            with open(path, "r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
                places = range(0, len(memory), 4096)
                for place in places:
                    memory[place] ^= 0xFF
                memory.close()
            flipped += len(places)
        return flipped

    def _scale(self, fault: Fault) -> None:
        """Asks as `dtft scale` does; other faults may strike while it is waited for."""
        strike = Strike(fault=fault, at=time.time())
        strike.finished, strike.committed = (
            self._most("finished"),
            self._most("committed"),
        )
        self.strikes.append(strike)
        threading.Thread(target=self._ask, args=(strike,), daemon=True).start()

    def _ask(self, strike: Strike) -> None:
        cluster = self._cluster
        store = EtcdStore(cluster.store_address)
        try:
            observer = Observer(
                store, cluster.store_address, cluster.options.job, cluster.secret
            )
            strike.reply = scale(observer, strike.fault.replicas, SCALE_S)
        except Exception as error:
            strike.reply = {"error": str(error)}
            if all(fault.kind == "scale" for fault in self._faults):
                self.error = f"{strike.fault}: {error}"  # nothing else is to blame
        finally:
            store.close()

    def _kill_store(self, fault: Fault) -> None:
        strike = Strike(fault=fault, at=time.time())
        strike.finished, strike.committed = (
            self._most("finished"),
            self._most("committed"),
        )
        self._cluster.etcd.kill()
        time.sleep(STORE_AWAY_S)
        strike.steps_seen = (strike.finished, self._most("finished"))
        self._cluster.call_soon(self._cluster.etcd.start)
        self.strikes.append(strike)
