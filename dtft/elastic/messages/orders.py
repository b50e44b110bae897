"""Pure checks of the leader's orders to a host.

The leader has proved that it knows the job's secret, but may run another version or
have a bug. For a malformed order the host logs the name of the field and closes the
connection; the agent continues.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dtft.checkpoint.state import Layout
from dtft.elastic.messages.fields import (
    Check,
    Table,
    address,
    assignment,
    ballot,
    commit,
    digests,
    fault,
    flag,
    items,
    layout,
    list_of,
    map_of,
    number,
    number_or_minus_one,
    one_of,
    or_empty,
    or_none,
    pair_of,
    positive,
    record_of,
    region,
    short,
    text,
)

Message = Mapping[str, Any]

_transfers = list_of(record_of(host=text, address=address, keys=list_of(text)))
_regions = list_of(record_of(host=text, address=address, regions=list_of(region)))
_digests: Check = map_of(text, digests)

_world: Check = record_of(
    number=number, address=or_empty(address), size=number, index=number
)

ORDER_FIELDS: Table = {
    "reform": {
        "ballot": ballot,
        "reason": text,
        "fatal": flag,
        "read": flag,
        "epoch": pair_of(number, number),
        "step": number_or_minus_one,
        "reach": map_of(text, address),
        "keep": number,
    },
    "serve": {"ballot": ballot, "server": text, "size": positive},
    "give_up": {"ballot": ballot, "places": list_of(number)},
    "keys": {"ballot": ballot, "keys": map_of(text, text)},
    "join": {"ballot": ballot, "world": _world},
    "rehearse": {
        "ballot": ballot,
        "world": number,
        "turn": number,
        "formations": list_of(list_of(number)),
        "items": items,
    },
    "prepare": {
        "ballot": ballot,
        "generation": number,
        "attempt": number,
        "world": _world,
        "indices": list_of(number),
        "turn": number,
        "hosts": list_of(text),
        "addresses": list_of(address),
        "source": one_of("init", "memory", "storage"),
        "step": number,
        "domains": list_of(text),
        "layout": or_empty(layout),
        "resized": flag,
        "read": flag,
        "digests": _digests,
        "items": items,
        "slot": number,
        "may_free": flag,
        "transfers": _transfers,
        "regions": _regions,
        "assignment": assignment,
    },
    "reach": {"ballot": ballot, "reach": map_of(text, address)},
    "expect": {"layout": layout, "domains": list_of(text), "committed": flag},
    "prefetch": {
        "layout": layout,
        "slot": number,
        "address": address,
        "epoch": pair_of(number, number),
    },
    "release": {
        "step": number,
        "committed": flag,
        "commit": or_empty(commit),
        "stop_at": or_none(number),
        "changes": list_of(pair_of(number, positive)),
    },
    "replicate": {"ballot": ballot, "step": number, "targets": list_of(number)},
    "export": {
        "step": number,
        "slot": number,
        "rank": number,
        "world": positive,
        "coordinator": or_empty(address),
        "failures": number,
        "transfers": _transfers,
        "digests": _digests,
    },
    "lend": {"step": number_or_minus_one},
    "flushed": {"token": number, "error": text},
    "storage_failed": {"error": text},
    "ended": {"result": text},
    "drained": {"ballot": ballot},
    "assemble": {
        "step": number,
        "layout": layout,
        "regions": _regions,
        "digests": _digests,
        "error": text,
    },
}
"""Maps the op (kind) of an order to the names of its fields and their checks."""

OPTIONAL_ORDER_FIELDS: Mapping[str, frozenset[str]] = {
    "reform": frozenset({"reason", "fatal", "read", "epoch", "step", "reach", "keep"}),
    "prepare": frozenset({"may_free"}),
    "expect": frozenset({"committed"}),
    "assemble": frozenset({"regions", "digests", "error"}),
}
"""Maps the op (kind) of an order to the names of fields that may be left out."""


def fault_of_order(message: object, host: str | None = None) -> str | None:
    """Checks an order; returns the first error in words, or None. Does not raise.

    An order has an op (its kind), which decides the fields that it must have. The order
    "lend" makes a host keep a step in memory for hosts that export it; step -1 frees
    the step. The second example lacks six fields, which the error lists. Fields that
    this version does not know are allowed, so the last example returns None.

    Args:
        message: the received message.
        host: name of the receiving host. A `prepare` (the order to restore and train in
            a slot) for another host is an error; None allows any host.

    >>> fault_of_order({"op": "lend", "step": "7"})
    "lend: step='7'"
    >>> fault_of_order({"op": "export", "step": 7, "slot": 0})
    'export: no coordinator, digests, failures, rank, transfers, world'
    >>> fault_of_order({"op": "lend", "step": -1, "of_a_newer_version": 1})
    """
    found = fault(message, ORDER_FIELDS, OPTIONAL_ORDER_FIELDS, "order")
    if found is not None:
        return found
    assert isinstance(message, Mapping)
    whole = _WHOLE.get(message["op"])
    found = whole(message, host) if whole is not None else None
    return found and f"{message['op']}: {found}"


def order_fields(message: Message) -> dict[str, Any]:
    """Returns the fields of a valid order that this version knows; drops all others.

    The field `ballot` becomes a tuple: (leader's term, counter), which identifies an
    attempt to assign hosts to slots.

    >>> order_fields({"op": "replicate", "ballot": [7, 1], "step": 3, "targets": []})
    {'ballot': (7, 1), 'step': 3, 'targets': []}
    """
    known = ORDER_FIELDS[message["op"]]
    told = {name: value for name, value in message.items() if name in known}
    if "ballot" in told:
        told["ballot"] = tuple(told["ballot"])  # for comparison with other ballots
    return told


# ---------------------------------------------- checks of several fields together


def _prepare(order: Message, host: str | None) -> str | None:
    hosts, slot, memory = order["hosts"], order["slot"], order["source"] == "memory"
    if len(order["addresses"]) != len(hosts):
        return f"{len(order['addresses'])} addresses of {len(hosts)} hosts"
    if order["domains"] and len(order["domains"]) != len(hosts):
        return f"{len(order['domains'])} domains of {len(hosts)} hosts"
    if len(order["indices"]) != len(hosts):
        return f"{len(order['indices'])} indices of {len(hosts)} hosts"
    if slot >= len(hosts):
        return f"slot={slot} of {len(hosts)} hosts"
    if host is not None and hosts[slot] != host:
        return f"slot={slot} is of {short(hosts[slot])}, not of {host}"
    if order["indices"][slot] != order["world"]["index"]:
        return f"index={order['world']['index']}, but indices[{slot}] is another"
    if found := _join(order, host):
        return found
    if not memory:
        return None
    if not order["layout"]:
        return "source=memory, but layout is empty"
    slots = Layout.from_json(order["layout"]).mesh.num_slots
    if slots != len(hosts):
        return f"layout of {slots} slots for {len(hosts)} hosts"
    return _without_digest(order)


def _join(order: Message, host: str | None) -> str | None:
    del host
    world = order["world"]
    if world["index"] >= world["size"]:
        return f"index={world['index']} of size={world['size']}"
    return None


def _prefetch(order: Message, host: str | None) -> str | None:
    del host
    slots = Layout.from_json(order["layout"]).mesh.num_slots
    return f"slot={order['slot']} of {slots} slots" if order["slot"] >= slots else None


def _export(order: Message, host: str | None) -> str | None:
    del host
    if order["rank"] >= order["world"]:
        return f"rank={order['rank']} of world={order['world']}"
    if order["world"] > 1 and not order["coordinator"]:
        return f"world={order['world']}, but coordinator is empty"
    return _without_digest(order)


def _assemble(order: Message, host: str | None) -> str | None:
    del host
    if "error" in order:
        return None
    missing = [name for name in ("digests", "regions") if name not in order]
    return f"no {', '.join(missing)}" if missing else _without_digest(order)


def _without_digest(order: Message) -> str | None:
    """Returns an error text if an order lacks the digest of a slice to fetch, or None.

    The field "digests" of an order maps the key of a slice to its digests. The host
    checks the bytes that it fetches against them.
    """
    known = order["digests"].keys()
    for transfer in order.get("transfers", ()):
        for key in transfer["keys"]:
            if key not in known:
                return f"transfers: no digest of {short(key)}"
    for source in order.get("regions", ()):
        for entry in source["regions"]:
            if (key := _key(entry["old"])) not in known:
                return f"regions: no digest of {short(key)}"
    return None


def _key(piece: Mapping[str, Any]) -> str:
    """Returns the key of a slice given as a dict: path, index ranges and dtype."""
    pairs = zip(piece["start"], piece["stop"], strict=True)
    ranges = ",".join(f"{a}:{b}" for a, b in pairs)
    return f"{piece['path']}[{ranges}]:{piece['dtype']}"


_WHOLE: Mapping[str, Callable[[Message, str | None], str | None]] = {
    "prepare": _prepare,
    "join": _join,
    "prefetch": _prefetch,
    "export": _export,
    "assemble": _assemble,
}
