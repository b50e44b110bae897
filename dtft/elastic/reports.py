"""What a host's report to the leader must look like. Pure checks.

Whoever reports has proved that it knows the job's secret, but may still be of another
version, or broken: what does not fit is refused by name, and the leader goes on. Must
not know what a report leads to, nor connections.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtft.checkpoint.commit import Commit
from dtft.checkpoint.digest import DIGEST_BYTES
from dtft.checkpoint.interval import Window
from dtft.checkpoint.slices import Layout
from dtft.elastic.roles import Assignment

Check = Callable[[object], bool]


def _number(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _code(value: object) -> bool:
    return type(value) is int and abs(value) < 1 << 31


def _port(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 16


def _seconds(value: object) -> bool:
    return type(value) is float and 0 <= value < math.inf


def _text(value: object) -> bool:
    return isinstance(value, str)


def _root(value: object) -> bool:
    return isinstance(value, str) and len(value) == 2 * DIGEST_BYTES


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _bytes(value: object) -> bool:
    return isinstance(value, bytes)


def _ballot(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_of(value, _int))


def _int(value: object) -> bool:
    return type(value) is int


def _of(values: Any, check: Check) -> list[bool]:
    return [check(value) for value in values]


def _list(check: Check) -> Check:
    return lambda value: isinstance(value, list | tuple) and all(_of(value, check))


def _map(key: Check, check: Check) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(_of(value, key) + _of(value.values(), check))
    )


_anything: Check = _map(_text, lambda value: True)


@functools.lru_cache(maxsize=4)
def _readable(text: str) -> bool:
    """Whether a layout can be read and its slices can be made."""
    try:
        layout = Layout.from_json(text)
        sizes = [piece.nbytes for piece in layout.slices(0)]
        slots = set(layout.mesh.slots)
    except Exception:  # it can be wrong in any way at any depth
        return False
    return all(size >= 0 for size in sizes) and slots == set(range(len(slots)))


def _assignment(value: object) -> bool:
    """An assignment as JSON, or nothing."""
    if not isinstance(value, str):
        return False
    try:
        return not value or len(Assignment.from_json(value).slots) > 0
    except Exception:  # it can be wrong in any way at any depth
        return False


def _commit(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return Commit.from_json(value).step >= 0
    except Exception:  # as above
        return False


def _layout(value: object) -> bool:
    return isinstance(value, str) and _readable(value)


def _positive_or_none(value: object) -> bool:
    return value is None or (_number(value) and value != 0)


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
        "assignment": _assignment,
        "commits": _list(_commit),
    },
    "unfit": {"ballot": _ballot, "why": _text},
    "fit": {"ballot": _ballot},
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
        "summary": lambda value: True,
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
    "holdings": frozenset({"complete", "export_port", "assignment", "commits"}),
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
    op = message.get("op")
    fields = table.get(op) if isinstance(op, str) else None
    if fields is None:
        return f"there is no report {_short(op)}"
    for name, check in fields.items():
        if name in message and not check(message[name]):
            return f"{op}: {name}={_short(message[name])}"
    missing = set(fields) - set(message) - OPTIONAL.get(str(op), frozenset())
    return f"{op}: no {', '.join(sorted(missing))}" if missing else None


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


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
