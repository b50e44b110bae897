"""How often trainers have failed without getting on, and what follows from it.

`FailureBudget` is a small value that a leader writes to the store, so that its
successor goes on counting. `judge` is given all failures of one attempt to train, finds
their cause, and answers with the next budget and a `RetryDecision`: try again at once,
after a pause, without the commit that was restored, or end the job. Time and hosts are
arguments.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ALLOWED = 2
"""So often may an exception come at the same step: the last of them ends the job."""
FRUITLESS = 10
"""So many attempts in a row without a new highest commit end the job."""
RESTORE_FAILURES = 2
"""So often may the restore of one commit fail before it is quarantined."""
PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
KEPT = 16
"""Different exceptions remembered; the oldest is forgotten first."""
_MESSAGE_BYTES = 600
_TRACEBACK_BYTES = 8 << 10

Kind = Literal["exception", "exit", "lost", "late", "stuck", "restore", "copy"]
"""exception: a trainer has told of one. exit: a trainer has ended without a word. lost:
a host is gone. late: a start took too long. stuck: a step did not come. restore: a
copy could not be restored. copy: a copy is of another step than was said."""

KILLS = (-9, -15)
"""Return codes of processes that were killed from outside."""
ABORT = -6
"""JAX aborts trainers whose coordination service has gone."""

BROKEN_COLLECTIVE: tuple[str, ...] = (
    r"Gloo [\w-]+ failed",  # all-reduce, AllGather, ...: a peer's socket closed
    r"gloo/transport/tcp/.*(Connection closed|Read error|Write error|Timed out)",
    r"Connection (closed|reset) by peer",
    r"Connect timeout|connectFullMesh",
    r"heartbeat",
    r"coordination service|CoordinationService|JAX distributed service",
    r"Barrier (timed out|failed)|DEADLINE_EXCEEDED",
    r"NCCL .*(remote|closed|abort|timeout)|ncclRemoteError|ncclInternalError",
    r"AgentGone",
)
"""What an exception says that another host's end has caused. Seen with JAX 0.10 on CPU:
"Gloo AllGather failed: [...pair.cc:547] Connection closed by peer", "Gloo all-reduce
failed: [...pair.cc:538] Read error [...]: Connection reset by peer"; and in the log of
an aborted process "Failed to send RPC to coordination service"."""
_JAX_ERRORS = ("JaxRuntimeError", "XlaRuntimeError", "AgentGone")
_BROKEN = re.compile("|".join(BROKEN_COLLECTIVE), re.IGNORECASE)
RESTORE_ERRORS = ("CorruptCopy",)
"""Exceptions of a trainer that mean: another copy has to be restored."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One thing that went wrong on one host, as its leader was told."""

    kind: Kind
    host: str = ""
    slot: int = -1
    """-1: it has none, or it is not known."""
    step: int = 0
    """The step that was being made; the restored one before there was any."""
    phase: str = ""
    """Of the trainer: one of the board's, or restore; "" if it is not known."""
    error: str = ""
    """`exception`: "TypeName: message". Else what happened, for people."""
    traceback: str = ""
    log: str = ""
    """The trainer's log file, on `host`."""
    code: int = 0
    """`exit`: the return code; negative for a signal."""

    @property
    def is_consequence(self) -> bool:
        """Whether the end of another host's trainer explains it."""
        if self.kind == "exit":
            return self.code == ABORT
        return self.kind == "exception" and is_broken_collective(self.error)

    @property
    def is_killed(self) -> bool:
        """Whether it was done to the trainer from outside."""
        return self.kind == "lost" or (self.kind == "exit" and self.code in KILLS)

    @property
    def may_be_a_cut(self) -> bool:
        """Whether two hosts that do not reach each other explain it."""
        if self.kind == "exception" and self.type_name == "TimeoutError":
            return True
        return self.kind in ("stuck", "late", "restore") or self.is_consequence

    @property
    def type_name(self) -> str:
        """What kind of failure comes again: an exception's type, or how it ended."""
        if self.kind == "exception":
            return self.error.partition(":")[0].strip()
        return f"exit code {self.code}" if self.code >= 0 else f"signal {-self.code}"

    @property
    def digest(self) -> str:
        """Of type and message, without addresses and numbers."""
        text = re.sub(r"0x[0-9a-f]+|\d+", "#", f"{self.type_name} {self.error}")
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def text(self) -> str:
        """One line for people.

        >>> Failure(kind="exit", host="b", slot=1, step=7, code=-9).text()
        'trainer of slot 1 on b was killed by signal 9 at step 7'
        """
        who = f"trainer of slot {self.slot if self.slot >= 0 else '?'} on {self.host}"
        if self.kind == "exit":
            how = "was killed by" if self.code < 0 else "ended with"
            return f"{who} {how} {self.type_name.removeprefix('exit ')} at step " + str(
                self.step
            )
        if self.kind == "exception":
            return f"{who} failed at step {self.step}: {_short(self.error)}"
        return self.error or f"{self.kind} on {self.host}"


