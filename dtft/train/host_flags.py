"""The flags that say where a host is and how it talks: for one agent, or for a cluster.

Reads and checks what they name, so that a mistake ends in one line before anything is
started. Must not start anything itself.
"""

import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

from dtft.checkpoint.domains import parse_file, parse_label
from dtft.checkpoint.stream import check_tls
from dtft.checkpoint.wire import Tls

PATHS = ("domain_file", "tls_cert", "tls_key")
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
    tls_of(options)
    return flags + ["--nixl"] * options.nixl


def tls_of(options: Namespace) -> Tls | None:
    """The certificate of --tls-cert and --tls-key, read once to see that it is good.

    Raises:
        ValueError: one of them is missing, or they cannot be read or used together.
    """
    if not options.tls_cert and not options.tls_key:
        return None
    if options.nixl:
        raise ValueError(
            "--nixl reads memory past TLS, unencrypted: give either --nixl or "
            "--tls-cert and --tls-key."
        )
    if not options.tls_cert or not options.tls_key:
        raise ValueError(
            "--tls-cert FILE and --tls-key FILE belong together: give both, or neither."
        )
    tls = Tls(certificate=Path(options.tls_cert), key=Path(options.tls_key))
    try:
        check_tls(tls)
    except ValueError as error:
        raise ValueError(f"--tls-cert, --tls-key: {error}") from error
    return tls


def own_certificate(options: Namespace, directory: Path) -> list[str]:
    """For --tls: flags that name a certificate made for this run, which signs itself.

    It keeps what travels between hosts from being read on the way. Who is at the other
    end is proved by the job's secret, not by the certificate.

    Raises:
        ValueError: --tls-cert is given too, or `openssl` cannot make one.
    """
    if not options.tls:
        return []
    if options.tls_cert or options.nixl:
        raise ValueError("give only one of --nixl, --tls, --tls-cert with --tls-key.")
    tls = Tls(certificate=directory / "tls.cert.pem", key=directory / "tls.key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "3650"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=dtft"]
    command += ["-keyout", str(tls.key), "-out", str(tls.certificate)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"--tls: openssl could not make a certificate ({error}). Make a pair "
            "elsewhere and give --tls-cert FILE --tls-key FILE."
        ) from error
    return ["--tls-cert", str(tls.certificate), "--tls-key", str(tls.key)]


def settings(options: Namespace, host: str) -> dict[str, Any]:
    """The fields of one host's `AgentConfig` that the flags decide.

    Raises:
        ValueError: a flag or a file says what cannot be.
    """
    return {
        "domain": domain_of(options, host),
        "tls": tls_of(options),
        "nixl": options.nixl,
    }


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
