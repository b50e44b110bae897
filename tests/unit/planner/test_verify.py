"""Nothing that does not fit is called fitting; bytes are compared by kind and axes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.planner.aot.check import Compiled, CompileFailure, Memory, compare, gate
from dtft.planner.aot.hlo import CompiledCollective
from dtft.planner.plan import Collective, Knobs, Plan, Prediction

GIB = 2**30


def _plan(num_bytes: int = 0, collectives: tuple[Collective, ...] = ()) -> Plan:
    return Plan(
        entry="step",
        mesh={"data": 8},
        knobs=Knobs(),
        state={},
        batch={},
        prediction=Prediction(terms={}, low_s=0.0, high_s=0.0, source="test"),
        memory={"parameters": num_bytes},
        capacity_bytes=80 * GIB,
        collectives=collectives,
    )


def _compiled(
    memory: Memory | None = None,
    target: str = "h100",
    collectives: tuple[CompiledCollective, ...] = (),
) -> Compiled:
    nothing = Memory(arguments=0, outputs=0, temporaries=0, aliased=0)
    return Compiled(
        name="candidate",
        target=target,
        collectives=collectives,
        memory=memory or nothing,
        seconds=0.1,
    )


def _found(kind: str, axes: tuple[str, ...], num_bytes: int, **more: object):
    fields = {
        "trips": 1,
        "where": "jit(step)/dot_general",
        "dtype": "f32",
        "operands": ((num_bytes // 4,),),
        "group_size": 8,
        "trips_known": True,
        "own_bytes": num_bytes,
        "name": "op",
        **more,
    }
    return CompiledCollective(kind=kind, axes=axes, num_bytes=num_bytes, **fields)  # pyright: ignore[reportArgumentType]


SIZES = st.integers(0, 200 * GIB)


@given(
    planned=SIZES,
    arguments=SIZES,
    outputs=SIZES,
    temporaries=SIZES,
    target=st.sampled_from(["cpu", "h100"]),
    capacity=st.integers(1, 200 * GIB),
    reserve=st.floats(0, 0.5),
)
def test_what_any_number_puts_above_the_capacity_does_not_fit(
    planned: int,
    arguments: int,
    outputs: int,
    temporaries: int,
    target: str,
    capacity: int,
    reserve: float,
) -> None:
    memory = Memory(
        arguments=arguments, outputs=outputs, temporaries=temporaries, aliased=0
    )
    verdict = gate(_plan(planned), _compiled(memory, target), capacity, reserve=reserve)
    in_and_out = arguments + outputs
    if max(planned, in_and_out) > capacity:
        assert not verdict.fits
    if target != "cpu" and in_and_out + temporaries > (1 - reserve) * capacity + 1:
        assert not verdict.fits
    assert verdict.fits == (verdict.needed_bytes <= verdict.capacity_bytes)
    assert verdict.needed_bytes >= planned


def test_donated_arguments_are_counted_once() -> None:
    memory = Memory(arguments=60, outputs=60, temporaries=30, aliased=60)
    assert gate(_plan(), _compiled(memory), 90, reserve=0).fits
    assert not gate(_plan(), _compiled(memory), 89, reserve=0).fits


def test_temporaries_of_the_cpu_do_not_count() -> None:
    memory = Memory(arguments=60, outputs=0, temporaries=10**6, aliased=0)
    assert gate(_plan(), _compiled(memory, "cpu"), 100, reserve=0).fits


def test_what_was_not_compiled_does_not_fit_and_the_reason_is_the_compilers() -> None:
    failure = CompileFailure(name="candidate", reason="INTERNAL: something broke")
    verdict = gate(_plan(1), failure, 100)
    assert not verdict.fits and "something broke" in verdict.reason


def test_without_a_compiled_program_the_plans_own_number_decides() -> None:
    assert gate(_plan(100), None, 100).fits
    assert not gate(_plan(101), None, 100).fits


def test_the_reason_names_bytes_and_their_source() -> None:
    memory = Memory(arguments=2 * GIB, outputs=0, temporaries=0, aliased=0)
    reason = gate(_plan(1), _compiled(memory), GIB).reason
    assert "does not fit" in reason and "compiled for h100" in reason
    assert f"{GIB:,}" in reason


@pytest.mark.parametrize(("reserve", "capacity"), [(1.0, 1), (-0.1, 1), (0.1, 0)])
def test_a_gate_without_sense_is_refused(reserve: float, capacity: int) -> None:
    with pytest.raises(ValueError, match="reserve="):
        gate(_plan(), None, capacity, reserve=reserve)


def _predicted(kind: str, axes: tuple[str, ...], num_bytes: int, trips: int = 1):
    return Collective(kind=kind, axes=axes, num_bytes=num_bytes, trips=trips, where="w")  # pyright: ignore[reportArgumentType]


def test_bytes_of_all_executions_are_summed_per_kind_and_axes() -> None:
    plan = _plan(
        collectives=(
            _predicted("all_reduce", ("data",), 100, trips=3),
            _predicted("all_reduce", ("data",), 50),
            _predicted("all_gather", ("tensor", "data"), 10),
        )
    )
    compiled = _compiled(
        collectives=(
            _found("all_reduce", ("data",), 175, trips=2),
            _found("all_gather", ("data", "tensor"), 10),
            _found("permute", ("data",), 1),
        )
    )
    first, second, third = compare(plan, compiled)
    assert (first.kind, first.predicted_bytes, first.found_bytes) == (
        "all_reduce",
        350,
        350,
    )
    assert first.difference == 0 and not first.exceptions
    assert second.kind == "all_gather" and second.difference == 0
    assert third.kind == "permute" and third.difference == -1


@pytest.mark.parametrize(
    ("planned", "real"),
    [("reduce_scatter", "all_reduce"), ("all_reduce", "reduce_scatter")],
)
def test_sums_that_are_divided_at_once_or_afterwards_count_alike_and_are_named(
    planned: str, real: str
) -> None:
    plan = _plan(collectives=(_predicted(planned, ("data",), 64, trips=2),))
    (one,) = compare(plan, _compiled(collectives=(_found(real, ("data",), 128),)))
    assert (one.kind, one.difference) == (real, 0)
    assert one.exceptions == (f"{real} for {planned}",)


def test_only_what_is_missing_of_a_sum_is_exchanged() -> None:
    plan = _plan(
        collectives=(
            _predicted("all_reduce", ("data",), 100),
            _predicted("reduce_scatter", ("data",), 50),
        )
    )
    found = (
        _found("all_reduce", ("data",), 80),
        _found("reduce_scatter", ("data",), 90),
    )
    agreements = {one.kind: one for one in compare(plan, _compiled(collectives=found))}
    assert agreements["all_reduce"].difference == 0
    assert agreements["reduce_scatter"].predicted_bytes == 70
    assert agreements["reduce_scatter"].found_bytes == 90
    along_other_axes = (_found("all_reduce", ("tensor",), 80),)
    assert len(compare(plan, _compiled(collectives=along_other_axes))) == 3


def test_what_xla_widened_counts_in_the_programs_types_and_is_named() -> None:
    found = _found("all_reduce", ("data",), 64, own_bytes=32, trips_known=False)
    plan = _plan(collectives=(_predicted("all_reduce", ("data",), 32),))
    (one,) = compare(plan, _compiled(collectives=(found,)))
    assert one.exceptions == ("trips unknown", "widened")
    assert one.difference == 0
