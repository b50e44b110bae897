"""Optimizer configs: each makes an optax transform with clipping, decay and a guard.

The guard skips steps with outlier gradients. Clipping, decay and guard are always part
of the transform. So these options do not change the structure of the optimizer state,
and a checkpoint stays readable when they change. JAX is imported only when a transform
is made.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dtft._former import renamed_fields

if TYPE_CHECKING:
    import optax

    from dtft.optim.shampoo_steps import Exchange


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Schedule of the learning rate."""

    kind: Literal["constant", "warmup_cosine"] = "constant"
    """`constant`: the peak. `warmup_cosine`: linear warm-up, then a cosine to `end`."""
    warmup_steps: int = 0
    """Number of steps of linear warm-up (`warmup_cosine` only)."""
    decay_steps: int = 0
    """Number of steps until `end` is reached, warm-up included (`warmup_cosine`)."""
    end: float = 0.1
    """Learning rate at the end, as a fraction of the peak (`warmup_cosine` only)."""

    def __post_init__(self) -> None:
        if self.kind == "constant" and (self.warmup_steps or self.decay_steps):
            raise ValueError(
                f"optim.schedule.warmup_steps={self.warmup_steps} and decay_steps="
                f"{self.decay_steps} have no effect with kind='constant'. Set "
                "--optim.schedule.kind warmup_cosine, or both to 0."
            )
        if self.kind == "warmup_cosine" and not (
            0 <= self.warmup_steps < self.decay_steps
        ):
            raise ValueError(
                f"optim.schedule.warmup_steps={self.warmup_steps} must be at least 0 "
                f"and below optim.schedule.decay_steps={self.decay_steps}. Raise "
                "--optim.schedule.decay_steps."
            )

    def of(self, peak: float) -> Callable[[Any], Any]:
        """Returns the schedule, a traceable function from step to learning rate.

        Args:
            peak: largest learning rate.
        """
        import jax
        import optax

        if self.kind == "constant":
            return optax.constant_schedule(peak)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0 if self.warmup_steps else peak,
            peak,
            self.warmup_steps,
            self.decay_steps,
            peak * self.end,
        )

        def standard(step: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"):
                return schedule(step)

        return standard


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Which moments replicas exchange instead of gradients, and how often.

    The default exchanges gradients. `dtft.optim.sync` describes the exchange.

    With moments, updates are up to sqrt(replicas) times smaller than with gradients at
    the same learning rate.
    """

    moments: Literal["none", "operands", "state"] = "none"
    """`none`: gradients are averaged. `operands`: each replica keeps moments of its
    local gradients; the update is computed from moments that are reduced over the
    replicas. `state`: replicas replace their moments by the reduced moments."""
    every_mu: int = 1
    """Steps from one exchange of the first moment to the next."""
    every_nu: int = 1
    """Steps from one exchange of the second moment to the next (`state` only)."""
    every_nu_max: int = 1
    """Steps from one exchange of the second moment's maximum to the next. With `state`
    and sparse gradients use at most every_mu. `operands` exchanges early if an update
    is too large."""
    every_params: int = 1
    """Steps from one average of the parameters to the next (`state` only)."""
    max_op: Literal["mean", "max"] = "mean"
    """Whether the second moment's maximum is reduced by a mean or by a maximum."""
    algorithm: Literal["native", "ring", "tree", "gather"] = "native"
    """All-reduce algorithm (dtft.collectives)."""

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
        """Whether replicas make different updates between two exchanges of moments.

        True if `moments` is "state" and the first moment, or the second moment's
        maximum, is exchanged less often than at every update.
        """
        return self.moments == "state" and max(self.every_mu, self.every_nu_max) > 1


_OR_OPERANDS = dict.fromkeys(
    ("every_mu", "every_nu_max", "max_op", "algorithm"), " or operands"
)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Base of all optimizer configs.

    `short_name` is the name of the class in `config.json`. A subclass that does not
    define `short_name` has its module and class name there.
    """

    short_name: ClassVar[str] = ""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Schedule of the learning rate."""
    clip: float = 0.0
    """Largest global norm of the gradient, which clipping enforces; 0: no limit."""
    weight_decay: float = 0.0
    """Strength of decoupled weight decay."""
    guard: float = 0.0
    """Skip steps whose gradient is not finite, or has a norm of more than this many
    times the median of the last 64 norms; 0: skip no step. 10 is a good value."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """Settings of the exchange between replicas (MaxAdaBeliefConfig only)."""

    def __post_init__(self) -> None:
        if self.sync.moments != "none" and not isinstance(self, MaxAdaBeliefConfig):
            raise ValueError(
                f"optim.sync.moments={self.sync.moments!r} needs an optimizer in two "
                f"phases, which {type(self).__name__} is not. Use MaxAdaBeliefConfig, "
                "or leave optim.sync out."
            )
        for name in ("learning_rate", "clip", "weight_decay", "guard"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"optim.{name}={value} is not a finite number of 0 or more. "
                    f"Set --optim.{name} to one."
                )
        if 0 < self.guard <= 1:
            raise ValueError(
                f"optim.guard={self.guard} would skip ordinary steps. Allowed: above "
                "1, or 0 for no guard. Set --optim.guard 10."
            )

    def learning_rate_at(self) -> Callable[[Any], Any]:
        """Returns the schedule, a traceable function from step to learning rate."""
        return self.schedule.of(self.learning_rate)

    @property
    def reduces_itself(self) -> bool:
        """Whether the optimizer takes local gradients, not their mean over replicas.

        False in this base class. An optimizer for which it is True communicates over
        the mesh axis whose name `build` gets, and marks the state that differs per
        replica (`dtft.optim.per_replica`).
        """
        return False

    @property
    def params_drift(self) -> bool:
        """Whether parameters may differ between replicas after a step.

        False in this base class.
        """
        return False

    @property
    def is_elementwise(self) -> bool:
        """Whether each element is updated independently of its neighbours in the array.

        Such an optimizer gives the same result for layers that are stacked into one
        array. A norm over all gradients does not count as a dependence.
        """
        return True

    def check_mesh(self, tensor: int) -> None:
        """Checks that the optimizer works on a mesh whose axis `tensor` has this size.

        Raises:
            ValueError: the optimizer does its own collectives (`reduces_itself`), and
                `tensor` is above 1.
        """
        if self.reduces_itself and tensor > 1:
            # The partitioner of jax 0.10.2 aborts with a failed check when it divides
            # a gather over `tensor` in a program that is manual over `replica`.
            raise ValueError(
                f"mesh.tensor={tensor} does not go together with an optimizer that "
                "communicates by itself. Allowed: 1 (mesh.fsdp may be more). Set "
                "--mesh.tensor 1, or leave optim.sync out."
            )

    def reconcile(self, params: Any, count: Any, axis_name: str) -> Any:
        """Returns a replica's parameters, averaged over the replicas in some updates.

        This base class never averages, and returns `params`. A subclass may average the
        parameters over the axis `axis_name`. `count` is the number of the update that
        was made last.
        """
        del count, axis_name
        return params

    def scale(self, axis_name: str | None = None) -> "optax.GradientTransformation":
        """Makes the transform from gradient to direction; defined by each subclass.

        The direction is the update before weight decay and learning rate.

        Args:
            axis_name: the replica axis, if `reduces_itself`; else None.

        Raises:
            NotImplementedError: the class does not define this method.
        """
        raise NotImplementedError(
            f"{type(self).__name__} is no optimizer. Use MaxAdaBeliefConfig, "
            "AdamWConfig or SGDConfig as the experiment's optim."
        )

    def build(self, axis_name: str | None = None) -> "optax.GradientTransformation":
        """Makes the whole optimizer: clip, scale, decay and learning rate.

        The guard `skip_outlier_gradients` wraps this chain.

        Args:
            axis_name: the replica axis, if `reduces_itself`; the optimizer must then
                run inside `jax.shard_map` over that axis. Else None.
        """
        import optax

        from dtft.optim.guard import skip_outlier_gradients

        # identity() has the same (empty) state as the transform that it replaces.
        clip = optax.clip_by_global_norm(self.clip) if self.clip else optax.identity()
        decay = (
            optax.add_decayed_weights(self.weight_decay)
            if self.weight_decay
            else optax.identity()
        )
        chain = optax.chain(
            clip,
            self.scale(axis_name),
            decay,
            optax.scale_by_learning_rate(self.learning_rate_at()),
        )
        # Local gradients differ, but all replicas must skip the same steps.
        over = axis_name if self.reduces_itself else None
        return skip_outlier_gradients(chain, self.guard or None, axis_name=over)


@renamed_fields(debias_max="bias_correct_max")
@dataclass(frozen=True, kw_only=True)
class MaxAdaBeliefConfig(OptimConfig):
    """Settings of Max-AdaBelief (dtft.optim)."""

    short_name: ClassVar[str] = "max_adabelief"

    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-16
    """Number added to the denominator outside the root."""
    eps_root: float = 1e-16
    """Number added to the second moment at every step."""
    bias_correct_max: bool = True
    """Whether the maximum of the second moment is corrected for bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _decays(b1=self.b1, b2=self.b2)
        for name in ("eps", "eps_root"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"optim.{name}={getattr(self, name)} is not a finite number of 0 "
                    f"or more. Set --optim.{name} to one."
                )
        if self.b1 == 0:
            raise ValueError(
                "optim.b1=0.0 makes AdaBelief's second moment zero. "
                "Set --optim.b1 to a number between 0 and 1, such as 0.9."
            )

    @property
    def reduces_itself(self) -> bool:
        """Whether replicas exchange moments instead of gradients (`sync.moments`)."""
        return self.sync.moments != "none"

    @property
    def params_drift(self) -> bool:
        """Whether parameters may differ between replicas after a step.

        True if the parameters are averaged less often than at every update
        (`sync.every_params` above 1).
        """
        return self.sync.every_params > 1

    def reconcile(self, params: Any, count: Any, axis_name: str) -> Any:
        """Averages the parameters if `count` is a multiple of `sync.every_params`.

        At other updates, and if replicas make equal updates, the parameters are
        returned unchanged.
        """
        if not self.sync.updates_differ:
            return params
        from dtft.optim.exchange import average_params

        every, algorithm = self.sync.every_params, self.sync.algorithm
        return average_params(params, count, axis_name, every, algorithm=algorithm)

    def scale(self, axis_name: str | None = None) -> "optax.GradientTransformation":
        """Makes the Max-AdaBelief transform from gradient to direction.

        The direction is the update before weight decay and learning rate. With
        `sync.moments` set, the transform exchanges moments over the axis `axis_name`.
        """
        from dtft.optim import max_belief_phases, scale_by_max_belief

        numbers = (self.b1, self.b2, self.eps, self.eps_root)
        if not self.reduces_itself:
            return scale_by_max_belief(*numbers, bias_correct_max=self.bias_correct_max)
        phases = max_belief_phases(*numbers, bias_correct_max=self.bias_correct_max)
        return self._synced(phases, axis_name)

    def _synced(self, phases: Any, axis_name: str | None) -> Any:
        from dtft.optim.sync import sync_moments

        mode = "state" if self.sync.moments == "state" else "operands"
        every = {"mu": self.sync.every_mu, "nu_max": self.sync.every_nu_max}
        return sync_moments(
            phases,
            axis_name,
            mode=mode,
            every=every | ({"nu": self.sync.every_nu} if mode == "state" else {}),
            op={"nu_max": self.sync.max_op},
            algorithm=self.sync.algorithm,
        )


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimConfig):
    """Settings of AdamW (optax)."""

    short_name: ClassVar[str] = "adamw"

    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Number added to the denominator outside the root."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _decays(b1=self.b1, b2=self.b2)

    def scale(self, axis_name: str | None = None) -> "optax.GradientTransformation":
        """Makes the Adam transform from gradient to direction.

        The direction is the update before weight decay and learning rate. `axis_name`
        is not used.
        """
        del axis_name
        import optax

        return optax.scale_by_adam(self.b1, self.b2, self.eps)