def is_broken_collective(error: str) -> bool:
    """Whether an exception is of JAX and says that another process has gone.

    >>> is_broken_collective("JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: [x]")
    True
    >>> is_broken_collective("ConnectionResetError: Connection reset by peer")
    False
    """
    kind, _, message = error.partition(":")
    return kind.strip() in _JAX_ERRORS and _BROKEN.search(error) is not None


def cause(failures: Sequence[Failure]) -> Failure | None:
    """What the others of one attempt follow from; None for no failure.

    The end of one trainer breaks the collectives of all others, which then fail as
    well, and may be heard of first. So a broken collective, and a process that JAX has
    aborted, is the cause only if there is nothing else; a lost host, then a killed
    process, comes before exceptions, which it may have caused in ways not known here.
    Of several that are alike, the first.

    Args:
        failures: in the order in which they were heard of.
    """
    ranks = [_rank(failure) for failure in failures]
    return failures[ranks.index(min(ranks))] if ranks else None


def _rank(failure: Failure) -> int:
    if failure.is_consequence:
        return 3 if failure.kind == "exit" else 4
    if failure.kind == "lost":
        return 0
    return 1 if failure.is_killed else 2


@dataclass(frozen=True, kw_only=True)
class Recurring:
    """An exception, or another way to end, that may come again."""

    step: int
    type_name: str
    digest: str
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class FailureBudget:
    """What has failed since the job got on; see the module's text."""

    highest: int = -1
    """The highest step that was ever committed. Steps that are made again after a
    restore from storage are below it, and change nothing."""
    fruitless: int = 0
    """Attempts in a row that brought no new highest commit."""
    recurring: tuple[Recurring, ...] = ()
    restores: Mapping[int, int] = field(default_factory=dict)
    """Per commit how often its restore failed since every slot trained."""
    quarantined: frozenset[int] = frozenset()
    """Commits that are not restored from memory any more."""

    def committed(self, step: int) -> "FailureBudget":
        """A step is safe. Only one that is higher than all before counts.

        >>> FailureBudget(highest=7, fruitless=3).committed(7).fruitless
        3
        >>> FailureBudget(highest=7, fruitless=3).committed(8).fruitless
        0
        """
        if step <= self.highest:
            return self
        kept = tuple(it for it in self.recurring if it.step >= step)
        return dataclasses.replace(self, highest=step, fruitless=0, recurring=kept)

    def trained(self) -> "FailureBudget":
        """Every slot trains: restores that failed before do not count any more."""
        return dataclasses.replace(self, restores={}) if self.restores else self

    def to_json(self) -> str:
        """For the store; inverse of `from_json`."""
        told = dataclasses.asdict(self)
        told["restores"] = sorted(self.restores.items())
        told["quarantined"] = sorted(self.quarantined)
        return json.dumps(told)

    @classmethod
    def from_json(cls, text: str) -> "FailureBudget":
        """Reads what `to_json` wrote; what cannot be read is an empty budget.

        A leader must not fail on what a broken or newer one has written.
        """
        try:
            told: dict[str, Any] = json.loads(text)
            return cls(
                highest=int(told["highest"]),
                fruitless=int(told["fruitless"]),
                recurring=tuple(
                    Recurring(
                        step=int(it["step"]),
                        type_name=str(it["type_name"]),
                        digest=str(it["digest"]),
                        count=int(it["count"]),
                    )
                    for it in told["recurring"]
                ),
                restores={int(step): int(n) for step, n in told["restores"]},
                quarantined=frozenset(int(step) for step in told["quarantined"]),
            )
        except (ValueError, KeyError, TypeError):
            return cls()


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What trainers were started with when they failed."""

    step: int
    """That was restored."""
    is_commit: bool = False
    """It was restored from a commit in memory, which can be quarantined."""
    has_trained: bool = False
    """Every slot had finished a step since."""
    is_new_size: bool = False
    """No step was committed yet with so many slots: the size is to blame for what
    fails, not the commit nor the trainer's program."""


@dataclass(frozen=True, kw_only=True)
class RetryDecision:
    """What follows from the failures of one attempt."""

    action: Literal["retry", "quarantine", "end"]
    """quarantine: try again, without the commit that was restored."""
    not_before: float = 0.0
    """`retry`, `quarantine`: when the next attempt may begin, on the caller's clock."""
    pause_s: float = 0.0
    """How long that is from now."""
    cause: Failure | None = None
    message: str = ""
    """For people. `end`: why, with traceback, host and log; the last good step is to be
    exported before. Else "" unless there is something to say."""


