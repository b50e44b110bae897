"""Options of the checkpoint manager, and the decisions that follow from the options.

From step numbers and metrics alone this module decides which steps are saved, which
steps are written to storage, which stored steps are deleted, and which step is best.
"""

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dtft.checkpoint.replication import LEAST_MAXIMUM, Automatic, Cadence
from dtft.checkpoint.state import MAX_CHUNK_BYTES, listed

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
"""Values that an option may have instead of a count, each with its text for errors."""


@dataclass(frozen=True, kw_only=True)
class ReplicatedOptions:
    """Intervals, retention and limits of a `ReplicatedCheckpointManager`.

    Options that Orbax has, too, have Orbax's names.

    >>> ReplicatedOptions(max_to_keep=0)
    Traceback (most recent call last):
    ValueError: max_to_keep=0 is not allowed. Allowed: a whole number, 1 or more, or \
None for all. Set ReplicatedOptions(max_to_keep=...).
    """

    save_interval_steps: int | Literal["auto"] = 1
    """`save` copies every multiple of this number into memory, and any step while no
    step is saved. `auto`: the shortest interval that `stall_budget` allows, computed
    from the measured times of saves and steps."""
    stall_budget: float = Automatic.budget
    """With `auto`: the wall time that saves may add, as a fraction of the steps' own
    wall time."""
    max_interval_steps: int = Automatic.maximum
    """With `auto`: the largest number of steps between two saves. Every multiple of
    this number is saved."""
    storage_interval_steps: int = 100
    """A saved step is due for storage if a multiple of this number was reached or
    passed since the last due step; in a job of several processes, since the last stored
    step. At first, the newest step in storage counts as the last due step; if storage
    has no step, the first saved step is due."""
    max_to_keep: int | None = 3
    """The number of steps that storage keeps: the newest steps, or with `best_fn` the
    best steps. The newest step is always kept, too. None: storage keeps all steps."""
    memory_to_keep: int = 1
    """The number of steps that memory keeps: the steps saved last. The step of the
    largest number is always kept, too. Memory needs room for two more steps, or for
    three more while a step waits for storage."""
    best_fn: Callable[[Any], float] | None = None
    """Computes from the metrics given to `save` the number that ranks the step."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest number of `best_fn` is the best."""
    chunk_bytes: int = 4 << 20
    """Size of a chunk in bytes, at most 256 MiB; every chunk has its own digest."""
    storage_timeout_s: float = 300.0
    """Limit of one write to storage in seconds. `save` never waits for a write;
    `wait_until_finished` and `close` do."""
    agent: str | None = None
    """Path of the agent's socket, in a job of several processes. By default
    $DTFT_AGENT_SOCKET, else the socket of the only free agent on this machine."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value not in list(_WORDS.get(name, {})):
                # A plain int: options are sent as JSON.
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
        """The limits of an automatic interval between saves.

        These are the wall time that saves may add, as a fraction of the steps' own wall
        time, and the largest number of steps between two saves.
        """
        return Automatic(budget=self.stall_budget, maximum=self.max_interval_steps)

    def score(self, metrics: Any) -> float | None:
        """Computes the score of a step from its metrics, with `best_fn`.

        Returns:
            The score, which is higher for a better step in both `best_mode`s; None
            without metrics or without `best_fn`.

        Raises:
            Exception: `best_fn` fails, or its result cannot be converted to a float.
        """
        if self.best_fn is None or metrics is None:
            return None
        value = float(self.best_fn(metrics))
        return value if self.best_mode == "max" else -value


def checked(options: Any) -> ReplicatedOptions:
    """Checks the type of a manager's options; None gives the defaults.

    >>> checked(None).max_to_keep
    3

    Raises:
        ValueError: `options` has another type, for instance Orbax's options.
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
    """Returns the value of the option `name` as a plain int.

    Raises:
        ValueError: the value is no whole number, or is below 1 (`max_interval_steps`:
            below `LEAST_MAXIMUM`, which is 8), or `chunk_bytes` is above
            `MAX_CHUNK_BYTES` (256 MiB).
    """
    longest = name == "max_interval_steps"
    least = LEAST_MAXIMUM if longest else 1
    most = MAX_CHUNK_BYTES if name == "chunk_bytes" else math.inf
    is_count = hasattr(value, "__index__") and not isinstance(value, bool)
    if is_count and least <= (count := operator.index(value)) <= most:
        return count
    allowed = f"{least} or more" if most == math.inf else f"{least} to {most}"
    besides = "".join(_WORDS.get(name, {}).values())
    why = " (with fewer, what a save costs cannot be told)" if longest else ""
    raise ValueError(
        f"{name}={value!r} is not allowed. Allowed: a whole number, {allowed}"
        f"{why}{besides}. Set ReplicatedOptions({name}=...)."
    )


def _number(name: str, value: Any, below: float) -> float:
    """Returns the value of the option `name` as a float.

    Raises:
        ValueError: the value is not a number, not above 0, or not below `below`.
    """
    is_number = hasattr(value, "__float__") and not isinstance(value, bool)
    if is_number and 0 < float(value) < below:
        return float(value)
    raise ValueError(
        f"{name}={value!r} is not allowed. Allowed: a number above 0 and below "
        f"{below}. Set ReplicatedOptions({name}=...)."
    )


def is_due(cadence: Cadence, step: int, latest: int | None) -> bool:
    """Whether a step is due to be saved.

    As in Orbax, every step is due while no step is saved. Afterwards a step is due if
    it is in the cadence and above the newest step.

    Args:
        cadence: the steps after which a save is due.
        step: the step.
        latest: the newest step saved or stored; None if there is no step.

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
    """Whether a step that was saved into memory is due to be written to storage.

    It is due if a multiple of `options.storage_interval_steps` is above `last_stored`
    and at most `step`.

    Args:
        options: the options of the checkpoint manager.
        step: the step that was saved.
        last_stored: the last step that was queued for storage; before that, the newest
            step in storage. None if there is neither: the step is then due.

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
    """Returns the stored steps to delete, ascending.

    Keeps the `options.max_to_keep` newest steps, or with `best_fn` as many steps of the
    highest scores. The newest step is always kept, in addition if its score is too low,
    because training resumes from it. If `max_to_keep` is None, no step is deleted.

    In the second example, step 1 has the highest score (the negated loss) and step 3 is
    the newest, so only step 2 is deleted.

    Args:
        options: the options of the checkpoint manager.
        stored: the steps in storage.
        scores: step to its score (`ReplicatedOptions.score`); a higher score is better.
            A step without a score ranks below every step with a score.

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
    """Returns the requested step; for None, the newest of `steps`.

    Args:
        step: the requested step; None for the newest step.
        steps: the steps that can be restored.
        places: where steps can be, for the error. Follows "is neither in", so it is
            text such as "memory nor in DIRECTORY".

    Raises:
        FileNotFoundError: `steps` does not have the step, or is empty.

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
    """Returns the step with the highest score; of equal scores, the newest step.

    `scores` maps a step to its score, or to None for a step without metrics. Returns
    None if none of `steps` has a score.

    >>> best([1, 2, 3], {1: 0.5, 2: 0.9}), best([1], {})
    (2, None)
    """
    rated = [step for step in steps if scores.get(step) is not None]
    return max(rated, key=lambda step: (_rank(scores[step]), step), default=None)


def _rank(score: float | None) -> float:
    """Returns `score`, but minus infinity for NaN and None, so that they rank last."""
    return float("-inf") if score is None or score != score else score
