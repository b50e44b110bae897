"""The link between a trainer and its agent: its end is noticed, nothing is taken."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtft.checkpoint.managers.agent_link import (
    AgentLink,
    LinkClosed,
    Outbox,
    listen_for_links,
)


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
