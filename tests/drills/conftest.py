"""Shared by all drills: one undisturbed run per kind of job, one compilation cache."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def control(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Arguments that make a drill reuse the undisturbed run of its kind of job."""
    root = tmp_path_factory.mktemp("controls")
    return lambda name: ["--control", str(root / name)]


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory):
    """Compiled programs are the same in every drill of one kind."""
    with pytest.MonkeyPatch.context() as patch:
        cache: Path = tmp_path_factory.mktemp("xla-cache")
        patch.setenv("DTFT_COMPILATION_CACHE", str(cache))
        yield
