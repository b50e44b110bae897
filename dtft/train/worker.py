"""The trainer process of one host in a launched job.

``python -m dtft.train.worker CONFIG [overrides]`` is started by an agent, does its
imports, and waits on the agent's socket until it is given a slot; so a standby costs
nothing when it is needed. Then runs the same loop as ``dtft train``, in an
`AgentRuntime`. Disposable: it may be killed at any moment.
"""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtft.checkpoint.attach import hello
from dtft.checkpoint.link import Link, LinkClosed
from dtft.train.agent_runtime import AgentRuntime
from dtft.train.config import load, to_json
from dtft.train.experiment import Experiment
from dtft.train.heap import keep_freed
from dtft.train.stop import NonFinite

logger = logging.getLogger(__name__)

FATAL = (ValueError, NonFinite)
"""Errors that would come again on any host: they end the job."""


def main(arguments: Sequence[str]) -> None:
    """Waits for a slot, then trains."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    logging.getLogger("absl").setLevel(logging.WARNING)
    _keep_stdout_for_people()
    config, *overrides = arguments
    experiment = load(config, overrides, prog="dtft.train.worker")
    link = Link.connect(Path(os.environ["DTFT_AGENT_SOCKET"]), timeout_s=10.0)
    try:
        _import_everything(experiment)
        hello(link, {})
        logger.info("warm, waiting for a slot")
        start = link.receive()
        logger.info("slot %d, generation %d", start["slot"], start["generation"])
        _train(experiment, link, start, arguments)
        link.wait_closed()  # the agent ends this process
    except LinkClosed:
        os._exit(0)
    except FATAL as error:
        _log_error()
        link.send("fatal", message=str(error), code=_code(error))
        link.wait_closed()
    except Exception:
        _log_error()
        os._exit(1)
    os._exit(0)


def _train(
    experiment: Experiment,
    link: Link,
    start: dict[str, Any],
    arguments: Sequence[str],
) -> None:
    from dtft.train.disk import Disk
    from dtft.train.logs import write_config
    from dtft.train.loop import run

    resume = os.environ.get("DTFT_RESUME_COMMAND", f"dtft agent {' '.join(arguments)}")
    runtime = AgentRuntime(experiment, link, start, resume)
    if runtime.is_leading:
        where, config = runtime.run_directory, to_json(experiment)
        Disk(where).attempt(lambda: write_config(where, config, resume.split()))
    result = run(experiment, runtime)
    sys.stdout.flush()
    link.send("finished", step=result.step, summary=runtime.summary)


def _keep_stdout_for_people() -> None:
    """What libraries write to file descriptor 1 (gloo does) goes to the log instead."""
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)


def _log_error() -> None:
    traceback.print_exc()
    sys.stderr.flush()


def _code(error: Exception) -> int:
    return 1 if isinstance(error, NonFinite) else 2


def _import_everything(experiment: Any) -> None:
    """Pays for imports (and data) now; must not touch a device."""
    if experiment.cluster.devices_per_host > 0:
        # Before there are threads; planned steps are to take what was predicted.
        keep_freed(large=bool(experiment.plan))
    import jax

    import dtft.checkpoint.manager
    import dtft.train.loop  # noqa: F401
    from dtft.train.data import make_datasets

    make_datasets(experiment.data, experiment.seed)

    if experiment.cluster.devices_per_host > 0:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", experiment.cluster.devices_per_host)
    cache = os.environ.get("DTFT_COMPILATION_CACHE")
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


if __name__ == "__main__":
    main(sys.argv[1:])
