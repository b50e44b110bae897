"""What the replicas of an optimizer exchange, as options of an experiment.

Decides which options fit together. Must stay free of jax imports.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Whether replicas exchange moments instead of gradients (dtft.optim.sync).

    Steps are then up to sqrt(replicas) smaller at the same learning rate.
    """

    moments: Literal["none", "operands", "state"] = "none"
    """`none`: the mean gradient. `operands`: moments stay those of each replica's own
    gradients, what the update is made of is reduced. `state`: moments are reduced."""
    every_mu: int = 1
    """Steps from one exchange of the first moment to the next."""
    every_nu: int = 1
    """Steps from one exchange of the second moment to the next (`state` only)."""
    every_nu_max: int = 1
    """Steps from one exchange of its maximum to the next. With `state` not above
    every_mu where gradients are sparse; `operands` exchanges early where it must."""
    every_params: int = 1
    """Steps from one mean of the parameters to the next (`state` only)."""
    max_op: Literal["mean", "max"] = "mean"
    """Whether the maxima are reduced by their mean or by their maximum."""
    algorithm: Literal["native", "ring", "tree", "gather"] = "native"
    """How arrays are reduced (dtft.collectives)."""

    def __post_init__(self) -> None:
        periods = {k: v for k, v in vars(self).items() if k.startswith("every_")}
        for name, value in periods.items():
            if value < 1:
                raise ValueError(
                    f"optim.sync.{name}={value} is not a period in steps. "
                    f"Set --optim.sync.{name} to 1 or more."
                )
        without = {"none": vars(self).keys() - {"moments"}, "state": ()}
        for name in without.get(self.moments, ("every_nu", "every_params")):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(
                    f"optim.sync.{name}={getattr(self, name)} has no effect with "
                    f"optim.sync.moments={self.moments!r}. Set --optim.sync.moments "
                    f"state{_OR_OPERANDS.get(name, '')}, or leave {name} out."
                )
        if self.every_params > 1 and not self.updates_differ:
            raise ValueError(
                f"optim.sync.every_params={self.every_params} has no effect: with "
                "every_mu=1 and every_nu_max=1 all replicas make the same update. Set "
                "--optim.sync.every_mu above 1, or leave every_params out."
            )

    @property
    def updates_differ(self) -> bool:
        """Whether replicas make updates that differ."""
        return self.moments == "state" and max(self.every_mu, self.every_nu_max) > 1


_OR_OPERANDS = dict.fromkeys(
    ("every_mu", "every_nu_max", "max_op", "algorithm"), " or operands"
)
