"""A spare fetches ahead what no step changes; a restore then fetches only the rest."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtft.checkpoint.state.digests import chunk_digests
from dtft.checkpoint.transport.protocol import WireError
from dtft.elastic.transfer import prefetch
from dtft.elastic.transfer.prefetch import PrefetchedSlices, Prefetcher
from dtft.elastic.transfer.restore_executor import restore_into
from tests.support.hosts import (
    CHUNK,
    EPOCH,
    JOB,
    SIZES,
    Host,
    content,
    hosts,
    replicated,
    stage,
    wait_until,
)

LAYOUT = replicated(2)
BIG = LAYOUT.slices(0)[0].key


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "ASK_S", 0.01)
    monkeypatch.setattr(prefetch, "LONGEST_S", 0.02)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts(tmp_path, LAYOUT) as made:
        yield made


class Spare:
    """What a spare host fetches ahead, from the host of slot 0."""

    def __init__(self) -> None:
        self.slices = PrefetchedSlices()
        self.prefetcher = Prefetcher(self.slices, JOB, CHUNK, limit_s=10.0)

    def start(self, source: Host, epoch: tuple[int, int] = EPOCH) -> None:
        self.prefetcher.start(LAYOUT.to_json(), 0, source.address, epoch)


@pytest.fixture
def spare() -> Iterator[Spare]:
    made = Spare()
    yield made
    made.prefetcher.stop()


def made(step: int, key: str, size: int, frozen_since: int = 0) -> bytes:
    """The big slice is that of `frozen_since`; the others change with every step."""
    return content(frozen_since if key == BIG else step, key, size)


def staged(host: Host, step: int, frozen_since: int = 0) -> None:
    stage(host.holder, step, lambda key, size: made(step, key, size, frozen_since))
    host.holder.drop_before(step - 1, set())


def order_of(step: int, source: Host, frozen_since: int = 0) -> dict[str, Any]:
    own = LAYOUT.slices(0)
    digests = {
        it.key: chunk_digests(made(step, it.key, it.nbytes, frozen_since), CHUNK)
        for it in own
    }
    keys = [it.key for it in own if it.nbytes]
    sender = {"host": "host-0", "address": source.address, "keys": keys}
    return {
        **{"generation": EPOCH[0], "attempt": EPOCH[1], "step": step, "read": True},
        **{"digests": digests, "items": {}, "transfers": [sender]},
    }


def fetched(spare: Spare, source: Host) -> Iterator[int]:
    """Trains until the spare has fetched something; the steps that follow."""
    steps = iter(range(1, 10_000))
    staged(source, next(steps))
    spare.start(source)
    wait_until(lambda: bool(staged(source, next(steps)) or spare.slices.report()))
    return steps


def test_a_slice_that_a_snapshot_leaves_out_stays(
    pair: list[Host], spare: Spare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Owners of a slice take turns in copying it: not every answer has its digests."""
    source, _ = pair
    fetched(spare, source)
    answers = iter(range(10**6, 10**7))
    monkeypatch.setattr(prefetch, "_ask", lambda *_: (next(answers), {}))
    wait_until(lambda: next(answers) > 10**6 + 50)
    assert spare.slices.report() == {0: SIZES["big"]}


def test_a_restore_fetches_only_what_steps_change(
    pair: list[Host], spare: Spare
) -> None:
    source, lost = pair
    steps = fetched(spare, source)
    assert set(spare.slices.digests()) == {BIG}
    assert spare.slices.report() == {0: SIZES["big"]}
    step = next(steps)
    staged(source, step)
    spare.prefetcher.stop()
    outcome = restore_into(
        *(lost.holder, order_of(step, source), "host-1", JOB, 10.0),
        prefetched=spare.slices,
    )
    assert outcome["peers"] == SIZES["odd"] + SIZES["small"]
    for piece in lost.holder.own_slices:
        (found,) = lost.holder.find(step, [piece.key])
        assert bytes(found) == made(step, piece.key, piece.nbytes)


