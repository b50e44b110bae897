"""The settings of an agent's job, made once by the command line."""

from dataclasses import dataclass, field
from pathlib import Path

from dtft.checkpoint.replication import Automatic, Cadence, Share
from dtft.checkpoint.timeouts import Timeouts
from dtft.checkpoint.transport import Tls
from dtft.elastic.assignment import SizeLimits
from dtft.elastic.seat_policy import LAUNCHED, SERVED, SeatPolicy


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """One agent's settings. It names no model: the trainer is a command line."""

    job: str
    """Name of the job; hosts of one job share it."""
    host: str
    """Name of this host, unique in the job."""
    store: str
    """host:port of etcd."""
    secret: bytes
    """The job secret; it never leaves this process."""
    num_slots: int
    """Slots of the mesh at the start of the job; further hosts are spares."""
    sizes: SizeLimits = field(default_factory=SizeLimits)
    """What the job's size must obey when it grows or shrinks."""
    trainer_command: tuple[str, ...]
    """Command line that starts a trainer."""
    trainer_environment: dict[str, str] = field(default_factory=dict)
    """Variables added to the trainer's environment."""
    run_directory: Path
    """Logs, events and, below `checkpoints`, the storage tier."""
    config_digest: str
    """Digest of the resolved config; all hosts of a job must agree on it."""
    arena_directory: Path = Path("/dev/shm")
    """Where the arenas lie: a memory file system."""
    bind: str = "127.0.0.1:0"
    """host:port the transport listens on."""
    domain: str = ""
    """Label of this host's failure domains: "power=p1,rack=r7", or nothing."""
    tls: Tls | None = None
    """This host's certificate: connections between hosts are encrypted."""
    nixl: bool = False
    """Whether fetches go over NIXL where the peer has it too."""
    copies: int = 2
    """Copies every slice shall have."""
    share: Share = "full"
    """Whether each host copies all its slices at a commit, or copies/d of them."""
    cadence: Cadence = field(default_factory=Cadence)
    """After which steps snapshots are taken; at first, if that is automatic."""
    automatic: Automatic | None = None
    """Within which bounds the interval follows from what snapshots cost; None: not."""
    failure_budget: int = 2
    """So often may one exception come at the same step; the last ends the job."""
    last_step: int = 0
    """The step after which the job is done; 0 if only its trainers know."""
    storage_interval: int = 50
    """Steps from one export to storage to the next."""
    storage_keep: int = 3
    """Checkpoints that storage keeps."""
    chunk_bytes: int = 4 << 20
    """Bytes under one digest."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """All deadlines, in seconds."""
    served: bool = False
    """The trainers are the user's own processes, which attach."""
    terms: str = ""
    """JSON of what the user's processes have agreed on; "" where agents start them."""
    storage: Path | None = None
    """The storage tier, if it is not below the run directory."""

    @property
    def seats(self) -> SeatPolicy:
        """Who fills the slots, and what follows from what trainers do."""
        return SERVED if self.served else LAUNCHED

    @property
    def storage_directory(self) -> Path:
        """The storage tier."""
        return self.storage or self.run_directory / "checkpoints"

    @property
    def trainer_log(self) -> Path:
        """What the trainers of this host write."""
        return self.run_directory / "logs" / f"{self.host}.trainer.log"

    @property
    def memory_directory(self) -> Path:
        """This host's arena, board and socket; its memory, so to speak."""
        return self.arena_directory / f"dtft-{self.job}-{self.host}"
