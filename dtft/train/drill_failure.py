"""Raises an exception in a training step, for a failure drill.

A drill is a run with planned faults. The environment variable is
``DTFT_FAIL_AT=SLOT:STEP:WHEN:PATH``, where WHEN is ``once`` or ``always``. ``once``
makes the file PATH first and does not fail if PATH exists, because a restarted trainer
cannot remember an earlier failure.
"""

import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "DTFT_FAIL_AT"


@dataclass(frozen=True, kw_only=True)
class DrillFailure:
    """A failure to inject: its slot, its step, and whether it happens only once.

    If it happens only once, the file `path` records that it has happened.
    """

    slot: int
    step: int
    once: bool
    path: Path

    @classmethod
    def from_environment(cls) -> "DrillFailure | None":
        """Parses `DTFT_FAIL_AT`; returns None if the variable is empty or not set."""
        text = os.environ.get(VARIABLE, "")
        return cls.parse(text) if text else None

    @classmethod
    def parse(cls, text: str) -> "DrillFailure":
        """Parses a failure, written as SLOT:STEP:WHEN:PATH.

        WHEN is `once` or `always`; PATH is the file that records a failure that happens
        only once.

        Raises:
            ValueError: SLOT or STEP is no number, WHEN is not `once` or `always`, or
                `once` has no PATH.

        >>> DrillFailure.parse("1:20:once:/tmp/failed").step
        20
        """
        slot, step, when, path = [*text.split(":", 3), "", "", "", ""][:4]
        if not (slot.isdigit() and step.isdigit()) or when not in ("once", "always"):
            raise ValueError(
                f"{VARIABLE}={text!r} is not SLOT:STEP:once|always:PATH, "
                "for example 1:20:once:/tmp/failed"
            )
        if when == "once" and not path:
            raise ValueError(f"{VARIABLE}={text!r}: once needs a PATH to remember it")
        return cls(slot=int(slot), step=int(step), once=when == "once", path=Path(path))

    def strike(self, slot: int, step: int) -> None:
        """Raises an error if the failure is for `slot` and `step`; else does nothing.

        A failure that happens only once makes its file `path` first. If the file
        exists, the failure has happened already, and this does nothing.

        Raises:
            RuntimeError: the injected failure.
        """
        if (slot, step) != (self.slot, self.step):
            return
        if self.once:
            try:
                self.path.touch(exist_ok=False)
            except FileExistsError:
                return
        raise RuntimeError(f"drill: fail at step {step}")
