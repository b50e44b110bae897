"""The command `dtft`: turns command lines into calls.

* `dispatch`: finds the named command, parses its flags and runs it. `commands`: the
  flags of each command, and the function that it calls; has only light imports, so that
  help is fast.
* `jobs` (launch, agent, scale), `checkpoint`, `plan`, `predict`, `calibrate`: carry out
  the commands and print the results. `out_files`: checks of files that flags name.

Drills (runs with planned faults) and benchmarks are in `dtft.drills`. `python -m
dtft.cli` is the command `dtft`.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.cli.commands import (
        BenchCommand,
        DrillCommand,
        HostFlags,
        JobFlags,
        PlaceFlags,
        SoakCommand,
    )
    from dtft.cli.dispatch import main

_PUBLIC = {
    "BenchCommand": "commands",
    "DrillCommand": "commands",
    "HostFlags": "commands",
    "JobFlags": "commands",
    "PlaceFlags": "commands",
    "SoakCommand": "commands",
    "main": "dispatch",
}

__all__ = [
    "BenchCommand",
    "DrillCommand",
    "HostFlags",
    "JobFlags",
    "PlaceFlags",
    "SoakCommand",
    "main",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
