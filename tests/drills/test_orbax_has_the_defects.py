"""Stock Orbax really has the defects of `tests/unit/checkpoint/test_orbax_defects.py`.

If one of these fails, a new Orbax has lost a defect: say so where it is claimed
(`python experiments/orbax_defects.py` writes the table).
"""

import pytest

from experiments.orbax_defects import CASES, shown

pytestmark = [pytest.mark.drill, pytest.mark.drill_all, pytest.mark.timeout(400)]


@pytest.mark.parametrize("defect", CASES)
def test_orbax(defect: str) -> None:
    has_it, seen = shown(defect)
    assert has_it, seen
