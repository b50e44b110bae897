"""How a run divides its batch between replicas that are not equally fast.

Decides which settings are allowed and which steps are measured. Pure; must stay free of
jax imports at module level. What follows from a measurement is decided in
`dtft.balance`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from dtft.balance import Policy, Rules


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Uneven shares of the batch, learned while training."""

    policy: Annotated[
        Literal["off", "proportional", "exact"], arg(aliases=("--balance",))
    ] = "off"
    """`off`: equal rows for all. `exact`: the shares that end first, changed only for
    a gain above the noise. `proportional`: weights follow waits; it need not settle."""
    microbatches: int = 0
    """Parts of a step's batch, over all replicas: a share is a number of them. They
    divide data.global_batch; 0 for the most that do, up to 64."""
    most: int = 0
    """Microbatches that a replica has room for; 0 for four times an equal share. Input
    buffers are so large on every device."""
    every: int = 20
    """Steps of a round, at whose end shares may change."""
    probes: int = 5
    """Steps at the end of a round that are measured: each waits for the host."""
    patience: int = Rules.patience
    """Unchanged rounds after which shares are settled."""
    least_gain: float = Rules.least_gain
    """`exact` does not change shares for less, as a part of the step."""
    noise_factor: float = Rules.noise_factor
    """`exact` changes them for a gain above this many standard errors."""

    def __post_init__(self) -> None:
        for name in ("microbatches", "most"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"balance.{name}={getattr(self, name)} is negative. Set "
                    f"--balance.{name} 1 or more, or 0 for the default."
                )
        if self.every < 1:
            raise ValueError(
                f"balance.every={self.every} is not positive. Set --balance.every 1 or "
                "more."
            )
        if not 1 <= self.probes <= self.every:
            raise ValueError(
                f"balance.probes={self.probes} does not fit a round of balance.every="
                f"{self.every} steps. Allowed: 1 to {self.every}. Set --balance.probes "
                "or --balance.every."
            )
        try:
            self.rules("exact")
        except ValueError as error:
            raise ValueError(f"balance.{error}") from None

    def rules(self, policy: Policy) -> Rules:
        """When shares change under a policy, and when they are settled."""
        return Rules(
            policy=policy,
            least_gain=self.least_gain,
            noise_factor=self.noise_factor,
            patience=self.patience,
        )

    def is_probe(self, step: int) -> bool:
        """Whether the step that leads to state number `step` is measured.

        >>> config = BalanceConfig(every=5, probes=2)
        >>> [step for step in range(1, 11) if config.is_probe(step)]
        [4, 5, 9, 10]
        """
        return (step - 1) % self.every >= self.every - self.probes

    def ends_round(self, step: int) -> bool:
        """Whether a round ends with state number `step`."""
        return step % self.every == 0
