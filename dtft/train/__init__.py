"""Experiments, data, the step and the loop. Decides no membership and no recovery.

`make_step` and `jit_plan` run a plan, `make_placed_step` a placement, or layers that
`nodes_of_scopes` gives to nodes; they load on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtft.train.placed import make_placed_step as make_placed_step
    from dtft.train.placed_placement import nodes_of_scopes as nodes_of_scopes
    from dtft.train.planned_step import make_step as make_step
    from dtft.train.planning import jit_plan as jit_plan

_PUBLIC = {
    "jit_plan": "dtft.train.planning",
    "make_placed_step": "dtft.train.placed",
    "make_step": "dtft.train.planned_step",
    "nodes_of_scopes": "dtft.train.placed_placement",
}

__all__ = ["jit_plan", "make_placed_step", "make_step", "nodes_of_scopes"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'dtft.train' has no attribute {name!r}. It has: "
            f"{', '.join(__all__)}."
        )
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
