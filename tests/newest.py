"""``python -m tests.newest [PYTEST ARGUMENT ...]``: the tests with the newest packages.

Installs the newest jax and flax that pip finds together, and the newest of the rest,
where constraints.txt pins older ones; says what differs; runs the unit tests (or those
that are given) and one drill. Needs the network; the environment is kept.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.wheel.environment import empty, interpreter

REPOSITORY = Path(__file__).parents[1]
VERSION = "3.12"
ENVIRONMENT = REPOSITORY / ".venv" / "newest"
UNIT = ("-m", "not drill", "-n", "auto", "--maxprocesses", "4", "--dist", "worksteal")
DRILL = ("-m", "drill", "tests/drills/test_drills.py::test_the_demo")


def main() -> int:
    """Returns 1 if something fails."""
    base = interpreter(VERSION)
    if base is None:
        print(f"Python {VERSION}: there is none on this machine", file=sys.stderr)
        return 1
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        empty(ENVIRONMENT, base)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    newest = ("install", "-q", "--upgrade", "--upgrade-strategy", "eager")
    subprocess.run([*pip, *newest, "-e", ".[images,test]"], cwd=REPOSITORY, check=True)
    freeze = [*pip, "freeze", "--exclude-editable"]
    frozen = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout
    pinned = (REPOSITORY / "constraints.txt").read_text()
    for line in differences(versions(pinned), versions(frozen)):
        print(line, flush=True)
    runs = [(*UNIT, *sys.argv[1:]), DRILL]
    return int(any([_pytest(python, arguments) for arguments in runs]))


def versions(text: str) -> dict[str, str]:
    """Package to version, of lines as pip writes and reads them.

    >>> versions("jax==0.10.2; sys_platform == 'linux'\\nml_dtypes==0.6.0")
    {'jax': '0.10.2', 'ml-dtypes': '0.6.0'}
    """
    pairs = [line.partition(";")[0].split("==") for line in text.splitlines()]
    return {
        pair[0].lower().replace("_", "-"): pair[1] for pair in pairs if len(pair) == 2
    }


def differences(pinned: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """A line for every package that is there in another version than the pinned one.

    >>> differences({"jax": "0.10.2", "rich": "15"}, {"jax": "0.12.0", "rich": "15"})
    ['jax 0.10.2 -> 0.12.0']
    """
    return [
        f"{name} {pinned.get(name, '(not pinned)')} -> {version}"
        for name, version in sorted(found.items())
        if pinned.get(name) != version
    ]


def _pytest(python: Path, arguments: tuple[str, ...]) -> int:
    """Runs tests in the environment; pytest's exit code."""
    command = [str(python), "-m", "pytest", "-q", "-rfE", "--tb=short", *arguments]
    # `dtft` and the processes of tests are those of the environment.
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    kept = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    return subprocess.call(command, cwd=REPOSITORY, env={**kept, "PATH": path})


if __name__ == "__main__":
    sys.exit(main())
