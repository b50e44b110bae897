"""How far seconds that a pool's figures give can be trusted, and what corrects them.

The levels of reference section 5: catalog (0), measured (1), corrected by past runs
(2). Pure. Must not know how figures are measured or fitted (`calibration`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

UNCALIBRATED: Mapping[str, float] = {"compute": 0.25, "collectives": 0.5}
"""Relative errors expected of the catalog (level 0), by term; `other` as compute."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """What a prediction says of the figures it is made of."""

    source: str = "catalog (uncalibrated)"
    """Where they come from, in a line."""
    errors: Mapping[str, float] = field(default_factory=lambda: dict(UNCALIBRATED))
    """Relative errors of a prediction's terms: `compute` (and all others) and
    `collectives`."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Term to the factor that past runs gave; terms without one are taken as they
    are."""

    def scale(self, term: str) -> float:
        """What a term of a prediction is multiplied by.

        >>> learnt = Accuracy(scales={"compute": 1.5})
        >>> learnt.scale("compute"), learnt.scale("launch")
        (1.5, 1.0)
        """
        return self.scales.get(term, 1.0)

    def interval_s(self, terms: Mapping[str, float]) -> tuple[float, float]:
        """The interval of a step's time that the figures support.

        Errors of different terms are taken as independent, those within a term as
        common.

        Args:
            terms: seconds by term.

        >>> low, high = Accuracy().interval_s({"compute": 3.0, "collectives": 1.0})
        >>> round(low, 2), round(high, 2)
        (3.1, 4.9)
        """
        total = sum(terms.values())
        common = sum(s for key, s in terms.items() if key != "collectives")
        apart = terms.get("collectives", 0.0)
        off = (common * self.errors["compute"]) ** 2
        off += (apart * self.errors["collectives"]) ** 2
        return max(0.0, total - off**0.5), total + off**0.5


CATALOG = Accuracy()
"""Of figures that nothing was measured for."""
