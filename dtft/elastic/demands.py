"""People who asked the leader to write the newest commit to storage, and their answer.

Must not know how a step gets there.
"""

import queue
from collections.abc import Callable
from typing import Any

from dtft.checkpoint.transport import MAX_REQUEST_HEADER, Channel, no_payload
from dtft.elastic.config import AgentConfig

Answer = Callable[[dict[str, Any]], None]


class Demands:
    """Who waits for an export, and since which commit. Used by the event loop."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._waiting: list[tuple[int, Answer]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, committed: int, answer: Answer) -> None:
        """Somebody wants step `committed` or a later one."""
        self._waiting.append((committed, answer))

    def outcome(self, step: int, ok: bool, error: str) -> None:
        """A step was written to storage, or not."""
        reply = {"step": step} if ok else {"error": error}
        for committed, answer in self._waiting:
            if step >= committed:
                answer(reply)
        self._waiting = [one for one in self._waiting if one[0] > step]

    def refuse(self, reason: str, *, moved: bool = False) -> None:
        """Nothing will come: all who still wait are told why.

        Args:
            reason: for people.
            moved: another host should be asked.
        """
        for _, answer in self._waiting:
            answer({"error": reason, "moved": moved})
        self._waiting.clear()

    def close(self) -> None:
        """Another host leads now: all who still wait should ask that one."""
        self.refuse("this host does not lead any more; ask again", moved=True)


def serve_export(
    channel: Channel, config: AgentConfig, ask: Callable[[Answer], None]
) -> None:
    """Has the leader asked for an export, and answers when it is over."""
    _asked(channel)
    answers: queue.Queue[dict[str, Any]] = queue.Queue()
    ask(answers.put)
    limit_s = config.timeouts.export + config.timeouts.stage
    try:
        reply = answers.get(timeout=limit_s)
    except queue.Empty:
        reply = {"error": f"no step was written within {limit_s:.0f} s"}
    channel.send(reply, timeout_s=10.0)
    _asked(channel)  # the caller has it


def _asked(channel: Channel) -> None:
    channel.receive(10.0, no_payload, max_header=MAX_REQUEST_HEADER)
