"""Salvage: writes the newest step in hosts' memory to storage, without the leader.

Salvage is for a local cluster that is ended by force; it needs neither store nor
trainers. The process that started the hosts asks each host for a list of its copies,
chooses a step and fetches the step's slices; one exporter process writes the step.
Hosts answer on threads of their port, so salvage also works while an agent's event loop
hangs, and while slots are being assigned anew.

A step whose commit the store has recorded can be chosen if the digests of the hosts'
copies give the commit's root digest (one digest over all slices). A step without a
recorded commit can be chosen, too, because the store may not have answered at the
commit. For such a step, only the copies on hosts with the newest assignment of slots
are used. They must include all slices, and copies of the same slice must have equal
digests.
"""

import contextlib
import dataclasses
import json
import logging
import queue
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtft.checkpoint.memory import Arena
from dtft.checkpoint.replication import adding_up
from dtft.checkpoint.state import (
    Chunks,
    Layout,
    MeshLayout,
    Parts,
    Slice,
    chunk_digests,
)
from dtft.checkpoint.storage import storage_steps
from dtft.checkpoint.transport import (
    MAX_REQUEST_HEADER,
    Channel,
    Credentials,
    Tls,
    connect,
    no_payload,
)
from dtft.elastic.host.export import save_fields, start_exporter
from dtft.elastic.host.memory_directory import (
    make_memory_directory,
    remove_memory_directory,
)
from dtft.elastic.transfer import FetchFailed, FetchOrder, Inbox, fetch_into

logger = logging.getLogger(__name__)

ADDRESS = "address"
"""File in a host's memory directory that contains the host's address."""
ASK_S = 2.0
"""Limit in seconds of connecting to a host, and of the host's answer. A host that
exceeds either limit is left out."""
CHUNK_BYTES = 4 << 20


class NotSalvaged(RuntimeError):
    """Salvage wrote no step to storage; the message has the reason."""


# --------------------------------------------------------------------- the host's side


def write_address(memory_directory: Path, address: str, *, tls: bool) -> None:
    """Writes a host's address to a file in its memory directory, for salvage.

    `address` is "host:port". `tls` is whether the host's port uses TLS; it is written
    to the file, too.
    """
    text = json.dumps({"address": address, "tls": tls})
    (memory_directory / ADDRESS).write_text(text)


def serve_salvage(channel: Channel, inbox: Inbox) -> None:
    """Answers one salvage request with a description of all copies on this host.

    The answer has this host's epoch, (generation, attempt) of the assignment that gave
    the host its slot, or (0, 0) without a slot. The answer also has an entry for each
    holder (the copies for one layout and slot): the layout as JSON, the bytes per
    chunk, and by step the recorded digests of the slices and the JSON items. The
    copies' bytes are not read. Leaves out a step that is dropped meanwhile.
    """
    holder = inbox.holder()
    holders = [it for it in (holder, *inbox.former()) if it is not None]
    held = []
    for one in holders:
        copies, items = {}, {}
        for step in one.steps():
            found = {key: known for key, _, known in one.copies(step) if known}
            with contextlib.suppress(KeyError):  # dropped since `steps`
                items[step] = one.items(step)
                if found:
                    copies[step] = found
        held.append(
            {
                "layout": one.layout.to_json(),
                "chunk_bytes": one.chunk_bytes,
                "held": copies,
                "items": items,
            }
        )
    channel.send({"epoch": inbox.epoch(), "holders": held}, timeout_s=ASK_S)
    channel.receive(ASK_S, no_payload, max_header=MAX_REQUEST_HEADER)


