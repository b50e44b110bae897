"""Shampoo's config. Must stay free of jax imports at module level."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dtft.train.optimizers import OptimConfig

if TYPE_CHECKING:
    import optax

    from dtft.optim.shampoo_steps import Exchange


@dataclass(frozen=True, kw_only=True)
class ShampooConfig(OptimConfig):
    """Shampoo with the magnitude of Max-AdaBelief (dtft.optim)."""

    short_name: ClassVar[str] = "shampoo"

    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.999
    """Decay of Max-AdaBelief's second moment."""
    eps: float = 1e-16
    """Added to Max-AdaBelief's denominator outside the root."""
    eps_root: float = 1e-16
    """Added to Max-AdaBelief's second moment at every step."""
    beta_preconditioner: float = 0.999
    """Decay of the statistics; 1 for their plain sum."""
    exponent: float = 0.25
    """Each side is raised to minus this."""
    root_eps: float = 1e-6
    """Added to the statistics' eigenvalues, as a fraction of the largest."""
    block_size: int = 256
    """Largest rows and columns of the blocks that matrices are cut into."""
    precondition_frequency: int = 10
    """Steps from one computation of the roots to the next."""
    statistics_every: int = 1
    """Steps from one measurement of the statistics to the next."""
    wire: Literal["none", "full", "packed", "cholesky"] = "none"
    """`none`: statistics of the mean gradient, nothing is sent. Else they are those of
    each replica's own gradient, and travel in full, packed to a triangle, or as
    Cholesky factors."""
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    """What statistics are rounded to on the way."""
    algorithm: Literal["native", "ring", "tree", "gather"] = "native"
    """How gradients and statistics are reduced (dtft.collectives)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = {
            "b1": (0 < self.b1 < 1, "0 < b1 < 1"),
            "b2": (0 <= self.b2 < 1, "0 <= b2 < 1"),
            "beta_preconditioner": (
                0 <= self.beta_preconditioner <= 1,
                "0 <= beta_preconditioner <= 1",
            ),
            "exponent": (0 < self.exponent <= 1, "0 < exponent <= 1"),
            "root_eps": (0 < self.root_eps < 1, "0 < root_eps < 1"),
            "block_size": (self.block_size > 0, "1 or more"),
            "wire_dtype": (
                self.wire != "none" or self.wire_dtype == "float32",
                "float32 with optim.wire='none', which sends nothing",
            ),
            "algorithm": (
                self.wire in ("full", "packed") or self.algorithm == "native",
                f"native with optim.wire={self.wire!r}",
            ),
            "statistics_every": (self.statistics_every > 0, "1 or more"),
            "precondition_frequency": (
                self.precondition_frequency > 0
                and self.precondition_frequency % max(self.statistics_every, 1) == 0,
                f"a multiple of optim.statistics_every={self.statistics_every}",
            ),
        }
        for name, (fits, text) in allowed.items():
            if not fits:
                raise ValueError(
                    f"optim.{name}={getattr(self, name)} does not fit. Allowed: "
                    f"{text}. Set --optim.{name} accordingly."
                )

    @property
    def is_elementwise(self) -> bool:
        """No: a number's update depends on its row and its column."""
        return False

    @property
    def reduces_itself(self) -> bool:
        """Whether statistics are those of each replica's own gradient."""
        return self.wire != "none"

    def check_mesh(self, tensor: int) -> None:
        """Refuses a mesh on which the statistics cannot be exchanged.

        Raises:
            ValueError: statistics are exchanged, and `tensor` is above 1.
        """
        if self.reduces_itself and tensor > 1:
            raise ValueError(
                f"mesh.tensor={tensor} does not go together with optim.wire="
                f"{self.wire!r}. Allowed: 1 (mesh.fsdp may be more). Set --mesh.tensor "
                "1, or --optim.wire none."
            )

    def scale(self, axis_name: str | None = None) -> "optax.GradientTransformation":
        """The Shampoo direction, of the mean gradient."""
        from dtft import optim

        exchanged = axis_name is not None
        scaled = optim.scale_by_shampoo(
            self.b1,
            self.b2,
            self.eps,
            self.eps_root,
            beta_preconditioner=self.beta_preconditioner,
            exponent=self.exponent,
            root_eps=self.root_eps,
            block_size=self.block_size,
            precondition_frequency=self.precondition_frequency,
            statistics_every=self.statistics_every,
            exchange=self._exchange(axis_name) if exchanged else None,
        )
        if not exchanged:
            return scaled
        return optim.average_gradients(scaled, axis_name, self.algorithm)

    def _exchange(self, axis_name: str) -> "Exchange":
        from dtft.optim import exchange_symmetric

        if self.wire == "none":
            raise ValueError(
                f"axis_name={axis_name!r} is not used with optim.wire='none'. Build "
                "without it, or set --optim.wire packed."
            )
        dtype = None if self.wire_dtype == "float32" else self.wire_dtype
        return exchange_symmetric(axis_name, self.wire, dtype, self.algorithm)
