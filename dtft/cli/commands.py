"""The commands: the flags of each, and the module that does the work.

A command is a dataclass. Its fields are its flags, and the fields' docstrings are the
flags' help texts; tyro makes the dataclass from a command line
(`dtft/cli/dispatch.py`). If `run` takes words, they are the words that are not flags of
the command, such as keys of the config. This module has only light imports, so that
help is fast; `run` imports the module that it calls.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg


def _hint(default: str) -> str:
    """Formats a flag's default as `(default: VALUE)` for its help text.

    Returns "" if the default is an empty string or None.
    """
    return "" if default in ("", "''", "None") else f"(default: {default})"


def _told(metavar: str, **how: Any) -> Any:
    """Makes the annotation that tells tyro how to parse and describe a flag.

    The help calls the flag's value `metavar`, and shows the default unless it is empty.
    `how` has further keyword arguments of `tyro.conf.arg`.
    """
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
    """Raises a ValueError if the value of a flag is below 0.

    `counts` maps the name of each flag, with "_" for "-", to its value; None if the
    flag is not given.
    """
    for name, count in counts.items():
        if count is not None and count < 0:
            raise ValueError(
                f"--{name.replace('_', '-')} {count}: Allowed: a whole number, 0 or "
                "more."
            )


# ------------------------------------------------------- flags of several commands


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Keys of the config that also have a short flag."""

    hosts: _CountOrNone = None
    """Number of slots: hosts that train at the same time (cluster.hosts)."""
    run_dir: Annotated[str, _told("DIR")] = ""
    """Run directory; a run in it is resumed (log.run_dir)."""
    min_replicas: Annotated[int | None, _told("B")] = None
    """When hosts are lost, go on with B replicas or more; default: wait for hosts."""

    def __post_init__(self) -> None:
        _check_counts(min_replicas=self.min_replicas)

    def keys(self) -> list[str]:
        """Returns the given flags as command-line words that set keys of the config."""
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
    """Flags that are equal on every host of a job."""

    domain_file: _File = ""
    """File of failure domains; each line is HOST power=NAME rack=NAME."""
    tls_cert: _File = ""
    """PEM file of the certificate; connections between hosts are encrypted."""
    tls_key: _File = ""
    """PEM file of the private key of --tls-cert."""
    nixl: _Switch = False
    """Fetch slices with NIXL (RDMA) if both hosts have it."""


@dataclass(frozen=True, kw_only=True)
class PlaceFlags:
    """Flags that are specific to one host."""

    host_name: Annotated[str | None, _told("NAME")] = None
    """Name of the host; default: this machine's name and the process id."""
    domain: Annotated[str, _told("power=NAME,rack=NAME")] = ""
    """Failure domains of the host."""
    bind: Annotated[str, _told("HOST:PORT")] = ""
    """Address at which this host listens for other hosts; port 0: any free port.
    Default: port 0 of the address from which this machine reaches etcd."""


@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """Flags of a job: its name, its etcd, and its secret."""

    name: Annotated[str, _told("NAME", name="job")]
    """Name of the job."""
    store: Annotated[str, _told("HOST:PORT,...")]
    """Address of etcd; several members are separated by commas."""
    store_ca: _File = ""
    """PEM file of the authority that signed etcd's certificate; switches on TLS."""
    store_cert: _File = ""
    """PEM file of the client's certificate, if etcd requires one."""
    store_key: _File = ""
    """PEM file of the private key of --store-cert."""
    store_user: Annotated[str, _told("NAME")] = ""
    """User name in etcd."""
    store_password_file: _File = ""
    """File whose first line is the password of --store-user."""
    store_prefix: Annotated[str, _told("P")] = ""
    """Prefix of every key in etcd; default: /dtft."""
    store_private: _Switch = False
    """Compact etcd's history; only if no other program uses this etcd."""
    secret_file: _File = ""
    """File of the job's secret; default: $DTFT_SECRET_FILE."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Flags that select the checkpoints of a directory or of a live job."""

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
    """Train in one process on all local devices; checkpoints go to storage only."""

    config: _Config
    run_dir: Annotated[str, _told("DIR")] = ""
    """Run directory; a run in it is resumed (log.run_dir)."""

    def run(self, words: list[str]) -> int:
        """Trains; returns the exit code."""
        from dtft.train import train

        return train(self.config, [*words, *RunFlags(run_dir=self.run_dir).keys()])


