"""Every study with a short form (`--quick`, which keeps nothing) runs to its end.

`make drills` runs them. `tests/unit/experiments` tests some of what they compute.
"""

import sys
from pathlib import Path

import pytest

from dtft.elastic.processes import run_to_end

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
ELSEWHERE = {
    "gpu_optimizer": "needs a GPU",
    "orbax_defects": "test_orbax_has_the_defects.py runs its cases",
    "plan_quality": "takes over four minutes",
    "third_party_models": "installs other people's packages, for half an hour",
}
"""Studies that do not run here, and why."""
STUDIES = [
    path.stem
    for path in sorted(EXPERIMENTS.glob("*.py"))
    if '"--quick"' in path.read_text() and path.stem not in ELSEWHERE
]
NO_HOSTS = ("CannotLimitError", "NoQuotasError")
"""What a study raises on a machine that cannot limit links or processors."""

pytestmark = [pytest.mark.drill, pytest.mark.drill_all, pytest.mark.timeout(560)]


def kept() -> dict[Path, int]:
    """When each kept result was last changed, in nanoseconds."""
    files = (EXPERIMENTS / "results").rglob("*")
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize("study", STUDIES)
def test_a_short_study_runs_to_its_end(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    before, log = kept(), tmp_path / "log"
    with log.open("wb") as output:
        command = [sys.executable, f"experiments/{study}.py", "--quick"]
        code = run_to_end(command, 500.0, output)
    said = log.read_text(errors="replace")
    if code and any(name in said for name in NO_HOSTS):
        pytest.skip(said.splitlines()[-1])
    assert code == 0, said[-4000:]
    assert said  # most print a table, some a line for each result
    assert kept() == before
