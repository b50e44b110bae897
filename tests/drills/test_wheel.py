"""The wheel where dtft is not checked out; `make wheel-test`: in empty environments."""

from pathlib import Path

import pytest

from tests.support.harness import memory
from tests.wheel.building import build
from tests.wheel.environment import borrowing, use

pytestmark = [pytest.mark.drill, pytest.mark.drill_all, pytest.mark.timeout(300)]


def test_a_wheel_is_enough(tmp_path: Path) -> None:
    wheel = build("wheel", tmp_path / "wheel")
    python = borrowing(tmp_path / "environment", wheel)
    use(python, tmp_path / "empty", *memory())
