"""Every module of house_moves.csv is where it says, or is named in elsewhere.csv.

    python tools/house/check_moves.py [PACKAGE ...]

Prints what is not there; exit code 1 if anything is not. The arguments are the packages
that are checked, all by default.
"""

import csv
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MOVES = REPOSITORY.parent / "shared" / "reference" / "house_moves.csv"
ELSEWHERE = Path(__file__).with_name("elsewhere.csv")


def rows(path: Path) -> dict[str, str]:
    """Module to its target."""
    with path.open() as file:
        return {row["module"]: row["target"] for row in csv.DictReader(file)}


def main(prefixes: list[str]) -> int:
    """1 if a module is not where it should be."""
    targets = {**rows(MOVES), **rows(ELSEWHERE)}
    for module, target in targets.items():
        if target.startswith("("):  # it stays in its package
            targets[module] = module
    missing = [
        f"{module} -> {target}"
        for module, target in sorted(targets.items())
        if module.startswith(tuple(prefixes))
        and not (REPOSITORY / (target.replace(".", "/") + ".py")).exists()
    ]
    print("\n".join(missing) or f"all of {len(targets)} are there or not asked for")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["dtft.planner", "dtft.train", "dtft.cli"]))
