"""``python -m tests.wheel``: the wheel in an empty environment of each Python.

Installs what a user gets who types `pip install` today, not what constraints.txt pins,
and needs the network for it. ``--python 3.12``: this version only; may be repeated.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.wheel.building import build
from tests.wheel.environment import empty, install, interpreter, use

VERSIONS = ("3.11", "3.12", "3.13")


def main() -> int:
    """Tries every version; 1 if one fails, or if there is none of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", metavar="X.Y")
    versions = parser.parse_args().python or VERSIONS
    with tempfile.TemporaryDirectory(prefix="dtft-wheel-") as directory:
        wheel = build("wheel", Path(directory))
        outcomes = [_tried(version, wheel) for version in versions]
    return int(False in outcomes or True not in outcomes)


def _tried(version: str, wheel: Path) -> bool | None:
    """Whether the wheel works there; None without such a Python."""
    python = interpreter(version)
    if python is None:
        print(f"Python {version}: not tried, there is none on this machine", flush=True)
        return None
    with tempfile.TemporaryDirectory(prefix="dtft-wheel-") as directory:
        root = Path(directory)
        try:
            made = empty(root / "environment", python)
            print(f"Python {version}: {install(made, wheel)}", flush=True)
            use(made, root / "empty")
        except (AssertionError, subprocess.SubprocessError) as error:
            print(f"Python {version}: FAILED: {error}", flush=True)
            return False
    print(f"Python {version}: train, launch, plan, import dtft.optim: ok", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
