"""Gradients averaged over a mesh axis, and what triggers their reduction.

Decides when the reduction starts: on the host's command, where a device is ready, or
layer by layer inside the backward pass. How one array is reduced is `all_reduce`'s
matter. Must not know models, optimizers or training loops.

| trigger | the reduction starts | who waits, where, when one device is late |
|---|---|---|
| `host` | when the host has seen every device done | hosts, outside of any reduction |
| `device` | on each device once its gradients are there | devices, in the reduction |
| `layer` | on each device once the leaf's gradient is there | the same, at the leaf the late one has not reached |

XLA compiles data flow, not text: in a model whose layers are unrolled, `device` and
`layer` are one program to it, and its combiner decides whether the reductions lie
between backward operations (on CPU they do only with
`XLA_FLAGS=--xla_disable_hlo_passes=cpu-all-reduce-combiner`). Where layers are stacked
in a `lax.scan` the two differ under any flag: see `reduce_in_backward`.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.collectives.all_reduce import Algorithm, all_reduce
from dtft.collectives.hops import AxisName

Trigger = Literal["host", "device", "layer"]
"""What starts the reduction of gradients."""
Loss = Callable[[Any, Any], Any]
"""`loss(params, batch) -> mean`, or `-> (mean, aux)` with means in `aux`."""
ValueAndGradients = tuple[Any, Any]
"""`(value, gradients)`, or `((value, aux), gradients)`."""


def reduced_gradients(
    loss: Loss,
    mesh: Mesh,
    axis_name: str,
    *,
    trigger: Trigger = "device",
    algorithm: Algorithm = "native",
    has_aux: bool = False,
    reduced_by_loss: Collection[str] = (),
) -> Callable[[Any, Any], ValueAndGradients]:
    """`jax.value_and_grad(loss)` over a batch divided over one axis of the mesh.

    Each position of the axis differentiates `loss` on its own rows; the gradients, the
    value and `aux` are then averaged over the axis. The rows are in equal shares, so
    that is the gradient of the mean over all rows if `loss` is a plain mean over rows
    (not one weighted by a count that differs between shares). `loss` runs inside
    `jax.shard_map` with `axis_name` bound and contains no reduction over it.

    All triggers give the same numbers within rounding. `device` and `layer` may be
    called inside `jax.jit`, with the optimizer's update, say; `host` may not, because
    there the host acts between two programs: it is a `HostCommanded`.

    Args:
        loss: scalar mean over the rows it is given; with `has_aux` a pair of that and
            a pytree of floating means.
        mesh: any mesh with the axis; its other axes are left to the partitioner.
        axis_name: the axis the batch is divided over; parameters are replicated on it.
        trigger: what starts the reduction; see the module's table.
        algorithm: how gradients are reduced; value and `aux` always go natively.
        has_aux: whether `loss` returns a pair.
        reduced_by_loss: for `trigger="layer"`, top-level names of `params` that `loss`
            itself passes through `reduce_in_backward`, inside a `lax.scan`, say.

    Returns:
        A function `(params, batch) -> (value, gradients)`, or `((value, aux),
        gradients)`, all replicated over the axis. Every leaf of `batch` has its rows
        in dim 0.

    Raises:
        ValueError: unknown trigger or axis, names in `reduced_by_loss` that have no
            effect; on call: rows that cannot be divided evenly over the axis.

    >>> from jax.sharding import AxisType
    >>> mesh = jax.make_mesh((jax.device_count(),), ("replica",), (AxisType.Auto,))
    >>> def loss(w, x):
    ...     return jnp.mean(w * x)
    >>> function = reduced_gradients(loss, mesh, "replica", trigger="layer")
    >>> value, gradient = function(jnp.float32(2), jnp.arange(8, dtype=jnp.float32))
    >>> print(value, gradient)
    7.0 3.5
    """
    if trigger not in get_args(Trigger):
        raise ValueError(
            f"trigger={trigger!r} is unknown. Allowed: {', '.join(get_args(Trigger))}."
        )
    if axis_name not in mesh.shape:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh. Allowed: "
            f"{', '.join(map(repr, mesh.axis_names))}."
        )
    if reduced_by_loss and trigger != "layer":
        raise ValueError(
            f"reduced_by_loss={tuple(reduced_by_loss)} has no effect with "
            f"trigger={trigger!r}, which reduces every gradient after the backward "
            "pass. Leave it empty, or use trigger='layer'."
        )
    if trigger == "host":
        return HostCommanded(
            loss, mesh, axis_name, algorithm=algorithm, has_aux=has_aux
        )
    reduce = functools.partial(all_reduce, axis_name=axis_name, algorithm=algorithm)

    def after_backward(params: Any, batch: Any) -> ValueAndGradients:
        value, gradients = jax.value_and_grad(loss, has_aux=has_aux)(params, batch)
        return lax.pmean(value, axis_name), jax.tree.map(reduce, gradients)

    def in_backward(params: Any, batch: Any) -> ValueAndGradients:
        def layered(params: Any, batch: Any) -> Any:
            return loss(
                _reduce_all_but(params, reduced_by_loss, axis_name, algorithm), batch
            )

        value, gradients = jax.value_and_grad(layered, has_aux=has_aux)(params, batch)
        return lax.pmean(value, axis_name), gradients

    local = in_backward if trigger == "layer" else after_backward
    return jax.jit(_over_shares(local, mesh, axis_name, PartitionSpec()))


def reduce_in_backward(
    params: Any,
    axis_name: AxisName | None,
    *,
    op: Literal["mean", "sum"] = "mean",
    algorithm: Algorithm = "native",
) -> Any:
    """The parameters unchanged; their gradients are reduced the moment they exist.

    The reduction becomes a part of the backward pass, one for each leaf, between the
    backward operations of the layer that follows and of the one that precedes. Pass
    each layer's parameters through it where they are used. A leaf used twice is to go
    through it once, before both uses, so that its gradient is complete. For stacked
    layers call it inside the body (also under `jax.checkpoint`), or the reduction has
    to wait for the whole backward scan:

        def body(h, layer):
            layer = reduce_in_backward(layer, "replica")
            return apply(layer, h), None

    Leaves are not packed into one message per layer: that would copy every gradient
    once more, and XLA's combiner does it where it pays.

    Args:
        params: pytree of floating arrays, replicated over the axis.
        axis_name: bound axes (inside `jax.shard_map`), or None to reduce nothing.
        op: `mean` where the loss is the mean of the local rows, `sum` where the local
            losses add up to the loss.
        algorithm: see `all_reduce`.
    """
    if axis_name is None:
        return params
    return jax.tree.map(lambda x: _reduced_later(x, axis_name, op, algorithm), params)


class HostCommanded:
    """The reduction of gradients on the host's command: a synchronous step.

    A call does three things, which are public so that a caller can time them or act in
    between: `local_gradients` runs one program and returns at once; `await_command`
    blocks until every device of the mesh has its gradients and the reduction is
    commanded; `reduce` runs the reduction as a second program.

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
        self._mesh = mesh
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

        def local(params: Any, batch: Any) -> ValueAndGradients:
            result = jax.value_and_grad(loss, has_aux=has_aux)(params, batch)
            return jax.tree.map(lambda leaf: leaf[None], result)

        def reduce(rows: ValueAndGradients) -> ValueAndGradients:
            value, gradients = jax.tree.map(lambda leaf: leaf[0], rows)
            reduced = functools.partial(
                all_reduce, axis_name=axis_name, algorithm=algorithm
            )
            return lax.pmean(value, axis_name), jax.tree.map(reduced, gradients)

        by_share = PartitionSpec(axis_name)
        self._local = jax.jit(_over_shares(local, mesh, axis_name, by_share))
        self._reduce = jax.jit(
            jax.shard_map(
                reduce,
                mesh=mesh,
                in_specs=by_share,
                out_specs=PartitionSpec(),
                axis_names={axis_name},
                check_vma=False,
            )
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
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, batch))):
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


