"""An event loop whose time is a number: everything happens when a test lets it.

Calls that are due are made in order of time, then of posting. Work beside the loop is
done when its turn comes, and takes no time; a test may hold a lane, or what is done
`aside`, as if it hung.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from dtft.elastic.event_loop import Lane, Then, Work, outcome_of
from dtft.elastic.store.api import Store, StoreUnavailable
from dtft.elastic.store.mirror import Changed, Pairs

EPOCH_S = 1_700_000_000.0
MIRROR_S = 0.01
"""A mirror looks this often for changes."""


class VirtualLoop:
    """A `Loop`; `turn` runs it."""

    def __init__(self) -> None:
        """At time 0."""
        self._now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._stopped = False
        self.held: dict[str, list[Callable[[], None]]] = {}
        """Name of a lane, or "aside", to what cannot go on there."""

    def now(self) -> float:
        """See `Loop.now`."""
        return self._now

    def wall(self) -> float:
        """See `Loop.wall`."""
        return EPOCH_S + self._now

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """See `Loop.post`."""
        self.call_later(0.0, function, *args)

    def call_later(
        self, delay_s: float, function: Callable[..., None], *args: Any
    ) -> None:
        """See `Loop.call_later`."""
        entry = (self._now + delay_s, next(self._order), function, args)
        heapq.heappush(self._due, entry)

    def aside(self, work: Work, then: Then | None = None) -> None:
        """See `Loop.aside`."""
        self.begin("aside", lambda: self._do(work, then))

    def _do(self, work: Work, then: Then | None) -> None:
        outcome = outcome_of(work)
        if then is not None:
            self.post(then, outcome)
        else:
            outcome.result()

    def lane(self, name: str) -> Lane:
        """See `Loop.lane`."""
        return _Lane(self, name)

    def begin(self, name: str, work: Callable[[], None]) -> None:
        """Has work of a kind done soon, or when that kind is let go."""
        self.post(self._work, name, work)

    def _work(self, name: str, work: Callable[[], None]) -> None:
        if name in self.held:
            self.held[name].append(work)
        else:
            work()

    def hold(self, name: str) -> None:
        """What is done under this name hangs from now on."""
        self.held.setdefault(name, [])

    def let_go(self, name: str) -> None:
        """What hangs goes on."""
        for work in self.held.pop(name):
            self.post(work)

    def stop(self) -> None:
        """See `Loop.stop`."""
        self._stopped = True

    def run(self) -> None:
        """See `Loop.run`."""
        while not self._stopped:
            self._step()

    def turn(self, seconds: float = 0.0) -> None:
        """Makes all calls that are due within the next `seconds`."""
        end = self._now + seconds
        while self._due and self._due[0][0] <= end:
            self._step()
        self._now = end

    def turn_until(self, ready: Callable[[], object], limit_s: float = 60.0) -> None:
        """Makes calls until something is so."""
        end = self._now + limit_s
        while not ready():
            assert self._due and self._due[0][0] <= end, f"not so in {limit_s:g} s"
            self._step()

    def pause(self, seconds: float) -> None:
        """The process stands still: time passes and nothing is called."""
        self._now += seconds

    def _step(self) -> None:
        at, _, function, args = heapq.heappop(self._due)
        self._now = max(self._now, at)
        function(*args)


class _Lane:
    """A `Lane` whose work is done in order."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self._loop, self._name = loop, name
        self._work: deque[tuple[Work, Then]] = deque()
        self._busy = self._closed = False

    def submit(self, work: Work, then: Then) -> None:
        """See `Lane.submit`."""
        if not self._closed:
            self._work.append((work, then))
            self._next()

    def _next(self) -> None:
        if self._work and not self._busy:
            self._busy = True
            self._loop.begin(self._name, self._do)

    def _do(self) -> None:
        self._busy = False
        if self._work:
            work, then = self._work.popleft()
            self._loop.post(then, outcome_of(work))
            self._next()

    def close(self) -> None:
        """See `Lane.close`."""
        self._closed = True
        self._work.clear()


class VirtualMirrors:
    """A `MirrorSource` that lists a store again and again."""

    def __init__(self, store: Store, loop: VirtualLoop) -> None:
        """Watches nothing yet."""
        self._store, self._loop = store, loop

    def mirror(self, prefix: str, changed: Changed) -> Callable[[], None]:
        """See `MirrorSource.mirror`."""
        told: list[tuple[Pairs, int]] = []
        ended: list[bool] = []

        def look() -> None:
            if ended:
                return
            self._loop.call_later(MIRROR_S, look)
            try:
                pairs, revision = self._store.list(prefix)
            except StoreUnavailable:
                return
            found = {pair.key: pair for pair in pairs}
            if not told or found != told[-1][0]:
                told[:] = [(found, revision)]
                changed(dict(found), revision)

        self._loop.post(look)
        return lambda: ended.append(True)
