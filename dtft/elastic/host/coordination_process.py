"""JAX's coordination service in a separate process on the first slot's host.

``python -m dtft.elastic.host.coordination_process`` does its imports, then waits for
one line on stdin: ``ADDRESS NUM_PROCESSES HEARTBEAT_S IS_OPEN``. If IS_OPEN is 1, JAX
processes can connect at any time. If it is 0, they wait until all have connected. The
command prints one line when the service runs. Each further line on stdin has the
indices of JAX processes that the service is to treat as lost. The process ends when
stdin closes, that is, with its agent. Each world (set of JAX processes that connect to
one service) gets a new process. Only this module of `dtft.elastic` imports JAX.
"""

import os
import sys
import traceback

from dtft import _jax_internals


def main() -> None:
    """Serves the coordination service until stdin closes, then ends the process."""
    words = sys.stdin.readline().split()
    if not words:
        os._exit(0)
    address, num_processes, heartbeat_s, is_open = words
    service = _jax_internals.start_coordination_service(
        address, int(num_processes), float(heartbeat_s), is_open=is_open == "1"
    )
    print("serving", flush=True)
    for line in sys.stdin:
        for place in line.split():
            try:
                _jax_internals.give_up_process(address, int(place))
            except Exception:  # the others' agents end those that do not leave
                traceback.print_exc()
    del service
    os._exit(0)


if __name__ == "__main__":
    main()
