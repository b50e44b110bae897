"""The kinds of faults that a drill can carry out, and their notation.

``KIND[:WHOM]@STEP[:OPTION...]``, for example ``kill-host:1@150``,
``kill-host:0+2@40:replicate``, ``stop-agent:leader@20:10`` or ``cut:1@30:store:20``.
WHOM names the victims: a slot, several slots joined by ``+``, or a role. The role
``leader`` is the host that leads at the moment of the fault. The role ``follower`` is
the host with the lowest slot that does not lead; for a cut with reach ``pair``, the two
such hosts with the lowest slots. For ``scale`` WHOM is a number of replicas. STEP is
the training step at which the fault is due.

An option is a phase (the job's activity during which the fault happens), a number of
seconds (the fault is undone after them), the reach of a cut (which packets are
dropped), or ``always`` (a ``fail``, an exception in a trainer, is raised at every start
of the trainers). `RULES` has the options that each kind allows. Without seconds a stop
(SIGSTOP) or a cut lasts for ever. This module only parses; the module `injector`
carries the faults out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "kill-host",
    "kill-trainer",
    "kill-leader",
    "kill-spare",
    "kill-store",
    "corrupt",
    "scale",
    "drain",
    "stop-agent",
    "stop-host",
    "stop-trainer",
    "cut",
    "crash-store",
    "pause-store",
    "empty-store",
    "full-storage",
    "readonly-storage",
    "full-memory",
    "fail",
]
Phase = Literal[
    "compute",
    "collective",
    "replicate",
    "commit",
    "export",
    "recovery",
    "stored",
    "healed",
]
"""The job's activity at the moment of the fault. compute: the step was just dispatched.
collective: the other hosts wait in a collective for the victims. replicate: the step's
copies are made. commit: the step is being committed. export: a step is written to
storage. recovery: the job recovers from an earlier failure. stored: an export has
completed. healed: `injector.HEALED_S` seconds have passed since all earlier faults with
a duration were undone."""
Reach = Literal["all", "store", "out", "in", "pair"]
"""The packets that a cut drops. all: all packets of a host. store: packets between a
host and the store. out: packets that a host sends. in: packets that a host receives.
pair: packets between two hosts."""

KINDS: tuple[str, ...] = get_args(Kind)
PHASES: tuple[str, ...] = get_args(Phase)
REACHES: tuple[str, ...] = get_args(Reach)
Role = Literal["leader", "follower"]
ROLES: tuple[str, ...] = get_args(Role)

_PATTERN = re.compile(
    r"(?P<kind>[a-z-]+)(?::(?P<whom>[a-z]+|\d+(\+\d+)*))?@(?P<step>\d+)"
    r"(?P<options>(:[\w.]+)*)"
)
_SECONDS = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The victims (WHOM) and options that the notation of one kind of fault allows.

    `phase`, `reach` and `always` are True if an option of this sort is allowed: an
    activity of the job, the packets that a cut drops, and the word "always".
    """

    whom: Literal["none", "slots", "slots or role", "replicas"] = "none"
    phase: bool = False
    seconds: Literal["no", "optional", "required"] = "no"
    reach: bool = False
    always: bool = False

    @property
    def options(self) -> str:
        """The allowed options in words, for error messages."""
        words = ["a phase (" + ", ".join(PHASES) + ")"] * self.phase
        words += [" or ".join(REACHES)] * self.reach
        words += ["seconds"] * (self.seconds != "no")
        words += ["always"] * self.always
        return ", ".join(words) or "none"


