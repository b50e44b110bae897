"""Experiments, data, the step and the loop. Decides no membership and no recovery.

`make_step` and `jit_plan` run a plan, `make_placed_step` a placement, or layers that
`nodes_of_scopes` gives to nodes; they load on first use.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.train.placed import make_placed_step as make_placed_step
    from dtft.train.placed_placement import nodes_of_scopes as nodes_of_scopes
    from dtft.train.planned_step import jit_plan as jit_plan
    from dtft.train.planned_step import make_step as make_step

_PUBLIC = {
    "jit_plan": "planned_step",
    "make_placed_step": "placed",
    "make_step": "planned_step",
    "nodes_of_scopes": "placed_placement",
}

__all__ = ["jit_plan", "make_placed_step", "make_step", "nodes_of_scopes"]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
