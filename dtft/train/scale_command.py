"""`dtft scale`: more or fewer replicas for a live job; one line says what happened.

Exit codes: 0 the job trains so, 1 it could not be done (or not in time), 2 the job may
not have this size, or there is no such job. Must not know how a job is scaled:
`elastic.scale_job` does.
"""

import json
import sys
from typing import TYPE_CHECKING, Any

from dtft.checkpoint.tables import size_text

if TYPE_CHECKING:
    from dtft.train.commands import Scale


def run(options: "Scale") -> int:
    """Runs the command.

    Raises:
        ValueError: wrong input, no such job, another secret, or a size that the job
            may not have.
    """
    from dtft.elastic.inspect_job import Observer
    from dtft.elastic.scale_job import scale
    from dtft.elastic.store import EtcdStore, StoreUnavailable
    from dtft.train.job_options import read_secret, store_address

    if options.replicas < 1 or options.timeout <= 0:
        raise ValueError(
            f"--replicas {options.replicas}, --timeout {options.timeout:g}: both are "
            "above 0. Give the number of replicas that shall train, and seconds."
        )
    job = options.job
    address, secret = store_address(job), read_secret(job)
    store = EtcdStore(address)
    try:
        observer = Observer(store, job.store, job.name, secret)
        found = scale(observer, options.replicas, options.timeout)
    except StoreUnavailable as error:
        raise ValueError(f"--store {job.store}: {error}") from error
    except RuntimeError as error:
        print(f"dtft: error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        store.close()
    print(json.dumps(found) if options.json else line(job.name, found))
    return 0


def line(job: str, found: dict[str, Any]) -> str:
    """What happened, for people.

    >>> line("j", {"replicas": 3, "before": 3, "hosts": 3})
    'job j trains with 3 replicas (3 hosts) already; nothing was changed'
    """
    size = f"{found['replicas']} replicas ({found['hosts']} hosts)"
    if "step" not in found and found.get("asked_again"):
        return f"job {job} trains with {size}; its leader changed meanwhile"
    if "step" not in found:
        return f"job {job} trains with {size} already; nothing was changed"
    return (
        f"job {job} trains with {size} instead of {found['before']}: went on from step "
        f"{found['step']}, {size_text(found['bytes_from_peers'])} from peers' memory "
        f"and {size_text(found['bytes_from_storage'])} from storage, "
        f"{found['seconds']:.2f} s after it was asked for"
    )
