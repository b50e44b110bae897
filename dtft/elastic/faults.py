"""The faults a drill can play, and how they are written.

``KIND[:SLOT[+SLOT...]]@STEP[:PHASE]``, for example ``kill-host:1@150`` or
``kill-host:0+2@40:replicate``. ``scale:REPLICAS@STEP`` asks for another size, as
`dtft scale` does. Pure parsing; how a fault strikes is `strikes`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "kill-host", "kill-trainer", "kill-leader", "kill-store", "corrupt", "scale"
]
Phase = Literal[
    "compute", "collective", "replicate", "commit", "export", "recovery", "stored"
]
"""What the job is doing when the blow falls. `recovery`: at a recovery from the fault
before. `stored`: the victims' trainers are held at STEP until storage has a checkpoint,
so that the outcome does not depend on how fast the first export is."""
KINDS: tuple[str, ...] = get_args(Kind)
PHASES: tuple[str, ...] = get_args(Phase)
_WITH_SLOTS = ("kill-host", "kill-trainer", "corrupt")
_PATTERN = re.compile(
    r"(?P<kind>[a-z-]+)(?::(?P<slots>\d+(\+\d+)*))?@(?P<step>\d+)(?::(?P<phase>\w+))?"
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: what, whom, when.

    `corrupt` freezes the slots' hosts together with the next `kill-host` of the same
    step and flips bytes in every copy they hold before that kill.
    """

    kind: Kind
    slots: tuple[int, ...]
    step: int
    phase: Phase | None
    replicas: int = 0
    """`scale`: how many there shall be."""

    def __str__(self) -> str:
        numbers = (self.replicas,) if self.kind == "scale" else self.slots
        slots = ":" + "+".join(map(str, numbers)) if numbers else ""
        phase = f":{self.phase}" if self.phase else ""
        return f"{self.kind}{slots}@{self.step}{phase}"


def parse_fault(text: str, num_slots: int) -> Fault:
    """Reads one fault.

    Raises:
        ValueError: says what is wrong with the text and what is allowed.

    >>> str(parse_fault("kill-host:0+1@20:commit", num_slots=3))
    'kill-host:0+1@20:commit'
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"--fault {text!r} is not KIND[:SLOT[+SLOT]]@STEP[:PHASE], "
            "for example kill-host:1@150"
        )
    kind, phase = match["kind"], match["phase"]
    if kind not in KINDS:
        raise ValueError(f"--fault {text!r}: kind {kind!r}; known: {', '.join(KINDS)}")
    if phase is not None and phase not in PHASES:
        raise ValueError(
            f"--fault {text!r}: phase {phase!r}; known: {', '.join(PHASES)}"
        )
    slots = tuple(int(slot) for slot in (match["slots"] or "").split("+") if slot)
    if kind == "scale":
        return _scale(text, slots, int(match["step"]), phase)
    if bool(slots) != (kind in _WITH_SLOTS):
        need = "needs a slot" if kind in _WITH_SLOTS else "takes no slot"
        raise ValueError(f"--fault {text!r}: {kind} {need}")
    if len(set(slots)) < len(slots):
        raise ValueError(f"--fault {text!r}: a slot is named twice")
    for slot in slots:
        if slot >= num_slots:
            raise ValueError(
                f"--fault {text!r}: slot {slot}; this job has slots 0 to "
                f"{num_slots - 1}."
            )
    return Fault(kind=kind, slots=slots, step=int(match["step"]), phase=phase)  # type: ignore[arg-type]


def _scale(text: str, sizes: tuple[int, ...], step: int, phase: str | None) -> Fault:
    if len(sizes) != 1 or sizes[0] < 1 or phase is not None:
        raise ValueError(
            f"--fault {text!r}: scale takes one number of replicas, 1 or more, and no "
            "phase, for example scale:3@20"
        )
    return Fault(kind="scale", slots=(), step=step, phase=None, replicas=sizes[0])


def in_order(faults: Sequence[Fault]) -> list[Fault]:
    """By step; a fault during recovery stays behind the one it was given after.

    >>> texts = ["kill-host:0@40", "kill-host:1@1:recovery", "kill-leader@20"]
    >>> [str(f) for f in in_order([parse_fault(t, num_slots=2) for t in texts])]
    ['kill-leader@20', 'kill-host:0@40', 'kill-host:1@1:recovery']
    """
    groups: list[list[Fault]] = []
    for fault in faults:
        if fault.phase == "recovery" and groups:
            groups[-1].append(fault)
        else:
            groups.append([fault])
    groups.sort(key=lambda group: group[0].step)
    return [fault for group in groups for fault in group]
