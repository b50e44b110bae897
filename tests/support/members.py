"""Members of a job without agents: hosts on one loop and one store."""

from dtft.elastic.assignment import HostRecord
from dtft.elastic.store.membership import Membership
from dtft.elastic.store.memory import MemoryStore
from dtft.elastic.store.view import View, read_view
from tests.support.desks import LEASE_S, TICK_S, record_of
from tests.support.virtual_loop import VirtualLoop, VirtualMirrors
from tests.support.virtual_world import Door


class Host:
    """One member and what it heard."""

    def __init__(self, cluster: "Cluster", name: str) -> None:
        self.loop, self.door = cluster.loop, Door(cluster.store)
        self.views: list[View] = []
        self.lapses: list[str] = []
        """Incarnations under which it registers anew."""
        self.up: list[bool] = []
        self.replaced: list[HostRecord] = []
        self.ticks = True
        self.member = Membership(
            *(self.door, VirtualMirrors(self.door, self.loop), "job"),
            *(record_of(name), cluster.lease_s, self.loop),
            on_view=self.views.append,
            on_lapse=lambda: self.lapses.append(self.member.record.incarnation),
            on_store=self.up.append,
            on_replaced=self.replaced.append,
        )
        self.member.claims = {"fingerprint": b"known"}
        self.member.start()
        self._tick()

    def _tick(self) -> None:
        if self.ticks:
            self.member.tick()
        self.loop.call_later(TICK_S, self._tick)

    @property
    def view(self) -> View:
        """What it knows of the job."""
        return self.member.view


class Cluster:
    """Hosts of one job and their store."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.loop, self.lease_s = VirtualLoop(), lease_s
        self.store = MemoryStore(self.loop.now)
        self.hosts: list[Host] = []

    def add(self, name: str) -> Host:
        """One host more."""
        self.hosts.append(Host(self, name))
        return self.hosts[-1]

    def empty(self) -> None:
        """The store is killed and comes back without data, and with new leases."""
        self.store = MemoryStore(self.loop.now)
        for _ in range(100):  # the numbers of the old ones are none
            self.store.revoke(self.store.grant(1.0))
        for host in self.hosts:
            host.door.store = self.store

    @property
    def view(self) -> View:
        """What the store says now."""
        return read_view(self.store, "job")[0]

    def lead(self, host: Host) -> View:
        """A host becomes leader."""
        host.member.campaign()
        self.loop.turn(0.1)
        assert host.view.leader == host.member.record.host
        return host.view
