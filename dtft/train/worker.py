"""The trainer process of one host in a launched job.

``python -m dtft.train.worker CONFIG [overrides]`` is started by an agent, does its
imports, and waits on the agent's socket until it is given a slot; so a standby costs
nothing when it is needed. Then runs the same loop as ``dtft train``, in an
`AgentRuntime`. Disposable: it may be killed at any moment.
"""

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtft.checkpoint.managers import AgentLink, LinkClosed, hello
from dtft.elastic.stack_dump import accept_requests
from dtft.train.agent_runtime import AgentRuntime
from dtft.train.config import ConfigError, load, to_json
from dtft.train.experiment import Experiment
from dtft.train.heap import keep_freed
from dtft.train.stop import NonFinite

logger = logging.getLogger(__name__)

FATAL = (ValueError, NonFinite)
"""Errors that would come again on any host: they end the job."""
LAST_WORDS_S = 5.0
"""So long does a trainer that has failed wait for its agent to end it."""
ERROR_CHARACTERS = 2000
TRACEBACK_CHARACTERS = 8 << 10
"""At most so much of an exception's text and traceback is told; the log has all."""


def main(arguments: Sequence[str]) -> None:
    """Waits for a slot, then trains."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    logging.getLogger("absl").setLevel(logging.WARNING)
    accept_requests()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to answer
    _keep_stdout_for_people()
    config, *overrides = arguments
    experiment = load(config, overrides, prog="dtft.train.worker")
    link = AgentLink.connect(Path(os.environ["DTFT_AGENT_SOCKET"]), timeout_s=10.0)
    trainer = Trainer(experiment, link, arguments)
    try:
        _import_everything(experiment)
        hello(link, {})
        logger.info("warm, waiting for a slot")
        start = link.receive()
        logger.info("slot %d, generation %d", start["slot"], start["generation"])
        trainer.train(start)
        link.wait_closed()  # the agent ends this process
    except LinkClosed:
        os._exit(0)
    except FATAL as error:
        _log_error()
        told = {"message": str(error), "code": _code(error)}
        _last_words(link, "fatal", **told, **_evidence(error, trainer.at))
    except BaseException as error:  # SystemExit too: whoever calls it ends a trainer
        _log_error()
        _last_words(link, "failed", **failure(error, trainer.at))
        os._exit(1)
    os._exit(0)


def failure(error: BaseException, at: tuple[str, int]) -> dict[str, Any]:
    """The fields of `failed`: what the agent and its leader are told of an exception.

    Args:
        error: that has ended training, with its traceback.
        at: phase and step in which it came.
    """
    phase, step = at
    text = "".join(traceback.format_exception(error))
    return {
        "step": step,
        "phase": phase,
        "error": _cut(f"{type(error).__name__}: {error}", ERROR_CHARACTERS),
        "traceback": text[-TRACEBACK_CHARACTERS:],
        "log": _log_path(),
    }


def _evidence(error: Exception, at: tuple[str, int]) -> dict[str, Any]:
    """The log, and a traceback where the text alone may not say enough.

    dtft's own errors say what to change; an error while steps are made may be of the
    user's model or data.
    """
    of_user = at[0] not in ("start", "restore")
    if of_user and not isinstance(error, ConfigError | NonFinite):
        return failure(error, at)
    return {"log": _log_path()}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _log_path() -> str:
    """Where stderr goes; "" if that is no file."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if path.startswith("/") else ""


def _last_words(link: AgentLink, op: str, **fields: Any) -> None:
    """Tells the agent how this ends, and leaves the end of this process to it.

    An agent that does not take the message, or does not end this process, is not
    waited for longer than `LAST_WORDS_S`.
    """

    def tell() -> None:
        with contextlib.suppress(LinkClosed):
            link.send(op, **fields)
            link.wait_closed()

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    thread.join(LAST_WORDS_S)


class Trainer:
    """Trains in the slot that the agent gives."""

    def __init__(
        self, experiment: Experiment, link: AgentLink, arguments: Sequence[str]
    ) -> None:
        """Has no slot yet."""
        self._experiment, self._link, self._arguments = experiment, link, arguments
        self._runtime: AgentRuntime | None = None

    @property
    def at(self) -> tuple[str, int]:
        """Phase and step of training."""
        return self._runtime.at if self._runtime is not None else ("start", 0)

    def train(self, start: dict[str, Any]) -> None:
        """Runs the loop and tells the agent of its end."""
        from dtft.train.disk import Disk
        from dtft.train.logs import write_config
        from dtft.train.loop import run

        usual = f"dtft agent {' '.join(self._arguments)}"
        resume = os.environ.get("DTFT_RESUME_COMMAND", usual)
        runtime = AgentRuntime(self._experiment, self._link, start, resume)
        self._runtime = runtime
        if runtime.is_leading:
            where, config = runtime.run_directory, to_json(self._experiment)
            Disk(where).attempt(lambda: write_config(where, config, resume.split()))
        result = run(self._experiment, runtime)
        sys.stdout.flush()
        self._link.send("finished", step=result.step, summary=runtime.summary)


def _keep_stdout_for_people() -> None:
    """What libraries write to file descriptor 1 (gloo does) goes to the log instead."""
    people = io.BufferedWriter(ForPeople(os.dup(1)))
    sys.stdout = io.TextIOWrapper(people, line_buffering=True)
    os.dup2(2, 1)


class ForPeople(io.RawIOBase):
    """A stdout that may go away: what a closed terminal does not take is dropped.

    Training must not end because nobody reads what it says.
    """

    def __init__(self, descriptor: int) -> None:
        """Writes to `descriptor`."""
        super().__init__()
        self._descriptor = descriptor

    def fileno(self) -> int:
        """The file descriptor, for who asks whether it is a terminal."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Writes what the reader takes; all of it if there is none any more."""
        content = memoryview(data)
        try:
            return os.write(self._descriptor, content)
        except OSError:
            return content.nbytes


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

    import dtft.train.loop  # noqa: F401
    from dtft.checkpoint.managers import AgentCheckpointManager  # noqa: F401
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
