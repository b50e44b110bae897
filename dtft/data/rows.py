"""Rows by global index: the sample of each row, and the rows that a data slot reads.

The position in the data is one integer, the number of global rows used so far. A data
slot is a position along the mesh axes that divide the batch.
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
"""Number of consecutive rows of an epoch whose samples `RowOrder` computes at once; the
last two results are cached."""
_WORD = 0xFFFFFFFF


class RowOrder:
    """The sample of each global row: a permutation of the samples for each epoch.

    The order equals grain's `MapDataset.seed(seed).shuffle().repeat()`. Grain calls a
    C++ function for each row; this class computes many rows at once.

    As in grain, a block cipher of 4 rounds (with Simon's round function, eprint
    2013/404) permutes the numbers of b bits, with b even and at least 16. The cipher is
    applied again until the result is below the number of samples, which gives a
    permutation of the samples (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). With 2^16 + 1, 2^18 + 1, ... samples the order is no permutation:
    one sample appears twice in an epoch, and another is missing (see `permuted`).

    In the example, rows 5 to 9 are the second epoch of 5 samples.

    >>> order = RowOrder(num_samples=5, seed=7)
    >>> sorted(order.samples(np.arange(5, 10)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, *, num_samples: int, seed: int) -> None:
        """Derives the seed of the order; the order is computed on demand.

        Args:
            num_samples: number of samples in an epoch, 1 to 2^32.
            seed: seed of the experiment.
        """
        self._num_samples = num_samples
        self._seed = int(np.random.SeedSequence((seed, 1)).generate_state(1)[0])
        self._chunk = functools.lru_cache(maxsize=2)(self._make_chunk)

    def samples(self, rows: np.ndarray) -> np.ndarray:
        """Returns the sample of each row.

        Args:
            rows: [B] integers, global row numbers from 0.

        Returns:
            [B] int64, numbers from 0 to `num_samples` - 1.
        """
        epochs, places = np.divmod(np.asarray(rows, np.int64), self._num_samples)
        if len(places) and epochs[0] == epochs[-1] and self._num_samples <= CHUNK:
            if epochs.min() == epochs.max():  # true for almost every batch
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
    """Maps values by a pseudo-random permutation of [0, size).

    Equal to grain's `index_shuffle(value, max_index=size - 1, seed=seed, rounds=4)`. As
    in grain, the map is no permutation if `size` is 2^16 + 1, 2^18 + 1, ...: it maps
    the last value to the same value as 0.

    Args:
        values: [N] integers in [0, size).
        size: 1 to 2^32.
        seed: seed of the permutation, 32 bits.

    Returns:
        [N] int64.
    """
    if size == 1:
        return np.zeros(len(values), np.int64)
    bits = (size - 2).bit_length()  # ceil(log2(size - 1))
    bits = max(bits + bits % 2, MIN_BITS)
    keys = _round_keys(seed, ROUNDS)
    # Grain masks values to `bits` bits: with 2^16 + 1, 2^18 + 1, ... samples the last
    # value becomes 0, and one sample appears twice.
    found = np.asarray(values, np.uint64) & np.uint64(2**bits - 1)
    if bits == MIN_BITS:  # few samples need many applications of the cipher
        return _ends_of_walks(keys, size)[found]
    outside = np.arange(len(found))
    while len(outside):
        found[outside] = _encrypted(found[outside], bits=bits, keys=keys)
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def _ends_of_walks(keys: list[int], size: int) -> np.ndarray:
    """Encrypts each value below `size` until the result is below `size`, too.

    A table of all 16-bit values maps a value below `size` to itself, and any other
    value to its encryption. The table is composed with itself a few times, so that one
    look-up encrypts several times.

    Args:
        keys: the keys of the rounds of the 16-bit cipher.
        size: the limit, at most 2^16 + 1.

    Returns:
        The results in the order of the values; int64 [min(size, 2^16)].
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
    """Encrypts all 16-bit values by the block cipher; int64 [2^16], in their order.

    `keys` has the key of each round of the cipher. A round splits a value into two
    halves of 8 bits, and looks the round function of a half up in a table.
    """
    halves = np.arange(256, dtype=np.uint64)
    table = _mixed(halves, bits=8).astype(np.uint8)
    left = np.repeat(halves, 256).astype(np.uint8)
    right = np.tile(halves, 256).astype(np.uint8)
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        left ^= table[right] ^ np.uint8(first & 255)
        right ^= table[left] ^ np.uint8(second & 255)
    return (left.astype(np.int64) << 8) | right


def _encrypted(values: np.ndarray, *, bits: int, keys: list[int]) -> np.ndarray:
    """Encrypts values by a Feistel network with the round function of Simon.

    Args:
        values: [N] uint64, each below 2^bits.
        bits: the number of bits of a value, even.
        keys: the key of each round; an even number of keys.
    """
    word = np.uint64(bits // 2)
    mask = np.uint64(2 ** (bits // 2) - 1)
    left, right = values >> word, values & mask
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ _mixed(right, bits=bits // 2) ^ (np.uint64(first) & mask)
        right = right ^ _mixed(left, bits=bits // 2) ^ (np.uint64(second) & mask)
    return (left << word) | right


def _mixed(word: np.ndarray, *, bits: int) -> np.ndarray:
    """Computes Simon's round function of words of `bits` bits."""
    mask = np.uint64(2**bits - 1)

    def rotated(by: int) -> np.ndarray:
        return ((word << np.uint64(by)) | (word >> np.uint64(bits - by))) & mask

    return (rotated(1) & rotated(8)) ^ rotated(2)


def _round_keys(seed: int, number: int) -> list[int]:
    """Derives `number` 32-bit keys from a seed, as C++'s `std::seed_seq` does.

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
    """Returns the global row indices that one data slot reads for one step.

    Args:
        step: number of steps finished before this step; 0 for the first step.
        data_slot: position along the mesh axes that divide the batch.
        num_data_slots: number of data slots.
        global_batch: rows per step over all data slots.

    Returns:
        A contiguous range of global row indices.

    Raises:
        ValueError: the batch does not divide evenly, or `data_slot` is out of range.

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
    """A data set whose rows are read by global index, as batches of numpy arrays."""

    def __init__(
        self, samples: Columns | Samples, *, shuffle_seed: int | None = None
    ) -> None:
        """Takes columns in memory, or samples that are read by number.

        Args:
            samples: the data set.
            shuffle_seed: seed of the order of rows. Every epoch has a different order,
                and epochs follow without end. None: row i is sample i, and there is
                only one epoch.
        """
        self._columns = samples if isinstance(samples, dict) else None
        self._reader = None if isinstance(samples, dict) else samples
        self._seed = shuffle_seed or 0
        count = len(
            next(iter(samples.values())) if isinstance(samples, dict) else samples
        )
        self.num_samples = count
        """Number of samples in an epoch."""
        self._num_threads = self._reader.num_threads if self._reader else 1
        self._order = (
            None
            if shuffle_seed is None
            else RowOrder(num_samples=count, seed=shuffle_seed)
        )

    @property
    def reads_ahead(self) -> bool:
        """Whether a caller should read batches ahead of their use, with `batches`.

        True if the samples are read on demand, by more than one thread. Otherwise
        `batch` is enough: it reads one batch when it is needed.
        """
        return self._num_threads > 1

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Reads the rows with these global indices, in order, as one array per field.

        The field `id` (int32) has the samples' numbers.
        """
        samples = self._ids(indices)
        if self._columns is not None:
            fields = {name: column[samples] for name, column in self._columns.items()}
            return {"id": samples.astype(np.int32), **fields}
        pairs = list(zip(indices, samples.tolist(), strict=True))
        if not self.reads_ahead:
            return stacked([self._read(row, sample) for row, sample in pairs])
        # A pool per batch needs no cleanup at exit, and costs little beside decoding.
        with ThreadPoolExecutor(self._num_threads) as pool:
            return stacked(list(pool.map(lambda pair: self._read(*pair), pairs)))

    def batches(
        self, indices_of: Callable[[int], Sequence[int]], first: int, size: int
    ) -> "grain.DatasetIterator[dict[str, np.ndarray]]":
        """Iterates over `batch(indices_of(k))` for k = `first`, `first` + 1, ...

        Only for samples that are read on demand, not for columns in memory.

        Args:
            indices_of: returns the `size` global row indices of batch k; called from
                threads.
            first: the first k.
            size: rows of each batch.

        Returns:
            An iterator without end. Grain's threads read up to two batches of rows
            ahead. The caller must close the iterator.
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
        """Returns the number of the sample of each global row, [B] int64."""
        numbers = np.asarray(rows, np.int64)
        return numbers if self._order is None else self._order.samples(numbers)

    def _read(self, row: int, sample: int) -> Columns:
        assert self._reader is not None
        fields = self._reader.read(sample, (self._seed, int(row)))
        return {"id": np.int32(sample), **fields}


def stacked(elements: Sequence[Columns]) -> dict[str, np.ndarray]:
    """Stacks the fields of several samples along a new dim 0."""
    return {
        name: np.stack([element[name] for element in elements]) for name in elements[0]
    }


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """The training and test set of an experiment, and the identity of the data."""

    train: Source
    test: Source
    identity: str


def make_datasets(config: DataConfig, seed: int) -> Datasets:
    """Loads the training and test set that a data config describes.

    Args:
        config: the data config.
        seed: seed of the order of the training rows, and of the random crops of images.
    """
    train, test = config.load()
    return Datasets(
        train=Source(train, shuffle_seed=seed),
        test=Source(test),
        identity=config.identity(),
    )
