"""The flags that say where a host is and how it talks: for one agent, or for a cluster.

Reads and checks what they name, so that a mistake ends in one line before anything is
started. Must not start anything itself.
"""

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtft.checkpoint.replication import parse_domain_file, parse_domain_label
from dtft.checkpoint.transport import Tls, check_tls

if TYPE_CHECKING:
    from dtft.train.commands import HostFlags, PlaceFlags


def handed_on(flags: "HostFlags") -> list[str]:
    """The flags of a cluster's agents, with paths that hold from anywhere.

    Raises:
        ValueError: a file cannot be read, or says what cannot be.
    """
    paths = {
        "--domain-file": flags.domain_file,
        "--tls-cert": flags.tls_cert,
        "--tls-key": flags.tls_key,
    }
    if flags.domain_file:
        _domains_in(flags.domain_file)
    tls_of(flags)
    words = [(flag, str(Path(path).resolve())) for flag, path in paths.items() if path]
    return [word for pair in words for word in pair] + ["--nixl"] * flags.nixl


def tls_of(flags: "HostFlags") -> Tls | None:
    """The certificate of --tls-cert and --tls-key, read once to see that it is good.

    Raises:
        ValueError: one of them is missing, or they cannot be read or used together.
    """
    if not flags.tls_cert and not flags.tls_key:
        return None
    if flags.nixl:
        raise ValueError(
            "--nixl reads memory past TLS, unencrypted: give either --nixl or "
            "--tls-cert and --tls-key."
        )
    if not flags.tls_cert or not flags.tls_key:
        raise ValueError(
            "--tls-cert FILE and --tls-key FILE belong together: give both, or neither."
        )
    tls = Tls(certificate=Path(flags.tls_cert), key=Path(flags.tls_key))
    try:
        check_tls(tls)
    except ValueError as error:
        raise ValueError(f"--tls-cert, --tls-key: {error}") from error
    return tls


def own_certificate(flags: "HostFlags", directory: Path) -> list[str]:
    """For --tls: flags that name a certificate made for this run, which signs itself.

    It keeps what travels between hosts from being read on the way. Who is at the other
    end is proved by the job's secret, not by the certificate.

    Raises:
        ValueError: --tls-cert is given too, or `openssl` cannot make one.
    """
    if flags.tls_cert or flags.nixl:
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


def settings(flags: "HostFlags", place: "PlaceFlags", host: str) -> dict[str, Any]:
    """The fields of one host's `AgentConfig` that the flags decide.

    Raises:
        ValueError: a flag or a file says what cannot be.
    """
    return {
        "domain": domain_of(flags, place, host),
        "tls": tls_of(flags),
        "nixl": flags.nixl,
    }


def domain_of(flags: "HostFlags", place: "PlaceFlags", host: str) -> str:
    """The label of a host's failure domains, from --domain or --domain-file.

    Raises:
        ValueError: both are given, the label cannot be read, or the file lacks it.
    """
    if place.domain and flags.domain_file:
        raise ValueError("give either --domain or --domain-file, not both.")
    if flags.domain_file:
        domains = _domains_in(flags.domain_file)
        if domains.levels and host not in domains.names:
            raise ValueError(
                f"--domain-file {flags.domain_file}: it has no line for this host, "
                f"{host}. Add one, or give --host-name one of its names."
            )
        found = dict(
            zip(domains.levels, domains.names.get(host, "").split("/"), strict=False)
        )
    else:
        try:
            found = parse_domain_label(place.domain)
        except ValueError as error:
            raise ValueError(f"--domain: {error}") from error
    return ",".join(f"{level}={name}" for level, name in found.items())


def _domains_in(name: str):
    try:
        return parse_domain_file(Path(name).read_text())
    except OSError as error:
        raise ValueError(f"--domain-file {name}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--domain-file {name}: {error}") from error
