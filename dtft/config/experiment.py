"""The dataclass `Experiment`: model, data, optimizer, mesh and limits of a run.

Checks which values are allowed and whether they fit together. Does not import JAX.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from dtft.balance import Policy, Rules
from dtft.checkpoint.replication import Automatic, Cadence
from dtft.checkpoint.state import MAX_CHUNK_BYTES
from dtft.checkpoint.timeouts import Timeouts
from dtft.config.optimizers import OptimConfig
from dtft.data import DataConfig
from dtft.models.base import ModelConfig


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Settings of load balance: how a batch's microbatches are divided.

    A share is the number of microbatches that a replica takes in a step. Shares change
    while training, by measured step times.
    """

    policy: Annotated[
        Literal["off", "proportional", "exact"], arg(aliases=("--balance",))
    ] = "off"
    """`off`: equal rows for all replicas. `exact`: the shares with the shortest
    predicted step, changed only for a gain above the noise. `proportional`: replicas
    that wait for slower ones get more rows; shares may never converge."""
    microbatches: int = 0
    """Number of equal parts (microbatches) of a step's batch. Each replica takes some
    of the parts. Must divide data.global_batch; 0: the largest divisor of
    data.global_batch up to 64."""
    most: int = 0
    """Largest number of microbatches of a replica; 0 for four times an equal share.
    Every device has input buffers of this size."""
    every: int = 20
    """Number of steps of a round; shares may change at the end of a round."""
    probes: int = 5
    """Number of steps at the end of a round that are timed. At each of these steps the
    devices wait for the host."""
    patience: int = Rules.patience
    """Number of rounds in a row without a change of shares, and without a drift of
    speeds, after which the log calls the shares settled."""
    least_gain: float = Rules.least_gain
    """`exact`: shares change only to save more than this fraction of a step."""
    noise_factor: float = Rules.noise_factor
    """`exact`: shares change only if the saved fraction of a step exceeds this many
    relative standard errors of the measured times."""

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
        """Returns the rules by which `dtft.balance` changes shares under a policy.

        The rules have `policy` in place of this config's policy; the other values are
        the config's. They are the least gain for which shares change, as a fraction of
        a step (`least_gain`) and in standard errors of the measured times
        (`noise_factor`), and the number of rounds without a change of shares or a drift
        of speeds after which the shares count as settled (`patience`).
        """
        return Rules(
            policy=policy,
            least_gain=self.least_gain,
            noise_factor=self.noise_factor,
            patience=self.patience,
        )

    def is_probe(self, step: int) -> bool:
        """Whether step `step`, counted from 1, is timed.

        The last `probes` steps of each round of `every` steps are timed.

        >>> config = BalanceConfig(every=5, probes=2)
        >>> [step for step in range(1, 11) if config.is_probe(step)]
        [4, 5, 9, 10]
        """
        return (step - 1) % self.every >= self.every - self.probes

    def ends_round(self, step: int) -> bool:
        """Whether step `step`, counted from 1, ends a round of `every` steps.

        The shares of the batch may change only after such a step.
        """
        return step % self.every == 0


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How rows pass through the stages of a pipeline, if `mesh.stage` is above 1.

    The rows of a data slot (one of the `replica` x `fsdp` equal parts of a batch) are
    divided into `microbatches` parts. Each stage has `virtual_stages` chunks of
    neighbouring layers. The fraction of time in which a stage is idle is `(stages - 1)
    / (microbatches x virtual_stages + stages - 1)`.
    """

    microbatches: int = 4
    """Number of parts of a replica's rows, which pass the stages one after another."""
    schedule: Literal["gpipe", "circular"] = "gpipe"
    """`gpipe`: rows pass each stage once; `circular`: `virtual_stages` times."""
    virtual_stages: int = 1
    """Number of chunks of neighbouring layers of each stage: how often rows pass each
    stage. Above 1 only with `circular`."""
    layers: tuple[int, ...] = ()
    """Number of layers of each chunk, in the model's order; chunk c is on stage
    c % stages. Empty: equal numbers, or one more in the first chunks."""

    def __post_init__(self) -> None:
        for name in ("microbatches", "virtual_stages"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"pipeline.{name}={getattr(self, name)} is not positive. "
                    f"Set --pipeline.{name} to 1 or more."
                )
        if (self.schedule == "circular") != (self.virtual_stages > 1):
            raise ValueError(
                f"pipeline.schedule={self.schedule!r} does not go together with "
                f"pipeline.virtual_stages={self.virtual_stages}. Allowed: gpipe with "
                "1, circular with 2 or more. Set --pipeline.virtual_stages."
            )
        if any(number < 1 for number in self.layers):
            raise ValueError(
                f"pipeline.layers={self.layers} has a chunk without layers. Set "
                "--pipeline.layers to numbers of 1 or more."
            )

    def chunks(self, stages: int, num_layers: int) -> tuple[int, ...]:
        """Returns the number of layers of each chunk; chunk c is on stage c % stages.

        A chunk is a series of neighbouring layers on one stage; each stage has
        `virtual_stages` chunks.

        Args:
            stages: number of stages of the mesh.
            num_layers: number of layers of the model.

        Raises:
            ValueError: the layers cannot be divided into these chunks.

        >>> PipelineConfig().chunks(stages=3, num_layers=8)
        (3, 3, 2)
        """
        count = stages * self.virtual_stages
        if num_layers < count:
            raise ValueError(
                f"mesh.stage={stages} x pipeline.virtual_stages={self.virtual_stages} "
                f"is more than the model's {num_layers} layers. Set --mesh.stage or "
                "--pipeline.virtual_stages lower, or use a model with more layers."
            )
        if not self.layers:
            each, more = divmod(num_layers, count)
            return (each + 1,) * more + (each,) * (count - more)
        if len(self.layers) != count or sum(self.layers) != num_layers:
            raise ValueError(
                f"pipeline.layers={self.layers} does not share out the model's "
                f"{num_layers} layers. Allowed: {count} numbers (mesh.stage x pipeline."
                f"virtual_stages) with the sum {num_layers}. Set --pipeline.layers."
            )
        return self.layers

    def row_parts(self, stages: int) -> int:
        """Returns the number by which the rows of a data slot must be divisible.

        The result is the least common multiple of `microbatches` and `stages`. A data
        slot is one of the `replica` x `fsdp` equal parts of a batch.

        >>> PipelineConfig(microbatches=4).row_parts(stages=6)
        12
        """
        return math.lcm(self.microbatches, stages)

    def check_rows(self, stages: int, rows: int) -> None:
        """Checks that the rows of a data slot can be divided into equal microbatches.

        After the layers, the rows are also divided equally between the stages. A data
        slot is one of the `replica` x `fsdp` equal parts of a batch.

        Args:
            stages: number of stages of the mesh.
            rows: number of rows of a data slot.

        Raises:
            ValueError: `microbatches` or `stages` does not divide `rows`; or, with the
                schedule `circular`, `stages` does not divide `microbatches`.
        """
        if self.schedule == "circular" and self.microbatches % stages:
            raise ValueError(
                f"pipeline.microbatches={self.microbatches} is not a multiple of "
                f"mesh.stage={stages}, but circular rounds are of so many. Set "
                f"--pipeline.microbatches {-(-self.microbatches // stages) * stages}, "
                "or --pipeline.schedule gpipe."
            )
        parts = {"pipeline.microbatches": self.microbatches, "mesh.stage": stages}
        for name, number in parts.items():
            if rows % number:
                raise ValueError(
                    f"{name}={number} does not divide the {rows} rows that each "
                    "replica has (data.global_batch / (mesh.replica x mesh.fsdp)). Set "
                    f"--{name} to a divisor of them, or change --data.global_batch."
                )


