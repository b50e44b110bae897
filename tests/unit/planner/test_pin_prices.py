"""What a pin costs is what the best plan without it saves."""

import pytest

from dtft.planner import wording
from dtft.planner.cluster.topology import Cluster
from dtft.planner.report import text
from dtft.planner.report.replan import pin_prices, pin_section
from dtft.planner.search.decision import decide
from tests.support.deciding_zoo import mlp

CLUSTER = Cluster.parse("2x4xH100")


def test_each_pin_has_its_price_and_all_of_them_together() -> None:
    pins = {"tensor": 8, "microbatches": 4}
    question = mlp()
    decision = decide(question, CLUSTER, pins)
    prices = pin_prices(decision)
    assert [dict(one.pins) for one in prices] == [
        {"tensor": 8},
        {"microbatches": 4},
        pins,
    ]
    here_s = decision.plan.prediction.step_s
    kept = ({"microbatches": 4}, {"tensor": 8}, {})
    for price, rest in zip(prices, kept, strict=True):
        without = decide(question, CLUSTER, rest).plan
        assert price.without == without
        saved = here_s - without.prediction.step_s
        assert price.cost_s == pytest.approx(max(0.0, saved))
    assert prices[-1].cost_s >= max(one.cost_s for one in prices) > 0


def test_the_table_has_the_numbers_it_explains() -> None:
    decision = decide(mlp(), CLUSTER, {"microbatches": 4})
    (price,), (table,) = pin_prices(decision), pin_section(decision)
    ((pin, costs, share, without, step, _),) = table.rows
    assert pin == "microbatches=4"
    error = decision.plan.prediction.relative_error
    assert costs == wording.seconds(price.cost_s, error)
    assert step == wording.seconds(price.without.prediction.step_s, error)
    assert share.startswith("+")
    assert without.startswith(wording.mesh(price.without.mesh))


def test_a_pin_that_the_best_plan_has_anyway_costs_nothing() -> None:
    free = decide(mlp(), CLUSTER)
    zero = free.plan.knobs.zero
    (price,) = pin_prices(decide(mlp(), CLUSTER, {"zero": zero}))
    assert price.cost_s == 0.0 and price.without == free.plan
    (table,) = pin_section(decide(mlp(), CLUSTER, {"zero": zero}))
    assert table.rows[0][1] == "nothing"


def test_without_pins_there_is_nothing_to_show() -> None:
    decision = decide(mlp(), CLUSTER)
    assert pin_section(decision) == () and text.plan_sections(decision.plan)
