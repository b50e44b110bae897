"""The answer to "why not" has numbers, and they are those of the other plan."""

import re
from dataclasses import replace
from typing import Any

import pytest

from dtft.planner import wording
from dtft.planner.report import compare
from dtft.planner.report.replan import why_not
from dtft.planner.search.decision import Decision, best_of, decide
from tests.support import reading
from tests.support.deciding_zoo import decision, question, with_memory


def near(value: float) -> object:
    return pytest.approx(value, rel=reading.PRECISION, abs=1e-9)


@pytest.mark.parametrize("pins", [{"fsdp": 8, "zero": 3}, {"replica": 4, "zero": 3}])
def test_what_is_slower_says_by_how_much_in_every_term(pins: dict[str, int]) -> None:
    found = decision()
    plan = found.plan
    other = best_of(found.question, found.cluster, pins).plan
    text = why_not(found, **pins)
    here, there = plan.prediction.step_s, other.prediction.step_s
    assert there > here
    title = text.splitlines()[0]
    error = plan.prediction.relative_error
    times = re.findall(r"[\d.]+ [mu]?s\b", title)
    assert times == [wording.seconds(s, error) for s in (there, here, there - here)]
    assert f"({wording.change(there, here, error)})" in title
    rows = reading.rows(text, "Step time")
    error = max(error, other.prediction.relative_error)
    for name, value in plan.prediction.terms.items():
        more = wording.seconds(other.prediction.terms[name] - value, error)
        assert rows[name][2] == wording.signed(more)
    sent = {(c.kind, " x ".join(c.axes)) for c in other.collectives}
    assert all(kind in text for kind, _ in sent)


def test_one_line_says_which_terms_make_the_difference() -> None:
    found = decision()
    other = best_of(found.question, found.cluster, {"fsdp": 8, "zero": 3}).plan
    text = why_not(found, fsdp=8, zero=3)
    (line,) = (one for one in text.splitlines() if "the difference: " in one)
    terms = found.plan.prediction.terms
    more = {name: other.prediction.terms[name] - terms[name] for name in terms}
    name = max(more, key=lambda name: more[name])
    said = line.partition("the difference: ")[2]
    error = max(one.prediction.relative_error for one in (found.plan, other))
    cost = wording.signed(wording.seconds(more[name], error))
    assert said.startswith(f"{name} {cost} (")
    key = max(
        (key for key in compare.sent(other)),
        key=lambda key: (
            compare.sent(other)[key][1] - compare.sent(found.plan).get(key, (0, 0.0))[1]
        ),
    )
    assert f"({key[0]} over {' x '.join(key[1])}" in said


def test_the_reasons_are_the_terms_that_differ() -> None:
    plan = decision().plan
    assert compare.slower(plan, plan) == "" and compare.larger(plan, plan) == ""
    terms = {**plan.prediction.terms}
    terms["compute"] += 2.0
    terms["collectives"] -= 1.0
    other = replace(
        plan,
        prediction=replace(plan.prediction, terms=terms),
        knobs=replace(plan.knobs, remat="full"),
        memory={**plan.memory, "activations": plan.memory["activations"] + 2**20},
    )
    assert compare.slower(plan, other).startswith(
        "the difference: compute +2 s (remat=full instead of none); against it "
        "collectives -1 s"
    )
    assert compare.slower(other, plan).startswith("the difference: compute -2 s")
    assert compare.larger(plan, other).startswith("most of it: activations +1 MiB, ")
    assert compare.larger(other, plan) == ""


def test_what_does_not_fit_says_by_how_many_bytes() -> None:
    needs = best_of(question(), with_memory("8xH100", 2**34), {"replica": 8}).plan
    state = needs.memory_bytes - needs.memory["reserve"]
    small = with_memory("8xH100", round(0.9 * state))
    found = decide(question(), small)
    other = best_of(question(), small, {"replica": 8}).plan
    assert not other.fits
    text = why_not(found, replica=8)
    title = text.splitlines()[0]
    assert "does not fit" in title
    sizes = [reading.value(part) for part in re.findall(r"[\d.]+ [KMG]iB", title)]
    over = other.memory_bytes - other.capacity_bytes
    assert sizes == [near(other.memory_bytes), near(over), near(other.capacity_bytes)]
    rows = reading.rows(text, "Memory of a device")
    assert reading.value(rows["activations"][1]) == near(other.memory["activations"])


def test_what_does_not_divide_names_the_numbers() -> None:
    text = why_not(decision(), tensor=7)
    assert "tensor=7 is not possible" in text
    assert "7 does not divide 8 devices" in text


def test_what_the_plan_has_is_not_searched_again() -> None:
    found = decision()
    axis, number = next(iter(found.plan.mesh.items()))
    text = why_not(found, **{axis: number}, remat=found.plan.knobs.remat)
    assert "the plan has it" in text


def test_an_axis_says_which_dims_it_leaves_whole() -> None:
    odd = decision(vocabulary=257, replica=8)
    text = why_not(odd, replica=4, tensor=2)
    assert "257, whose next multiple is 258" in text
    assert "leading part is 3" in text


def test_against_a_pin_of_the_plan_the_question_may_win() -> None:
    slow = decision(replica=4)
    best: Decision = decision()
    pins = {"replica": best.plan.mesh.get("replica", 1)}
    text = why_not(slow, **pins)
    there, here = best.plan.prediction.step_s, slow.plan.prediction.step_s
    assert "possible and faster" in text
    shown = wording.seconds(there, slow.plan.prediction.relative_error)
    assert f"takes {shown} per step instead" in text
    assert here > there


def test_a_question_about_nothing_and_about_no_knob() -> None:
    with pytest.raises(ValueError, match=r"Name knobs, such as why_not\(tensor=8\)"):
        why_not(decision())
    assert "Allowed: replica" in why_not(decision(), tensr=8)


@pytest.mark.parametrize("value", ["8", None, [2], 2.5, 0, 10**30])
def test_a_size_that_is_none_is_said(value: Any) -> None:
    text = why_not(decision(), tensor=value)
    assert f"tensor={value!r} is pinned. Allowed: a whole number, 1 or more" in text


@pytest.mark.parametrize("value", [5, None, "tensor", [["tensor"]], {}])
def test_an_order_that_is_none_is_said(value: Any) -> None:
    text = why_not(decision(), order=value)
    assert f"order={value!r} is pinned. Allowed: a tuple of different axes" in text
