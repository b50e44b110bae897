"""A step whose save was said to have failed does not appear later."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from etils import epath

from dtft.checkpoint.storage.directory import orbax_options
from dtft.checkpoint.storage.orbax_manager import OpenedDirectory


def test_what_was_given_up_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax may report a failure while a thread of the same save still writes."""
    directory, away = tmp_path / "steps", tmp_path / "away"
    written, go_on = threading.Event(), threading.Event()
    finalize = ocp.StandardCheckpointHandler.finalize

    def slow(self: ocp.StandardCheckpointHandler, path: Any) -> None:
        written.set()
        assert go_on.wait(60)
        finalize(self, path)

    monkeypatch.setattr(ocp.StandardCheckpointHandler, "finalize", slow)
    opened = OpenedDirectory(epath.Path(directory), orbax_options(3))
    args = {
        "state": ocp.args.StandardSave({"w": jnp.ones(3, jnp.float32)}),
        "items": ocp.args.JsonSave({}),
    }
    opened.save(1, args)
    manager = opened.manager
    assert written.wait(60)  # a writer would make the directory again
    directory.rename(away)
    with monkeypatch.context() as patch:

        def failed() -> None:
            raise OSError("no metadata")

        patch.setattr(manager, "wait_until_finished", failed)
        with pytest.raises(OSError, match="no metadata"):
            opened.wait_until_finished()
    away.rename(directory)
    go_on.set()
    with contextlib.suppress(Exception):
        manager.wait_until_finished()
    assert not (directory / "1").exists()
    opened.save(2, args)
    opened.wait_until_finished()
    assert tuple(opened.manager.all_steps()) == (2,)
    opened.close()
