"""Public names of a package that load on first use, so that importing it is light.

Decides nothing; must not know which packages there are. `dtft.optim`, which stands
alone, has its own.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attributes(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, which says in `__all__` what it has.

    Args:
        package: its name.
        modules: public name to the module that has it: of the package, or another one
            by its full name ("dtft...").
    """

    def load(name: str) -> Any:
        if name not in modules:
            known = ", ".join(sys.modules[package].__all__)
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}. It has: {known}."
            )
        module = modules[name]
        own = module if module.startswith("dtft.") else f"{package}.{module}"
        return getattr(importlib.import_module(own), name)

    def names() -> list[str]:
        there = vars(sys.modules[package])
        return sorted({*there, *there["__all__"]})

    return load, names
