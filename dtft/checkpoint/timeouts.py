"""Every deadline of a job in one value, checked so that they fit together.

Decides only numbers. Who waits for what, and what happens after, is not known here.
"""

from dataclasses import dataclass

SHORTEST_STEP_S = 3.0
"""Agents look at their trainers about every second."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Deadlines in seconds. Each wait that runs out names the late host."""

    lease: float = 5.0
    """A silent host is dead after this long (a closed connection: at once)."""
    connect: float = 5.0
    """Opening a connection to a peer or to the store."""
    step: float | None = None
    """A step of a trainer; one that takes longer is stuck. None: the larger of 10 s and
    20 times the median step, and `start` until 3 steps have been seen."""
    data: float = 60.0
    """Reading one step's rows."""
    evaluate: float = 60.0
    """Evaluating one batch after the last step."""
    save: float | None = None
    """Waiting for the last snapshot to be safe, and copying the next. None: 30 s more
    than `replicate`."""
    stage: float = 120.0
    """From one snapshot to the next; trainers that hang longer are restarted."""
    replicate: float = 30.0
    """From the first host's snapshot of a step to its commit."""
    restore: float = 60.0
    """Fetching and checking a slot's slices from peers."""
    start: float = 180.0
    """From starting trainers to their first finished step; also each compilation."""
    export: float = 300.0
    """One export to storage; it is given up after that, training goes on."""
    heartbeat: float = 10.0
    """JAX's heartbeat between trainers and the coordination service."""
    stop: float = 10.0
    """From Ctrl-C to the end of every process. A job that is late is ended by force;
    only if memory then holds a step that storage lacks, its export takes up to 10 s."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise ValueError(
                    f"timeouts.{name}={value} is not positive. "
                    f"Set --timeouts.{name} to a number of seconds above 0."
                )
        if self.lease < 2:
            raise ValueError(
                f"timeouts.lease={self.lease} is below 2 s, the shortest lease etcd "
                "grants. Set --timeouts.lease 2 or more."
            )
        if self.step is not None and self.step < SHORTEST_STEP_S:
            raise ValueError(
                f"timeouts.step={self.step} is below {SHORTEST_STEP_S:g} s, the "
                f"shortest that can be told from a pause of the machine. Set "
                f"--timeouts.step {SHORTEST_STEP_S:g} or more, or leave it out."
            )
        if self.restore >= self.start:
            raise ValueError(
                f"timeouts.restore={self.restore} must be below timeouts.start="
                f"{self.start}: a start includes a restore. Raise --timeouts.start."
            )
        if self.save is not None and self.save <= self.replicate:
            raise ValueError(
                f"timeouts.save={self.save} must be above timeouts.replicate="
                f"{self.replicate}: a save waits for the replication of the snapshot "
                "before. Raise --timeouts.save."
            )
        if self.step is not None and self.step >= self.stage:
            raise ValueError(
                f"timeouts.step={self.step} must be below timeouts.stage={self.stage}: "
                "from one snapshot to the next there is at least one step. Raise "
                "--timeouts.stage."
            )

    @property
    def save_limit(self) -> float:
        """The limit of a save in seconds."""
        return self.replicate + 30.0 if self.save is None else self.save
