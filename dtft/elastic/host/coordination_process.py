"""JAX's coordination service in a separate process on the first slot's host.

``python -m dtft.elastic.host.coordination_process`` does its imports, then waits for
one line on stdin: ``ADDRESS NUM_PROCESSES HEARTBEAT_S``. The process prints one
line when it serves, and ends when stdin closes, that is, with its agent. Each
formation gets a new process. Only this module of `dtft.elastic` imports JAX.
"""

import os
import sys

from dtft import _jax_internals


def main() -> None:
    """Serves the coordination service until stdin closes, then ends the process."""
    words = sys.stdin.readline().split()
    if not words:
        os._exit(0)
    address, num_processes, heartbeat_s = words
    service = _jax_internals.start_coordination_service(
        address, int(num_processes), float(heartbeat_s)
    )
    print("serving", flush=True)
    sys.stdin.read()
    del service
    os._exit(0)


if __name__ == "__main__":
    main()
