"""What a plan says of itself has the plan's own numbers."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.parallel.planning.api import RunnablePlan
from dtft.planner import wording
from dtft.planner.cluster.topology import Cluster
from dtft.planner.plan import Knobs, Plan
from dtft.planner.report import compare, html_report, text
from dtft.planner.report.text import (
    alternatives,
    bound,
    collectives,
    explain,
    layers_together,
    little,
    mesh_sections,
    tied,
    tied_text,
)
from dtft.planner.search.decision import decide
from dtft.planner.search.ranking import MEMORY, TERMS
from dtft.planner.types import Remat
from tests.support import reading
from tests.support.deciding_zoo import decision, mlp

PINS = {
    "best": {},
    "mixed": {"tensor": 2, "fsdp": 4, "order": ("tensor", "fsdp")},
    "replica": {"replica": 8},
}


def named(name: str) -> Plan:
    return decision(**PINS[name]).plan


@pytest.fixture(params=PINS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return named(request.param)


def near(value: float) -> object:
    return pytest.approx(value, rel=reading.PRECISION, abs=1e-9)


def near_share(value: float) -> object:
    """Shares below a hundredth of a percent are not told apart."""
    return pytest.approx(value, rel=reading.PRECISION, abs=1e-4)


def seconds_of(plan: Plan, value: float) -> str:
    """Seconds of a plan as its reports print them."""
    return wording.seconds(value, plan.prediction.relative_error)


def test_every_term_is_there_with_its_seconds_and_share(plan: Plan) -> None:
    rows = reading.rows(explain(plan), "Step time")
    total, error = plan.prediction.step_s, plan.prediction.relative_error
    for name, value in plan.prediction.terms.items():
        assert rows[name][0] == seconds_of(plan, value)
        assert rows[name][1] == wording.share(value, total, error)
    assert rows["step"][:2] == [seconds_of(plan, total), "100 %"]


@pytest.mark.parametrize(
    ("step_s", "error", "said"),
    [
        (0.123456, 0.2, "120 ms per step (80 % interval: 100 ms to 150 ms)"),
        (0.123456, 0.05, "123 ms per step (80 % interval: 117 ms to 130 ms)"),
        (0.0634, 0.25, "60 ms per step (80 % interval: 50 ms to 80 ms)"),
        (1.234, 0.25, "1.2 s per step (80 % interval: 900 ms to 1.5 s)"),
        (0.123456, 0.0, "123.5 ms per step (80 % interval: 123.5 ms to 123.5 ms)"),
    ],
)
def test_no_digit_is_finer_than_the_interval(
    step_s: float, error: float, said: str
) -> None:
    plan = named("best")
    scale = step_s / plan.prediction.step_s
    prediction = replace(
        plan.prediction,
        terms={name: s * scale for name, s in plan.prediction.terms.items()},
        low_s=step_s * (1 - error),
        high_s=step_s * (1 + error),
    )
    assert prediction.relative_error == pytest.approx(error)
    assert text.step_text(prediction) == said
    plan = replace(plan, prediction=prediction)
    assert said in explain(plan)
    shown = wording.seconds(step_s, error)
    assert reading.rows(explain(plan), "Step time")["step"][0] == shown
    assert f">{shown}<" in html_report.report_html(plan)


def test_memory_is_there_by_term_against_the_capacity(plan: Plan) -> None:
    rows = reading.rows(explain(plan), "Memory of a device")
    expected = {**plan.memory, "needed": plan.memory_bytes}
    expected["capacity"] = plan.capacity_bytes
    assert rows.keys() == expected.keys()
    for name, num_bytes in expected.items():
        assert reading.value(rows[name][0]) == near(num_bytes)
        assert reading.value(rows[name][1]) == near_share(
            num_bytes / plan.capacity_bytes
        )


def test_the_summary_has_the_time_its_interval_and_what_is_left(plan: Plan) -> None:
    title, step, constants, memory = explain(plan).splitlines()[:4]
    assert all(f"{axis}={size}" in title for axis, size in plan.mesh.items())
    assert f"zero={plan.knobs.zero}" in title
    found = plan.prediction
    assert step.strip() == text.step_text(found)
    assert constants.endswith(found.source)
    left = plan.capacity_bytes - plan.memory_bytes
    assert reading.values(memory) == [
        near(plan.memory_bytes), near(plan.capacity_bytes), near(left),
    ]  # fmt: skip


def test_collectives_are_listed_largest_first_and_add_up(plan: Plan) -> None:
    section = collectives(plan, num_listed=3)
    *listed, total = section.rows or [("all", "", "", "", "0 B", "0 s", "")]
    listed = listed[:3]
    ranked = layers_together(plan.collectives)
    for row, one in zip(listed, ranked, strict=False):
        assert row[0] == one.kind and row[-1] == one.where
        assert [reading.value(cell) for cell in row[2:5]] == [
            near(one.num_bytes), one.trips, near(one.num_bytes * one.trips),
        ]  # fmt: skip
        assert row[5] == seconds_of(plan, one.seconds)
    num_bytes = sum(one.num_bytes * one.trips for one in ranked)
    assert reading.value(total[4]) == near(num_bytes)
    assert total[5] == seconds_of(plan, sum(one.seconds for one in ranked))


def test_the_bound_and_the_gap_to_it(plan: Plan) -> None:
    _, note = bound(plan).notes
    step_s, error = plan.prediction.step_s, plan.prediction.relative_error
    bound_s, times = wording.seconds(plan.bound_s), step_s / plan.bound_s
    more = seconds_of(plan, step_s - plan.bound_s)
    assert f"takes less than {bound_s}; this one takes {more} more: " in note
    assert f": {wording.number(times, error)} times as long" in note
    assert plan.bound_s <= step_s


def test_alternatives_are_ranked_and_every_baseline_is_named(plan: Plan) -> None:
    section = alternatives(plan)
    names = {one.name for one in plan.alternatives if one.name}
    assert names <= {row[3] for row in section.rows}
    for row in section.rows:
        one = plan.alternatives[int(row[0]) - 1]
        assert row[4] == seconds_of(plan, one.step_s)
        assert reading.value(row[6]) == near(one.memory_bytes)
        found = plan.prediction
        change = wording.change(one.step_s, found.step_s, found.relative_error)
        assert row[5] == change


def test_plans_within_the_interval_are_called_tied() -> None:
    plan = decision().plan
    expected = [
        one
        for one in plan.alternatives[1:]
        if one.fits and one.step_s <= plan.prediction.high_s
    ]
    assert list(tied(plan)) == expected
    assert tied_text(plan).startswith(f"{len(expected)} of ")


def test_a_plan_from_a_file_is_explained_alike() -> None:
    plan = decision().plan
    assert explain(Plan.from_json(plan.to_json())) == explain(plan)


def test_a_difference_is_that_of_the_two_plans() -> None:
    plan, other = named("best"), named("mixed")
    text = compare.diff(plan, other)
    rows = reading.rows(text, "Step time")
    error = max(one.prediction.relative_error for one in (plan, other))
    for name, value in plan.prediction.terms.items():
        there = other.prediction.terms[name]
        expected = [wording.seconds(s, error) for s in (value, there, there - value)]
        expected[2] = wording.signed(expected[2])
        assert rows[name][:3] == expected
    memory = reading.rows(text, "Memory of a device")
    for name, num_bytes in plan.memory.items():
        more = other.memory[name] - num_bytes
        assert reading.value(memory[name][2]) == near(more)


def test_collectives_of_two_plans_are_summed_by_kind_and_axes() -> None:
    plan, other = named("best"), named("mixed")
    section = compare.collectives(plan, other)
    for kind, axes, here, there, more, took, _ in section.rows:
        sums = [
            (
                sum(c.num_bytes * c.trips for c in found),
                sum(c.seconds for c in found),
            )
            for found in (
                [
                    c
                    for c in p.collectives
                    if (c.kind, " x ".join(c.axes)) == (kind, axes)
                ]
                for p in (plan, other)
            )
        ]
        (num_bytes, seconds), (other_bytes, other_seconds) = sums
        assert reading.value(here) == near(num_bytes)
        assert reading.value(there) == near(other_bytes)
        assert reading.value(more) == near(other_bytes - num_bytes)
        error = max(one.prediction.relative_error for one in (plan, other))
        expected = wording.signed(wording.seconds(other_seconds - seconds, error))
        assert took == expected


def test_layers_that_are_divided_alike_are_one_line() -> None:
    before, after = named("replica"), named("mixed")
    section = compare.shardings(before, after)
    assert any("blocks/*/" in row[0] and row[1] == "2" for row in section.rows)
    changed = sum(int(row[1]) for row in section.rows)
    trees = ("state", "optimizer", "batch")
    expected = sum(
        getattr(before, tree)[path] != getattr(after, tree)[path]
        for tree in trees
        for path in getattr(before, tree)
    )
    assert changed == expected > 0


def test_a_plan_differs_from_itself_in_nothing() -> None:
    plan = named("best")
    text = compare.diff(plan, plan)
    assert "mesh and knobs are the same" in text
    assert compare.shardings(plan, plan).rows == ()
    assert compare.collectives(plan, plan, only_changed=True).rows == ()


def test_each_axis_says_where_it_lies_and_what_it_divides() -> None:
    (section,) = mesh_sections(named("mixed"))
    rows = {row[0]: row[1:] for row in section.rows}
    assert rows["tensor"][:2] == ("2", "2 by InfiniBand")
    assert rows["fsdp"][:3] == ("4", "4 by NVLink", "100 %")
    assert rows["fsdp"][3].endswith("1 of 1 of batch")
    (across,) = mesh_sections(named("replica"))
    assert across.rows[0][2] == "4 by NVLink x 2 by InfiniBand"
    assert mesh_sections(decision("h100").plan) == ()


def test_what_sequence_divides_is_said() -> None:
    plan = decide(mlp(), Cluster.parse("2xcpu"), {"sequence": 2}).plan
    assert plan.batch["x"] == ((), ("sequence",))
    (section,) = mesh_sections(plan)
    assert "the second dim of the batch's arrays" in section.notes[0]
    (without,) = mesh_sections(named("replica"))
    assert not without.notes


def test_an_axis_that_divides_little_of_the_work_is_pointed_out() -> None:
    plan = named("mixed")
    assert little(named("replica")) == ()
    axes = {**plan.axes, "tensor": replace(plan.axes["tensor"], work=0.1234)}
    ((axis, text),) = little(replace(plan, axes=axes))
    assert axis == "tensor"
    assert text.startswith("tensor=2 divides 12.34 % of the work; the rest each of its")
    assert text in explain(replace(plan, axes=axes))


def test_a_plan_of_before_there_were_axes_is_read() -> None:
    plan = named("mixed")
    old = json.loads(plan.to_json())
    old.pop("axes")
    assert Plan.from_json(json.dumps(old)) == replace(plan, axes={})
    assert "Mesh on the fabric" not in explain(Plan.from_json(json.dumps(old)))


def test_every_value_of_a_knob_has_a_sentence() -> None:
    for zero in text.ZERO:
        knobs = Knobs(zero=zero, remat="dots", microbatches=4)  # pyright: ignore
        first, again, parts = text.knobs_in_words(knobs)
        assert first.startswith(f"zero={zero}: ") and again.startswith("remat=dots: ")
        assert parts.startswith("microbatches=4: ")
    assert set(text.TERMS) == {*TERMS, "step"}
    assert set(text.MEMORY) == {*MEMORY, "needed", "capacity"}
    assert set(text.REMAT) == set(get_args(Remat))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schema": 2}, "schema=2 is not a plan.*Allowed: 1"),
        ({"mesh": {"fsdp": 0}}, "mesh={'fsdp': 0}. Allowed: sizes of 1 or more"),
        ({"mesh": {"zebra": 2}}, "mesh={'zebra': 2}. Allowed: .* of replica, stage,"),
        ({"mesh": {"fsdp": True}}, r"mesh\['fsdp'\]=True. Allowed: a whole number"),
        ({"entry": "both"}, "entry='both'. Allowed: step, loss"),
        ({"knobs": {"zero": 9}}, "zero=9. Allowed: 0, 1, 2, 3"),
        ({"knobs": {"remat": "some"}}, "remat='some'. Allowed: none, dots, full"),
        ({"knobs": {"tensor": 2}}, "has not what a plan has .*tensor"),
        ({"knobs": {"schedule": []}}, r"knobs.schedule=\[\]. Allowed: 1f1b, gpipe"),
        ({"knobs": {"microbatches": 0}}, "knobs.microbatches=0. Allowed: 1 or more"),
        ({"memory": None}, "memory=None. Allowed: an object"),
        ({"prediction": {"terms": None}}, "prediction.low_s is missing"),
        ({"constraints": {"a": []}}, "a name in constraints='a'. Allowed: a whole"),
        (
            {"batch": {"x": [["zz"]]}},
            r"batch\['x'\]=\[\['zz'\]\]. Allowed: axes of its",
        ),
        ({"state": {"w": [["fsdp"], ["fsdp"]]}}, r"\(tensor, fsdp\), each once"),
        ({"axes": {"stage": {"levels": [], "work": 1}}}, "axes has 'stage'"),
        ({"host": ["nope"]}, "host has 'nope'. Allowed: paths of its optimizer"),
        ({"bound_s": 1e400}, "bound_s=inf. Allowed: a finite number of 0 or more"),
        ({"colour": 1}, "has not what a plan has .colour=1. Allowed: no such field"),
    ],
)
def test_a_file_that_holds_no_plan_says_what_is_wrong(
    changed: dict[str, object], said: str
) -> None:
    text = named("mixed").to_json()
    with pytest.raises(ValueError, match=said):
        Plan.from_json(json.dumps({**json.loads(text), **changed}))


class Broken(NamedTuple):
    """A value inside a plan's JSON, and what stands there instead."""

    path: tuple[str | int, ...]
    value: object


