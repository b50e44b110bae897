"""The flags that say where a host is and how it talks: for one agent, or for a cluster.

Reads and checks what they name, so that a mistake ends in one line before anything is
started. Must not start anything itself.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from dtft.checkpoint.domains import parse_file, parse_label

PATHS = ("domain_file",)
"""Flags that `launch` and `drill` hand on to every agent; each names a file."""


def handed_on(options: Namespace) -> list[str]:
    """The flags of a cluster's agents, with paths that hold from anywhere.

    Raises:
        ValueError: a file cannot be read, or says what cannot be.
    """
    flags: list[str] = []
    for name in PATHS:
        if given := getattr(options, name, None):
            flags += [f"--{name.replace('_', '-')}", str(Path(given).resolve())]
    if options.domain_file:
        _domains_in(options.domain_file)
    return flags


def settings(options: Namespace, host: str) -> dict[str, Any]:
    """The fields of one host's `AgentConfig` that the flags decide.

    Raises:
        ValueError: a flag or a file says what cannot be.
    """
    return {"domain": domain_of(options, host)}


def domain_of(options: Namespace, host: str) -> str:
    """The label of a host's failure domains, from --domain or --domain-file.

    Raises:
        ValueError: both are given, the label cannot be read, or the file lacks it.
    """
    if options.domain and options.domain_file:
        raise ValueError("give either --domain or --domain-file, not both.")
    if options.domain_file:
        domains = _domains_in(options.domain_file)
        if domains.levels and host not in domains.names:
            raise ValueError(
                f"--domain-file {options.domain_file}: it has no line for this host, "
                f"{host}. Add one, or give --host-name one of its names."
            )
        found = dict(
            zip(domains.levels, domains.names.get(host, "").split("/"), strict=False)
        )
    else:
        try:
            found = parse_label(options.domain or "")
        except ValueError as error:
            raise ValueError(f"--domain: {error}") from error
    return ",".join(f"{level}={name}" for level, name in found.items())


def _domains_in(name: str):
    try:
        return parse_file(Path(name).read_text())
    except OSError as error:
        raise ValueError(f"--domain-file {name}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--domain-file {name}: {error}") from error
