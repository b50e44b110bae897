"""`save_interval_steps="auto"`: as many saves as the budget allows."""

from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from dtft.checkpoint import ReplicatedOptions
from dtft.checkpoint.managers.save_clock import SaveClock
from dtft.checkpoint.replication.snapshot_interval import Automatic
from tests.support.managers import forget, memory_only


def saved(clock: SaveClock, now: list[float], steps: int, save_s: float) -> list[int]:
    """Steps of one second; which are saved, if a save takes `save_s`."""
    found = []
    for step in range(1, steps + 1):
        now[0] += 1.0
        if clock.cadence.is_boundary(step):
            with clock.saving(step, ocp.args.StandardSave({"w": jnp.ones(1)})):
                now[0] += save_s
            found.append(step)
    return found


def test_saves_keep_to_the_budget_and_multiples_of_the_maximum_have_one() -> None:
    now = [0.0]
    clock = SaveClock(None, Automatic(budget=0.01, maximum=50), lambda: now[0])
    found = saved(clock, now, 500, save_s=0.1)
    assert found[:9] == list(range(1, 10))
    assert {50, 100, 450, 500} <= set(found)
    assert sum(0.1 for step in found if step > 50) <= 0.01 * 450
    assert len([step for step in found if step > 50]) >= 0.7 * 450 / 10


def test_what_is_cheap_is_saved_every_step_and_a_fixed_interval_stays() -> None:
    now = [0.0]
    cheap = SaveClock(None, Automatic(budget=0.01), lambda: now[0])
    assert saved(cheap, now, 100, save_s=0.001) == list(range(1, 101))
    fixed = SaveClock(7, Automatic(), lambda: now[0])
    assert saved(fixed, now, 30, save_s=9.0) == [7, 14, 21, 28]


def test_a_manager_saves_what_the_clock_says(tmp_path: Path) -> None:
    manager = memory_only(
        tmp_path,
        save_interval_steps="auto",
        stall_budget=1e-9,
        max_interval_steps=16,
        memory_to_keep=100,
    )
    for step in range(1, 60):
        state = {"w": jnp.full(3, step)}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state))
        manager.save(step, args=args)
    # Nothing is as cheap as that: only multiples of the longest interval are left.
    assert manager.all_steps() == [*range(1, 10), 16, 32, 48]
    forget(manager)


@pytest.mark.parametrize(
    "given, text",
    [
        ({"stall_budget": 0.02}, "save_interval_steps=1 is fixed"),
        ({"save_interval_steps": "auto", "stall_budget": 2.0}, "budget=2.0"),
        ({"save_interval_steps": 0}, "save_interval_steps=0 is not allowed"),
    ],
)
def test_options_without_sense_are_refused(given: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ReplicatedOptions(**given)
