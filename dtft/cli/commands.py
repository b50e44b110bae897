"""The commands: the flags of each, and the module that does its work.

A command is a value. Its fields are its flags, their docstrings its help; tyro reads it
from a command line (`dtft/cli/dispatch.py`). Where `run` takes words, these are what
the command itself does not know, such as keys of the config: what it calls reads them.
Imports nothing heavy, so that help is fast: `run` imports what it calls.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg


def _hint(default: str) -> str:
    """The help text of a default; empty if the flag is optional without a value."""
    return "" if default in ("", "''", "None") else f"(default: {default})"


def _told(metavar: str, **how: Any) -> Any:
    """How a flag is shown, where the type of its field does not say it."""
    return arg(metavar=metavar, help_behavior_hint=_hint, **how)


_CONFIG_HELP = (
    "Path, or name: one in ./configs, or one that comes with dtft. Every key of it is "
    "a flag, too; --help after CONFIG lists them."
)
_Config = Annotated[Positional[str], _told("CONFIG", help=_CONFIG_HELP)]
_File = Annotated[str, _told("FILE")]
_Count = Annotated[int, _told("N")]
_CountOrNone = Annotated[int | None, _told("N")]
_Seconds = Annotated[float, _told("S")]
_Switch = Annotated[bool, arg(help_behavior_hint="")]
_Texts = UseAppendAction[tuple[str, ...]]


def _check_counts(**counts: int | None) -> None:
    """Refuses counts below 0; the error names the flag."""
    for name, count in counts.items():
        if count is not None and count < 0:
            raise ValueError(
                f"--{name.replace('_', '-')} {count}: Allowed: a whole number, 0 or "
                "more."
            )


# ------------------------------------------------------- flags of several commands


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Keys of the config that have a flag of their own."""

    hosts: _CountOrNone = None
    """Slots: hosts that train at the same time (cluster.hosts)."""
    run_dir: Annotated[str, _told("DIR")] = ""
    """Run directory; an old one is resumed (log.run_dir)."""
    min_replicas: Annotated[int | None, _told("B")] = None
    """Go on with B replicas when hosts are lost; without, the job waits for a host."""

    def __post_init__(self) -> None:
        _check_counts(min_replicas=self.min_replicas)

    def keys(self) -> list[str]:
        """The flags as keys of the config, for any process that loads the config."""
        words: list[str] = []
        if self.hosts is not None:
            words += ["--cluster.hosts", str(self.hosts)]
        if self.run_dir:
            words += ["--log.run_dir", self.run_dir]
        if self.min_replicas is not None:
            words += ["--cluster.min_replicas", str(self.min_replicas)]
        return words


@dataclass(frozen=True, kw_only=True)
class HostFlags:
    """What every host of a job is told."""

    domain_file: _File = ""
    """Lines: HOST power=NAME rack=NAME."""
    tls_cert: _File = ""
    """PEM file: connections between hosts are encrypted."""
    tls_key: _File = ""
    """PEM file: the private key of --tls-cert."""
    nixl: _Switch = False
    """Fetch with NIXL (RDMA) where both hosts have it."""


@dataclass(frozen=True, kw_only=True)
class PlaceFlags:
    """Which host this is."""

    host_name: Annotated[str | None, _told("NAME")] = None
    """Name of the host; without, this machine's name and the process's number."""
    domain: Annotated[str, _told("power=NAME,rack=NAME")] = ""
    """Where the host is."""
    bind: Annotated[str, _told("HOST:PORT")] = "127.0.0.1:0"
    """Where it listens for other hosts."""


@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """A job, its etcd, and the secret that its hosts share."""

    name: Annotated[str, _told("NAME", name="job")]
    """Name of the job."""
    store: Annotated[str, _told("HOST:PORT,...")]
    """Its etcd; several members with commas between."""
    store_ca: _File = ""
    """PEM file that signed etcd's certificate: use TLS."""
    store_cert: _File = ""
    """PEM file: the client's certificate, if etcd asks for one."""
    store_key: _File = ""
    """PEM file: the private key of --store-cert."""
    store_user: Annotated[str, _told("NAME")] = ""
    """User of etcd."""
    store_password_file: _File = ""
    """Its first line is the user's password."""
    store_prefix: Annotated[str, _told("P")] = ""
    """Every key lies below P; without, /dtft."""
    store_private: _Switch = False
    """Only dtft uses this etcd: compact its history."""
    secret_file: _File = ""
    """The job's secret; without, $DTFT_SECRET_FILE."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Which checkpoints: of a directory, or of a live job."""

    directory: Annotated[Positional[str], _told("DIR")] = ""
    """Storage or run directory."""
    job: OmitArgPrefixes[JobFlags] = field(
        default_factory=lambda: JobFlags(name="", store="")
    )
    json: _Switch = False
    """Print JSON."""


