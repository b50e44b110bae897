"""Random schedules of faults for `dtft soak`, each made from one seed.

The same seed and job give the same schedule on every machine.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

STEADY = (
    *("kill-host", "kill-trainer", "kill-leader", "kill-spare", "kill-store"),
    *("crash-store", "empty-store", "pause-store", "stop-host", "stop-agent"),
    *("stop-trainer", "cut", "corrupt", "fail", "drain"),
    *("full-storage", "readonly-storage", "full-memory"),
)
"""Kinds of faults that do not change the job's number of replicas."""
_MOMENTS = (None, None, None, "compute", "collective", "replicate", "commit", "export")
"""Phases of a step in which a fault may strike, each entry equally likely; None: a
random moment of the step."""
_SECONDS = (2, 3, 5, 8, 12, 20, 30)
_FOR_EVER = 0.2
"""Probability that a stop or a cut has no end."""
_DURING_RECOVERY = 0.35
"""Probability that a fault after the first strikes during the recovery from the
previous fault, if its kind is in `_WITH_PHASE`."""
_WITH_PHASE = ("kill-host", "kill-trainer", "kill-leader", "kill-spare", "stop-host")
"""Kinds of faults that may be given one of `_MOMENTS`, or the phase "recovery"."""


@dataclass(frozen=True, kw_only=True)
class SoakedJob:
    """The properties of a job on which its random faults depend."""

    slots: int
    spares: int
    steps: int
    sizes: tuple[int, ...] = ()
    """Numbers of replicas to which the job may be scaled; empty: it is not scaled."""
    kinds: tuple[str, ...] = STEADY
    """Kinds of faults, as `dtft drill --fault` names them."""


def schedule(seed: int, job: SoakedJob) -> tuple[str, ...]:
    """Draws one to three faults, in the notation of `dtft drill --fault`.

    At most one fault makes a trainer raise an exception (`fail`). After each fault that
    corrupts a host's copies (`corrupt`), a kill of a host at the same step is added, so
    there can be up to six faults. The steps of the faults lie between a tenth and three
    quarters of the job's last step.

    >>> schedule(3, SoakedJob(slots=3, spares=1, steps=100)) == schedule(
    ...     3, SoakedJob(slots=3, spares=1, steps=100)
    ... )
    True
    """
    draw = random.Random(seed)
    kinds = list(job.kinds) + ["scale"] * bool(job.sizes)
    if not job.spares:
        kinds = [kind for kind in kinds if kind != "kill-spare"]
    first, last = job.steps // 10, 3 * job.steps // 4
    steps = sorted(draw.randint(first, last) for _ in range(draw.randint(1, 3)))
    found: list[str] = []
    for number, step in enumerate(steps):
        kind = draw.choice(kinds)
        if kind == "fail":
            kinds = [other for other in kinds if other != "fail"]
        follows = number > 0 and draw.random() < _DURING_RECOVERY
        found += _faults(draw, job, kind, step, follows=follows)
    return tuple(found)


def _faults(
    draw: random.Random, job: SoakedJob, kind: str, step: int, *, follows: bool
) -> list[str]:
    slot = draw.randrange(job.slots)
    match kind:
        case "scale":
            return [f"scale:{draw.choice(job.sizes)}@{step}"]
        case "kill-store" | "crash-store" | "empty-store":
            return [f"{kind}@{step}"]
        case "pause-store" | "full-storage" | "readonly-storage" | "full-memory":
            return [f"{kind}@{step}:{draw.choice(_SECONDS)}"]
        case "fail" | "drain":
            return [f"{kind}:{slot}@{step}"]
        case "corrupt":
            other = draw.randrange(job.slots)
            return [f"corrupt:{slot}@{step}", f"kill-host:{other}@{step}"]
        case "cut":
            reach = draw.choice(("all", "all", "store", "out", "in", "pair"))
            return [_cut(draw, job, slot, step, reach)]
    whom = "" if kind in ("kill-leader", "kill-spare") else f":{slot}"
    options = ""
    if kind in _WITH_PHASE:
        phase = "recovery" if follows else draw.choice(_MOMENTS)
        options = f":{phase}" if phase else ""
    if kind.startswith("stop-"):
        options += _seconds(draw)
    return [f"{kind}{whom}@{step}{options}"]


def _cut(draw: random.Random, job: SoakedJob, slot: int, step: int, reach: str) -> str:
    if reach == "pair":
        if job.slots == 1:
            return f"cut:{slot}@{step}:all:{draw.choice(_SECONDS)}"
        other = draw.choice([it for it in range(job.slots) if it != slot])
        return f"cut:{slot}+{other}@{step}:pair:{draw.choice(_SECONDS)}"
    return f"cut:{slot}@{step}:{reach}{_seconds(draw)}"


def _seconds(draw: random.Random) -> str:
    return "" if draw.random() < _FOR_EVER else f":{draw.choice(_SECONDS)}"


def kinds_of(faults: Sequence[str]) -> list[str]:
    """Returns the kind of each fault in `dtft drill`'s notation.

    >>> kinds_of(["kill-host:1@20", "scale:3@40"])
    ['kill-host', 'scale']
    """
    return [fault.partition("@")[0].partition(":")[0] for fault in faults]
