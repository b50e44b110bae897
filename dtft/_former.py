"""Accepts the public names from before 24 November 2026, with a warning.

An import hook (`install`) makes the old module paths importable. `renamed` makes a
function accept the old names of its arguments. `dtft.optim` has its own table of old
names and calls `warn`. The warning is a FutureWarning, because Python hides a
DeprecationWarning from most users. This module imports only the standard library, so
that importing `dtft` stays fast.
"""

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Kind = TypeVar("_Kind")

MODULES = {
    "dtft.planner.jaxprs": "dtft.planner.ir",
    "dtft.planner.trace": "dtft.planner",
    "dtft.train.balance_config": "dtft.config",
    "dtft.train.calibrate": "dtft.calibration",
    "dtft.train.datasets": "dtft.data",
    "dtft.train.experiment": "dtft.config",
    "dtft.train.heap": "dtft.train",
    "dtft.train.images": "dtft.data",
    "dtft.train.lowering": "dtft.parallel.mpmd",
    "dtft.train.optimizers": "dtft.config",
    "dtft.train.pipeline_config": "dtft.config",
    "dtft.train.schedule_config": "dtft.config",
    "dtft.train.shampoo": "dtft.config",
    "dtft.train.sync_config": "dtft.config",
}
"""Maps an old module path to the package that now has the module's names. Configs and
READMEs use the old paths."""
_NAMES = {"dtft.train.calibrate.measure": "measure_devices"}
"""Maps a full old name to the new name without its package, for names that changed."""


def warn(former: str, now: str, stacklevel: int = 3) -> None:
    """Emits a FutureWarning that `former` is an old name of `now`.

    `stacklevel` selects the line that the warning names: 2 is the caller of this
    function, 3 the caller's caller.
    """
    text = f"{former} is an old name, which will go. Use {now}."
    warnings.warn(text, FutureWarning, stacklevel=stacklevel)


def renamed(**former: str) -> Callable[[_Function], _Function]:
    """Returns a decorator that makes a function accept old names of its arguments too.

    Each use of an old name emits a FutureWarning. The example prints the result of the
    call, 3, and the text of the warning.

    Args:
        **former: old name of an argument to its current name.

    >>> @renamed(root_every="every")
    ... def roots(*, every=1):
    ...     return every
    >>> with warnings.catch_warnings(record=True, action="always") as told:
    ...     print(roots(root_every=3), told[0].message)
    3 roots(root_every) is an old name, which will go. Use every.
    """

    def wrap(function: _Function) -> _Function:
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            if former.keys().isdisjoint(given):
                return function(*args, **given)
            return function(*args, **in_full(name, given, former))

        return call  # pyright: ignore[reportReturnType]

    return wrap


def renamed_fields(**former: str) -> Callable[[type[_Kind]], type[_Kind]]:
    """Returns a class decorator that makes a dataclass accept old names of its fields.

    It applies `renamed` to the class's `__init__`, and sets the class attribute
    `former_fields`, a dict from old name to current name.
    """

    def wrap(kind: type[_Kind]) -> type[_Kind]:
        kind.__init__ = renamed(**former)(kind.__init__)
        kind.former_fields = former  # pyright: ignore[reportAttributeAccessIssue]
        return kind

    return wrap


def in_full(
    what: str, given: Mapping[str, Any], former: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the given arguments by their current names; warns of each old name.

    Args:
        what: name of the function, for messages.
        given: arguments by old or current name.
        former: old name to current name.

    Raises:
        TypeError: an argument is given under both its old and its current name.
    """
    arguments: dict[str, Any] = {}
    for key, value in given.items():
        name = former.get(key, key)
        if name != key:
            warn(f"{what}({key})", name, stacklevel=4)
        if name in arguments:
            raise TypeError(f"{what}: {name} is given twice, also by its old name.")
        arguments[name] = value
    return arguments


class _Module(ModuleType):
    """A module under an old path that gets its attributes from the current package."""

    def __getattr__(self, name: str) -> Any:
        former = f"{self.__name__}.{name}"
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        package = MODULES[self.__name__]
        now = _NAMES.get(former, name)
        found = getattr(importlib.import_module(package), now)
        if isinstance(found, _Module):  # the import hid a function of the same name
            found = found._hidden
        warn(former, f"{package}.{now}")
        return found

    def __call__(self, *args: Any, **given: Any) -> Any:
        """Calls the parent package's function that has the same name as this module.

        For example, `dtft.planner` has a function `trace`. An import of the old module
        `dtft.planner.trace` sets the package's attribute `trace` to this module, which
        hides the function. So the module can be called like the function.
        """
        return self._hidden(*args, **given)

    @property
    def _hidden(self) -> Any:
        package, _, name = self.__name__.rpartition(".")
        return importlib.import_module(package).__getattr__(name)


class _Finder:
    """Import finder for modules by their old paths, the keys of `MODULES`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        del path, target
        return ModuleSpec(name, self) if name in MODULES else None  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


def install() -> None:
    """Makes the old module paths importable; a second call has no effect."""
    if not any(isinstance(it, _Finder) for it in sys.meta_path):
        sys.meta_path.append(_Finder())  # pyright: ignore[reportArgumentType]
