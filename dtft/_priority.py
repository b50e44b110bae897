"""Lowers the priority of work that nobody waits for yet. Linux only.

Linux gives each thread a priority of its own, called niceness: 0 is the default, and 19
is the lowest priority.
"""

import os
import threading

LOW_PRIORITY = 10
"""Niceness of work that nobody waits for yet: training and recovery go first."""


def lower_priority(niceness: int = LOW_PRIORITY, ident: int | None = None) -> None:
    """Gives a thread this niceness, unless its priority is lower already.

    The threads and processes that the thread starts later have the same niceness. A
    priority is never raised, because only privileged users may do so: a job that was
    started with `nice -n 15` keeps its 15.

    Args:
        niceness: the niceness, 0 to 19.
        ident: the kernel's id of the thread, or the pid of a process, for its main
            thread. By default, the calling thread.

    Raises:
        ProcessLookupError: there is no such thread.
    """
    thread = threading.get_native_id() if ident is None else ident
    now = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(niceness, now))
