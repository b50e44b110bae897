"""Which rows of a step's batch each replica works on, for any shares.

Pure: the batch is cut into microbatches of equal size, always the same ones, and
replica after replica takes as many of them as its share says. So a step uses the same
rows whatever the shares are, each once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtft.balance import Microbatches
from dtft.config import BalanceConfig

COUNTS = "microbatch_counts"
"""Name of the shares among the arrays of a batch, `[replicas]`."""
DEFAULT_MICROBATCHES = 64
DEFAULT_ROOM = 4
"""Room of a replica, as a multiple of an equal share."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How a global batch is cut, and how much of it one replica can take."""

    num_replicas: int
    num_microbatches: int
    """Of a step, over all replicas."""
    rows_each: int
    """Rows of a microbatch."""
    most: int
    """Microbatches that a replica has room for."""

    @property
    def room(self) -> int:
        """Rows that a replica has room for."""
        return self.most * self.rows_each

    @property
    def work(self) -> Microbatches:
        """What is divided, to `dtft.balance`. Every replica keeps at least one
        microbatch: without one it could not be measured again."""
        return Microbatches(
            num_nodes=self.num_replicas,
            total=self.num_microbatches,
            cap=(self.most,) * self.num_replicas,
        )

    def rows(self, step: int, counts: Sequence[int], replica: int) -> range:
        """The global row indices that a replica works on.

        Args:
            step: steps finished before, so 0 for the first.
            counts: microbatches of each replica.
            replica: position along the replica axis.

        Raises:
            ValueError: the counts are not shares of this batch.

        >>> sharing = Sharing(num_replicas=3, num_microbatches=4, rows_each=2, most=4)
        >>> [sharing.rows(1, (1, 0, 3), replica) for replica in range(3)]
        [range(8, 10), range(10, 10), range(10, 16)]
        """
        self.check(counts)
        first = step * self.num_microbatches + sum(counts[:replica])
        last = first + counts[replica]
        return range(first * self.rows_each, last * self.rows_each)

    def check(self, counts: Sequence[int]) -> None:
        """Refuses counts that are not shares of this batch.

        Raises:
            ValueError: not a count per replica, one outside of 0 to `most`, or they do
                not add up to the batch.
        """
        fits = len(counts) == self.num_replicas and all(
            0 <= count <= self.most for count in counts
        )
        if not fits or sum(counts) != self.num_microbatches:
            raise ValueError(
                f"counts={list(counts)} do not share {self.num_microbatches} "
                f"microbatches between {self.num_replicas} replicas: each takes 0 to "
                f"{self.most}, together all of them. Raise --balance.most if one "
                "should take more."
            )


def sharing_of(
    config: BalanceConfig, global_batch: int, mesh: Mapping[str, int]
) -> Sharing:
    """How an experiment's batch is shared on a mesh.

    Args:
        config: of the experiment.
        global_batch: rows of a step.
        mesh: sizes of all axes, none open.

    Raises:
        ValueError: says what does not fit and what to change.

    >>> sharing_of(BalanceConfig(), 96, {"replica": 3})
    Sharing(num_replicas=3, num_microbatches=48, rows_each=2, most=48)
    """
    _check_axes(mesh)
    replicas = mesh["replica"]
    total = config.microbatches or _largest_divisor(global_batch, DEFAULT_MICROBATCHES)
    if global_batch % total:
        raise ValueError(
            f"balance.microbatches={total} does not divide data.global_batch="
            f"{global_batch}. Set --balance.microbatches to a divisor of it, such as "
            f"{_largest_divisor(global_batch, total)}, or change --data.global_batch."
        )
    if total < replicas:
        raise ValueError(
            f"balance.microbatches={total} are fewer than the {replicas} replicas, "
            "each of which takes at least one. Set --balance.microbatches to a larger "
            f"divisor of data.global_batch={global_batch}, or raise that."
        )
    equal = -(-total // replicas)
    most = min(config.most or DEFAULT_ROOM * equal, total)
    if most < equal:
        raise ValueError(
            f"balance.most={most}: {replicas} replicas with room for so many cannot "
            f"take {total} microbatches. Set --balance.most {equal} or more."
        )
    return Sharing(
        num_replicas=replicas,
        num_microbatches=total,
        rows_each=global_batch // total,
        most=most,
    )


def _check_axes(mesh: Mapping[str, int]) -> None:
    """Refuses axes over which replicas would meet within a share.

    Replicas with fewer microbatches end their loop earlier: nothing in it may wait for
    another replica, and rows must be divided over replicas only.
    """
    others = {
        axis: size
        for axis, size in mesh.items()
        if axis not in ("replica", "tensor") and size > 1
    }
    if others:
        text = ", ".join(f"mesh.{axis}={size}" for axis, size in others.items())
        raise ValueError(
            f"{text} does not go together with uneven shares (balance.policy): only "
            "replicas that hold the whole model, divided over `tensor` at most, can "
            "work on unlike numbers of microbatches. Set these sizes to 1, or "
            "--balance off."
        )


def _largest_divisor(number: int, limit: int) -> int:
    return max(it for it in range(1, min(number, limit) + 1) if number % it == 0)