def _over_shares(
    local: Callable[[Any, Any], Any], mesh: Mesh, axis_name: str, out: PartitionSpec
) -> Callable[[Any, Any], Any]:
    """`local(params, batch)` on each position of the axis, with its share of rows."""
    # check_vma=True would sum the gradients of replicated parameters by itself.
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(axis_name)),
        out_specs=out,
        axis_names={axis_name},
        check_vma=False,
    )

    def checked(params: Any, batch: Any) -> Any:
        _check_rows(batch, mesh.shape[axis_name], axis_name)
        return mapped(params, batch)

    return checked


def _check_rows(batch: Any, num_shares: int, axis_name: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if jnp.ndim(leaf) and jnp.shape(leaf)[0] % num_shares == 0:
            continue
        raise ValueError(
            f"batch{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}: dim 0 "
            f"cannot be divided evenly over axis {axis_name!r} of size {num_shares}. "
            f"Allowed: a multiple of {num_shares} rows. Change the batch or the mesh."
        )


def _reduce_all_but(
    params: Any, skipped: Collection[str], axis_name: str, algorithm: Algorithm
) -> Any:
    def name_of(path: tuple[Any, ...]) -> str:
        return jax.tree_util.keystr(path[:1], simple=True)

    def wrap(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        if name_of(path) in skipped:
            return leaf
        return reduce_in_backward(leaf, axis_name, algorithm=algorithm)

    names = {name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    if not names.issuperset(skipped):
        raise ValueError(
            f"reduced_by_loss={tuple(skipped)} has names that params does not have at "
            f"its top level. Allowed: {', '.join(map(repr, sorted(names)))}."
        )
    return jax.tree_util.tree_map_with_path(wrap, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _reduced_later(
    x: jax.Array, axis_name: AxisName, op: Literal["mean", "sum"], algorithm: Algorithm
) -> jax.Array:
    # Without the cast, autodiff under check_vma=True would sum over the axis before
    # the rule below sees the gradient, and the mean of sums is wrong by a factor.
    return lax.pcast(x, axis_name, to="varying")


def _forward(
    x: jax.Array, axis_name: AxisName, op: Literal["mean", "sum"], algorithm: Algorithm
) -> tuple[jax.Array, None]:
    return _reduced_later(x, axis_name, op, algorithm), None


def _backward(
    axis_name: AxisName,
    op: Literal["mean", "sum"],
    algorithm: Algorithm,
    _: None,
    gradient: jax.Array,
) -> tuple[jax.Array]:
    return (all_reduce(gradient, axis_name, op=op, algorithm=algorithm),)


_reduced_later.defvjp(_forward, _backward)
