"""Reduces gradients in a separate program, started on the host's command."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.collectives.all_reduce import Algorithm, all_reduce
from dtft.collectives.shares import Loss, ValueAndGradients, over_shares


class HostCommanded:
    """A function from (params, batch) to (value, gradients) that runs two programs.

    The first program computes the local value and gradients of each position of the
    axis, the second averages them. The host starts the second program after all devices
    have finished the first.

    A call has three steps, which are public so that a caller can time each step or act
    between two steps. `local_gradients` starts the first program. `await_command`
    blocks until every device of the mesh has its gradients and the reduction is
    commanded. `reduce` runs the reduction as the second program.

    In a job of several processes each host sees only its own devices, so the command
    takes two messages, each a sum of one int32 per device over the whole mesh:

    1. report: each host waits for its own devices, then contributes 1 for each of its
       devices. The completed sum tells the commanding host (the host of the mesh's
       first device) that every device of every process is done.
    2. command: the commanding host enters the second sum only after the first, and
       contributes the first sum. The other hosts contribute 0, and start the reduction
       after the result of the second sum has arrived.

    The messages are programs on the training devices, so XLA's deadlines of collectives
    apply, and a mesh re-formed after a failure needs no other channel. A job of one
    process sends no messages.
    """

    def __init__(
        self,
        loss: Loss,
        mesh: Mesh,
        axis_name: str,
        *,
        algorithm: Algorithm = "native",
        has_aux: bool = False,
    ) -> None:
        """Builds the two programs, which are compiled at the first call.

        Args:
            loss: scalar mean over its rows; with `has_aux` a pair of the mean and a
                pytree of floating means.
            mesh: any mesh with the axis.
            axis_name: the axis that divides the batch; parameters are replicated over
                it.
            algorithm: algorithm of `all_reduce` for gradients.
            has_aux: whether `loss` returns a pair.
        """
        self._local, self._reduce = _programs(loss, mesh, axis_name, algorithm, has_aux)
        own = jax.process_index()
        self._alone = all(d.process_index == own for d in mesh.devices.flat)
        self._commands = mesh.devices.flat[0].process_index == own
        each_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._flags = functools.partial(
            jax.make_array_from_callback, (mesh.size,), each_device
        )
        self._sum = jax.jit(
            functools.partial(jnp.sum, dtype=jnp.int32),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )

    def __call__(self, params: Any, batch: Any) -> ValueAndGradients:
        """Computes value and gradients, averaged over the axis.

        Blocks until all devices have their local gradients, but not for the reduction:
        the result may not be ready.

        Raises:
            ValueError: the call is inside `jax.jit`, or the rows of `batch` cannot be
                divided evenly.
        """
        rows = self.local_gradients(params, batch)
        self.await_command(rows)
        return self.reduce(rows)

    def local_gradients(self, params: Any, batch: Any) -> ValueAndGradients:
        """Starts the program that computes each position's own value and gradients.

        Returns:
            The same tree as `__call__` returns, but not averaged: each leaf has a
            leading replica dim, whose row i was computed from the rows of position i of
            the axis and is on the devices of this position. The arrays may not be
            ready.

        Raises:
            ValueError: the call is inside `jax.jit`, or the rows of `batch` cannot be
                divided evenly.
        """
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((params, batch))):
            raise ValueError(
                "trigger='host' was called inside jax.jit, where no host can wait for "
                "devices. Call it outside, or use trigger='device' or 'layer'."
            )
        return self._local(params, batch)

    def await_command(self, rows: ValueAndGradients) -> None:
        """Blocks until `rows` is ready on every device of the mesh.

        If the mesh has devices of several processes, also waits for the command of the
        commanding host.

        Args:
            rows: the result of `local_gradients`.
        """
        jax.block_until_ready(rows)  # only this host's devices can be observed
        if self._alone:
            return
        seen = self._exchange(1)
        self._exchange(seen if self._commands else 0)

    def reduce(self, rows: ValueAndGradients) -> ValueAndGradients:
        """Starts the program that averages values and gradients over the axis.

        `rows` is the result of `local_gradients`. The result has no replica dim, and
        may not be ready.
        """
        return self._reduce(rows)

    def _exchange(self, value: int) -> int:
        """Sums one number per device of the mesh; returns the sum on every host.

        Each host contributes its `value` once for each of its devices.
        """
        flags = self._flags(lambda _: np.full((1,), value, np.int32))
        return int(self._sum(flags).addressable_data(0))


def _programs(
    loss: Loss, mesh: Mesh, axis_name: str, algorithm: Algorithm, has_aux: bool
) -> tuple[Callable[..., ValueAndGradients], Callable[..., ValueAndGradients]]:
    """Makes the two jitted programs of `HostCommanded`.

    The first maps (params, batch) to the local value and gradients of each position of
    the axis, with a leading replica dim. The second averages these over the replica
    dim.
    """
    by_share = PartitionSpec(axis_name)

    def local(params: Any, batch: Any) -> ValueAndGradients:
        result = jax.value_and_grad(loss, has_aux=has_aux)(params, batch)
        return jax.tree.map(lambda leaf: leaf[None], result)

    def reduce(rows: ValueAndGradients) -> ValueAndGradients:
        value, gradients = jax.tree.map(lambda leaf: leaf[0], rows)
        gradients = all_reduce(gradients, axis_name, op="mean", algorithm=algorithm)
        return lax.pmean(value, axis_name), gradients

    reduce_rows = jax.shard_map(
        reduce,
        mesh=mesh,
        in_specs=by_share,
        out_specs=PartitionSpec(),
        axis_names={axis_name},
        check_vma=False,
    )
    return jax.jit(over_shares(local, mesh, axis_name, by_share)), jax.jit(reduce_rows)
