"""How a drill says that a run which went on elsewhere ended as it should."""

from typing import Any

import pytest

from dtft.drills.compare import say


@pytest.mark.parametrize(
    ("same", "resized", "within", "says"),
    [
        (True, False, True, "are equal bit for bit to the undisturbed run's"),
        (False, False, True, "are DIFFERENT from the undisturbed run's"),
        (False, True, True, "are those of the undisturbed run up to rounding"),
        (False, True, False, "are DIFFERENT from the undisturbed run's"),
    ],
)
def test_a_resized_run_is_said_to_be_within_rounding_only_if_it_is(
    same: bool,
    resized: bool,
    within: bool,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    size: dict[str, Any] = {"hosts": [3, 2], "step": 4, "leaves": 5, "bit_exact": True}
    curve = {"steps": 9, "largest_difference": 1e-7, "tolerance": 1e-4}
    record = {"faults": [], "recoveries": [], "resized": [size] if resized else []}
    record |= {"bit_identical": same, "samples_exactly_once": True, "final_step": 9}
    record |= {"ok": True, "shares": []}
    if resized:
        record["loss_curve"] = curve | {"within_tolerance": within}
    say(record)
    assert says in capsys.readouterr().out.splitlines()[-1]
