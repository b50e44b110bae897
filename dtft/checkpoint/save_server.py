"""An exporter process's talk with whoever started it: one JSON object per line.

Reads messages on stdin, has one step saved at a time, none beyond its limit, and
answers on stdout. Must not know what is saved or where to.
"""

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

SAVE_S = 300.0
"""Limit of one save; "timeout_s" in a message changes it."""


class Saver(Protocol):
    """What writes steps; the fields of a "save" message are its arguments."""

    @property
    def save(self) -> Callable[..., int]:
        """Writes one step, waits for it, and returns its bytes."""
        ...


class Server:
    """Answers messages; one save at a time, and none beyond its limit."""

    def __init__(self, out: TextIO, opener: Callable[[dict[str, Any]], Saver]) -> None:
        """Answers go to `out`; `opener` gets the fields of the first message."""
        self._out, self._opener = out, opener
        self._exporter: Saver | None = None
        self._failure = "no message {'op': 'open'} came before"

    def answer(self, message: dict[str, Any]) -> None:
        """Does what one message asks and writes one line."""
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
    """Ends the process at once on "close" or the end of stdin, also during a save.

    An unfinished step is a temporary directory, which the next exporter removes; the
    shutdown barrier of jax.distributed would wait for hosts that may be gone.
    """
    code = 1  # a line that is not JSON: the other end is not an agent
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
    """Answers messages on stdin until told to close."""
    logging.getLogger("absl").setLevel(logging.WARNING)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    messages: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(messages,), daemon=True).start()
    server = Server(out, opener)
    while True:
        server.answer(messages.get())
