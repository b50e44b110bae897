"""What the study of balance over placed nodes divides, and what becomes of it."""

from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.balance_placed_beside import result
from experiments.balance_placed_report import _rows
from experiments.balance_placed_ways import (
    by_operators,
    layer_s,
    moved,
    splits,
)
from experiments.balance_placed_worker import (
    HIDDEN,
    MICROBATCHES,
    _file,
    kept,
    make_step,
    traced_loss,
)


def test_all_ways_to_cut_a_row_are_looked_at() -> None:
    assert splits(4, 2) == [(1, 3), (2, 2), (3, 1)]
    found = splits(len(HIDDEN), 3)
    assert len(set(found)) == 21
    assert {sum(counts) for counts in found} == {len(HIDDEN)}


def test_the_cost_model_tells_layers_apart() -> None:
    seconds = layer_s()[:, 0]
    assert np.allclose(
        seconds / seconds.sum(), np.array(HIDDEN) / sum(HIDDEN), rtol=0.02
    )


def test_nodes_hand_over_one_value_per_microbatch_whatever_the_split() -> None:
    for counts in ((1, 6, 1), (3, 3, 2)):
        step = make_step(counts, jax.devices()[:3])
        assert [segment.node for segment in step.cut.segments] == [0, 1, 2]
        sent = {(t.source, t.destination): t.count for t in step.transfers}
        assert sent == {
            (a, b): MICROBATCHES for a, b in ((0, 1), (1, 2), (1, 0), (2, 1))
        }


def test_weights_move_operators_and_a_step_is_made_of_what_comes_of_them() -> None:
    way = by_operators()
    even, slowed = way.work.by_weight(np.ones(3)), way.work.best(np.array([4.0, 1, 1]))
    assert len(way.nodes(even)) == len(traced_loss().operators)
    assert moved(way.nodes(even), way.nodes(slowed))
    assert way.work.load(slowed)[0] < 0.7 * way.work.load(even)[0]
    step = make_step(way.form(slowed), jax.devices()[:3])
    ran = {n: s.node for s in step.cut.segments for n in s.operators}
    assert ran == dict(enumerate(way.nodes(slowed)))
    homes = jax.tree.leaves(step.homes["params"])
    assert set(homes) == set(ran.values())
    assert jax.tree.leaves(step.homes["opt_state"]) == homes


def test_state_goes_on_where_other_nodes_left_it(tmp_path: Path) -> None:
    state = {"params": [{"up": np.ones(2)}, {"up": np.ones(3)}]}
    np.save(_file(str(tmp_path), "params/1/up"), np.full(3, 2.0))
    found = kept(str(tmp_path), state)
    assert found["params"][0]["up"].tolist() == [1, 1]
    assert found["params"][1]["up"].tolist() == [2, 2, 2]


def test_the_best_split_is_one_of_those_that_were_measured_again() -> None:
    lucky, best, other = (1, 2), (2, 1), (3, 0)
    seconds = {lucky: [0.5], best: [1.0] * 5, other: [2.0] * 5, "mine": [1.1] * 4}
    found = result(seconds, [lucky, best, other], "mine")
    assert found["best"] == best and found["over_best"] == pytest.approx(1.1)


def test_the_table_says_which_operators_moved() -> None:
    one = {
        "slowed": False,
        "way": "operators",
        "division": "0: 0-1, 1: 2",
        "nodes": (0, 0, 1),
        "weights": (0.5, 0.5),
        "max_wait_s": 0.2,
        "mean_wait_s": 0.1,
        "step_s": 0.3,
        "gain": 0.25,
    }
    rows = _rows([one, {**one, "nodes": (0, 1, 1), "slowed": True}])
    assert rows[0][-1] == "1 (0 to 1)" and rows[1][-1] == ""
    assert rows[1][:2] == ("2 slowed", "operators")
