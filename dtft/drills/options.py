"""Values that the commands of drills and jobs compute from their flags.

The values are the experiment, the run directory, the job's secret, the address of etcd,
and a host's name, failure domain, address and TLS certificate. A wrong flag raises a
ValueError before any process of the job is started.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtft.checkpoint.replication import parse_domain_file, parse_domain_label
from dtft.checkpoint.transport import (
    Tls,
    check_tls,
    format_address,
    is_loopback,
    local_host,
    parse_address,
)
from dtft.config import Experiment, load_experiment
from dtft.elastic.host import check_arena_directory, check_name
from dtft.elastic.processes import CLEANUP_S
from dtft.elastic.stop_signals import heard_signals
from dtft.elastic.store import StoreAddress
from dtft.parallel import check_experiment
from dtft.train import config_to_continue, make_directory, with_run_dir

if TYPE_CHECKING:
    from dtft.cli import (
        BenchCommand,
        DrillCommand,
        HostFlags,
        JobFlags,
        PlaceFlags,
        SoakCommand,
    )
    from dtft.elastic.local_cluster import ClusterOptions


LOOKUP_S = 10.0
"""Limit in seconds of the lookup of one name in `bind_address`."""


def handed_on(flags: "HostFlags") -> list[str]:
    """Returns the flags that a cluster passes to its agents, with absolute paths.

    These are --domain-file, --tls-cert, --tls-key and --nixl, if given.

    Raises:
        ValueError: a file cannot be read or has invalid contents, or flags exclude each
            other.
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
    """Returns the certificate of --tls-cert and --tls-key; None if neither is given.

    Both files are read once, as a check.

    Raises:
        ValueError: only one of the two flags is given, --nixl is given too, or the
            files cannot be read or used together.
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
    """Makes a self-signed certificate in `directory`; returns the flags that name it.

    The certificate encrypts the traffic between hosts. The job's secret, not the
    certificate, authenticates the peers.

    Raises:
        ValueError: --tls-cert or --nixl is given too, or `openssl` fails.
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
    """Returns the fields of one host's `AgentConfig` that the flags decide.

    These are `domain` (the label of its failure domains), `tls` (its certificate, or
    None) and `nixl` (whether it fetches slices with NIXL). `flags` are the flags that
    are equal on all hosts, and `place` those of the host with the name `host`.

    Raises:
        ValueError: a flag or a file has an invalid value.
    """
    return {
        "domain": domain_of(flags, place, host),
        "tls": tls_of(flags),
        "nixl": flags.nixl,
    }


