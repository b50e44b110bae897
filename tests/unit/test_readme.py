"""What README.md, docs/ and READMEs of packages say can be done as it is written."""

import re
import shlex
from pathlib import Path

import jax
import pytest

from dtft.cli.commands import COMMANDS
from dtft.cli.dispatch import main, read
from dtft.config import parse_experiment

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(f"docs/{it.name}" for it in sorted((ROOT / "docs").glob("*"))))
PACKAGES = tuple(str(it.relative_to(ROOT)) for it in ROOT.glob("dtft/**/README.md"))
RUN = (*PAGES, "dtft/placement/README.md")
"""Pages whose Python runs as it is; others' is in parts, or needs several devices."""
QUICK = ("config", "checkpoint odds")
"""Commands that are run here; the others are run by drills (`tests/drills`)."""


def calls(page: str) -> list[str]:
    """What follows `dtft` in a page's code; four spaces part it from what it is for.

    A line that goes on with a backslash is one call.
    """
    text = (ROOT / page).read_text().replace("\\\n", " ")
    lines = re.findall(r"^ {4}(?:\S+=\S+ +)?dtft (.*)$", text, re.MULTILINE)
    return [re.split(r" {4,}", line)[0] for line in lines]


CALLS = sorted({(page, call) for page in (*PAGES, *PACKAGES) for call in calls(page)})


@pytest.mark.parametrize(("page", "call"), CALLS)
def test_every_command_is_read(page: str, call: str) -> None:
    command, keys = read(shlex.split(call))
    assert type(command) in COMMANDS.values(), f"{page}: {call}"
    if keys:
        parse_experiment(command.config, keys)


@pytest.mark.parametrize("call", [it for _, it in CALLS if it.startswith(QUICK)])
def test_quick_commands_run(call: str) -> None:
    assert main(shlex.split(call)) == 0


def test_the_plan_of_the_readme_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    (call,) = [it for it in calls("README.md") if it.endswith("--cluster 8xH100")]
    assert main(shlex.split(call)) == 0
    assert "replica" in capsys.readouterr().out


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize(
    ("page", "number"),
    [(page, number) for page in RUN for number in range(len(blocks(page)))],
)
def test_python_runs(
    page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        exec(compile(blocks(page)[number], f"{page}, block {number}", "exec"), {})


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_are_there(page: str) -> None:
    text = (ROOT / page).read_text()
    linked = re.findall(r"\]\(([^):]+)\)", text)
    folder = (ROOT / page).parent
    missing = [name for name in linked if not (folder / name).exists()]
    named = re.findall(r"`((?:dtft|docs|experiments|benchmarks|tests)/[\w./]+)`", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing
