"""Changes a live job from outside: its number of replicas, and which hosts it uses.

Sends a request to the leader, and repeats it while no leader answers or the job does
not train.
"""

import time
from typing import Any

from dtft.elastic.inspect_job import NotThere, Observer
from dtft.elastic.seat_policy import change_refusal
from dtft.elastic.store import StoreUnavailable

PAUSE_S = 0.5


class ChangeRefused(ValueError):
    """The leader, or the kind of the job, does not allow a requested change.

    The message has the reason.
    """


def scale(observer: Observer, replicas: int, limit_s: float) -> dict[str, Any]:
    """Changes the number of replicas; returns once the job trains with it.

    Sends the request to the leader, and sends it again while no leader answers or the
    job does not train. The requested number is kept in the store, so it outlasts a
    change of the leader.

    Args:
        observer: the job's observer, which knows the job's secret.
        replicas: the number of replicas.
        limit_s: seconds after which the call fails.

    Returns:
        `replicas`, `before` (the number when the request was last sent), `hosts`
        (number of hosts with a slot), `leader` (the leader's host) and `asked_again`
        (whether the request had to be repeated). If `before` is another number, also
        `step` (restored), `bytes_from_peers`, `bytes_from_storage` and `seconds` since
        the request was last sent. `before` equals `replicas` if the job had this number
        already, also if an earlier sending of the request has changed it.

    Raises:
        ChangeRefused: the job cannot have this number of replicas, or serves processes
            that its user starts.
        RuntimeError: the job has ended or has too few hosts, or the change failed or
            took longer than `limit_s`; the message has the reason.
    """
    if observer.is_served:  # without its processes this job may have no leader
        raise ChangeRefused(change_refusal(observer.job))
    late = f"the job does not train with {replicas} replicas"
    return _changed(observer, "scale", {"replicas": replicas}, limit_s, late)


def drain(observer: Observer, host: str, limit_s: float) -> dict[str, Any]:
    """Makes a host leave the job; returns once the job trains without it.

    If the host has a slot, the job is formed anew at the next commit: a spare takes the
    slot, or the job shrinks if it has no spare and may shrink (`--min-replicas`). With
    hot swap the other trainers keep their processes, as after a loss. The host's agent
    ends once a step is committed without the host; at once if the host has no slot and
    does not lead.

    Args:
        observer: the job's observer, which knows the job's secret.
        host: name of the host.
        limit_s: seconds after which the call fails.

    Returns:
        `host`, `slot` (the host's slot before; -1 for none), `leader` (the leader's
        host) and `asked_again` (whether the request had to be repeated). If the
        host had a slot, also `step` (restored), `bytes_from_peers`,
        `bytes_from_storage` and `seconds` since the request.

    Raises:
        ChangeRefused: the job has no such host, or serves processes that its user
            starts.
        RuntimeError: the job cannot train without the host, the job has ended, or the
            change failed or took longer than `limit_s`; the message has the reason.
    """
    if observer.is_served:
        raise ChangeRefused(change_refusal(observer.job))
    late = f"the job does not train without {host}"
    return _changed(observer, "drain", {"host": host}, limit_s, late)


def _changed(
    observer: Observer, op: str, request: dict[str, Any], limit_s: float, late: str
) -> dict[str, Any]:
    """Sends a request to the leader, and again until it reports the changed job.

    Sends it again only while the leader does not answer or tells to ask again.

    Args:
        observer: the job's observer.
        op: kind of the request, "scale" or "drain".
        request: fields of the request, without `limit_s`.
        limit_s: seconds after which the call fails.
        late: beginning of the error text if the change took longer than `limit_s`.

    Returns:
        The leader's reply, with `asked_again`: whether an earlier attempt failed.

    Raises:
        ChangeRefused: the leader refuses the change.
        RuntimeError: the job has ended, or the change failed or was late.
    """
    end = time.monotonic() + limit_s
    why = ""
    while (left := end - time.monotonic()) > 0:
        try:
            if (ended := observer.result()) is not None:
                raise RuntimeError(f"the job has ended ({ended}).")
            asked = request | {"limit_s": left}
            reply = observer.ask_leader(op, asked, left + PAUSE_S)
        except (NotThere, StoreUnavailable) as error:
            reply = {"error": str(error), "again": True}
        if "error" not in reply:
            return reply | {"asked_again": bool(why)}
        if reply.get("code") == 2:
            raise ChangeRefused(reply["error"])
        if not reply.get("again"):
            raise RuntimeError(reply["error"])
        why = reply["error"]
        time.sleep(min(PAUSE_S, max(0.0, end - time.monotonic())))
    raise RuntimeError(f"{late} after {limit_s:.0f} s: {why}")
