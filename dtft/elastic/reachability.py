"""Finds pairs of hosts cut off from each other, and chooses hosts to leave out.

The leader reaches every host that answers a round, but two of these hosts may be cut
off from each other. Such hosts can neither train nor exchange copies. So after a
failure that a cut would explain, hosts report in their answer which peers' ports they
did not reach.
"""

import bisect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

Pair = tuple[str, str]
"""Two host names in sorted order."""

MOST_TRIED = 64
"""Number of peers that a host tries in a round; other peers follow in the next
round."""
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 30.0
"""Seconds between two tries of unreachable pairs while the job waits."""


def peers_to_try(
    host: str, hosts: Sequence[str], turn: int, most: int = MOST_TRIED
) -> list[str]:
    """The peers a host tries: its next neighbours, both ways, on a ring of all.

    The hosts are given in order.

    If one host tries another, the other tries the first as well. Successive turns use
    neighbours farther away, until all peers have been tried.

    >>> peers_to_try("c", "abcde", 0)
    ['a', 'b', 'd', 'e']
    >>> peers_to_try("c", "abcde", 0, most=2), peers_to_try("c", "abcde", 1, most=2)
    (['b', 'd'], ['a', 'e'])
    """
    at = bisect.bisect_left(hosts, host)
    is_new = at == len(hosts) or hosts[at] != host
    ring = [*hosts[:at], host, *hosts[at:]] if is_new else hosts
    longest, width = len(ring) // 2, max(most // 2, 1)
    turns = max(-(-longest // width), 1)
    first = (turn % turns) * width + 1
    near = {
        ring[(at + way * distance) % len(ring)]
        for distance in range(first, min(first + width, longest + 1))
        for way in (1, -1)
    }
    return sorted(near - {host})


def believed(
    tried: Mapping[str, Collection[str]], missed: Mapping[str, Collection[str]]
) -> set[Pair]:
    """The pairs that do not reach each other, from the reports of all hosts.

    One host's report may be wrong and does not suffice: either both hosts of a pair
    report it, or most hosts that tried a host, and at least two, report that host.

    Args:
        tried: per host that has answered, whom it was to try.
        missed: per host whom it did not reach.
    """
    callers: dict[str, set[str]] = {host: set() for host in tried}
    complaints: dict[str, set[str]] = {host: set() for host in tried}
    for host, peers in tried.items():
        for peer in set(peers) & tried.keys():
            callers[peer].add(host)
            if peer in missed.get(host, ()):
                complaints[peer].add(host)
    shunned = {
        host
        for host, by in complaints.items()
        if len(by) > 1 and 2 * len(by) > len(callers[host])
    }
    return {
        pair(host, peer)
        for peer, by in complaints.items()
        for host in by
        if peer in complaints[host] or peer in shunned
    }


def pair(one: str, other: str) -> Pair:
    """Two hosts in order."""
    return (one, other) if one < other else (other, one)


def set_aside(
    hosts: Collection[str], slots: Sequence[str], apart: Collection[Pair], leader: str
) -> list[str]:
    """The fewest-connected hosts to leave out, so that all others reach each other.

    One after the other, whoever most others do not reach. Of several, one that has no
    slot; else not the leader's; else the one with the highest slot.

    Args:
        hosts: that could have a slot.
        slots: the host of each slot until now.
        apart: pairs that do not reach each other.
        leader: the leader's host.

    >>> set_aside("abc", "ab", {("a", "b")}, "b")
    ['a']
    """
    left = [it for it in apart if it[0] in hosts and it[1] in hosts]
    slot_of = {host: slot for slot, host in enumerate(slots)}
    found: list[str] = []
    while left:
        counts: dict[str, int] = {}
        for host in itertools.chain.from_iterable(left):
            counts[host] = counts.get(host, 0) + 1

        def rank(host: str, counts: dict[str, int] = counts) -> tuple:
            slot = slot_of.get(host, -1)
            return counts[host], slot < 0, host != leader, slot, host

        worst = max(counts, key=rank)
        found.append(worst)
        left = [it for it in left if worst not in it]
    return found


class Reachability:
    """A leader's knowledge of unreachable pairs, over all its rounds."""

    def __init__(self) -> None:
        """Starts without an unreachable pair."""
        self.apart: set[Pair] = set()
        """Pairs that did not reach each other when they were tried last."""
        self.is_suspected = False
        """Since the last commit something has failed as it does when hosts are cut off
        from each other."""
        self._look_at, self._pause_s = 0.0, FIRST_PAUSE_S
        self._asked: dict[str, list[str]] | None = None
        self._missed: dict[str, list[str]] = {}
        """Of the look under way: whom hosts had to try, and whom they did not reach."""

    @property
    def is_to_be_tried(self) -> bool:
        """Whether hosts must report in the next round which peers they reach."""
        return self.is_suspected or bool(self.apart)

    def learn(
        self,
        tried: Mapping[str, Collection[str]],
        missed: Mapping[str, Collection[str]],
        now: float,
    ) -> set[Pair]:
        """Updates the pairs from hosts' reports; returns the new pairs.

        What trains well together is left so, whatever else does not get through: pairs
        count only from when a cut is suspected. One that was not tried now stays.
        """
        found = believed(tried, missed)
        left = {it for it in self.apart if it in found or not _tried(it, tried)}
        left = {it for it in left if set(it) <= tried.keys()}
        new = found - self.apart if self.is_suspected else set[Pair]()
        self.apart = left | new
        self._asked = None
        if new:
            self._pause_s = FIRST_PAUSE_S
        self._look_at = now + self._pause_s
        return new

    def committed(self) -> None:
        """Handles a commit: hosts with slots reach each other."""
        self.is_suspected = False

    def is_due(self, now: float) -> bool:
        """Whether hosts are to try again; counts as asked. The pause doubles."""
        if not self.apart or now < self._look_at:
            return False
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._look_at = now + self._pause_s
        return True

    def ask(self, connected: Collection[str]) -> dict[str, list[str]]:
        """The peers that hosts try again; pairs with an absent host are dropped."""
        self.apart = {it for it in self.apart if set(it) <= set(connected)}
        asked: dict[str, list[str]] = {}
        for one, other in sorted(self.apart):
            asked.setdefault(one, []).append(other)
            asked.setdefault(other, []).append(one)
        self._asked, self._missed = asked, {}
        return asked

    def answered(self, host: str, missed: list[str]) -> list[Pair]:
        """Pairs that reach each other again, once all hosts of a look have answered."""
        if self._asked is None or host not in self._asked:
            return []
        self._missed[host] = missed
        if self._missed.keys() != self._asked.keys():
            return []
        left = believed(self._asked, self._missed) & self.apart
        gone, self.apart = self.apart - left, left
        self._asked = None
        return sorted(gone)

    def text(self, host: str) -> str:
        """The peers that a host does not reach, for people; "" if none."""
        others = sorted(b if a == host else a for a, b in self.apart if host in (a, b))
        return f"{host} and {', '.join(others)} do not reach each other" * bool(others)


def _tried(it: Pair, tried: Mapping[str, Collection[str]]) -> bool:
    return it[1] in tried.get(it[0], ()) or it[0] in tried.get(it[1], ())


def try_all(
    probe: Callable[[str, Callable[[str], None]], None],
    addresses: Mapping[str, str],
    then: Callable[[list[str]], None],
) -> None:
    """Tries to reach all peers at once, each that is silent once more.

    Args:
        probe: as `Network.probe`.
        addresses: peer to its "host:port".
        then: takes the peers that were not reached.
    """
    waiting, missed = set(addresses), set[str]()

    def ask(peer: str, tries: int) -> None:
        def answered(state: str) -> None:
            if state == "silent" and tries > 1:
                ask(peer, tries - 1)
                return
            waiting.discard(peer)
            missed.update({peer} if state != "open" else ())
            if not waiting:
                then(sorted(missed))

        probe(addresses[peer], answered)

    if not addresses:
        then([])
    for peer in sorted(addresses):
        ask(peer, 2)