@dataclass(frozen=True, kw_only=True)
class SGDConfig(OptimConfig):
    """Settings of stochastic gradient descent with momentum (optax)."""

    short_name: ClassVar[str] = "sgd"

    momentum: float = 0.9
    """Decay of the momentum; 0 for no momentum."""
    nesterov: bool = False
    """Whether to use Nesterov momentum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _decays(momentum=self.momentum)

    def scale(self, axis_name: str | None = None) -> "optax.GradientTransformation":
        """Makes the momentum transform from gradient to direction.

        The direction is the update before weight decay and learning rate. `axis_name`
        is not used.
        """
        del axis_name
        import optax

        return optax.trace(self.momentum, self.nesterov)


def _decays(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(
                f"optim.{name}={value} is not a decay. Allowed: 0 <= {name} < 1. "
                f"Set --optim.{name} to such a number."
            )


@renamed_fields(
    statistics_decay="beta_preconditioner", root_every="precondition_frequency"
)
@dataclass(frozen=True, kw_only=True)
class ShampooConfig(OptimConfig):
    """Settings of Shampoo with grafting (dtft.optim.shampoo).

    The left and right statistics of a block of a matrix are decayed sums of G G^T and
    G^T G over its gradients G. Each leaf's direction (its update before the learning
    rate) gets the norm of the direction that Max-AdaBelief gives the leaf: AdaBelief
    that divides by the largest second moment so far.
    """

    short_name: ClassVar[str] = "shampoo"

    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.999
    """Decay of Max-AdaBelief's second moment."""
    eps: float = 1e-16
    """Number added to Max-AdaBelief's denominator outside the root."""
    eps_root: float = 1e-16
    """Number added to Max-AdaBelief's second moment at every step."""
    beta_preconditioner: float = 0.999
    """Decay of the statistics, above 0; 1: the statistics are a plain sum."""
    exponent: float = 0.25
    """Exponent e: the left and right statistics are raised to the power -e."""
    root_eps: float = 1e-6
    """Number added to the statistics' eigenvalues, as a fraction of the largest one."""
    block_size: int = 256
    """Largest number of rows and columns of the blocks that matrices are cut into."""
    precondition_frequency: int = 10
    """Steps from one computation of the inverse roots to the next."""
    statistics_every: int = 1
    """Steps from one measurement of the statistics to the next."""
    wire: Literal["none", "full", "packed", "cholesky"] = "none"
    """`none`: statistics are of the mean gradient and are not sent. Otherwise each
    replica has statistics of its local gradient, which are exchanged as whole matrices
    (`full`), as triangles (`packed`) or as Cholesky factors (`cholesky`)."""
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype to which statistics are rounded when they are sent."""
    algorithm: Literal["native", "ring", "tree", "gather"] = "native"
    """All-reduce algorithm of gradients and statistics (dtft.collectives)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = {
            "b1": (0 < self.b1 < 1, "0 < b1 < 1"),
            "b2": (0 <= self.b2 < 1, "0 <= b2 < 1"),
            "beta_preconditioner": (
                0 < self.beta_preconditioner <= 1,
                "0 < beta_preconditioner <= 1",
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
        """False: an element's update depends on the other elements of its array."""
        return False

    @property
    def reduces_itself(self) -> bool:
        """Whether each replica has statistics of its own gradient, and exchanges them.

        True unless `wire` is "none".
        """
        return self.wire != "none"

    def check_mesh(self, tensor: int) -> None:
        """Checks that the optimizer works on a mesh whose axis `tensor` has this size.

        Raises:
            ValueError: statistics are exchanged (`wire` is not "none"), and `tensor` is
                above 1.
        """
        if self.reduces_itself and tensor > 1:
            raise ValueError(
                f"mesh.tensor={tensor} does not go together with optim.wire="
                f"{self.wire!r}. Allowed: 1 (mesh.fsdp may be more). Set --mesh.tensor "
                "1, or --optim.wire none."
            )

    def scale(self, axis_name: str | None = None) -> "optax.GradientTransformation":
        """Makes the Shampoo transform from gradient to direction.

        The direction is the update before weight decay and learning rate. With
        `axis_name`, the transform computes the direction from the mean of the gradients
        over this axis. Each replica computes statistics from its own gradient, and the
        replicas exchange the statistics over the axis.

        Raises:
            ValueError: `axis_name` is given, but statistics are not exchanged, because
                `wire` is "none".
        """
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
