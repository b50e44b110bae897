"""Shared by all drills: one undisturbed run per kind of job, one compilation cache."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fast_compilation import SWITCH, without_fast_flags


@pytest.fixture(scope="session")
def control(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Arguments that make a drill reuse the undisturbed run of its kind of job.

    Programs that are compiled otherwise end with other bits: they have their own run.
    """
    root = tmp_path_factory.mktemp("controls")
    return lambda name: ["--control", str(root / os.environ.get(SWITCH, "0") / name)]


@pytest.fixture(scope="session", autouse=True)
def flags_of_make_drills() -> Iterator[None]:
    """Programs are compiled as users compile them, except in `make test`."""
    with pytest.MonkeyPatch.context() as patch:
        if SWITCH not in os.environ:
            patch.setenv("XLA_FLAGS", without_fast_flags(os.environ["XLA_FLAGS"]))
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory):
    """Compiled programs are the same in every drill of one kind."""
    with pytest.MonkeyPatch.context() as patch:
        cache: Path = tmp_path_factory.mktemp("xla-cache")
        patch.setenv("DTFT_COMPILATION_CACHE", str(cache))
        yield


@pytest.fixture(autouse=True)
def memory() -> Iterator[Path]:
    """A place of its own for every arena of a test; it must be empty at the end."""
    directory = Path(tempfile.mkdtemp(prefix="dtft-test-", dir="/dev/shm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTFT_TEST_MEMORY", str(directory))
        yield directory
    directory.rmdir()  # fails if anything was left behind
