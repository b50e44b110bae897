"""Slices read straight out of a peer's memory: NIXL, over RDMA where there is some.

Optional: without the `nixl` package fetches go over TCP alone. Each side's `Nixl` lends
memory to peers and reads what peers lend. What a reader needs to know travels on the
authenticated connection of `fetch`, which also checks digests and proves that the
lender still holds its side.

A read that was given up may still write until NIXL has let go of it: what a failed
fetch was to fill must not be trusted. Whoever can send packets to the fabric's own
ports, and has learned a lender's keys, reaches the lent memory: use it in networks
whose hosts trust one another.
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
_TOO_LONG_S = 0.02  # after this a transfer is not polled so often


class NixlError(OSError):
    """A read did not happen; the peer may be gone."""


class Nixl:
    """This process's NIXL agent; one for all fetches, from any thread."""

    def __init__(self) -> None:
        """Starts the agent.

        Raises:
            ImportError: NIXL is not installed; says how.
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
        """Makes memory readable to peers while the context lasts.

        Yields:
            What a peer's `read` needs, as plain values.
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
        """Connects to a lender while the context lasts.

        Raises:
            NixlError: the offer is not one of NIXL.
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
        """Makes own memory a place that `read` may write to."""
        with self._registered(views):
            yield

    def read(
        self,
        lender: str,
        sources: Sequence[tuple[int, int]],
        targets: Sequence[memoryview],
        deadline: float,
    ) -> None:
        """Reads a peer's memory, (address, size) by (address, size), into `targets`.

        The two may be cut into pieces in different ways.

        Raises:
            NixlError: the peer is gone, or does not lend that memory.
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
    """This process's NIXL agent; None, and one line in the log, if there is none."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it prints to stdout otherwise
    try:
        return Nixl()
    except ImportError as error:
        logger.warning("%s", error)
    except Exception as error:  # its own exceptions have no public base class
        logger.warning("NIXL does not start (%r): fetches go over TCP.", error)
    return None


@contextmanager
def _as_errors(what: str) -> Iterator[None]:
    """NIXL's own exceptions have no public base class."""
    try:
        yield
    except Exception as error:
        raise NixlError(f"NIXL: {what} failed: {error!r}") from error


def _paired(
    sources: Sequence[tuple[int, int]], targets: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """(address there, address here, size) of every piece that is whole on both sides.

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
