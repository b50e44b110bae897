"""The commands of dtft. Reads arguments and calls; contains no logic of its own."""

import argparse
import os
import select
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from dtft import __version__

SERVE_ONLY = "--serve-only"


def _parser(serve_only: bool = False, predict: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dtft", description="Distributed training that outlives its hosts."
    )
    parser.add_argument("--version", action="version", version=f"dtft {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    made = _command(commands, "train", "one process, all local devices, no memory tier")
    made.add_argument("--run-dir", help="run directory; an old one is resumed")
    _command(commands, "config", "print the resolved config")
    made = _command(commands, "launch", "a local cluster: etcd, agents, trainers")
    _job(made)
    _cluster(made)
    text = "encrypt, with a certificate that is made for this job"
    made.add_argument("--tls", action="store_true", help=text)
    _agent(commands, serve_only)
    _drill(commands)
    made = _command(commands, "bench", "wall time per step, tier off and on; transport")
    _job(made)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--json", help="write the figures here")
    _checkpoint(commands)
    _scale(commands)
    _predict(commands) if predict else _plan(commands)
    _calibrate(commands)
    return parser


def _command(commands: Any, name: str, help_text: str) -> argparse.ArgumentParser:
    """A command that takes a config."""
    made = commands.add_parser(name, help=help_text, allow_abbrev=False, add_help=False)
    text = "this; after CONFIG also the config's own keys"
    made.add_argument("-h", "--help", action=_Help, nargs=0, help=text)
    text = "path, or name: one in ./configs, or one that comes with dtft"
    made.add_argument("config", metavar="CONFIG", help=text)
    return made


def _job(made: argparse.ArgumentParser) -> None:
    made.add_argument("--hosts", type=int, help="slots (default: cluster.hosts)")
    made.add_argument("--run-dir", help="run directory; an old one is resumed")


def _cluster(made: argparse.ArgumentParser) -> None:
    """What `launch` and `drill` need to start several hosts."""
    _safety(made)
    _sizes(made)
    made.add_argument("--spares", type=_count, default=0, help="hosts that wait")


def _safety(made: argparse.ArgumentParser) -> None:
    """What every host of a job is told, however it is started."""
    made.add_argument(
        "--domain-file", metavar="FILE", help="lines: HOST power=NAME rack=NAME"
    )
    text = "PEM file: connections between hosts are encrypted"
    made.add_argument("--tls-cert", metavar="FILE", help=text)
    made.add_argument("--tls-key", metavar="FILE", help="PEM file: its private key")
    text = "fetch with NIXL (RDMA) where both hosts have it"
    made.add_argument("--nixl", action="store_true", help=text)


def _sizes(made: argparse.ArgumentParser) -> None:
    """What only a job may be told that dtft trains."""
    text = "go on with B replicas when hosts are lost (default: wait for a host)"
    made.add_argument("--min-replicas", type=_count, metavar="B", help=text)


def _store(made: argparse.ArgumentParser, text: str, required: bool = False) -> None:
    """Where etcd is and how to reach it."""
    made.add_argument("--store", required=required, metavar="HOST:PORT,...", help=text)
    text = "PEM file that signed etcd's certificate: use TLS"
    made.add_argument("--store-ca", metavar="FILE", help=text)
    text = "PEM file: the client's certificate, if etcd asks for one"
    made.add_argument("--store-cert", metavar="FILE", help=text)
    made.add_argument("--store-key", metavar="FILE", help="PEM file: its private key")
    made.add_argument("--store-user", metavar="NAME", help="etcd user")
    text = "its first line is the user's password"
    made.add_argument("--store-password-file", metavar="FILE", help=text)
    text = "every key lies below P (default: /dtft)"
    made.add_argument("--store-prefix", metavar="P", help=text)
    text = "only dtft uses this etcd: compact its history"
    made.add_argument("--store-private", action="store_true", help=text)


def _agent(commands: Any, serve_only: bool) -> None:
    if serve_only:
        made = _serving(commands)
    else:
        made = _command(commands, "agent", "one host of a job; start one per machine")
        _job(made)
        text = "no trainer: memory for your own processes; see its --help"
        made.add_argument(SERVE_ONLY, action="store_true", help=text)
        _sizes(made)
    _safety(made)
    made.add_argument("--domain", metavar="power=NAME,rack=NAME", help="where it is")
    _store(made, "etcd; several members with commas between", required=True)
    made.add_argument("--job", required=True, help="name of the job")
    made.add_argument("--secret-file", help="default: $DTFT_SECRET_FILE")
    made.add_argument("--host-name", help="default: this machine's name and pid")
    made.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT")


_FAULTS = """
kill-host:SLOT, kill-trainer:SLOT, kill-leader, kill-store, corrupt:SLOT, all with
@STEP[:PHASE]; stop-agent:SLOT, stop-host:SLOT, stop-trainer:SLOT, cut:SLOT, all with
@STEP[:SECONDS], for ever without seconds; cut:SLOT@STEP:REACH with REACH all, store,
out, in, or pair with two slots (network namespaces: needs root); leader or follower as
SLOT: who is it then; pause-store@STEP:SECONDS; empty-store@STEP; crash-store@STEP (its
supervisor starts it again); fail:SLOT@STEP[:always] (an exception in the step);
scale:REPLICAS@STEP. Slots: 0+2 hits two at once
"""


def _drill(commands: Any) -> None:
    text = "kill real processes and compare with an undisturbed run"
    made = _command(commands, "drill", text)
    _job(made)
    _cluster(made)
    made.add_argument(
        "--fault", action="append", default=[], metavar="KIND:SLOT@STEP", help=_FAULTS
    )
    text = "the run with faults must end within"
    made.add_argument("--deadline", type=float, default=600.0, metavar="S", help=text)
    text = "memory for arenas of one host; repeat for others"
    made.add_argument(
        "--host-memory", action="append", default=[], metavar="HOST=MIB", help=text
    )
    made.add_argument(
        "--rejoin",
        type=float,
        metavar="S",
        help="killed hosts return, new ones come for those held for ever",
    )
    made.add_argument("--seed", type=int, default=0, help="of the moment in a step")
    made.add_argument("--control", help="reuse an undisturbed run's directory")
    made.add_argument("--json", help="write the record here")


def _serving(commands: Any) -> argparse.ArgumentParser:
    """`dtft agent --serve-only`, which has no CONFIG: what trains is not dtft's."""
    made = commands.add_parser(
        "agent",
        help="memory for your own processes",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="dtft agent --serve-only --store HOST:PORT --job NAME --secret-file FILE",
        description=_SERVING,
    )
    made.add_argument(SERVE_ONLY, action="store_true", required=True, help="this")
    made.add_argument("--hosts", type=_count, help="refuse jobs of another size")
    made.add_argument("--run-dir", help="logs and events (default: runs/NAME)")
    return made


_SERVING = """\
Keeps every step of a jax.distributed job in the memory of its hosts. Start one per
process of the job, and more as spares; they outlive the processes. In the job, in
every process:

    manager = dtft.checkpoint.ReplicatedCheckpointManager(directory)

A process uses the only free agent of its machine, or the one that DTFT_AGENT_SOCKET
names (the agent's first line says how). When a host is lost: start an agent in its
place, if there is no spare, and restart all processes; the newest step comes from the
memory of the hosts that are left. SIGTERM ends an agent and frees its memory.

Must be the same on every host: --copies N (of every slice; 2), --arena_directory DIR
(a memory file system; /dev/shm), --timeouts.NAME SECONDS. Directory, intervals and
retention of the storage tier are those of the first process (ReplicatedOptions)."""


class _Help(argparse.Action):
    """Prints a command's own options; what the config adds follows if it is named."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any
    ) -> None:
        parser.print_help()
        if getattr(namespace, "config", None) is None:
            parser.exit()
        namespace.help = True


def _checkpoint(commands: Any) -> None:
    group = commands.add_parser("checkpoint", help="look at checkpoints")
    actions = group.add_subparsers(dest="action", required=True)

    def action(name: str, help_text: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=help_text, allow_abbrev=False)
        made.add_argument(
            "directory", metavar="DIR", nargs="?", help="storage or run directory"
        )
        _store(made, "etcd of a live job")
        made.add_argument("--job", help="name of the live job")
        made.add_argument("--secret-file", help="default: $DTFT_SECRET_FILE")
        made.add_argument("--json", action="store_true", help="print JSON")
        made.set_defaults(step=None, to=None)
        return made

    def step(made: argparse.ArgumentParser) -> None:
        made.add_argument("--step", type=int, help="default: the newest")

    action("ls", "steps, sizes, holders, copies, health")
    step(action("show", "the leaves of a step, or the holders of its slices"))
    step(action("verify", "read everything again and compare digests"))
    made = action("export", "write a live job's newest commit; or copy a stored step")
    step(made)
    made.add_argument("--to", metavar="DIR", help="where a stored step is copied to")
    made = actions.add_parser("odds", help="how likely several losses are survived")
    made.add_argument("--hosts", type=int, required=True, help="hosts of the job")
    made.add_argument("--copies", type=int, default=2, help="of every slice")


def _scale(commands: Any) -> None:
    made = commands.add_parser(
        "scale", help="more or fewer replicas for a live job", allow_abbrev=False
    )
    made.add_argument("--job", required=True, help="name of the live job")
    _store(made, "its etcd", required=True)
    made.add_argument("--secret-file", help="default: $DTFT_SECRET_FILE")
    made.add_argument("--replicas", type=int, required=True, metavar="T")
    made.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="default: 600"
    )
    made.add_argument("--json", action="store_true", help="print JSON")


def _plan(commands: Any) -> None:
    text = "how to shard a config on a cluster, how fast it is, whether it fits; or "
    text += "a table of layouts: plan predict"
    made = _command(commands, "plan", text)
    text = "64x8xH100, 8xA100, a file (default: the devices that train has here, on "
    text += "CPU as many as the config's hosts have)"
    made.add_argument("--cluster", metavar="SPEC", help=text)
    text = "a knob that is given, such as tensor=8; may be repeated"
    made.add_argument(
        "--pin", action="append", default=[], metavar="NAME=VALUE", help=text
    )
    made.add_argument("--html", metavar="PATH", help="write a report with pictures")
    made.add_argument("--json", metavar="PATH", help="write the plan")
    text = "look also at knobs that cannot be run here"
    made.add_argument("--what-if", action="store_true", help=text)
    text = "compile the N best (4) for devices that need not exist; take one that fits"
    made.add_argument(
        "--verify", nargs="?", type=_count, const=4, default=0, metavar="N", help=text
    )
    text = "figures of such devices, as `dtft calibrate --out FILE` wrote them"
    made.add_argument("--calibration", metavar="FILE", help=text)
    text = "run the best N on the devices here, and take the fastest"
    made.add_argument("--trial", type=_count, default=0, metavar="N", help=text)


def _predict(commands: Any) -> None:
    """`dtft plan predict`, which has a table in the place of CONFIG."""
    group = commands.add_parser("plan", help="what a step takes on a cluster")
    actions = group.add_subparsers(dest="action", required=True)
    made = actions.add_parser(
        "predict", help="time and memory of a table of layouts", allow_abbrev=False
    )
    text = "table; its columns are those of experiments/data/megatron_a100.csv"
    made.add_argument("rows", metavar="ROWS.csv", help=text)
    text = "name of the catalog (a100, h100, selene, ...), sized by each row's gpus; "
    text += "or 64x8xH100, or a file"
    made.add_argument("--cluster", required=True, metavar="SPEC", help=text)
    text = "the table with predicted_* columns"
    made.add_argument("--out", required=True, metavar="OUT.csv", help=text)


def _calibrate(commands: Any) -> None:
    made = commands.add_parser(
        "calibrate", help="measure this machine for the planner", allow_abbrev=False
    )
    made.add_argument("--out", metavar="FILE", help="write the calibration here")
    text = "begin with this calibration, and measure nothing"
    made.add_argument("--from", dest="given", metavar="FILE", help=text)
    text = "correct it by the steps of past runs: plan_times.jsonl of their directories"
    made.add_argument("--runs", nargs="+", default=[], metavar="LOG", help=text)
    text = "how many (CPU: as many are made; default: all)"
    made.add_argument("--devices", type=int, metavar="N", help=text)


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code.

    What argparse does not know is left to the config's own fields, which refuse what
    they do not know either.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    serve_only = given[:1] == ["agent"] and SERVE_ONLY in given
    predict = given[:2] == ["plan", "predict"]
    options, overrides = _parser(serve_only, predict).parse_known_args(given)
    if getattr(options, "help", None):
        overrides.append("--help")
    from dtft.train import commands

    try:
        code = commands.run(options, overrides)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _nobody_reads(stream: TextIO) -> bool:
    """Whether a stream is a pipe whose reader has gone, as `| head` does."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
