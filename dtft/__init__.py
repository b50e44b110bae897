"""dtft: fault-tolerant distributed training with JAX.

`import dtft` loads neither JAX nor any subpackage. Public names and subpackages load on
first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dtft import _former

if TYPE_CHECKING:
    from dtft import checkpoint as checkpoint
    from dtft import collectives as collectives
    from dtft import optim as optim
    from dtft import planner as planner
    from dtft import train as train
    from dtft.config import Experiment as Experiment
    from dtft.optim.max_adabelief import max_adabelief as max_adabelief
    from dtft.parallel.planning import RunnablePlan as Plan
    from dtft.parallel.planning import plan as plan

__version__ = "0.1.0"

_PUBLIC = {
    "Experiment": "dtft.config.experiment:Experiment",
    "Plan": "dtft.parallel.planning.api:RunnablePlan",
    "max_adabelief": "dtft.optim.max_adabelief:max_adabelief",
    "plan": "dtft.parallel.planning.api:plan",
}
_PACKAGES = ("checkpoint", "collectives", "optim", "planner", "train")
"""Subpackages loaded as attributes: `import dtft` suffices for `dtft.train.make_step`.
"""

__all__ = [
    "Experiment",
    "Plan",
    "__version__",
    "checkpoint",
    "collectives",
    "max_adabelief",
    "optim",
    "plan",
    "planner",
    "train",
]

_former.install()


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"dtft.{name}")
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'dtft' has no attribute {name!r}. It has: {', '.join(__all__)}."
        )
    module, _, found = _PUBLIC[name].partition(":")
    return getattr(importlib.import_module(module), found)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
