"""How long whole steps took with each division that was tried.

Where a step is more than its slowest node's work (a pipeline fills and drains, nodes
wait for what others send), seconds of nodes do not say which of two divisions is
faster; having tried both does. Pure; must not know nodes, nor when a division changes
(`balance`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dtft.planner.tried import Load


@dataclass(frozen=True, kw_only=True)
class Took:
    """Steps of one division."""

    division: Any
    step_s: float
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Of the divisions tried since a node drifted last; none where nobody says."""

    took: Mapping[Load, Took] = field(default_factory=dict)

    def after(
        self, division: Any, load: Load, step_s: ArrayLike, level: float
    ) -> "StepTimes":
        """With another round.

        Args:
            division: The one in force.
            load: That of the division.
            step_s: Seconds of whole steps, `[steps]`.
            level: By how much everything is slower than before.

        Raises:
            ValueError: no seconds above 0.
        """
        seconds = np.asarray(step_s, float)
        if seconds.ndim != 1 or not seconds.size or not (seconds > 0).all():
            raise ValueError(
                f"step_s={seconds.tolist()!r:.80}. Allowed: a number above 0 for each "
                "step of the round; None where whole steps are not measured."
            )
        now = float(np.median(seconds))
        took = {
            one: replace(it, step_s=level * it.step_s) for one, it in self.took.items()
        }
        before = took.get(load, Took(division=division, step_s=now, num_steps=0))
        total = before.num_steps + seconds.size
        mean_s = before.step_s + seconds.size / total * (now - before.step_s)
        here = Took(division=division, step_s=mean_s, num_steps=total)
        return StepTimes(took={**took, load: here})

    def gain(self, here: Load, there: Load) -> float | None:
        """Share of a step that the second saves; None if one of them was not tried."""
        if here not in self.took or there not in self.took:
            return None
        return 1 - self.took[there].step_s / self.took[here].step_s

    def fastest(self, here: Load) -> tuple[Any, float] | None:
        """The division whose steps took least, and the share of a step that it saves;
        None if nothing was tried."""
        if here not in self.took:
            return None
        best = min(self.took.values(), key=lambda it: it.step_s)
        return best.division, 1 - best.step_s / self.took[here].step_s
