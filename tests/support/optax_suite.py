"""Runs one of optax's own test suites with one of our optimizers in its tables.

    python -m tests.support.optax_suite alias max_adabelief

The suite's source is read from the installed optax, whose wheel ships the tests of its
sdist unchanged. Its tables are cut down to `adabelief` and our optimizer, and every
test that a table gives is run, with fewer steps of an optimization (`SHORT`). Prints
one JSON object per test.
"""

import ast
import importlib.util
import json
import sys
import unittest
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

SUITES = {
    "alias": "optax._src.alias_test",
    "contrib": "optax.contrib._common_test",
    "float64": "optax._src.float64_test",
    "sharding": "optax._src.sharding_test",
}
TABLES = {
    "_OPTIMIZERS_UNDER_TEST",
    "_MAIN_OPTIMIZERS_UNDER_TEST",
    "_BASE_OPTIMIZERS",
    "ALL_MODULES",
    "OPTIMIZERS",
}
SHORT = {10_000: 3_000, 30_000: 9_000}
"""Lengths of the suites' optimizations, and what they are here."""
THEIRS = "adabelief"
OURS = ("guarded_max_adabelief", "max_adabelief")


def source(suite: str) -> Path | None:
    """The suite's file in the installed optax; None where a release ships none."""
    spec = importlib.util.find_spec(SUITES[suite])
    return Path(spec.origin) if spec and spec.origin else None


def optimizers(ours: str) -> dict[str, Any]:
    """Factories by name: of our optimizer `ours`, and of `adabelief`.

    In this order, as the name of `adabelief` is part of ours.
    """
    import optax

    from dtft.optim import max_adabelief, skip_outlier_gradients

    def guarded_max_adabelief(
        learning_rate: optax.ScalarOrSchedule,
    ) -> optax.GradientTransformationExtraArgs:
        return skip_outlier_gradients(max_adabelief(learning_rate))

    known = {
        "guarded_max_adabelief": guarded_max_adabelief,
        "max_adabelief": max_adabelief,
    }
    return {ours: known[ours], THEIRS: optax.adabelief}


def with_ours(name: str, factories: dict[str, Any]) -> Any:
    """A table of `adabelief` and our optimizer, in the form of the table `name`."""
    if name == "OPTIMIZERS":
        return {key: make(1.0) for key, make in factories.items()}
    if name == "ALL_MODULES":
        return [(key, make, {"learning_rate": 0.1}) for key, make in factories.items()]
    rate = {"learning_rate": 1.0 if name == "_BASE_OPTIMIZERS" else 1e-2}
    return [{"opt_name": key, "opt_kwargs": dict(rate)} for key in factories]


class _Tables(ast.NodeTransformer):
    """Replaces the value of the first assignment to each table, and lengths."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is int:
            node.value = SHORT.get(node.value, node.value)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        name = getattr(node.targets[0], "id", None)
        if name in TABLES and name not in self.found:
            self.found.add(name)
            call = f"_with_ours({name!r}, _factories)"
            node.value = ast.parse(call, mode="eval").body
            return node
        return self.generic_visit(node)


def load(path: Path, factories: dict[str, Any]) -> ModuleType:
    """The suite as a module, with tables of `factories`, and shorter optimizations."""
    from optax._src import alias

    for name, make in factories.items():
        setattr(alias, name, make)  # where the suites look a name up
    transformer = _Tables()
    tree = ast.fix_missing_locations(transformer.visit(ast.parse(path.read_text())))
    if not transformer.found:
        raise ValueError(f"{path} has none of the tables {sorted(TABLES)}.")
    module = ModuleType(path.stem)
    sys.modules[path.stem] = module
    vars(module).update(_with_ours=with_ours, _factories=factories)
    exec(compile(tree, path, "exec"), vars(module))
    return module


def cases(
    module: ModuleType, names: Iterable[str]
) -> Iterator[tuple[str, str, unittest.TestCase]]:
    """(optimizer, what is tested, test) of every test of one of the optimizers."""
    for kind in vars(module).values():
        if not (isinstance(kind, type) and issubclass(kind, unittest.TestCase)):
            continue
        for method in unittest.defaultTestLoader.getTestCaseNames(kind):
            parameters = str(getattr(getattr(kind, method), "__x_params_repr__", ""))
            text = f"{method}({parameters})"
            name = next((name for name in names if name in text), None)
            if name is not None:
                what = text if method[-1:] not in "0123456789" else parameters
                base = method.rstrip("0123456789")
                yield name, f"{base}: {what}".replace(name, "*"), kind(method)


def main() -> None:
    """Runs the suite and the optimizer named on the command line."""
    import jax

    # Some tests compare versions as texts: 0.10.2 is "before" 0.7.2, and skipped.
    jax.__version__ = "0.9.9"
    path = source(sys.argv[1])
    if path is None:
        raise SystemExit(f"optax ships no {SUITES[sys.argv[1]]}")
    factories = optimizers(sys.argv[2])
    for name, what, test in cases(load(path, factories), factories):
        result = unittest.TestResult()
        test.run(result)
        problems = [*result.failures, *result.errors]
        outcome = "failed" if problems else "skipped" if result.skipped else "passed"
        text = problems[0][1] if problems else "".join(r for _, r in result.skipped)
        row = {"optimizer": name, "test": what, "outcome": outcome, "text": text}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
