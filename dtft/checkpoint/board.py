"""A host's progress board: a few numbers in shared memory, written without a call.

The trainer and its agent write where they are; whoever watches (the agent's hang
detector, a drill that wants to strike at a phase) reads. Must not decide anything.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Literal, get_args

Field = Literal[
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
]
"""Steps, except `generation`, `attempt`, `recovering` (1 while this host is being
re-formed) and `trainer_pid`; 0 means none."""

FIELDS: tuple[str, ...] = get_args(Field)
_INDEX = {name: index for index, name in enumerate(FIELDS)}
_FORMAT = struct.Struct("<Q")


class Board:
    """Fixed cells of 8 bytes; each cell has one writer, so no lock is needed."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Maps the board at `path`, which is made anew when `create` is set."""
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(descriptor, _FORMAT.size * len(FIELDS))
            self._memory = mmap.mmap(descriptor, _FORMAT.size * len(FIELDS))
        finally:
            os.close(descriptor)

    def set(self, field: Field, value: int) -> None:
        """Writes one cell."""
        _FORMAT.pack_into(self._memory, _FORMAT.size * _INDEX[field], value)

    def get(self, field: Field) -> int:
        """Reads one cell."""
        return _FORMAT.unpack_from(self._memory, _FORMAT.size * _INDEX[field])[0]

    def close(self) -> None:
        """Unmaps the board; the file stays."""
        self._memory.close()
