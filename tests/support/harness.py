"""Runs `dtft drill` as a user would and reads its record."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
DIGITS = (
    *("digits_cnn", "--hosts", "3", "--stop.steps", "60"),
    *("--checkpoint.storage_interval", "20"),
)
TWO = (*DIGITS, "--hosts", "2")  # the last of equal options counts
CHARS = (
    *("chars_transformer", "--hosts", "4", "--stop.steps", "60"),
    *("--checkpoint.storage_interval", "10"),
)
FSDP = (*CHARS, "--mesh.replica", "1", "--mesh.fsdp", "4")
SMALL_FSDP = (
    *("chars_transformer", "--hosts", "2", "--stop.steps", "30"),
    *("--checkpoint.storage_interval", "10", "--mesh.replica", "1"),
    *("--mesh.fsdp", "2", "--model.width", "32", "--data.global_batch", "16"),
)
STAGES = (
    *("chars_transformer", "--hosts", "4", "--stop.steps", "20"),
    *("--checkpoint.storage_interval", "10", "--mesh.fsdp", "1"),
    *("--mesh.replica", "2", "--mesh.stage", "2", "--pipeline.microbatches", "2"),
    *("--model.width", "32", "--data.global_batch", "16"),
)
HYBRID = (*CHARS, "--mesh.replica", "2", "--mesh.fsdp", "2")


def dtft(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "dtft.cli", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def memory() -> tuple[str, str]:
    """Puts arenas where the running test checks that nothing is left behind."""
    return "--checkpoint.arena_directory", os.environ["DTFT_TEST_MEMORY"]


class Launched:
    """A `dtft launch` that runs; its output once it has ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.output = process, ""

    @property
    def runs(self) -> bool:
        return self.process.poll() is None


@contextmanager
def launched(run: Path, *options: str) -> Iterator[Launched]:
    """A job of two hosts that trains until the block ends, and must then end well."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "dtft.cli", "launch", "digits_cnn"),
            *("--log.tensorboard", "False", "--hosts", "2", "--run-dir", str(run)),
            *("--stop.steps", "100000", "--timeouts.stop", "50", *memory(), *options),
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    job = Launched(process)
    try:
        yield job
    finally:
        process.send_signal(signal.SIGINT)
        job.output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, job.output


def drill(directory: Path, *arguments: str, status: str = "done") -> dict[str, Any]:
    """The record of one drill that must succeed; its output comes with it.

    `status`: how the job must end.

    A run whose mesh or shares changed on the way ends with other roundings: there what
    was restored must be what was committed, and losses those of the undisturbed run.
    """
    record = directory / "drill.json"
    given = ("drill", *arguments, "--run-dir", str(directory), "--json", str(record))
    given += memory()
    done = dtft(*given, timeout=380)
    output = done.stdout + done.stderr
    assert record.exists() and done.returncode == 0, output[-6000:]
    found = json.loads(record.read_text())
    if found["resized"] or found["shares"]:
        assert all(it["bit_exact"] for it in found["resized"]), found["resized"]
        assert all(it["replayed"] for it in found["shares"]), found["shares"]
        assert found["loss_curve"]["within_tolerance"], found["loss_curve"]
    else:
        assert found["bit_identical"], found["differing_leaves"]
    assert found["samples_exactly_once"]
    assert found["status"] == status
    assert found["left_behind"] == []
    return found | {"output": output}


def is_rung(recovery: dict[str, Any], rung: int) -> bool:
    """Whether a recovery's state came from where rung 1 or 2 has it: own memory, or
    peers' memory too. On rung 0 no survivor may have been restarted."""
    if recovery["rung"] != 0:
        return recovery["rung"] == rung
    from_peers = recovery["bytes_from_peers"] > 0
    return not recovery["survivors_restarted"] and rung == (2 if from_peers else 1)
