"""The answer to "why not" has numbers, and they are those of the other plan."""

import re

import pytest

from dtft.planner.deciding import Decision, best_of, decide
from dtft.planner.why_not import why_not
from tests.planner import reading
from tests.planner.deciding_zoo import decision, question, with_memory


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
    times = [reading.value(part) for part in re.findall(r"[\d.]+ [mu]?s\b", title)]
    assert times == [near(there), near(here), near(there - here)]
    assert reading.value(re.findall(r"\((\+.*%)\)", title)[0]) == near(there / here - 1)
    rows = reading.rows(text, "Step time")
    for name, value in plan.prediction.terms.items():
        more = other.prediction.terms[name] - value
        assert reading.value(rows[name][2]) == near(more)
    sent = {(c.kind, " x ".join(c.axes)) for c in other.collectives}
    assert all(kind in text for kind, _ in sent)


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
    text = why_not(decision(), tensor=3)
    assert "tensor=3 is not possible" in text
    assert "3 does not divide 8 devices" in text


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
    assert reading.value(text.split("takes ")[1]) == near(there)
    assert here > there


def test_a_question_about_nothing_and_about_no_knob() -> None:
    with pytest.raises(ValueError, match=r"Name knobs, such as why_not\(tensor=8\)"):
        why_not(decision())
    assert "Allowed: replica" in why_not(decision(), tensr=8)
