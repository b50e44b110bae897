"""Shampoo's config. Must stay free of jax imports at module level."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtft.train.optimizers import OptimConfig

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True, kw_only=True)
class ShampooConfig(OptimConfig):
    """Shampoo with the magnitude of Max-AdaBelief (dtft.optim)."""

    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.999
    """Decay of Max-AdaBelief's second moment."""
    eps: float = 1e-16
    """Added to Max-AdaBelief's denominator outside the root."""
    eps_root: float = 1e-16
    """Added to Max-AdaBelief's second moment at every step."""
    statistics_decay: float = 0.999
    """Decay of the statistics; 1 for their plain sum."""
    exponent: float = 0.25
    """Each side is raised to minus this."""
    root_eps: float = 1e-6
    """Added to the statistics' eigenvalues, as a fraction of the largest."""
    block_size: int = 256
    """Largest rows and columns of the blocks that matrices are cut into."""
    root_every: int = 10
    """Steps from one computation of the roots to the next."""
    statistics_every: int = 1
    """Steps from one measurement of the statistics to the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = {
            "b1": (0 < self.b1 < 1, "0 < b1 < 1"),
            "b2": (0 <= self.b2 < 1, "0 <= b2 < 1"),
            "statistics_decay": (
                0 <= self.statistics_decay <= 1,
                "0 <= statistics_decay <= 1",
            ),
            "exponent": (0 < self.exponent <= 1, "0 < exponent <= 1"),
            "root_eps": (0 < self.root_eps < 1, "0 < root_eps < 1"),
            "block_size": (self.block_size > 0, "1 or more"),
            "statistics_every": (self.statistics_every > 0, "1 or more"),
            "root_every": (
                self.root_every > 0
                and self.root_every % max(self.statistics_every, 1) == 0,
                f"a multiple of optim.statistics_every={self.statistics_every}",
            ),
        }
        for name, (fits, text) in allowed.items():
            if not fits:
                raise ValueError(
                    f"optim.{name}={getattr(self, name)} does not fit. Allowed: "
                    f"{text}. Set --optim.{name} to such a number."
                )

    def scale(self) -> "optax.GradientTransformation":
        """The Shampoo direction."""
        from dtft.optim import scale_by_shampoo

        return scale_by_shampoo(
            self.b1,
            self.b2,
            self.eps,
            self.eps_root,
            statistics_decay=self.statistics_decay,
            exponent=self.exponent,
            root_eps=self.root_eps,
            block_size=self.block_size,
            root_every=self.root_every,
            statistics_every=self.statistics_every,
        )
