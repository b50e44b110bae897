"""What the study of balance over placed nodes divides."""

import jax
import numpy as np

from experiments import balance_placed
from experiments.balance_placed_worker import HIDDEN, MICROBATCHES, make_step


def test_all_ways_to_cut_a_row_are_looked_at() -> None:
    assert balance_placed._splits(4, 2) == [(1, 3), (2, 2), (3, 1)]
    splits = balance_placed._splits(len(HIDDEN), 3)
    assert len(set(splits)) == 21
    assert {sum(counts) for counts in splits} == {len(HIDDEN)}


def test_the_cost_model_tells_layers_apart() -> None:
    seconds = balance_placed._layer_s()[:, 0]
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
