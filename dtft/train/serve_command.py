"""`dtft agent --serve-only`: from its flags to an agent that serves.

Decides which flags fit together. Must not know what such an agent does: `elastic.serve`
does.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from dtft.elastic.host import (
    ServeConfig,
    ServingHost,
    base_config,
    check_arena_directory,
)
from dtft.elastic.job import AgentConfig
from dtft.train import host_flags
from dtft.train.agent_command import log_to_stderr, run_at
from dtft.train.job_options import host_name, read_secret, store_address

if TYPE_CHECKING:
    from dtft.train.commands import Serve

_PROG = "dtft agent --serve-only"
_ONLY = f"`{_PROG}` trains nothing"


def serve(options: "Serve", words: list[str]) -> int:
    """Runs the agent of one host until it is told to end.

    Args:
        options: job and host.
        words: fields of `ServeConfig`, as they were typed.

    Raises:
        ValueError: a flag does not fit, or the host may not take part.
    """
    log_to_stderr()
    config = _agent_config(options, words)
    check_arena_directory(config.arena_directory)
    (config.run_directory / "logs").mkdir(parents=True, exist_ok=True)
    address = store_address(options.job)
    run_at(address, lambda store: ServingHost(config, store, options.hosts))
    return 0


def _agent_config(options: "Serve", words: list[str]) -> AgentConfig:
    address = store_address(options.job)
    secret = read_secret(options.job)
    if options.hosts is not None and options.hosts < 2:
        raise ValueError(
            f"--hosts {options.hosts}: a job of several hosts has 2 or more. A process "
            "of its own needs no agent. Leave --hosts out to take any number."
        )
    serving = _serve_config(words)
    directory = options.run_dir or Path("runs") / options.job.name
    host = host_name(options.place)
    return dataclasses.replace(
        base_config(
            serving,
            job=options.job.name,
            host=host,
            store=str(address),
            secret=secret,
        ),
        bind=options.place.bind,
        run_directory=Path(directory).resolve(),
        **host_flags.settings(options.host, options.place, host),
    )


def _serve_config(words: list[str]) -> ServeConfig:
    config, unknown = tyro.cli(
        ServeConfig, args=words, prog=_PROG, return_unknown_args=True
    )
    for word in unknown:
        name = word.removeprefix("--").replace("-", "_").partition("=")[0]
        if not word.startswith("--"):
            raise ValueError(
                f"CONFIG {word}: {_ONLY}, so it has no CONFIG. Leave it out, or leave "
                "--serve-only out."
            )
        if name in ("share", "checkpoint.share"):
            raise ValueError(
                f"{word}: a process that is restarted takes its state from its own "
                "agent, which therefore keeps all of its slices. Leave it out."
            )
        raise ValueError(
            f"{word}: {_ONLY}. Allowed beside the flags in its --help: --copies, "
            "--arena_directory, --timeouts.NAME. Leave it out."
        )
    return config
