"""The exporter: a disposable process that writes steps from memory to storage.

``python -m dtft.checkpoint.storage.exporter`` reads a JSON object per line on stdin and
answers with a JSON object per line on stdout. It saves one step at a time, each with a
time limit. The exporters of a job are the processes of a `jax.distributed` job of their
own, on CPU. A checkpoint manager without other processes has a single exporter. An
exporter maps the memory of the slices read-only and checks the slices' digests (hashes
from the time of the snapshot), so that bytes corrupted in memory do not get valid
fingerprints (the checksums in storage).
"""

import contextlib
import gc
import json
import logging
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import jax
import numpy as np

from dtft.checkpoint.state import (
    Chunks,
    Layout,
    Leaf,
    LeafRecord,
    Parts,
    Record,
    Slice,
    check_copies,
    experiment_record,
    listed,
    slice_at,
)
from dtft.checkpoint.storage.directory import StepToStore, StorageTier
from dtft.checkpoint.storage.directory_lock import alone_in
from dtft.checkpoint.storage.export_plan import ExportWorld, export_world
from dtft.checkpoint.storage.job_layout import record_in


def refuse_corrupt(
    step: int,
    copies: Iterable[tuple[str, Parts, bytes]],
    chunk_bytes: int,
) -> None:
    """Checks the bytes of a step against their digests.

    A step's digests are computed at its snapshot. Its fingerprints, the checksums that
    storage keeps, are computed when it is exported. A bit that flips in memory between
    the two gets a valid fingerprint, and only the digest shows the error. So this check
    must run after the fingerprints are computed. Errors after this check are detected
    by the fingerprints.

    Args:
        step: number of the step, for the message.
        copies: (name, bytes, expected digests) of each slice.
        chunk_bytes: bytes per digest.

    Raises:
        ValueError: bytes differ from their digests; the message names up to eight
            slices.
    """
    bad = check_copies(copies, chunk_bytes)[1]
    if bad:
        raise ValueError(
            f"step {step} is corrupt in this host's memory, so nothing of it was "
            f"written: {listed(bad)} differ from their digests. The next step is a new "
            "snapshot."
        )


def from_hex(digests: Sequence[str]) -> list[bytes]:
    """Decodes digests from the hexadecimal strings of a JSON message.

    >>> from_hex(["00ff"])
    [b'\\x00\\xff']
    """
    return [bytes.fromhex(text) for text in digests]


SAVE_S = 300.0
"""Limit, in seconds, of the work that a message asks for; a message can set another
limit as "timeout_s"."""


class Saver(Protocol):
    """Interface of the object that writes steps for a `SaveServer`."""

    @property
    def save(self) -> Callable[..., int]:
        """Function that writes one step and waits until the step is complete.

        The arguments are the fields of a "save" message. The function returns the
        number of bytes written.
        """
        ...


class SaveServer:
    """A server that answers the messages of the process that started the exporter.

    Messages are answered one at a time. The exporter process ends if the work of a
    message exceeds its time limit.
    """

    def __init__(self, out: TextIO, opener: Callable[[dict[str, Any]], Saver]) -> None:
        """Stores the arguments.

        Args:
            out: file for the answers, one JSON object per line.
            opener: makes the `Saver` from the fields of the "open" message.
        """
        self._out, self._opener = out, opener
        self._exporter: Saver | None = None
        self._failure = "no message {'op': 'open'} came before"

    def answer(self, message: dict[str, Any]) -> None:
        """Executes one message ("open" or "save") and writes its answer as one line.

        An answer has "ok", the message's "op", and its "step" if it has one. The answer
        to a successful "save" also has the "seconds" that it took and the "bytes" that
        it wrote. If the work raises an exception, "ok" is false, and "error" describes
        the exception. The time limit is the message's "timeout_s" in seconds, by
        default `SAVE_S` (300). If the work exceeds this limit, "ok" is false, the
        answer also has "ended" (true), and this process ends.
        """
        op = message.get("op")
        reply: dict[str, Any] = {"op": op}
        if "step" in message:
            reply["step"] = message["step"]
        limit_s = float(message.get("timeout_s", SAVE_S))
        timer = threading.Timer(limit_s, self._give_up, (dict(reply), limit_s))
        timer.daemon = True
        timer.start()
        try:
            reply |= {"ok": True, **self._do(message)}
        except Exception as error:
            reply |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
            if op == "open":
                self._failure = reply["error"]
        timer.cancel()
        self._write(reply)

    def _do(self, message: dict[str, Any]) -> dict[str, Any]:
        fields = dict(message)
        fields.pop("op", None)
        fields.pop("timeout_s", None)
        if message.get("op") == "open":
            self._exporter = self._opener(fields)
            return {}
        if message.get("op") != "save":
            raise ValueError(
                f"op={message.get('op')!r} is not known. Allowed: open, save, close."
            )
        if self._exporter is None:
            raise RuntimeError(f"storage is not open: {self._failure}")
        begun = time.monotonic()
        written = self._exporter.save(**fields)
        return {"seconds": time.monotonic() - begun, "bytes": written}

    def _write(self, reply: dict[str, Any]) -> None:
        self._out.write(json.dumps(reply) + "\n")
        self._out.flush()

    def _give_up(self, reply: dict[str, Any], limit_s: float) -> None:
        error = f"TimeoutError: {limit_s:.0f} s for {reply['op']!r} have passed"
        self._write(reply | {"ok": False, "error": error, "ended": True})
        os._exit(1)


