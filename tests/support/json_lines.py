"""Lines of JSON on the stdout of a child process, never mixed with what gloo prints."""

import functools
import json
import os
import sys
from typing import Any


@functools.cache
def _messages() -> int:
    """The former stdout. File descriptor 1, where gloo prints, is stderr afterwards."""
    messages = os.dup(1)
    os.dup2(2, 1)
    return messages


def keep_stdout() -> None:
    """Keeps stdout for `say`. Call it before JAX starts a thread that prints."""
    sys.stdout.flush()
    _messages()


def say(**message: Any) -> None:
    """Writes a message as one line, by one call, so that threads may say things too."""
    os.write(_messages(), f"{json.dumps(message)}\n".encode())
