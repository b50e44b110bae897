"""Answers inspection requests for a host's copies; verifies the copies on request.

Runs on the threads of the transport's connections, so that the event loop waits neither
for clients nor for the reading of memory.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from dtft._priority import lower_priority
from dtft.checkpoint.memory import ReplicaStore, VerifiedCopies
from dtft.checkpoint.transport import MAX_REQUEST_HEADER, Channel, WireError, no_payload
from dtft.elastic.job import AgentConfig
from dtft.elastic.transfer import Inbox

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
PROGRESS_S = 1.0
"""Seconds between two progress messages of a verification, also while the verification
pauses to keep its rate."""


def serve_inspection(channel: Channel, config: AgentConfig, inbox: Inbox) -> None:
    """Answers one inspection request.

    The request is {"verify": bool, "rate": bytes per second, 0 for no limit}. If
    "verify" is True, reads all copies. Meanwhile sends {"progress": [bytes read, bytes
    of all copies]}, at once and then every second; the answer follows. The answer has
    the host's slot, layout, arena size and storage directory, and a map from step and
    slice key to the digests of the copy. These are the recorded digests or, if the
    copies were read, those of the bytes. The answer also lists the corrupt copies.

    Raises:
        WireError: the rate is not an integer of 0 or more.
        ConnectionAbortedError: the memory of this host's newest copies was freed
            meanwhile.
    """
    request = _asked(channel)
    holder = inbox.holder()
    reply: dict[str, Any] = {
        "epoch": inbox.epoch(),
        "slot": holder.slot if holder and inbox.epoch() > (0, 0) else -1,
        "layout": holder.layout.to_json() if holder else "",
        "arena_bytes": holder.path.stat().st_size if holder else 0,
        "storage_directory": str(config.storage_directory),
    }
    if request.get("verify"):
        rate = request.get("rate", 0)
        if type(rate) is not int or rate < 0:
            raise WireError("a verification's rate is not bytes a second")
        reply |= _verified(channel, holder, inbox.former(), rate)
    elif holder is not None:
        reply |= _recorded(holder)
    channel.send(reply, timeout_s=ANSWER_S)
    _asked(channel)  # the caller has received everything


def _asked(channel: Channel) -> dict[str, Any]:
    small = MAX_REQUEST_HEADER
    return channel.receive(ANSWER_S, no_payload, max_header=small)[0]


def _recorded(holder: ReplicaStore) -> dict[str, Any]:
    """Returns fields of the reply to a request that does not ask to verify copies.

    Reads no copies. The field "held" maps step, then slice key, to the recorded digests
    of the copy. A copy that an earlier check found corrupt is listed in "corrupt"
    instead.
    """
    held = {
        step: {key: known for key, _, known in holder.copies(step)}
        for step in holder.steps()
    }
    held = {step: found for step, found in held.items() if found}  # else only staged
    return {"held": held, "corrupt": holder.verifier.known()}


def _verified(
    channel: Channel,
    holder: ReplicaStore | None,
    former: Sequence[ReplicaStore],
    rate: int,
) -> dict[str, Any]:
    """Reads and verifies all copies of this host; returns fields of the reply.

    Args:
        channel: the connection on which progress is sent.
        holder: the copies for the newest assignment of slots; None without any.
        former: the copies for earlier assignments.
        rate: bytes per second that are read at most; 0 for no limit.

    Returns:
        The fields are:

        * `held`: maps step, then slice key, to the digests of the bytes in `holder`.
        * `unread`: the steps in `holder` that were dropped meanwhile.
        * `corrupt`: a text for each corrupt copy in `holder` and `former`.
        * `copies`, `nbytes`: the numbers of copies and of bytes that were read in
          `holder` and `former`.
        * `seconds`: the duration of the verification.

        Former copies whose memory was freed meanwhile are left out.

    Raises:
        ConnectionAbortedError: the memory of `holder` was freed meanwhile.
    """
    stores = [*([holder] if holder else []), *former]
    lower_priority()
    begun = time.monotonic()
    pace = Pace(
        rate=rate,
        total=sum(it.verifier.num_bytes for it in stores),
        tell=lambda *told: channel.send({"progress": told}, timeout_s=ANSWER_S),
    )
    pace.after(0)
    found: dict[ReplicaStore, VerifiedCopies] = {}
    for store in stores:
        try:
            found[store] = store.verifier.verify(pace.after)
        except ValueError as error:  # its memory was freed; fatal for the newest
            if store is holder:
                raise ConnectionAbortedError(str(error)) from error
    corrupt = [text for one in found.values() for text in one.corrupt]
    for text in corrupt:
        logger.warning(
            "corrupt copy, %s: it is no longer sent to other hosts; the next step's "
            "copy reuses none of its bytes",
            text,
        )
    newest = found.get(holder) if holder else None
    return {
        "held": newest.held if newest else {},
        "unread": list(newest.unread) if newest else [],
        "corrupt": corrupt,
        "copies": sum(one.copies for one in found.values()),
        "nbytes": sum(one.nbytes for one in found.values()),
        "seconds": time.monotonic() - begun,
    }


class Pace:
    """Limits the rate at which a verification reads copies; reports its progress.

    A caller reads some bytes, then calls `after`, which counts these bytes as read and
    waits for as long as they may take at this rate. In the example 200 bytes at 100
    bytes a second take 2 s. Progress is reported at 0, 1 and 2 s; the last 150 bytes
    are in the reports from second 1 on, because they are counted before the wait.

    >>> now, told = [0.0], []
    >>> def sleep(seconds): now[0] += seconds
    >>> pace = Pace(200, 100, lambda *it: told.append(it), lambda: now[0], sleep)
    >>> for nbytes in (0, 50, 150): pace.after(nbytes)
    >>> now, told
    ([2.0], [(0, 200), (200, 200), (200, 200)])
    """

    def __init__(
        self,
        total: int,
        rate: int,
        tell: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Starts with no bytes read.

        Args:
            total: bytes of all copies.
            rate: bytes a second; 0 for no limit.
            tell: called with bytes read and `total`.
            clock: returns seconds of any monotonic clock.
            sleep: waits for the given number of seconds.
        """
        self._total, self._rate, self._tell = total, rate, tell
        self._clock, self._sleep = clock, sleep
        self._read = 0
        self._next_at, self._tell_at = clock(), clock()

    def after(self, nbytes: int) -> None:
        """Counts `nbytes` as read; returns when the next chunk may be read.

        A caller that was slower than the rate does not catch up: its later reads keep
        to the rate, too.
        """
        self._read += nbytes
        now = self._clock()
        if self._rate:
            self._next_at = max(self._next_at, now) + nbytes / self._rate
        while True:
            if now >= self._tell_at:
                self._tell(self._read, self._total)
                self._tell_at = now + PROGRESS_S
            if not self._rate or now >= self._next_at:
                return
            self._sleep(min(self._next_at - now, max(self._tell_at - now, 0)))
            now = self._clock()
