"""Which hosts do not reach each other, and which of them the job does without."""

import random

from dtft.elastic.reachability import (
    Reachability,
    believed,
    pair,
    peers_to_try,
    set_aside,
    try_all,
)

HOSTS = ["a", "b", "c", "d"]
ALL = {host: [it for it in HOSTS if it != host] for host in HOSTS}


def test_whoever_is_tried_tries_as_well_and_all_pairs_come() -> None:
    for count in (1, 2, 3, 5, 65, 66, 200):
        hosts = [f"h{n:03}" for n in range(count)]
        seen = set()
        for turn in range(8):
            tried = {host: peers_to_try(host, hosts, turn) for host in hosts}
            assert all(len(peers) <= 64 for peers in tried.values())
            for host, peers in tried.items():
                assert all(host in tried[peer] and host != peer for peer in peers)
                seen |= {pair(host, peer) for peer in peers}
        assert len(seen) == count * (count - 1) // 2


def test_both_of_a_pair_have_to_say_so() -> None:
    assert believed(ALL, {"a": ["b"], "b": ["a"]}) == {("a", "b")}
    assert not believed(ALL, {"a": ["b"]})


def test_a_host_that_complains_of_everybody_moves_nobody() -> None:
    assert not believed(ALL, {"a": ["b", "c", "d", "nobody"], "x": HOSTS})


def test_a_host_that_no_other_reaches_is_believed_to_be_apart() -> None:
    missed = {"b": ["a"], "c": ["a"], "d": ["a"]}
    assert believed(ALL, missed) == {("a", "b"), ("a", "c"), ("a", "d")}
    assert not believed({"a": ["b"], "b": ["a"]}, {"a": ["b"]})


def test_who_is_set_aside() -> None:
    ab = {("a", "b")}
    assert set_aside(HOSTS, ["a", "b", "c"], ab, "c") == ["b"]  # the higher slot
    assert set_aside(HOSTS, ["a", "b", "c"], ab, "b") == ["a"]  # not the leader's host
    assert set_aside(HOSTS, ["a", "c", "d"], ab, "c") == ["b"]  # whoever has no slot
    # Cut off from all but the leader's host: it goes itself, not those who miss it.
    assert set_aside(HOSTS, ["a", "b", "c"], {("a", "c"), ("a", "d")}, "b") == ["a"]
    assert set_aside(["b", "c"], ["a", "b", "c"], ab, "c") == []  # one is not there


def test_the_others_all_reach_each_other_whatever_is_cut() -> None:
    rng = random.Random(1)
    for _ in range(300):
        hosts = [f"h{n}" for n in range(rng.randint(2, 8))]
        pairs = {pair(*rng.sample(hosts, 2)) for _ in range(rng.randint(0, 9))}
        aside = set_aside(hosts, hosts[:3], pairs, rng.choice(hosts))
        left = set(hosts) - set(aside)
        assert not any(a in left and b in left for a, b in pairs)
        assert len(aside) == len(set(aside)) <= len(pairs)


def test_pairs_count_once_a_cut_is_suspected_until_they_reach_each_other() -> None:
    reach, cut = Reachability(), {"a": ["b"], "b": ["a"]}
    assert not reach.learn(ALL, cut, 0.0) and not reach.is_to_be_tried
    reach.is_suspected = True
    assert reach.learn(ALL, cut, 0.0) == {("a", "b")}
    assert reach.text("b") == "b and a do not reach each other"
    reach.committed()
    assert reach.is_to_be_tried and not reach.learn(ALL, cut, 1.0)
    assert reach.apart == {("a", "b")}
    assert not reach.learn({host: () for host in HOSTS}, {}, 2.0)
    assert reach.apart == {("a", "b")}  # nobody has tried
    reach.learn(ALL, {}, 3.0)
    assert not reach.apart


def test_hosts_are_asked_again_less_and_less_often() -> None:
    reach, cut = Reachability(), {"a": ["b"], "b": ["a"]}
    reach.is_suspected = True
    reach.learn(ALL, cut, 0.0)
    asked_at = []
    for now in range(100):
        if reach.is_due(now):
            asked_at.append(now)
            assert reach.ask(HOSTS) == {"a": ["b"], "b": ["a"]}
            assert reach.answered("a", ["b"]) == reach.answered("b", ["a"]) == []
    assert asked_at == [2, 6, 14, 30, 60, 90]
    reach.ask(HOSTS)
    assert reach.answered("c", []) == reach.answered("b", []) == []
    assert reach.answered("a", []) == [("a", "b")] and not reach.apart
    assert not reach.is_due(1000.0) and reach.answered("a", []) == []


def test_a_pair_whose_host_has_gone_is_forgotten() -> None:
    reach = Reachability()
    reach.is_suspected = True
    reach.learn(ALL, {"a": ["b"], "b": ["a"]}, 0.0)
    assert reach.ask(["a", "c"]) == {} and not reach.apart


def test_a_silent_peer_is_tried_once_more() -> None:
    states = {"b": ["open"], "c": ["silent", "open"], "d": ["silent"] * 2}
    states["e"] = ["refused"]
    told: list[list[str]] = []
    try_all(
        lambda address, then: then(states[address].pop(0)),
        {peer: peer for peer in states},
        told.append,
    )
    assert told == [["d", "e"]] and not any(states.values())
    try_all(lambda address, then: None, {}, told.append)
    assert told[1:] == [[]]
