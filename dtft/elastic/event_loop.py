"""An agent's event loop: callables run one after the other, on one thread.

Long work runs on other threads: `aside` runs one callable on a thread of its own, and a
`Lane` runs callables in order on one thread. The outcome comes back to the loop as a
finished `Future`. `EventLoop` records its longest calls: an agent whose loop is blocked
neither renews its lease nor answers the leader.
"""

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Protocol

KEPT_CALLS = 10
"""Number of longest calls that the loop remembers (`EventLoop.longest`)."""
IDLE_S = 5.0
"""Seconds without work after which a lane's thread ends."""

Work = Callable[[], Any]
Then = Callable[["Future[Any]"], None]
"""Takes a finished future, whose `result()` returns the work's result or raises the
work's error."""


class Lane(Protocol):
    """A queue of work, which runs in order on a thread other than the loop's."""

    def submit(self, work: Work, then: Then) -> None:
        """Calls `work` on the lane's thread, after all work submitted before.

        Then calls `then` on the loop with the outcome, a finished future. Does nothing
        after `close`.
        """
        ...

    def close(self) -> None:
        """Drops work that has not started, and work submitted later."""
        ...


class Loop(Protocol):
    """The interface of an agent's event loop."""

    def now(self) -> float:
        """Returns the time in seconds on the monotonic clock."""
        ...

    def wall(self) -> float:
        """Returns the wall-clock time in seconds since the epoch."""
        ...

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Calls `function` on the loop, after all calls posted before.

        May be called from any thread.
        """
        ...

    def call_later(
        self, delay_s: float, function: Callable[..., None], *args: Any
    ) -> None:
        """Schedules a call on the loop in `delay_s` seconds."""
        ...

    def aside(self, work: Work, then: Then | None = None) -> None:
        """Calls `work` at once on another thread; then calls `then` on the loop.

        `then` gets the outcome, a finished Future. Without `then`, an error of `work`
        is raised on that thread.
        """
        ...

    def lane(self, name: str) -> Lane:
        """Makes a lane, whose work does not wait for the work of other lanes.

        `name` is the name of its thread.
        """
        ...

    def run(self) -> None:
        """Runs posted calls and due timers until `stop`."""
        ...

    def stop(self) -> None:
        """Makes `run` return after the current call."""
        ...


@dataclass(frozen=True, kw_only=True, order=True)
class Call:
    """One call of a function by the event loop, with its duration."""

    seconds: float
    at: float
    """Wall-clock time at which the call began."""
    what: str


class EventLoop:
    """A `Loop` that uses threads. Calls run on the thread that calls `run`."""

    def __init__(self) -> None:
        """Starts with no scheduled call."""
        # SimpleQueue is reentrant: a signal handler may post while `get` runs.
        self._posted: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = (
            queue.SimpleQueue()
        )
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._stopped = False
        self._longest: list[Call] = []

    def now(self) -> float:
        """Returns the time in seconds on the monotonic clock."""
        return time.monotonic()

    def wall(self) -> float:
        """Returns the wall-clock time in seconds since the epoch."""
        return time.time()

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Schedules a call as soon as possible; see `Loop.post`."""
        self._posted.put((function, args))

    def call_later(
        self, delay_s: float, function: Callable[..., None], *args: Any
    ) -> None:
        """Schedules a call in `delay_s` seconds; see `Loop.call_later`."""
        entry = (self.now() + delay_s, next(self._order), function, args)
        with self._lock:
            heapq.heappush(self._timers, entry)

    def aside(self, work: Work, then: Then | None = None) -> None:
        """Calls `work` on a new thread, then `then` on the loop; see `Loop.aside`."""
        args = (work, then)
        threading.Thread(target=self._do, args=args, daemon=True).start()

    def _do(self, work: Work, then: Then | None) -> None:
        future = outcome_of(work)
        if then is not None:
            self.post(then, future)
        elif (error := future.exception()) is not None:
            raise error

    def lane(self, name: str) -> Lane:
        """Makes a new lane with its own thread; see `Loop.lane`."""
        return ThreadLane(name, self.post)

    @property
    def longest(self) -> tuple[Call, ...]:
        """The 10 longest calls so far, the longest first; fewer if fewer were made."""
        return tuple(sorted(self._longest, reverse=True))

    def record(self) -> dict[str, Any]:
        """Returns the longest calls as a dict that can be written as JSON.

        "longest_call_s" has the seconds of the longest call (0.0 without a call), and
        "calls" the fields of each `Call` in `longest`.
        """
        calls = [asdict(call) for call in self.longest]
        return {"longest_call_s": calls[0]["seconds"] if calls else 0.0, "calls": calls}

    def stop(self) -> None:
        """Makes `run` return after the current call; safe in a signal handler."""
        self._stopped = True
        self._posted.put((_nothing, ()))

    def run(self) -> None:
        """Runs posted calls and due timers until `stop`.

        Due timers run before posted calls, so a full queue delays no timer.
        """
        while not self._stopped:
            due, wait_s = self._due()
            if due is not None:
                self._call(*due)
                continue
            try:
                posted = self._posted.get(timeout=wait_s)
            except queue.Empty:
                continue
            self._call(*posted)

    def _due(
        self,
    ) -> tuple[tuple[Callable[..., None], tuple[Any, ...]] | None, float]:
        """Removes the first timer if it is due; returns its call and 0.

        The call is (function, arguments). If no timer is due, returns None and the
        seconds until the first timer is due, or 1 without a timer.
        """
        with self._lock:
            if not self._timers:
                return None, 1.0
            wait_s = self._timers[0][0] - self.now()
            if wait_s > 0:
                return None, wait_s
            _, _, function, args = heapq.heappop(self._timers)
            return (function, args), 0.0

    def _call(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        at, begun = self.wall(), self.now()
        try:
            function(*args)
        finally:
            seconds = self.now() - begun
            if len(self._longest) < KEPT_CALLS or seconds > self._longest[0].seconds:
                self._keep(Call(seconds=seconds, at=at, what=_name(function, args)))

    def _keep(self, call: Call) -> None:
        heapq.heappush(self._longest, call)
        if len(self._longest) > KEPT_CALLS:
            heapq.heappop(self._longest)


class ThreadLane:
    """A `Lane` with one thread, which ends after 5 s without work (`IDLE_S`)."""

    def __init__(self, name: str, post: Callable[..., None]) -> None:
        """Starts no thread; the first `submit` does."""
        self._name, self._post = name, post
        self._work: queue.SimpleQueue[tuple[Work, Then] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running = self._closed = False

    def submit(self, work: Work, then: Then) -> None:
        """Queues work; `then` gets its outcome on the loop. See `Lane.submit`."""
        with self._lock:
            if self._closed:
                return
            self._work.put((work, then))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                entry = self._work.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._work.empty():
                        self._running = False
                        return
                continue
            if entry is None or self._closed:
                return
            work, then = entry
            self._post(then, outcome_of(work))

    def close(self) -> None:
        """Drops work that has not started, and work submitted later."""
        with self._lock:
            self._closed = True
            self._work.put(None)


def outcome_of(work: Work) -> "Future[Any]":
    """Calls `work`; returns its result or exception as a finished future.

    >>> outcome_of(lambda: 3).result()
    3
    >>> isinstance(outcome_of(lambda: 1 / 0).exception(), ZeroDivisionError)
    True
    """
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


def _nothing() -> None:
    """Does nothing; posted to wake the loop."""


def _name(function: Callable[..., None], args: tuple[Any, ...]) -> str:
    """Returns the function's name, with the first argument if that is a str."""
    name = getattr(function, "__qualname__", type(function).__name__)
    kind = f" {args[0]}" if args and isinstance(args[0], str) else ""
    return f"{name}{kind}"
