"""Pure checks of a host's reports to its leader.

A reporting host has proved that it knows the job's secret, but may run another version
or have a bug. The leader drops a malformed report, logs the name of the field, and
continues.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dtft.checkpoint.managers import PHASES
from dtft.checkpoint.replication import Window
from dtft.checkpoint.state import Layout
from dtft.elastic.messages.fields import (
    Check,
    address,
    anything,
    assignment,
    ballot,
    binary,
    code,
    commit,
    fault,
    flag,
    items,
    known_layout,
    layout,
    list_of,
    map_of,
    number,
    one_of,
    or_empty,
    or_none,
    port,
    positive,
    root,
    seconds,
    text,
)

_positive_or_none = or_none(positive)


_WINDOW = {field.name: field.type for field in dataclasses.fields(Window)}


def _window_or_none(value: object) -> bool:
    """Whether a value is None or a trainer's measured times, a `Window` as a dict.

    The dict must have exactly the fields of that class. The times must be nonnegative
    and finite, and the numbers of steps nonnegative ints.
    """
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and value.keys() == _WINDOW.keys()
        and all(
            number(it) or (_WINDOW[name] is float and seconds(it))
            for name, it in value.items()
        )
    )


REPORT_FIELDS: Mapping[str, Mapping[str, Check]] = {
    "holdings": {
        "ballot": ballot,
        "layouts": list_of(layout),
        "holdings": map_of(number, map_of(text, binary)),
        "complete": map_of(number, list_of(number)),
        "export_port": port,
        "items": map_of(number, items),
        "corrupt": list_of(text),
        "finished": number,
        "assignment": or_empty(assignment),
        "commits": list_of(commit),
        "missed": list_of(text),
        "world": number,
        "place": number,
        "joined": flag,
        "prefetched": map_of(number, number),
        "reserved": flag,
    },
    "serving": {"ballot": ballot, "address": or_empty(address), "error": text},
    "joined": {"ballot": ballot, "world": number},
    "rehearsed": {
        "ballot": ballot,
        "world": number,
        "turn": number,
        "formations": list_of(list_of(number)),
    },
    "keys": {"ballot": ballot, "keys": map_of(text, text)},
    "reached": {"ballot": ballot, "missed": list_of(text)},
    "unfit": {"ballot": ballot, "why": text, "layout": layout},
    "fit": {"ballot": ballot},
    "prepared": {
        "ballot": ballot,
        "export_port": port,
        "own": number,
        "peers": number,
        "seconds": seconds,
        "restored": map_of(text, binary),
    },
    "prepare_failed": {
        "ballot": ballot,
        "error": text,
        "corrupt": list_of(text),
    },
    "layout": {"ballot": ballot, "layout": layout},
    "running": {
        "ballot": ballot,
        "slot": number,
        "step": number,
        "bytes_from_storage": number,
        "items": items,
    },
    "staged": {
        "ballot": ballot,
        "slot": number,
        "step": number,
        "digests": list_of(binary),
        "interval": _positive_or_none,
        "window": _window_or_none,
    },
    "held": {
        "ballot": ballot,
        "step": number,
        "source": number,
        "target": number,
        "root": root,
    },
    "finished": {
        "ballot": ballot,
        "slot": number,
        "step": number,
        "summary": anything,
    },
    "trainer_exit": {"ballot": ballot, "code": code},
    "failed": {
        "ballot": ballot,
        "slot": number,
        "step": number,
        "phase": text,
        "error": text,
        "traceback": text,
        "log": text,
    },
    "progress": {
        "ballot": ballot,
        "slot": number,
        "computing": number,
        "finished": number,
        "phase": one_of(*PHASES),
        "for_s": seconds,
        "limit_s": seconds,
        "timeout": text,
        "state": text,
        "busy": seconds,
    },
    "exported": {
        "ballot": ballot,
        "step": number,
        "ok": flag,
        "error": text,
        "attempt": number,
    },
    "fatal": {
        "message": text,
        "ballot": ballot,
        "slot": number,
        "code": code,
        "step": number,
        "phase": text,
        "error": text,
        "traceback": text,
        "log": text,
    },
}
"""Maps the op (kind) of a report to the names of its fields and their checks."""

SERVED_FIELDS: Mapping[str, Mapping[str, Check]] = {
    **REPORT_FIELDS,
    "holdings": {**REPORT_FIELDS["holdings"], "attached_ns": number},
    "flush": {
        "ballot": ballot,
        "slot": number,
        "token": number,
        "step": number,
        "store": flag,
    },
    "wanted": {"ballot": ballot, "slot": number, "step": number, "layout": layout},
    "process_gone": {"ballot": ballot},
}
"""Like `REPORT_FIELDS`, for a job whose processes the user starts (--serve-only)."""

OPTIONAL_REPORT_FIELDS: Mapping[str, frozenset[str]] = {
    "holdings": frozenset(
        {
            *("complete", "export_port", "assignment", "commits", "missed"),
            *("world", "place", "joined", "prefetched", "reserved"),
        }
    ),
    "unfit": frozenset({"layout"}),
    "running": frozenset({"items"}),
    "staged": frozenset({"interval", "window"}),
    "fatal": frozenset(
        {"ballot", "slot", "code", "step", "phase", "error", "traceback", "log"}
    ),
    "prepared": frozenset({"restored"}),
    "finished": frozenset({"summary"}),
    "exported": frozenset({"attempt"}),
}
"""Maps the op (kind) of a report to the names of fields that may be left out."""

OF_A_SLOT = frozenset(
    {
        *("prepared", "prepare_failed", "layout", "running", "keys"),
        *("staged", "held", "finished", "flush", "wanted", "failed", "progress"),
    }
)
"""Ops (kinds) of reports that are valid only from a host with a slot."""


def fault_of_report(
    message: Mapping[str, Any], table: Mapping[str, Mapping[str, Check]] = REPORT_FIELDS
) -> str | None:
    """Checks each field of a report; returns the first error in words, or None.

    `table` maps each known op (the kind of a report, in its field "op") to the op's
    fields and their checks. The examples report that a trainer has ended: "code" is its
    exit code, and must be an int. "ballot" is (leader's term, counter), which
    identifies an attempt to assign hosts to slots.

    >>> fault_of_report({"op": "trainer_exit", "ballot": [7, 1], "code": "9"})
    "trainer_exit: code='9'"
    >>> fault_of_report({"op": "trainer_exit", "ballot": [7, 1], "code": 9})
    """
    return fault(message, table, OPTIONAL_REPORT_FIELDS, "report")


def report_fields(
    message: Mapping[str, Any], table: Mapping[str, Mapping[str, Check]] = REPORT_FIELDS
) -> dict[str, Any]:
    """Returns the fields of a valid report that `table` has for its op (its kind).

    Leaves out the field "ballot", which identifies the attempt to assign hosts to slots
    in which the report was made. Also leaves out unknown fields, which a host of a
    newer version may send.
    """
    known = table[message["op"]]
    return {
        name: value
        for name, value in message.items()
        if name in known and name != "ballot"
    }


def misfit(
    host: str,
    message: Mapping[str, Any],
    slots: Mapping[str, int],
    layout: Layout | None,
) -> str | None:
    """Checks a report against the current assignment of hosts to slots.

    Only reports about a slot are checked, by their op (kind, see `OF_A_SLOT`); for all
    others the result is None. The fields of the report must have been checked before.

    * The host must have a slot, and a slot in the report must be this slot. A `held`
      report says that slot `target` has a copy of the slices of slot `source`; in it,
      `target` must be this slot, and `source` one of the slots.
    * A `layout` report has the layout (mesh and leaves) of the state, a `wanted` report
      the layout in which a user's process requests a step. This layout must have as
      many slots as the assignment.
    * A `staged` report (a snapshot is in the host's memory) must have the digests of as
      many slices as the slot has, if the layout of the state is known.

    Args:
        host: the reporting host.
        message: the report.
        slots: host to slot; empty while no slot is assigned.
        layout: layout of the state; None while the layout is unknown.

    Returns:
        The first error in words, or None.
    """
    op = message["op"]
    if op not in OF_A_SLOT:
        return None
    if host not in slots:
        return f"{op}: {host} has no slot"
    slot = message.get("target" if op == "held" else "slot")
    if slot is not None and slots[host] != slot:
        return f"{op}: {host} has slot {slots[host]}, not {slot}"
    if op == "held" and message["source"] >= len(slots):
        return f"{op}: there is no slot {message['source']}"
    if op in ("layout", "wanted"):
        mesh = known_layout(message["layout"]).mesh
        if mesh.num_slots != len(slots):
            return f"{op}: {mesh.num_slots} slots instead of {len(slots)}"
    if op == "staged" and layout is not None:
        told, expected = len(message["digests"]), len(layout.slices(slots[host]))
        if told != expected:
            return f"staged: {told} digests instead of {expected}"
    return None
