"""JSON values that are saved beside the arrays of a step, with their own digest.

`sealed` computes the digest (xxh3-128) of the stored text. `json_digest` computes a
digest of a value that does not depend on the order of keys. Arrays have chunk digests
instead.
"""

import json
from collections.abc import Mapping
from typing import Any

import xxhash

_FORM = frozenset({"json", "digest"})
"""Keys of the dict that `sealed` returns; callers may add further keys to the dict."""


class CorruptItems(RuntimeError):
    """The JSON values saved beside a step's arrays do not match their digest."""


def json_digest(value: Any) -> str:
    """Computes the hex digest of a value after a round trip through JSON.

    >>> json_digest({"a": (1, 2), "b": 0.1}) == json_digest({"b": 0.1, "a": [1, 2]})
    True
    """
    detached = json.loads(json.dumps(value))
    text = json.dumps(detached, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def sealed(value: Any) -> dict[str, str]:
    """Encodes a JSON value as a dict of its text ("json") and the text's "digest".

    >>> unsealed(sealed({"position": 2**70, "loss": float("inf")}))
    {'position': 1180591620717411303424, 'loss': inf}
    """
    text = json.dumps(value)
    return {"json": text, "digest": xxhash.xxh3_128_hexdigest(text.encode())}


def unsealed(items: Mapping[str, Any]) -> Any:
    """Decodes the JSON value in a dict from `sealed`, after a check of its digest.

    Raises:
        CorruptItems: the text or its digest was changed, or is missing.
    """
    if not items.keys() >= _FORM or not items_are_right(items):
        raise CorruptItems(
            "what was saved beside the arrays (items in JSON, metrics, custom "
            "metadata) does not match its digest in this host's memory and was not "
            "used. Restart all processes: another host's copy is taken then."
        )
    return json.loads(items["json"])


def items_are_right(items: Mapping[str, Any]) -> bool:
    """Whether the text in a dict from `sealed` matches the digest in the dict.

    Also True if the dict lacks "json" or "digest" and so was not made by `sealed`.

    >>> items_are_right({"step": 3}), items_are_right(sealed(3) | {"json": "4"})
    (True, False)
    """
    if not items.keys() >= _FORM:
        return True
    return xxhash.xxh3_128_hexdigest(str(items["json"]).encode()) == items["digest"]
