"""The READMEs that map folders name every module there is, and none that is gone."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAPPED = ("experiments",)
EXAMPLES = {"train.py", "experiments/NAME.py"}
"""A script of the reader's own, and a name that stands for any."""


def modules(folder: Path) -> set[str]:
    """Names of the modules of a folder, without what is below it."""
    return {path.stem for path in folder.glob("*.py")} - {"__init__"}


def in_table(text: str) -> set[str]:
    """Names and patterns of modules in the rows of a table of modules.

    >>> sorted(in_table("| what | modules |\\n|---|---|\\n| a | `b`, `c_*` (`d.e`) |"))
    ['b', 'c_*']
    """
    _, _, table = text.partition("| modules |\n")
    rows = table.partition("\n\n")[0].splitlines()
    return {
        name
        for row in rows
        for name in re.findall(r"`([a-z_0-9*]+)`", row.split("|")[2])
    }


def as_files(text: str) -> set[str]:
    """Names and patterns of modules that a text calls files, folders included.

    >>> sorted(as_files("`a.py` has what `b/c.py` and `d_*.py` leave; e is no file"))
    ['a', 'b/c', 'd_*']
    """
    found = re.findall(r"[\w*/]*[\w*]\.py\b", text)
    return {name.removesuffix(".py") for name in found if name not in EXAMPLES}


@pytest.mark.parametrize("folder", MAPPED)
def test_every_module_is_on_the_map(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text()
    names = in_table(text) | as_files(text)
    missing = {
        module
        for module in modules(ROOT / folder)
        if not any(fnmatch(module, name) for name in names)
    }
    assert not missing, f"{folder}/README.md names no {sorted(missing)}"


@pytest.mark.parametrize("folder", MAPPED)
def test_no_row_of_a_map_names_what_is_gone(folder: str) -> None:
    there = modules(ROOT / folder)
    named = in_table((ROOT / folder / "README.md").read_text())
    gone = {
        name for name in named if not any(fnmatch(module, name) for module in there)
    }
    assert not gone, f"{folder}/README.md names {sorted(gone)}"


@pytest.mark.parametrize("folder", ["", "dtft/checkpoint", "dtft/collectives", *MAPPED])
def test_no_text_names_a_file_that_is_gone(folder: str) -> None:
    tops = ("benchmarks", "configs", "dtft", "experiments", "tests")
    there = [
        path.relative_to(ROOT).with_suffix("")
        for top in tops
        for path in (ROOT / top).rglob("*.py")
    ]
    named = as_files((ROOT / folder / "README.md").read_text())
    gone = {name for name in named if not any(path.match(name) for path in there)}
    assert not gone, f"{folder}/README.md names {sorted(gone)}"


def test_every_benchmark_is_in_the_makefile_or_on_the_map() -> None:
    named = as_files((ROOT / "Makefile").read_text())
    named |= as_files((ROOT / "README.md").read_text())
    missing = modules(ROOT / "benchmarks") - {Path(name).name for name in named}
    assert not missing, f"neither Makefile nor README.md names {sorted(missing)}"
