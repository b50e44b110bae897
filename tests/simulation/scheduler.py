"""Virtual time: one heap of events for all hosts, and an event loop for each agent.

Events at the same time run in an order that the seed decides. Must not know what the
events mean.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dtft.elastic.event_loop import Then, Work

EPOCH_S = 1.7e9
"""Wall-clock time at the start of every run."""
FAR = float("inf")
NEAR_S = 1e-9


class Scheduler:
    """Runs events in the order of their times."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.count = 0
        self.halted = False
        self._heap: list[tuple[float, float, int, Callable[..., None], tuple]] = []
        self._order = 0

    def at(self, when: float, function: Callable[..., None], *args: Any) -> None:
        """Has a function called at a time."""
        self._order += 1
        entry = (max(when, self.now), self.rng.random(), self._order, function, args)
        heapq.heappush(self._heap, entry)

    def after(self, delay_s: float, function: Callable[..., None], *args: Any) -> None:
        """Has a function called in `delay_s` seconds."""
        self.at(self.now + delay_s, function, *args)

    def run(self, until: float) -> None:
        """Calls what is due until a time, or until something has set `halted`."""
        heap, pop = self._heap, heapq.heappop
        self.halted = False
        while heap and heap[0][0] <= until:
            self.now, _, _, function, args = pop(heap)
            self.count += 1
            function(*args)
            if self.halted:
                return
        self.now = max(self.now, until)


class Deferred:
    """The outcome of work that goes on in virtual time."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self._then: Callable[[], None] | None = None

    def resolve(self, value: Any) -> None:
        """Ends the work well; only the first end counts."""
        if not self.future.done():
            self.future.set_result(value)
            self._ended()

    def fail(self, error: Exception) -> None:
        """Ends the work with an error."""
        if not self.future.done():
            self.future.set_exception(error)
            self._ended()

    def _ended(self) -> None:
        if self._then is not None:
            self._then()

    def on_end(self, then: Callable[[], None]) -> None:
        """Calls `then` once this has ended, which may be now."""
        if self.future.done():
            then()
        else:
            self._then = then


class Blocked(Exception):
    """Work cannot go on now, as in a call that hangs; it is done again later."""

    def __init__(self, wait: Callable[[Callable[[], None]], None]) -> None:
        """`wait(again)` calls `again` when the work can go on."""
        super().__init__("blocked")
        self.wait = wait


class Clockwork:
    """What the loops share: the scheduler, and who is told of an error."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.charged_s = 0.0
        """Seconds that the work under way has taken, set by simulated calls."""
        self.failed: Callable[[str, str, Exception], None] = lambda *_: None
        """Takes host, what was called, and the error."""
        self.before: Callable[[str, Callable[..., None], tuple], None] | None = None
        """Called before every event of a host, for traces and counts."""
        self.after: Callable[[str], None] | None = None

    def io_s(self) -> float:
        """How long a piece of work beside a loop takes at least."""
        return self.scheduler.rng.uniform(0.0003, 0.003)


