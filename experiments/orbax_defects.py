"""Five defects of Orbax's peer-to-peer checkpoints, each brought about on two hosts.

The "before" of `tests/unit/checkpoint/test_orbax_defects.py`, which does the same
to dtft's memory tier. Run it again on every new version of Orbax.
"""

import sys
import tempfile
from importlib.metadata import version

from dtft.elastic.processes import free_port
from experiments import report
from experiments.worlds import run_world

DEADLINE_S = 300.0
CASES = {
    "silent corruption": "64 bytes of the only peer's file are overwritten",
    "fallback": "step 5 is lost after it was planned; step 4 is whole everywhere",
    "ZeRO loss": "a host is lost that had half of the optimizer state",
    "-0.0": "one replica is broadcast to the other",
    "no authentication": "a process without any secret asks for a step's files",
}
"""Defect -> what is done; each is a case of `orbax_defects_worker`."""


def shown(case: str) -> tuple[bool, str]:
    """Whether Orbax has the defect, and what its hosts did."""
    with tempfile.TemporaryDirectory(prefix="orbax-defects-") as directory:
        answers = run_world(
            "experiments.orbax_defects_worker",
            [[case, directory]] * 2,
            address=f"127.0.0.1:{free_port()}",
            deadline_s=DEADLINE_S,
        )
    seen = dict.fromkeys(answer["seen"] for answer in answers)
    return any(answer["defect"] for answer in answers), "; ".join(seen)


def main() -> None:
    """Prints the table, and writes it unless `--quick`."""
    header = ["defect", "what is done", "seen in Orbax", "what Orbax does"]
    rows = []
    for case, what in CASES.items():
        defect, seen = shown(case)
        verdict = "yes" if defect else "no"
        rows.append([case, what, verdict, seen.replace("|", "/")])
    if "--quick" in sys.argv[1:]:
        print("\n".join(report.table(header, rows)))
        return
    report.write(
        "orbax_defects",
        title="Defects of Orbax's peer-to-peer checkpoints",
        command="python experiments/orbax_defects.py",
        header=header,
        rows=rows,
        notes=[
            f"orbax-checkpoint {version('orbax-checkpoint')}, two processes on "
            "loopback, mesh (replica=2, model=1). `tests/unit/checkpoint/"
            "test_orbax_defects.py` does the same to dtft's memory tier, where none of "
            "them shows."
        ],
    )


if __name__ == "__main__":
    main()
