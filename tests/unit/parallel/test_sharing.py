"""Which rows whom: the same rows of a step for all shares, each once."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.balance.balance import Rules
from dtft.config.experiment import BalanceConfig
from dtft.parallel.row_assignment import Sharing, sharing_of


@st.composite
def shared(draw: st.DrawFn) -> tuple[Sharing, list[int]]:
    """A sharing and counts that are shares of it, 0 among them."""
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    counts[0] += not any(counts)
    sharing = Sharing(
        num_replicas=len(counts),
        num_microbatches=sum(counts),
        rows_each=draw(st.integers(1, 5)),
        most=draw(st.integers(max(counts), 20)),
    )
    return sharing, counts


@given(shared(), st.integers(0, 1000))
def test_a_step_uses_the_same_rows_whatever_the_shares(
    case: tuple[Sharing, list[int]], step: int
) -> None:
    sharing, counts = case
    used = [
        row
        for replica in range(sharing.num_replicas)
        for row in sharing.rows(step, counts, replica)
    ]
    batch = sharing.num_microbatches * sharing.rows_each
    assert used == list(range(step * batch, (step + 1) * batch))


@given(shared())
def test_microbatches_are_the_same_for_all_shares(
    case: tuple[Sharing, list[int]],
) -> None:
    sharing, counts = case
    each = sharing.rows_each
    found: Counter[range] = Counter()
    for replica in range(sharing.num_replicas):
        rows = sharing.rows(3, counts, replica)
        found.update(rows[i : i + each] for i in range(0, len(rows), each))
    expected = range(3 * sharing.num_microbatches, 4 * sharing.num_microbatches)
    assert found == Counter(range(i * each, (i + 1) * each) for i in expected)
    assert all(len(rows) <= sharing.room for rows in found)


@pytest.mark.parametrize("counts", [(1, 2), (4, 0, 0), (2, 2, 0), (-1, 2, 2)])
def test_counts_that_are_no_shares_are_refused(counts: tuple[int, ...]) -> None:
    sharing = Sharing(num_replicas=3, num_microbatches=3, rows_each=1, most=3)
    with pytest.raises(ValueError, match="do not share 3 microbatches"):
        sharing.check(counts)


@given(st.integers(1, 4096), st.integers(1, 64))
def test_the_default_fits_or_says_what_to_change(batch: int, replicas: int) -> None:
    try:
        sharing = sharing_of(BalanceConfig(), batch, {"replica": replicas})
    except ValueError as error:
        assert "--balance.microbatches" in str(error)
        return
    assert sharing.num_microbatches * sharing.rows_each == batch
    assert sharing.most * replicas >= sharing.num_microbatches
    sharing.check(sharing.work.best(np.ones(replicas)).tolist())


@pytest.mark.parametrize(
    ("config", "mesh", "message"),
    [
        (BalanceConfig(), {"replica": 2, "fsdp": 2}, "mesh.fsdp=2"),
        (BalanceConfig(), {"replica": 1, "stage": 4, "expert": 2}, "mesh.stage=4, "),
        (BalanceConfig(microbatches=5), {"replica": 2}, "such as 4"),
        (BalanceConfig(microbatches=2), {"replica": 3}, "fewer than the 3 replicas"),
        (BalanceConfig(most=2), {"replica": 2}, "--balance.most 32 or more"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    config: BalanceConfig, mesh: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sharing_of(config, 64, mesh)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 2}, "balance.probes=5 does not fit a round of balance.every=2 "),
        ({"every": 0, "probes": 1}, "balance.every=0 is not positive"),
        ({"probes": 0}, "balance.probes=0"),
        ({"microbatches": -1}, "balance.microbatches=-1"),
        ({"most": -1}, "balance.most=-1"),
        ({"patience": 0}, "balance.patience=0 is no whole number of 1 or more"),
        ({"least_gain": 1.5}, r"balance.least_gain=1.5. Allowed: .* from 0 to 1"),
        ({"noise_factor": -1.0}, r"balance.noise_factor=-1.0. Allowed: .* from 0 on"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        BalanceConfig(**options)


def test_settings_are_the_rules_of_the_search() -> None:
    config = BalanceConfig(patience=5, least_gain=0.02, noise_factor=3.0)
    rules = config.rules("proportional")
    assert (rules.policy, rules.patience) == ("proportional", 5)
    assert (rules.least_gain, rules.noise_factor) == (0.02, 3.0)
    assert BalanceConfig().rules("exact") == Rules()