def _read(messages: queue.Queue[dict[str, Any]]) -> None:
    """Reads messages from stdin into `messages`, until "close" or the end of stdin.

    Then ends the process at once, also during a save. An unfinished step is a temporary
    directory, which the next exporter removes. An orderly exit would run the shutdown
    barrier of jax.distributed, which may wait for lost hosts.
    """
    code = 1  # a line was not JSON: the sender is not an agent
    try:
        for line in sys.stdin:
            message = json.loads(line)
            if message.get("op") == "close":
                break
            messages.put(message)
        code = 0
    finally:
        with contextlib.suppress(OSError):  # the log's disk may be full
            sys.stderr.flush()
        os._exit(code)


def serve(opener: Callable[[dict[str, Any]], Saver]) -> None:
    """Answers messages on stdin until "close" or the end of stdin; does not return.

    `opener` makes the object that writes steps from the fields of the "open" message.
    """
    logging.getLogger("absl").setLevel(logging.WARNING)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    # Not in the terminal's foreground group, so `stty tostop` would stop it at a log.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    messages: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(messages,), daemon=True).start()
    server = SaveServer(out, opener)
    while True:
        server.answer(messages.get())
        gc.collect()  # Orbax's cycles keep the memory of the agent mapped


JOIN_S = 60
"""Timeout of jax.distributed.initialize in seconds, within which all processes of an
export must start."""
HEARTBEAT_S = 10


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Fields of "open", the first message that an exporter receives."""

    directory: str
    """Storage directory."""
    layout: str
    """The layout (mesh, leaves and config) of the state as JSON."""
    chunk_bytes: int
    """Bytes per digest."""
    slot: int = 0
    """The slot whose slices this process reads from memory and writes to storage."""
    rank: int = 0
    """Rank of this process among the exporting processes."""
    world: int = 1
    """Number of exporting processes."""
    coordinator: str = ""
    """host:port of JAX's coordinator, which rank 0 runs; "" if there is one process."""
    devices: int = 1
    """Number of CPU devices of this process: at least the number of positions that the
    slot has in the mesh of the export."""
    max_to_keep: int | None = None
    """Number of newest steps that Orbax keeps. None: Orbax deletes no step; only the
    steps in the argument `delete` of `Exporter.save` are deleted."""
    scored: bool = False
    """Whether Orbax also writes the metrics of a step."""
    shared: bool = False
    """Whether other writers may use the directory. True: a save waits for the other
    writers and keeps an existing step. False: a save replaces a step of the same
    number."""
    limit_s: float = 300.0
    """Limit of one save, in seconds. A save in a shared directory waits for other
    writers for up to 0.8 of this limit."""


