"""What `experiments/memory_tier_vs_orbax.py` makes of its measurements."""

import pytest

from experiments.tier_figures import (
    FIGURES,
    median_figures,
    restoring_figures,
    saving_figures,
    summary,
)
from experiments.tier_report import header, table_rows, targets
from experiments.tier_task import LAYOUTS, NUM_HOSTS, host_bytes, num_rows


def side(**figures) -> dict:
    return {**dict.fromkeys(FIGURES), **figures}


OURS = side(
    stall_s=0.012,
    restore_s=0.2,
    transfer_s=0.15,
    rss_anon_growth_bytes=5,
    local_bytes=100,
    memcpy_s=0.01,
    raw_tcp_s=0.1,
)
ORBAX = side(stall_s=0.1, restore_s=1.6)


def verdicts(ours: dict, orbax: dict) -> dict[str, bool]:
    row = {"layout": "fsdp", "mib": 64, "ours": ours, "orbax_p2p": orbax}
    return {target.what: target.met for target in targets([row])}


def test_a_step_is_as_slow_as_its_slowest_host() -> None:
    hosts = [
        {"off_s": [1.0, 1.0], "on_s": [1.5, 1.0], "stall_s": [9, 1, 2], "save_s": [9]},
        {"off_s": [1.0, 1.0], "on_s": [1.0, 1.5], "stall_s": [9, 3, 2], "save_s": [9]},
    ]
    for host in hosts:
        host["save_s"] = host["stall_s"]
    found = saving_figures(hosts)
    assert found["step_inflation"] == 1.5
    assert found["stall_s"] == 2.5  # the first save, with its set-up, is left out


def test_a_restore_counts_only_with_the_right_bytes_on_every_host() -> None:
    saved = [{"step": 3, "digests": {"w": "a"}}] * 2
    good = [
        {**saved[0], "window": (10.0, 11.0), "constructor_s": 0.5},
        {**saved[0], "window": (10.5, 12.0), "constructor_s": 0.75},
    ]
    assert restoring_figures(good, saved) == {"restore_s": 2.0, "constructor_s": 0.75}
    for change, text in (
        ({"digests": {"w": "b"}}, "host 1 got wrong bytes"),
        ({"step": 2}, "host 1 got step 2"),
        ({"error": "ValueError: x"}, "1 of 2 hosts: ValueError: x"),
    ):
        with pytest.raises(RuntimeError, match=text):
            restoring_figures([good[0], good[1] | change], saved)


def test_medians_keep_the_first_error_and_what_was_never_measured() -> None:
    rounds = [side(stall_s=1.0), side(stall_s=3.0, error="x"), side(stall_s=2.0)]
    found = median_figures(rounds)
    assert (found["stall_s"], found["error"], found["restore_s"]) == (2.0, "x", None)


def test_each_target_is_met_at_its_limit_and_missed_beyond() -> None:
    at_limit = OURS | {"stall_s": 0.013, "rss_anon_growth_bytes": 10}
    assert all(verdicts(at_limit, ORBAX).values())
    beyond = {
        "restore_s / Orbax's": {"restore_s": 0.21},
        "transfer_s / raw TCP": {"transfer_s": 0.16},
        "stall_s / memcpy": {"stall_s": 0.0131},
        "anonymous growth / state per host": {"rss_anon_growth_bytes": 11},
    }
    for what, change in beyond.items():
        missed = [w for w, met in verdicts(at_limit | change, ORBAX).items() if not met]
        assert missed == [what]
    missed = verdicts(at_limit, ORBAX | {"stall_s": 0.06})
    assert not missed["stall_s / Orbax's"]


def test_where_orbax_cannot_restore_ours_must() -> None:
    failed = ORBAX | {"restore_s": None, "error": "4 of 4 hosts"}
    assert verdicts(OURS, failed)["restores though Orbax does not (0, else 1)"]
    met = verdicts(OURS | {"restore_s": None, "transfer_s": None}, failed)
    assert not met["restores though Orbax does not (0, else 1)"]
    assert not met["transfer_s / raw TCP"]  # what was not measured is not met


def test_a_row_that_could_not_run_is_shown_and_missed() -> None:
    blank = side(error="needs about 5 MiB | more")
    row = {"layout": "zero1", "mib": 9, "ours": blank, "orbax_p2p": blank}
    lines = table_rows([row])
    assert all(len(line) == len(header()) for line in lines)
    assert "|" not in str(lines[0][-1])
    assert not any(target.met for target in targets([row]))
    assert summary([row])["raw_tcp_bytes_per_s"] is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mib", [1, 16, 64, 2048])
def test_states_are_nearly_as_large_as_asked_and_divide_evenly(
    layout: str, mib: int
) -> None:
    assert num_rows(mib) % NUM_HOSTS == 0
    whole = host_bytes("replicated", mib)
    assert 0.75 * (mib << 20) < whole <= mib << 20
    assert host_bytes(layout, mib) <= whole


def test_a_state_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="mib=0 is too small"):
        num_rows(0)