def domain_of(flags: "HostFlags", place: "PlaceFlags", host: str) -> str:
    """Returns the label of a host's failure domains, from --domain or --domain-file.

    The label has the form LEVEL=NAME,LEVEL=NAME. It is "" if neither flag is given, or
    if the file has no levels. --domain is in `place`, and --domain-file, which has a
    line for each host, in `flags`. `host` is the host's name.

    Raises:
        ValueError: both are given, the label or the file cannot be read, or the file
            has no line for the host.
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


def for_clusters(
    command: "DrillCommand | SoakCommand | BenchCommand", words: list[str], prog: str
) -> tuple[Experiment, list[str]]:
    """Loads the experiment; returns it with the overrides for the runs' clusters.

    The overrides leave out the flag of the run directory, because each run gets a
    separate one. Also calls `end_at_signals`.

    Args:
        command: the command's flags, with CONFIG and the number of hosts.
        words: overrides of config keys, as typed on the command line.
        prog: the command, for the help text.

    Raises:
        ValueError: the experiment does not fit the cluster, the arena directory does
            not exist, or the config sets `checkpoint.storage_directory`, which the runs
            would share.
        SystemExit: CONFIG or a key of it is wrong (see `load_experiment`).
    """
    overrides = [*words, *command.run_flags.keys()]
    experiment = load_experiment(command.config, overrides, prog)
    check_experiment(experiment)
    check_arena_directory(Path(experiment.checkpoint.arena_directory))
    if shared := experiment.checkpoint.storage_directory:
        raise ValueError(
            f"checkpoint.storage_directory={shared}: the runs that {prog} compares "
            "would share it. Leave --checkpoint.storage_directory out; each run then "
            "stores in its own run directory."
        )
    end_at_signals()
    cluster = experiment.cluster
    sizes = ["--cluster.hosts", str(cluster.hosts)]
    sizes += ["--cluster.min_replicas", str(cluster.min_replicas)]
    return experiment, [*words, *sizes]


def end_at_signals() -> None:
    """Makes a stop signal raise an exception, so that clusters are closed.

    SIGINT raises KeyboardInterrupt; SIGTERM and SIGHUP raise SystemExit. Further
    signals in the next 30 s (`CLEANUP_S`) are ignored, because a second exception would
    end the closing early. They are usual: Ctrl-C reaches this process and the command
    that has started it, and that command then sends SIGTERM.
    """
    closing_until = float("-inf")

    def heard(number: int, _frame: object) -> None:
        nonlocal closing_until
        if time.monotonic() < closing_until:
            return
        closing_until = time.monotonic() + CLEANUP_S
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    for number in heard_signals():
        signal.signal(number, heard)


def prepare_run(experiment: Experiment) -> tuple[Path, list[str]]:
    """Checks and makes the run directory; returns its path and the flag that names it.

    Raises:
        ValueError: the run cannot continue the checkpoints of the directory (see
            `config_to_continue`), or the directory cannot be written to.
    """
    directory = Path(with_run_dir(experiment).log.run_dir).resolve()
    config_to_continue(experiment, directory)
    make_directory(directory)
    return directory, ["--log.run_dir", str(directory)]


def store_address(job: "JobFlags") -> StoreAddress:
    """Returns the address of etcd, from --store and the flags that begin with --store-.

    Raises:
        ValueError: a flag has an invalid value or lacks a flag that it requires, or the
            job's name is empty or has characters that are not allowed.
    """
    check_name("--job", job.name)
    return StoreAddress.parse(
        job.store,
        ca=job.store_ca,
        certificate=job.store_cert,
        key=job.store_key,
        user=job.store_user,
        password_file=job.store_password_file,
        prefix=job.store_prefix,
        private=job.store_private,
    )


def bind_address(place: "PlaceFlags", store: StoreAddress) -> str:
    """Returns the address at which a host listens for other hosts, from --bind.

    Without --bind this is the address from which this machine reaches etcd, with port
    0. If this address differs between etcd's members, it is the first that is not on
    loopback.

    Raises:
        ValueError: --bind is not HOST:PORT, or is on loopback although etcd is not; or
            --bind is not given, and this machine reaches no member of etcd from an
            address that hosts on other machines can connect to.
    """
    if not place.bind:
        return format_address(_towards(store), 0)
    try:
        host, _ = parse_address(place.bind)
    except ValueError as error:
        raise ValueError(f"--bind {place.bind}: {error}") from error
    with contextlib.suppress(OSError):  # not an address of this host: `listen` says it
        if is_loopback(local_host(host, LOOKUP_S)) and not any(
            is_loopback(own) for own in _own_addresses(store)[0]
        ):
            raise ValueError(
                f"--bind {place.bind} is on loopback, so hosts on other machines "
                f"cannot connect to it, and --store {store} is not on loopback. Leave "
                "--bind out to listen at the address from which this machine reaches "
                "etcd, or give another address of this machine, such as 10.0.0.5:0."
            )
    return place.bind


def _towards(store: StoreAddress) -> str:
    """Returns the IP address of this machine from which it reaches etcd.

    Raises:
        ValueError: no address of this machine leads to a member of etcd; or only a
            loopback address does, although etcd's host name is not a loopback name on
            every machine.
    """
    found, problems = _own_addresses(store)
    remedy = "give --bind HOST:PORT, an address of this machine, such as 10.0.0.5:0"
    if not found:
        raise ValueError(
            f"--store {store}: no own address leads there ({'; '.join(problems)}). "
            f"Change --store, or {remedy}."
        )
    for own in found:
        if not is_loopback(own):
            return own
    if not any(_is_local_name(host) for host, _ in store.endpoints):
        raise ValueError(
            f"--store {store}: this name stands for {found[0]} on this machine, which "
            "hosts on other machines cannot connect to (see /etc/hosts). If all hosts "
            f"of the job are on this machine, give --bind {format_address(found[0], 0)}"
            f". Otherwise {remedy}."
        )
    return found[0]


def _own_addresses(store: StoreAddress) -> tuple[list[str], list[str]]:
    """Finds the IP addresses of this machine from which it reaches etcd's members.

    Returns the addresses, in the order of the members, and for each member without one
    the reason.
    """
    found: list[str] = []
    problems: list[str] = []
    for host, _ in store.endpoints:
        try:
            found.append(local_host(host, LOOKUP_S))
        except OSError as error:
            problems.append(f"{host}: {error.strerror or error}")
    return found, problems


def _is_local_name(host: str) -> bool:
    """Whether a host's name or IP address means loopback on every machine."""
    name = host.lower()
    return (
        is_loopback(host)
        or name.startswith("localhost.")
        or name.endswith(("localhost", "localhost6"))
    )


def host_name(place: "PlaceFlags") -> str:
    """Returns the name from --host-name; by default machine name and process id.

    Raises:
        ValueError: the name in --host-name is not allowed.
    """
    if place.host_name is None:
        return f"{socket.gethostname()}-{os.getpid()}"
    check_name("--host-name", place.host_name)
    return place.host_name


def read_secret(job: "JobFlags") -> bytes:
    """Returns the job's secret, from the file of --secret-file or DTFT_SECRET_FILE.

    White space before and after the secret is removed.

    Raises:
        ValueError: neither is given, the file cannot be read, or the secret has fewer
            than 16 bytes.
    """
    name = job.secret_file or os.environ.get("DTFT_SECRET_FILE", "")
    if not name:
        raise ValueError(
            "no job secret: give --secret-file FILE or set DTFT_SECRET_FILE; any file "
            "of 16 bytes or more will do, the same on every host."
        )
    try:
        secret = Path(name).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"--secret-file {name}: {error.strerror}") from error
    if len(secret) < 16:
        raise ValueError(
            f"--secret-file {name} holds {len(secret)} bytes; at least 16 are needed."
        )
    return secret


def cluster_options(
    experiment: Experiment, arguments: list[str], spares: int, directory: Path
) -> "ClusterOptions":
    """Returns the options of a local cluster that runs an experiment.

    Args:
        experiment: the experiment.
        arguments: CONFIG and overrides, for each agent.
        spares: number of spare hosts.
        directory: the run directory.
    """
    from dtft.elastic.local_cluster import ClusterOptions, job_name

    return ClusterOptions(
        agent_arguments=tuple(arguments),
        job=job_name(experiment.name),
        hosts=experiment.cluster.hosts,
        spares=spares,
        run_directory=directory,
        storage_directory=experiment.checkpoint.storage_path(directory),
        arena_directory=Path(experiment.checkpoint.arena_directory),
        storage_keep=experiment.checkpoint.storage_keep,
    )
