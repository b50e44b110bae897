"""A host's progress board: a few numbers in shared memory, written without a syscall.

The trainer and its agent write their progress to the board. The agent reads the board
to detect a hung trainer and for its reports. Drills (runs with injected faults) read
the board to inject each fault at its step. Commands read the board to report the newest
committed step.
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
"""Cells of the board; 0 means that a cell has no value now.

Steps: `computing` is the last dispatched step, and `finished` the last step known to
have finished. `staged` is the last step that the trainer has copied into this host's
memory. `replicating` is the staged step while copies on other hosts are missing.
`committing` is the step that this host is committing as the leader. `exporting` is the
step that this host is writing to storage. `committed` is the newest committed step;
before the first commit of a trainer, it is the step from which the trainer started.

Other cells: `generation` is the number of the job's assignment of slots to hosts, and
`attempt` counts the attempts to start its trainers. `recovering` is 1 while this host
recovers. `trainer_pid` is the trainer's process id. For `phase` see
`ProgressBoard.enter`."""

Phase = Literal["", "start", "compile", "data", "step", "evaluate", "save"]
"""Phase of a trainer. "": no phase, because no trainer runs or training has ended;
start: imports, joining the processes of `jax.distributed`, restoring; compile: tracing
and compiling; data: reading rows; step: computing, and waiting for the devices;
evaluate: evaluating a batch; save: waiting until the last snapshot has its copies on
other hosts, then copying the next snapshot."""

FIELDS: tuple[str, ...] = get_args(ProgressField)
PHASES: tuple[Phase, ...] = get_args(Phase)
_INDEX = {name: index for index, name in enumerate(FIELDS)}
_NUMBER = {name: index for index, name in enumerate(PHASES)}
_FORMAT = struct.Struct("@Q")  # native: an aligned cell is read and written atomically
_PHASE_BITS = 3


class ProgressBoard:
    """A host's progress in shared memory, as numbers of 8 bytes (cells).

    Every cell is read and written atomically, without a lock.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Maps the file at `path` into memory.

        With `create`, makes the file, or fills an existing file with zeros. Allocates
        its memory, because a write to a page that a full file system lacks would end
        the process (SIGBUS).

        Raises:
            OSError: the file cannot be opened or created, or, with `create`, its file
                system is full (ENOSPC).
            ValueError: the file is smaller than the board's cells.
        """
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, _FORMAT.size * len(FIELDS))
            self._memory = mmap.mmap(descriptor, _FORMAT.size * len(FIELDS))
        finally:
            os.close(descriptor)

    def set(self, field: ProgressField, value: int) -> None:
        """Writes the cell of `field`; `value` must be from 0 to 2**64 - 1."""
        _FORMAT.pack_into(self._memory, _FORMAT.size * _INDEX[field], value)

    def get(self, field: ProgressField) -> int:
        """Reads the cell of `field`; 0 means that the field has no value now."""
        return _FORMAT.unpack_from(self._memory, _FORMAT.size * _INDEX[field])[0]

    def enter(self, phase: Phase, now_ns: int) -> None:
        """Writes the trainer's phase and its start time, both into one cell.

        One cell is written atomically, so a reader never combines the phase of one
        moment with the time of another.

        Args:
            phase: the phase that starts now; for "" (no phase) the cell becomes 0.
            now_ns: `time.monotonic_ns()`, a clock shared by all processes of a machine.
        """
        self.set("phase", now_ns << _PHASE_BITS | _NUMBER[phase] if phase else 0)

    def phase(self) -> tuple[Phase, int]:
        """Reads the trainer's phase, and its start time in ns (`time.monotonic_ns`).

        Returns ("", 0) if the trainer is in no phase.
        """
        cell = self.get("phase")
        number = cell & (1 << _PHASE_BITS) - 1
        return (PHASES[number] if number < len(PHASES) else ""), cell >> _PHASE_BITS

    def close(self) -> None:
        """Unmaps the board's memory in this process; the file remains."""
        self._memory.close()