_STOP = Rule(whom="slots or role", phase=True, seconds="optional")
RULES: dict[str, Rule] = {
    "kill-host": Rule(whom="slots", phase=True),
    "kill-trainer": Rule(whom="slots", phase=True),
    "kill-leader": Rule(phase=True),
    "kill-spare": Rule(phase=True),
    "kill-store": Rule(phase=True),
    "corrupt": Rule(whom="slots", phase=True),
    "scale": Rule(whom="replicas"),
    "drain": Rule(whom="slots"),
    "stop-agent": _STOP,
    "stop-host": _STOP,
    "stop-trainer": Rule(whom="slots", phase=True, seconds="optional"),
    "cut": Rule(whom="slots or role", phase=True, seconds="optional", reach=True),
    "crash-store": Rule(phase=True),
    "pause-store": Rule(phase=True, seconds="required"),
    "empty-store": Rule(phase=True),
    "full-storage": Rule(phase=True, seconds="required"),
    "readonly-storage": Rule(phase=True, seconds="required"),
    "full-memory": Rule(phase=True, seconds="required"),
    "fail": Rule(whom="slots", always=True),
}
"""Maps each kind of fault to the notation that the kind allows.

A new kind also needs its effect (`injector`; `interruptions` if the effect is undone
later; `dtft.train.drill_failure` if it acts in the trainer), and a line in the help of
`dtft drill --fault` (`dtft.cli.commands`). `dtft soak` draws the kinds that
`dtft.drills.fault_schedule` lists.
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: kind, victims, step and duration.

    A fault of kind `corrupt` inverts one byte in every 4 KiB of the memory in which the
    hosts of its slots keep copies. It does so just before the next fault of another
    kind, if that fault kills hosts or trainers; otherwise it has no effect.
    """

    kind: Kind
    slots: tuple[int, ...]
    step: int
    phase: Phase | None
    role: Role | None = None
    """The victim is the host with this role at the moment of the fault, and `slots` is
    empty. None: `slots` or `kind` decides the victims."""
    seconds: float | None = None
    """Seconds after which a stop, cut, pause, or full or read-only directory is undone.
    None: a stop or cut lasts for ever; other kinds have no duration."""
    reach: Reach = "all"
    """`cut`: which packets are dropped (see `Reach`)."""
    always: bool = False
    """`fail` (an exception in a trainer): whether the step fails at every attempt;
    False: only once."""
    replicas: int = 0
    """`scale`: the number of replicas to request."""

    def __str__(self) -> str:
        numbers = (self.replicas,) if self.kind == "scale" else self.slots
        whom = self.role or "+".join(map(str, numbers))
        options: list[object] = [self.phase] if self.phase else []
        options += [self.reach] if self.reach != "all" else []
        options += [_number(self.seconds)] if self.seconds is not None else []
        options += ["always"] if self.always else []
        after = "".join(f":{option}" for option in options)
        return self.kind + f":{whom}" * bool(whom) + f"@{self.step}{after}"

    @property
    def heals(self) -> bool:
        """Whether this fault has a duration (`seconds`), after which it is undone."""
        return self.seconds is not None

    @property
    def holds(self) -> bool:
        """Whether the fault suspends agents or whole hosts, or cuts hosts off.

        Cuts between two hosts only (reach `pair`) do not count. If such a fault lasts
        for ever, the drill does not wait until the agents of its hosts end.
        """
        held = self.kind in ("stop-agent", "stop-host", "cut")
        return held and self.reach != "pair"


def _number(seconds: float) -> str:
    return str(int(seconds)) if seconds == int(seconds) else str(seconds)


