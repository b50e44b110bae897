"""A placed step: operators of one program on several unlike devices.

* `api`: `make_placed_step`. `arguments`: what is refused. `lowering`: which operators a
  platform has kernels for.
* `partition` (segments of a program), `autodiff` and `update` (the calls of a step),
  `schedule` (what calls are, and their order: 1F1B), `state` (where each array is).
* `executor`: nodes at work, and what was measured.

Which operator runs where is decided in `dtft.placement`.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.parallel.mpmd.api import make_placed_step
    from dtft.parallel.mpmd.lowering import lacking
    from dtft.parallel.mpmd.partition import nodes_of_scopes
    from dtft.parallel.mpmd.schedule import Key

_PUBLIC = {
    "Key": "schedule",
    "lacking": "lowering",
    "make_placed_step": "api",
    "nodes_of_scopes": "partition",
}

__all__ = [
    "Key",
    "lacking",
    "make_placed_step",
    "nodes_of_scopes",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
