"""What the nodes of a placed step did when, as it was measured.

Pure; must not know devices or programs.
"""

from dataclasses import dataclass

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