def parse_fault(text: str, num_slots: int) -> Fault:
    """Parses the notation of one fault.

    Converted to a str, the returned fault is its notation again, with the options in
    the order phase, reach, seconds, "always".

    Args:
        text: the notation.
        num_slots: the number of slots of the job; victims' slots must be below it.

    Raises:
        ValueError: the text is not a valid fault; the message lists what is allowed.

    >>> str(parse_fault("kill-host:0+1@20:commit", num_slots=3))
    'kill-host:0+1@20:commit'
    >>> parse_fault("stop-agent:leader@20:10", num_slots=3).seconds
    10.0
    >>> str(parse_fault("cut:1@30:20:store", num_slots=3))
    'cut:1@30:store:20'
    >>> parse_fault("stop-host:1@30", num_slots=3).seconds is None  # for ever
    True
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"--fault {text!r} is not KIND[:WHOM]@STEP[:OPTION...], for example "
            "kill-host:1@150, stop-agent:leader@20:10 or cut:1@30:store:20"
        )
    kind, whom = match["kind"], match["whom"] or ""
    if kind not in RULES:
        raise ValueError(f"--fault {text!r}: kind {kind!r}; known: {', '.join(KINDS)}")
    rule, options = RULES[kind], match["options"].split(":")[1:]
    if rule.whom == "replicas":
        return _scale(text, whom, int(match["step"]), options)
    found = _options(text, kind, rule, options)
    slots = _slots(text, kind, rule, whom, num_slots)
    if found.get("reach") == "pair" and len(slots) != 2 and whom != "follower":
        raise ValueError(
            f"--fault {text!r}: a cut of a pair needs two slots, or follower, for "
            "example cut:0+1@30:pair"
        )
    found |= {"slots": slots, "role": whom if whom in ROLES else None}
    return Fault(kind=kind, step=int(match["step"]), **found)  # type: ignore[arg-type]


def _slots(
    text: str, kind: str, rule: Rule, whom: str, num_slots: int
) -> tuple[int, ...]:
    """Parses the victims' slots; returns () for a role, or a kind that takes no WHOM.

    Args:
        text: the notation of the whole fault, for error messages.
        kind: the kind of the fault.
        rule: what the notation of this kind allows.
        whom: the part WHOM: slots such as "0+2", a role such as "leader", or "".
        num_slots: the job's number of slots.

    Raises:
        ValueError: the kind does not allow these victims, or a slot does not exist or
            is named twice.
    """
    if whom in ROLES and rule.whom == "slots or role":
        return ()
    if whom and not whom[0].isdigit():
        allowed = (
            "a slot, leader or follower" if rule.whom == "slots or role" else "a slot"
        )
        allowed = "nobody: leave it out" if rule.whom == "none" else allowed
        if (kind, whom) == ("kill-host", "leader"):
            allowed += " (of the leader: kill-leader)"
        raise ValueError(f"--fault {text!r}: {kind} takes {allowed}, not {whom!r}")
    slots = tuple(int(slot) for slot in whom.split("+") if slot)
    if bool(slots) != (rule.whom != "none"):
        need = "takes no slot" if rule.whom == "none" else "needs a slot"
        need += ", leader or follower" * (rule.whom == "slots or role")
        raise ValueError(f"--fault {text!r}: {kind} {need}")
    if len(set(slots)) < len(slots):
        raise ValueError(f"--fault {text!r}: a slot is named twice")
    for slot in slots:
        if slot >= num_slots:
            raise ValueError(
                f"--fault {text!r}: slot {slot}; this job has slots 0 to "
                f"{num_slots - 1}."
            )
    return slots


def _options(
    text: str, kind: str, rule: Rule, options: Sequence[str]
) -> dict[str, object]:
    """Parses the options after the step, in any order, each at most once.

    Args:
        text: the notation of the whole fault, for error messages.
        kind: the kind of the fault.
        rule: what the notation of this kind allows.
        options: the options, such as "commit" or "20".

    Returns:
        Maps each field of the fault that an option sets ("phase", "reach", "seconds" or
        "always") to its value. Always has "phase"; None if no option is a phase.

    Raises:
        ValueError: an option is unknown, not allowed, given twice or missing, or the
            number of seconds is 0.
    """
    found: dict[str, object] = {}
    for option in options:
        name, value, taken = _option(rule, option)
        if name is None:
            raise ValueError(
                f"--fault {text!r}: {option!r}; {kind} takes after its step: "
                f"{rule.options}"
            )
        if not taken:
            raise ValueError(
                f"--fault {text!r}: {kind} takes no {name}; after its step: "
                f"{rule.options}"
            )
        if name in found:
            raise ValueError(f"--fault {text!r}: {name} is given twice")
        if value == 0:
            raise ValueError(f"--fault {text!r}: 0 seconds; give a number above 0")
        found[name] = value
    if rule.seconds == "required" and "seconds" not in found:
        raise ValueError(
            f"--fault {text!r}: {kind} needs seconds, for example {kind}@30:20"
        )
    return {"phase": None, **found}


def _option(rule: Rule, option: str) -> tuple[str | None, object, bool]:
    """Returns the field that an option sets, its value, and whether the kind allows it.

    The field is a field of the fault, by name: for the option "20" the result begins
    with "seconds" and 20.0. `rule` is what the kind of the fault allows. An unknown
    option gives (None, None, False).
    """
    if _SECONDS.fullmatch(option):
        return "seconds", float(option), rule.seconds != "no"
    if option in PHASES:
        return "phase", option, rule.phase
    if option in REACHES:
        return "reach", option, rule.reach
    if option == "always":
        return "always", True, rule.always
    return None, None, False


def _scale(text: str, sizes: str, step: int, options: Sequence[str]) -> Fault:
    if not sizes.isdigit() or int(sizes) < 1 or options:
        raise ValueError(
            f"--fault {text!r}: scale takes one number of replicas, 1 or more, and no "
            "phase, for example scale:3@20"
        )
    return Fault(kind="scale", slots=(), step=step, phase=None, replicas=int(sizes))


_AFTER_CORRUPT = ("kill-host", "kill-trainer", "kill-leader", "corrupt")


def check_together(faults: Sequence[Fault]) -> None:
    """Checks that these faults can be carried out together in one run.

    Raises:
        ValueError: there is more than one fault `fail`, or one of several slots; or the
            fault after a `corrupt` is missing, or is neither a kill of a host or
            trainer nor another `corrupt`.
    """
    ordered = in_order(faults)
    for index, fault in enumerate(ordered):
        following = ordered[index + 1] if index + 1 < len(ordered) else None
        if fault.kind == "corrupt" and (
            following is None or following.kind not in _AFTER_CORRUPT
        ):
            raise ValueError(
                f"--fault {fault} takes effect just before the next fault, which is "
                f"{following or 'missing'}. Give one after it that kills a host or a "
                "trainer, such as --fault "
                f"kill-host:{fault.slots[0]}@{fault.step}."
            )
    fails = [fault for fault in faults if fault.kind == "fail"]
    if len(fails) > 1 or any(len(fault.slots) > 1 for fault in fails):
        names = ", ".join(f"--fault {fault}" for fault in fails)
        raise ValueError(
            f"{names}: a trainer is told of one failure. Give one `fail` with one slot."
        )


def in_order(faults: Sequence[Fault]) -> list[Fault]:
    """Sorts faults by step.

    A fault that waits for a recovery, or until earlier faults are undone (phases
    `recovery` and `healed`), is not sorted by its own step: it stays directly after the
    fault before it in `faults`.

    >>> texts = ["kill-host:0@40", "kill-host:1@1:recovery", "kill-leader@20"]
    >>> [str(f) for f in in_order([parse_fault(t, num_slots=2) for t in texts])]
    ['kill-leader@20', 'kill-host:0@40', 'kill-host:1@1:recovery']
    """
    groups: list[list[Fault]] = []
    for fault in faults:
        if fault.phase in ("recovery", "healed") and groups:
            groups[-1].append(fault)
        else:
            groups.append([fault])
    groups.sort(key=lambda group: group[0].step)
    return [fault for group in groups for fault in group]
