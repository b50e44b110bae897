"""Makes sharded batches from global row indices, and evaluates a whole data set.

Each process reads the rows of its own devices. The mesh positions of the devices
determine these rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dtft.checkpoint.managers import Phase
from dtft.data import Source, rows_of
from dtft.parallel.functional_model import State
from dtft.parallel.step import Arrays, TrainStep


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The arrays of one step's batch, and the indices of the rows of this process.

    A row that several devices hold counts for one process only, that of the first of
    these devices in mesh order.
    """

    arrays: Arrays
    """Global arrays, either sharded or in host memory for the step to shard."""
    rows: list[int]
    """Global indices of the rows that this process owns. Each row has one owner: if
    several devices read a row, the process of the first of them in mesh order."""
    ids: list[int]
    """For each row of `rows` the number of its sample in the data set."""


class Prepared:
    """Base class of feeds: keeps batches that were read before they are needed.

    `prepare` can read the next batch while the devices work on the current batch.
    """

    def __init__(self) -> None:
        """Starts without batches; reads nothing yet."""
        self._prepared: dict[int, Batch] = {}

    def prepare(self, step: int) -> None:
        """Reads the batch of step `step` (the first is 1) and keeps it for `take`."""
        self._prepared[step] = self._read(step)

    def take(self, step: int) -> Batch:
        """Returns the batch of step `step`, and reads it if it is not prepared.

        The batch is not kept, so a second call reads it again.
        """
        if step not in self._prepared:
            self.prepare(step)
        return self._prepared.pop(step)

    def _read(self, step: int) -> Batch:
        raise NotImplementedError

    def close(self) -> None:
        """Stops threads that read ahead; this base class has none."""


