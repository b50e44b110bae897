"""What a host's report to the leader must look like. Pure checks.

Whoever reports has proved that it knows the job's secret, but may still be of another
version, or broken: what does not fit is refused by name, and the leader goes on. Must
not know what a report leads to, nor connections.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dtft.checkpoint.interval import Window
from dtft.checkpoint.slices import Layout
from dtft.elastic.fields import (
    Check,
    anything,
    fault,
    or_none,
    positive,
)
from dtft.elastic.fields import ballot as _ballot
from dtft.elastic.fields import binary as _bytes
from dtft.elastic.fields import code as _code
from dtft.elastic.fields import flag as _flag
from dtft.elastic.fields import items as _anything
from dtft.elastic.fields import layout as _layout
from dtft.elastic.fields import list_of as _list
from dtft.elastic.fields import map_of as _map
from dtft.elastic.fields import number as _number
from dtft.elastic.fields import port as _port
from dtft.elastic.fields import root as _root
from dtft.elastic.fields import seconds as _seconds
from dtft.elastic.fields import text as _text

_positive_or_none = or_none(positive)


def _window_or_none(value: object) -> bool:
    """A `Window` as a mapping: counts and finite seconds, none of them negative."""
    if value is None:
        return True
    kinds = {field.name: field.type for field in dataclasses.fields(Window)}
    return (
        isinstance(value, dict)
        and value.keys() == kinds.keys()
        and all(
            _number(number) or (kinds[name] is float and _seconds(number))
            for name, number in value.items()
        )
    )


FIELDS: Mapping[str, Mapping[str, Check]] = {
    "holdings": {
        "ballot": _ballot,
        "layouts": _list(_layout),
        "holdings": _map(_number, _map(_text, _bytes)),
        "complete": _map(_number, _list(_number)),
        "export_port": _port,
        "items": _map(_number, _anything),
        "corrupt": _list(_text),
        "finished": _number,
    },
    "prepared": {
        "ballot": _ballot,
        "export_port": _port,
        "own": _number,
        "peers": _number,
        "seconds": _seconds,
        "restored": _map(_text, _bytes),
    },
    "prepare_failed": {
        "ballot": _ballot,
        "error": _text,
        "corrupt": _list(_text),
    },
    "layout": {"ballot": _ballot, "layout": _layout},
    "running": {
        "ballot": _ballot,
        "slot": _number,
        "step": _number,
        "bytes_from_storage": _number,
    },
    "staged": {
        "ballot": _ballot,
        "slot": _number,
        "step": _number,
        "digests": _list(_bytes),
        "interval": _positive_or_none,
        "window": _window_or_none,
    },
    "held": {
        "ballot": _ballot,
        "step": _number,
        "source": _number,
        "target": _number,
        "root": _root,
    },
    "finished": {
        "ballot": _ballot,
        "slot": _number,
        "step": _number,
        "summary": anything,
    },
    "trainer_exit": {"ballot": _ballot, "code": _code},
    "exported": {"ballot": _ballot, "step": _number, "ok": _flag, "error": _text},
    "fatal": {"message": _text, "ballot": _ballot, "slot": _number, "code": _code},
}
"""The reports there are, and what each of their fields must be."""

SERVED_FIELDS: Mapping[str, Mapping[str, Check]] = {
    **FIELDS,
    "holdings": {**FIELDS["holdings"], "attached_ns": _number},
    "flush": {
        "ballot": _ballot,
        "slot": _number,
        "token": _number,
        "step": _number,
        "store": _flag,
    },
    "wanted": {"ballot": _ballot, "slot": _number, "step": _number, "layout": _layout},
    "process_gone": {"ballot": _ballot},
}
"""As `FIELDS`, in a job whose processes are the user's own."""

OPTIONAL: Mapping[str, frozenset[str]] = {
    "holdings": frozenset({"complete", "export_port"}),
    "staged": frozenset({"interval", "window"}),
    "fatal": frozenset({"ballot", "slot", "code"}),
    "prepared": frozenset({"restored"}),
    "finished": frozenset({"summary"}),
}
"""Fields that may be left out."""

OF_A_SLOT = (
    *("prepared", "prepare_failed", "layout", "running"),
    *("staged", "held", "finished", "flush", "wanted"),
)
"""Reports that only the host of a slot can make."""


def fault_of(
    message: Mapping[str, Any], table: Mapping[str, Mapping[str, Check]] = FIELDS
) -> str | None:
    """What is wrong with a report by itself; None if nothing is.

    >>> fault_of({"op": "trainer_exit", "ballot": [7, 1], "code": "9"})
    "trainer_exit: code='9'"
    >>> fault_of({"op": "trainer_exit", "ballot": [7, 1], "code": 9})
    """
    return fault(message, table, OPTIONAL, "report")


def fields_of(
    message: Mapping[str, Any], table: Mapping[str, Mapping[str, Check]] = FIELDS
) -> dict[str, Any]:
    """What counts of a report without fault: the fields that the leader knows.

    A host of a newer version may say more.
    """
    known = table[message["op"]].keys() - {"ballot"}
    return {name: value for name, value in message.items() if name in known}


def misfit(
    host: str, message: Mapping[str, Any], slots: Sequence[str], layout: Layout | None
) -> str | None:
    """Why a report without fault cannot be of this formation; None if it can.

    Args:
        host: who reports.
        message: the report.
        slots: the host of each slot; empty while nothing is assigned.
        layout: of the formation's state, once it is known.
    """
    op = message["op"]
    if op not in OF_A_SLOT:
        return None
    if host not in slots:
        return f"{op}: {host} has no slot"
    slot = message.get("target" if op == "held" else "slot")
    if slot is not None and slots.index(host) != slot:
        return f"{op}: {host} has slot {slots.index(host)}, not {slot}"
    if op == "held" and message["source"] >= len(slots):
        return f"{op}: there is no slot {message['source']}"
    if op in ("layout", "wanted"):
        mesh = Layout.from_json(message["layout"]).mesh
        if mesh.num_slots != len(slots):
            return f"{op}: {mesh.num_slots} slots instead of {len(slots)}"
    if op == "staged" and layout is not None:
        told, expected = len(message["digests"]), len(layout.slices(slots.index(host)))
        if told != expected:
            return f"staged: {told} digests instead of {expected}"
    return None
