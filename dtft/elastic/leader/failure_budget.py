"""Counts trainer failures without progress, and decides whether to retry.

`FailureBudget` is a small value that a leader writes to the store, so that its
successor continues the count. `judge` takes all failures of one attempt to train, finds
their cause, and returns the next budget and a `RetryDecision`: retry at once, retry
after a pause, retry without the restored commit, or end the job. The time is an
argument.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ALLOWED = 2
"""Default of `judge(allowed=...)`: number of occurrences of one exception or exit code,
without a commit beyond its step in between, that ends the job."""
FRUITLESS = 10
"""Number of failed attempts to train in a row, without a new highest committed step,
that ends the job."""
RESTORE_FAILURES = 2
"""Number of failed restores of one commit after which it is quarantined: no longer
restored from memory."""
PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
KEPT = 16
"""Largest number of distinct exceptions and exit codes that a `FailureBudget` counts;
the oldest is dropped first."""
_MESSAGE_BYTES = 600
_TRACEBACK_BYTES = 8 << 10

Kind = Literal["exception", "exit", "lost", "late", "stuck", "restore", "copy"]
"""exception: a trainer reported an exception. exit: a trainer ended without a report.
lost: a host was lost. late: trainers did not start in time, or JAX's coordination
service did not start. stuck: a step did not complete. restore: a host could not restore
the state. copy: a copy is corrupt, or has the bytes of another step than it says."""

KILLS = (-9, -15)
"""Return codes of processes that were killed by SIGKILL or SIGTERM."""
ABORT = -6
"""Return code (SIGABRT) of trainers that JAX aborts after their coordination service
has gone."""

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
"""Patterns of exceptions caused by another host's end. JAX 0.10 on CPU raises "Gloo
AllGather failed: [...pair.cc:547] Connection closed by peer", "Gloo all-reduce failed:
[...pair.cc:538] Read error [...]: Connection reset by peer"; the log of an aborted
process has "Failed to send RPC to coordination service"."""
_JAX_ERRORS = ("JaxRuntimeError", "XlaRuntimeError", "AgentGone")
_BROKEN = re.compile("|".join(BROKEN_COLLECTIVE), re.IGNORECASE)
RESTORE_ERRORS = ("CorruptCopy",)
"""Names of trainer exceptions caused by a corrupt copy. They are not counted as an
exception that occurs again, because another copy is restored next."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failure on one host, as reported to the leader."""

    kind: Kind
    host: str = ""
    slot: int = -1
    """The host's slot; -1 if the host has none or the slot is unknown."""
    step: int = 0
    """For `exception`: the step that the trainer has reported. Otherwise the restored
    step; 0 if unknown."""
    phase: str = ""
    """The trainer's phase (`dtft.checkpoint.managers.Phase`), or "restore"; "" if
    unknown."""
    error: str = ""
    """For `exception`: "TypeName: message"; otherwise a description for people."""
    traceback: str = ""
    log: str = ""
    """The trainer's log file, on `host`."""
    code: int = 0
    """For `exit`: the return code, negative for a signal."""

    @property
    def is_consequence(self) -> bool:
        """Whether this failure follows from the end of another process.

        True for the exception of a collective whose peer has gone, for a trainer whose
        own agent has ended (`is_broken_collective`), and for a trainer that JAX has
        aborted (SIGABRT).
        """
        if self.kind == "exit":
            return self.code == ABORT
        return self.kind == "exception" and is_broken_collective(self.error)

    @property
    def is_killed(self) -> bool:
        """Whether the trainer was ended from outside: killed, or its host lost."""
        return self.kind == "lost" or (self.kind == "exit" and self.code in KILLS)

    @property
    def may_be_a_cut(self) -> bool:
        """Whether a network cut between two hosts would explain this failure.

        True for a `TimeoutError`, a trainer that is stuck or did not start in time, a
        host that could not restore, and a consequence (`is_consequence`).
        """
        if self.kind == "exception" and self.type_name == "TimeoutError":
            return True
        return self.kind in ("stuck", "late", "restore") or self.is_consequence

    @property
    def type_name(self) -> str:
        """The exception's type name; for a trainer that ended, its exit code or signal.

        For example "ValueError", "exit code 1" or "signal 9".
        """
        if self.kind == "exception":
            return self.error.partition(":")[0].strip()
        return f"exit code {self.code}" if self.code >= 0 else f"signal {-self.code}"

    @property
    def digest(self) -> str:
        """Hexadecimal digest of type and message; equal digests mean the same failure.

        Numbers and memory addresses are replaced by "#" first, because they differ
        between occurrences of one failure.
        """
        text = re.sub(r"0x[0-9a-f]+|\d+", "#", f"{self.type_name} {self.error}")
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def text(self) -> str:
        """Formats the failure as a one-line message.

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
    """Whether the end of another process caused a trainer's exception.

    True for JAX's errors of broken collectives, and for the error of a trainer whose
    own agent has ended or has detached it (`AgentGone`). `error` is "TypeName:
    message".

    >>> is_broken_collective("JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: [x]")
    True
    >>> is_broken_collective("ConnectionResetError: Connection reset by peer")
    False
    """
    kind, _, message = error.partition(":")
    return kind.strip() in _JAX_ERRORS and _BROKEN.search(error) is not None


def cause(failures: Sequence[Failure]) -> Failure | None:
    """Returns the root cause of one attempt's failures; None without failures.

    The end of one trainer breaks the collectives of all other trainers. These trainers
    fail as well, and their failures may be reported first. So a broken collective, or a
    process that JAX aborted, is the cause only if there is no other kind of failure. A
    lost host ranks first and a killed process second, because both may have caused the
    exceptions. Among equal ranks the first report is the cause.

    Args:
        failures: the failures in order of their reports.
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
    """An exception or an exit of a trainer, and the number of its occurrences."""

    step: int
    type_name: str
    digest: str
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class FailureBudget:
    """Counts of trainer failures since training last made progress.

    Progress is a commit of a step above all steps committed before. The job ends when a
    count is too high (`judge`). The leader writes the budget to the store, so the next
    leader continues the counts.
    """

    highest: int = -1
    """The highest step ever committed. Steps repeated after a restore from storage are
    at most this step and do not count as progress."""
    fruitless: int = 0
    """The number of failed attempts to train since the last new highest commit."""
    recurring: tuple[Recurring, ...] = ()
    restores: Mapping[int, int] = field(default_factory=dict)
    """Committed step to the number of its failed restores since every slot last
    trained."""
    quarantined: frozenset[int] = frozenset()
    """Steps whose commits are no longer restored from memory."""

    def committed(self, step: int) -> "FailureBudget":
        """Returns the budget after a commit of `step`.

        If the step is higher than every step committed before, the number of failed
        attempts in a row becomes 0, and the exceptions and exits of trainers at lower
        steps are forgotten. Otherwise nothing changes.

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
        """Returns the budget without its counts of failed restores.

        Called once every slot trains.
        """
        return dataclasses.replace(self, restores={}) if self.restores else self

    def to_json(self) -> str:
        """Encodes the budget as JSON for the store; inverse of `from_json`."""
        told = dataclasses.asdict(self)
        told["restores"] = sorted(self.restores.items())
        told["quarantined"] = sorted(self.quarantined)
        return json.dumps(told)

    @classmethod
    def from_json(cls, text: str) -> "FailureBudget":
        """Parses the text of `to_json`; returns an empty budget if it cannot be read.

        A leader must not fail on a text that another version of dtft has written.
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
    """What a failed attempt to train had restored, and whether every slot trained.

    An attempt begins with an assignment of hosts to slots.
    """

    step: int
    """The restored step."""
    is_commit: bool = False
    """Whether the step was restored from a commit in memory, which can be
    quarantined."""
    has_trained: bool = False
    """Whether every slot finished a step after the restore."""
    is_new_size: bool = False
    """Whether the attempt has another number of slots than the newest commit; False
    without a commit. If True, failures are blamed on the new number, not on the commit
    or the trainer's program."""


