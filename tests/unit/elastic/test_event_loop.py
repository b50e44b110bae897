"""The loop on threads: order, deadlines, lanes, and what it says of long calls."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from dtft.elastic import event_loop
from dtft.elastic.event_loop import IDLE_S, KEPT_CALLS, EventLoop
from tests.support.hosts import wait_until
from tests.support.virtual_loop import VirtualLoop


def run_until(loop: EventLoop, *calls: Callable[[], None]) -> None:
    """Runs a loop that stops after what is posted now."""
    for call in calls:
        loop.post(call)
    loop.run()


def test_what_is_posted_is_called_in_order_and_on_one_thread() -> None:
    loop, seen, threads = EventLoop(), list[int](), set[int]()

    def call(number: int) -> None:
        seen.append(number)
        threads.add(threading.get_ident())

    for number in range(100):
        loop.post(call, number)
    run_until(loop, loop.stop)
    assert seen == list(range(100)) and threads == {threading.get_ident()}


def test_timers_come_in_order_of_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, seen, begun = EventLoop(), list[str](), time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "now", lambda: begun)
        for delay_s, name in [(0.06, "late"), (0.02, "first"), (0.04, "then")]:
            loop.call_later(delay_s, seen.append, name)
        loop.call_later(0.08, loop.stop)
    loop.run()
    assert seen == ["first", "then", "late"]
    assert 0.08 <= time.monotonic() - begun < 5


def test_a_timer_is_called_though_the_queue_is_never_empty() -> None:
    loop, calls = EventLoop(), [0]

    def again() -> None:
        calls[0] += 1
        loop.post(again)
        loop.post(again) if calls[0] < 1000 else None
        if calls[0] == 11:
            loop.call_later(0.05, loop.stop)

    begun = time.monotonic()
    run_until(loop, again)
    assert calls[0] > 10 and time.monotonic() - begun < 5


def test_a_stop_from_elsewhere_ends_a_loop_that_waits() -> None:
    loop = EventLoop()
    threading.Timer(0.1, loop.stop).start()
    begun = time.monotonic()
    loop.run()
    assert time.monotonic() - begun < IDLE_S - 1  # not as long as it waits by itself


def test_work_beside_the_loop_does_not_hold_it_up() -> None:
    loop, free, seen = EventLoop(), threading.Event(), list[Any]()

    def done(outcome: "Future[Any]") -> None:
        seen.append(outcome.result())
        loop.stop()

    loop.aside(lambda: free.wait(10) and threading.get_ident(), done)
    loop.post(seen.append, "meanwhile")
    loop.post(free.set)
    loop.run()
    assert seen[0] == "meanwhile" and seen[1] != threading.get_ident()


def test_an_error_beside_the_loop_is_its_outcome() -> None:
    loop, seen = EventLoop(), list[BaseException | None]()

    def fails() -> None:
        raise OSError("no room")

    loop.aside(fails, lambda outcome: seen.append(outcome.exception()))
    loop.lane("one").submit(fails, lambda outcome: seen.append(outcome.exception()))
    wait_until(lambda: loop._posted.qsize() == 2)
    run_until(loop, loop.stop)
    assert [str(error) for error in seen] == ["no room"] * 2


def lanes_keep_order(loop: Any, finish: Callable[[Callable[[], bool]], None]) -> None:
    """What holds for every loop: work of a lane is done in order, one at a time."""
    seen: list[tuple[str, int]] = []
    busy: list[str] = []

    def work(name: str, number: int) -> Callable[[], int]:
        def does() -> int:
            assert name not in busy
            busy.append(name)
            busy.remove(name)
            return number

        return does

    for name in ("x", "y"):
        lane = loop.lane(name)
        for number in range(20):
            lane.submit(
                work(name, number),
                lambda outcome, name=name: seen.append((name, outcome.result())),
            )
    finish(lambda: len(seen) == 40)
    for name in ("x", "y"):
        assert [it for lane, it in seen if lane == name] == list(range(20))


def test_a_lane_keeps_its_order() -> None:
    loop = EventLoop()

    def finish(ready: Callable[[], bool]) -> None:
        def look() -> None:
            loop.stop() if ready() else loop.call_later(0.01, look)

        run_until(loop, look)

    lanes_keep_order(loop, finish)


def test_a_lane_of_the_virtual_loop_keeps_its_order() -> None:
    loop = VirtualLoop()
    lanes_keep_order(loop, loop.turn_until)


def test_a_lane_that_hangs_holds_up_no_other() -> None:
    loop, free, seen = EventLoop(), threading.Event(), list[str]()
    loop.lane("stuck").submit(lambda: free.wait(10), lambda _: seen.append("stuck"))
    loop.lane("other").submit(lambda: None, lambda _: loop.stop())
    loop.run()
    assert not seen
    free.set()


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_a_lanes_thread_ends_when_there_is_nothing_to_do_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "IDLE_S", 0.1)
    loop, name = EventLoop(), "a lane of this test"
    lane, threads = loop.lane(name), list[threading.Thread]()
    assert not named(name)
    for number in (1, 2):
        lane.submit(lambda: threads.append(threading.current_thread()), lambda _: None)
        wait_until(lambda number=number: len(threads) == number and not named(name))
    assert threads[0] is not threads[1] and {it.name for it in threads} == {name}
    assert loop._posted.qsize() == 2


def test_a_closed_lane_drops_what_has_not_begun_and_ends() -> None:
    loop, free, name = EventLoop(), threading.Event(), "a closed lane"
    lane, done = loop.lane(name), list[int]()
    lane.submit(lambda: free.wait(10), lambda _: None)
    lane.submit(lambda: done.append(1), lambda _: None)
    lane.close()
    lane.submit(lambda: done.append(2), lambda _: None)
    free.set()
    wait_until(lambda: not named(name))
    assert not done


def test_the_longest_calls_are_kept_with_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, clock = EventLoop(), [0.0]
    monkeypatch.setattr(loop, "now", lambda: clock[0])

    def handles(kind: str, seconds: float) -> None:
        clock[0] += seconds

    for number in range(3 * KEPT_CALLS):
        loop.post(handles, f"kind-{number}", 0.05 if number == 4 else 0.0)
    run_until(loop, loop.stop)
    assert len(loop.longest) == KEPT_CALLS
    assert list(loop.longest) == sorted(loop.longest, reverse=True)
    assert loop.longest[0].what.endswith("handles kind-4")
    record = loop.record()
    assert record["longest_call_s"] == loop.longest[0].seconds == 0.05
    assert EventLoop().record() == {"longest_call_s": 0.0, "calls": []}


def test_an_error_of_a_call_ends_the_loop_and_is_seen() -> None:
    loop = EventLoop()

    def fails() -> None:
        raise ZeroDivisionError

    loop.post(fails)
    with pytest.raises(ZeroDivisionError):
        loop.run()
    assert len(loop.longest) == 1
