"""What a commit's health is, from what hosts hold."""

from dtft.checkpoint.replication.commit import commit_health, worth_showing
from tests.support.commits import HOSTS, commit_of, holdings_of, layout


def test_every_copy_is_there() -> None:
    state = layout(1, 4)
    health = commit_health(commit_of(state, 7), state, holdings_of(state, 2, 7))
    assert (health.step, health.state, health.copies) == (7, "healthy", (2, 4))
    assert health.num_bytes == 8 * 4 * 4 + 3 * 4
    assert health.slices_on("h0") >= 2 and health.slices_on("nobody") == 0


def test_a_lost_host_degrades_and_two_may_lose() -> None:
    state = layout(1, 4)
    commit, holdings = commit_of(state, 7), holdings_of(state, 2, 7)
    one_less = {host: held for host, held in holdings.items() if host != "h2"}
    assert commit_health(commit, state, one_less).state == "degraded"
    outcomes = set()
    for first, second in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]:
        gone = {HOSTS[first], HOSTS[second]}
        left = {host: held for host, held in holdings.items() if host not in gone}
        found = commit_health(commit, state, left)
        outcomes.add(found.state)
        assert bool(found.problem) == (found.state == "lost")
    assert outcomes == {"degraded", "lost"}
    assert "no live host" in commit_health(commit, None, {}).problem


def test_older_commits_that_were_dropped_are_not_shown() -> None:
    state = layout(1, 4)
    whole = commit_health(commit_of(state, 7), state, holdings_of(state, 2, 7))
    dropped = commit_health(commit_of(state, 6), state, holdings_of(state, 2, 7))
    newer = commit_health(commit_of(state, 8), state, holdings_of(state, 2, 7))
    assert worth_showing([dropped, whole, newer]) == [whole]
    partly = {HOSTS[0]: holdings_of(state, 2, 7)[HOSTS[0]]}
    assert commit_health(commit_of(state, 7), state, partly).state == "lost"
    assert worth_showing([dropped, newer]) == [newer]
    assert worth_showing([]) == []
