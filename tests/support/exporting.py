"""An exporter process spoken to line by line, and what to open it with."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dtft.checkpoint.state.digests import Chunks, chunk_digests
from dtft.checkpoint.state.slices import Layout, offsets_of
from tests.support.states import extent, state

CHUNK = 64


class Process:
    """One exporter, spoken to line by line."""

    def __init__(self, *wrapper: str) -> None:
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "dtft.checkpoint.storage.exporter"],
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


def buffers(layout: Layout, slot: int, buffer: int = 1) -> str:
    """Where all chunks of a slot are, as an exporter is told."""
    return bytes([buffer] * Chunks.of(layout.slices(slot), CHUNK).num_chunks).hex()


def opening(
    tmp_path: Path, layout: Layout, rank: int, slot: int, **changes: Any
) -> Any:
    arena = tmp_path / f"arena-{slot}"
    version = extent(layout, slot, state())
    arena.write_bytes(bytes(len(version)) + version)  # the second buffer of each chunk
    return {
        "op": "open",
        "directory": str(tmp_path / "storage"),
        "max_to_keep": 2,
        "rank": rank,
        "world": 1,
        "coordinator": "",
        "layout": layout.to_json(),
        "slot": slot,
        "devices": len(layout.mesh.positions(slot)),
        "chunk_bytes": CHUNK,
        **changes,
    }


def saving(
    tmp_path: Path, layout: Layout, slot: int, step: int, **changes: Any
) -> dict[str, Any]:
    """The message that has the state of `opening` saved."""
    pieces, memory = layout.slices(slot), extent(layout, slot, state())
    parts = zip(pieces, offsets_of(pieces)[0], strict=True)
    digests = [chunk_digests(memory[o : o + p.nbytes], CHUNK).hex() for p, o in parts]
    here = buffers(layout, slot)
    message = {"op": "save", "step": step, "buffers": here, "items": {}}
    message["memory"] = [str(tmp_path / f"arena-{slot}")]
    return message | {"digests": digests} | changes
