"""Runs `dtft drill` as a user would and reads its record."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
DIGITS = (
    *("digits_cnn", "--hosts", "3", "--stop.steps", "60"),
    *("--checkpoint.storage_interval", "20"),
)
CHARS = (
    *("chars_transformer", "--hosts", "4", "--stop.steps", "60"),
    *("--checkpoint.storage_interval", "10"),
)
FSDP = (*CHARS, "--mesh.replica", "1", "--mesh.fsdp", "4")
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


def drill(directory: Path, *arguments: str) -> dict[str, Any]:
    """The record of one drill that must succeed; its output comes with it."""
    record = directory / "drill.json"
    given = ("drill", *arguments, "--run-dir", str(directory), "--json", str(record))
    given += memory()
    done = dtft(*given, timeout=280)
    output = done.stdout + done.stderr
    assert record.exists() and done.returncode == 0, output[-6000:]
    found = json.loads(record.read_text())
    assert found["bit_identical"], found["differing_leaves"]
    assert found["samples_exactly_once"]
    assert found["status"] == "done"
    return found | {"output": output}
