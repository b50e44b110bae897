"""The settings of one agent.

In a served job (`--serve-only`), whose processes the user starts, some settings are
known only once a process has attached to the agent (`seat_policy.Terms`).
"""

from dataclasses import dataclass, field
from pathlib import Path

from dtft.checkpoint.replication import Automatic, Cadence, Share
from dtft.checkpoint.timeouts import Timeouts
from dtft.checkpoint.transport import Tls
from dtft.elastic.assignment import SizeLimits
from dtft.elastic.seat_policy import LAUNCHED, SERVED, SeatPolicy

TURNS = 16
"""Number of formations of one world of JAX processes on CPU, where each formation uses
devices of its own; see `train.world`."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """One agent's settings.

    The model is not among them: the agent starts the trainer by a command line.
    """

    job: str
    """Name of the job, equal on all its hosts."""
    host: str
    """Name of this host, unique in the job."""
    store: str
    """Address of etcd as --store takes it, for messages."""
    secret: bytes
    """The job secret; it never leaves this process."""
    num_slots: int
    """Slots of the mesh at the start of the job; further hosts are spares."""
    sizes: SizeLimits = field(default_factory=SizeLimits)
    """Limits of the job's size when the job grows or shrinks."""
    trainer_command: tuple[str, ...]
    """Command line that starts a trainer; () if the user starts the trainers."""
    trainer_environment: dict[str, str] = field(default_factory=dict)
    """Variables added to the trainer's environment."""
    run_directory: Path
    """Directory of logs and events."""
    storage_directory: Path
    """Directory of the storage tier."""
    config_digest: str
    """Digest of the resolved config; if `served`, the flags that all agents must share.
    Equal on all hosts of a job."""
    arena_directory: Path = Path("/dev/shm")
    """Directory of the arenas, on a memory file system."""
    bind: str = "127.0.0.1:0"
    """host:port the transport listens on."""
    domain: str = ""
    """Label of this host's failure domains, such as "power=p1,rack=r7"; "" for none."""
    tls: Tls | None = None
    """This host's certificate for encrypted connections between hosts; None: no TLS."""
    nixl: bool = False
    """Whether slices are fetched over NIXL from peers that also have NIXL."""
    copies: int = 2
    """Requested number of copies of every slice."""
    share: Share = "full"
    """Which slices a host copies to its memory at a snapshot. "full": all its slices.
    "divided": only `copies` of the hosts that own a slice copy the slice, and these
    hosts change from snapshot to snapshot. More hosts copy a slice if its copies would
    otherwise be in too few failure domains."""
    cadence: Cadence = field(default_factory=Cadence)
    """Steps after which snapshots are taken. With `automatic`, `cadence.interval` is
    only the initial interval."""
    automatic: Automatic | None = None
    """Limits of an automatic snapshot interval; None for a fixed interval."""
    failure_budget: int = 2
    """Number of occurrences of the same exception or exit code that ends the job. A
    commit beyond the step of the last occurrence starts the count again."""
    last_step: int = 0
    """The last step of the job; 0 if only the trainers know it."""
    storage_interval: int = 50
    """Number of steps between two exports to storage; 0: steps are exported only on
    request and at the end of the job."""
    storage_keep: int = 3
    """Number of checkpoints that storage keeps."""
    chunk_bytes: int = 4 << 20
    """Bytes of a chunk, which has one digest."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """All deadlines, in seconds."""
    hot_swap: bool = False
    """Whether the trainers of other hosts keep their processes when a host is lost."""
    cpu_devices: int = 0
    """Number of CPU devices of every trainer: those of a slot, once for each of the
    `TURNS` assignments in which a trainer can keep its process. 0 if trainers have
    accelerators, or without `hot_swap`."""
    served: bool = False
    """Whether the trainers are processes that the user starts and that attach."""
    terms: str = ""
    """JSON of the `seat_policy.Terms` (settings) of the user's processes; "" if agents
    start the trainers, or if no process has attached yet."""

    @property
    def seats(self) -> SeatPolicy:
        """How the job fills slots and reacts when hosts and trainers join or end.

        Served jobs, whose trainers the user starts, have one policy; launched jobs,
        whose trainers the agents start, have another.
        """
        return SERVED if self.served else LAUNCHED

    @property
    def is_served_by_one(self) -> bool:
        """Whether one agent runs a JAX coordination service for all trainers.

        False with hot swap on CPU, where each trainer runs a service of its own, and in
        a job whose processes the user starts.
        """
        return self.seats.has_coordination_service and not self.cpu_devices

    @property
    def trainer_log(self) -> Path:
        """Log file of this host's trainers."""
        return self.run_directory / "logs" / f"{self.host}.trainer.log"

    @property
    def memory_directory(self) -> Path:
        """Directory of this host's copies (arenas), progress board and socket.

        Trainers, or the user's processes, connect to the agent through the socket.
        """
        return self.arena_directory / f"dtft-{self.job}-{self.host}"
