"""Reads slices directly from a peer's memory through NIXL, over RDMA where available.

NIXL is optional: without the `nixl` package all fetches use TCP. Each host's `Nixl`
lends memory to peers and reads the memory that peers lend. The lender's offer (what
peers need to read the memory, such as its addresses) is sent on the authenticated
connection of `fetch`. `fetch` also checks digests and confirms that the lender still
lends its memory.

NIXL's calls have no time limit of their own. They run one at a time on one thread, and
their callers wait for a limited time. A call that has not ended in this time is late.
While a call is late, further calls fail at once. When the late call has ended, what it
registered or prepared is released. Calls that release something are queued instead of
failing, and are made after the late call.

A read that timed out may still write to its targets until NIXL releases the transfer,
so the target memory of a failed fetch must not be used. A machine that can send packets
to the fabric's ports and knows a lender's keys can access the lent memory: use NIXL
only in networks whose hosts trust one another.
"""

import importlib
import logging
import os
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from dtft.checkpoint.state import Parts

logger = logging.getLogger(__name__)

START_S = 30.0
"""Longest time in seconds that the start of NIXL may take."""
CALL_S = 5.0
"""Longest time in seconds that any other call of NIXL may take."""
_POLL_S = 0.0002
_TOO_LONG_S = 0.02  # a transfer is polled less often after this time


class NixlError(OSError):
    """A NIXL operation failed or took too long; the peer may be unreachable."""


class NixlUnreleased(NixlError):
    """NIXL did not release the handle of a read, and may still write to its targets."""


class Nixl:
    """The NIXL agent (NIXL's library object) of this process, shared by all fetches.

    Thread-safe.
    """

    def __init__(self) -> None:
        """Starts the agent.

        Raises:
            ImportError: NIXL is not installed; the message has the install command.
            NixlError: NIXL does not start, or not within `START_S` (30) seconds.
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
        self._call = _OneThread()
        config = nixl.nixl_agent_config()
        self._agent = self._call(
            "the start", nixl.nixl_agent, self._name, config, limit_s=START_S
        )

    @contextmanager
    def lend(self, slices: Sequence[Parts]) -> Iterator[dict[str, Any]]:
        """Registers memory, so that peers can read it while the context lasts.

        `slices` is the memory of each slice, in pieces.

        Yields:
            The offer that a peer needs for `borrow` and `read`, as plain values: the
            "name" and "metadata" of the NIXL agent, and the "addresses": for each
            slice, (address, size in bytes) of each piece.

        Raises:
            NixlError: NIXL fails to register the memory, or takes too long. If NIXL
                fails to deregister the memory, a warning is logged.
        """
        addresses = [
            [(_address(view), view.nbytes) for view in parts.views] for parts in slices
        ]
        with self._registered([view for parts in slices for view in parts.views]):
            metadata = self._call("its metadata", self._agent.get_agent_metadata)
            yield {"name": self._name, "metadata": metadata, "addresses": addresses}

    @contextmanager
    def borrow(self, offer: Mapping[str, Any]) -> Iterator[None]:
        """Lets `read` read the memory that a peer lends, while the context lasts.

        Adds the peer to this process's NIXL agent, by the metadata in the peer's offer,
        and removes the peer from the agent when the context ends.

        Args:
            offer: what the peer's `lend` yielded: "name" and "metadata" of the peer's
                NIXL agent, and "addresses" of the memory.

        Raises:
            NixlError: NIXL rejects the offer, or takes too long. If NIXL fails to
                remove the peer afterwards, a warning is logged.
        """
        remove = partial(self._agent.remove_remote_agent, offer["name"])
        self._call(
            "the peer's offer",
            self._agent.add_remote_agent,
            offer["metadata"],
            undo=lambda _: remove(),
        )
        try:
            yield
        finally:
            self._call.end("to remove the peer", remove)

    @contextmanager
    def _registered(self, views: Sequence[memoryview]) -> Iterator[None]:
        regions = [(_address(v), v.nbytes, 0, "") for v in views if v.nbytes]
        if not regions:
            yield
            return
        register, deregister = (
            self._agent.register_memory,
            self._agent.deregister_memory,
        )
        handle = self._call(
            "to register memory", register, regions, "DRAM", undo=deregister
        )
        try:
            yield
        finally:
            self._call.end("to deregister memory", deregister, handle)

    @contextmanager
    def receiving(self, views: Sequence[memoryview]) -> Iterator[None]:
        """Registers `views` as target memory of `read` while the context lasts.

        Raises:
            NixlError: NIXL fails to register the memory, or takes too long. If NIXL
                fails to deregister the memory, a warning is logged.
        """
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
            lender: name of the peer's NIXL agent, from its offer.
            sources: (address, size in bytes) of each piece of the peer's memory.
            targets: own memory, which may be cut into other pieces than the sources.
            deadline: time limit, on the monotonic clock.

        Raises:
            NixlError: the peer is unreachable, or does not lend the memory, or the
                monotonic clock has passed `deadline`, or a call of NIXL took too long.
                NIXL no longer writes to the targets.
            NixlUnreleased: the read could not be released, whether it succeeded or not.
                NIXL may still write to the targets.
        """
        here = [(_address(view), view.nbytes) for view in targets if view.nbytes]
        pairs = _paired([one for one in sources if one[1]], here)
        if not pairs:
            return
        remote = [(there, size, 0) for there, _, size in pairs]
        local = [(mine, size, 0) for _, mine, size in pairs]
        agent = self._agent

        def prepare() -> Any:
            return agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, "DRAM"),
                agent.get_xfer_descs(remote, "DRAM"),
                lender,
            )

        release = agent.release_xfer_handle
        handle = self._call("to prepare a read", prepare, undo=release)
        try:
            self._transfer(handle, deadline)
        finally:
            if not self._call.end("to release a read", release, handle):
                raise NixlUnreleased("NIXL: a read was not released")

    def _transfer(self, handle: Any, deadline: float) -> None:
        begun = time.monotonic()
        state = self._call("a read", self._agent.transfer, handle)
        while state != "DONE":
            now = time.monotonic()
            if state == "ERR":
                raise NixlError("a read from the peer's memory failed")
            if now > deadline:
                raise NixlError("timed out reading the peer's memory")
            time.sleep(_POLL_S if now - begun < _TOO_LONG_S else 5 * _POLL_S)
            state = self._call("a read", self._agent.check_xfer_state, handle)