class Exporter:
    """Writer that reads one slot's slices from memory and writes them to storage."""

    def __init__(self, opening: Opening) -> None:
        """Checks the arguments and connects to the other exporters' JAX processes.

        Raises:
            ValueError: the `world`, `rank` and `slot` of `opening` are not those that
                the layout gives (`export_world`); or its `devices` are fewer than the
                positions of the slot in the mesh of the export.
        """
        self._opening, self._layout = opening, Layout.from_json(opening.layout)
        self._world = export_world(self._layout)
        self._positions = self._world.mesh.positions(opening.slot)
        _check(opening, self._world, len(self._positions))
        _join(opening)
        self._mesh = _mesh(self._world, opening.rank)
        pieces = self._layout.slices(opening.slot)
        self._chunks = Chunks.of(pieces, opening.chunk_bytes)
        self._index = {piece: index for index, piece in enumerate(pieces)}
        self._tier = StorageTier(
            opening.directory,
            max_to_keep=opening.max_to_keep,
            scored=opening.scored,
            background=False,  # a failed rank must answer although others wait for it
        )

    def save(
        self,
        *,
        step: int,
        memory: list[str],
        buffers: str,
        digests: list[str],
        items: dict[str, Any],
        delete: Sequence[int] = (),
    ) -> int:
        """Writes one step and waits until it is complete.

        Args:
            step: number of the step.
            memory: one path, of the file that has all slices of this slot; or one path
                per slice, of the file that has the slice.
            buffers: where each chunk (the bytes of one digest) is in its file. A file
                consists of buffers of equal size, each with room for all chunks of the
                slot. For each chunk there is one byte, as hex: the number, from 0, of
                the buffer that has the chunk.
            digests: for each of the slot's slices in the layout's order, the digests of
                its chunks, as hex.
            items: JSON values of the parts of the state that are not arrays; for a
                user's tree the result of `job_layout.dynamic_part`.
            delete: steps to delete once the step is complete; ignored unless the
                directory is shared (other writers may use it, `Opening.shared`).

        Returns:
            The size of this slot's slices, in bytes.

        Raises:
            ValueError: `buffers` does not fit the files, or the bytes do not match the
                digests.
            CorruptItems: `items` of a user's tree do not match their digest.
            StorageBusy: another process kept the lock of a shared directory.
            WrittenByAnother: a shared directory has a different step of this number.
        """
        parts = self._parts(memory, bytes.fromhex(buffers))
        record, values = self._values(parts, items)
        keys = [piece.key for piece in self._chunks.slices]
        stored = StepToStore(record, values)  # computes the fingerprints
        copies = zip(keys, parts, from_hex(digests), strict=True)
        refuse_corrupt(step, copies, self._chunks.chunk_bytes)
        if self._opening.shared:
            with self._turn():
                self._tier.write_once(step, stored)
                self._tier.delete(delete)
        else:
            if self._opening.world == 1:  # another host may have written meanwhile
                self._tier.reload()
            self._tier.write(step, stored)
            self._tier.wait_until_finished()
        return int(self._chunks.sizes.sum())

    def _parts(self, memory: list[str], buffers: bytes) -> list[Parts]:
        """Maps the memory files; returns the bytes of each of the slot's slices.

        `memory` and `buffers` are those of `save`, with `buffers` decoded from hex.

        Raises:
            ValueError: `buffers` does not fit the slot's chunks or the files' sizes.
        """
        # Mapped at each save: an agent may replace a file by a file of another size.
        mapped = {path: memoryview(_mapped(path)) for path in set(memory)}
        at = np.frombuffer(buffers, np.uint8)
        least = min(map(len, mapped.values()), default=0) // max(self._chunks.nbytes, 1)
        if len(at) != self._chunks.num_chunks or (at >= least).any():
            raise ValueError(
                f"buffers={buffers.hex():.40} are not buffers of the "
                f"{self._chunks.num_chunks} chunks of this slot: "
                f"{', '.join(sorted(mapped))} has at most {least} of each. Send one "
                "byte, as two hex digits, for each chunk."
            )
        count = len(self._chunks.slices)
        files = memory * count if len(memory) == 1 else memory
        return [
            self._chunks.parts(mapped[path], at, index)
            for index, path in zip(range(count), files, strict=True)
        ]

    def _values(
        self, parts: Sequence[Parts], items: dict[str, Any]
    ) -> tuple[Record, list[Any]]:
        """Makes the description (record) of the step, and the step's leaves.

        The leaves are in the record's order. Each leaf has the kind that was saved: jax
        array, PRNG key, numpy array, number.

        Args:
            parts: the bytes of each of the slot's slices.
            items: the argument of `save`.
        """
        leaves = {leaf.path: leaf for leaf in self._layout.leaves}
        record = record_in(self._layout, items)
        if record is not None:
            found = record.leaves
            return record, [
                self._value(leaf, leaves[leaf.path], parts) for leaf in found
            ]
        arrays = {path: self._array(leaf, parts) for path, leaf in leaves.items()}
        return experiment_record(arrays, items)

    def _value(self, record: LeafRecord, leaf: Leaf, parts: Sequence[Parts]) -> Any:
        if record.kind == "array":
            return self._array(leaf, parts)
        if record.kind == "key":
            return jax.random.wrap_key_data(self._array(leaf, parts), impl=record.impl)
        whole = slice_at(self._world.mesh, leaf, self._positions[0])
        value = _view(parts[self._index[whole]], whole)
        return value.item() if record.kind in ("bool", "int", "float") else value

    def _array(self, leaf: Leaf, parts: Sequence[Parts]) -> jax.Array:
        pieces = [slice_at(self._world.mesh, leaf, at) for at in self._positions]
        placed = [
            jax.device_put(_view(parts[self._index[piece]], piece), device)
            for piece, device in zip(
                pieces, (self._mesh.devices[at] for at in self._positions), strict=True
            )
        ]
        if self._mesh.size == 1:
            return placed[0]
        spec = jax.sharding.PartitionSpec(*(axes or None for axes in leaf.spec))
        return jax.make_array_from_single_device_arrays(
            leaf.shape,
            jax.sharding.NamedSharding(self._mesh, spec),
            placed,
            dtype=np.dtype(leaf.dtype),
        )

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that holds the storage directory's lock for one writer.

        Entering the context raises StorageBusy if another writer holds the lock for 0.8
        times the time limit of a save. In an object store (a directory with "://")
        there are no locks, and the context does nothing.
        """
        if "://" in self._opening.directory:
            return contextlib.nullcontext()
        directory = Path(self._opening.directory)
        directory.mkdir(parents=True, exist_ok=True)
        # Shorter than the save's limit, so that the answer names the busy directory.
        return alone_in(directory, 0.8 * self._opening.limit_s)


def _mapped(path: str) -> mmap.mmap | bytes:
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:  # cannot be mapped
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _check(opening: Opening, world: ExportWorld, needed: int) -> None:
    if opening.world != len(world.slots):
        raise ValueError(
            f"world={opening.world} does not fit the layout: slots {world.slots} hold "
            f"every slice. Start {len(world.slots)} exporters."
        )
    if world.slots[opening.rank] != opening.slot:
        raise ValueError(
            f"slot={opening.slot} is not that of rank={opening.rank}. The slots in "
            f"rank order are {world.slots}."
        )
    if opening.devices < needed:
        raise ValueError(
            f"devices={opening.devices} is below the {needed} that slot {opening.slot} "
            f"has in the export mesh. Send devices={needed} or more."
        )


def _join(opening: Opening) -> None:
    """Sets JAX's options and connects all exporters by `jax.distributed`, on CPU.

    Must run before JAX initializes its backends. A single exporter only sets options.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", opening.devices)
    jax.config.update("jax_enable_x64", True)  # keeps 64-bit leaves
    if opening.world == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        opening.coordinator,
        num_processes=opening.world,
        process_id=opening.rank,
        cluster_detection_method="deactivate",
        initialization_timeout=JOIN_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=5,
    )


def _mesh(world: ExportWorld, rank: int) -> jax.sharding.Mesh:
    by_process: dict[int, list[Any]] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id):
        by_process.setdefault(device.process_index, []).append(device)
    if jax.process_index() != rank:
        raise RuntimeError(f"rank {rank} became JAX process {jax.process_index()}")
    free = {slot: iter(by_process[rank]) for rank, slot in enumerate(world.slots)}
    devices = np.array([next(free[slot]) for slot in world.mesh.slots], dtype=object)
    return jax.sharding.Mesh(
        devices.reshape(world.mesh.axis_sizes), world.mesh.axis_names
    )


def _view(parts: Parts, piece: Slice) -> np.ndarray:
    """Returns a slice as an array: a view if the memory is one piece, else a copy."""
    dtype = np.dtype(piece.dtype)
    if not piece.nbytes:
        return np.zeros(piece.shape, dtype)
    return np.frombuffer(parts.whole(), np.uint8).view(dtype).reshape(piece.shape)


if __name__ == "__main__":
    serve(lambda fields: Exporter(Opening(**fields)))
