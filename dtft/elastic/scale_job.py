"""Changes a live job's number of replicas, from outside.

Sends the request to the leader, and repeats it while no leader answers or the job does
not train. The store keeps the requested size.
"""

import time
from typing import Any

from dtft.elastic.inspect_job import NotThere, Observer
from dtft.elastic.seat_policy import scale_refusal
from dtft.elastic.store import StoreUnavailable

PAUSE_S = 0.5


class ScaleRefused(ValueError):
    """The job cannot have this number of replicas; the message has the reason."""


def scale(observer: Observer, replicas: int, limit_s: float) -> dict[str, Any]:
    """Changes the number of replicas; returns once the job trains with it.

    Args:
        observer: the job's observer, which knows the job's secret.
        replicas: the number of replicas.
        limit_s: seconds after which the call fails.

    Returns:
        `replicas`, `before` (the number before the last attempt), `hosts` (number of
        hosts with a slot), `leader` (the leader's host) and `asked_again` (whether an
        earlier attempt of this call failed). After a change by the last attempt also
        `step` (restored), `bytes_from_peers`, `bytes_from_storage` and `seconds` since
        the request. An earlier attempt may have changed the size although the attempt
        failed; then `before` equals `replicas`.

    Raises:
        ScaleRefused: the job cannot have this number of replicas, or serves processes
            that its user starts.
        RuntimeError: the job has ended or has too few hosts, or the change failed or
            was late; the message has the reason.
    """
    if observer.is_served:  # without its processes this job may have no leader
        raise ScaleRefused(scale_refusal(observer.job))
    end = time.monotonic() + limit_s
    why = ""
    while (left := end - time.monotonic()) > 0:
        try:
            reply = _ask(observer, replicas, left)
        except (NotThere, StoreUnavailable) as error:
            reply = {"error": str(error), "again": True}
        if "error" not in reply:
            return reply | {"asked_again": bool(why)}
        if reply.get("code") == 2:
            raise ScaleRefused(reply["error"])
        if not reply.get("again"):
            raise RuntimeError(reply["error"])
        why = reply["error"]
        time.sleep(min(PAUSE_S, max(0.0, end - time.monotonic())))
    raise RuntimeError(
        f"the job does not train with {replicas} replicas after {limit_s:.0f} s: {why}"
    )


def _ask(observer: Observer, replicas: int, left_s: float) -> dict[str, Any]:
    if (ended := observer.result()) is not None:
        raise RuntimeError(f"the job has ended ({ended}).")
    request = {"replicas": replicas, "limit_s": left_s}
    return observer.ask_leader("scale", request, left_s + PAUSE_S)
