"""Finds pairs of hosts cut off from each other, and chooses hosts to leave out.

A round is an attempt to form the job: to assign slots and start trainers. The leader
reaches every host that answers in a round, but two of these hosts may be cut off from
each other. Such a pair can neither train together nor exchange copies. So after a
failure that a cut would explain, each host tries to connect to other hosts (its peers)
and reports the peers that it did not reach.
"""

import bisect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

Pair = tuple[str, str]
"""Two host names in sorted order."""

MOST_TRIED = 64
"""Largest number of peers to which a host tries to connect in one round; other peers
follow in the next rounds."""
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 30.0
"""Longest pause in seconds between two tries to connect the hosts of pairs that do not
reach each other; the first pause is `FIRST_PAUSE_S`, and pauses double."""


def peers_to_try(
    host: str, hosts: Sequence[str], turn: int, most: int = MOST_TRIED
) -> list[str]:
    """Returns the peers to which a host tries to connect: its neighbours on a ring.

    The ring has all hosts. If host a tries host b, then b also tries a. Later turns use
    neighbours farther away, until all peers have been tried; then the nearest are used
    again.

    Args:
        host: name of the host.
        hosts: names of all hosts in sorted order.
        turn: number of this try, equal for all hosts; the next try has the next number.
        most: largest number of peers, at least 2.

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
    """Returns the pairs of hosts that do not reach each other, by the hosts' reports.

    The report of one host may be wrong. So a reported pair counts only if both hosts
    report each other, or if one of the two is reported by at least two hosts and by
    more than half of the hosts that tried it. A pair with a host that has not answered
    does not count.

    Args:
        tried: for each host that has answered, the peers that it had to try.
        missed: host to the peers that it did not reach.
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
    """Returns two host names in sorted order."""
    return (one, other) if one < other else (other, one)


def set_aside(
    hosts: Collection[str], slots: Sequence[str], apart: Collection[Pair], leader: str
) -> list[str]:
    """Chooses hosts that get no slot, so that all other hosts reach each other.

    Leaves out the host that occurs in the largest number of pairs, drops its pairs, and
    repeats this until no pair remains. Of hosts in equally many pairs, a host without a
    slot is left out first, then a host that does not lead, then the host of the highest
    slot.

    Args:
        hosts: hosts that could have a slot.
        slots: the host of each slot until now.
        apart: pairs that do not reach each other.
        leader: name of the leader's host.

    In the example, a and b are in one pair each and have slots; a is left out, because
    b leads.

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
    """The pairs of hosts that do not reach each other, as far as the leader knows.

    Hosts try to connect to each other in two situations. In a round (attempt to form
    the job) they look for new pairs (`learn`). Between rounds the hosts of known pairs
    find out whether they reach each other again (`ask`).
    """

    def __init__(self) -> None:
        """Starts with no pair."""
        self.apart: set[Pair] = set()
        """Pairs that did not reach each other at their last try."""
        self.is_suspected = False
        """Whether a failure since the last commit suggests that hosts are cut off."""
        self._look_at, self._pause_s = 0.0, FIRST_PAUSE_S
        self._asked: dict[str, list[str]] | None = None
        self._missed: dict[str, list[str]] = {}
        """Host to the peers that it did not reach, in the current try (`ask`)."""

    @property
    def is_to_be_tried(self) -> bool:
        """Whether hosts must try to connect to their peers in the next round.

        True while a cut is suspected, or some pair is known not to reach each other.
        """
        return self.is_suspected or bool(self.apart)

    def learn(
        self,
        tried: Mapping[str, Collection[str]],
        missed: Mapping[str, Collection[str]],
        now: float,
    ) -> set[Pair]:
        """Updates the known pairs from a round's reports; returns the new pairs.

        The reports confirm the pairs that `believed` returns: one host alone, whose
        report may be wrong, confirms no pair. Adds confirmed pairs, but only while a
        network cut is suspected. Removes a known pair if one of its hosts has not
        answered, or if one of its hosts tried the other and the pair is not confirmed.

        Args:
            tried: for each host that has answered, the peers that it had to try.
            missed: host to the peers that it did not reach.
            now: current time in seconds; the pause until the next try begins then.
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
        """Ends the suspicion of a network cut, after a commit.

        A commit shows that the hosts with slots reach each other.
        """
        self.is_suspected = False

    def is_due(self, now: float) -> bool:
        """Whether hosts that did not reach each other must try to connect again now.

        False without such hosts. If the result is True, sets the time of the next try:
        after twice the last pause, at most 30 s (`LONGEST_PAUSE_S`).
        """
        if not self.apart or now < self._look_at:
            return False
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._look_at = now + self._pause_s
        return True

    def ask(self, connected: Collection[str]) -> dict[str, list[str]]:
        """Begins another try of the pairs that did not reach each other.

        First forgets the pairs with a host that is not in `connected`. Returns, for
        each host of the other pairs, the peers that it must try.
        """
        self.apart = {it for it in self.apart if set(it) <= set(connected)}
        asked: dict[str, list[str]] = {}
        for one, other in sorted(self.apart):
            asked.setdefault(one, []).append(other)
            asked.setdefault(other, []).append(one)
        self._asked, self._missed = asked, {}
        return asked

    def answered(self, host: str, missed: list[str]) -> list[Pair]:
        """Records the peers that a host did not reach in the try that `ask` began.

        Returns:
            After the last host's answer: the pairs that reach each other again, which
            are then forgotten. [] before that, and for a host that was not asked.
        """
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
        """Describes the peers that a host does not reach; "" for none."""
        others = sorted(b if a == host else a for a, b in self.apart if host in (a, b))
        return f"{host} and {', '.join(others)} do not reach each other" * bool(others)


def _tried(it: Pair, tried: Mapping[str, Collection[str]]) -> bool:
    return it[1] in tried.get(it[0], ()) or it[0] in tried.get(it[1], ())


def try_all(
    probe: Callable[[str, Callable[[str], None]], None],
    addresses: Mapping[str, str],
    then: Callable[[list[str]], None],
) -> None:
    """Tries to reach all peers at once; tries each silent peer a second time.

    Args:
        probe: connects to an address, and calls its second argument with "open",
            "refused" or "silent" (see `Network.probe`).
        addresses: peer to its "host:port".
        then: called with the peers whose ports are not open, in sorted order.
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