GONE = object()
"""No value: the field is left out."""


@cache
def short() -> dict[str, Any]:
    """A plan's JSON with one record of every list of records, and three arrays."""
    items = json.loads(named("mixed").to_json())
    for name in ("collectives", "dearest", "alternatives"):
        items[name] = items[name][:1]
    for name in ("state", "optimizer", "constraints"):
        items[name] = dict(list(items[name].items())[:3])
    assert survives(json.dumps(items))
    return items


def places(items: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested JSON; of lists the first."""
    parts = items.items() if isinstance(items, dict) else enumerate(items[:1])
    for key, value in parts:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def damaged(items: dict[str, Any], broken: Broken) -> str:
    *outer, last = broken.path
    parent: Any = items
    for key in outer:
        parent = parent[key]
    whole = copy.copy(parent)
    if broken.value is GONE:
        del parent[last]
    else:
        parent[last] = broken.value
    text = json.dumps(items)
    if isinstance(parent, dict):
        parent.clear()
        parent.update(whole)
    else:
        parent[:] = whole
    return text


def survives(text: str) -> bool:
    """Whether it is a plan, which then shows itself."""
    try:
        plan = RunnablePlan.from_json(text)
    except ValueError:
        return False
    assert plan.explain() and plan.html()
    assert RunnablePlan.from_json(plan.to_json()) == plan
    return True


JUNK = (GONE, None, "x", "8", -1, 0, 1e400, True, {"a": 1}, [], [1])


def test_a_file_with_one_thing_changed_is_refused_or_a_plan() -> None:
    """Every field, at every depth, with values of all kinds."""
    items = short()
    refused = shown = 0
    for path in places(items):
        for value in JUNK:
            if survives(damaged(items, Broken(path, value))):
                shown += 1
            else:
                refused += 1
    assert shown and refused > 4 * shown


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("fsdp", "tensor", "1", "x")), inner)
    ),
    max_leaves=5,
)


@given(st.data())
def test_whatever_stands_there_it_is_refused_or_a_plan(data: st.DataObject) -> None:
    items = short()
    path = data.draw(st.sampled_from(list(places(items))))
    survives(damaged(items, Broken(path, data.draw(JSON))))


def test_half_a_file_is_no_plan() -> None:
    text = named("mixed").to_json()
    for part in ("", text[: len(text) // 2]):
        with pytest.raises(ValueError, match="is no JSON, or only the beginning"):
            Plan.from_json(part)
    with pytest.raises(ValueError, match="schema=None is not a plan"):
        Plan.from_json("[]")


def test_a_key_twice_is_refused_and_not_the_last_taken() -> None:
    text = json.dumps(json.loads(named("mixed").to_json()))
    for old, new, said in (
        ('"mesh": {', '"mesh": {"fsdp": 1, "fsdp": 2, ', "fsdp .* with fsdp"),
        ('"knobs": {', '"knobs": {"zero": 3, ', "zero"),
        ('"constraints": {', '"constraints": {"02": [], "2": [], ', "2"),
    ):
        with pytest.raises(ValueError, match=f"the key {said}.*dtft plan CONFIG"):
            Plan.from_json(text.replace(old, new, 1))
