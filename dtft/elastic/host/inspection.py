"""Answers people who ask what a host holds and whether it is right; changes nothing.

Runs on the threads of the transport's connections, so that the event loop waits for
nobody who looks.
"""

from typing import Any

from dtft.checkpoint.memory import ReplicaStore, audit
from dtft.checkpoint.transport import MAX_REQUEST_HEADER, Channel, no_payload
from dtft.elastic.job import AgentConfig
from dtft.elastic.transfer import Inbox

ANSWER_S = 10.0


def serve_inspection(channel: Channel, config: AgentConfig, inbox: Inbox) -> None:
    """Answers one question: {"verify": bool}."""
    request = _asked(channel)
    holder = inbox.holder()
    reply: dict[str, Any] = {
        "epoch": inbox.epoch(),
        "slot": holder.slot if holder and inbox.epoch() > (0, 0) else -1,
        "layout": holder.layout.to_json() if holder else "",
        "arena_bytes": holder.path.stat().st_size if holder else 0,
        "storage_directory": str(config.storage_directory),
    }
    reply |= _held(holder, verify=bool(request.get("verify"))) if holder else {}
    channel.send(reply, timeout_s=ANSWER_S)
    _asked(channel)  # the caller has everything


def _asked(channel: Channel) -> dict[str, Any]:
    small = MAX_REQUEST_HEADER
    return channel.receive(ANSWER_S, no_payload, max_header=small)[0]


def _held(holder: ReplicaStore, *, verify: bool) -> dict[str, Any]:
    """What is recorded at this moment, without what the scrubber found wrong; with
    `verify` without what is read now and wrong, too."""
    held = {
        step: {key: known for key, _, known in holder.copies(step)}
        for step in holder.steps()
    }
    held = {step: found for step, found in held.items() if found}  # room ahead: none
    corrupt = holder.scrub.known()
    unread: list[int] = []
    for step in held if verify else ():
        found = audit(holder, step)
        if found is None:
            unread.append(step)  # training went on and dropped it
            continue
        held[step] = found[0]
        corrupt += [f"step {step}: {key}" for key in found[1]]
    return {"held": held, "corrupt": corrupt, "unread": unread}