def test_a_slice_that_changed_after_all_is_fetched_again(
    pair: list[Host], spare: Spare
) -> None:
    source, lost = pair
    steps = fetched(spare, source)
    step = next(steps)
    staged(source, step, frozen_since=step)
    order = order_of(step, source, frozen_since=step)
    outcome = restore_into(
        *(lost.holder, order, "host-1", JOB, 10.0), prefetched=spare.slices
    )
    assert outcome["peers"] == sum(SIZES.values())
    new = chunk_digests(content(step, BIG, SIZES["big"]), CHUNK)

    def has_new() -> bool:
        staged(source, next(steps), frozen_since=step)
        return spare.slices.digests().get(BIG) == new

    wait_until(has_new)


def test_corrupt_memory_of_a_spare_is_fetched_instead(pair: list[Host]) -> None:
    source, lost = pair
    staged(source, 1)
    order, slices = order_of(1, source), PrefetchedSlices()
    wrong = bytearray(content(0, BIG, SIZES["big"]))
    wrong[100] ^= 1
    slices.put(0, BIG, order["digests"][BIG], np.frombuffer(wrong, np.uint8))
    outcome = restore_into(
        *(lost.holder, order, "host-1", JOB, 10.0), prefetched=slices
    )
    assert outcome["peers"] == sum(SIZES.values())
    assert bytes(lost.holder.find(1, [BIG])[0]) == content(0, BIG, SIZES["big"])


def test_without_a_new_snapshot_nothing_is_known_to_stay(
    pair: list[Host], spare: Spare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow steps change everything, too: their digests only stay for longer."""
    source, _ = pair
    answers = []
    ask = prefetch._ask

    def asking(*arguments: Any) -> Any:
        answers.append(ask(*arguments))
        return answers[-1]

    monkeypatch.setattr(prefetch, "_ask", asking)
    staged(source, 1)
    spare.start(source)
    wait_until(lambda: len(answers) > 5)
    assert spare.slices.report() == {}


def test_a_host_that_is_gone_or_knows_nothing_is_asked_again(
    pair: list[Host], spare: Spare
) -> None:
    source, other = pair
    before = set(threading.enumerate())
    spare.start(source, epoch=(EPOCH[0] - 1, 1))  # of a former formation
    spare.start(other)  # has no step yet
    for step in (1, 2):
        staged(other, step)
    other.server.close()
    threads = [it for it in {*threading.enumerate()} - before if "_run" in it.name]
    assert threads
    spare.prefetcher.stop()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_the_same_order_again_changes_nothing(pair: list[Host], spare: Spare) -> None:
    spare.start(pair[0])
    stop = spare.prefetcher._stop
    spare.start(pair[0])
    assert spare.prefetcher._stop is stop and not stop.is_set()
    spare.start(pair[1])
    assert stop.is_set()


def test_what_does_not_fit_in_memory_is_left(
    pair: list[Host], spare: Spare, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = pair
    asked = []
    room = 2 * SIZES["big"] - 1
    monkeypatch.setattr(prefetch, "available_bytes", lambda: asked.append(1) or room)
    spare.start(source)
    steps = iter(range(1, 10_000))
    wait_until(lambda: bool(staged(source, next(steps)) or len(asked) > 3))
    assert spare.slices.report() == {}
    room += 1
    wait_until(lambda: bool(staged(source, next(steps)) or spare.slices.report()))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"error": "no copies"},
        {"step": "1", "digests": {}},
        {"step": 1, "digests": []},
        {"step": 1, "digests": {"a": "text"}},
        {"step": 1, "digests": {2: b"x"}},
    ],
)
def test_malformed_answers_are_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        prefetch._read(answer)


def test_batches_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "BATCH_BYTES", 10)
    sizes = {"a": 4, "b": 6, "c": 1, "d": 30, "e": 9}
    assert prefetch._batches(list(sizes), sizes) == [["a", "b"], ["c"], ["d"], ["e"]]
