"""One host's copies of its own slices and of its peers' slices, by step, in one arena.

`ReplicaStore` stages, receives, verifies and restores these copies; its caller decides
when steps are dropped. `HeldCopies` searches the copies of a step, both of own slices
and of peers' slices.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtft.checkpoint.memory.arena import (
    HOSTED_BUFFERS,
    OWN_BUFFERS,
    Arena,
    ArenaMap,
    arena_bytes,
)
from dtft.checkpoint.memory.chunk_pool import ChunkPool, Copy, Read
from dtft.checkpoint.memory.incoming import Hosting, Receiving
from dtft.checkpoint.memory.own_copies import Owning, Restoring, Room
from dtft.checkpoint.memory.verification import CopyVerifier
from dtft.checkpoint.replication import CopyPlacement, Push
from dtft.checkpoint.state import Chunks, Layout, Parts, Slice


class HeldCopies:
    """The copies on one host, of its own and its peers' slices. Not thread-safe.

    A host's own slices are those of its slot in the job. The methods list the copies
    and their digests, and the copies that can be sent to peers. `begin_restore` makes a
    copy of the own slices of a step from copies on this host.
    """

    def __init__(self, own: Owning, hosting: Hosting) -> None:
        """Stores the arguments; copies nothing.

        Args:
            own: the copies of this host's own slices.
            hosting: the copies that this host keeps for peers.
        """
        self._own, self._hosting = own, hosting

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of the copies on this host, ascending.

        Leaves out a step whose only copy is kept for an export to storage (pinned).
        Copies known to be corrupt count until they are dropped.
        """
        return tuple(sorted({*self._own.copies, *self._hosting.copies}))

    def items(self, step: int) -> dict[str, Any]:
        """Returns the JSON items of `step`: data position and so on.

        Raises:
            KeyError: `steps()` does not have the step.
        """
        found = self._own.items.get(step)
        return self._hosting.items[step] if found is None else found

    def _copies(self, step: int) -> Iterator[tuple[ChunkPool, Copy]]:
        if step in self._own.copies:
            yield self._own.pool, self._own.copies[step]
        for source, copy in self._hosting.copies.get(step, {}).items():
            yield self._hosting.pools[source], copy

    def listed(self, step: int) -> list[tuple[str, Parts, bytes]]:
        """Lists (slice key, memory, recorded digests) of `step`'s slices on this host.

        The memory is not read. Slices with a chunk (a part of their bytes) known to be
        corrupt, and copies kept only for an export to storage (pinned), are left out.
        """
        return [
            (piece.key, parts, digests)
            for pool, copy in self._copies(step)
            for piece, parts, digests in pool.held(copy)
        ]

    def sendable(self, step: int) -> dict[str, Parts]:
        """Maps slice key to memory, for all slices of `step` that can be sent to peers.

        The memory is not read. Copies that are kept only for an export to storage
        (pinned) are included, corrupt slices are not.
        """
        found = {key: parts for key, parts, _ in self.listed(step)}
        for pinned, copy in self._own.pins.values():
            if pinned == step:
                for piece, parts, _ in self._own.pool.held(copy):
                    found.setdefault(piece.key, parts)
        return found

    # --------------------------------------------------------------- verified

    def recorded(self) -> dict[int, dict[str, bytes]]:
        """Maps step to (slice key to recorded digests), for the copies on this host.

        Copies kept for peers that are known to be corrupt are dropped first. Leaves out
        slices known to be corrupt, and copies kept only for an export (pinned). Reads
        no bytes.
        """
        self._hosting.forget_rotten()
        copies = {
            step: {key: digests for key, _, digests in self.listed(step)}
            for step in self.steps()
        }
        return {step: found for step, found in copies.items() if found}

    # ---------------------------------------------------------------- restore

    def begin_restore(
        self, step: int, digests: Mapping[str, bytes], items: dict, read: bool
    ) -> list[Slice]:
        """Makes a copy of this host's own slices of `step` from slices in its memory.

        Uses own slices, and slices kept for peers, whose digests are those in
        `digests`.

        Args:
            step: the step to restore.
            digests: slice key to digests in the commit. An own slice without digests is
                not in the commit and will be assembled from slices of the commit.
            items: the JSON values saved beside the arrays of the step.
            read: whether own slices with the right recorded digests are also read and
                checked. Slices kept for peers are always read and checked.

        Returns:
            The own slices that are still missing, and so must be fetched from peers, or
            assembled from pieces of other slices.
        """
        own_slices = self._own.pool.chunks.slices
        expected = [digests.get(piece.key) for piece in own_slices]
        lacking = self._own.begin_restore(step, expected, items, read)
        hosted = self._hosted_right(step) if lacking else {}
        missing = []
        for index in lacking:
            piece, good = own_slices[index], expected[index]
            found = None if good is None else hosted.get((piece.key, good))
            if good is None or found is None:
                missing.append(piece)
            else:
                self._own.fill(step, index, found, good)
        return missing

    def _hosted_right(self, step: int) -> dict[tuple[str, bytes], Parts]:
        """Reads and checks copies of own slices among the copies kept for peers.

        A slice can have several owners, so a peer's slice can be an own slice, too.
        Only copies of `step` are read.

        Returns:
            Maps (slice key, digests) to the memory of each slice that matches its
            digests.
        """
        found = {}
        for source, copy in self._hosting.copies.get(step, {}).items():
            pool, read = self._hosting.pools[source], Read()
            for piece, parts, digests in pool.held(copy):
                mine = piece in self._own.pool.index
                if mine and pool.right(copy, pool.index[piece], read):
                    found[piece.key, digests] = parts
        return found


