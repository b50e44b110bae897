"""Reads slices directly from a peer's memory through NIXL, over RDMA where available.

NIXL is optional: without the `nixl` package all fetches use TCP. Each host's `Nixl`
lends memory to peers and reads the memory that peers lend. The lender's offer is sent
on the authenticated connection of `fetch`. `fetch` also checks digests and confirms
that the lender still lends its memory.

A read that timed out may still write to its targets until NIXL releases the transfer,
so the target memory of a failed fetch must not be used. A machine that can send packets
to the fabric's ports and knows a lender's keys can access the lent memory: use NIXL
only in networks whose hosts trust one another.
"""

import importlib
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dtft.checkpoint.state import Parts

logger = logging.getLogger(__name__)

_POLL_S = 0.0002
_TOO_LONG_S = 0.02  # a transfer is polled less often after this time


class NixlError(OSError):
    """A NIXL operation failed; the peer may be unreachable."""


class Nixl:
    """The NIXL agent of this process, shared by all fetches; thread-safe."""

    def __init__(self) -> None:
        """Starts the agent.

        Raises:
            ImportError: NIXL is not installed; the message has the install command.
        """
        try:
            nixl: Any = importlib.import_module("nixl")
        except ImportError as error:
            raise ImportError(
                f"NIXL is not usable: {error}. Install nixl and nixl-cu12 (or -cu13) "
                "with --no-deps (they declare torch, which they do not need; `make "
                "nixl` does it), or do without it: fetches then go over TCP."
            ) from error
        self._name = f"dtft-{uuid.uuid4().hex}"
        self._agent = nixl.nixl_agent(self._name, nixl.nixl_agent_config())
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, slices: Sequence[Parts]) -> Iterator[dict[str, Any]]:
        """Registers memory, so that peers can read it while the context lasts.

        Yields:
            The offer that a peer needs for `borrow` and `read`, as plain values: the
            "name" and "metadata" of the NIXL agent, and the "addresses": for each
            slice, (address, size in bytes) of each piece.
        """
        addresses = [
            [(_address(view), view.nbytes) for view in parts.views] for parts in slices
        ]
        with self._registered([view for parts in slices for view in parts.views]):
            with self._lock:
                metadata = self._agent.get_agent_metadata()
            yield {"name": self._name, "metadata": metadata, "addresses": addresses}

    @contextmanager
    def borrow(self, offer: Mapping[str, Any]) -> Iterator[None]:
        """Registers a peer that lends memory, while the context lasts.

        Args:
            offer: what the peer's `lend` yielded.

        Raises:
            NixlError: NIXL rejects the offer, or cannot remove the peer at the end.
        """
        with self._lock, _as_errors("the peer's offer"):
            self._agent.add_remote_agent(offer["metadata"])
        try:
            yield
        finally:
            with self._lock, _as_errors("the end"):
                self._agent.remove_remote_agent(offer["name"])

    @contextmanager
    def _registered(self, views: Sequence[memoryview]) -> Iterator[None]:
        regions = [(_address(v), v.nbytes, 0, "") for v in views if v.nbytes]
        if not regions:
            yield
            return
        with self._lock:
            handle = self._agent.register_memory(regions, "DRAM")
        try:
            yield
        finally:
            with self._lock:
                self._agent.deregister_memory(handle)

    @contextmanager
    def receiving(self, views: Sequence[memoryview]) -> Iterator[None]:
        """Registers own memory as a target of `read` while the context lasts."""
        with self._registered(views):
            yield

    def read(
        self,
        lender: str,
        sources: Sequence[tuple[int, int]],
        targets: Sequence[memoryview],
        deadline: float,
    ) -> None:
        """Reads a peer's memory into `targets`.

        Args:
            lender: name of the peer's agent.
            sources: (address, size in bytes) of each piece of the peer's memory.
            targets: own memory, which may be cut into other pieces than the sources.
            deadline: time limit, on the monotonic clock.

        Raises:
            NixlError: the peer is unreachable, or does not lend the memory.
            TimeoutError: the monotonic clock has passed `deadline`.
        """
        here = [(_address(view), view.nbytes) for view in targets if view.nbytes]
        pairs = _paired([one for one in sources if one[1]], here)
        if not pairs:
            return
        remote = [(there, size, 0) for there, _, size in pairs]
        local = [(mine, size, 0) for _, mine, size in pairs]
        agent = self._agent
        with self._lock, _as_errors("a read"):
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, "DRAM"),
                agent.get_xfer_descs(remote, "DRAM"),
                lender,
            )
        try:
            self._transfer(handle, deadline)
        finally:
            with self._lock, _as_errors("the end of a read"):
                agent.release_xfer_handle(handle)

    def _transfer(self, handle: Any, deadline: float) -> None:
        begun = time.monotonic()
        with self._lock, _as_errors("a read"):
            state = self._agent.transfer(handle)
        while state != "DONE":
            now = time.monotonic()
            if state == "ERR":
                raise NixlError("a read from the peer's memory failed")
            if now > deadline:
                raise TimeoutError("timed out reading the peer's memory")
            time.sleep(_POLL_S if now - begun < _TOO_LONG_S else 5 * _POLL_S)
            with self._lock, _as_errors("a read"):
                state = self._agent.check_xfer_state(handle)


def start_nixl() -> Nixl | None:
    """Starts this process's NIXL agent; on failure logs a warning and returns None."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # NIXL prints to stdout otherwise
    try:
        return Nixl()
    except ImportError as error:
        logger.warning("%s", error)
    except Exception as error:  # NIXL's own exceptions have no public base class
        logger.warning("NIXL does not start (%r): fetches use TCP.", error)
    return None


@contextmanager
def _as_errors(what: str) -> Iterator[None]:
    """Turns exceptions of NIXL, which have no public base class, into NixlError."""
    try:
        yield
    except Exception as error:
        raise NixlError(f"NIXL: {what} failed: {error!r}") from error


def _paired(
    sources: Sequence[tuple[int, int]], targets: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Pairs sources with targets, cut into pieces that are contiguous on both sides.

    Returns (source address, target address, size in bytes) of each piece.

    >>> _paired([(100, 5), (200, 3)], [(7, 2), (50, 6)])
    [(100, 7, 2), (102, 50, 3), (200, 53, 3)]
    """
    there, here = deque(sources), deque(targets)
    found = []
    while there and here:
        (far, left), (near, room) = there.popleft(), here.popleft()
        size = min(left, room)
        found.append((far, near, size))
        if left > size:
            there.appendleft((far + size, left - size))
        if room > size:
            here.appendleft((near + size, room - size))
    return found


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data if view.nbytes else 0
