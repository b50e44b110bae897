"""Placed steps: run the operators of one program on devices of different types (MPMD).

A node is a thread or a process that runs programs on a device. A call is a program that
one node runs; a task is a call for one microbatch, or a call made once in a step.

* `api`: `make_placed_step`. `arguments`: checks its arguments. `lowering`: finds the
  operators that a platform has no kernels for.
* `partition`: cuts a program into segments. `autodiff` and `update`: the calls of a
  step. `schedule`: types of calls and tasks, and their order (1F1B). `state`: the
  device of each array.
* `executor`: runs the calls of nodes, and times them.

`dtft.placement` assigns operators to nodes.
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
