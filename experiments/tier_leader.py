"""The leader of `memory_tier_vs_orbax.py`'s agents: commits steps, plans the restore.

Decides with the pure functions of dtft's own leader; a commit is recorded in etcd. It
knows no faults: the experiment tells it when a formation begins.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtft.checkpoint.managers import AgentLink, LinkClosed, listen_for_links
from dtft.checkpoint.replication import Commit, CopyPlacement, StepTracker, place_copies
from dtft.checkpoint.state import Layout
from dtft.elastic.leader import RecoveryDecision, decide, fetches_for
from dtft.elastic.store import Store
from experiments.tier_agent import leader_socket


class Leader:
    """Answers the agents' messages, each link on a thread of its own."""

    def __init__(
        self, directory: Path, num_slots: int, copies: int, store: Store
    ) -> None:
        """Listens for agents."""
        self._num_slots, self._copies, self._store = num_slots, copies, store
        self._key = f"/{directory.name}/commit"
        self._condition = threading.Condition(threading.RLock())
        self._links: dict[int, AgentLink] = {}
        self._hosts: dict[int, str] = {}
        self._addresses: dict[str, str] = {}
        self._commits: list[Commit] = []
        self._layout: Layout | None = None
        self._epoch = 0
        self.error = ""
        """What went wrong here, if anything."""
        self.decision: RecoveryDecision | None = None
        self.outcomes: dict[str, dict[str, Any]] = {}
        """Host to what its restore came to."""
        self.begin_formation()
        self._listener = listen_for_links(leader_socket(directory))
        threading.Thread(target=self._accept, daemon=True).start()

    def begin_formation(self) -> None:
        """New trainers will come, one for each slot."""
        with self._condition:
            self._epoch += 1
            self._layouts: dict[int, Layout] = {}
            self._replies: dict[str, dict[str, Any]] = {}
            self._trackers: dict[int, StepTracker] = {}
            self._placement: CopyPlacement | None = None
            self.outcomes = {}

    def wait_for(self, hosts: list[str], limit_s: float) -> None:
        """Waits until these hosts, in slot order, are connected.

        Raises:
            TimeoutError: names those that are not.
        """
        with self._condition:
            here = self._condition.wait_for(
                lambda: sorted(self._hosts.values()) == sorted(hosts), limit_s
            )
            if not here:
                missing = sorted(set(hosts) - set(self._hosts.values()))
                raise TimeoutError(f"{limit_s} s waiting for the agents of {missing}")

    def close(self) -> None:
        """Ends all links, and with them the agents."""
        self._listener.close()
        for link in list(self._links.values()):
            link.close()

    @property
    def pushed_bytes(self) -> int:
        """Bytes that every step sends between hosts."""
        pushes = self._placement.pushes if self._placement else ()
        return sum(piece.nbytes for push in pushes for piece in push.slices)

    # ----------------------------------------------------------------- messages

    def _accept(self) -> None:
        while True:
            try:
                link = AgentLink(self._listener.accept()[0])
            except OSError:
                return
            threading.Thread(target=self._hear, args=(link,), daemon=True).start()

    def _hear(self, link: AgentLink) -> None:
        try:
            while True:
                message = link.receive()
                handler = getattr(self, f"_on_{message.pop('op')}")
                with self._condition:
                    if handler == self._on_hello:
                        message["link"] = link
                    handler(**message)
                    self._condition.notify_all()
        except LinkClosed:
            link.close()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            raise

    def _tell_all(self, op: str, fields: Callable[[int], dict[str, Any]]) -> None:
        for slot, link in self._links.items():
            link.send(op, **fields(slot))

    def _common(self) -> dict[str, Any]:
        by_slot = [
            self._addresses[self._hosts[slot]] for slot in range(self._num_slots)
        ]
        return {"epoch": (self._epoch, 1), "addresses": by_slot}

    def _on_hello(self, host: str, slot: int, address: str, link: AgentLink) -> None:
        self._links[slot], self._hosts[slot] = link, host
        self._addresses[host] = address
        if self._commits:  # a spare waits in the lost host's place
            assert self._layout is not None
            link.send("expect", layout=self._layout.to_json())

    def _on_layout(self, host: str, slot: int, layout: str) -> None:
        del host
        self._layouts[slot] = Layout.from_json(layout)
        if len(self._layouts) < self._num_slots:
            return
        self._layout = self._layouts[0]
        self._placement = place_copies(self._layout, self._copies)
        if self._commits:
            self._tell_all("report", lambda _: {"epoch": (self._epoch, 1)})
        else:
            self._tell_all("begin", lambda _: self._common())

    def _on_holdings(self, host: str, slot: int, **reply: Any) -> None:
        del slot
        self._replies[host] = reply
        if len(self._replies) == self._num_slots:
            self._restore()

    def _restore(self) -> None:
        slots = [self._hosts[slot] for slot in range(self._num_slots)]
        self.decision = decision = decide(
            commits=self._commits,
            layout=self._layouts[0],
            holdings={host: r["holdings"] for host, r in self._replies.items()},
            slots=slots,
            storage_steps=[],
        )
        plan = decision.plan
        if decision.located is None or plan is None:
            raise RuntimeError(f"memory cannot restore: {decision.passed_over}")
        order = {
            "generation": self._epoch,
            "attempt": 1,
            "step": decision.step,
            "digests": dict(decision.located.digests),
            "items": {},
            "read": False,
        }
        self._tell_all(
            "restore",
            lambda slot: {
                **self._common(),
                **order,
                **fetches_for(plan, self._addresses, slots[slot]),
            },
        )

    def _on_restored(self, host: str, slot: int, outcome: dict[str, Any]) -> None:
        del slot
        self.outcomes[host] = outcome
        if "error" in outcome:
            raise RuntimeError(f"{host}: {outcome['error']}")

    # ------------------------------------------------------------------ a commit

    def _on_staged(self, host: str, slot: int, step: int, digests: list[bytes]) -> None:
        del host
        self._tracker(step).staged(slot, digests)
        self._conclude(step)

    def _on_held(self, host: str, slot: int, step: int, source: int, root: str) -> None:
        del host
        self._tracker(step).held(source, slot, root)
        self._conclude(step)

    def _tracker(self, step: int) -> StepTracker:
        assert self._placement is not None
        new = StepTracker(self._layouts[0], self._placement, step)
        return self._trackers.setdefault(step, new)

    def _conclude(self, step: int) -> None:
        tracker = self._trackers[step]
        if not tracker.complete:
            return
        del self._trackers[step]
        commit = Commit(
            step=step,
            generation=self._epoch,
            attempt=1,
            root=tracker.root(),
            layout=tracker.layout.digest,
            holders=tuple(self._hosts[slot] for slot in range(self._num_slots)),
            copies=tracker.placement.effective_copies,
        )
        self._store.put(self._key, commit.to_json().encode())
        self._commits = [commit]
        self._tell_all("release", lambda _: {"step": step})
