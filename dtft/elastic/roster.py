"""Which hosts the leader counts on: connected, known dead, shut out.

Only keeps sets; what a loss leads to is the leader's business.
"""

from collections.abc import Mapping

from dtft.elastic.roles import Assignment, HostRecord


class Roster:
    """The hosts of a job as its leader sees them."""

    def __init__(self, now: float, grace_s: float) -> None:
        """For `grace_s` seconds registered hosts may still be connecting."""
        self.connected: set[str] = set()
        self._dead: set[str] = set()
        self._evicted: set[str] = set()
        self._grace_until = now + grace_s

    def lose(self, host: str, registered: Mapping[str, HostRecord]) -> bool:
        """A host has died; False if that was known."""
        if host not in self.connected:
            return False
        self.connected.discard(host)
        if host in registered:
            self._dead.add(registered[host].incarnation)
        return True

    def evict(self, host: str) -> None:
        """A host that does not answer gets no slot any more in this job."""
        self._evicted.add(host)

    def expected(self, registered: Mapping[str, HostRecord], now: float) -> set[str]:
        """Hosts to hear before anything is decided."""
        if now > self._grace_until:
            return set(self.connected)
        connecting = {
            host
            for host, record in registered.items()
            if record.incarnation not in self._dead and host not in self._evicted
        }
        return self.connected | connecting

    def usable(self, registered: Mapping[str, HostRecord]) -> list[HostRecord]:
        """Hosts that may be given a slot."""
        return [
            registered[host]
            for host in sorted(self.connected - self._evicted)
            if host in registered and registered[host].incarnation not in self._dead
        ]


def registered_anew(
    before: Mapping[str, HostRecord], now: Mapping[str, HostRecord]
) -> set[str]:
    """Hosts that are registered now and were not, or were in an earlier life."""
    return {
        host
        for host, record in now.items()
        if host not in before or before[host].incarnation != record.incarnation
    }


def lost(host: str, *assignments: Assignment | None) -> str:
    """Names a lost host by its slot, as the first assignment that has it says."""
    for assignment in assignments:
        if assignment is not None and host in assignment.slots:
            return f"{host} (slot {assignment.slots.index(host)}) was lost"
    return f"{host} was lost"
