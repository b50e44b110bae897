"""Every deadline of a job in one value, checked so that they fit together.

Decides only numbers. Who waits for what, and what happens after, is not known here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Deadlines in seconds. Each wait that runs out names the late host."""

    lease: float = 5.0
    """A silent host is dead after this long (a closed connection: at once)."""
    connect: float = 5.0
    """Opening a connection to a peer or to the store."""
    stage: float = 60.0
    """From one snapshot to the next; trainers that hang longer are restarted."""
    replicate: float = 30.0
    """From the first host's snapshot of a step to its commit."""
    restore: float = 60.0
    """Fetching and checking a slot's slices from peers."""
    start: float = 180.0
    """From starting trainers to their first finished step, compilation included."""
    export: float = 300.0
    """One export to storage; it is given up after that, training goes on."""
    heartbeat: float = 10.0
    """JAX's heartbeat between trainers and the coordination service."""
    stop: float = 10.0
    """From Ctrl-C to the end of every process."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(
                    f"timeouts.{name}={value} is not positive. "
                    f"Set --timeouts.{name} to a number of seconds above 0."
                )
        if self.lease < 2:
            raise ValueError(
                f"timeouts.lease={self.lease} is below 2 s, the shortest lease etcd "
                "grants. Set --timeouts.lease 2 or more."
            )
        if self.restore >= self.start:
            raise ValueError(
                f"timeouts.restore={self.restore} must be below timeouts.start="
                f"{self.start}: a start includes a restore. Raise --timeouts.start."
            )
