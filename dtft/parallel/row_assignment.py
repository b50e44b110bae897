"""Assigns the rows of a step's batch to replicas with equal or uneven shares.

The batch is cut into microbatches of equal size, which do not depend on the shares. The
replicas take consecutive microbatches in order, each as many as its share. So a step
uses each row once for any shares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtft.balance import Microbatches
from dtft.config import BalanceConfig

COUNTS = "microbatch_counts"
"""Name of the batch array that has the number of microbatches of each replica."""
DEFAULT_MICROBATCHES = 64
DEFAULT_ROOM = 4
"""Default for the largest number of microbatches of a replica, as a multiple of an
equal share. Each replica has input buffers of this size."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The division of a global batch into microbatches, which replicas share.

    A share is the number of microbatches that a replica takes in a step. `rows_each` is
    the number of rows of a microbatch, and `most` is the largest share of a replica.
    """

    num_replicas: int
    num_microbatches: int
    """Number of microbatches in a step, over all replicas."""
    rows_each: int
    """Number of rows of a microbatch."""
    most: int
    """Largest number of microbatches that a replica can take."""

    @property
    def room(self) -> int:
        """The largest number of rows that a replica can take."""
        return self.most * self.rows_each

    @property
    def work(self) -> Microbatches:
        """The microbatches of a step, as `dtft.balance` divides them between replicas.

        Every replica gets at least one microbatch, because a replica without
        microbatches could not be measured again.
        """
        return Microbatches(
            num_nodes=self.num_replicas,
            total=self.num_microbatches,
            cap=(self.most,) * self.num_replicas,
        )

    def rows(self, step: int, counts: Sequence[int], replica: int) -> range:
        """Returns the global row indices that a replica works on.

        Args:
            step: number of finished steps; 0 for the first step.
            counts: number of microbatches of each replica.
            replica: position of the replica along the replica axis.

        Raises:
            ValueError: the counts are not shares of this batch.

        In the example a step has 8 rows, so the rows of step 1 begin with row 8:

        >>> sharing = Sharing(num_replicas=3, num_microbatches=4, rows_each=2, most=4)
        >>> [sharing.rows(1, (1, 0, 3), replica) for replica in range(3)]
        [range(8, 10), range(10, 10), range(10, 16)]
        """
        self.check(counts)
        first = step * self.num_microbatches + sum(counts[:replica])
        last = first + counts[replica]
        return range(first * self.rows_each, last * self.rows_each)

    def check(self, counts: Sequence[int]) -> None:
        """Checks that counts of microbatches are shares of this batch.

        Raises:
            ValueError: the number of counts is not the number of replicas, a count is
                not in 0 to `most`, or the sum is not `num_microbatches`.
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
    """Divides a batch into microbatches for the replicas of a mesh.

    Args:
        config: the experiment's config of load balancing.
        global_batch: number of rows in a step.
        mesh: map from axis to size, without the size -1.

    Raises:
        ValueError: the batch or the mesh does not fit; the message says what to change.

    By default the number of microbatches is the largest divisor of `global_batch` up to
    64. `most` is four times an equal share, but at most the number of all microbatches.

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
    """Checks that only the axes `replica` and `tensor` have sizes above 1.

    Replicas with fewer microbatches end their loop earlier. So the loop must not have
    collectives between replicas, and only the axis `replica` may divide rows.

    Raises:
        ValueError: another axis has a size above 1.
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
