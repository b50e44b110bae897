"""Every timeout of a job in one value, checked for consistency.

This module holds only the numbers; the waits themselves are in other modules.
"""

from dataclasses import dataclass

SHORTEST_STEP_S = 3.0
"""Smallest allowed `Timeouts.step`, in seconds: agents check their trainers only about
once a second."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """All timeouts of a job, in seconds.

    Raises ValueError if a timeout is not positive, `lease` is below 2 s, or `step` is
    below `SHORTEST_STEP_S` (3 s). Also raises ValueError unless `restore` is below
    `start`, `save` above `replicate`, and `step` below `stage`.
    """

    lease: float = 5.0
    """Seconds of silence, or without a connection, after which a host counts as dead. A
    host whose connection was closed counts as dead at once if its port refuses
    connections."""
    connect: float = 5.0
    """Limit of opening a connection to another host, in seconds. Also how long a new
    leader waits for the registered hosts to connect."""
    step: float | None = None
    """Limit of one training step, in seconds; a trainer that takes longer counts as
    stuck. None: the larger of 10 s and 20 times the median step. Until 3 steps have
    finished, None means the limit `start`."""
    data: float = 60.0
    """Limit of reading the rows of one step, in seconds."""
    evaluate: float = 60.0
    """Limit of evaluating one batch after the last step, in seconds."""
    save: float | None = None
    """Limit of one save, in seconds. A save waits until the previous snapshot has all
    its copies on other hosts, and then copies the new snapshot. None: 30 s more than
    `replicate`."""
    stage: float = 120.0
    """Limit of the time from one snapshot to the next, in seconds for each step of the
    snapshot interval. Trainers that exceed the limit are restarted."""
    replicate: float = 30.0
    """Limit in seconds of sending the slices of a step to one peer, including retries.
    Then the host gives up sending the step."""
    restore: float = 60.0
    """Limit in seconds for a host to fetch its slices from peers and check them. Also
    the limit for a host to report its copies to the leader."""
    start: float = 180.0
    """Limit in seconds from the start of the trainers to the end of their first step;
    if no step is left, to the evaluation. Also the limit of each compilation, and of
    each wait of a trainer for its agent."""
    export: float = 300.0
    """Limit of one export (the write of a step to storage), in seconds. A late export
    is given up, and training continues."""
    drain: float = 20.0
    """Limit in seconds from a stop signal to an agent, such as SIGTERM, until another
    host has taken the slot of the agent's host. At the limit the agent ends, and the
    job loses its host."""
    heartbeat: float = 10.0
    """Heartbeat timeout of the JAX coordination service that several trainers share, in
    seconds. Not used on CPU, where each trainer has a service of its own."""
    stop: float = 10.0
    """Limit in seconds from Ctrl-C to the end of every process. At the limit, every
    process that still runs is killed. If memory then holds a newer step than storage,
    exporting that step takes up to 10 s more."""

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
        """The limit of one save in seconds: `save`; if unset, `replicate` + 30 s."""
        return self.replicate + 30.0 if self.save is None else self.save
