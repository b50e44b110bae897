"""The reduction of gradients as a program of its own, started on the host's command.

Decides when the host may command it. Must not know how a reduction is done, nor what
happens to the gradients afterwards.
"""

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
    """The reduction of gradients on the host's command: a synchronous step.

    A call does three things, which are public so that a caller can time them or act in
    between: `local_gradients` starts one program; `await_command` blocks until every
    device of the mesh has its gradients and the reduction is commanded; `reduce` runs
    the reduction as a second program.

    In a job of several processes each host sees only its own devices, so the command
    takes two messages, each a sum of one int32 per device over the whole mesh:

    1. report: each host, having waited for its own devices, sends 1 for each of them.
       When the sum is there, the commanding host (the one of the mesh's first device)
       has seen that every device of every process is done.
    2. command: only then does the commanding host enter the second sum, with what it
       has seen; the others enter it at once, with 0, and start the reduction when they
       have read its result.

    The messages are programs on the same devices as the training, so the deadlines of
    collectives (XLA's flags) hold for them, and a mesh that was formed anew after a
    loss needs nothing else. With one process there is nothing to send.
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
        """See `reduced_gradients`."""
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
        """Value and gradients, reduced; returns once the reduction is dispatched."""
        rows = self.local_gradients(params, batch)
        self.await_command(rows)
        return self.reduce(rows)

    def local_gradients(self, params: Any, batch: Any) -> ValueAndGradients:
        """Each position's own value and gradients, not waited for.

        Returns:
            As `__call__`, each leaf with a leading replica dim: row i is of position i
            of the axis and lies on its devices.

        Raises:
            ValueError: called inside `jax.jit`, or rows that cannot be divided evenly.
        """
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((params, batch))):
            raise ValueError(
                "trigger='host' was called inside jax.jit, where no host can wait for "
                "devices. Call it outside, or use trigger='device' or 'layer'."
            )
        return self._local(params, batch)

    def await_command(self, rows: ValueAndGradients) -> None:
        """Blocks until every device is done and the reduction is commanded."""
        jax.block_until_ready(rows)  # this host's devices; the others' cannot be seen
        if self._alone:
            return
        seen = self._exchange(1)
        self._exchange(seen if self._commands else 0)

    def reduce(self, rows: ValueAndGradients) -> ValueAndGradients:
        """Averages what `local_gradients` returned over the axis."""
        return self._reduce(rows)

    def _exchange(self, value: int) -> int:
        """The sum over all devices of the mesh of the values their hosts give."""
        flags = self._flags(lambda _: np.full((1,), value, np.int32))
        return int(self._sum(flags).addressable_data(0))


def _programs(
    loss: Loss, mesh: Mesh, axis_name: str, algorithm: Algorithm, has_aux: bool
) -> tuple[Callable[..., ValueAndGradients], Callable[..., ValueAndGradients]]:
    """Local gradients as rows, and the reduction of rows."""
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
