"""Checks of single fields of the messages between hosts.

A check takes the value of a field and returns whether the field may have this value.
Checks do not raise.
"""

import functools
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from dtft.checkpoint.replication import Commit
from dtft.checkpoint.state import DIGEST_BYTES, Layout, Slice
from dtft.checkpoint.transport import parse_address
from dtft.elastic.assignment import SlotAssignment

Check = Callable[[object], bool]
Table = Mapping[str, Mapping[str, Check]]
"""Maps the op (kind) of a message to the names of its fields and their checks."""

_LARGEST = 1 << 63
_MISSING = object()


def number(value: object) -> bool:
    """Whether a value is an int from 0 to 2**63 - 1: a count, step or slot."""
    return type(value) is int and 0 <= value < _LARGEST


def positive(value: object) -> bool:
    """Whether a value is an int from 1 to 2**63 - 1."""
    return number(value) and value != 0


def number_or_minus_one(value: object) -> bool:
    """Whether a value is a step, or -1 for no step."""
    return value == -1 and type(value) is int or number(value)


def code(value: object) -> bool:
    """Whether a value is an int that can be a process's return code.

    Its magnitude is below 2**31. It is an exit code, or minus the number of a signal.
    """
    return type(value) is int and abs(value) < 1 << 31


def port(value: object) -> bool:
    """Whether a value is a TCP port, or 0 for no port."""
    return type(value) is int and 0 <= value < 1 << 16


def seconds(value: object) -> bool:
    """Whether a value is a finite float of 0 or more: a duration in seconds."""
    return type(value) is float and 0 <= value < math.inf


def text(value: object) -> bool:
    """Whether a value is a str."""
    return isinstance(value, str)


def root(value: object) -> bool:
    """Whether a value is a str with the length of a root digest in hexadecimal.

    A root digest is one digest over the digests of many slices of the state. Whether
    the characters are hexadecimal is not checked.
    """
    return isinstance(value, str) and len(value) == 2 * DIGEST_BYTES


def flag(value: object) -> bool:
    """Whether a value is True or False; 0 and 1 are not allowed."""
    return isinstance(value, bool)


def binary(value: object) -> bool:
    """Whether a value is bytes."""
    return isinstance(value, bytes)


def digests(value: object) -> bool:
    """Whether a value is bytes that may be the digests of one slice's chunks.

    Each chunk (a part of the slice's bytes) has a digest of 16 bytes (`DIGEST_BYTES`);
    the value is their concatenation. Only its length is checked: a multiple of 16.
    """
    return isinstance(value, bytes) and len(value) % DIGEST_BYTES == 0


def ballot(value: object) -> bool:
    """Whether a value is a ballot: a pair of ints (leader's term, counter).

    The ballot identifies a round, which is one attempt to assign hosts to slots. A
    leader's term is a number that is higher for every later leader.
    """
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return number(value[0]) and number(value[1])


def address(value: object) -> bool:
    """Whether a value is an address "host:port"."""
    if not isinstance(value, str):
        return False
    try:
        parse_address(value)
    except ValueError:
        return False
    return True


def anything(value: object) -> bool:
    """Returns True: any value is allowed."""
    del value
    return True


def all_of(values: Any, check: Check) -> bool:
    """Whether every one of `values`, an iterable, passes a check."""
    return all(map(check, values))


def list_of(check: Check) -> Check:
    """Makes a check for a list or tuple whose items all pass `check`."""
    return lambda value: isinstance(value, list | tuple) and all_of(value, check)


def pair_of(first: Check, second: Check) -> Check:
    """Makes a check for a list or tuple of two items, with a check for each item."""
    return lambda value: (
        isinstance(value, list | tuple)
        and len(value) == 2
        and first(value[0])
        and second(value[1])
    )


def map_of(key: Check, check: Check) -> Check:
    """Makes a check for a dict whose keys pass `key` and whose values pass `check`."""
    return lambda value: (
        isinstance(value, dict) and all_of(value, key) and all_of(value.values(), check)
    )


def record_of(**fields: Check) -> Check:
    """Makes a check for a dict with certain keys, each with a check for its value.

    `fields` maps the keys, which the dict must have, to these checks. Other keys of the
    dict are ignored.
    """
    return lambda value: (
        isinstance(value, dict)
        and fields.keys() <= value.keys()
        and all(check(value[name]) for name, check in fields.items())
    )


def one_of(*values: str) -> Check:
    """Makes a check for a str that equals one of `values`."""
    return lambda value: isinstance(value, str) and value in values


def or_none(check: Check) -> Check:
    """Makes a check for None or a value that passes `check`."""
    return lambda value: value is None or check(value)


def or_empty(check: Check) -> Check:
    """Makes a check for empty text or a value that passes `check`."""
    return lambda value: value == "" or check(value)


items: Check = map_of(text, anything)
"""Check for the items of a step: a dict with str keys and any values.

Items are the parts of a step that are not arrays.
"""