class ReplicaStore:
    """All copies on one host, for one layout and slot. Thread-safe.

    A slot is a position in the job; it owns some slices of the state. A push is the set
    of slices of one slot that are sent to a peer, which keeps a copy.
    """

    def __init__(
        self,
        layout: Layout,
        slot: int,
        placement: CopyPlacement,
        *,
        path: Path,
        chunk_bytes: int,
        reserved: Arena | None = None,
    ) -> None:
        """Reserves shared memory (an arena) at `path` for the copies; has no copy yet.

        Args:
            layout: mesh and leaves, which decide the slices of every slot.
            slot: the slot of this host.
            placement: which slots' slices are copied to the hosts of which other slots.
            path: the file of the arena.
            chunk_bytes: size of a chunk in bytes; every chunk has its own digest.
            reserved: an arena of this process that is used, if it is large enough, in
                place of a new one, and is otherwise removed.

        Raises:
            OSError: too little memory; the message has the bytes needed and available.
        """
        self.layout, self.slot, self.placement = layout, slot, placement
        self.chunk_bytes = chunk_bytes
        self.own_slices = layout.slices(slot)
        self.outgoing = tuple(p for p in placement.pushes if p.source == slot)
        # Checked before the state is cut into chunks: the state may be far too large.
        needed = arena_bytes(layout, slot, placement)
        self.arena = Arena.reserve(path, max(needed, 1), reserved)
        self.path = self.arena.path
        self.map = ArenaMap.of(layout, slot, placement, chunk_bytes)
        self._lock = threading.RLock()
        self._own = Owning(self._new_pool(self.map.own, OWN_BUFFERS, 0))
        index = self._own.pool.index
        self._sent = {
            push.target: self.map.own.numbers_of([index[p] for p in push.slices])
            for push in self.outgoing
        }
        starts = self.map.hosted_starts
        pools = {
            source: self._new_pool(chunks, HOSTED_BUFFERS, starts[source])
            for source, chunks in self.map.hosted.items()
        }
        self._hosting = Hosting(pools, self._lock)
        self._held = HeldCopies(self._own, self._hosting)
        self.verifier = CopyVerifier(self._own, self._hosting, self._lock)

    def _new_pool(self, chunks: Chunks, num_buffers: int, start: int) -> ChunkPool:
        size = num_buffers * chunks.nbytes
        return ChunkPool(chunks, num_buffers, lambda: self.arena.view(start, size))

    # ------------------------------------------------------------- own slices

    def begin_stage(self, step: int) -> Room:
        """Takes memory for this host's own slices of `step`, which the trainer writes.

        Every chunk (a part of a slice's bytes) gets a free buffer. A step that was
        begun before and not recorded by `staged` is cancelled.

        Returns:
            The number of each chunk's buffer; and the base step, whose buffers the new
            step may share for unchanged chunks.

        Raises:
            RuntimeError: all buffers of a chunk are in use, because a commit or an
                export does not end, or a restore that was given up still writes.
        """
        with self._lock:
            return self._own.begin_stage(step)

    def staged(
        self, step: int, digests: Sequence[bytes], items: dict, kept: bytes = b""
    ) -> None:
        """Records that the trainer has written this host's own slices of a step.

        Args:
            step: the step, after its `begin_stage`.
            digests: for each own slice 16 bytes per chunk; b"" for a slice that was not
                copied.
            items: the JSON values of the step, such as the data position.
            kept: a bit per chunk, from `pack_flags`: whether the chunk equals that of
                the base step, which `begin_stage` returned (`Room.base`), and shares
                its buffer. b"" if every chunk was written.
        """
        with self._lock:
            self._own.staged(step, digests, items, kept)

    def own_parts(self, step: int, piece: Slice) -> Parts:
        """Returns the memory of `piece`, one of this host's own slices, at `step`.

        The caller may read or write the memory.

        Raises:
            KeyError: this host has no copy of its own slices at `step`.
        """
        with self._lock:
            pool = self._own.pool
            return pool.parts(self._own.copies[step], pool.index[piece])

    def own_digests(self, step: int, slices: Sequence[Slice]) -> list[bytes]:
        """Returns the digests of some of this host's own slices, 16 bytes per chunk.

        The digests of a slice that was not copied are b"".

        Raises:
            KeyError: this host has no copy of its own slices at `step`.
        """
        with self._lock:
            known, index = self._own.copies[step].digests, self._own.pool.index
            return [known[index[piece]] for piece in slices]

    def all_own_digests(self, step: int) -> list[bytes]:
        """Returns the digests of all own slices at `step`, 16 bytes per chunk.

        The digests of a slice that was not copied are b"".

        Raises:
            KeyError: this host has no copy of its own slices at `step`.
        """
        return self.own_digests(step, self.own_slices)

    def own_buffers(self, step: int) -> bytes:
        """Returns where this host's own slices of a step are in its shared memory.

        The result is the number of each chunk's buffer, one byte per chunk.

        Raises:
            KeyError: this host has no copy of its own slices at `step`.
        """
        with self._lock:
            return self._own.copies[step].buffers.tobytes()

    def push_chunks(
        self, step: int, push: Push, numbers: Sequence[int]
    ) -> list[memoryview]:
        """Returns the memory of some chunks that a push of this host sends.

        Args:
            step: the step.
            push: the own slices that this host sends to one peer.
            numbers: chunk numbers, counted through the slices of the push.

        Raises:
            KeyError: this host has no copy of its own slices at `step`.
        """
        with self._lock:
            buffers, sent = self._own.copies[step].buffers, self._sent[push.target]
            return [self._own.pool.chunk(buffers, int(sent[n])) for n in numbers]

    def items(self, step: int) -> dict[str, Any]:
        """Returns the JSON items of `step`: data position and so on.

        Raises:
            KeyError: `steps()` does not have the step.
        """
        with self._lock:
            return self._held.items(step)

    # ---------------------------------------------------------- hosted slices

    def has_received(self, step: int, source: int, digests: Sequence[bytes]) -> bool:
        """Whether this host has a verified copy of a peer's slices with these digests.

        Args:
            step: the step of the copy.
            source: the slot that owns the copied slices.
            digests: of each slice of the push from `source`, 16 bytes per chunk.
        """
        with self._lock:
            return self._hosting.has(step, source, digests)

    def begin_receive(
        self, step: int, source: int, digests: list[bytes]
    ) -> Receiving | None:
        """Admits one connection that carries a push: the slices of a slot at a step.

        If the connection is admitted, the caller must call `end_receive` once.

        Args:
            step: the step.
            source: the sending slot.
            digests: of each slice of the push, 16 bytes per chunk.

        Returns:
            The state of the push, which all its connections share. None if the
            connection is refused, which has one of these reasons:

            * This host is not to keep copies for `source`.
            * The number of digests is wrong.
            * A copy of the same step and slot is complete; it is never overwritten.
            * Another connection carries other digests for this step and slot. (An
              unfinished push with other digests that no connection carries is given up
              instead.)
            * There is no free memory (buffer) for a chunk.
        """
        with self._lock:
            return self._hosting.begin(step, source, digests)

    def received(
        self, step: int, source: int, receiving: Receiving, items: dict
    ) -> bool:
        """Turns a push into a copy if all its chunks were received and verified.

        Args:
            step: the step of the push.
            source: the sending slot.
            receiving: the push, from `begin_receive`.
            items: the JSON values saved beside the arrays of the step.

        Returns:
            Whether this call made the copy. False if a chunk is missing, if the push
            was given up, or if an earlier call made the copy.
        """
        with self._lock:
            return self._hosting.conclude(step, source, receiving, items)

    def end_receive(self, step: int, source: int, receiving: Receiving) -> None:
        """Removes one connection, admitted by `begin_receive`, from a push.

        If the last connection is removed before the push is complete, only the verified
        chunks stay, for the next connection. A push that was given up keeps no chunk.

        Args:
            step: the step of the push.
            source: the sending slot.
            receiving: the push, from `begin_receive`.
        """
        with self._lock:
            self._hosting.end(step, source, receiving)

    # -------------------------------------------------------------- retention

    def keep_only(self, steps: set[int]) -> None:
        """Drops the copies of all steps except `steps`, also unfinished copies."""
        self._drop(lambda step: step in steps)

    def drop_after(self, step: int) -> None:
        """Drops the copies of all steps newer than `step`, also unfinished copies."""
        self._drop(lambda one: one <= step)

    def drop_before(self, step: int, keep: set[int]) -> None:
        """Drops the copies of all steps older than `step`, except the steps `keep`.

        Unfinished copies are dropped, too.
        """
        self._drop(lambda one: one >= step or one in keep)

    def _drop(self, needed: Callable[[int], bool]) -> None:
        with self._lock:
            self._own.drop(needed)
            self._hosting.drop(needed)

    def pin(self, step: int) -> int:
        """Keeps the bytes of this host's own slices of `step` until `unpin`.

        The bytes stay while an export to storage reads them, even if the step is
        dropped.

        Returns:
            A number that identifies this pin.

        Raises:
            KeyError: this host has no copy of its own slices at `step`.
        """
        with self._lock:
            return self._own.pin(step)

    def unpin(self, pin: int) -> None:
        """Ends the pin with the number `pin`; its memory may then be reused.

        Raises:
            KeyError: the pin has ended.
        """
        with self._lock:
            self._own.unpin(pin)

    def pinned(self, pin: int) -> tuple[bytes, list[bytes]]:
        """Returns where a pinned copy is in shared memory, and its digests.

        `pin` is a number from the method `pin`.

        Returns:
            The number of each chunk's buffer, a byte per chunk; and for each own slice
            its digests, 16 bytes per chunk.

        Raises:
            KeyError: the pin has ended.
        """
        with self._lock:
            return self._own.pinned(pin)

    def complete_pin(self, pin: int) -> tuple[dict[Slice, Parts], int]:
        """Takes memory for the own slices that a pinned copy lacks.

        `pin` is a number from the method `pin`.

        Returns:
            The memory of each missing slice, and the number of a second pin, which
            keeps the memory even if `pin` ends. The caller fetches the slices into the
            memory and then ends the second pin.

        Raises:
            RuntimeError: a chunk has no free buffer.
            KeyError: the pin has ended.
        """
        with self._lock:
            return self._own.complete(pin)

    def completed(self, pin: int, digests: Mapping[str, bytes]) -> None:
        """Records that slices which a pinned copy lacked were fetched and verified.

        `pin` is a number from the method `pin`. `digests` maps slice key to digests,
        for each fetched slice.

        Raises:
            KeyError: the pin has ended.
        """
        with self._lock:
            self._own.completed(pin, digests)

    # --------------------------------------------------------------- verified

    def holdings(
        self, read: bool = True
    ) -> tuple[dict[int, dict[str, bytes]], list[str]]:
        """Lists the good and the corrupt copies of slices, of all steps on this host.

        Corrupt copies kept for peers are dropped, so that peers can send them again.

        Args:
            read: whether every chunk is read and checked now, without blocking other
                threads. Otherwise only chunks that an earlier read found corrupt count
                as corrupt, and whoever reads the bytes later must verify them.

        Returns:
            step -> slice key -> digests of each good slice, and a description of each
            corrupt slice ("step 12: params/w[0:4]:float32"). Copies kept only for an
            export (pinned) are among the corrupt slices, but not among the good.
        """
        for number in range(self.verifier.num_chunks if read else 0):
            self.verifier.read(number)
        with self._lock:
            known = self.verifier.known()
            return self._held.recorded(), known

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of the copies on this host, ascending.

        Leaves out a step whose only copy is kept for an export to storage (pinned).
        Copies known to be corrupt count until they are dropped.
        """
        with self._lock:
            return self._held.steps()

    def copies(self, step: int) -> list[tuple[str, Parts, bytes]]:
        """Lists (slice key, memory, recorded digests) of `step`'s slices on this host.

        The memory is not read. Slices with a chunk (a part of their bytes) known to be
        corrupt, and copies kept only for an export to storage (pinned), are left out.
        """
        with self._lock:
            return self._held.listed(step)

    def find(self, step: int, keys: Sequence[str]) -> list[Parts]:
        """Returns the memory of the slices with these keys, from any copies of `step`.

        The memory is not read.

        Raises:
            KeyError: this host lacks one of the slices, or its only copy is corrupt.
        """
        here = self.here(step)
        return [here[key] for key in keys]

    def here(self, step: int) -> dict[str, Parts]:
        """Maps slice key to memory, for all slices of `step` that can be sent to peers.

        The memory is not read. Copies that are kept only for an export to storage
        (pinned) are included, corrupt slices are not.
        """
        with self._lock:
            return self._held.sendable(step)

    # ---------------------------------------------------------------- restore

    def begin_restore(
        self, step: int, digests: Mapping[str, bytes], items: dict, read: bool = True
    ) -> Restoring:
        """Drops all other steps, and makes a copy of this host's own slices of `step`.

        The copy has the slices in this host's memory that match the digests. The result
        must be used in a `with` statement.

        Args:
            step: the step to restore.
            digests: slice key to digests in the commit. An own slice without digests is
                not in the commit and will be assembled from slices of the commit.
            items: the JSON values saved beside the arrays of the step.
            read: whether matching own slices are also read and checked. Otherwise only
                their recorded digests are compared, and the loader of a slice must
                verify it.

        Returns:
            The restore in progress. Its attribute `missing` lists the own slices that
            are missing or do not match, and so must be fetched or assembled. The caller
            writes each into the memory that `Restoring.parts` returns, and then calls
            `Restoring.restored`.

        Raises:
            RuntimeError: a chunk has no free buffer, because restores or exports that
                were given up have not ended yet.
        """
        with self._lock:
            self.keep_only({step})
            missing = self._held.begin_restore(step, digests, items, read)
            return Restoring(self._own, self._lock, step, missing)

    def close(self) -> None:
        """Unmaps the shared memory and removes its file."""
        self.arena.close()
        self.arena.unlink()
