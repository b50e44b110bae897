"""Data configs: the data set, its split, and the number of rows per batch.

A config computes the identity of the data, which must be equal when a run is resumed.
JAX, grain and scikit-learn are not imported at module level, and the network is never
used.
"""

import functools
import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"
"""Path of the digits in scikit-learn's wheel."""
DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
"""SHA-256 of scikit-learn's digits: data as uint8 bytes, then target as uint8 bytes."""
SPLIT_SEED = 20240229
"""Seed of `DigitsConfig`'s split into training and test set; the experiment's seed does
not change the split."""

Columns = dict[str, Any]
"""Map from the name of a field to a numpy array, in which dim 0 is the sample."""


class Samples(Protocol):
    """A data set whose samples are read one by one, by number."""

    num_threads: int
    """Number of threads that read one batch; with 1 the calling thread reads."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, sample: int, entropy: tuple[int, int]) -> Columns:
        """Reads the fields of one sample, without the batch dim (dim 0 of `Columns`).

        The method may be called from several threads at once.

        Args:
            sample: the sample's number, from 0.
            entropy: the experiment's seed, and the row's number over all steps and
                epochs; the only source of randomness.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Base of all data configs.

    `short_name` names the class in `config.json`, independently of its module. If a
    subclass sets no `short_name`, `config.json` has its module and class name.
    """

    short_name: ClassVar[str] = ""

    global_batch: int = 96
    """Rows per step, over all hosts."""

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ValueError(
                f"data.global_batch={self.global_batch} is not positive. "
                "Set --data.global_batch to 1 or more."
            )

    @property
    def tokens_per_example(self) -> int:
        """Number of tokens per row; 0 for data that is not tokens.

        Throughput is shown in tokens per second, or in rows per second if this is 0.
        """
        return 0

    def count_classes(self) -> int:
        """Returns the number of different labels; 0 for data without labels."""
        return 0

    def check(self) -> None:
        """Checks that the data exists, without reading all of it.

        The base class checks nothing.

        Raises:
            ValueError: the data is missing; the text names the option to change.
        """

    def identity(self) -> str:
        """Returns a name of the data's content; a resumed run needs an equal name.

        Raises:
            ValueError: the data is missing.
            NotImplementedError: the class is the base class.
        """
        raise NotImplementedError(
            f"{type(self).__name__} names no data. Use DigitsConfig or CharsConfig "
            "as the experiment's data."
        )

    def load(self) -> tuple[Columns | Samples, Columns | Samples]:
        """Loads the training set and the test set, not shuffled.

        Returns:
            Each set as columns in memory, or as samples that are read by number.

        Raises:
            ValueError: the data is missing, or does not match its identity.
            NotImplementedError: the class is the base class.
        """
        raise NotImplementedError(f"{type(self).__name__} loads no data.")


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(DataConfig):
    """scikit-learn's digits: 1797 grey images of 8x8; a fixed fifth is the test set."""

    short_name: ClassVar[str] = "digits"

    def count_classes(self) -> int:
        """Returns 10, the number of digits."""
        return 10

    def identity(self) -> str:
        """Returns a name with the hash of the whole set and the seed of the split."""
        return f"digits:sha256={DIGITS_SHA256}:split={SPLIT_SEED}"

    def load(self) -> tuple[Columns, Columns]:
        """Loads float32 images [N, 8, 8, 1] in [0, 1] and int32 labels [N].

        Raises:
            ValueError: the installed scikit-learn has other digits.
        """
        import numpy as np

        pixels = _read_digits().astype(np.uint8)
        data, target = np.ascontiguousarray(pixels[:, :-1]), pixels[:, -1]
        found = hashlib.sha256(data.tobytes() + target.tobytes()).hexdigest()
        if found != DIGITS_SHA256:
            raise ValueError(
                f"scikit-learn's digits have sha256 {found}, but {DIGITS_SHA256} is "
                "expected. Install the scikit-learn version in constraints.txt."
            )
        order = np.random.Generator(np.random.PCG64(SPLIT_SEED)).permutation(len(data))
        columns = {
            "image": (data.reshape(-1, 8, 8, 1) / 16).astype(np.float32)[order],
            "label": target.astype(np.int32)[order],
        }
        cut = len(data) - len(data) // 5
        return _part(columns, 0, cut), _part(columns, cut, len(data))


@dataclass(frozen=True, kw_only=True)
class CharsConfig(DataConfig):
    """Characters of Python's help texts (pydoc_data.topics), as ASCII.

    The text differs between patch releases of Python, so the identity contains a hash
    of the text.
    """

    short_name: ClassVar[str] = "chars"

    context: int = 64
    """Characters per row; the targets are the same text, shifted by one character."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.context <= 4096:
            raise ValueError(
                f"data.context={self.context} is out of range. Allowed: 1 to 4096. "
                "Set --data.context."
            )

    @property
    def tokens_per_example(self) -> int:
        """Number of tokens per row: every character is a token."""
        return self.context

    def identity(self) -> str:
        """Returns a name with the hash of the text and the row length."""
        digest = hashlib.sha256(_topics()).hexdigest()
        return f"pydoc_data.topics:sha256={digest}:context={self.context}"

    def load(self) -> tuple[Columns, Columns]:
        """Cuts the text into int32 rows [N, context + 1]; the last 5 % are for testing.

        Each row starts with the last character of the row before.
        """
        import numpy as np

        text = np.frombuffer(_topics(), np.uint8)
        number = (len(text) - 1) // self.context
        starts = np.arange(number)[:, None] * self.context
        columns = {"tokens": text[starts + np.arange(self.context + 1)].astype("i4")}
        cut = number - number // 20
        return _part(columns, 0, cut), _part(columns, cut, number)


def _read_digits() -> Any:
    """Reads scikit-learn's digits: one row per image, 64 pixels and then the label.

    Reads the file that the package installs. Importing the package takes about a second
    of processor time, which every restart of a trainer would spend.

    Raises:
        ValueError: the installed scikit-learn has no such file.
    """
    from importlib.metadata import distribution

    import numpy as np

    path = distribution("scikit-learn").locate_file(DIGITS_FILE)
    try:
        return np.loadtxt(str(path), delimiter=",")
    except FileNotFoundError:
        raise ValueError(
            f"scikit-learn's digits are not at {path}. Install the scikit-learn "
            "version in constraints.txt."
        ) from None


@functools.cache
def _topics() -> bytes:
    from pydoc_data import topics

    pieces = [f"{name}\n{text}\n" for name, text in sorted(topics.topics.items())]
    return "".join(pieces).encode("ascii", "replace")


def _part(columns: Columns, start: int, stop: int) -> Columns:
    return {name: column[start:stop] for name, column in columns.items()}
