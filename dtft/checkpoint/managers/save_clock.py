"""Measures the cost of saves in one process, to adapt the interval between saves.

The time of a save begins when the arrays to save are computed, and ends when they are
saved. The time between two saves is that of the training steps. From these two times,
`dtft.checkpoint.replication.snapshot_interval` chooses an automatic interval.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import orbax.checkpoint as ocp

from dtft.checkpoint.replication import (
    Automatic,
    Cadence,
    Experience,
    Window,
    next_interval,
)


class SaveClock:
    """Decides after which steps a save is due (`cadence`).

    An automatic interval is computed anew after each save but the first, from the
    measured times of saves and training steps. With a fixed interval nothing is
    measured.
    """

    def __init__(
        self,
        interval: int | None,
        allowed: Automatic,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measures nothing yet; an automatic interval is one step at first.

        Args:
            interval: steps between saves; None for an automatic interval.
            allowed: for an automatic interval, the wall time that saves may add, as a
                fraction of the steps' wall time, and the longest interval in steps.
            clock: returns seconds on a monotonic clock.

        Raises:
            ValueError: the interval is automatic and the job has several processes,
                which would measure different times and save different steps.
        """
        self._automatic = interval is None
        if self._automatic and jax.distributed.is_initialized():
            if jax.process_count() > 1:
                raise ValueError(
                    "save_interval_steps='auto' is for one process, this is one of "
                    f"{jax.process_count()}. Give a number of steps; jobs under `dtft "
                    "launch` or `dtft agent` have --checkpoint.interval auto."
                )
        self._allowed, self._clock = allowed, clock
        self.cadence = (
            Cadence(interval=1, period=allowed.maximum)
            if interval is None
            else Cadence.every(interval)
        )
        """The steps after which a save is due; replaced when the interval changes."""
        self._seen = Experience()
        self._last: tuple[int, float] | None = None

    @contextmanager
    def saving(self, step: int, args: Any) -> Iterator[None]:
        """Measures the save in a `with` body, and then adapts an automatic interval.

        Waits first until the arrays of the step are computed. This wait counts as time
        of the training steps, not of the save. With a fixed interval, only runs the
        body.

        Args:
            step: the step that is saved.
            args: the argument `args` of the checkpoint manager's `save`, with the
                arrays of the step.
        """
        if not self._automatic:
            yield
            return
        jax.block_until_ready(_arrays(args))
        begun = self._clock()
        yield
        ended = self._clock()
        if self._last is not None and step > self._last[0]:
            self._learn(step - self._last[0], begun - self._last[1], ended - begun)
        self._last = step, ended

    def _learn(self, steps: int, steps_s: float, save_s: float) -> None:
        window = Window(
            affected_steps=0,
            affected_s=save_s,
            quiet_steps=steps,
            quiet_s=steps_s,
            stall_s=save_s,
        )
        self._seen = self._seen.and_window(window)
        wanted = next_interval(self.cadence.interval, self._seen, self._allowed)
        self.cadence = self.cadence.at(wanted)


def _arrays(args: Any) -> list[jax.Array]:
    """Lists the jax arrays that a save would write, except deleted arrays.

    `args` is the argument `args` of the checkpoint manager's `save`.
    """
    parts = args.values() if isinstance(args, ocp.args.Composite) else [args]
    leaves = jax.tree.leaves([getattr(part, "item", None) for part in parts])
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return [array for array in arrays if not array.is_deleted()]
