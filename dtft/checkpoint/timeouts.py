"""Every timeout of a job in one value, checked for consistency.

This module holds only the numbers; the waits themselves are in other modules.
"""

from dataclasses import dataclass

SHORTEST_STEP_S = 3.0
"""Lower limit of `Timeouts.step`: agents check their trainers about once a second."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts in seconds. The error of a timeout names the late host."""

    lease: float = 5.0
    """Silence after which a host counts as dead. A closed connection counts at once."""
    connect: float = 5.0
    """Opening a connection to a peer or to the store."""
    step: float | None = None
    """One training step; a trainer that takes longer counts as stuck. None: the larger
    of 10 s and 20 times the median step, and `start` until 3 steps have finished."""
    data: float = 60.0
    """Reading the rows of one step."""
    evaluate: float = 60.0
    """Evaluating one batch after the last step."""
    save: float | None = None
    """One save: waiting until the last snapshot is safe, and copying the next one.
    None: 30 s more than `replicate`."""
    stage: float = 120.0
    """From one snapshot to the next; trainers that exceed this limit are restarted."""
    replicate: float = 30.0
    """From the first host's snapshot of a step to the commit of the step."""
    restore: float = 60.0
    """Fetching a slot's slices from peers and checking the slices."""
    start: float = 180.0
    """From the start of the trainers to the end of their first step; also the limit of
    each compilation."""
    export: float = 300.0
    """One export to storage. A late export is given up, and training continues."""
    heartbeat: float = 10.0
    """JAX's heartbeat between trainers and the JAX coordination service."""
    stop: float = 10.0
    """From Ctrl-C to the end of every process. The processes of a late job are killed.
    If memory then holds a step that storage lacks, an export takes up to 10 s more."""

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
        """The limit of one save in seconds: `save`, or its default."""
        return self.replicate + 30.0 if self.save is None else self.save
