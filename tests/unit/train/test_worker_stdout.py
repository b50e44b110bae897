"""What a trainer says to people must not end training when nobody reads it."""

import io
import os

from dtft.train.worker import ForPeople


def test_what_a_gone_reader_does_not_take_is_dropped() -> None:
    reader, writer = os.pipe()
    out = io.TextIOWrapper(io.BufferedWriter(ForPeople(writer)), line_buffering=True)
    print("one", file=out)
    assert os.read(reader, 100) == b"one\n" and not out.isatty()
    os.close(reader)
    print("two", file=out)  # EPIPE; a terminal that was closed gives EIO
    out.flush()
    os.close(writer)
