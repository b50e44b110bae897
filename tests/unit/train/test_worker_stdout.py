"""What a trainer says to people must not end training when nobody reads it."""

import io
import logging
import os
import pty
import select
import tty

import pytest

from dtft.train.worker import ForPeople, _without_waits


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_what_a_reader_that_pauses_does_not_take_is_dropped(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    if kind == "terminal":
        tty.setraw(writer)
    own = _without_waits(writer)
    out = io.TextIOWrapper(io.BufferedWriter(ForPeople(own)), line_buffering=True)
    with caplog.at_level(logging.WARNING):
        for number in range(2000):
            print(f"{number:0100}", file=out)  # 200 KB, more than the buffer takes
    messages = [record.getMessage() for record in caplog.records]
    message = "stdout takes no output (nothing reads it); lines are left out"
    # A terminal makes room once more when the kernel moves what it holds to its end.
    assert set(messages) == {message} and (kind == "terminal" or len(messages) == 1)
    read = b""
    while len(read) < 1000:
        read += os.read(reader, 1 << 20)
    assert read.startswith(f"{0:0100}\n{1:0100}\n".encode())
    while not read.endswith(b"read again\n"):
        print("read again", file=out)
        while select.select([reader], [], [], 0.1)[0]:
            read += os.read(reader, 1 << 20)
    assert os.get_blocking(writer)  # others who write there still wait
    for descriptor in (reader, writer, own):
        os.close(descriptor)


def test_lines_in_a_file_follow_those_of_others(tmp_path) -> None:
    with open(tmp_path / "out", "wb", buffering=0) as file:
        file.write(b"others\n")
        own = _without_waits(file.fileno())
        out = io.TextIOWrapper(io.BufferedWriter(ForPeople(own)), line_buffering=True)
        print("one" * 5000, file=out)  # longer than PIPE_BUF
        file.write(b"others\n")
        os.close(own)
    text = (tmp_path / "out").read_text()
    assert text == "others\n" + "one" * 5000 + "\nothers\n"


def test_what_a_gone_reader_does_not_take_is_dropped() -> None:
    reader, writer = os.pipe()
    out = io.TextIOWrapper(io.BufferedWriter(ForPeople(writer)), line_buffering=True)
    print("one", file=out)
    assert os.read(reader, 100) == b"one\n" and not out.isatty()
    os.close(reader)
    print("two", file=out)  # EPIPE; a terminal that was closed gives EIO
    out.flush()
    os.close(writer)
