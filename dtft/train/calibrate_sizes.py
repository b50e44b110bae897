"""Which sizes of what `calibrate` measures, by platform.

Values only; must not know how anything is measured.
"""

from dataclasses import dataclass, replace
from typing import get_args

from dtft.planner.cluster import CollectiveKind
from dtft.train.measuring import Pace

_LONG = Pace(budget_s=0.08, repeats=3)
"""Of memory that processes on the same cores use: many time slices of each."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured on a platform."""

    dtypes: tuple[str, ...]
    """Of matmuls; the first decides the efficiency."""
    rows: tuple[int, ...]
    dims: tuple[tuple[int, int], ...]
    """(n, k) of matmuls."""
    streams: tuple[int, ...]
    """Bytes read and written."""
    convolutions: tuple[tuple[int, int, int], ...]
    """Rows, side and channels of convolutions."""
    images: tuple[int, int, int] | None
    """Rows and side of images of three colours, and channels that the first convolution
    makes of them; windows are of as many channels. None: neither is slow there."""
    elements: int
    """Side of a square array, small enough to stay at hand."""
    strided: int | None
    """Side of a square array as large as a weight; None: the compiler lays arrays out
    in the order in which they are read."""
    kinds: tuple[CollectiveKind, ...]
    """Of collectives; the others are priced by the curve of all."""
    collectives: tuple[int, ...]
    """Bytes."""
    meeting: tuple[int, ...]
    """Bytes of all-reduces behind computing, in jobs of several processes."""
    ahead: tuple[int, ...]
    """Bytes of parameters gathered ahead of the layers that need them, there."""
    overlap: tuple[int, tuple[int, ...]] | None
    """Side of a matmul, and bytes of the all-reduces beside it; None: nothing overlaps,
    a device computes and communicates in one thread."""
    pace: Pace = Pace()
    shared: Pace = Pace()
    """Of memory, which devices share."""
    behind: int = 0
    """Collectives behind each other and behind computing, as which those that most
    steps have are timed in jobs of processes that share cores; 0: alone."""

    def among(self, num_processes: int) -> "Sizes":
        """What a job of several processes measures.

        Where they share cores compiling a collective takes longer than many of them, so
        fewer are measured (every third size); and it takes a millisecond while all go
        together, as just behind a start, but several when they do not, as in a step:
        most are measured behind computing (`behind`).

        >>> [len(sizes.among(4).collectives) for sizes in (CPU, ACCELERATOR)]
        [3, 8]
        """
        pace, shared = (one.among(num_processes) for one in (self.pace, self.shared))
        if num_processes == 1 or not self.behind:
            return replace(self, pace=pace, shared=shared)
        some = self.collectives[::3]
        return replace(self, collectives=some, pace=pace, shared=_LONG)


def _powers(first: int, last: int, num: int) -> tuple[int, ...]:
    """Sizes evenly spaced as logarithms, multiples of 1024."""
    ratio = (last / first) ** (1 / (num - 1))
    return tuple(round(first * ratio**n / 1024) * 1024 for n in range(num))


CPU = Sizes(
    dtypes=("float32",),
    rows=(8, 32, 128, 512),
    dims=((64, 64), (256, 256), (128, 512), (512, 512), (1024, 256)),
    streams=_powers(2**18, 2**27, 7),
    convolutions=((8, 16, 8), (8, 8, 32), (4, 8, 128)),
    images=(8, 16, 32),
    elements=128,
    strided=512,
    kinds=("all_reduce", "all_gather", "all_to_all", "permute"),  # XLA:CPU has no more
    collectives=_powers(2**12, 2**23, 8),
    meeting=(2**16,),
    ahead=(2**16, 2**21),
    overlap=None,
    behind=4,
)
ACCELERATOR = Sizes(
    dtypes=("bfloat16", "float32"),
    rows=(128, 512, 2048, 8192),
    dims=((512, 512), (1024, 4096), (2048, 2048), (4096, 4096), (8192, 4096)),
    streams=_powers(2**22, 2**30, 5),
    convolutions=((64, 32, 32), (64, 32, 128), (64, 16, 512)),
    images=None,
    elements=2048,
    strided=None,
    kinds=get_args(CollectiveKind),
    collectives=_powers(2**14, 2**28, 8),
    meeting=(),
    ahead=(),
    overlap=(4096, (2**20, 2**24, 2**26)),
)
