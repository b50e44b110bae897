"""The board: what one process writes, another reads; phases with their beginning."""

import time
from pathlib import Path

from dtft.checkpoint.managers.progress import PHASES, ProgressBoard


def test_a_phase_and_its_beginning_are_read_together(tmp_path: Path) -> None:
    agent = ProgressBoard(tmp_path / "board", create=True)
    trainer = ProgressBoard(tmp_path / "board")
    assert agent.phase() == ("", 0)
    for phase in PHASES[1:]:
        now = time.monotonic_ns()
        trainer.enter(phase, now)
        assert agent.phase() == (phase, now)
    trainer.enter("", time.monotonic_ns())
    assert agent.phase() == ("", 0)
    trainer.set("computing", 7)
    assert agent.get("computing") == 7
    agent.close()
    trainer.close()
