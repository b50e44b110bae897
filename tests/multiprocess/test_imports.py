"""What an import pulls in, and who may touch private JAX API."""

from pathlib import Path

import pytest

from tests.support.imports import DEPENDENCIES, imported_by, loaded_by

PACKAGE = Path(__file__).parents[2] / "dtft"


def test_import_dtft_is_light() -> None:
    assert not imported_by("dtft") & (DEPENDENCIES | {"numpy"})


def test_optim_pulls_in_jax_and_optax_only() -> None:
    modules = imported_by("dtft.optim")
    # scipy comes with jax itself.
    assert modules & DEPENDENCIES <= {"jax", "optax", "scipy"}
    own = {name for name in modules if name.startswith("dtft.")}
    others = {name for name in own if not name.startswith("dtft.optim")}
    assert others <= {"dtft._former"}


@pytest.mark.parametrize(
    "module",
    [
        "dtft.elastic.host.agent",
        "dtft.checkpoint.storage.export_plan",
        "dtft.cli",
        "dtft.cli.dispatch",
        "dtft.cli.jobs",
        "dtft.config.loading",
        "dtft.drills.options",
        "dtft.parallel.validation",
        "dtft.parallel.row_assignment",
        "dtft.train.single_process",
        "dtft.train.worker",
    ],
)
def test_is_never_a_jax_client(module: str) -> None:
    assert not imported_by(module) & {"jax", "jaxlib", "flax", "orbax"}


def test_an_agent_reads_layouts_of_types_that_numpy_lacks() -> None:
    types = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint2")
    code = f"""
import dtft.elastic.host.agent
from dtft.checkpoint.state import Layout, Leaf, MeshLayout
from dtft.elastic.messages.reports import fault_of_report

mesh = MeshLayout(axis_names=("fsdp",), axis_sizes=(1,), slots=(0,))
leaves = [Leaf(path=it, shape=(2,), dtype=it) for it in {types}]
layout = Layout(mesh=mesh, leaves=tuple(leaves))
assert sum(it.nbytes for it in layout.slices(0)) == 12
for report in ({{"op": "unfit", "why": "no room"}}, {{"op": "layout"}}):
    fault = fault_of_report(report | {{"ballot": (1, 1), "layout": layout.to_json()}})
    assert fault is None, fault
"""
    assert "jax" not in loaded_by(code)


def test_private_jax_is_in_one_module() -> None:
    users = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if "jax._src" in path.read_text() or "jaxlib._jax" in path.read_text()
    }
    assert users <= {"_jax_internals.py"}