class SimLoop:
    """A `Loop` in virtual time. Runs while it is neither paused nor stopped."""

    def __init__(
        self,
        host: str,
        clockwork: Clockwork,
        *,
        rate: float = 1.0,
        offset_s: float = 0.0,
        stopped: Callable[[], None],
    ) -> None:
        self.host, self._clockwork, self._stopped_then = host, clockwork, stopped
        self._scheduler = clockwork.scheduler
        self._rate, self._offset_s = rate, offset_s
        self._posted: deque[tuple[Callable[..., None], tuple]] = deque()
        self._timers: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._held: list[Callable[[], None]] = []
        self._order = 0
        self._wake_at = FAR
        self._running = False
        self.paused = self.stopped = False
        self.slow_s = 0.0
        """Seconds that an event of this host may take."""
        self.rest_s = 0.0
        """Between two turns of this host; what comes meanwhile waits for the next."""
        self._rests_until = 0.0

    def now(self) -> float:
        """See `Loop.now`."""
        return self._offset_s + self._rate * self._scheduler.now

    def wall(self) -> float:
        """See `Loop.wall`."""
        return EPOCH_S + self.now()

    def _global(self, local: float) -> float:
        return (local - self._offset_s) / self._rate

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """See `Loop.post`."""
        if self.stopped:
            return
        self._posted.append((function, args))
        if not self._running:
            self._wake(self._scheduler.now + self._lag())

    def call_later(
        self, delay_s: float, function: Callable[..., None], *args: Any
    ) -> None:
        """See `Loop.call_later`."""
        self._order += 1
        due = self.now() + delay_s
        heapq.heappush(self._timers, (due, self._order, function, args))
        if not self._running:
            self._wake(self._global(due))

    def _lag(self) -> float:
        return self._scheduler.rng.uniform(0, self.slow_s) if self.slow_s else 0.0

    def _wake(self, when: float) -> None:
        when = max(when, self._rests_until)
        if when < self._wake_at:
            self._wake_at = when
            self._scheduler.at(when, self._run, when)

    def _run(self, when: float) -> None:
        if when != self._wake_at:
            return  # an earlier one has run meanwhile
        self._wake_at = FAR
        if self.paused or self.stopped:
            return
        self._running = True
        clockwork, timers, posted = self._clockwork, self._timers, self._posted
        before, after = clockwork.before, clockwork.after
        while not (self.stopped or self.paused):
            if timers and timers[0][0] <= self.now() + NEAR_S:
                _, _, function, args = heapq.heappop(timers)
            elif posted:
                function, args = posted.popleft()
            else:
                break
            if before is not None:
                before(self.host, function, args)
            try:
                function(*args)
            except Exception as error:
                clockwork.failed(self.host, str(function), error)
                self.stopped = True
            if after is not None:
                after(self.host)
            if self.slow_s:
                break
        self._running = False
        self._rests_until = self._scheduler.now + self.rest_s
        if self.stopped:
            self._stopped_then()
        else:
            self._again()

    def _again(self) -> None:
        if self._posted:
            self._wake(self._scheduler.now + self._lag())
        elif self._timers:
            self._wake(self._global(self._timers[0][0]) + self._lag())

    def pause(self) -> None:
        """Stops this host's process: nothing runs until `resume`."""
        self.paused = True

    def resume(self) -> None:
        """Goes on with what has become due."""
        self.paused = False
        held, self._held = self._held, []
        for function in held:
            self._beside(function)
        self._wake(self._scheduler.now)

    def _beside(self, function: Callable[[], None]) -> None:
        """On another thread of the process: waits while the process is stopped."""
        if self.stopped:
            return
        if self.paused:
            self._held.append(function)
        else:
            function()

    def beside(self, delay_s: float, function: Callable[[], None]) -> None:
        """Has something done on another thread of the process, in `delay_s` seconds."""
        self._scheduler.after(delay_s, self._beside, function)

    def aside(self, work: Work, then: Then | None = None) -> None:
        """See `Loop.aside`."""
        self.beside(
            self._clockwork.io_s(), lambda: self._work(work, then, lambda: None)
        )

    def _work(self, work: Work, then: Then | None, ended: Callable[[], None]) -> None:
        """Does work at one moment; its outcome comes after what it was charged."""
        clockwork = self._clockwork
        clockwork.charged_s = 0.0
        outcome: Future[Any] = Future()
        try:
            value = work()
        except Blocked as blocked:
            again = lambda: self._work(work, then, ended)  # noqa: E731
            blocked.wait(lambda: self.beside(0.001, again))
            return
        except Exception as error:
            outcome.set_exception(error)
        else:
            if isinstance(value, Deferred):
                value.on_end(lambda: self._deliver(value.future, then, 0.0, ended))
                return
            outcome.set_result(value)
        self._deliver(outcome, then, clockwork.charged_s, ended)

    def _deliver(
        self,
        outcome: "Future[Any]",
        then: Then | None,
        charged_s: float,
        ended: Callable[[], None],
    ) -> None:
        def deliver() -> None:
            if then is not None:
                self.post(then, outcome)
            elif (error := outcome.exception()) is not None:
                assert isinstance(error, Exception)
                self._clockwork.failed(self.host, "work beside the loop", error)
            ended()

        if charged_s:
            self.beside(charged_s, deliver)
        else:
            self._beside(deliver)

    def lane(self, name: str) -> "SimLane":
        """See `Loop.lane`."""
        del name
        return SimLane(self, self._clockwork)

    def run(self) -> None:
        """Not used: the scheduler drives."""
        raise AssertionError("a simulated loop is driven by its scheduler")

    def stop(self) -> None:
        """Ends the process after the call under way."""
        self.stopped = True
        if not self._running:
            self._stopped_then()

    def kill(self) -> None:
        """Ends the process at once, without a word."""
        self.stopped = True
        self._posted.clear()
        self._timers.clear()


class SimLane:
    """A `Lane` in virtual time."""

    def __init__(self, loop: SimLoop, clockwork: Clockwork) -> None:
        self._loop, self._clockwork = loop, clockwork
        self._queue: deque[tuple[Work, Then]] = deque()
        self._busy = self._closed = False

    def submit(self, work: Work, then: Then) -> None:
        """See `Lane.submit`."""
        if self._closed:
            return
        self._queue.append((work, then))
        if not self._busy:
            self._busy = True
            self._loop.beside(self._clockwork.io_s(), self._next)

    def _next(self) -> None:
        if self._closed or not self._queue:
            self._busy = False
            return
        work, then = self._queue.popleft()
        self._loop._work(work, then, self._ended)

    def _ended(self) -> None:
        self._loop.beside(self._clockwork.io_s(), self._next)

    def close(self) -> None:
        """See `Lane.close`."""
        self._closed = True
