"""The journal's file may hang: the leader goes on, and nothing told is lost."""

import os
from pathlib import Path

import pytest

from dtft.elastic import journal as journals
from dtft.elastic.journal import Journal, read_events


def test_a_file_that_hangs_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(journals, "WAIT_S", 0.2)
    path, text = tmp_path / "events.jsonl", b""
    os.mkfifo(path)  # to open it hangs until somebody reads
    journal = Journal(tmp_path, "h0")
    for step in range(1000):
        journal.committed(step, root="r")
    journal.say("still said")
    journal.say("and more")
    out = capfd.readouterr().out
    assert out.count("hangs; training goes on") == 1 and "still said" in out
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    while text.count(b"\n") < 1002:
        text += os.read(reader, 1 << 20)
    os.close(reader)
    path.unlink()
    path.write_bytes(text)
    events = read_events(tmp_path)
    assert [e["step"] for e in events if e["event"] == "commit"] == list(range(1000))
    assert [e["text"] for e in events[-2:]] == ["still said", "and more"]


def test_a_topic_is_said_when_it_changes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path, "h0")
    for text in ("one", "one", "", "one", "two"):
        journal.say_once("topic", text)
    assert capfd.readouterr().out.split() == ["dtft:", "one"] * 2 + ["dtft:", "two"]
    assert len(read_events(tmp_path)) == 3
