"""Balance over operators and over layers: measured waits change who has what."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dtft.balance.balance import Balance, Policy, Rules
from dtft.balance.load_shares import Layers
from dtft.balance.operators import Operators
from dtft.placement.heuristics import split
from dtft.placement.nodes import Nodes
from dtft.placement.tasks import Passed, Tasks


def work(microbatches: int = 8) -> Operators:
    """A row of 24 like tasks on three nodes of like speed."""
    num = 24
    tasks = Tasks(
        names=tuple(f"layer {number}" for number in range(num)),
        kinds=("block",) * num,
        seconds=np.ones((num, 3)),
        passed=tuple(
            Passed(producer=task, num_bytes=1.0, readers=(task + 1,))
            for task in range(num - 1)
        ),
    )
    nodes = Nodes.joined([1e9] * 3, latency_s=0.01, bandwidth=1e3)
    return Operators(tasks=tasks, nodes=nodes, microbatches=microbatches)


def rounds(
    balance: Balance[Any], slowness: list[float], most: int = 12
) -> tuple[Balance[Any], list[float]]:
    """Rounds of two steps each on nodes that are slower than planned, until settled."""
    waited = []
    for _ in range(most):
        busy = balance.work.load(balance.division) * np.array(slowness)
        balance = balance.after(np.stack([busy, busy]))
        assert balance.judgement is not None
        waited.append(balance.judgement.max_wait_s)
        if balance.settled:
            break
    return balance, waited


def test_layers_may_be_rows_of_numbers() -> None:
    listed: Any = [[1.0, 2.0]] * 6
    layers = Layers(layer_s=listed, microbatches=8)
    assert layers.best(np.ones(2)).tolist() == [4, 2]


def test_a_node_slowed_in_mid_run_gets_fewer_operators_and_waits_fall() -> None:
    balance, _ = rounds(Balance.begin(work()), [1.0, 1.0, 1.0])
    even = balance.work.load(balance.division)
    assert even.tolist() == [64.0, 64.0, 64.0]
    slowed, waited = rounds(balance, [1.0, 3.0, 1.0])
    load = slowed.work.load(slowed.division)
    assert slowed.settled and slowed.rounds - balance.rounds <= 7
    assert load[1] < 40.0 and load.sum() == even.sum()
    assert waited[-1] < 0.5 * waited[0]
    best = 8 * 3.0 * 4 + 1e-9  # 10, 4, 10 tasks: 12 s are the fullest's
    assert slowed.work.seconds(slowed.division, np.array([1.0, 3.0, 1.0])) < 1.3 * best


def test_a_node_that_needs_much_for_every_step_gets_fewer_operators() -> None:
    divided, unit_s, fixed_s = work(), np.ones(3), np.array([0.0, 40.0, 0.0])
    blind, seeing = divided.best(unit_s), divided.best(unit_s, fixed_s)
    assert divided.load(blind).tolist() == [64.0, 64.0, 64.0]
    assert divided.load(seeing)[1] < 48.0
    took = [divided.seconds(it, unit_s, fixed_s) for it in (blind, seeing)]
    assert took[1] < 0.9 * took[0]


@pytest.mark.more
def test_weights_of_the_literal_rule_move_operators_too() -> None:
    rules = Rules(policy="proportional", step=0.3)
    begun = Balance.begin(work(), rules)
    balance, waited = rounds(begun, [1.0, 3.0, 1.0], most=6)
    assert balance.work.load(balance.division)[1] < begun.work.load(begun.division)[1]
    assert waited[-1] < waited[0]


def test_an_operator_without_a_kernel_elsewhere_stays() -> None:
    seconds = np.ones((4, 2))
    seconds[0, 0] = np.inf
    tasks = Tasks(
        names=("a", "b", "c", "d"), kinds=("matmul",) * 4, seconds=seconds, passed=()
    )
    divided = Operators(tasks=tasks, nodes=Nodes.joined([1.0, 1.0]))
    placement = divided.best(np.array([1.0, 50.0]))
    assert placement.node_of == (1, 0, 0, 0)
    assert divided.load(placement).tolist() == [3.0, 1.0]
    assert divided.seconds(placement, np.array([1.0, 50.0])) == 50.0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_layers_are_split_as_well_as_they_can_be(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num, stages = int(rng.integers(3, 8)), int(rng.integers(2, 4))
    layers = Layers(
        layer_s=rng.uniform(0.5, 2, (num, stages)),
        microbatches=int(rng.integers(1, 9)),
        low=int(rng.integers(0, 2)),
        state_bytes=rng.uniform(0, 1, num),
        activation_bytes=rng.uniform(0, 0.3, num),
        capacity_bytes=rng.uniform(2, 9, stages),
    )
    unit_s = rng.uniform(0.5, 3, stages)
    fixed_s = rng.uniform(0, 6, stages) if seed % 2 else None
    ways = [
        layers.seconds(np.array(counts), unit_s, fixed_s)
        for counts in itertools.product(range(layers.low, num + 1), repeat=stages)
        if sum(counts) == num and fits(layers, counts)
    ]
    assume(ways)
    best = layers.best(unit_s, fixed_s)
    assert layers.seconds(best, unit_s, fixed_s) == pytest.approx(min(ways))


def fits(layers: Layers, counts: tuple[int, ...]) -> bool:
    """Whether each stage has room for its layers and the microbatches on their way."""
    assert layers.state_bytes is not None and layers.activation_bytes is not None
    assert layers.capacity_bytes is not None
    ends = np.cumsum(counts)
    for stage, (start, stop) in enumerate(zip(ends - counts, ends, strict=True)):
        in_flight = min(layers.microbatches, len(counts) - stage)
        held = layers.state_bytes[start:stop].sum()
        held += in_flight * layers.activation_bytes[start:stop].sum()
        if held > layers.capacity_bytes[stage]:
            return False
    return True


@pytest.mark.parametrize("policy", ["exact", "proportional"])
def test_a_slow_stage_gets_fewer_layers(policy: Policy) -> None:
    layers = Layers(layer_s=np.ones((12, 3)), microbatches=16)
    begun = Balance.begin(layers, Rules(policy=policy))
    assert begun.division.tolist() == [4, 4, 4]
    balance, waited = rounds(begun, [1.0, 2.0, 1.0])
    assert min(waited) < waited[0]
    if policy == "exact":
        assert balance.settled and balance.division.tolist() in ([5, 2, 5], [5, 3, 4])


def test_layers_that_find_no_room_are_an_error() -> None:
    layers = Layers(
        layer_s=np.ones((4, 2)),
        microbatches=2,
        state_bytes=np.ones(4),
        capacity_bytes=np.array([1.0, 2.0]),
    )
    with pytest.raises(ValueError, match="no split of 4 layers over 2 stages"):
        layers.best(np.ones(2))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"low": 3}, "low=3 with 4 layers and 2 stages. Allowed: at most 2"),
        ({"low": -1}, "low=-1 is no whole number of 0 or more"),
        ({"microbatches": 2.5}, "microbatches=2.5 is no whole number of 1 or more"),
        ({"layer_s": [1.0, 1.0]}, r"layer_s has shape \(2,\)"),
        ({"layer_s": np.full((4, 2), -1.0)}, "layer_s=.* numbers of 0 or more"),
        ({"layer_s": np.full((4, 2), np.nan)}, "layer_s=.* numbers of 0 or more"),
        ({"capacity_bytes": np.ones(3)}, r"capacity_bytes=.* an array \[2\]"),
    ],
)
def test_layers_of_another_form_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Layers(**{"layer_s": np.ones((4, 2)), "microbatches": 1, **changed})


def test_a_weight_of_a_stage_is_0_or_more() -> None:
    layers = Layers(layer_s=np.ones((4, 3)), microbatches=1, low=0)
    assert layers.by_weight(np.array([1.0, 0.0, 1.0])).tolist()[1] == 0
    for unit_s in ([1.0, 1.0], [-1.0, 1.0, 1.0], [1.0, np.nan, 1.0]):
        with pytest.raises(ValueError, match="Allowed: a number above 0 for each of 3"):
            layers.best(np.array(unit_s))
    with pytest.raises(ValueError, match="weights=.*0 or more for each of 3 stages"):
        layers.by_weight(np.array([-1.0, 1.0, 1.0]))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_the_slowest_stretch_is_as_fast_as_can_be(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num, nodes = int(rng.integers(2, 7)), int(rng.integers(1, 4))
    seconds = rng.uniform(0.5, 2, (num, 1)) * rng.uniform(1, 4, nodes)
    seconds[rng.random(seconds.shape) < 0.15] = np.inf
    orders = itertools.permutations(range(nodes))
    best = np.inf
    for order, cuts in itertools.product(
        orders, itertools.combinations_with_replacement(range(num + 1), nodes - 1)
    ):
        ends = [0, *cuts, num]
        each = [
            seconds[a:b, n].sum()
            for n, (a, b) in zip(order, itertools.pairwise(ends), strict=True)
        ]
        best = min(best, max(each))
    found = split(seconds)
    if found is None:
        assert best == np.inf
        return
    assert [one.start for one in found[1:]] == [one.stop for one in found[:-1]]
    each = [seconds[one.start : one.stop, one.node].sum() for one in found]
    assert max(each) == pytest.approx(best)
