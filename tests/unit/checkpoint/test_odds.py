"""The exact count, GEMINI's figures, brute force and simulation agree."""

import itertools

import pytest

from dtft.checkpoint.replication.odds import (
    _holders,
    gemini_bound,
    odds_table,
    simulate,
    standard_error,
    survival,
)


@pytest.mark.parametrize("num_hosts", range(1, 10))
@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_exact_is_what_counting_every_loss_gives(num_hosts: int, copies: int) -> None:
    holders = [set(found) for found in _holders(num_hosts, copies, None).tolist()]
    for losses in range(num_hosts + 1):
        sets = [set(s) for s in itertools.combinations(range(num_hosts), losses)]
        survived = sum(not any(h <= lost for h in holders) for lost in sets)
        exact = survival(num_hosts, copies, losses)
        assert exact == pytest.approx(survived / len(sets), abs=1e-12)
        assert gemini_bound(num_hosts, copies, losses) <= exact + 1e-12


@pytest.mark.parametrize(
    ("num_hosts", "copies", "losses", "published"),
    [
        (16, 2, 2, 0.933),
        (128, 2, 2, 0.992),
        (1024, 2, 8, 0.973),
        (1024, 3, 8, 0.9999),
    ],
)
def test_geminis_figures(
    num_hosts: int, copies: int, losses: int, published: float
) -> None:
    bound = gemini_bound(num_hosts, copies, losses)
    assert bound == pytest.approx(published, abs=1e-3)
    assert -1e-12 <= survival(num_hosts, copies, losses) - bound <= 2e-3


@pytest.mark.parametrize("copies", [2, 3])
def test_the_bound_is_exact_below_two_groups(copies: int) -> None:
    for losses in range(2 * copies):
        exact = survival(24, copies, losses)
        assert exact == pytest.approx(gemini_bound(24, copies, losses), abs=1e-12)
        assert (exact == 1) == (losses < copies)


@pytest.mark.parametrize(
    ("num_hosts", "copies", "losses"),
    [(16, 2, 3), (17, 2, 4), (20, 3, 6), (64, 2, 8), (11, 4, 6)],
)
def test_formula_and_simulation_agree(num_hosts: int, copies: int, losses: int) -> None:
    exact, trials = survival(num_hosts, copies, losses), 4000
    found = simulate(num_hosts, copies, losses, trials=trials, seed=1)
    assert abs(found - exact) <= 4 * standard_error(exact, trials) + 1 / trials


def test_groups_of_unlike_racks_are_as_good_against_single_losses() -> None:
    racks = [f"rack-{i // 4}" for i in range(16)]
    exact, trials = survival(16, 2, 4), 4000
    found = simulate(16, 2, 4, domains=racks, trials=trials)
    assert abs(found - exact) <= 4 * standard_error(exact, trials)


def test_thousands_of_hosts_are_no_trouble() -> None:
    assert 0.99 < survival(10_000, 2, 10) < 1
    assert 0.7 < survival(10_000, 2, 50) < gemini_bound(10_000, 2, 2)
    assert survival(10_001, 3, 2) == 1


def test_table() -> None:
    lines = odds_table(16, 2, max_losses=3, trials=200).splitlines()
    assert lines[0].startswith("16 hosts, 2 copies of every slice, in groups of 2")
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "3"]
    assert lines[2].split()[1] == "1.00000" and lines[3].split()[1] == "0.93333"
    assert len(odds_table(2, 2, trials=10).splitlines()) == 4


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="hosts=0 and copies=2"):
        survival(0, 2, 0)
    with pytest.raises(ValueError, match="losses=5 of 4 hosts. Allowed: 0 to 4"):
        simulate(4, 2, 5)


def test_the_table_says_when_there_are_fewer_hosts_than_copies() -> None:
    first = odds_table(2, 3, max_losses=1, trials=10).splitlines()[0]
    assert "2 copies of every slice (3 asked for, but a host keeps one)" in first
