"""Pushes are spread where that makes steps shorter, and end in time."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.transport import push
from dtft.checkpoint.transport.protocol import Credentials
from dtft.checkpoint.transport.push import (
    AGAIN,
    SETTLE,
    TRIED,
    Bucket,
    PushPace,
    Trial,
    spread_rate,
)
from dtft.checkpoint.transport.server import TransportServer, connect


def run(trial: Trial, pushes: int, full_s: float, spread_s: float) -> Trial:
    for _ in range(pushes):
        trial = trial.observed(spread_s if trial.spread else full_s)
    return trial


@settings(deadline=None, max_examples=30)
@given(st.floats(0.01, 10.0), st.floats(0.5, 2.0))
def test_what_makes_steps_shorter_is_kept(full_s: float, factor: float) -> None:
    trial = run(Trial(), SETTLE + 2 * TRIED, full_s, factor * full_s)
    assert trial.spread == (factor * full_s <= push.GAIN * full_s)
    assert run(trial, 100, full_s, factor * full_s).spread == trial.spread


def test_it_is_tried_anew() -> None:
    trial = run(Trial(), SETTLE + 2 * TRIED, 1.0, 0.8)
    assert trial.spread
    trial = run(trial, AGAIN, 1.0, 1.2)
    assert not trial.spread
    assert len(trial.full_s) <= TRIED and len(trial.spread_s) <= TRIED


def test_hosts_with_the_same_steps_try_at_the_same_time() -> None:
    one, other = Trial(), Trial()
    for number in range(SETTLE + 2 * TRIED):
        assert one.spread == other.spread
        one, other = one.observed(1.0 + number % 3), other.observed(1.1 + number % 2)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1 << 20, 1 << 30),
    st.floats(0.01, 10.0),
    st.integers(1, 64),
    st.lists(st.integers(1, 1 << 20), min_size=1, max_size=50),
)
def test_a_push_ends_long_before_the_next_snapshot(
    nbytes: int, step_s: float, interval: int, parts: list[int]
) -> None:
    now = [100.0]
    bucket = Bucket(lambda: now[0], lambda s: now.__setitem__(0, now[0] + s))
    bucket.limit(spread_rate(nbytes, step_s, interval, 30.0))
    left = nbytes
    for part in parts:
        bucket.sent(min(part, left))
        left -= min(part, left)
    spent_s, sent = now[0] - 100.0, (nbytes - left) / nbytes
    assert spent_s <= sent * push.SPREAD * step_s * interval * (1 + 1e-6) + 1e-9
    assert spent_s <= sent * 30.0 / 4 * (1 + 1e-6) + 1e-9


def test_two_senders_share_the_rate_and_no_limit_means_none() -> None:
    paused: list[float] = []
    bucket = Bucket(lambda: 0.0, paused.append)
    bucket.sent(1 << 30)
    assert paused == []
    bucket.limit(100.0)
    bucket.sent(10)
    bucket.sent(10)
    assert paused == pytest.approx([0.1, 0.2])
    bucket.limit(None)
    bucket.sent(10)
    assert len(paused) == 2


def test_what_is_small_is_never_held_up() -> None:
    small = PushPace(push.SMALL_BYTES - 1, 30.0)
    for _ in range(SETTLE + TRIED + 1):
        small.staged(1.0, 1)
    assert small.bucket._rate is None
    large = PushPace(push.SMALL_BYTES, 30.0)
    for _ in range(SETTLE + TRIED + 1):
        large.staged(1.0, 1)
    assert large.bucket._rate == spread_rate(push.SMALL_BYTES, 1.0, 1, 30.0)


def test_a_channel_tells_every_byte_that_it_sends() -> None:
    secret = Credentials(job="j", secret=b"s" * 32)
    done = threading.Event()

    def take(channel) -> None:
        channel.receive(10.0, lambda header, size: memoryview(bytearray(size)))
        done.set()

    server = TransportServer("127.0.0.1:0", secret, {"push": take})
    told: list[int] = []
    try:
        with connect(server.address, secret, {"op": "push"}, 10.0) as channel:
            channel.paced = told.append
            channel.send({}, [bytes(8 << 20)], timeout_s=10.0)
            assert done.wait(10.0)
    finally:
        server.close()
    assert sum(told) > 8 << 20
