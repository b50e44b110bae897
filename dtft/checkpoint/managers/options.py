"""What a user sets on the checkpoint manager, and what follows from it.

Decides from step numbers and metrics alone: is a step saved, does it go to storage,
which stored steps go, which is the best.
"""

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dtft.checkpoint.replication import LEAST_MAXIMUM, Automatic, Cadence
from dtft.checkpoint.state import listed

_COUNTS = (
    "save_interval_steps",
    "max_interval_steps",
    "storage_interval_steps",
    "max_to_keep",
    "memory_to_keep",
    "chunk_bytes",
)
_WORDS: Mapping[str, Mapping[Any, str]] = {
    "save_interval_steps": {"auto": ", or 'auto'"},
    "max_to_keep": {None: ", or None for all"},
}
"""What some options may be besides a count, and how messages say so."""


@dataclass(frozen=True, kw_only=True)
class ReplicatedOptions:
    """Intervals, retention and limits; names as in Orbax where the meaning is Orbax's.

    >>> ReplicatedOptions(max_to_keep=0)
    Traceback (most recent call last):
    ValueError: max_to_keep=0 is not allowed. Allowed: a whole number, 1 or more, or \
None for all. Set ReplicatedOptions(max_to_keep=...).
    """

    save_interval_steps: int | Literal["auto"] = 1
    """`save` takes steps that are a multiple of this into memory, and the first.
    `auto`: as many as the stall budget allows, measured in this loop."""
    stall_budget: float = Automatic.budget
    """With `auto`: part of the wall time that saves may cost."""
    max_interval_steps: int = Automatic.maximum
    """With `auto`: most steps between saves; multiples of it are always saved."""
    storage_interval_steps: int = 100
    """A saved step goes to storage when a multiple of this was reached or passed."""
    max_to_keep: int | None = 3
    """Steps that storage keeps: the newest; with `best_fn` the best, and the newest one
    beyond them. None: all."""
    memory_to_keep: int = 1
    """Steps that memory keeps, those saved last. It needs room for two more, and for a
    third while one waits for storage."""
    best_fn: Callable[[Any], float] | None = None
    """From the metrics given to `save` to the number that tells the best step."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest number is the best."""
    chunk_bytes: int = 4 << 20
    """Every so many bytes have a digest of their own."""
    storage_timeout_s: float = 300.0
    """Limit of one write to storage; training never waits for it, `close` does."""
    agent: str | None = None
    """In a job of several processes: path of the socket of this process's agent. By
    default $DTFT_AGENT_SOCKET, or the only agent of this machine that is free."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value not in list(_WORDS.get(name, {})):
                # Plain numbers: they travel as JSON.
                object.__setattr__(self, name, _count(name, value))
        for name, below in (("storage_timeout_s", math.inf), ("stall_budget", 1)):
            number = _number(name, getattr(self, name), below)
            object.__setattr__(self, name, number)
        if self.save_interval_steps != "auto" and self.automatic != Automatic():
            raise ValueError(
                f"save_interval_steps={self.save_interval_steps} is fixed, so "
                "stall_budget and max_interval_steps have no effect. Set "
                "ReplicatedOptions(save_interval_steps='auto'), or leave them out."
            )
        if self.best_fn is not None and not callable(self.best_fn):
            raise ValueError(
                f"best_fn={self.best_fn!r} cannot be called. Allowed: a function from "
                "the metrics to a number, or None. Set ReplicatedOptions(best_fn=...)."
            )
        if self.best_mode not in ("max", "min"):
            raise ValueError(
                f"best_mode={self.best_mode!r} is not known. Allowed: 'max', 'min'."
            )

    @property
    def automatic(self) -> Automatic:
        """The bounds of an automatic interval."""
        return Automatic(budget=self.stall_budget, maximum=self.max_interval_steps)

    def score(self, metrics: Any) -> float | None:
        """The higher the better, whatever `best_mode` is; None without metrics."""
        if self.best_fn is None or metrics is None:
            return None
        value = float(self.best_fn(metrics))
        return value if self.best_mode == "max" else -value


def checked(options: Any) -> ReplicatedOptions:
    """The options that a manager is given; without any the defaults.

    >>> checked(None).max_to_keep
    3

    Raises:
        ValueError: they are something else, Orbax's for instance.
    """
    if options is None:
        return ReplicatedOptions()
    if not isinstance(options, ReplicatedOptions):
        raise ValueError(
            f"options is {type(options).__name__}. Allowed: ReplicatedOptions, or None "
            "for the defaults. Give dtft.checkpoint.ReplicatedOptions(...): "
            "save_interval_steps, max_to_keep, best_fn and best_mode mean what they "
            "mean in Orbax."
        )
    return options


def _count(name: str, value: Any) -> int:
    """An option that is a whole number."""
    longest = name == "max_interval_steps"
    least = LEAST_MAXIMUM if longest else 1
    is_count = hasattr(value, "__index__") and not isinstance(value, bool)
    if is_count and (count := operator.index(value)) >= least:
        return count
    besides = "".join(_WORDS.get(name, {}).values())
    why = " (with fewer, what a save costs cannot be told)" if longest else ""
    raise ValueError(
        f"{name}={value!r} is not allowed. Allowed: a whole number, {least} or more"
        f"{why}{besides}. Set ReplicatedOptions({name}=...)."
    )


def _number(name: str, value: Any, below: float) -> float:
    """An option that is a number above 0."""
    is_number = hasattr(value, "__float__") and not isinstance(value, bool)
    if is_number and 0 < float(value) < below:
        return float(value)
    raise ValueError(
        f"{name}={value!r} is not allowed. Allowed: a number above 0 and below "
        f"{below}. Set ReplicatedOptions({name}=...)."
    )


def is_due(cadence: Cadence, step: int, latest: int | None) -> bool:
    """Whether `save` takes a step, as Orbax decides it.

    >>> cadence = Cadence.every(5)
    >>> [is_due(cadence, step, latest) for step, latest in [(3, None), (4, 3), (5, 3)]]
    [True, False, True]
    """
    if latest is None:
        return True
    return step > latest and cadence.is_boundary(step)


def is_storage_due(
    options: ReplicatedOptions, step: int, last_stored: int | None
) -> bool:
    """Whether a saved step goes to storage.

    >>> options = ReplicatedOptions(storage_interval_steps=10)
    >>> [is_storage_due(options, 12, last) for last in (None, 9, 10)]
    [True, True, False]
    """
    if last_stored is None:
        return True
    interval = options.storage_interval_steps
    return step // interval > last_stored // interval


def superfluous(
    options: ReplicatedOptions,
    stored: Collection[int],
    scores: Mapping[int, float | None],
) -> tuple[int, ...]:
    """The stored steps that go, ascending. The newest never does: it is the one to
    go on from. Steps without a score are never the best.

    >>> superfluous(ReplicatedOptions(max_to_keep=2), [1, 2, 3], {})
    (1,)
    >>> by_loss = ReplicatedOptions(max_to_keep=1, best_fn=float, best_mode="min")
    >>> superfluous(by_loss, [1, 2, 3], {1: -0.1, 2: -0.5, 3: -0.2})
    (2,)
    """
    if options.max_to_keep is None:
        return ()
    order = sorted(stored)
    newest = order[-1:]
    if options.best_fn is not None:
        order.sort(key=lambda step: (_rank(scores.get(step)), step))
    return tuple(sorted(set(order[: -options.max_to_keep]) - set(newest)))


def chosen_step(step: int | None, steps: Collection[int], places: str) -> int:
    """The step that is asked for, or the newest one.

    Args:
        step: what is asked for; None for the newest.
        steps: those on offer.
        places: where they were looked for: "memory nor in DIRECTORY".

    Raises:
        FileNotFoundError: it is not on offer, or nothing is.

    >>> [chosen_step(step, [3, 7], "memory") for step in (None, 3)]
    [7, 3]
    """
    found = max(steps, default=None) if step is None else step
    if found is None or found not in steps:
        known = listed([str(one) for one in steps])
        raise FileNotFoundError(
            f"step={step} is neither in {places}. There are: {known}."
        )
    return found


def best(steps: Collection[int], scores: Mapping[int, float | None]) -> int | None:
    """The step with the best score, the newest of equal ones; None if none has one.

    >>> best([1, 2, 3], {1: 0.5, 2: 0.9}), best([1], {})
    (2, None)
    """
    rated = [step for step in steps if scores.get(step) is not None]
    return max(rated, key=lambda step: (_rank(scores[step]), step), default=None)


def _rank(score: float | None) -> float:
    """NaN, like no score at all, is never the best."""
    return float("-inf") if score is None or score != score else score
