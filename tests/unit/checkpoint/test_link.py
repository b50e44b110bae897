"""The link between a trainer and its agent: its end is noticed, nothing is taken."""

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from dtft.checkpoint.managers.agent_link import (
    AgentGone,
    AgentLink,
    Dialogue,
    LinkClosed,
    Outbox,
    listen_for_links,
    serve_links,
)
from tests.support.hosts import wait_until


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[AgentLink, AgentLink]]:
    listener = listen_for_links(tmp_path / "agent.sock")
    trainer = AgentLink.connect(tmp_path / "agent.sock", timeout_s=5.0)
    agent = AgentLink(listener.accept()[0])
    yield trainer, agent
    for end in (trainer, agent):
        end.close()
    listener.close()


def test_waiting_for_the_end_takes_no_message(
    ends: tuple[AgentLink, AgentLink],
) -> None:
    trainer, agent = ends
    waiting = threading.Thread(target=trainer.wait_closed)
    waiting.start()
    for number in range(200):  # as releases that come after the last step
        agent.send("release", step=number)
        assert trainer.receive() == {"op": "release", "step": number}
    assert waiting.is_alive()
    agent.close()
    waiting.join(10)
    assert not waiting.is_alive()
    with pytest.raises(LinkClosed):
        trainer.receive()


def test_an_end_that_came_before_is_noticed(ends: tuple[AgentLink, AgentLink]) -> None:
    trainer, agent = ends
    agent.send("release", step=1)
    agent.close()
    trainer.wait_closed()
    assert trainer.receive()["step"] == 1


def test_what_cannot_be_sent_is_refused_and_the_rest_goes_on(
    ends: tuple[AgentLink, AgentLink],
) -> None:
    trainer, agent = ends
    outbox = Outbox(trainer)
    for value in (object(), 2**70, "\ud800"):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            outbox.send("staged", items=value)
    outbox.send("staged", step=1)
    assert agent.receive(timeout_s=10) == {"op": "staged", "step": 1}
    outbox.close()


def test_messages_stay_in_order_and_nobody_waits_for_a_peer_that_does_not_read(
    ends: tuple[AgentLink, AgentLink],
) -> None:
    trainer, agent = ends
    outbox = Outbox(agent, at_once=True)
    sizes = [1, 10, 1 << 20, 5, 1 << 19, *[3] * 100]
    begun = time.monotonic()
    for number, size in enumerate(sizes):  # more than a socket holds
        outbox.send("located", number=number, items="x" * size)
    assert time.monotonic() - begun < 5
    for number, size in enumerate(sizes):
        message = trainer.receive(timeout_s=10)
        assert (message["number"], len(message["items"])) == (number, size)
    outbox.send("release", step=1)
    assert trainer.receive(timeout_s=10) == {"op": "release", "step": 1}
    outbox.close()
    outbox.send("release", step=2)
    outbox.join(10)
    with pytest.raises(TimeoutError):
        trainer.receive(timeout_s=0.1)


def damaged(what: str) -> bytes:
    """A message that no agent of this version sends."""
    body = {
        "no msgpack": b"\xc1",
        "no map": msgpack.packb([1]),
        "no op": msgpack.packb({"step": 1}),
        "no UTF-8": b"\xa1\xff",
    }[what]
    assert body is not None
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize("what", ["no msgpack", "no map", "no op", "no UTF-8"])
def test_a_message_that_cannot_be_taken_ends_every_wait_with_the_reason(
    ends: tuple[AgentLink, AgentLink], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, agent = ends
    dialogue, taken = Dialogue(trainer, deadline_s=20.0), list[Any]()
    dialogue.start(lambda message: taken.append(message["op"]))
    agent.send("release", step=1)
    dialogue.wait(lambda: taken == ["release"], "a message")
    agent.send_packed(damaged(what))
    begun = time.monotonic()
    for _ in range(2):  # the second wait begins after the end
        with pytest.raises(AgentGone, match=r"message of .* could not be taken: \w+"):
            dialogue.wait(lambda: len(taken) > 1, "another message")
    with pytest.raises(AgentGone, match="could not be taken"):
        dialogue.check()
    assert time.monotonic() - begun < 10
    assert "Traceback" in caplog.text
    dialogue.send("failed")  # the agent can still be told
    assert agent.receive(10)["op"] == "failed"
    dialogue.close()


@contextlib.contextmanager
def no_file_can_be_opened() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def greet(link: AgentLink) -> None:
    link.send("hello")
    link.close()


def test_an_agent_short_of_open_files_accepts_again_once_it_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)  # a relative path needs no open directory
    before = set(threading.enumerate())
    listener = listen_for_links(tmp_path / "agent.sock")
    serve_links(listener, greet)
    (accepting,) = set(threading.enumerate()) - before
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as last:
        with no_file_can_be_opened():
            first.connect("agent.sock")  # accepted if `accept` waits now
            last.connect("agent.sock")
            wait_until(lambda: "Too many open files" in caplog.text)
            assert accepting.ident is not None
            clock = time.pthread_getcpuclockid(accepting.ident)
            begun = time.clock_gettime(clock)
            time.sleep(1.2)
            assert time.clock_gettime(clock) - begun < 0.6  # no busy loop
        for waiting in (first, last):
            assert AgentLink(waiting).receive(10)["op"] == "hello"
    assert caplog.text.count("Too many open files") == 1
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    accepting.join(10)
    assert not accepting.is_alive()


def test_an_agent_that_closes_while_it_is_short_of_open_files_stops_accepting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    listener = listen_for_links(tmp_path / "agent.sock")
    with no_file_can_be_opened():
        serve_links(listener, lambda link: link.close())
        (accepting,) = set(threading.enumerate()) - before
        wait_until(lambda: "Too many open files" in caplog.text)
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(10)
    assert not accepting.is_alive()
