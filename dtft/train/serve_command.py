"""`dtft agent --serve-only`: from its flags to an agent that serves."""

import dataclasses
import logging
import os
import signal
import socket
from argparse import Namespace
from pathlib import Path

import tyro

from dtft.elastic.etcd import EtcdStore, version_warning
from dtft.elastic.serve import ServeConfig, ServingHost, base_config
from dtft.elastic.store import StoreUnavailable
from dtft.train import host_flags

_ONLY = "`dtft agent --serve-only` trains nothing"


def serve(options: Namespace, overrides: list[str], secret: bytes) -> int:
    """Runs the agent of one host until it is told to end.

    Raises:
        ValueError: a flag does not fit, or the host may not take part.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    config = _agent_config(options, overrides, secret)
    (config.run_directory / "logs").mkdir(parents=True, exist_ok=True)
    store = EtcdStore(options.store)
    try:
        warning = version_warning(store.status())
        if warning:
            logging.getLogger(__name__).warning("%s", warning)
        host = ServingHost(config, store, options.hosts)
        signal.signal(signal.SIGTERM, lambda *_: host.leave())
        signal.signal(signal.SIGINT, lambda *_: host.leave())
        host.run()
    except StoreUnavailable as error:
        raise ValueError(f"--store {options.store}: {error}") from error
    finally:
        store.close()
    return 0


def _agent_config(options: Namespace, overrides: list[str], secret: bytes):
    from dtft.train.commands import check_address

    check_address(options.store)
    if options.hosts is not None and options.hosts < 2:
        raise ValueError(
            f"--hosts {options.hosts}: a job of several hosts has 2 or more. A process "
            "of its own needs no agent. Leave --hosts out to take any number."
        )
    serving = _serve_config(overrides)
    host = options.host_name or f"{socket.gethostname()}-{os.getpid()}"
    return dataclasses.replace(
        base_config(
            serving,
            job=options.job,
            host=host,
            store=options.store,
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
