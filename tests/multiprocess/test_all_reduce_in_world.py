"""All-reduce between four real processes over gloo."""

import pytest

from dtft.elastic.processes import free_port
from experiments.worlds import run_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_every_algorithm_between_real_processes() -> None:
    """Equal to native within rounding, everywhere; the ring's bits know no order."""
    world = run_world(
        "tests.support.reduce_in_world",
        [[str(delay)] for delay in (1.5, 0, 1, 0.5)],
        address=f"127.0.0.1:{free_port()}",
        deadline_s=110,
    )
    at_once, late = world[0]
    for number, first in enumerate(world[0]):
        for name, (digest, error) in first.items():
            assert error < 1e-6, name
            assert all(process[number][name][0] == digest for process in world), name
    for name in ("ring", "again", "tree", "gather"):
        assert at_once[name] == late[name]
    assert at_once["ring"] == at_once["again"]


def test_a_failing_process_is_named() -> None:
    """The others, which would wait for it, are ended."""
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*could not convert"):
        run_world(
            "tests.support.reduce_in_world",
            [["0"], ["soon"]],
            address=f"127.0.0.1:{free_port()}",
            deadline_s=100,
        )
