"""The order of rows is grain's, whatever the number of samples and the seed."""

import grain
import numpy as np
import pytest
from grain.experimental import index_shuffle
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.data.rows import CHUNK, RowOrder, permuted


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 2**32 - 1), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_permutation_is_grains(size, seed, data):
    values = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    theirs = [index_shuffle(v, max_index=size - 1, seed=seed, rounds=4) for v in values]
    assert permuted(np.asarray(values), size, seed).tolist() == theirs


@pytest.mark.parametrize(
    "size", [1, 2, 3, 1438, 2**16 - 1, 2**16, 2**16 + 1, 2**16 + 2, 2**18, 2**18 + 2]
)
def test_a_permutation_is_grains_around_powers_of_two(size):
    values = np.unique(np.linspace(0, size - 1, 40).astype(np.int64))
    theirs = [
        index_shuffle(int(v), max_index=size - 1, seed=5, rounds=4) for v in values
    ]
    assert permuted(values, size, 5).tolist() == theirs


@pytest.mark.parametrize(
    ("size", "seed"), [(7, 0), (1438, 0), (1438, 123), (90_000, 3)]
)
def test_rows_are_the_samples_of_a_shuffled_grain_dataset(size, seed):
    dataset = grain.MapDataset.range(size).seed(seed).shuffle().repeat()
    rows = np.asarray([0, 1, size - 1, size, 2 * size + 3, 5 * size - 1, 12 * size])
    theirs = [dataset[int(row)] for row in rows]
    assert RowOrder(num_samples=size, seed=seed).samples(rows).tolist() == theirs


def test_every_epoch_has_every_sample_once_also_over_chunks():
    size = CHUNK + 500
    order = RowOrder(num_samples=size, seed=1)
    for epoch in (0, 1):
        rows = np.arange(epoch * size, (epoch + 1) * size)
        assert np.array_equal(np.sort(order.samples(rows)), np.arange(size))
