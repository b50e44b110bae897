"""dtft: distributed training, fault tolerant.

Importing this package is light: public names load on first use. It decides nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtft.optim.max_adabelief import max_adabelief as max_adabelief
    from dtft.train.experiment import Experiment as Experiment
    from dtft.train.plan_entry import plan as plan

__version__ = "0.1.0"

_PUBLIC = {
    "Experiment": "dtft.train.experiment",
    "max_adabelief": "dtft.optim.max_adabelief",
    "plan": "dtft.train.plan_entry",
}

__all__ = ["Experiment", "__version__", "max_adabelief", "plan"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'dtft' has no attribute {name!r}. It has: {', '.join(__all__)}."
        )
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
