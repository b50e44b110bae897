"""The journal's file may hang: the leader goes on, and nothing told is lost."""

import os
import time
from pathlib import Path

import pytest

from dtft.elastic.leader import events as journals
from dtft.elastic.leader.events import EventReader, Journal, read_events
from tests.support.hosts import wait_until


def test_a_file_that_hangs_holds_nobody_up_and_gets_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(journals, "HANGS_S", 0.2)
    path, text = tmp_path / "events.jsonl", b""
    os.mkfifo(path)  # to open it hangs until somebody reads
    journal = Journal(tmp_path, "h0")
    begun = time.monotonic()
    for step in range(1000):
        journal.committed(step, root="r")
    journal.say("still said")
    assert time.monotonic() - begun < 5
    wait_until(lambda: time.monotonic() > begun + 1)
    journal.say("and more")
    journal.close(0.2)
    wait_until(lambda: not journal._speaking)
    out = capfd.readouterr().out
    assert out.count("hangs; training goes on") == 1
    assert "still said" in out and "and more" in out
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    while text.count(b"\n") < 1002:
        text += os.read(reader, 1 << 20)
    os.close(reader)
    journal.close(20)
    path.unlink()
    path.write_bytes(text)
    events = read_events(tmp_path)
    assert [e["step"] for e in events if e["event"] == "commit"] == list(range(1000))
    assert [e["text"] for e in events[-2:]] == ["still said", "and more"]


def test_a_file_that_cannot_be_written_gets_all_of_it_later(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"  # not there yet
    journal = Journal(run, "h0")
    journal.event("one")
    journal.event("two")
    journal.close(20)
    assert "cannot be written" in capfd.readouterr().out
    run.mkdir()
    journal.event("three")
    journal.close(20)
    assert [event["event"] for event in read_events(run)] == ["one", "two", "three"]


def test_a_topic_is_said_when_it_changes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path, "h0")
    for text in ("one", "one", "", "one", "two"):
        journal.say_once("topic", text)
    journal.close(20)
    assert capfd.readouterr().out.split() == ["dtft:", "one"] * 2 + ["dtft:", "two"]
    assert len(read_events(tmp_path)) == 3


def test_a_reader_returns_each_event_once_and_only_complete_lines(
    tmp_path: Path,
) -> None:
    reader, log = EventReader(tmp_path), tmp_path / "events.jsonl"
    assert reader.new() == []
    log.write_text('{"event": "one"}\n{"event": "tw')
    assert reader.new() == [{"event": "one"}]
    assert reader.new() == []
    with log.open("a") as file:
        file.write('o"}\ntorn\n{"event": "three"}\n')
    assert reader.new() == [{"event": "two"}, {"event": "three"}]
    assert read_events(tmp_path) == [{"event": it} for it in ("one", "two", "three")]