def judge(
    budget: FailureBudget,
    failures: Sequence[Failure],
    attempt: Attempt,
    now: float,
    *,
    allowed: int = ALLOWED,
) -> tuple[FailureBudget, RetryDecision]:
    """Counts one attempt that failed and says what follows.

    * An exception (or a trainer that ends by itself) of the same type at the same step,
      or with the same message, on whatever host, ends the job when it has come
      `allowed` times with no commit beyond its step in between.
    * `FRUITLESS` attempts in a row without a new highest commit end the job, whatever
      their causes.
    * A commit whose restore fails `RESTORE_FAILURES` times, before every slot has
      trained, is quarantined. Then the exception that ended the trainer does not end
      the job yet: another commit is tried.
    * In a size that is new, only fruitless attempts are counted.
    * The pause before the next attempt is 0, 1, 2, 4, ... seconds, at most
      `LONGEST_PAUSE_S`.

    Args:
        budget: so far.
        failures: all of the attempt, in the order in which they were heard of.
        attempt: what had been started.
        now: on any clock; `RetryDecision.not_before` is on it.
        allowed: how often one exception may come.
    """
    found = cause(failures)
    if found is None:
        return budget, RetryDecision(action="retry", not_before=now)
    budget = dataclasses.replace(budget, fruitless=budget.fruitless + 1)
    quarantines = False
    if not attempt.is_new_size:
        budget, quarantines = _restore_counted(budget, found, attempt)
        budget, count = _recurring_counted(budget, found)
        if count >= allowed and not quarantines:
            message = _recurring_text(found, count, allowed)
            return budget, RetryDecision(action="end", cause=found, message=message)
    if budget.fruitless >= FRUITLESS:
        message = _fruitless_text(budget, found, attempt)
        return budget, RetryDecision(action="end", cause=found, message=message)
    pause_s = pause_after(budget.fruitless)
    said = f"step {attempt.step} failed {RESTORE_FAILURES} times and is quarantined"
    return budget, RetryDecision(
        action="quarantine" if quarantines else "retry",
        not_before=now + pause_s,
        pause_s=pause_s,
        cause=found,
        message=said if quarantines else "",
    )


def pause_after(fruitless: int) -> float:
    """Seconds to wait before the next attempt.

    >>> [pause_after(n) for n in (1, 2, 3, 4, 7, 1000)]
    [0.0, 1.0, 2.0, 4.0, 30.0, 30.0]
    """
    doublings = min(fruitless - 2, 10)
    return min(PAUSE_S * 2**doublings, LONGEST_PAUSE_S) if fruitless > 1 else 0.0


def _restore_counted(
    budget: FailureBudget, found: Failure, attempt: Attempt
) -> tuple[FailureBudget, bool]:
    """Counts a restore that came to nothing; whether its commit is quarantined now."""
    if attempt.has_trained or not attempt.is_commit or not _blames_commit(found):
        return budget, False
    step = attempt.step
    count = budget.restores.get(step, 0) + 1
    now = count >= RESTORE_FAILURES and step not in budget.quarantined
    return dataclasses.replace(
        budget,
        restores={**budget.restores, step: count},
        quarantined=budget.quarantined | ({step} if now else set()),
    ), now


def _blames_commit(found: Failure) -> bool:
    """Whether what was restored may be the cause, not the trainer's program."""
    if found.is_killed or found.is_consequence:
        return False
    if found.kind in ("exception", "exit"):
        return found.phase in ("restore", "")
    return found.kind == "restore"


def _recurring_counted(
    budget: FailureBudget, found: Failure
) -> tuple[FailureBudget, int]:
    """Counts an exception; how often it has come now, 0 if it does not count."""
    counts = found.kind == "exception" or found.kind == "exit"
    if not counts or found.is_killed or found.is_consequence:
        return budget, 0
    if found.kind == "exception" and found.type_name in RESTORE_ERRORS:
        return budget, 0
    known = [it for it in budget.recurring if _same(it, found)]
    count = 1 + max((it.count for it in known), default=0)
    newest = Recurring(
        step=found.step, type_name=found.type_name, digest=found.digest, count=count
    )
    others = [it for it in budget.recurring if it not in known]
    kept = (*others, newest)[-KEPT:]
    return dataclasses.replace(budget, recurring=kept), count


def _same(one: Recurring, found: Failure) -> bool:
    if one.type_name != found.type_name:
        return False
    return one.step == found.step or one.digest == found.digest


def _recurring_text(found: Failure, count: int, allowed: int) -> str:
    return (
        f"{found.text()}. It came {count} times (allowed: fewer than {allowed}) "
        f"without a commit beyond step {found.step}, so it would come again. Mend the "
        "cause and resume."
        f"{_evidence(found)}"
    )


def _fruitless_text(budget: FailureBudget, found: Failure, attempt: Attempt) -> str:
    return (
        f"trainers failed {budget.fruitless} times in a row without a new commit; the "
        f"highest is step {max(budget.highest, 0)}, step {attempt.step} was restored "
        f"last. The last failure: {found.text()}.{_evidence(found)}"
    )


def _evidence(found: Failure) -> str:
    """The traceback and the log, on lines of their own."""
    lines = [f"log of {found.host}: {found.log}"] if found.log else []
    if found.traceback:
        lines.insert(0, found.traceback[-_TRACEBACK_BYTES:].rstrip())
    return "".join(f"\n{line}" for line in lines)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_BYTES else f"{line[:_MESSAGE_BYTES]}..."
