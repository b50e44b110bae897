"""The outer search space against trying everything, with pins, primes and baselines."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.planner.plan import Knobs
from dtft.planner.search.enumerate import enumerate_space
from dtft.planner.search.meshes import divisors, factorisations, num_factorisations
from dtft.planner.search.space import REMATS, Choices, MemoryFloor, Space
from dtft.planner.types import AXES

ANY = {axis: () for axis in AXES}
DATA_TENSOR = {"replica": (), "fsdp": (), "tensor": (768, 12)}


def points(space: Space) -> list[tuple]:
    """Candidates without their order on the fabric."""
    found = []
    for at in range(len(space)):
        point = space[at]
        sizes = tuple(point.mesh.get(axis, 1) for axis in AXES)
        knobs = point.knobs
        found.append((sizes, knobs.zero, knobs.microbatches, knobs.remat, point.batch))
    return found


def by_hand(choices: Choices) -> set[tuple]:
    """Every candidate of all devices that divides the batch, by trying everything."""
    found = set()
    num = choices.num_devices
    each = [divisors(num) if axis in choices.divides else (1,) for axis in AXES]
    for sizes in itertools.product(*each):
        mesh = dict(zip(AXES, sizes, strict=True))
        if math.prod(sizes) != num:
            continue
        if any(
            number % mesh[axis]
            for axis, numbers in choices.divides.items()
            for number in numbers
        ):
            continue
        slots = math.prod(mesh[axis] for axis in choices.data_axes)
        for zero, parts, remat in itertools.product(
            choices.zero, range(1, choices.max_microbatches + 1), choices.remat
        ):
            if (zero > 0) == (mesh["fsdp"] > 1) and choices.batch % (
                slots * parts
            ) == 0:
                found.add((sizes, zero, parts, remat, choices.batch))
    return found


@st.composite
def questions(draw: st.DrawFn) -> Choices:
    axes = draw(st.lists(st.sampled_from(AXES), min_size=1, max_size=4, unique=True))
    sizes = st.lists(st.sampled_from([4, 6, 8, 12, 30]), max_size=2).map(tuple)
    zero = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2, unique=True))
    return Choices(
        num_devices=draw(st.sampled_from([1, 2, 4, 5, 6, 8, 12])),
        batch=draw(st.sampled_from([1, 7, 8, 12, 48])),
        divides={axis: draw(sizes) for axis in axes},
        data_axes=draw(
            st.sampled_from([("replica", "fsdp"), ("replica", "fsdp", "expert")])
        ),
        max_microbatches=draw(st.sampled_from([1, 3, 8])),
        remat=draw(st.sampled_from([("none",), ("none", "full"), REMATS])),
        zero=(0, *zero),
    )


@settings(max_examples=60)
@given(questions())
def test_space_is_everything_that_divides_and_the_baselines(choices: Choices) -> None:
    space = enumerate_space(choices)
    exact = by_hand(choices)
    found = points(space)
    assert len(set(found)) == len(found)  # one level: one order each
    assert exact <= set(found)
    slots = [
        math.prod(sizes[AXES.index(axis)] for axis in choices.data_axes)
        for sizes, *_ in exact
    ]
    can = choices.batch > 1 and any(a in choices.divides for a in choices.data_axes)
    if max(slots, default=0) > (1 if can else 0):
        # Beyond it there are only meshes of baselines, with every knob.
        known = {point[0] for point in points(space) if point not in exact}
        assert known <= {
            point[0] for point in points(space.where(space.columns["baseline"] > 0))
        }
    for sizes, _, parts, _, batch in found:
        part = math.prod(sizes[AXES.index(axis)] for axis in choices.data_axes) * parts
        assert batch % part == 0
        assert batch >= choices.batch


@settings(max_examples=40)
@given(questions(), st.integers(0, 2**32 - 1))
def test_room_and_orders_never_remove_the_best_that_fits(
    choices: Choices, seed: int
) -> None:
    """Any price will do: what has no room by the floor can have none at all."""
    rng = np.random.default_rng(seed)
    memory = MemoryFloor(parameters=100, gradients=100, optimizer=300, capacity=200)
    space = enumerate_space(choices)
    small = enumerate_space(replace(choices, memory=memory))
    price = {point: rng.random() for point in points(space)}
    needs = {
        point: 100 / _parts(point, 3) + 100 / _parts(point, 2) + 300 / _parts(point, 1)
        for point in price
    }
    fitting = [point for point in price if needs[point] <= 200]
    kept = set(points(small))
    assert kept <= set(price)
    assert set(fitting) <= kept
    baselines = small.columns["baseline"] > 0
    assert set(points(small.where(~baselines))) <= set(fitting)
    assert set(points(space.where(space.columns["baseline"] > 0))) <= kept


def _parts(point: tuple, level: int) -> int:
    """Into how many parts state of a level can be divided at most."""
    sizes, zero = dict(zip(AXES, point[0], strict=True)), point[1]
    parts = math.prod(sizes.values()) // sizes["replica"]
    return parts if zero >= level else parts // sizes["fsdp"]


@pytest.mark.parametrize("num_devices", [1, 2, 12, 64, 360, 4096])
def test_numbers_of_meshes(num_devices: int) -> None:
    space = enumerate_space(Choices(num_devices=num_devices, batch=1, divides=ANY))
    assert space.reasons[0].of == num_factorisations(num_devices, len(AXES))
    ways = factorisations(num_devices, [divisors(num_devices)] * 3)
    assert len(ways) == num_factorisations(num_devices, 3)
    assert (ways.prod(axis=1) == num_devices).all()
    assert len(np.unique(ways, axis=0)) == len(ways)


def test_tens_of_thousands_of_candidates_and_what_each_rule_left() -> None:
    memory = MemoryFloor(
        parameters=2 * 10**12, gradients=2 * 10**12, optimizer=12 * 10**12,
        capacity=80 * 10**9,
    )  # fmt: skip
    divides = {"replica": (), "fsdp": (), "tensor": (128, 25600), "stage": (128,)}
    choices = Choices(
        num_devices=4096, batch=1536, divides=divides, levels=(8, 512),
        max_microbatches=16, remat=REMATS, zero=(0, 1, 3), memory=memory,
    )  # fmt: skip
    space = enumerate_space(choices)
    assert len(space) > 35_000
    assert [reason.left for reason in space.reasons][-1] == len(space)
    assert str(space.reasons[1]) == "315 of 385: of these divide the batch of 1536"
    floor = memory.bytes_of(space.sizes, space.columns["zero"])
    assert (floor[space.columns["baseline"] == 0] <= memory.capacity).all()
    again = enumerate_space(choices)
    assert space.orders == again.orders
    assert all((space.columns[n] == again.columns[n]).all() for n in space.columns)


def test_candidates_that_share_a_mesh_differ_in_knobs_only() -> None:
    choices = Choices(
        num_devices=16, batch=32, divides=ANY, levels=(4, 4), max_microbatches=4
    )
    columns = enumerate_space(choices).columns
    key = np.stack([*(columns[axis] for axis in AXES), columns["order"]], axis=1)
    _, number = np.unique(key, axis=0, return_inverse=True)
    pairs = set(zip(number.tolist(), columns["mesh"].tolist(), strict=True))
    assert len(pairs) == number.max() + 1 == columns["mesh"].max() + 1


def test_a_candidate_is_a_mesh_and_knobs() -> None:
    choices = Choices(num_devices=8, batch=8, divides=DATA_TENSOR, levels=(4, 2))
    space = enumerate_space(choices, {"tensor": 2, "replica": 2, "zero": 3})
    orders = [list(space[at].mesh) for at in range(len(space))]
    assert ["replica", "fsdp", "tensor"] in orders
    assert space[0].knobs == Knobs(zero=3)
    assert space[0].mesh == {"replica": 2, "fsdp": 2, "tensor": 2}
    assert enumerate_space(Choices(num_devices=1, batch=3, divides={}))[0].mesh == {}


def baselines(space: Space) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for at in np.flatnonzero(space.columns["baseline"]):
        point = space[int(at)]
        mesh = (point.mesh, point.knobs.zero, point.batch)
        found.setdefault(point.baseline, set()).add(str(mesh))
    return found


def test_baselines_are_there() -> None:
    choices = Choices(num_devices=32, batch=64, divides=DATA_TENSOR, levels=(8, 4))
    assert baselines(enumerate_space(choices)) == {
        "data parallel": {"({'replica': 32}, 0, 64)"},
        "fsdp": {"({'fsdp': 32}, 3, 64)"},
        "megatron": {"({'replica': 8, 'tensor': 4}, 0, 64)"},
        "megatron with fsdp": {"({'fsdp': 8, 'tensor': 4}, 3, 64)"},
    }


def test_baselines_stay_where_they_have_no_room_and_go_where_they_are_pinned_out() -> (
    None
):
    memory = MemoryFloor(parameters=100, gradients=100, optimizer=300, capacity=1)
    choices = Choices(num_devices=32, batch=64, divides=DATA_TENSOR, memory=memory)
    space = enumerate_space(choices)
    assert len(baselines(space)) == 4
    assert (space.columns["baseline"] > 0).all()
    room = next(reason for reason in space.reasons if "room" in reason.rule)
    assert room.left == 0
    assert "in 1 bytes; the least takes 16" in str(room)
    pinned = enumerate_space(choices, {"tensor": 4})
    assert set(baselines(pinned)) == {"megatron", "megatron with fsdp"}


def test_baselines_that_do_not_divide_the_batch_take_the_nearest() -> None:
    choices = Choices(num_devices=6, batch=32, divides={"replica": (), "tensor": (3,)})
    assert baselines(enumerate_space(choices))["data parallel"] == {
        "({'replica': 6}, 0, 36)"
    }
    few = Choices(num_devices=64, batch=24, divides={"replica": (), "tensor": (4,)})
    assert baselines(enumerate_space(few))["data parallel"] == {
        "({'replica': 24}, 0, 24)"
    }


def test_five_devices_use_four_or_round_the_batch_up() -> None:
    space = enumerate_space(Choices(num_devices=5, batch=32, divides=DATA_TENSOR))
    used = Counter(space.columns["devices_used"].tolist())
    assert set(used) == {4, 5}
    batches = space.columns["batch"]
    assert set(batches[space.columns["devices_used"] == 5].tolist()) == {35}
    assert set(batches[space.columns["devices_used"] == 4].tolist()) == {32}
    assert any("4 of 5 devices" in str(reason) for reason in space.reasons)
    assert any("rounded up" in str(reason) for reason in space.reasons)


def test_prime_batch_is_rounded_up() -> None:
    space = enumerate_space(Choices(num_devices=8, batch=31, divides=DATA_TENSOR))
    full = space.where(space.columns["devices_used"] == 8)
    assert set(full.columns["batch"].tolist()) == {32}
    assert {"replica": 8} in [space[at].mesh for at in range(len(space))]


def test_five_devices_and_a_prime_batch_may_leave_one_idle() -> None:
    space = enumerate_space(Choices(num_devices=5, batch=31, divides=DATA_TENSOR))
    meshes = [dict(space[at].mesh) for at in range(len(space))]
    assert {"tensor": 4} in meshes and {"replica": 5} in meshes
    alone = enumerate_space(Choices(num_devices=1, batch=31, divides=DATA_TENSOR))
    assert set(alone.columns["devices_used"].tolist()) == {1}


def test_devices_that_divide_the_batch_need_nothing_near() -> None:
    space = enumerate_space(Choices(num_devices=10, batch=20, divides=DATA_TENSOR))
    assert set(space.columns["devices_used"].tolist()) == {10}
    assert set(space.columns["batch"].tolist()) == {20}


def test_more_devices_than_a_prime_batch_leave_some_idle() -> None:
    space = enumerate_space(Choices(num_devices=64, batch=31, divides={"replica": ()}))
    assert [space[at].mesh for at in range(len(space))] == [{"replica": 31}]
    assert space.columns["devices_used"].tolist() == [31]


def test_nothing_is_left_where_an_axis_can_take_no_device() -> None:
    space = enumerate_space(Choices(num_devices=7, batch=8, divides={"tensor": (4,)}))
    assert space.columns["devices_used"].max() == 4
    words = [str(reason) for reason in space.reasons]
    assert words[0].startswith("0 of 1: meshes of 7 devices over tensor")
    assert any("4 of 7 devices" in reason for reason in words)


@pytest.mark.parametrize(
    ("batch", "divides", "used"),
    [
        (1, {"replica": (), "tensor": (12,)}, 6),
        (4, {"tensor": (20,)}, 5),
    ],
)
def test_where_one_part_of_the_batch_is_enough_the_most_devices_are_used(
    batch: int, divides: dict[str, tuple[int, ...]], used: int
) -> None:
    choices = Choices(num_devices=7, batch=batch, divides=divides)
    space = enumerate_space(choices)
    assert space.columns["devices_used"].max() == used
    assert {"tensor": used} in [space[at].mesh for at in range(len(space))]


def test_pins_without_room_give_the_reason_in_bytes() -> None:
    memory = MemoryFloor(parameters=100, gradients=100, optimizer=300, capacity=7)
    choices = Choices(num_devices=12, batch=24, divides=DATA_TENSOR, memory=memory)
    space = enumerate_space(choices, {"tensor": 2, "replica": 3})
    assert len(space) == 0
    words = [str(reason) for reason in space.reasons]
    assert any("7 bytes; the least takes 125" in text for text in words)


@pytest.mark.parametrize(
    "pins",
    [
        {"tensor": 4}, {"replica": 2, "tensor": 3}, {"microbatches": 2}, {"zero": 3},
        {"remat": "full"}, {"order": ("tensor", "replica")}, {"fsdp": 1, "zero": 0},
    ],
)  # fmt: skip
def test_pins_select_from_the_space(pins: dict) -> None:
    choices = Choices(
        num_devices=12, batch=24, divides=DATA_TENSOR, levels=(4, 3),
        max_microbatches=4, remat=REMATS,
    )  # fmt: skip
    pinned, free = enumerate_space(choices, pins), enumerate_space(choices)
    expected = [
        point
        for point in points(free)
        if all(
            {
                **dict(zip(AXES, point[0], strict=True)),
                "zero": point[1], "microbatches": point[2], "remat": point[3],
            }.get(name, value) == value
            for name, value in pins.items()
        )
    ]  # fmt: skip
    if "order" not in pins:
        assert Counter(points(pinned)) == Counter(expected)
    else:
        assert set(points(pinned)) == set(points(free))
        meshes = [list(pinned[at].mesh) for at in range(len(pinned))]
        both = [order for order in meshes if {"tensor", "replica"} <= set(order)]
        assert both
        assert all(order.index("tensor") < order.index("replica") for order in both)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"tensor": 8}, ["8 does not divide 12 devices", "tensor that work: 4, 6"]),
        ({"tensor": 9}, ["9 does not divide 12 devices"]),
        ({"stage": 3}, ["3 does not divide 8, which stage has to divide", "2, 4"]),
        ({"sequence": 2}, ["not searched here, only replica, fsdp, tensor, stage"]),
        ({"microbatches": 8}, ["at most 4 are possible", "work: 2, 3, 4"]),
        ({"zero": 1}, ["only 0, 3 can be chosen", "zero that work: 0, 3"]),
        ({"remat": "dots"}, ["only none, full can be chosen", "work: none, full"]),
        ({"replica": 12, "zero": 3}, ["the other pins as they are: 3, 4, 6"]),
        ({"tensor": 5, "stage": 9}, ["5 does not divide", "9 does not divide"]),
        ({"replica": 5, "tensor": 2}, ["As pinned, 10 devices can be used"]),
    ],
)
def test_pins_that_cannot_be_met_say_what_can(pins: dict, words: list[str]) -> None:
    choices = Choices(
        num_devices=12, batch=120, divides={**DATA_TENSOR, "stage": (8,)},
        max_microbatches=4, remat=("none", "full"),
    )  # fmt: skip
    with pytest.raises(ValueError) as error:
        enumerate_space(choices, pins)
    text = str(error.value)
    assert text.startswith(", ".join(f"{name}={pins[name]}" for name in pins))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (
            {"tensr": 2},
            "tensr=2 is not a knob that can be pinned. Did you mean 'tensor'?",
        ),
        ({"tensor": 0}, "tensor=0 is pinned. Allowed: a whole number, 1 or more"),
        ({"zero": -1}, "zero=-1 is pinned. Allowed: a whole number, 0 or more"),
        ({"remat": "half"}, "remat='half' is pinned. Allowed: none, dots, full"),
        ({"order": "tensor"}, "order='tensor' is pinned. Allowed: a tuple of"),
        ({"order": 5}, "order=5 is pinned. Allowed: a tuple of different axes"),
        ({"order": None}, "order=None is pinned. Allowed: a tuple of"),
        ({"order": [["tensor"]]}, "order=[['tensor']] is pinned. Allowed: a tuple of"),
        ({"stage_layers": 4}, "stage_layers=4 is pinned. Allowed: a tuple with"),
        ({"stage_layers": ()}, "stage_layers=() is pinned. Allowed: a tuple with"),
        ({"stage_layers": (3, 0)}, "stage_layers=(3, 0) is pinned. Allowed: a tuple"),
        ({"stage_layers": (True,)}, "stage_layers=(True,) is pinned. Allowed: a tuple"),
        (
            {"stage_layers": (3, 1), "stage": 4},
            "stage_layers=(3, 1) and stage=4 are pinned. Allowed: stage=2.",
        ),
        (
            {"stage_layers": (3, 1), "virtual_stages": 2},
            "stage_layers=(3, 1) and virtual_stages=2 are pinned. Allowed: virtual_st",
        ),
    ],
)
def test_what_is_no_pin_is_refused(pins: dict, words: str) -> None:
    with pytest.raises(ValueError) as error:
        enumerate_space(Choices(num_devices=4, batch=4, divides=ANY), pins)
    assert words in str(error.value)


def test_choices_are_checked() -> None:
    with pytest.raises(ValueError, match="num_devices=0 is less than 1"):
        Choices(num_devices=0, batch=1, divides=ANY)
    with pytest.raises(ValueError, match=r"zero=\(0, 4\) has other levels"):
        Choices(num_devices=1, batch=1, divides=ANY, zero=(0, 4))
    with pytest.raises(ValueError, match="axis 'model' is not an axis of a mesh"):
        Choices(num_devices=1, batch=1, divides={"model": ()})