@dataclass(frozen=True, kw_only=True)
class RetryDecision:
    """The leader's decision after a failed attempt: whether, when and how to retry."""

    action: Literal["retry", "quarantine", "end"]
    """retry: train again. quarantine: train again, but from another state than the
    restored commit. end: end the job with an error."""
    not_before: float = 0.0
    """For `retry` and `quarantine`: the earliest start of the next attempt, on the
    caller's clock in seconds."""
    pause_s: float = 0.0
    """Seconds from now until `not_before`."""
    cause: Failure | None = None
    message: str = ""
    """The message for people; may be "". For `end`: the reason, with traceback, host
    and path of the log. The newest commit is exported before the job ends."""


def judge(
    budget: FailureBudget,
    failures: Sequence[Failure],
    attempt: Attempt,
    now: float,
    *,
    allowed: int = ALLOWED,
) -> tuple[FailureBudget, RetryDecision]:
    """Counts one failed attempt to train and decides how to go on.

    Only the root cause of the failures (`cause`) is counted.

    * An exception, or an exit not caused by SIGKILL or SIGTERM, ends the job when it
      has occurred `allowed` times. A commit of a step beyond the step of the failure
      starts the count again. Two failures, on any hosts, count as the same if they have
      the same type and either the same step or the same message (apart from numbers).
      Consequences of another failure and corrupt copies are not counted here.
    * 10 failed attempts in a row (`FRUITLESS`) without a new highest commit end the
      job, whatever their causes are.
    * A commit is quarantined (no longer restored from memory) after 2 failed restores
      (`RESTORE_FAILURES`), if no attempt between them has trained on every slot. The
      exception of the last failure then does not end the job, because another state is
      restored.
    * If the attempt had another number of slots than the newest commit, it is counted
      only among the failed attempts in a row.
    * The pause before the next attempt is 0, 1, 2, 4, ... seconds, at most 30 s
      (`LONGEST_PAUSE_S`).

    Args:
        budget: the budget before the attempt.
        failures: all failures of the attempt, in order of their reports. If empty,
            nothing is counted, and the attempt is repeated at once.
        attempt: what the attempt had restored, and whether every slot trained.
        now: the time in seconds on any clock; `RetryDecision.not_before` is on the same
            clock.
        allowed: number of occurrences of one exception or exit code that ends the job.

    Returns:
        The new budget, and the decision.
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
    said = (
        f"restores of step {attempt.step} have failed {RESTORE_FAILURES} times: the "
        "step is no longer restored from memory (quarantined)"
    )
    return budget, RetryDecision(
        action="quarantine" if quarantines else "retry",
        not_before=now + pause_s,
        pause_s=pause_s,
        cause=found,
        message=said if quarantines else "",
    )


def pause_after(fruitless: int) -> float:
    """Returns the seconds to wait after `fruitless` failed attempts in a row.

    There is no pause after the first failed attempt. The pause is 1 s after the second
    and doubles with each further attempt, up to `LONGEST_PAUSE_S` (30 s).

    >>> [pause_after(n) for n in (1, 2, 3, 4, 7, 1000)]
    [0.0, 1.0, 2.0, 4.0, 30.0, 30.0]
    """
    doublings = min(fruitless - 2, 10)
    return min(PAUSE_S * 2**doublings, LONGEST_PAUSE_S) if fruitless > 1 else 0.0


def _restore_counted(
    budget: FailureBudget, found: Failure, attempt: Attempt
) -> tuple[FailureBudget, bool]:
    """Counts a failed restore of a commit; ignores other failures.

    A restore has failed if the attempt restored a commit from memory, never trained on
    every slot, and its failure may come from corrupt bytes of the restored copies: a
    host could not restore, or a trainer failed during the restore or in an unknown
    phase.

    Args:
        budget: the budget before the attempt.
        found: the root cause of the attempt's failures.
        attempt: what the attempt had restored, and whether every slot trained.

    Returns:
        The new budget, and whether this failure has quarantined the commit: it is no
        longer restored from memory.
    """
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
    """Whether the bytes of the restored copies may have caused a failure.

    True if a host could not restore, or if a trainer failed during the restore or in an
    unknown phase. False for kills and for consequences of other failures.
    """
    if found.is_killed or found.is_consequence:
        return False
    if found.kind in ("exception", "exit"):
        return found.phase in ("restore", "")
    return found.kind == "restore"


def _recurring_counted(
    budget: FailureBudget, found: Failure
) -> tuple[FailureBudget, int]:
    """Counts how often one exception or exit of trainers has occurred.

    Args:
        budget: the budget before the attempt.
        found: the root cause of the attempt's failures.

    Returns:
        The new budget, and how often this failure has occurred. The number is 0 for
        every other failure: a kill, a consequence of another failure, a corrupt copy,
        or one that is neither an exception nor an exit.
    """
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
    """Returns the end of a failure's traceback and the path of its log, if known.

    Each begins with a new line; returns "" if both are unknown.
    """
    lines = [f"log of {found.host}: {found.log}"] if found.log else []
    if found.traceback:
        lines.insert(0, found.traceback[-_TRACEBACK_BYTES:].rstrip())
    return "".join(f"\n{line}" for line in lines)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_BYTES else f"{line[:_MESSAGE_BYTES]}..."
