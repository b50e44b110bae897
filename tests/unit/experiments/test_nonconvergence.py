"""T1: Adam and AdaBelief go to the wrong end of [-1, 1]; with a maximum they do not.

The problems are those of `experiments/nonconvergence.py`.
"""

from dataclasses import replace

import jax
import pytest
from nonconvergence import PROBLEMS, Problem, end, trajectory, transforms


def _ends(problem: Problem) -> dict[str, float]:
    return {n: end(trajectory(problem, t)) for n, t in transforms(problem).items()}


@pytest.mark.parametrize("problem", PROBLEMS[:3], ids=str)
def test_only_the_maximum_converges(problem: Problem) -> None:
    ends = _ends(problem)
    assert ends["adam"] > 0.9 and ends["adabelief"] > 0.9
    assert ends["amsgrad"] < -0.9
    assert ends["max_adabelief"] < -0.99
    assert ends["max_adabelief, bias_correct_max=False"] < -0.9


def test_only_the_maximum_converges_in_a_million_steps_of_float64() -> None:
    with jax.enable_x64(True):
        ends = _ends(replace(PROBLEMS[3], eps=1e-8, eps_root=0.0))
    assert ends["adam"] > 0.99 and ends["adabelief"] > 0.99
    assert ends["max_adabelief"] < -0.99
