"""Rows by global index: which row is which sample, and which rows a data slot reads.

The data position is one integer, the number of global rows used so far. Must not know
hosts, processes or devices: a data slot is a position in the mesh.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grain
import numpy as np

from dtft.train.datasets import Columns, DataConfig, Samples
from dtft.train.shuffling import Order


def rows(step: int, data_slot: int, num_data_slots: int, global_batch: int) -> range:
    """The global row indices that one data slot reads for one step.

    Args:
        step: steps finished before, so 0 for the first.
        data_slot: position along the mesh axes that divide the batch.
        num_data_slots: number of such positions.
        global_batch: rows per step over all of them.

    Returns:
        Neighbouring global row indices.

    Raises:
        ValueError: the batch does not divide evenly, or there is no such slot.

    >>> [rows(1, slot, 3, 6) for slot in range(3)]
    [range(6, 8), range(8, 10), range(10, 12)]
    """
    if global_batch % num_data_slots:
        raise ValueError(
            f"global_batch={global_batch} is not divisible by num_data_slots="
            f"{num_data_slots}. Set --data.global_batch to a multiple."
        )
    if not 0 <= data_slot < num_data_slots:
        raise ValueError(
            f"data_slot={data_slot} is out of range. Allowed: 0 to "
            f"{num_data_slots - 1}."
        )
    width = global_batch // num_data_slots
    start = step * global_batch + data_slot * width
    return range(start, start + width)


class Source:
    """Rows by global index, as batches of numpy arrays with the sample's `id`."""

    def __init__(
        self, samples: Columns | Samples, *, shuffle_seed: int | None = None
    ) -> None:
        """Reads `samples` in order once, or shuffled anew in every epoch for ever."""
        self._columns = samples if isinstance(samples, dict) else None
        self._reader = None if isinstance(samples, dict) else samples
        self._seed = shuffle_seed or 0
        count = len(
            next(iter(samples.values())) if isinstance(samples, dict) else samples
        )
        self.num_samples = count
        """Number of different samples."""
        self._num_threads = self._reader.num_threads if self._reader else 1
        self._order = (
            None
            if shuffle_seed is None
            else Order(num_samples=count, seed=shuffle_seed)
        )

    @property
    def reads_ahead(self) -> bool:
        """Whether a row takes long enough to be read by threads, before it is due."""
        return self._num_threads > 1

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The rows at `indices`, stacked; `id` is the sample's number."""
        samples = self._ids(indices)
        if self._columns is not None:
            fields = {name: column[samples] for name, column in self._columns.items()}
            return {"id": samples.astype(np.int32), **fields}
        pairs = list(zip(indices, samples.tolist(), strict=True))
        if not self.reads_ahead:
            return stacked([self._read(row, sample) for row, sample in pairs])
        # A pool per batch: nothing to end at exit, and cheap beside decoding.
        with ThreadPoolExecutor(self._num_threads) as pool:
            return stacked(list(pool.map(lambda pair: self._read(*pair), pairs)))

    def batches(
        self, indices_of: Callable[[int], Sequence[int]], first: int, size: int
    ) -> "grain.DatasetIterator[dict[str, np.ndarray]]":
        """`batch(indices_of(k))` for k = `first`, `first` + 1 ... for ever, read ahead.

        Args:
            indices_of: `size` global row indices for each k; called from threads.
            first: the first k.
            size: rows of each batch.

        Returns:
            An iterator with grain's threads behind it; they hold two batches of rows.
            To be closed.
        """

        def element(number: int) -> Columns:
            row = indices_of(number // size)[number % size]
            return self._read(row, int(self._ids([row])[0]))

        options = grain.ReadOptions(
            num_threads=self._num_threads, prefetch_buffer_size=2 * size
        )
        rows = grain.MapDataset.range(first * size, sys.maxsize).map(element)
        ahead = rows.to_iter_dataset(options).batch(size, batch_fn=stacked)
        return iter(ahead)

    def _ids(self, rows: Sequence[int]) -> np.ndarray:
        """[B] int64: the sample of each row."""
        numbers = np.asarray(rows, np.int64)
        return numbers if self._order is None else self._order.samples(numbers)

    def _read(self, row: int, sample: int) -> Columns:
        assert self._reader is not None
        fields = self._reader.read(sample, (self._seed, int(row)))
        return {"id": np.int32(sample), **fields}


def stacked(elements: Sequence[Columns]) -> dict[str, np.ndarray]:
    """Fields of several samples, the samples in dim 0."""
    return {
        name: np.stack([element[name] for element in elements]) for name in elements[0]
    }


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """What an experiment reads."""

    train: Source
    test: Source
    identity: str


def make_datasets(config: DataConfig, seed: int) -> Datasets:
    """Loads the data of `config`; `seed` decides the order of the training rows."""
    train, test = config.load()
    return Datasets(
        train=Source(train, shuffle_seed=seed),
        test=Source(test),
        identity=config.identity(),
    )
