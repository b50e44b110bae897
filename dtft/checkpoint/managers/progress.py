"""A host's progress board: a few numbers in shared memory, written without a syscall.

The trainer and its agent write their progress. The agent reads it to detect hangs and
for its reports, and drills read it to inject a fault in a given phase.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Literal, get_args

ProgressField = Literal[
    "generation",
    "attempt",
    "computing",
    "finished",
    "staged",
    "replicating",
    "committing",
    "committed",
    "exporting",
    "recovering",
    "trainer_pid",
    "phase",
]
"""Cells of the board; 0 means none.

Steps: `computing` is the last dispatched step, `finished` the last one known to have
finished, and `staged` the last one in this host's memory. `replicating` is a staged
step without all its copies on other hosts yet. `committing` is a step that this host is
committing as the leader, and `exporting` a step that it is writing to storage.
`committed` is the newest committed step.

Other cells: `generation` and `attempt` number the job's assignments of slots to hosts;
`recovering` is 1 while this host recovers; `trainer_pid` is the trainer's process id;
for `phase` see `ProgressBoard.enter`."""

Phase = Literal["", "start", "compile", "data", "step", "evaluate", "save"]
"""Phase of a trainer. "": a phase without a timeout; start: imports, joining the
processes of `jax.distributed`, restoring; compile: tracing and compiling; data: reading
rows; step: computing, and waiting for the devices; evaluate: evaluating a batch; save:
waiting until the last snapshot has its copies on other hosts, then copying the next."""

FIELDS: tuple[str, ...] = get_args(ProgressField)
PHASES: tuple[Phase, ...] = get_args(Phase)
_INDEX = {name: index for index, name in enumerate(FIELDS)}
_NUMBER = {name: index for index, name in enumerate(PHASES)}
_FORMAT = struct.Struct("@Q")  # native: an aligned cell is read and written atomically
_PHASE_BITS = 3


class ProgressBoard:
    """A board of 8-byte cells, each read and written atomically, without a lock."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Maps the board at `path`; with `create` the file is created or emptied."""
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(descriptor, _FORMAT.size * len(FIELDS))
            self._memory = mmap.mmap(descriptor, _FORMAT.size * len(FIELDS))
        finally:
            os.close(descriptor)

    def set(self, field: ProgressField, value: int) -> None:
        """Writes one cell."""
        _FORMAT.pack_into(self._memory, _FORMAT.size * _INDEX[field], value)

    def get(self, field: ProgressField) -> int:
        """Reads one cell."""
        return _FORMAT.unpack_from(self._memory, _FORMAT.size * _INDEX[field])[0]

    def enter(self, phase: Phase, now_ns: int) -> None:
        """Writes the trainer's phase and its start time, both into one cell.

        One cell is written atomically, so a reader never combines the phase of one
        moment with the time of another.

        Args:
            phase: the phase that starts now; "" for a phase without a timeout.
            now_ns: `time.monotonic_ns()`, a clock shared by all processes of a machine.
        """
        self.set("phase", now_ns << _PHASE_BITS | _NUMBER[phase] if phase else 0)

    def phase(self) -> tuple[Phase, int]:
        """The trainer's phase, and its start time in ns by `time.monotonic_ns()`.

        ("", 0) in a phase without a timeout.
        """
        cell = self.get("phase")
        number = cell & (1 << _PHASE_BITS) - 1
        return (PHASES[number] if number < len(PHASES) else ""), cell >> _PHASE_BITS

    def close(self) -> None:
        """Unmaps the board; the file remains."""
        self._memory.close()
