"""Rows by global index: which row is which sample, and which rows a data slot reads.

The data position is one integer, the number of global rows used so far. Must not know
hosts, processes or devices: a data slot is a position in the mesh.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from dtft.train.datasets import Columns, DataConfig, Samples


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
        reader = _InMemory(samples) if isinstance(samples, dict) else samples
        self._num_threads = reader.num_threads
        self.num_samples = len(reader)
        """Number of different samples."""
        seed = shuffle_seed or 0

        def read(row: int, sample: int) -> Columns:
            fields = reader.read(int(sample), (seed, int(row)))
            return {"id": np.int32(sample), **fields}

        dataset = grain.MapDataset.range(self.num_samples)
        if shuffle_seed is not None:
            dataset = dataset.seed(shuffle_seed).shuffle().repeat()
        self._dataset = dataset.map_with_index(read)

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The rows at `indices`, stacked; `id` is the sample's number."""
        elements: list[Any]
        if self._num_threads == 1:
            elements = [self._dataset[index] for index in indices]
        else:
            # A pool per batch: nothing to end at exit, and cheap beside decoding.
            with ThreadPoolExecutor(self._num_threads) as pool:
                elements = list(pool.map(self._dataset.__getitem__, indices))
        return {
            name: np.stack([element[name] for element in elements])
            for name in elements[0]
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


class _InMemory:
    num_threads = 1

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def read(self, sample: int, entropy: tuple[int, int]) -> Columns:
        del entropy
        return {name: column[sample] for name, column in self._columns.items()}
