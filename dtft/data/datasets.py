"""Data configs: which data set, cut how, and how many rows make a batch.

Decides the data's identity, which must be equal when a run is resumed. JAX, grain and
scikit-learn are not imported at module level, and the network is never used.
"""

import functools
import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
"""Of scikit-learn's digits: data as uint8 bytes, then target as uint8 bytes."""
SPLIT_SEED = 20240229
"""Decides which digits are for testing; never the experiment's seed."""

Columns = dict[str, Any]
"""Field name to numpy array; dim 0 is the sample."""


class Samples(Protocol):
    """Samples by number, each read when it is asked for."""

    num_threads: int
    """Threads that read one batch; 1 reads where the batch is asked for."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, sample: int, entropy: tuple[int, int]) -> Columns:
        """The fields of one sample, without dim 0. Called from several threads.

        Args:
            sample: its number.
            entropy: seed and global row of this use, which decide all that is random.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Base of all data configs.

    `short_name` is the name of a class in `config.json`, wherever its module is; a
    subclass without one of its own is named by its module and name.
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
        """Tokens a row counts for in the throughput; 0 counts rows."""
        return 0

    def count_classes(self) -> int:
        """Number of different labels; 0 for data without labels."""
        return 0

    def check(self) -> None:
        """Checks, without reading all of it, that the data is there.

        Raises:
            ValueError: it is not; says what to change.
        """

    def identity(self) -> str:
        """Names the data's content; equal identities mean equal rows.

        Raises:
            NotImplementedError: on the base class, which is no data.
        """
        raise NotImplementedError(
            f"{type(self).__name__} names no data. Use DigitsConfig or CharsConfig "
            "as the experiment's data."
        )

    def load(self) -> tuple[Columns | Samples, Columns | Samples]:
        """The train and the test set, in memory or by number; not shuffled.

        Raises:
            ValueError: the data's content is not what its identity says.
            NotImplementedError: on the base class, which is no data.
        """
        raise NotImplementedError(f"{type(self).__name__} loads no data.")


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(DataConfig):
    """scikit-learn's digits: 1797 grey images of 8x8; a fixed fifth is for testing."""

    short_name: ClassVar[str] = "digits"

    def count_classes(self) -> int:
        """The ten digits."""
        return 10

    def identity(self) -> str:
        """The hash of the whole set and the split."""
        return f"digits:sha256={DIGITS_SHA256}:split={SPLIT_SEED}"

    def load(self) -> tuple[Columns, Columns]:
        """Images in [0, 1] as [N, 8, 8, 1] and labels.

        Raises:
            ValueError: the scikit-learn here has other digits.
        """
        import numpy as np
        from sklearn.datasets import load_digits

        digits: Any = load_digits()
        data, target = digits.data.astype(np.uint8), digits.target.astype(np.uint8)
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
    """Characters of Python's own help texts (pydoc_data.topics), as ASCII.

    The text differs between Python's patch releases, so its hash is its identity.
    """

    short_name: ClassVar[str] = "chars"

    context: int = 64
    """Characters per row; the target is one further."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.context <= 4096:
            raise ValueError(
                f"data.context={self.context} is out of range. Allowed: 1 to 4096. "
                "Set --data.context."
            )

    @property
    def tokens_per_example(self) -> int:
        """Every character is a token."""
        return self.context

    def identity(self) -> str:
        """The hash of the text and the row length."""
        digest = hashlib.sha256(_topics()).hexdigest()
        return f"pydoc_data.topics:sha256={digest}:context={self.context}"

    def load(self) -> tuple[Columns, Columns]:
        """Windows [N, context + 1] side by side; the last twentieth is for testing."""
        import numpy as np

        text = np.frombuffer(_topics(), np.uint8)
        number = (len(text) - 1) // self.context
        starts = np.arange(number)[:, None] * self.context
        columns = {"tokens": text[starts + np.arange(self.context + 1)].astype("i4")}
        cut = number - number // 20
        return _part(columns, 0, cut), _part(columns, cut, number)


@functools.cache
def _topics() -> bytes:
    from pydoc_data import topics

    pieces = [f"{name}\n{text}\n" for name, text in sorted(topics.topics.items())]
    return "".join(pieces).encode("ascii", "replace")


def _part(columns: Columns, start: int, stop: int) -> Columns:
    return {name: column[start:stop] for name, column in columns.items()}
