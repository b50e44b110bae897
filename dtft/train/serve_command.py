"""`dtft agent --serve-only`: from its flags to an agent that serves.

Decides which flags fit together. Must not know what such an agent does: `elastic.serve`
does.
"""

import dataclasses
from argparse import Namespace
from pathlib import Path

import tyro

from dtft.elastic.config import AgentConfig
from dtft.elastic.host_memory import check_arena_directory
from dtft.elastic.serve import ServeConfig, ServingHost, base_config
from dtft.train import host_flags
from dtft.train.agent_command import log_to_stderr, run_at
from dtft.train.job_options import host_name, store_address

_ONLY = "`dtft agent --serve-only` trains nothing"


def serve(options: Namespace, overrides: list[str], secret: bytes) -> int:
    """Runs the agent of one host until it is told to end.

    Raises:
        ValueError: a flag does not fit, or the host may not take part.
    """
    log_to_stderr()
    config = _agent_config(options, overrides, secret)
    check_arena_directory(config.arena_directory)
    (config.run_directory / "logs").mkdir(parents=True, exist_ok=True)
    address = store_address(options)
    run_at(address, lambda store: ServingHost(config, store, options.hosts))
    return 0


def _agent_config(
    options: Namespace, overrides: list[str], secret: bytes
) -> AgentConfig:
    address = store_address(options)
    if options.hosts is not None and options.hosts < 2:
        raise ValueError(
            f"--hosts {options.hosts}: a job of several hosts has 2 or more. A process "
            "of its own needs no agent. Leave --hosts out to take any number."
        )
    serving = _serve_config(overrides)
    host = host_name(options)
    return dataclasses.replace(
        base_config(
            serving,
            job=options.job,
            host=host,
            store=str(address),
            secret=secret,
        ),
        bind=options.bind,
        run_directory=Path(options.run_dir or Path("runs") / options.job).resolve(),
        **host_flags.settings(options, host),
    )


def _serve_config(overrides: list[str]) -> ServeConfig:
    known = ("copies", "arena_directory", "timeouts.")
    for word in overrides:
        name = word.removeprefix("--").replace("-", "_").partition("=")[0]
        if not word.startswith("--"):
            continue
        if name in ("share", "checkpoint.share"):
            raise ValueError(
                f"{word}: a process that is restarted takes its state from its own "
                "agent, which therefore keeps all of its slices. Leave it out."
            )
        if not name.startswith(known):
            raise ValueError(
                f"{word}: {_ONLY}. Allowed beside the flags in its --help: --copies, "
                "--arena_directory, --timeouts.NAME. Leave it out."
            )
    if overrides and not overrides[0].startswith("--"):
        raise ValueError(
            f"CONFIG {overrides[0]}: {_ONLY}, so it has no CONFIG. Leave it out, or "
            "leave --serve-only out."
        )
    return tyro.cli(ServeConfig, args=overrides, prog="dtft agent --serve-only")
