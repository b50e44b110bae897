"""Orders of the leader: whatever arrives, it is obeyed or named, and nothing raises."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.state.partition import Region
from dtft.checkpoint.transport import protocol
from dtft.elastic.messages.orders import (
    OPTIONAL_ORDER_FIELDS,
    ORDER_FIELDS,
    fault_of_order,
    order_fields,
)
from tests.support.commits import commit_of, layout, value
from tests.support.desks import ASSIGNMENT
from tests.support.message_values import ANYTHING
from tests.support.reshard_plans import order as planned
from tests.support.reshard_plans import saved

STATE = layout(1, 2)
KEYS = [piece.key for piece in STATE.slices(0)]
DIGESTS = {key: value(key) for key in KEYS}
REMAPPED = planned(saved(4), "a", 4)
TRANSFERS = [{"host": "b", "address": "[fd00::5]:7000", "keys": KEYS}]
WORLD = {"number": 7340035, "address": "10.0.0.5:7001", "size": 11, "index": 1}
SOUND: dict[str, dict[str, Any]] = {
    "reform": {
        "ballot": (7, 3),
        "reason": "b was lost",
        "fatal": False,
        "read": True,
        "epoch": (2, 1),
        "step": 4,
        "reach": {"b": "10.0.0.6:7000"},
        "keep": 7340035,
    },
    "serve": {"ballot": (7, 3), "server": "a", "size": 11},
    "drained": {"ballot": (7, 3)},
    "give_up": {"ballot": (7, 3), "places": [2, 5]},
    "keys": {"ballot": (7, 3), "keys": {"cpu:gloo/1,2/0": "0a0b"}},
    "join": {"ballot": (7, 3), "world": {**WORLD, "index": 5}},
    "rehearse": {
        "ballot": (7, 3),
        "world": 7340035,
        "turn": 4,
        "formations": [[1, 5], [5, 2]],
        "items": {"plan": {"asked": "auto"}},
    },
    "reach": {"ballot": (7, 3), "reach": {"b": "10.0.0.6:7000"}},
    "prepare": {
        "ballot": (7, 3),
        "generation": 2,
        "attempt": 1,
        "world": WORLD,
        "indices": [1, 2],
        "turn": 3,
        "hosts": ["a", "b"],
        "addresses": ["10.0.0.5:7000", "node-6:7000"],
        "source": "memory",
        "step": 4,
        "domains": ["rack-1", "rack-2"],
        "layout": STATE.to_json(),
        "resized": True,
        "read": False,
        "digests": DIGESTS | REMAPPED["digests"],
        "items": {"data": {"epoch": 1, "rate": 0.5}},
        "slot": 0,
        "may_free": False,
        "transfers": TRANSFERS,
        "regions": REMAPPED["regions"],
        "assignment": ASSIGNMENT.to_json(),
    },
    "expect": {"layout": STATE.to_json(), "domains": [], "committed": True},
    "prefetch": {
        "layout": STATE.to_json(),
        "slot": 1,
        "address": "node-6:7000",
        "epoch": (3, 1),
    },
    "release": {
        "step": 4,
        "committed": True,
        "commit": commit_of(STATE, 4).to_json(),
        "stop_at": None,
        "changes": [(8, 2)],
    },
    "replicate": {"ballot": (7, 3), "step": 4, "targets": [1]},
    "export": {
        "step": 4,
        "slot": 0,
        "rank": 0,
        "world": 2,
        "coordinator": "[::1]:7002",
        "failures": 0,
        "transfers": TRANSFERS,
        "digests": DIGESTS,
    },
    "lend": {"step": -1},
    "flushed": {"token": 4, "error": ""},
    "storage_failed": {"error": "the disk is full"},
    "ended": {"result": '{"status": "done"}'},
    "assemble": {"layout": STATE.to_json(), **REMAPPED},
}


def sound(op: str) -> dict[str, Any]:
    """An order as it arrives."""
    packed = msgpack.packb({"op": op, **SOUND[op]})
    return msgpack.unpackb(packed, strict_map_key=False)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something could be exchanged, at any depth."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list):
        for key, inner in enumerate(value[:2]):
            yield from places(inner, (*at, key))


def exchanged(message: dict[str, Any], at: tuple[Any, ...], new: Any) -> dict[str, Any]:
    changed = copy.deepcopy(message)
    inner: Any = changed
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = new
    return changed


@pytest.mark.parametrize("op", sorted(ORDER_FIELDS))
def test_a_sound_order_is_taken_whole(op: str) -> None:
    assert fault_of_order(sound(op), "a") is None
    assert fault_of_order({"op": op, **SOUND[op]}, "a") is None  # of the own leader
    fields = order_fields(sound(op) | {"of_a_newer_version": 1})
    assert fields.keys() == SOUND[op].keys()
    assert isinstance(fields.get("ballot", ()), tuple)


@pytest.mark.parametrize("op", sorted(ORDER_FIELDS))
def test_a_field_that_is_left_out_is_named(op: str) -> None:
    for name in ORDER_FIELDS[op]:
        if name in OPTIONAL_ORDER_FIELDS.get(op, frozenset()):
            continue
        message = sound(op)
        del message[name]
        assert fault_of_order(message) == f"{op}: no {name}"


@pytest.mark.parametrize("op", sorted(ORDER_FIELDS))
def test_a_wrong_value_at_any_depth_is_named(op: str) -> None:
    message = sound(op)
    for at in places(message):
        if at[0] in ("op", "items"):
            continue  # items are the user's own
        for wrong in (float("nan"), 1 << 64, -7, -(1 << 64), {7: {}}, [[[]]], b"\xff"):
            found = fault_of_order(exchanged(message, at, wrong))
            assert found is not None and found.startswith(f"{op}: {at[0]}"), (at, wrong)
            assert len(found) < 200


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("prepare", {"world": {**WORLD, "address": "10.0.0.5"}}, "world={"),
    ("prepare", {"indices": [1]}, "1 indices of 2 hosts"),
    ("prepare", {"indices": [3, 2]}, "indices[0] is another"),
    ("prepare", {"world": {**WORLD, "size": 1}}, "index=1 of size=1"),
    ("join", {"world": {**WORLD, "index": 11}}, "index=11 of size=11"),
    ("prepare", {"addresses": ["a:1", "::1:80"]}, "addresses="),
    ("prepare", {"addresses": ["a:1"]}, "1 addresses of 2 hosts"),
    ("prepare", {"domains": ["r"]}, "1 domains of 2 hosts"),
    ("prepare", {"slot": 2}, "slot=2 of 2 hosts"),
    ("prepare", {"slot": 1}, "slot=1 is of 'b', not of a"),
    ("prepare", {"hosts": ["b", "a"]}, "slot=0 is of 'b', not of a"),
    ("prepare", {"source": "peers"}, "source='peers'"),
    ("prepare", {"layout": ""}, "source=memory, but layout is empty"),
    ("prepare", {"layout": layout(2, 2).to_json()}, "layout of 4 slots for 2 hosts"),
    ("prepare", {"layout": '{"mesh": {"slots": [9]}}'}, "layout="),
    ("prepare", {"digests": {}}, "transfers: no digest of"),
    ("prepare", {"digests": DIGESTS}, "regions: no digest of"),
    ("prepare", {"digests": {key: b"short" for key in KEYS}}, "digests="),
    ("export", {"rank": 2}, "rank=2 of world=2"),
    ("export", {"world": 0}, "world=0"),
    ("export", {"coordinator": ""}, "world=2, but coordinator is empty"),
    ("release", {"changes": [[8, 0]]}, "changes=[[8, 0]]"),
    ("release", {"stop_at": True}, "stop_at=True"),
    ("lend", {"step": -2}, "step=-2"),
    ("lend", {"step": 7.0}, "step=7.0"),
]


@pytest.mark.parametrize(("op", "changes", "reason"), WRONG)
def test_what_does_not_fit_is_named(
    op: str, changes: dict[str, Any], reason: str
) -> None:
    found = fault_of_order(sound(op) | changes, "a")
    assert found is not None and found.startswith(f"{op}: ") and reason in found


def test_a_region_lies_inside_of_both_its_slices() -> None:
    message = sound("assemble")
    at = ("regions", 0, "regions", 0)
    region = message["regions"][0]["regions"][0]
    assert region.keys() == {f.name for f in dataclasses.fields(Region)}
    for part, name, wrong in [
        ("moved", "stop", [9, 9]),
        ("moved", "start", [0, 0, 0]),
        ("moved", "path", "v"),
        ("new", "dtype", "float64"),
        ("old", "dtype", "no such type"),
        ("old", "stop", [0, 0]),
        ("old", "stop", [(1 << 63) - 1] * 2),
    ]:
        found = fault_of_order(exchanged(message, (*at, part, name), wrong))
        assert found is not None and found.startswith("assemble: regions="), wrong


def test_an_answer_that_nothing_can_be_assembled_needs_no_regions() -> None:
    told = {"op": "assemble", "step": 4, "layout": STATE.to_json()}
    assert fault_of_order(told | {"error": "the newest commit is step 5"}) is None
    assert fault_of_order(told) == "assemble: no digests, regions"


@given(
    op=st.sampled_from(sorted(ORDER_FIELDS)),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_no_order_raises(op: str, data: st.DataObject) -> None:
    message = sound(op)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(list(places(message))))
        message = exchanged(message, at, data.draw(ANYTHING))
        if not isinstance(message["op"], str):
            break
    if fault_of_order(message, "a") is None:
        order_fields(message)


@given(ANYTHING)
@settings(max_examples=200, deadline=None)
def test_what_is_no_order_is_named(message: Any) -> None:
    assert fault_of_order(message) is not None
    assert fault_of_order({"op": message}) is not None


def test_a_hostile_header_is_refused_before_it_takes_memory() -> None:
    """`Channel.receive` bounds bytes and values; what passes is checked quickly."""
    assert protocol.MAX_HEADER <= 16 << 20
    with pytest.raises(protocol.WireError, match="header"):
        protocol.decode_header(b"\x81\xa2op" + b"\xdd\xff\xff\xff\xff" + b"\xc0" * 4000)
    huge = {"op": "prepare", "hosts": ["x" * (8 << 20)], "ballot": [1] * 100_000}
    found = fault_of_order(huge)
    assert found is not None and len(found) < 200