class Feed(Prepared):
    """Feed whose batches have equally many rows for each data slot.

    A data slot is a position along the mesh axes that divide the rows.
    """

    def __init__(
        self, source: Source, train_step: TrainStep, global_batch: int
    ) -> None:
        """Computes which shards of a batch this process reads; reads nothing yet.

        Args:
            source: the data set whose rows the batches have.
            train_step: the step that gets the batches; has their sharding.
            global_batch: number of rows of a batch, over all processes.
        """
        super().__init__()
        self._source, self._global_batch = source, global_batch
        self._sharding = train_step.batch_sharding
        self._width = self._sharding.shard_shape((global_batch,))[0]
        self._parts = local_parts(self._sharding, global_batch)
        self._ahead: tuple[int, Any] | None = None
        """The next step and the iterator that reads its batch ahead; None if no
        iterator is open."""

    def close(self) -> None:
        """Stops the threads that read ahead."""
        if self._ahead is not None:
            self._ahead[1].close()
            self._ahead = None

    def _read(self, step: int) -> Batch:
        starts, owned = self._parts
        indices = self._indices(step)
        columns = self._columns(step, indices)
        parts = {
            start: {
                name: column[number * self._width : (number + 1) * self._width]
                for name, column in columns.items()
            }
            for number, start in enumerate(starts)
        }
        arrays: Arrays = {name: it for name, it in columns.items() if name != "id"}
        if not self._sharding.is_fully_addressable:
            arrays = place(parts, self._sharding, self._global_batch)
        # Otherwise the parts, in this order, are the whole batch. Passing numpy arrays
        # to the jitted step costs a tenth of `device_put`.
        return Batch(
            arrays=arrays,
            rows=[row for start in owned for row in self._part(step, start)],
            ids=[i for start in owned for i in parts[start]["id"].tolist()],
        )

    def _part(self, step: int, start: int) -> range:
        slots = self._global_batch // self._width
        return rows_of(step - 1, start // self._width, slots, self._global_batch)

    def _indices(self, step: int) -> list[int]:
        """Returns the global row indices that this process reads in a step.

        The indices are ordered by the part of the batch (shard of dim 0) that has the
        row.
        """
        return [row for start in self._parts[0] for row in self._part(step, start)]

    def _columns(self, step: int, indices: list[int]) -> dict[str, np.ndarray]:
        if not self._source.reads_ahead:
            return self._source.batch(indices)
        if self._ahead is None or self._ahead[0] != step:
            self.close()
            size = len(indices)
            self._ahead = step, self._source.batches(self._indices, step, size)
        _, iterator = self._ahead
        self._ahead = step + 1, iterator
        return next(iterator)


def local_parts(
    sharding: jax.sharding.NamedSharding, length: int
) -> tuple[list[int], list[int]]:
    """Finds the parts of an array that this process holds, and the parts that it owns.

    A part is a shard of dim 0. If several devices hold a part, the process of the first
    of these devices in mesh order owns the part. Returns two lists in ascending order:
    the start index in dim 0 of each held part, and the start index of each owned part.

    Args:
        sharding: a sharding that divides dim 0 only.
        length: size of dim 0.
    """
    first: dict[int, Any] = {}
    for device, index in sharding.devices_indices_map((length,)).items():
        if index is not None:
            first.setdefault(index[0].start or 0, device)
    local = sharding.addressable_devices_indices_map((length,)).values()
    starts = sorted({index[0].start or 0 for index in local if index is not None})
    here = jax.process_index()
    return starts, [start for start in starts if first[start].process_index == here]


def place(
    parts: Mapping[int, Mapping[str, Any]],
    sharding: jax.sharding.NamedSharding,
    global_batch: int,
) -> dict[str, jax.Array]:
    """Makes global arrays from the shards of this process.

    Leaves out the array `id` (the numbers of the samples), which no step uses.

    Args:
        parts: map from a shard's start index in dim 0 to the shard's arrays by name.
        sharding: sharding of every array.
        global_batch: size of dim 0 of the global arrays.
    """
    some = next(iter(parts.values()))
    if sharding.is_fully_addressable:  # one process has all parts: one device_put call
        ordered = [parts[start] for start in sorted(parts)]
        columns = {
            name: some[name]
            if len(ordered) == 1
            else np.concatenate([part[name] for part in ordered])
            for name in some
            if name != "id"
        }
        return jax.device_put(columns, sharding)

    def array(name: str) -> jax.Array:
        shape = (global_batch, *some[name].shape[1:])

        def part(index: Any) -> np.ndarray:
            return parts[index[0].start or 0][name]

        return jax.make_array_from_callback(shape, sharding, part)

    return {name: array(name) for name in some if name != "id"}


def _nobody(phase: Phase) -> None:
    """Does nothing; the default callback for the phases of `evaluate`."""


def evaluate(
    train_step: TrainStep,
    state: State,
    source: Source,
    global_batch: int,
    *,
    entered: Callable[[Phase], None] = _nobody,
) -> dict[str, float]:
    """Returns the means of the loss and of each metric over all samples of `source`.

    All processes must call this function together. The last batch is padded with rows
    of weight 0. For each batch `entered` is called three times: with "evaluate" before
    the rows are read; with "compile" (first batch) or "evaluate" (later batches) before
    the computation is started; and with "evaluate" after the start.

    Args:
        train_step: the step whose model is evaluated.
        state: the state with the model's parameters and running statistics.
        source: the data set.
        global_batch: number of rows of a batch, over all processes.
        entered: function that gets the phase that begins.

    Returns:
        Map from `loss` and the name of each metric to the mean.
    """
    starts, _ = local_parts(train_step.batch_sharding, global_batch)
    width = train_step.batch_sharding.shard_shape((global_batch,))[0]
    totals: dict[str, float] = {}
    phase: Phase = "compile"
    for first in range(0, source.num_samples, global_batch):
        entered("evaluate")
        parts = {s: _padded(source, first + s, width) for s in starts}
        arrays = place(parts, train_step.batch_sharding, global_batch)
        weight_B = arrays.pop("weight")
        entered(phase)
        on_devices = train_step.sums(state, arrays, weight_B)
        entered("evaluate")
        phase = "evaluate"
        sums = jax.device_get(on_devices)
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return {name: value / source.num_samples for name, value in totals.items()}


def _padded(source: Source, start: int, width: int) -> dict[str, np.ndarray]:
    indices: Sequence[int] = range(start, start + width)
    real = np.asarray([index < source.num_samples for index in indices], np.float32)
    columns = source.batch([min(index, source.num_samples - 1) for index in indices])
    return {**columns, "weight": real}