@dataclass(frozen=True, kw_only=True)
class ConfigCommand:
    """Print the resolved config as JSON."""

    config: _Config

    def run(self, words: list[str]) -> int:
        """Prints the config as JSON; returns the exit code."""
        from dtft.config import load_experiment, to_json

        print(to_json(load_experiment(self.config, words, "dtft config")))
        return 0


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """Train on a local cluster: start etcd, agents and trainers."""

    config: _Config
    run_flags: _Run = field(default_factory=RunFlags)
    spares: _Count = 0
    """Number of spare hosts."""
    host: _Host = field(default_factory=HostFlags)
    tls: _Switch = False
    """Encrypt connections with a certificate that is made for this job."""

    def __post_init__(self) -> None:
        _check_counts(spares=self.spares)

    def run(self, words: list[str]) -> int:
        """Runs the cluster until its job ends; returns the exit code."""
        from dtft.cli.jobs import launch

        return launch(self, words)


_FAULTS = (
    "May be repeated. kill-host:SLOT, kill-trainer:SLOT, kill-leader, kill-spare, "
    "kill-store, corrupt:SLOT, all with @STEP[:PHASE]; stop-agent:SLOT, "
    "stop-host:SLOT, stop-trainer:SLOT, cut:SLOT, all with @STEP[:SECONDS], for ever "
    "without seconds; "
    "cut:SLOT@STEP:REACH with REACH all, store, out, in, or pair with two slots "
    "(network namespaces: needs root); of stops and cuts SLOT may be leader or "
    "follower: who is it then; "
    "pause-store@STEP:SECONDS; full-storage, readonly-storage and full-memory, all "
    "with @STEP:SECONDS (mounts: need root); empty-store@STEP; crash-store@STEP (its "
    "supervisor starts it again); fail:SLOT@STEP[:always] (an exception in the step); "
    "scale:REPLICAS@STEP; drain:SLOT@STEP. Slots: 0+2 hits two at once."
)


@dataclass(frozen=True, kw_only=True)
class DrillCommand:
    """Inject faults into a run and compare it with an undisturbed run."""

    config: _Config
    run_flags: _Run = field(default_factory=RunFlags)
    spares: _Count = 0
    """Number of spare hosts."""
    host: _Host = field(default_factory=HostFlags)
    fault: Annotated[_Texts, _told("KIND:SLOT@STEP", help=_FAULTS)] = ()
    deadline: _Seconds = 600.0
    """Largest number of seconds that the run with faults may take."""
    host_memory: Annotated[_Texts, _told("HOST=MIB")] = ()
    """Limit in MiB of the memory for one host's checkpoint copies; may be repeated."""
    rejoin: Annotated[float | None, _told("S")] = None
    """Restart killed hosts after S seconds; replace hosts that are stopped or cut for
    ever."""
    seed: _Count = 0
    """Seed of the random moment of a fault within its step."""
    control: Annotated[str, _told("DIR")] = ""
    """Directory of the undisturbed run; a matching run in it is reused."""
    json: _File = ""
    """File to write the drill's record to."""

    def __post_init__(self) -> None:
        _check_counts(spares=self.spares)

    def run(self, words: list[str]) -> int:
        """Runs the drill; returns the exit code."""
        from dtft.cli.out_files import check_writable
        from dtft.drills import run_drill

        check_writable("--json", self.json, folder_is_made=True)
        return run_drill(self, words)


