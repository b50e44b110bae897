"""What the nodes of a placed step did when, as it was measured.

Pure; must not know devices or programs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from dtft.train.placed_calls import Task
from dtft.train.placed_node import Span


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A measured step."""

    spans: tuple[Span, ...]
    """Every task, by node and in the order in which the node did it."""
    nodes: tuple[int, ...]

    @property
    def step_s(self) -> float:
        """Seconds until the last task was done."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def busy_s(self) -> dict[int, float]:
        """Seconds that each node worked."""
        return {
            node: sum(s.end_s - s.start_s for s in self.spans if s.node == node)
            for node in self.nodes
        }

    @property
    def wait_s(self) -> dict[int, float]:
        """Seconds that each node did not work, until the last one was done."""
        return {node: self.step_s - busy for node, busy in self.busy_s.items()}

    @property
    def order(self) -> dict[int, tuple[tuple[str, int | None], ...]]:
        """Names and microbatches of each node's tasks, by measured start."""
        return {
            node: tuple(
                (span.name, span.microbatch)
                for span in sorted(self.spans, key=lambda span: span.start_s)
                if span.node == node
            )
            for node in self.nodes
        }

    def agreement(self, start_s: Mapping[Task, float]) -> float:
        """Rank correlation (Spearman) of measured starts with predicted ones, -1 to 1.

        Args:
            start_s: predicted start of tasks; others do not count.
        """
        predicted = {
            (task.call.node, task.call.name, task.microbatch): seconds
            for task, seconds in start_s.items()
        }
        pairs = [
            (predicted[s.node, s.name, s.microbatch], s.start_s)
            for s in self.spans
            if (s.node, s.name, s.microbatch) in predicted
        ]
        return _spearman([p for p, _ in pairs], [m for _, m in pairs])


def _spearman(one: Sequence[float], two: Sequence[float]) -> float:
    if len(one) < 2 or min(np.ptp(one), np.ptp(two)) == 0:
        return 1.0
    return float(np.corrcoef(rankdata(one), rankdata(two))[0, 1])
