"""An exporter process spoken to line by line, and what to open it with."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dtft.checkpoint.chunks import Chunks
from dtft.checkpoint.slices import Layout
from tests.checkpoint.states import extent, state

CHUNK = 16


class Process:
    """One exporter, spoken to line by line."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dtft.checkpoint.exporter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait(timeout=10)
        self.process.stdin.close()
        self.process.stdout.close()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def places(layout: Layout, slot: int, place: int = 1) -> str:
    """Where all chunks of a slot are, as an exporter is told."""
    return bytes([place] * Chunks.of(layout.slices(slot), CHUNK).num_chunks).hex()


def opening(
    tmp_path: Path, layout: Layout, rank: int, slot: int, **changes: Any
) -> Any:
    arena = tmp_path / f"arena-{slot}"
    version = extent(layout, slot, state())
    arena.write_bytes(bytes(len(version)) + version)  # the second place of each chunk
    return {
        "op": "open",
        "directory": str(tmp_path / "storage"),
        "max_to_keep": 2,
        "rank": rank,
        "world": 1,
        "coordinator": "",
        "layout": layout.to_json(),
        "arena": str(arena),
        "chunk_bytes": CHUNK,
        "slot": slot,
        "devices": len(layout.mesh.positions(slot)),
        **changes,
    }
