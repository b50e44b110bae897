"""Memory in several pieces that is read and written as if it were one.

Must not know what the bytes mean, nor why they lie apart.
"""

import bisect
from collections.abc import Sequence

_EMPTY = memoryview(bytearray())


class Parts:
    """Memory in several pieces that is addressed as if it were one.

    >>> parts = Parts([memoryview(b"abc"), memoryview(b"defg")])
    >>> [bytes(piece) for piece in parts.cut(2, 5)], bytes(parts), len(parts)
    ([b'c', b'de'], b'abcdefg', 7)
    """

    __slots__ = ("_starts", "nbytes", "views")

    def __init__(self, views: Sequence[memoryview]) -> None:
        """Keeps views of bytes, in order; one view is one piece."""
        self.views = [view.cast("B") if view.nbytes else _EMPTY for view in views]
        self._starts = [0]
        for view in self.views:
            self._starts.append(self._starts[-1] + view.nbytes)
        self.nbytes = self._starts.pop()

    def __len__(self) -> int:
        return self.nbytes

    def __bytes__(self) -> bytes:
        return b"".join(self.views)

    def cut(self, start: int, stop: int) -> list[memoryview]:
        """The pieces of bytes `start` to `stop`, one empty piece for no bytes."""
        if start >= stop:
            return [_EMPTY]
        found = []
        index = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            begin, view = self._starts[index], self.views[index]
            end = min(stop, begin + view.nbytes)
            if end > start:
                found.append(view[start - begin : end - begin])
                start = end
            index += 1
        return found

    def fill(self, source: "Parts | memoryview") -> None:
        """Overwrites all of it with as many bytes from elsewhere."""
        given = source if isinstance(source, Parts) else Parts([source])
        begun = 0
        for view in self.views:
            cut = given.cut(begun, begun + view.nbytes)
            view[:] = cut[0] if len(cut) == 1 else b"".join(cut)
            begun += view.nbytes

    def whole(self) -> memoryview:
        """All of it in one piece: the memory itself, or a copy if it is scattered."""
        return self.views[0] if len(self.views) == 1 else memoryview(bytes(self))