PlanFlag = Annotated[str, arg(aliases=("--mesh",))]
"""Type of `Experiment.plan`, with `--mesh` as a second name of its flag `--plan`."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes, slowest-varying axis first.

    One size other than `stage` may be -1. It is replaced by the size with which the
    mesh uses all devices.
    """

    replica: int = -1
    """Copies of the model, each on its part of the batch; -1: all remaining devices."""
    stage: int = 1
    """Number of pipeline stages. The keys of `pipeline` say how the model's layers are
    divided between the stages."""
    fsdp: int = 1
    """Number of parts that the state and each replica's rows are divided into."""
    tensor: int = 1
    """Number of parts that the last dimension of matrices is divided into; a dimension
    whose size is no multiple of this number is not divided."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1 and value != -1:
                raise ValueError(
                    f"mesh.{name}={value} is not a size. Allowed: 1 or more, or -1 "
                    f"for what is left of the devices. Set --mesh.{name}."
                )
        if list(vars(self).values()).count(-1) > 1:
            raise ValueError(
                f"mesh={vars(self)} leaves more than one size open. "
                "Set all but one to 1 or more."
            )
        if self.stage == -1:
            raise ValueError(
                "mesh.stage=-1: what a stage has decides the state's shape, so it does "
                "not follow from the devices. Set --mesh.stage to 1 or more."
            )

    @property
    def num_data_slots(self) -> int:
        """Number of parts that the batch is divided into: replica x fsdp.

        The mesh must have no size -1.
        """
        return self.replica * self.fsdp


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Numbers of hosts and devices, and how a job reacts to lost hosts and errors.

    Spare hosts are not part of these numbers.
    """

    hosts: int = 1
    """Number of slots: hosts that train at the same time."""
    devices_per_host: int = 1
    """Number of devices of each host; -1: all its devices (accelerators only)."""
    min_replicas: int = 0
    """Fewest replicas with which the job continues when hosts are lost and no spare is
    left; 0: the job waits for a host."""
    hot_swap: bool = True
    """Whether the trainers of other hosts keep their processes when a host is lost
    (CPU and GPU; not TPU); False: all trainers restart."""
    failure_budget: int = 2
    """The job ends when the same exception or exit code has occurred this many times,
    without a commit of a later step in between."""

    def __post_init__(self) -> None:
        if self.failure_budget < 1:
            raise ValueError(
                f"cluster.failure_budget={self.failure_budget} is below 1. Allowed: 1 "
                "or more; 1 ends the job at the first exception. Set "
                "--cluster.failure_budget."
            )
        if self.min_replicas < 0:
            raise ValueError(
                f"cluster.min_replicas={self.min_replicas} is negative. Set "
                "--min-replicas 1 or more, or 0 to wait for a host."
            )
        if self.hosts < 1:
            raise ValueError(
                f"cluster.hosts={self.hosts} is not positive. Set --cluster.hosts 1 "
                "or more."
            )
        if self.devices_per_host < 1 and self.devices_per_host != -1:
            raise ValueError(
                f"cluster.devices_per_host={self.devices_per_host} is not a number of "
                "devices. Allowed: 1 or more, or -1 for all of the host's."
            )


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """When training ends: at a step, or earlier if a metric has ceased to improve."""

    steps: int = 1000
    """Last step of the training."""
    metric: str = ""
    """Training metric whose plateau ends the run, such as `loss`; empty: no metric."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger value of the metric is better."""
    patience: int = 100
    """Number of steps without improvement that count as a plateau."""
    min_delta: float = 0.0
    """Only an improvement of the metric that is larger than this counts."""

    def __post_init__(self) -> None:
        for name in ("steps", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"stop.{name}={getattr(self, name)} is not positive. "
                    f"Set --stop.{name} to 1 or more."
                )
        if self.min_delta < 0:
            raise ValueError(
                f"stop.min_delta={self.min_delta} is negative. Set --stop.min_delta "
                "to 0 or more."
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Settings of both checkpoint tiers: memory of the hosts, and storage."""

    copies: int = 2
    """Number of hosts that keep a copy of each slice (part of the state); with 2 the
    state survives the loss of any one host."""
    share: Literal["full", "divided"] = "full"
    """Slices that a host copies to its memory at a snapshot. `full`: all slices of its
    devices. `divided`: copies/d of the slices that d replicas have; a restart fetches
    the other slices from other hosts."""
    interval: int | Literal["auto"] = 1
    """Steps from one snapshot in memory to the next; `auto`: as few as the stall budget
    allows, from costs that are measured while the job runs."""
    stall_budget: float = Automatic.budget
    """With interval=auto: fraction of the wall time that snapshots may cost."""
    max_interval: int = Automatic.maximum
    """With interval=auto: most steps between snapshots. Every step whose number is a
    multiple of it has a snapshot, and a plateau of stop.metric ends the run only at
    such a step."""
    storage_interval: int = 50
    """Steps from one checkpoint in storage to the next; 0: only the last step."""
    storage_keep: int = 3
    """Number of checkpoints that storage keeps."""
    storage_directory: str = ""
    """Absolute path of the checkpoints in storage, on a file system that every host has
    mounted there; empty for `checkpoints` in the run directory."""
    arena_directory: str = "/dev/shm"
    """Directory of the copies in memory; must be on a memory file system."""
    chunk_bytes: int = 4 * 2**20
    """Bytes of a chunk: a piece of a slice that has one digest. At most 256 MiB."""

    def __post_init__(self) -> None:
        for name in ("copies", "interval", "storage_keep", "chunk_bytes"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise ValueError(
                    f"checkpoint.{name}={getattr(self, name)} is not positive. "
                    f"Set --checkpoint.{name} to 1 or more."
                )
        if self.chunk_bytes > MAX_CHUNK_BYTES:
            raise ValueError(
                f"checkpoint.chunk_bytes={self.chunk_bytes} is more than a host can "
                "fetch from another. Set --checkpoint.chunk_bytes to at most "
                f"{MAX_CHUNK_BYTES}."
            )
        interval = 1 if self.interval == "auto" else self.interval
        if self.storage_interval < 0 or self.storage_interval % interval:
            raise ValueError(
                f"checkpoint.storage_interval={self.storage_interval} is not a "
                f"multiple of checkpoint.interval={self.interval}: storage gets "
                "snapshots. Set --checkpoint.storage_interval to a multiple, or 0."
            )
        if self.storage_directory and not Path(self.storage_directory).is_absolute():
            raise ValueError(
                f"checkpoint.storage_directory={self.storage_directory!r} is not an "
                "absolute path, and hosts may start in other directories. Allowed: an "
                "absolute path in a file system, or empty for `checkpoints` in the run "
                "directory. Set --checkpoint.storage_directory."
            )
        self._check_automatic()

    def _check_automatic(self) -> None:
        try:
            allowed = Automatic(budget=self.stall_budget, maximum=self.max_interval)
        except ValueError as error:
            raise ValueError(
                f"checkpoint.stall_budget={self.stall_budget}, checkpoint.max_interval="
                f"{self.max_interval}: {error}"
            ) from None
        if self.interval != "auto" and allowed != Automatic():
            raise ValueError(
                f"checkpoint.interval={self.interval} is fixed, so checkpoint."
                "stall_budget and checkpoint.max_interval have no effect. Set "
                "--checkpoint.interval auto, or leave them out."
            )

    def storage_path(self, run_directory: Path) -> Path:
        """Returns the absolute directory of the storage tier.

        It is `storage_directory`, or if this is empty `checkpoints` in `run_directory`.
        """
        if self.storage_directory:
            return Path(self.storage_directory)
        return run_directory.resolve() / "checkpoints"

    @property
    def automatic(self) -> Automatic | None:
        """Limits within which interval=auto chooses the interval of snapshots.

        They are the fraction of the wall time that snapshots may cost (`stall_budget`)
        and the most steps between snapshots (`max_interval`). None if the interval is
        fixed.
        """
        if self.interval != "auto":
            return None
        return Automatic(budget=self.stall_budget, maximum=self.max_interval)

    @property
    def cadence(self) -> Cadence:
        """The rule that says after which steps a starting job takes snapshots.

        With interval=auto the job takes a snapshot after every step at first. Once it
        has measured how many seconds of training a snapshot costs, it computes a longer
        interval.
        """
        if self.interval == "auto":
            return Cadence(interval=1, period=self.max_interval)
        return Cadence.every(self.interval)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Settings of log lines and log files."""

    every: int = 10
    """Steps from one log line to the next."""
    tensorboard: bool = True
    """Whether to write a TensorBoard directory."""
    sample_ids: bool = False
    """Whether each slot records the samples that it used at each step."""
    run_dir: str = ""
    """Run directory; empty for runs/<name>-<start time>."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(
                f"log.every={self.every} is not positive. Set --log.every 1 or more."
            )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All settings of a run."""

    name: str
    """Name of the run; part of the run directory's name."""
    seed: int = 0
    """Seed of the initial parameters and of the order of the data."""
    model: ModelConfig
    """The model; any subclass of ModelConfig."""
    data: DataConfig
    """The data; any subclass of DataConfig."""
    optim: OptimConfig
    """The optimizer; any subclass of OptimConfig."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Sizes of the mesh axes. In a config file this may also be `"auto"` or a `.json`
    path, which then sets `plan`."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """How rows pass through the pipeline stages."""
    plan: PlanFlag = ""
    """Instead of `mesh`: `auto` for the best plan that the planner finds, or the path
    of a plan file (`dtft plan --json`). The plan is chosen once and recorded in
    checkpoints; for another number of devices `auto` chooses again. A running job
    changes only its number of replicas: if `auto` finds other axes, the job keeps its
    size."""
    calibration: str = ""
    """File of `dtft calibrate --out` on devices of the same type, for `plan=auto`."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Numbers of hosts and devices."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """Uneven shares of the batch for replicas of different speed."""
    stop: StopConfig = field(default_factory=StopConfig)
    """Settings for the end of training."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Settings of checkpoints in the hosts' memory and in storage."""
    log: LogConfig = field(default_factory=LogConfig)
    """Settings of log lines and log files."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """Deadlines of a job's hosts and trainers, in seconds."""

    def __post_init__(self) -> None:
        self._read_mesh(self.mesh)
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(
                f"name={self.name!r} cannot name a directory. Allowed: a non-empty "
                "text without '/' that does not start with '.'. Set --name."
            )
        if not 0 <= self.seed < 2**31:
            raise ValueError(
                f"seed={self.seed} is out of range. Allowed: 0 <= seed < 2**31. "
                "Set --seed."
            )
        self._check_pipeline()
        self._check_plan()
        self._check_balance()

    def _read_mesh(self, mesh: object) -> None:
        """Moves a text in `mesh`, such as "auto", to `plan`; checks the type of `mesh`.

        Raises:
            ValueError: `mesh` is neither a MeshConfig nor the text of a plan, or both
                `mesh` and `plan` name a plan, and the names differ.
        """
        if isinstance(mesh, MeshConfig):
            return
        if not (isinstance(mesh, str) and (mesh == "auto" or mesh.endswith(".json"))):
            raise ValueError(
                f"mesh={mesh!r} is no mesh. Allowed: MeshConfig(...), 'auto' for the "
                "planner's, or the path of a plan file, which ends in .json (others: "
                "plan='FILE')."
            )
        if self.plan not in ("", mesh):
            raise ValueError(
                f"mesh={mesh!r} and plan={self.plan!r} name two plans. Leave one out."
            )
        object.__setattr__(self, "plan", mesh)  # the dataclass is frozen
        object.__setattr__(self, "mesh", MeshConfig())

    def _check_pipeline(self) -> None:
        if self.mesh.stage == 1 and self.pipeline != PipelineConfig():
            usual = vars(PipelineConfig())
            given = [it for it in vars(self.pipeline).items() if it[1] != usual[it[0]]]
            text = " and ".join(f"pipeline.{name}={value!r}" for name, value in given)
            raise ValueError(
                f"{text}: no effect with mesh.stage=1. Set --mesh.stage 2 or "
                "more, or leave --pipeline.* out."
            )

    def _check_plan(self) -> None:
        if self.plan and self.mesh != MeshConfig():
            raise ValueError(
                f"plan={self.plan!r} decides the mesh, but mesh={vars(self.mesh)} is "
                "set, too. Leave --mesh.* out, or set --plan ''."
            )
        if self.plan and self.optim.reduces_itself:
            raise ValueError(
                f"plan={self.plan!r}: replicas that exchange moments themselves "
                "(optim.sync) are not planned. Set --plan '' or leave optim.sync out."
            )
        if self.plan and self.balance.policy != "off":
            raise ValueError(
                f"plan={self.plan!r} divides the batch equally, but balance.policy="
                f"{self.balance.policy!r} does not. Set --plan '', or --balance off."
            )
        if self.calibration and self.plan != "auto":
            raise ValueError(
                f"calibration={self.calibration!r} is for plan='auto', but plan="
                f"{self.plan!r}. Set --plan auto, or leave --calibration out."
            )

    def _check_balance(self) -> None:
        if self.balance.policy != "off" and self.optim.reduces_itself:
            raise ValueError(
                f"balance.policy={self.balance.policy!r}: replicas whose optimizer "
                "communicates by itself (optim.sync.moments, optim.wire) take equal "
                "shares. Set --balance off, or these options to none."
            )