_Run = Annotated[OmitArgPrefixes[RunFlags], arg(name="run")]
_Host = OmitArgPrefixes[HostFlags]
_Place = OmitArgPrefixes[PlaceFlags]
_Job = OmitArgPrefixes[JobFlags]
_Checkpoints = OmitArgPrefixes[CheckpointFlags]


# ------------------------------------------------------------------- one machine


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """One process, all local devices, no memory tier."""

    config: _Config
    run_dir: Annotated[str, _told("DIR")] = ""
    """Run directory; an old one is resumed (log.run_dir)."""

    def run(self, words: list[str]) -> int:
        """Trains."""
        from dtft.train import train

        return train(self.config, [*words, *RunFlags(run_dir=self.run_dir).keys()])


@dataclass(frozen=True, kw_only=True)
class ConfigCommand:
    """Print the resolved config."""

    config: _Config

    def run(self, words: list[str]) -> int:
        """Prints it as JSON."""
        from dtft.config import load_experiment, to_json

        print(to_json(load_experiment(self.config, words, "dtft config")))
        return 0


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """A local cluster: etcd, agents, trainers."""

    config: _Config
    run_flags: _Run = field(default_factory=RunFlags)
    spares: _Count = 0
    """Hosts that wait."""
    host: _Host = field(default_factory=HostFlags)
    tls: _Switch = False
    """Encrypt, with a certificate that is made for this job."""

    def __post_init__(self) -> None:
        _check_counts(spares=self.spares)

    def run(self, words: list[str]) -> int:
        """Starts the cluster, and waits for its end."""
        from dtft.cli.jobs import launch

        return launch(self, words)


_FAULTS = (
    "May be repeated. kill-host:SLOT, kill-trainer:SLOT, kill-leader, kill-store, "
    "corrupt:SLOT, all with @STEP[:PHASE]; stop-agent:SLOT, stop-host:SLOT, "
    "stop-trainer:SLOT, cut:SLOT, all with @STEP[:SECONDS], for ever without seconds; "
    "cut:SLOT@STEP:REACH with REACH all, store, out, in, or pair with two slots "
    "(network namespaces: needs root); of stops and cuts SLOT may be leader or "
    "follower: who is it then; "
    "pause-store@STEP:SECONDS; empty-store@STEP; crash-store@STEP (its supervisor "
    "starts it again); fail:SLOT@STEP[:always] (an exception in the step); "
    "scale:REPLICAS@STEP. Slots: 0+2 hits two at once."
)


@dataclass(frozen=True, kw_only=True)
class DrillCommand:
    """Kill real processes and compare with an undisturbed run."""

    config: _Config
    run_flags: _Run = field(default_factory=RunFlags)
    spares: _Count = 0
    """Hosts that wait."""
    host: _Host = field(default_factory=HostFlags)
    fault: Annotated[_Texts, _told("KIND:SLOT@STEP", help=_FAULTS)] = ()
    deadline: _Seconds = 600.0
    """The run with faults must end within S seconds."""
    host_memory: Annotated[_Texts, _told("HOST=MIB")] = ()
    """Memory for arenas of one host; may be repeated."""
    rejoin: Annotated[float | None, _told("S")] = None
    """Killed hosts return after S seconds, new ones come for those held for ever."""
    seed: _Count = 0
    """Of the moment in a step."""
    control: Annotated[str, _told("DIR")] = ""
    """Reuse the undisturbed run in DIR."""
    json: _File = ""
    """Write the record here."""

    def __post_init__(self) -> None:
        _check_counts(spares=self.spares)

    def run(self, words: list[str]) -> int:
        """Runs the drill."""
        from dtft.drills import run_drill

        return run_drill(self, words)


@dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Wall time per step, memory tier off and on.

    How fast slices are fetched: bench transport.
    """

    config: _Config
    run_flags: _Run = field(default_factory=RunFlags)
    rounds: _Count = 3
    """Runs with the tier off and on, in turn."""
    json: _File = ""
    """Write the figures here."""

    def run(self, words: list[str]) -> int:
        """Measures."""
        from dtft.drills import run_bench

        return run_bench(self, words)


@dataclass(frozen=True, kw_only=True)
class BenchTransportCommand:
    """How fast slices are fetched, against raw sockets."""

    json: _File = ""
    """Write the figures here."""

    def run(self, words: list[str]) -> int:
        """Measures what the words say: fields of `TransportBench`."""
        import json
        from pathlib import Path

        import tyro

        from dtft.checkpoint.transport import TransportBench, bench_transport

        prog = "dtft bench transport"
        figures = bench_transport(tyro.cli(TransportBench, args=words, prog=prog))
        if self.json:
            Path(self.json).write_text(json.dumps(figures, indent=1) + "\n")
        return 0


# ------------------------------------------------------------------- many machines


@dataclass(frozen=True, kw_only=True)
class AgentCommand:
    """One host of a job; start one per machine.

    Without a trainer, as memory for your own processes: agent --serve-only.
    """

    config: _Config
    run_flags: _Run = field(default_factory=RunFlags)
    job: _Job
    place: _Place = field(default_factory=PlaceFlags)
    host: _Host = field(default_factory=HostFlags)

    def run(self, words: list[str]) -> int:
        """Runs the agent and its trainers until the job ends."""
        from dtft.cli.jobs import run_agent

        return run_agent(self, words)


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Memory for the processes of your own loop.

    Keeps every step of a jax.distributed job in the memory of its hosts. Start one per
    process of the job, and more as spares; they outlive the processes. In the job, in
    every process:

        manager = dtft.checkpoint.ReplicatedCheckpointManager(directory)

    A process uses the only free agent of its machine, or the one that DTFT_AGENT_SOCKET
    names (the agent's first line says how). When a host is lost: start an agent in its
    place, if there is no spare, and restart all processes; the newest step comes from
    the memory of the hosts that are left. SIGTERM ends an agent and frees its memory.

    Must be the same on every host: --copies N (of every slice; 2), --arena_directory
    DIR (a memory file system; /dev/shm), --timeouts.NAME SECONDS. Directory, intervals
    and retention of the storage tier are those of the first process
    (ReplicatedOptions).
    """

    hosts: _CountOrNone = None
    """Refuse jobs of another size."""
    run_dir: Annotated[str, _told("DIR")] = ""
    """Logs and events; without, runs/NAME."""
    job: _Job
    place: _Place = field(default_factory=PlaceFlags)
    host: _Host = field(default_factory=HostFlags)

    def run(self, words: list[str]) -> int:
        """Serves until it is told to end."""
        from dtft.cli.jobs import serve

        return serve(self, words)


@dataclass(frozen=True, kw_only=True)
class ScaleCommand:
    """More or fewer replicas for a live job."""

    replicas: Annotated[int, _told("T")]
    """Replicas that shall train."""
    timeout: _Seconds = 600.0
    """Seconds in which it must be done."""
    json: _Switch = False
    """Print JSON."""
    job: _Job

    def run(self) -> int:
        """Scales it."""
        from dtft.cli import jobs

        return jobs.run(self)


# -------------------------------------------------------------------- checkpoints


@dataclass(frozen=True, kw_only=True)
class CheckpointLsCommand:
    """Steps, sizes, holders, copies, health."""

    source: _Checkpoints = field(default_factory=CheckpointFlags)

    def run(self) -> int:
        """Prints the steps."""
        from dtft.cli import checkpoint

        return checkpoint.ls(self.source)


@dataclass(frozen=True, kw_only=True)
class CheckpointShowCommand:
    """The leaves of a step, or the holders of its slices."""

    source: _Checkpoints = field(default_factory=CheckpointFlags)
    step: _CountOrNone = None
    """Step; without, the newest."""

    def run(self) -> int:
        """Prints the leaves, or the holders of the slices."""
        from dtft.cli import checkpoint

        return checkpoint.show(self.source, self.step)


@dataclass(frozen=True, kw_only=True)
class CheckpointVerifyCommand:
    """Read everything again and compare digests; of a live job all hosts' copies."""

    source: _Checkpoints = field(default_factory=CheckpointFlags)
    step: _CountOrNone = None
    """Step of DIR; without, all of them."""
    rate: Annotated[int, _told("BYTES_PER_S")] = 0
    """Of a live job: bytes a second that each host may read; 0 for no limit."""
    timeout: _Seconds = 600.0
    """Of a live job: seconds that a host may take, beside those that --rate needs."""

    def run(self) -> int:
        """Reads it.

        Raises:
            ValueError: --rate is below 0, or --timeout is not above 0.
        """
        from dtft.cli import checkpoint

        _check_counts(rate=self.rate)
        if not self.timeout > 0:
            raise ValueError(
                f"--timeout {self.timeout}: Allowed: seconds, above 0. Reading a "
                "host's copies takes about a second for each GB."
            )
        return checkpoint.verify(self.source, self.step, self.rate, self.timeout)