@functools.lru_cache(maxsize=4)
def known_layout(text: str) -> Layout:
    """Parses the JSON of a layout (mesh and leaves of the state).

    The text must have been checked before (see the function `layout`); other text can
    raise any exception. The last four layouts are cached, because all hosts send the
    same one.
    """
    return Layout.from_json(text)


_known_assignment = functools.lru_cache(maxsize=4)(SlotAssignment.from_json)
known_commit = functools.lru_cache(maxsize=4)(Commit.from_json)
"""Parses a commit from JSON that passes the check `commit`.

The last four commits are cached, so the parse in the check serves the handler, too.
"""


@functools.lru_cache(maxsize=4)
def _readable(value: str) -> bool:
    """Whether a text is the JSON of a layout whose slices can be computed.

    A layout has the mesh and leaves of the state, from which the slices of each slot
    follow. The slots must be numbered from 0 without gaps.
    """
    try:
        read = known_layout(value)
        sizes = [piece.nbytes for piece in read.slices(0)]
        slots = set(read.mesh.slots)
    except Exception:  # a malformed value can raise any exception
        return False
    return all(size >= 0 for size in sizes) and slots == set(range(len(slots)))


def assignment(value: object) -> bool:
    """Whether a value is a `SlotAssignment` (the host of each slot) as JSON."""
    return isinstance(value, str) and _reads(_known_assignment, value)


def commit(value: object) -> bool:
    """Whether a value is a `Commit` (record of a committed step) as JSON."""
    return isinstance(value, str) and _reads(known_commit, value)


def _reads(read: Callable[[str], object], value: str) -> bool:
    try:
        read(value)
    except Exception:  # a malformed value can raise any exception
        return False
    return True


def layout(value: object) -> bool:
    """Whether a value is a `Layout` (mesh and leaves of the state) as JSON."""
    return isinstance(value, str) and _readable(value)


_shape = list_of(number)
_piece = record_of(path=text, start=_shape, stop=_shape, dtype=text)


def piece(value: object) -> bool:
    """Whether a value is a dict with the fields of a `Slice`, a part of an array.

    The fields are the path and dtype of the array, and for each dim the first index of
    the part (`start`) and one past the last (`stop`). In each dim `start` must be at
    most `stop`. NumPy must know the dtype.
    """
    if not _piece(value):
        return False
    assert isinstance(value, dict)
    try:
        made = Slice(
            path=value["path"],
            start=tuple(value["start"]),
            stop=tuple(value["stop"]),
            dtype=value["dtype"],
        )
        known = made.nbytes < _LARGEST  # the dtype has a size
    except Exception:  # a malformed dtype can raise any exception
        return False
    return known and all(a <= b for a, b in zip(made.start, made.stop, strict=True))


def region(value: object) -> bool:
    """Whether a value is a dict with the keys of a `Region`: old, new and moved.

    Each is a part of an array, as a dict (see `piece`). A region says that the part
    `moved` is copied out of the slice `old` (before a change of the mesh) into the
    slice `new` (after it), so it must lie inside both.
    """
    if not (isinstance(value, dict) and value.keys() >= {"old", "new", "moved"}):
        return False
    old, new, moved = value["old"], value["new"], value["moved"]
    return (
        all_of((old, new, moved), piece) and _inside(moved, old) and _inside(moved, new)
    )


def _inside(small: dict[str, Any], large: dict[str, Any]) -> bool:
    return (
        (small["path"], small["dtype"]) == (large["path"], large["dtype"])
        and len(small["start"]) == len(large["start"])
        and all(a >= b for a, b in zip(small["start"], large["start"], strict=True))
        and all(a <= b for a, b in zip(small["stop"], large["stop"], strict=True))
    )


def fault(
    message: object, table: Table, optional: Mapping[str, frozenset[str]], kind: str
) -> str | None:
    """Checks each field of a message; returns the first error in words, or None.

    Fields that `table` does not have are allowed.

    Args:
        message: the received message.
        table: maps each known op (the kind of a message, in its field "op") to the op's
            fields and their checks.
        optional: maps an op to those fields that may be left out.
        kind: "report" (host to leader) or "order" (leader to host); used in the error's
            text.
    """
    if not isinstance(message, Mapping):
        return f"a {kind} is a map, not {short(message)}"
    op = message.get("op")
    fields = table.get(op) if isinstance(op, str) else None
    if fields is None:
        return f"there is no {kind} {short(op)}"
    missing: set[str] = set()
    for name, check in fields.items():
        value = message.get(name, _MISSING)
        if value is _MISSING:
            missing.add(name)
        elif not check(value):
            return f"{op}: {name}={short(value)}"
    if missing:
        missing -= optional.get(str(op), frozenset())
    return f"{op}: no {', '.join(sorted(missing))}" if missing else None


_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = _shortener.maxlong = 80


def short(value: object) -> str:
    """Formats a value for an error message, shortened to about 80 characters."""
    if isinstance(value, bytes):
        value = value[:80]
    shown = _shortener.repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
