"""JSON values that travel beside the arrays of a step, under a digest of their own.

Arrays have digests of their chunks; what is no array has one here (xxh3-128, of the
very text that is kept).
"""

import json
from collections.abc import Mapping
from typing import Any

import xxhash

_FORM = frozenset({"json", "digest"})
"""What sealed items have; more may lie beside it."""


class CorruptItems(RuntimeError):
    """What was kept beside a step's arrays does not match its digest."""


def json_digest(value: Any) -> str:
    """Hex digest of a JSON value; of one that JSON would change, what it becomes.

    >>> json_digest({"a": (1, 2), "b": 0.1}) == json_digest({"b": 0.1, "a": [1, 2]})
    True
    """
    detached = json.loads(json.dumps(value))
    text = json.dumps(detached, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def sealed(value: Any) -> dict[str, str]:
    """A JSON value as text, with the digest of the text.

    >>> unsealed(sealed({"position": 2**70, "loss": float("inf")}))
    {'position': 1180591620717411303424, 'loss': inf}
    """
    text = json.dumps(value)
    return {"json": text, "digest": xxhash.xxh3_128_hexdigest(text.encode())}


def unsealed(items: Mapping[str, Any]) -> Any:
    """The value that was sealed.

    Raises:
        CorruptItems: the text or its digest has changed, or is missing.
    """
    if not items.keys() >= _FORM or not items_are_right(items):
        raise CorruptItems(
            "what was saved beside the arrays (items in JSON, metrics, custom "
            "metadata) does not match its digest in this host's memory and was not "
            "used. Restart all processes: another host's copy is taken then."
        )
    return json.loads(items["json"])


def items_are_right(items: Mapping[str, Any]) -> bool:
    """Whether items match their digest; those that were not sealed have none.

    >>> items_are_right({"step": 3}), items_are_right(sealed(3) | {"json": "4"})
    (True, False)
    """
    if not items.keys() >= _FORM:
        return True
    return xxhash.xxh3_128_hexdigest(str(items["json"]).encode()) == items["digest"]
