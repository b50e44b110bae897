"""Every row once, whatever reads it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.data import datasets
from dtft.data.datasets import DIGITS_SHA256, CharsConfig, DigitsConfig
from dtft.data.rows import Source, make_datasets, rows_of
from tests.support.imports import loaded_by


@given(st.integers(0, 50), st.integers(1, 8), st.integers(1, 8))
def test_rows_cover_every_step_exactly(step: int, slots: int, width: int) -> None:
    batch = slots * width
    parts = [rows_of(step, slot, slots, batch) for slot in range(slots)]
    assert [row for part in parts for row in part] == list(
        range(step * batch, (step + 1) * batch)
    )


def test_rows_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match="global_batch=7 is not divisible"):
        rows_of(0, 0, 2, 7)
    with pytest.raises(ValueError, match="data_slot=2 is out of range"):
        rows_of(0, 2, 2, 8)


def test_an_epoch_has_every_sample_once_and_the_next_another_order() -> None:
    source = Source({"x": np.arange(50, dtype=np.int32)}, shuffle_seed=3)
    epochs = [source.batch(range(start, start + 50))["id"] for start in (0, 50)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert list(epochs[0]) != list(epochs[1])
    again = Source({"x": np.arange(50, dtype=np.int32)}, shuffle_seed=3)
    assert list(again.batch(range(50, 100))["id"]) == list(epochs[1])


def test_batch_carries_the_sample_of_its_id() -> None:
    source = Source({"x": np.arange(50, dtype=np.int32) * 2}, shuffle_seed=0)
    batch = source.batch([4, 99, 7])
    np.testing.assert_array_equal(batch["x"], batch["id"] * 2)


def test_digits_are_the_known_ones_and_split_once() -> None:
    data = make_datasets(DigitsConfig(), seed=0)
    assert DIGITS_SHA256 in data.identity
    assert (data.train.num_samples, data.test.num_samples) == (1438, 359)
    batch = data.test.batch(range(359))
    assert batch["image"].shape == (359, 8, 8, 1) and batch["image"].max() == 1
    assert list(batch["id"]) == list(range(359))


@pytest.mark.timeout(180)
def test_what_a_trainer_imports_has_no_scipy() -> None:
    loaded = loaded_by(
        "import dtft.train.worker, dtft.train.loop\n"
        "from dtft.data.datasets import DigitsConfig\nDigitsConfig().load()"
    )
    assert not {"scipy", "sklearn", "matplotlib"} & loaded


def test_digits_that_are_not_installed_are_named(monkeypatch) -> None:
    missing = "sklearn/datasets/data/missing.csv.gz"
    monkeypatch.setattr(datasets, "DIGITS_FILE", missing)
    with pytest.raises(ValueError, match="digits are not at .*missing.csv.gz"):
        DigitsConfig().load()


def test_chars_are_ascii_windows_that_join() -> None:
    config = CharsConfig(context=16)
    train, test = config.load()
    tokens = train["tokens"]
    assert tokens.shape[1] == 17 and 0 <= tokens.min() and tokens.max() < 128
    np.testing.assert_array_equal(tokens[:-1, -1], tokens[1:, 0])
    assert 15 < len(tokens) / len(test["tokens"]) < 25
    assert "sha256=" in config.identity()
