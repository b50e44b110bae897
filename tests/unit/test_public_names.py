"""What packages export: each name loads, and looking at the list loads nothing."""

import ast
import collections
import importlib
from pathlib import Path

import pytest

import dtft
from tests.support.imports import DEPENDENCIES, imported_by


@pytest.mark.parametrize(
    "package",
    [
        "dtft",
        "dtft.balance",
        "dtft.calibration",
        "dtft.cli",
        "dtft.config",
        "dtft.data",
        "dtft.drills",
        "dtft.elastic.faults",
        "dtft.elastic.host",
        "dtft.elastic.leader",
        "dtft.elastic.messages",
        "dtft.elastic.store",
        "dtft.elastic.transfer",
        "dtft.parallel",
        "dtft.parallel.load_balancing",
        "dtft.parallel.mpmd",
        "dtft.parallel.planning",
        "dtft.placement",
        "dtft.planner",
        "dtft.planner.aot",
        "dtft.planner.cluster",
        "dtft.planner.cost",
        "dtft.planner.ir",
        "dtft.planner.memory",
        "dtft.planner.report",
        "dtft.planner.search",
        "dtft.planner.spmd",
        "dtft.planner.transformer",
        "dtft.train",
    ],
)
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no attribute 'nothing'. It has: "):
        _ = module.nothing


def test_a_plan_of_dtft_is_one_that_runs() -> None:
    assert issubclass(dtft.Plan, dtft.planner.Plan)
    assert dtft.Plan.jit


def test_import_of_the_planner_is_light() -> None:
    modules = imported_by("dtft.planner")
    assert not modules & (DEPENDENCIES | {"numpy"})
    assert {name for name in modules if name.startswith("dtft.")} == {
        "dtft._former",
        "dtft._lazy",
        "dtft.planner",
    }


def test_class_names_stand_once() -> None:
    """A reader who searches for a class finds one."""
    places: dict[str, list[str]] = collections.defaultdict(list)
    for path in Path(dtft.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice
