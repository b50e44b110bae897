"""Batches in uneven shares: each replica's rows, in buffers with room for the most.

As `feed.Feed`, with the shares in force at the moment a batch is made. Which rows a
share means, `sharing` decides. Must not know hosts, nor why shares change.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dtft.train.data import Source
from dtft.train.feed import Batch, Prepared, local_parts, place
from dtft.train.sharing import COUNTS, Sharing
from dtft.train.step import TrainStep
from dtft.train.uneven import shared_by


class SharedFeed(Prepared):
    """Makes batches for a step of `uneven.load_balanced_step`.

    Rows beyond a replica's share are zeros, which the step does not read.
    """

    def __init__(
        self, source: Source, train_step: TrainStep, counts: Sequence[int]
    ) -> None:
        """Reads nothing yet; `counts` are the shares of the first batch."""
        super().__init__()
        self._source, self._sharding = source, train_step.batch_sharding
        self._shared: Sharing = shared_by(train_step).sharing
        self.share(counts)

    def share(self, counts: Sequence[int]) -> None:
        """New shares, in force from the next batch that is made.

        Raises:
            ValueError: they are not shares of this batch.
        """
        self._shared.check(counts)
        self._counts = tuple(int(count) for count in counts)

    def _read(self, step: int) -> Batch:
        shared, counts = self._shared, self._counts
        length = shared.num_replicas * shared.room

        def mine(start: int) -> range:
            return shared.rows(step - 1, counts, start // shared.room)

        starts, owned = local_parts(self._sharding, length)
        parts = {start: self._padded(mine(start)) for start in starts}
        arrays = place(parts, self._sharding, length)
        arrays[COUNTS] = self._placed_counts()
        return Batch(
            arrays=arrays,
            rows=[row for start in owned for row in mine(start)],
            ids=[
                int(i)
                for start in owned
                for i in parts[start]["id"][: len(mine(start))]
            ],
        )

    def _padded(self, rows: range) -> dict[str, np.ndarray]:
        """Columns of these rows, with zeros up to the room of a replica."""
        # A replica without a share still says what its arrays look like.
        found = self._source.batch(rows or range(1))

        def filled(column: np.ndarray) -> np.ndarray:
            whole = np.zeros((self._shared.room, *column.shape[1:]), column.dtype)
            whole[: len(rows)] = column[: len(rows)]
            return whole

        return {name: filled(column) for name, column in found.items()}

    def _placed_counts(self) -> jax.Array:
        values = np.asarray(self._counts, np.int32)

        def part(index: Any) -> np.ndarray:
            return values[index]

        return jax.make_array_from_callback(values.shape, self._sharding, part)