# -------------------------------------------------------------------------- the choice


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One host's copies under one layout: their digests, and the steps' JSON items."""

    host: str
    address: str
    epoch: tuple[int, int]
    """(generation, attempt) of the assignment that gave the host its slot; (0, 0)
    without a slot."""
    layout: str
    """The layout as JSON."""
    chunk_bytes: int
    held: Mapping[int, Mapping[str, bytes]]
    """Maps each step, then the key of each slice, to the digests of the copy's chunks,
    16 bytes each."""
    items: Mapping[int, Mapping[str, Any]]
    """Maps each step to its JSON items."""


@dataclass(frozen=True, kw_only=True)
class SalvagedStep:
    """A complete step in the hosts' memory, and the host to fetch each slice from.

    `digests` maps the key of each slice to the digests of its chunks.
    """

    step: int
    layout: Layout
    digests: Mapping[str, bytes]
    sources: Mapping[str, Holding]
    """Maps the key of each slice to the copies on one host, whose copy of the slice has
    the digests in `digests`."""
    items: Mapping[str, Any]
    chunk_bytes: int


def choose(
    holdings: Sequence[Holding],
    roots: Mapping[int, str],
    above: int,
    corrupt: Collection[str] = (),
) -> SalvagedStep:
    """Chooses the newest step whose slices are complete and consistent.

    A step is complete if the hosts have every slice of one layout. It is consistent if
    the slices' digests give the root digest of the recorded commit. Without a recorded
    commit only copies on hosts with the newest assignment of slots are used, and the
    step is consistent if copies of the same slice have equal digests.

    Args:
        holdings: the copies on all hosts that answered.
        roots: maps step to root digest (one digest over all slices), for each commit
            that is known to be recorded.
        above: the newest step in storage; only later steps are considered.
        corrupt: copies that are not used, each as "HOST step STEP: SLICE KEY".

    Raises:
        NotSalvaged: no host answered, or no later step is complete and consistent.
    """
    reasons: list[str] = []
    holdings = [_without(it, corrupt) for it in holdings]
    steps = {step for it in holdings for step in it.held if step > above}
    for step in sorted(steps, reverse=True):
        for text in dict.fromkeys(it.layout for it in holdings if step in it.held):
            having = [it for it in holdings if it.layout == text and step in it.held]
            found = _complete(step, Layout.from_json(text), having, roots.get(step))
            if isinstance(found, SalvagedStep):
                return found
            reasons.append(f"step {step}: {found}")
    if not holdings:
        raise NotSalvaged("no host answered")
    reasons = reasons[:3] or [f"no step after {above} is in memory"]
    if corrupt:
        reasons.append(f"corrupt copies: {', '.join(sorted(corrupt)[:3])}")
    raise NotSalvaged("; ".join(reasons))


def _without(holding: Holding, corrupt: Collection[str]) -> Holding:
    """Returns a host's copies without the corrupt ones.

    `corrupt` has a string "HOST step STEP: SLICE KEY" for each corrupt copy.
    """
    held = {
        step: {
            key: digest
            for key, digest in copies.items()
            if f"{holding.host} step {step}: {key}" not in corrupt
        }
        for step, copies in holding.held.items()
    }
    return dataclasses.replace(holding, held=held)


def _complete(
    step: int, layout: Layout, having: Sequence[Holding], root: str | None
) -> SalvagedStep | str:
    if root is None:  # not recorded: only one formation's hosts can agree
        newest = max(it.epoch for it in having)
        having = [it for it in having if it.epoch == newest]
    claims: dict[str, dict[bytes, list[str]]] = {}
    for it in having:
        for key, value in it.held[step].items():
            claims.setdefault(key, {}).setdefault(value, []).append(it.host)
    wanted = [piece.key for piece in layout.owners]
    missing = [key for key in wanted if key not in claims]
    if missing:
        return f"{len(missing)} of {len(wanted)} slices are on no host that answers"
    claims = {key: claims[key] for key in wanted}
    if root is not None:
        digests = adding_up(root, claims)
        if digests is None:
            return "the digests found do not add up to the committed root"
    elif any(len(told) > 1 for told in claims.values()):
        return "it was not recorded, and its hosts hold different bytes"
    else:
        digests = {key: next(iter(told)) for key, told in claims.items()}
    sources = {
        key: next(it for it in having if it.held[step].get(key) == value)
        for key, value in digests.items()
    }
    items = next((it.items[step] for it in having if it.items.get(step)), None)
    if items is None:
        return "no host has its items (values that are not arrays)"
    chunk_bytes = having[0].chunk_bytes
    return SalvagedStep(
        step=step,
        layout=layout,
        digests=digests,
        sources=sources,
        items=items,
        chunk_bytes=chunk_bytes,
    )


def undivided(layout: Layout) -> Layout:
    """Returns a layout of the same arrays, each as one whole slice, all in one slot.

    >>> from dtft.checkpoint.state.slices import Leaf
    >>> mesh = MeshLayout(axis_names=("fsdp",), axis_sizes=(2,), slots=(0, 1))
    >>> leaf = Leaf(path="w", shape=(4,), dtype="int8", spec=(("fsdp",),))
    >>> [it.key for it in undivided(Layout(mesh=mesh, leaves=(leaf,))).slices(0)]
    ['w[0:4]:int8']
    """
    one = MeshLayout(axis_names=("host",), axis_sizes=(1,), slots=(0,))
    leaves = tuple(dataclasses.replace(leaf, spec=()) for leaf in layout.leaves)
    return Layout(mesh=one, leaves=leaves, config=layout.config)


# ---------------------------------------------------------------------- the I/O


@dataclass(frozen=True, kw_only=True)
class Salvage:
    """One salvage: the hosts' memory directories, and the storage to write to."""

    job: str
    secret: bytes
    memory_directories: Mapping[str, Path]
    """Maps host name to the host's memory directory."""
    scratch: Path
    """Memory directory of this process, in which the step is assembled."""
    storage_directory: Path
    storage_keep: int
    log_path: Path

    def run(self, roots: Mapping[int, str], limit_s: float) -> int:
        """Writes the newest complete step in the hosts' memory to storage.

        If a slice cannot be fetched, queries the hosts again and chooses again, until
        the limit. Copies that a fetch has found to be corrupt are not chosen again.

        Args:
            roots: maps step to root digest (one digest over all slices), for each
                commit that is known to be recorded.
            limit_s: seconds for the whole salvage.

        Returns:
            The number of the step that was written.

        Raises:
            NotSalvaged: no step was written; the message has the reason.
            ValueError: the directory in which the step is assembled cannot be made: a
                live process or another user has it, or its parent does not exist.
        """
        end = time.monotonic() + limit_s
        make_memory_directory(self.scratch)
        try:
            stored = max(storage_steps(self.storage_directory), default=0)
            problem: Exception | None = None
            corrupt: set[str] = set()
            while time.monotonic() < end:
                choice = choose(self._ask_all(), roots, stored, corrupt)
                try:
                    return self._write(choice, end)
                except FetchFailed as error:  # replaced by a newer step, or corrupt
                    problem = error
                    corrupt.update(error.corrupt)
                    logger.warning("salvage of step %d: %s", choice.step, error)
            raise NotSalvaged(f"not within {limit_s:.0f} s: {problem or 'too slow'}")
        except (OSError, ValueError) as error:
            raise NotSalvaged(str(error)) from error
        finally:
            remove_memory_directory(self.scratch)

    def _ask_all(self) -> list[Holding]:
        hosts = list(self.memory_directories.items())
        with ThreadPoolExecutor(max(1, len(hosts))) as pool:
            return [it for told in pool.map(self._ask, hosts) for it in told]

    def _ask(self, host: tuple[str, Path]) -> list[Holding]:
        name, directory = host
        try:
            where = json.loads((directory / ADDRESS).read_text())
            credentials = self._credentials(tls=where["tls"])
            address = where["address"]
            hello = {"op": "salvage"}
            with connect(address, credentials, hello, ASK_S) as channel:
                told, _ = channel.receive(ASK_S)
                channel.send({"done": True}, timeout_s=ASK_S)
        except (OSError, TimeoutError, ValueError) as error:
            logger.warning("salvage continues without host %s: %s", name, error)
            return []
        return [
            Holding(host=name, address=address, epoch=tuple(told["epoch"]), **held)
            for held in told["holders"]
        ]

    def _credentials(self, *, tls: bool) -> Credentials:
        return Credentials(job=self.job, secret=self.secret, tls=Tls() if tls else None)

    def _write(self, choice: SalvagedStep, end: float) -> int:
        answers: queue.Queue[dict[str, Any]] = queue.Queue()
        whole = undivided(choice.layout)
        chunks = Chunks.of(whole.slices(0), CHUNK_BYTES)
        path = self.scratch / f"arena-{choice.step}"
        exporter = start_exporter(  # at once: its imports take longer than the fetch
            self._opening(whole), self.log_path, lambda _, answer: answers.put(answer)
        )
        try:
            arena = Arena.create(path, max(chunks.nbytes, 1))
            try:
                digests = self._bring(choice, chunks, arena, end)
                items = {**choice.items, "config": choice.layout.config}
                buffers = bytes(chunks.num_chunks)
                fields = save_fields(choice.step, path, buffers, digests, items)
                exporter.save(lambda: fields, max(end - time.monotonic(), 0.1))
                self._await(answers, choice.step, end)
            finally:
                arena.unlink()
        finally:
            exporter.close()
        return choice.step

    def _opening(self, whole: Layout) -> dict[str, Any]:
        return {
            "directory": str(self.storage_directory),
            "max_to_keep": self.storage_keep,
            "layout": whole.to_json(),
            "chunk_bytes": CHUNK_BYTES,
        }

    def _bring(
        self, choice: SalvagedStep, chunks: Chunks, arena: Arena, end: float
    ) -> list[bytes]:
        """Fetches the slices of a step and assembles whole arrays in the arena.

        Args:
            choice: the step, and the host of each slice.
            chunks: the place of each array in the arena.
            arena: the shared memory to fill.
            end: time (`time.monotonic`) at which fetches are given up.

        Returns:
            For each array, in the order of its slices in `chunks`, the digests of its
            chunks, joined to one bytes object.

        Raises:
            FetchFailed: a host has gone, lacks a slice, or sent corrupt bytes.
        """
        memory, leaves = arena.view(0, arena.size), {}
        starts = chunks.starts[chunks.first[:-1]].tolist()
        for piece, start in zip(chunks.slices, starts, strict=True):
            leaves[piece.path] = memory[start : start + piece.nbytes]
        pieces = {piece.key: piece for piece in choice.layout.owners}
        buffers = {key: bytearray(piece.nbytes) for key, piece in pieces.items()}
        by_host: dict[str, list[str]] = {}
        for key, source in choice.sources.items():
            by_host.setdefault(source.host, []).append(key)
        for keys in by_host.values():
            source = choice.sources[keys[0]]
            order = FetchOrder(
                step=choice.step,
                epoch=source.epoch,
                transfer={
                    "host": source.host,
                    "address": source.address,
                    "keys": [key for key in keys if buffers[key]],
                },
                digests=choice.digests,
            )
            views = {key: Parts([memoryview(buffers[key])]) for key in keys}
            where = json.loads(
                (self.memory_directories[source.host] / ADDRESS).read_text()
            )
            credentials = self._credentials(tls=where["tls"])
            left_s = max(end - time.monotonic(), 0.1)
            fetch_into(views, order, credentials, choice.chunk_bytes, left_s)
        shapes = {leaf.path: leaf.shape for leaf in choice.layout.leaves}
        for key, piece in pieces.items():
            _place(leaves[piece.path], shapes[piece.path], piece, buffers[key])
        return [
            chunk_digests(leaves[piece.path], CHUNK_BYTES) for piece in chunks.slices
        ]

    def _await(
        self, answers: "queue.Queue[dict[str, Any]]", step: int, end: float
    ) -> None:
        while True:
            try:
                answer = answers.get(timeout=max(end - time.monotonic(), 0.1))
            except queue.Empty:
                raise NotSalvaged(
                    f"step {step} was not written to {self.storage_directory} in time"
                ) from None
            if not answer.get("ok"):
                why = str(answer.get("error", "")).partition("\n")[0][:300]
                raise NotSalvaged(f"step {step} could not be written: {why}")
            if answer.get("step") == step:
                return


def _place(
    leaf: memoryview, shape: Sequence[int], piece: Slice, content: bytearray
) -> None:
    """Copies a slice's bytes to the slice's place in its array.

    Args:
        leaf: memory of the whole array.
        shape: shape of the whole array.
        piece: the slice.
        content: the slice's bytes; may be empty.
    """
    if not content:
        return
    dtype = np.dtype(piece.dtype)
    whole = np.frombuffer(leaf, np.uint8).view(dtype).reshape(tuple(shape))
    part = np.frombuffer(content, np.uint8).view(dtype).reshape(piece.shape)
    ranges: Iterable[tuple[int, int]] = zip(piece.start, piece.stop, strict=True)
    whole[tuple(slice(a, b) for a, b in ranges)] = part