class _OneThread:
    """Calls functions that may hang, one at a time, on a daemon thread.

    An executor's thread would be joined at exit, so a call that hangs would keep the
    process from ending.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._late: Future[Any] | None = None
        threading.Thread(target=self._run, daemon=True, name="nixl").start()

    def _run(self) -> None:
        while True:
            self._waiting.get()()

    @property
    def _hangs(self) -> bool:
        return self._late is not None and not self._late.done()

    def _begin(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except Exception as error:  # NIXL's own exceptions have no public base
                future.set_exception(error)
            else:
                future.set_result(result)

        self._waiting.put(run)
        return future

    def __call__(
        self,
        what: str,
        function: Callable[..., Any],
        *arguments: Any,
        limit_s: float = CALL_S,
        undo: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Calls `function` after all earlier calls, and returns its result.

        Args:
            what: name of the call, for the error.
            function: called with `arguments`; not at all if earlier calls take the
                whole `limit_s`.
            limit_s: longest wait for earlier calls and this one, in seconds.
            undo: called with the result of a call that ended too late.

        Raises:
            NixlError: the function raised an exception or did not end in time, or an
                earlier call that did not end in time is still running.
        """
        if self._hangs:
            raise NixlError(f"NIXL: {what} waits for an earlier call that hangs")
        future = self._begin(partial(function, *arguments))
        wait((future,), limit_s)
        if not future.done() and not future.cancel():
            self._late = future
            if undo is not None:
                future.add_done_callback(partial(self._undo, undo))
            raise NixlError(f"NIXL: {what} did not end within {limit_s:g} s")
        if future.cancelled():
            raise NixlError(f"NIXL: {what} did not begin within {limit_s:g} s")
        if (error := future.exception()) is not None:
            raise NixlError(f"NIXL: {what} failed: {error!r}") from error
        return future.result()

    def end(self, what: str, function: Callable[..., Any], *arguments: Any) -> bool:
        """Calls a function that releases something, even if earlier calls delay it.

        Waits for its end for at most `CALL_S` (5) seconds, and not at all while an
        earlier call hangs.

        Args:
            what: name of the call, for the warning.
            function: called with `arguments`, also after this method has returned.

        Returns:
            True if the function has succeeded within that time. Otherwise a warning is
            logged.
        """
        hung = self._hangs
        future = self._begin(partial(function, *arguments))
        wait((future,), 0 if hung else CALL_S)
        if not future.done():
            self._late = self._late if hung else future
            logger.warning(
                "NIXL did not manage %s in time: no longer waiting for it", what
            )
            return False
        if (error := future.exception()) is not None:
            logger.warning("NIXL failed %s: %r", what, error)
            return False
        return True

    def _undo(self, undo: Callable[[Any], Any], late: Future[Any]) -> None:
        if late.exception() is None:
            self._begin(partial(undo, late.result()))


def start_nixl() -> Nixl | None:
    """Starts this process's NIXL agent; on failure logs a warning and returns None."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # NIXL prints to stdout otherwise
    try:
        return Nixl()
    except ImportError as error:
        logger.warning("%s", error)
    except Exception as error:  # NIXL's own exceptions have no public base class
        logger.warning("NIXL does not start (%s): fetches use TCP.", error)
    return None


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
