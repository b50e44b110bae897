"""Places are counted right, and what a copy refers to is never written again.

A random history of staging, pushes, commits, pins and drops is played against a plain
dictionary of what every copy holds; after each step every copy must still hold it.
"""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dtft.checkpoint.memory.chunk_pool import BufferRefCounts, ChunkPool, Copy
from dtft.checkpoint.memory.incoming import Hosting
from dtft.checkpoint.memory.own_copies import Owning, Restoring
from dtft.checkpoint.state.digests import ABSENT, Chunks, chunk_digests, pack_flags
from dtft.checkpoint.state.slices import Slice

CHUNK = 4
SLICES = tuple(
    Slice(path=path, start=(0,), stop=(size,), dtype="uint8")
    for path, size in {"wide": 14, "one": 4, "none": 0, "small": 1}.items()
)


@given(st.lists(st.tuples(st.sampled_from("arx"), st.sets(st.integers(0, 3)))))
def test_places_are_counted_like_a_model(actions) -> None:
    ref_counts, model = BufferRefCounts(4, 2), [[0, 0] for _ in range(4)]
    taken: list[np.ndarray] = []
    for action, numbers in actions:
        at = np.array(sorted(numbers), np.int64)
        if action == "a":
            found = ref_counts.acquire(at)
            assert (found is None) == any(all(model[n]) for n in numbers)
            if found is not None:
                assert set(np.flatnonzero(found != ABSENT)) == numbers
                for number in numbers:
                    assert model[number][found[number]] == 0
                    model[number][found[number]] = 1
                taken.append(found)
        elif taken:
            buffers = taken[len(numbers) % len(taken)]
            for number in np.flatnonzero(buffers != ABSENT):
                model[number][buffers[number]] += 1 if action == "r" else -1
            if action == "r":
                ref_counts.retain(buffers)
                taken.append(buffers)
            else:
                taken = [one for one in taken if one is not buffers] + [
                    buffers for one in taken if one is buffers
                ][1:]
                ref_counts.release(buffers)
        free = [not any(counts) for counts in zip(*model, strict=True)]
        assert ref_counts.free_buffers.tolist() == free


def test_what_is_free_cannot_be_released() -> None:
    ref_counts = BufferRefCounts(2, 2)
    buffers = ref_counts.acquire(np.array([1]))
    assert buffers is not None
    ref_counts.release(buffers)
    for refuse in (ref_counts.release, ref_counts.retain):
        with pytest.raises(ValueError, match="buffer 0 for chunk 1, which is free"):
            refuse(buffers)
    with pytest.raises(ValueError, match="num_buffers=0"):
        BufferRefCounts(1, 0)


contents = st.lists(st.integers(0, 2), min_size=7, max_size=7)
"""A small number for each chunk, so that chunks often stay as they are."""


def pool(num_buffers: int) -> ChunkPool:
    chunks = Chunks.of(SLICES, CHUNK)
    memory = memoryview(bytearray(num_buffers * chunks.nbytes))
    return ChunkPool(chunks, num_buffers, lambda: memory)


def bytes_of(chunks: Chunks, content: list[int]) -> list[bytes]:
    """The bytes of each slice."""
    parts = [bytes([n + 1]) * s for n, s in zip(content, chunks.sizes, strict=False)]
    return [b"".join(parts[chunks.numbers(i)]) for i in range(len(SLICES))]