@dataclass(frozen=True, kw_only=True)
class SoakCommand:
    """Run many drills with random faults; say how often the job recovers.

    An episode is a drill: a run with faults, compared with an undisturbed run. It has
    one to three faults, drawn from a seed: a host is killed, stopped, cut off or
    drained; a trainer is killed or stopped, or raises an exception; the store is
    killed, emptied or paused; a host's copies become corrupt, and a host is killed at
    the same step; or a directory becomes full or read-only.
    After an interruption, run the same command again: it runs only the episodes that
    are missing.
    """

    config: _Config
    run_flags: _Run = field(default_factory=RunFlags)
    spares: _Count = 1
    """Number of spare hosts."""
    host: _Host = field(default_factory=HostFlags)
    episodes: _Count = 20
    """Number of episodes, those of earlier parts of the same soak included."""
    replicas: UseAppendAction[tuple[_Count, ...]] = ()
    """Number of replicas to which the live job may be scaled; may be repeated."""
    deadline: _Seconds = 180.0
    """Largest number of seconds that an episode may take."""
    rejoin: Annotated[float, _told("S")] = 3.0
    """Restart killed hosts after S seconds; replace hosts that are stopped or cut for
    ever."""
    seed: _Count = 0
    """Seed of the first episode; each episode has the next seed."""
    json: _File = ""
    """File of the episodes' records; default: soak.json in the run directory."""

    def __post_init__(self) -> None:
        _check_counts(spares=self.spares, episodes=self.episodes, seed=self.seed)

    def run(self, words: list[str]) -> int:
        """Runs the episodes that are still to come; returns the exit code."""
        from dtft.cli.out_files import check_writable
        from dtft.drills import run_soak

        check_writable("--json", self.json, folder_is_made=True)
        return run_soak(self, words)


@dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Measure the wall time per step without and with the memory tier (RAM copies).

    To measure how fast slices are fetched, use bench transport.
    """

    config: _Config
    run_flags: _Run = field(default_factory=RunFlags)
    rounds: _Count = 3
    """Number of rounds, each of a run with the tier off and a run with the tier on."""
    json: _File = ""
    """File to write the figures to."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(
                f"--rounds {self.rounds}: Allowed: a whole number, 1 or more."
            )

    def run(self, words: list[str]) -> int:
        """Measures and compares the step times; returns the exit code.

        Trains without and with the memory tier, one after the other, --rounds times.
        """
        from dtft.cli.out_files import check_writable
        from dtft.drills import run_bench

        check_writable("--json", self.json)
        return run_bench(self, words)


@dataclass(frozen=True, kw_only=True)
class BenchTransportCommand:
    """Measure how fast slices are fetched, compared with raw sockets."""

    json: _File = ""
    """File to write the figures to."""

    def run(self, words: list[str]) -> int:
        """Measures; returns the exit code 0.

        Args:
            words: flags of the measurement, such as `--mib 64` for the MiB of one fetch
                (the fields of `TransportBench`).
        """
        import json
        from pathlib import Path

        import tyro

        from dtft.checkpoint.transport import TransportBench, bench_transport
        from dtft.cli.out_files import check_writable

        check_writable("--json", self.json)
        prog = "dtft bench transport"
        figures = bench_transport(tyro.cli(TransportBench, args=words, prog=prog))
        if self.json:
            Path(self.json).write_text(json.dumps(figures, indent=1) + "\n")
        return 0


# ------------------------------------------------------------------- many machines