@dataclass(frozen=True, kw_only=True)
class CheckpointExportCommand:
    """Write a live job's newest commit; or copy a stored step."""

    source: _Checkpoints = field(default_factory=CheckpointFlags)
    step: _CountOrNone = None
    """Step of DIR; without, the newest."""
    to: Annotated[str, _told("DIR")] = ""
    """Where the step of DIR is copied to."""

    def run(self) -> int:
        """Writes it."""
        from dtft.cli import checkpoint

        return checkpoint.export(self.source, self.step, self.to)


@dataclass(frozen=True, kw_only=True)
class CheckpointOddsCommand:
    """How likely several losses are survived."""

    hosts: _Count
    """Hosts of the job."""
    copies: _Count = 2
    """Copies of every slice."""

    def run(self) -> int:
        """Prints a table."""
        from dtft.checkpoint.replication import odds_table

        print(odds_table(self.hosts, self.copies))
        return 0


# -------------------------------------------------------------------------- plans


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """How to shard a config on a cluster, how fast it is, whether it fits.

    For a table of layouts: plan predict.
    """

    config: _Config
    cluster: Annotated[str | None, _told("SPEC")] = None
    """64x8xH100, 8xA100, a file; without, the devices of `dtft train` here."""
    pin: Annotated[_Texts, _told("NAME=VALUE")] = ()
    """A knob that is given, such as tensor=8; may be repeated."""
    html: Annotated[str, _told("PATH")] = ""
    """Write a report with pictures."""
    json: Annotated[str, _told("PATH")] = ""
    """Write the plan."""
    what_if: _Switch = False
    """Look also at knobs that cannot be run here."""
    verify: Annotated[int, _told("[N]")] = 0
    """Compile the N best (4) for devices that need not exist; take one that fits."""
    calibration: _File = ""
    """Figures of such devices, as `dtft calibrate --out FILE` wrote them."""
    trial: _Count = 0
    """Run the best N on the devices here, and take the fastest."""

    def __post_init__(self) -> None:
        _check_counts(verify=self.verify, trial=self.trial)

    def run(self, words: list[str]) -> int:
        """Plans."""
        from dtft.cli import plan
        from dtft.config import load_experiment

        return plan.run(self, load_experiment(self.config, words, "dtft plan"))


@dataclass(frozen=True, kw_only=True)
class PredictCommand:
    """Time and memory of a table of layouts."""

    rows: Annotated[Positional[str], _told("ROWS.csv")]
    """Table; its columns are those of experiments/data/megatron_a100.csv."""
    cluster: Annotated[str, _told("SPEC")]
    """A catalog's name (a100, selene) with each row's gpus, 64x8xH100, or a file."""
    out: Annotated[str, _told("OUT.csv")]
    """The table with predicted_* columns."""

    def run(self) -> int:
        """Predicts."""
        from dtft.cli import predict

        return predict.run(self)


@dataclass(frozen=True, kw_only=True)
class CalibrateCommand:
    """Measure this machine for the planner."""

    out: _File = ""
    """Write the calibration here."""
    given: Annotated[str, _told("FILE", name="from")] = ""
    """Begin with this calibration, and measure nothing."""
    runs: Annotated[tuple[str, ...] | None, _told("LOG [LOG ...]")] = None
    """Correct it by the steps of past runs: plan_times.jsonl of their directories."""
    devices: _CountOrNone = None
    """How many (CPU: as many are made); without, all."""

    def run(self) -> int:
        """Measures."""
        from dtft.cli import calibrate

        return calibrate.run(self)


WITH_KEYS = {
    "train": TrainCommand,
    "config": ConfigCommand,
    "launch": LaunchCommand,
    "agent": AgentCommand,
    "agent --serve-only": ServeCommand,
    "drill": DrillCommand,
    "bench": BenchCommand,
    "bench transport": BenchTransportCommand,
    "plan": PlanCommand,
}
"""Commands by name that have the keys of a config as flags, too."""
WITHOUT_KEYS = {
    "plan predict": PredictCommand,
    "calibrate": CalibrateCommand,
    "scale": ScaleCommand,
    "checkpoint ls": CheckpointLsCommand,
    "checkpoint show": CheckpointShowCommand,
    "checkpoint verify": CheckpointVerifyCommand,
    "checkpoint export": CheckpointExportCommand,
    "checkpoint odds": CheckpointOddsCommand,
}
"""Commands by name that know all of their flags themselves."""
COMMANDS: dict[str, type] = {**WITH_KEYS, **WITHOUT_KEYS}
BARE = {"plan": {"--verify": "4"}}
"""Flags by command that may stand without a value, and what they mean then."""
