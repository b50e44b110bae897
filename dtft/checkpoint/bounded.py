"""Decodes msgpack that a peer sent, without taking much more memory than it has bytes.

One byte can stand for an empty list, which takes eighty, and five can announce four
billion elements, for which msgpack would reserve memory at once. So the elements are
counted before any is made. Must not know what the values mean.
"""

from typing import Any

import msgpack

BYTES_PER_ITEM = 16
"""A header may have so many bytes, and one more value for each of these. A digest has
more, so a header full of them reaches the limit of bytes first."""
MAX_DEPTH = 64
"""Deepest nesting of lists and maps."""
_SMALL = 2048
"""So few bytes are decoded uncounted: msgpack's own depth bounds what they take."""


def max_items(max_bytes: int) -> int:
    """How many values may be packed where `max_bytes` bytes are allowed.

    >>> max_items(1 << 20)
    65536
    """
    return max(max_bytes // BYTES_PER_ITEM, _SMALL)


def unpack(data: bytes | bytearray, limit: int) -> Any:
    """The value that `data` packs, if it is made of at most `limit` values.

    >>> unpack(msgpack.packb({"step": 7}), limit=3)
    {'step': 7}

    Raises:
        ValueError: too many values, too deeply nested, or not msgpack.
    """
    if len(data) > _SMALL:
        count(data, limit)
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except Exception as error:  # hostile input: msgpack has no common base class
        raise ValueError(f"not msgpack: {error!r}") from error


def count(data: bytes | bytearray, limit: int) -> int:
    """How many values a packed one is made of, keys, lists and maps included.

    Announced elements count before they are looked at, so little work is done for
    what is refused.

    >>> count(msgpack.packb([1, "two", {"three": None}]), limit=9)
    6

    Raises:
        ValueError: more than `limit`, deeper than `MAX_DEPTH`, or cut short.
    """
    at, found, end = 0, 1, len(data)
    open_ = [1]  # values still to come, in every list or map that is begun
    while open_:
        if not open_[-1]:
            open_.pop()
            continue
        open_[-1] -= 1
        if at >= end:
            raise ValueError("not msgpack: it is cut short")
        kind, size, is_many = _KINDS[data[at]]
        at += 1
        if kind:  # a length follows in so many bytes
            size += int.from_bytes(data[at : at + kind], "big") * (is_many or 1)
            at += kind
        if not is_many:
            at += size
            continue
        found += size
        if found > limit or len(open_) > MAX_DEPTH:
            raise ValueError(
                f"it packs more than {limit} values, or nests them more than "
                f"{MAX_DEPTH} deep"
            )
        open_.append(size)
    return found


def _kind(code: int) -> tuple[int, int, int]:
    """Of a first byte: bytes of the length after it, fixed size, values per element.

    The last is 0 for what is no list or map; then the size is in bytes.
    """
    if 0x80 <= code <= 0x8F:
        return 0, 2 * (code & 15), 2
    if 0x90 <= code <= 0x9F:
        return 0, code & 15, 1
    if 0xA0 <= code <= 0xBF:
        return 0, code & 31, 0
    several = {0xDC: (2, 0, 1), 0xDD: (4, 0, 1), 0xDE: (2, 0, 2), 0xDF: (4, 0, 2)}
    if code in several:
        return several[code]
    if 0xC4 <= code <= 0xC9:  # bytes; extensions, which have a type
        return 1 << (code - 0xC4) % 3, int(code > 0xC6), 0
    if 0xD9 <= code <= 0xDB:  # text
        return 1 << code - 0xD9, 0, 0
    fixed = {0xCA: 4, 0xCB: 8}
    fixed |= {0xCC + i: 1 << i for i in range(4)}
    fixed |= {0xD0 + i: 1 << i for i in range(4)}
    fixed |= {0xD4 + i: 1 + (1 << i) for i in range(5)}
    return 0, fixed.get(code, 0), 0


_KINDS = tuple(_kind(code) for code in range(256))
