"""Deadlines fit together, or the error says which to change."""

from typing import Any

import pytest

from dtft.checkpoint.timeouts import Timeouts


@pytest.mark.parametrize(
    "given, told",
    [
        ({"data": 0.0}, "timeouts.data=0.0 .* --timeouts.data"),
        ({"lease": 1.0}, "timeouts.lease=1.0 .* --timeouts.lease 2"),
        ({"step": 1.0}, "timeouts.step=1.0 is below 3 s.* --timeouts.step 3"),
        ({"restore": 180.0}, "restore=180.0 must be below .*Raise --timeouts.start"),
        ({"save": 30.0}, "save=30.0 must be above .* Raise --timeouts.save"),
        ({"step": 120.0}, "step=120.0 must be below .* Raise --timeouts.stage"),
    ],
)
def test_what_does_not_fit_is_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){told}"):
        Timeouts(**given)


def test_a_save_may_last_longer_than_a_replication() -> None:
    assert Timeouts().save_limit == 60.0
    assert Timeouts(replicate=120.0).save_limit == 150.0
    assert Timeouts(save=45.0).save_limit == 45.0