@dataclass(frozen=True, kw_only=True)
class AgentCommand:
    """Run one host of a job; start one agent per machine.

    To run without a trainer, as memory for your own processes, use agent --serve-only.
    """

    config: _Config
    run_flags: _Run = field(default_factory=RunFlags)
    job: _Job
    place: _Place = field(default_factory=PlaceFlags)
    host: _Host = field(default_factory=HostFlags)

    def run(self, words: list[str]) -> int:
        """Runs the agent and its trainers until the job ends; returns the exit code."""
        from dtft.cli.jobs import run_agent

        return run_agent(self, words)


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Keep the steps of your own training processes in host memory.

    Keeps every step of a jax.distributed job in the memory of its hosts. Start one
    agent per process of the job, and more as spares; agents outlive the processes. In
    every process of the job:

        manager = dtft.checkpoint.ReplicatedCheckpointManager(directory)

    A process uses the only free agent of its machine, or the agent that
    DTFT_AGENT_SOCKET names (the agent's first line shows how). When a host is lost,
    start an agent in its place if there is no spare, and restart all processes. The
    newest step is then restored from the memory of the remaining hosts. SIGTERM ends an
    agent and frees its memory.

    These flags must be equal on every host: --copies N (copies of every slice; default
    2), --arena_directory DIR (on a memory file system; default /dev/shm),
    --timeouts.NAME SECONDS. The first process (ReplicatedOptions) decides directory,
    intervals and retention of the storage tier.
    """

    hosts: _CountOrNone = None
    """Number of processes of the job; jobs with another number are refused."""
    run_dir: Annotated[str, _told("DIR")] = ""
    """Directory of logs and events; default: runs/NAME."""
    job: _Job
    place: _Place = field(default_factory=PlaceFlags)
    host: _Host = field(default_factory=HostFlags)

    def run(self, words: list[str]) -> int:
        """Serves until a signal or the job's end; returns the exit code."""
        from dtft.cli.jobs import serve

        return serve(self, words)


@dataclass(frozen=True, kw_only=True)
class ScaleCommand:
    """Change the number of replicas of a live job."""

    replicas: Annotated[int, _told("T")]
    """Number of replicas that shall train after the change."""
    timeout: _Seconds = 600.0
    """Largest number of seconds that the change may take."""
    json: _Switch = False
    """Print JSON."""
    job: _Job

    def run(self) -> int:
        """Changes the number of replicas; returns the exit code."""
        from dtft.cli import jobs

        return jobs.run(self)


@dataclass(frozen=True, kw_only=True)
class DrainCommand:
    """Take a host out of a live job: another host takes its slot, and its agent ends.

    Without a spare, the job shrinks if --min-replicas allows it. The agent ends once
    a step is committed without the host; at once if the host has no slot and does not
    lead the job. On CPU no other trainer is restarted. No step is lost. If the host
    leads the job, another host leads it from then on. A signal to the host's agent
    (Ctrl-C, SIGTERM) does the same.
    """

    host: Annotated[Positional[str], _told("HOST")]
    """Name of the host (`dtft checkpoint ls` lists them)."""
    timeout: _Seconds = 120.0
    """Largest number of seconds that the change may take."""
    json: _Switch = False
    """Print JSON."""
    job: _Job

    def run(self) -> int:
        """Drains the host; returns the exit code."""
        from dtft.cli import jobs

        return jobs.drain(self)


# -------------------------------------------------------------------- checkpoints


@dataclass(frozen=True, kw_only=True)
class CheckpointLsCommand:
    """List steps and their problems; for a live job also copies, health and hosts."""

    source: _Checkpoints = field(default_factory=CheckpointFlags)

    def run(self) -> int:
        """Prints the steps; returns the exit code."""
        from dtft.cli import checkpoint

        return checkpoint.ls(self.source)


@dataclass(frozen=True, kw_only=True)
class CheckpointShowCommand:
    """Show the leaves of a stored step, or which hosts have a live step's slices."""

    source: _Checkpoints = field(default_factory=CheckpointFlags)
    step: _CountOrNone = None
    """Step; default: the newest."""

    def run(self) -> int:
        """Prints the leaves, or the hosts of each slice; returns the exit code."""
        from dtft.cli import checkpoint

        return checkpoint.show(self.source, self.step)


@dataclass(frozen=True, kw_only=True)
class CheckpointVerifyCommand:
    """Read all bytes and compare their checksums; for a live job, on all its hosts."""

    source: _Checkpoints = field(default_factory=CheckpointFlags)
    step: _CountOrNone = None
    """Step of DIR; default: all steps."""
    rate: Annotated[int, _told("BYTES_PER_S")] = 0
    """For a live job: bytes of its copies that each host may read per second; 0: no
    limit."""
    timeout: _Seconds = 600.0
    """For a live job: seconds that each host may take; --rate adds the time that it
    needs."""

    def run(self) -> int:
        """Verifies the steps in DIR or the copies of the job; returns the exit code.

        Raises:
            ValueError: --rate is below 0, --timeout is not above 0, the job cannot be
                reached, or DIR lacks the step.
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
    """Write a commit of a live job to storage, or copy a stored step."""

    source: _Checkpoints = field(default_factory=CheckpointFlags)
    step: _CountOrNone = None
    """Step of DIR; default: the newest."""
    to: Annotated[str, _told("DIR")] = ""
    """Directory to which the step of DIR is copied."""

    def run(self) -> int:
        """Writes or copies the step; returns the exit code."""
        from dtft.cli import checkpoint

        return checkpoint.export(self.source, self.step, self.to)


@dataclass(frozen=True, kw_only=True)
class CheckpointOddsCommand:
    """Print how likely a job survives the loss of several hosts."""

    hosts: _Count
    """Number of hosts of the job."""
    copies: _Count = 2
    """Number of copies of every slice."""

    def run(self) -> int:
        """Prints a table of probabilities; returns the exit code."""
        from dtft.checkpoint.replication import odds_table

        print(odds_table(self.hosts, self.copies))
        return 0


# -------------------------------------------------------------------------- plans


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Plan how to shard a config on a cluster; predict speed and memory.

    To predict step time and memory for each training run in a CSV file, use plan
    predict.
    """

    config: _Config
    cluster: Annotated[str | None, _told("SPEC")] = None
    """64x8xH100, 8xA100 or a file; default: the devices of `dtft train` here."""
    pin: Annotated[_Texts, _told("NAME=VALUE")] = ()
    """Fix one knob of the plan, such as tensor=8; may be repeated."""
    html: Annotated[str, _told("PATH")] = ""
    """File to write an HTML report with pictures to."""
    json: Annotated[str, _told("PATH")] = ""
    """File to write the plan to."""
    what_if: _Switch = False
    """Consider also plans that cannot be run here, to see what they would gain."""
    verify: Annotated[int, _told("[N]")] = 0
    """Compile the N best plans (default 4), without their devices; take the fastest
    that fits."""
    calibration: _File = ""
    """File of `dtft calibrate --out FILE` on devices of the cluster's type."""
    trial: _Count = 0
    """Run the best N plans on the devices here, and take the fastest."""

    def __post_init__(self) -> None:
        _check_counts(verify=self.verify, trial=self.trial)

    def run(self, words: list[str]) -> int:
        """Makes, prints and writes the plan; returns the exit code."""
        from dtft.cli import plan
        from dtft.config import load_experiment

        return plan.run(self, load_experiment(self.config, words, "dtft plan"))


@dataclass(frozen=True, kw_only=True)
class PredictCommand:
    """Predict step time and memory of training runs: each row of a CSV file is one."""

    rows: Annotated[Positional[str], _told("ROWS.csv")]
    """Table with the columns of experiments/data/megatron_a100.csv, and others that
    dtft/planner/README.md names."""
    cluster: Annotated[str, _told("SPEC")]
    """Catalog name (a100, selene) of a cluster with each row's gpus, 64x8xH100, or a
    file."""
    out: Annotated[str, _told("OUT.csv")]
    """File to write the table with predicted_* columns to."""

    def run(self) -> int:
        """Writes the predictions; returns the exit code."""
        from dtft.cli import predict

        return predict.run(self)


@dataclass(frozen=True, kw_only=True)
class CalibrateCommand:
    """Measure the speed of this machine's devices, for the planner's predictions."""

    out: _File = ""
    """File to write the calibration to."""
    given: Annotated[str, _told("FILE", name="from")] = ""
    """Calibration to start from, instead of measuring."""
    runs: Annotated[tuple[str, ...] | None, _told("LOG [LOG ...]")] = None
    """Correct the calibration by past runs: plan_times.jsonl of their directories."""
    devices: _CountOrNone = None
    """Number of devices to measure (on CPU, JAX makes this many); default: all."""

    def run(self) -> int:
        """Measures and writes the calibration; returns the exit code."""
        from dtft.cli import calibrate

        return calibrate.run(self)


WITH_KEYS = {
    "train": TrainCommand,
    "config": ConfigCommand,
    "launch": LaunchCommand,
    "agent": AgentCommand,
    "agent --serve-only": ServeCommand,
    "drill": DrillCommand,
    "soak": SoakCommand,
    "bench": BenchCommand,
    "bench transport": BenchTransportCommand,
    "plan": PlanCommand,
}
"""Maps names to the commands whose `run` parses the flags that are not their fields:
keys of the config, or for two commands fields of `ServeConfig` or `TransportBench`."""
WITHOUT_KEYS = {
    "plan predict": PredictCommand,
    "calibrate": CalibrateCommand,
    "scale": ScaleCommand,
    "drain": DrainCommand,
    "checkpoint ls": CheckpointLsCommand,
    "checkpoint show": CheckpointShowCommand,
    "checkpoint verify": CheckpointVerifyCommand,
    "checkpoint export": CheckpointExportCommand,
    "checkpoint odds": CheckpointOddsCommand,
}
"""Maps names to the commands that refuse flags that are not their fields."""
COMMANDS: dict[str, type] = {**WITH_KEYS, **WITHOUT_KEYS}
BARE = {"plan": {"--verify": "4"}}
"""Maps a command to its flags that may be given without a value, each with the value
that the flag then has."""
