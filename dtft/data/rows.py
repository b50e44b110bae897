"""Rows by global index: which row is which sample, and which rows a data slot reads.

The data position is one integer, the number of global rows used so far. A data slot is
a position in the mesh.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grain
import numpy as np

from dtft.data.datasets import Columns, DataConfig, Samples

ROUNDS = 4
MIN_BITS = 16
CHUNK = 2**16
"""Rows whose order is made at once, and kept."""
_WORD = 0xFFFFFFFF


class RowOrder:
    """Which sample each global row is: a permutation of the samples for each epoch.

    The order is that of grain's `MapDataset.seed(s).shuffle().repeat()`, number by
    number, computed for many rows at once: grain asks its C++ function for one row at a
    time, and that walks farther the fewer samples there are. A block cipher of 4 rounds
    permutes [0, 2^b); walking its cycles until a value is below the number of samples
    gives a permutation of these (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002; the cipher is Simon's round function, eprint 2013/404).

    >>> order = RowOrder(num_samples=5, seed=7)
    >>> sorted(order.samples(np.arange(5, 10)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, *, num_samples: int, seed: int) -> None:
        """Makes nothing yet.

        Args:
            num_samples: samples in an epoch, 1 to 2^32.
            seed: of the experiment.
        """
        self._num_samples = num_samples
        self._seed = int(np.random.SeedSequence((seed, 1)).generate_state(1)[0])
        self._chunk = functools.lru_cache(maxsize=2)(self._make_chunk)

    def samples(self, rows: np.ndarray) -> np.ndarray:
        """The sample of each row.

        Args:
            rows: [B] integers, global row numbers from 0.

        Returns:
            [B] int64, numbers from 0 to `num_samples` - 1.
        """
        epochs, places = np.divmod(np.asarray(rows, np.int64), self._num_samples)
        if len(places) and epochs[0] == epochs[-1] and self._num_samples <= CHUNK:
            if epochs.min() == epochs.max():  # as almost always
                return self._chunk(int(epochs[0]), 0)[places]
        found = np.empty(places.shape, np.int64)
        chunks = places // CHUNK
        for epoch, chunk in sorted(
            {*zip(epochs.tolist(), chunks.tolist(), strict=True)}
        ):
            here = (epochs == epoch) & (chunks == chunk)
            found[here] = self._chunk(epoch, chunk)[places[here] - chunk * CHUNK]
        return found

    def _make_chunk(self, epoch: int, chunk: int) -> np.ndarray:
        start = chunk * CHUNK
        stop = min(start + CHUNK, self._num_samples)
        seed = (self._seed + epoch) & _WORD
        return permuted(np.arange(start, stop), self._num_samples, seed)


def permuted(values: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Where a permutation of [0, size) takes these values.

    Equal to grain's `index_shuffle(value, max_index=size - 1, seed=seed, rounds=4)`.

    Args:
        values: [N] integers in [0, size).
        size: 1 to 2^32.
        seed: 32 bits, of the permutation.

    Returns:
        [N] int64.
    """
    if size == 1:
        return np.zeros(len(values), np.int64)
    bits = (size - 2).bit_length()  # of `ceil(log2(size - 1))`
    bits = max(bits + bits % 2, MIN_BITS)
    keys = _round_keys(seed, ROUNDS)
    # Grain drops the bit above: of 2^16 + 1, 2^18 + 1 ... samples one comes twice.
    found = np.asarray(values, np.uint64) & np.uint64(2**bits - 1)
    if bits == MIN_BITS:  # few samples walk far
        return _ends_of_walks(keys, size)[found]
    outside = np.arange(len(found))
    while len(outside):
        found[outside] = _encrypted(found[outside], bits=bits, keys=keys)
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def _ends_of_walks(keys: list[int], size: int) -> np.ndarray:
    """For each value below `size`: the next one below `size` on its cycle.

    Values below `size` are made to stay where they are, so that a walk may go too far:
    it takes about as many steps at once as it is long on average.
    """
    ahead = _encrypted_all(keys)
    found = ahead[:size].copy()
    ahead[:size] = np.arange(len(found))
    for _ in range(MIN_BITS - size.bit_length()):
        ahead = ahead[ahead]
    while (found >= size).any():
        found = ahead[found]
    return found


def _encrypted_all(keys: list[int]) -> np.ndarray:
    """[2^16] int64: `_encrypted` of 0, 1 ... with all that a half can be in a table."""
    halves = np.arange(256, dtype=np.uint64)
    table = _mixed(halves, bits=8).astype(np.uint8)
    left = np.repeat(halves, 256).astype(np.uint8)
    right = np.tile(halves, 256).astype(np.uint8)
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        left ^= table[right] ^ np.uint8(first & 255)
        right ^= table[left] ^ np.uint8(second & 255)
    return (left.astype(np.int64) << 8) | right


def _encrypted(values: np.ndarray, *, bits: int, keys: list[int]) -> np.ndarray:
    """Simon's Feistel network on words of `bits` / 2."""
    word = np.uint64(bits // 2)
    mask = np.uint64(2 ** (bits // 2) - 1)
    left, right = values >> word, values & mask
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ _mixed(right, bits=bits // 2) ^ (np.uint64(first) & mask)
        right = right ^ _mixed(left, bits=bits // 2) ^ (np.uint64(second) & mask)
    return (left << word) | right


def _mixed(word: np.ndarray, *, bits: int) -> np.ndarray:
    """Simon's round function of a word of `bits`."""
    mask = np.uint64(2**bits - 1)

    def rotated(by: int) -> np.ndarray:
        return ((word << np.uint64(by)) | (word >> np.uint64(bits - by))) & mask

    return (rotated(1) & rotated(8)) ^ rotated(2)


def _round_keys(seed: int, number: int) -> list[int]:
    """Keys of 32 bits from one seed, as C++'s `std::seed_seq` makes them.

    ISO C++ 17, [rand.util.seedseq], for one seed and fewer than seven keys.

    >>> len(_round_keys(1, 4))
    4
    """
    keys = [0x8B8B8B8B] * number
    shift = (number - 1) // 2
    near = (number - shift) // 2
    far = near + shift

    def scrambled(x: int) -> int:
        return x ^ (x >> 27)

    for k in range(number):
        before, after = (k - 1) % number, (k + near) % number
        added = 1664525 * scrambled(keys[k] ^ keys[after] ^ keys[before]) & _WORD
        start = (1, 1 + seed)[k] if k < 2 else k
        value = (added + start) & _WORD
        keys[after] = (keys[after] + added) & _WORD
        keys[(k + far) % number] = (keys[(k + far) % number] + value) & _WORD
        keys[k] = value
    for k in range(number):
        before, after = (k - 1) % number, (k + near) % number
        total = (keys[k] + keys[after] + keys[before]) & _WORD
        taken = 1566083941 * scrambled(total) & _WORD
        value = (taken - k) & _WORD
        keys[after] ^= taken
        keys[(k + far) % number] ^= value
        keys[k] = value
    return keys


def rows_of(step: int, data_slot: int, num_data_slots: int, global_batch: int) -> range:
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

    >>> [rows_of(1, slot, 3, 6) for slot in range(3)]
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
            else RowOrder(num_samples=count, seed=shuffle_seed)
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
