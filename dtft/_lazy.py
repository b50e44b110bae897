"""Loads the public names of a package on first use, so that its import is fast.

`dtft.optim` does not use this module: it implements the same loading itself.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attributes(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package that defines `__all__`.

    Args:
        package: full name of the package.
        modules: public name to the module that defines the name. A module of the
            package is relative to the package; any other has its full name ("dtft...").
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
