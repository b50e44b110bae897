"""Runs `dtft drill` as a user would and reads its record."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def drill(directory: Path, config: str, *arguments: str, **options: Any) -> dict:
    """The record of one drill; fails with the output if the drill does."""
    record = directory / "drill.json"
    command = [
        *(sys.executable, "-m", "dtft.cli", "drill", config),
        *("--run-dir", str(directory), "--json", str(record)),
        *arguments,
    ]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=options.get("timeout", 280),
    )
    output = done.stdout + done.stderr
    assert record.exists(), output[-4000:]
    found = json.loads(record.read_text()) | {"output": output}
    assert done.returncode == options.get("code", 0), output[-4000:]
    return found


def assert_unharmed(record: dict) -> None:
    """What every drill promises."""
    assert record["bit_identical"], record["differing_leaves"]
    assert record["samples_exactly_once"]
    assert not [p for p in Path("/dev/shm").glob("dtft-*")], "memory left behind"