class History(RuleBasedStateMachine):
    """One host's own and hosted copies beside what they must be."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.lock = Owning(pool(4)), threading.RLock()
        self.hosting = Hosting({1: pool(3)}, self.lock)
        self.step, self.committed = 0, 0
        self.staged: dict[int, list[bytes]] = {}
        self.hosted: dict[int, list[bytes]] = {}
        self.pins: dict[int, tuple[Copy, list[bytes]]] = {}
        self.given_up: list[Restoring] = []

    @rule(content=contents, copied=st.sets(st.integers(0, 3)), everything=st.booleans())
    def stage(self, content, copied, everything) -> None:
        """The next step, of which all or some slices are copied."""
        chunks, pool = self.own.pool.chunks, self.own.pool
        self.step += 1
        try:
            room = self.own.begin_stage(self.step)
        except RuntimeError:
            assert pool.ref_counts.acquire(np.arange(chunks.num_chunks)) is None
            return
        base = self.own.copies.get(room.base)
        slices = bytes_of(chunks, content)
        digests = [chunk_digests(one, CHUNK) for one in slices]
        buffers = np.frombuffer(room.buffers, np.uint8)
        kept = np.zeros(chunks.num_chunks, bool)
        if base is not None:
            kept = pool.unchanged(base, digests)
        for index, data in enumerate(slices):
            if everything or index in copied:
                numbers = chunks.numbers(index)
                for number in range(numbers.start, numbers.stop):
                    if not kept[number]:
                        at = (number - numbers.start) * CHUNK
                        pool.chunk(buffers, number)[:] = data[at : at + CHUNK]
            else:
                slices[index], digests[index] = b"", b""
        self.own.staged(self.step, digests, {}, pack_flags(kept))
        self.staged[self.step] = slices

    @rule(content=contents, brought=st.sets(st.integers(0, 6)), wrong=st.booleans())
    def receive(self, content, brought, wrong) -> None:
        """A push of the newest step, which may be cut or damaged."""
        chunks = self.hosting.pools[1].chunks
        slices = bytes_of(chunks, content)
        digests = [chunk_digests(one, CHUNK) for one in slices]
        found = self.hosting.begin(self.step, 1, digests)
        if found is None:
            return
        whole = b"".join(slices)
        ends = np.cumsum(chunks.sizes)
        for number in np.flatnonzero(found.lacks()).tolist():
            memory = found.claim([number])
            assert memory is not None and found.claim([number]) is None
            data = whole[ends[number] - chunks.sizes[number] : ends[number]]
            memory[0][:] = bytes(len(data)) if wrong and number in brought else data
            if number in brought:
                found.arrived([number])
            else:
                found.failed([number])
        if self.hosting.conclude(self.step, 1, found, {}):
            self.hosted[self.step] = slices
        self.hosting.end(self.step, 1, found)

    @rule()
    def begin_and_drop(self) -> None:
        """A push whose step is dropped while it writes."""
        data = [bytes([9]) * piece.nbytes for piece in SLICES]
        digests = [chunk_digests(one, CHUNK) for one in data]
        found = self.hosting.begin(self.step + 100, 1, digests)
        if found is None:
            return
        numbers = np.flatnonzero(found.lacks()).tolist()
        memory = found.claim(numbers)
        self.hosting.drop(lambda step: step <= self.step)
        for view in memory or ():
            view[:] = b"!" * len(view)
        found.failed(numbers)
        assert not self.hosting.conclude(self.step + 100, 1, found, {})
        self.hosting.end(self.step + 100, 1, found)

    @rule()
    def commit(self) -> None:
        """The newest step is safe: older ones go, but for the last commit."""
        last, self.committed = self.committed, self.step

        def needed(step: int) -> bool:
            return step >= self.step or step == last

        self._drop(needed)

    @rule()
    def restore(self) -> None:
        """The newest own step becomes the only one; what is wrong is filled again."""
        self._restore(given_up=False)

    @rule(content=contents)
    def give_up(self, content) -> None:
        """A restore whose step is dropped, and which goes on until `write_late`."""
        self.stage(content, {0}, False)  # the other slices are missing
        self._restore(given_up=True)
        self._drop(lambda step: False)
        self.stage(content, set(), True)

    def _restore(self, given_up: bool) -> None:
        if not self.staged:
            return
        step = max(self.staged)
        self._drop(lambda one: one == step)
        expected = self.staged[step] = [
            one or bytes([7]) * piece.nbytes
            for one, piece in zip(self.staged[step], SLICES, strict=True)
        ]
        digests = [chunk_digests(one, CHUNK) for one in expected]
        try:
            lacking = self.own.begin_restore(step, digests, {}, read=True)
        except RuntimeError:
            assert self.given_up or self.pins
            return
        missing = [SLICES[index] for index in lacking]
        restoring = Restoring(self.own, self.lock, step, missing)
        if given_up:
            self.given_up.append(restoring)
            return
        with restoring:
            for index, piece in zip(lacking, missing, strict=True):
                self._fill(restoring, piece, 7)
                restoring.restored({piece.key: digests[index]})

    def _fill(self, restoring: Restoring, piece: Slice, byte: int) -> None:
        for view in restoring.parts(piece).views:
            view[:] = bytes([byte]) * len(view)

    @precondition(lambda self: self.given_up)
    @rule()
    def write_late(self) -> None:
        """What was given up still writes, and then ends."""
        with self.given_up.pop(0) as restoring:
            for piece in restoring.missing:
                self._fill(restoring, piece, 33)

    def _drop(self, needed) -> None:
        self.own.drop(needed)
        self.hosting.drop(needed)
        for model in (self.staged, self.hosted):
            for step in [step for step in model if not needed(step)]:
                del model[step]

    @precondition(lambda self: self.staged and not self.pins)
    @rule()
    def pin(self) -> None:
        """An export begins."""
        step = min(self.staged)
        copy = self.own.copies[step]
        self.pins[self.own.pin(step)] = copy, self.staged[step]

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        """It has ended."""
        number, _ = self.pins.popitem()
        self.own.unpin(number)

    @invariant()
    def every_copy_is_whole(self) -> None:
        """Byte for byte, whatever was written since."""
        assert set(self.own.copies) == set(self.staged)
        assert set(self.hosting.copies) == set(self.hosted)
        own = [(self.own.copies[step], want) for step, want in self.staged.items()]
        for copy, want in [*own, *self.pins.values()]:
            self._same(self.own.pool, copy, want)
        for step, want in self.hosted.items():
            self._same(self.hosting.pools[1], self.hosting.copies[step][1], want)

    def _same(self, pool: ChunkPool, copy: Copy, want: list[bytes]) -> None:
        for index, data in enumerate(want):
            if copy.digests[index]:
                assert bytes(pool.parts(copy, index)) == data
                assert pool.right(copy, index, {})

    def teardown(self) -> None:
        """When nothing is held any more every buffer is free."""
        while self.pins:
            self.unpin()
        while self.given_up:
            self.write_late()
        self._drop(lambda step: False)
        assert self.own.pool.ref_counts.free_buffers.all()
        assert self.hosting.pools[1].ref_counts.free_buffers.all()
        assert not self.hosting.receiving


def test_no_history_overwrites_what_is_held() -> None:
    run_state_machine_as_test(
        History,
        settings=settings(max_examples=50, stateful_step_count=20, deadline=None),
    )
