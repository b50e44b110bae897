"""Checks whether a host may join a job: name, secret, config, TLS and failure domain.

A host registers in the store (etcd) only after these checks.
"""

import hashlib
import hmac
import json
import time
from typing import Any

from dtft.checkpoint.replication import domains_from_labels
from dtft.elastic.assignment import HostRecord
from dtft.elastic.job import AgentConfig
from dtft.elastic.store import Store, claim, job_key, read_view

PAUSE_S = 0.1
SERVED = "--serve-only"
"""Text with which `AgentConfig.config_digest` starts in a job whose processes the user
starts."""


class JobMismatch(ValueError):
    """A host may not join: its name is taken, or a setting does not fit the job.

    Also raised if a client of the job (`inspect_job.Observer`) has another secret.
    """


def proof_of(secret: bytes, job: str) -> str:
    """Returns the HMAC-SHA256 of the job name under the secret, in hexadecimal.

    The store keeps this proof, which does not reveal the secret.
    """
    return hmac.new(secret, job.encode(), hashlib.sha256).hexdigest()


def refuse_taken_name(store: Store, config: AgentConfig) -> None:
    """Waits until no host is registered under this host's name.

    Waits at most for the time of one lease and 1 s more.

    Raises:
        StoreUnavailable: the store does not answer.
        JobMismatch: a host is still registered under the name.
    """
    key = job_key(config.job, f"m/hosts/{config.host}")
    end = time.monotonic() + config.timeouts.lease + 1.0
    while (taken := store.get(key)) is not None:
        if time.monotonic() > end:
            pid = HostRecord.from_json(taken.value).pid
            raise JobMismatch(
                f"--host-name {config.host} is taken: a live host of job "
                f"{config.job!r} has it (process {pid}). Give another name."
            )
        time.sleep(PAUSE_S)


def check_domain(store: Store, config: AgentConfig) -> None:
    """Checks this host's failure domain labels against those of registered hosts.

    Raises:
        StoreUnavailable: the store does not answer.
        JobMismatch: a label cannot be parsed, some labels have a level (power, rack)
            that others lack, or a rack is in two power domains.
    """
    records = read_view(store, config.job)[0].hosts.values()
    labels = {record.host: record.domain for record in records}
    try:
        domains_from_labels({**labels, config.host: config.domain})
    except ValueError as error:
        raise JobMismatch(f"--domain of {config.host}: {error}") from error


def _fingerprint(config: AgentConfig) -> dict[str, Any]:
    """Returns the settings that must be equal on all hosts of a job.

    These are the config's digest, whether TLS is used, and the proof of the secret.
    """
    return {
        "secret": proof_of(config.secret, config.job),
        "config": config.config_digest,
        "tls": config.tls is not None,
    }


def claims_of(config: AgentConfig) -> dict[str, bytes]:
    """Returns the job's settings that hosts write again to a store that has lost data.

    Returns:
        Maps the name of a key in the store to its value. "fingerprint": the config's
        digest, whether TLS is used, and a proof of the secret, as JSON. "terms" (only
        in a served job, once a process has attached): the settings that must be equal
        in all processes that the user starts, as JSON.
    """
    claims = {"fingerprint": json.dumps(_fingerprint(config)).encode()}
    return claims | ({"terms": config.terms.encode()} if config.terms else {})


def check_job(store: Store, config: AgentConfig) -> None:
    """Compares this host's secret, config and TLS setting with those of the job.

    The first host of a job writes its own settings to the store, with a proof in place
    of the secret.

    Raises:
        StoreUnavailable: the store does not answer.
        JobMismatch: a setting differs.
    """
    secret_proof, mine = proof_of(config.secret, config.job), _fingerprint(config)
    key = job_key(config.job, "m/fingerprint")
    found = json.loads(claim(store, key, json.dumps(mine).encode()))
    if not hmac.compare_digest(found["secret"], secret_proof):
        raise JobMismatch(
            f"the secret of --secret-file is not that of job {config.job!r} "
            f"at {config.store}: copy the job's secret file to this host."
        )
    if found["config"].startswith(SERVED) != config.served:
        asked, begun = ("with", "without") if config.served else ("without", "with")
        raise JobMismatch(
            f"job {config.job!r} at {config.store} was begun {begun} --serve-only, "
            f"this agent is started {asked} it. Start every agent of a job alike, or "
            "use another --job."
        )
    if config.served and found["config"] != config.config_digest:
        raise JobMismatch(
            f"job {config.job!r} at {config.store} was begun with {found['config']}, "
            f"this agent has {config.config_digest}. Start every agent alike, or use "
            "another --job."
        )
    if found.get("tls", False) != mine["tls"]:
        has = "encrypts its connections" if found.get("tls") else "does not use TLS"
        raise JobMismatch(
            f"job {config.job!r} {has}: give --tls-cert and --tls-key on all hosts of "
            "a job, or on none."
        )
    if found["config"] != config.config_digest:
        raise JobMismatch(
            f"the resolved config (digest {config.config_digest[:12]}) is "
            f"not that of job {config.job!r} (digest "
            f"{found['config'][:12]}): start every agent with the same CONFIG "
            "and overrides."
        )
