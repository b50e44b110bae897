"""Averages gradients over a mesh axis, with a choice of what triggers the reduction.

* `host`: the reduction starts after the host has seen that every device is done. So no
  device waits for a late device inside the reduction.
* `device`: the reduction starts on each device after its gradients are computed. The
  other devices wait for a late device inside the reduction.
* `layer`: the reduction of each leaf starts on each device after the leaf's gradient is
  computed. The other devices wait at the first leaf that the late device has not
  reached; the leaves before are already reduced.

XLA compiles the data flow: if a model's layers are unrolled, `device` and `layer` are
the same program to XLA. XLA's all-reduce combiner then decides whether reductions run
between backward operations or after all of them (between them on CPU only with
`XLA_FLAGS=--xla_disable_hlo_passes=cpu-all-reduce-combiner`). If layers are stacked in
a `lax.scan`, the two programs differ under any flag: see `reduce_in_backward`.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, Literal, get_args

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dtft.collectives.all_reduce import Algorithm, all_reduce, check_algorithm
from dtft.collectives.hops import AxisName, axis_size
from dtft.collectives.host_command import HostCommanded
from dtft.collectives.shares import Loss, ValueAndGradients, over_shares

Trigger = Literal["host", "device", "layer"]
"""What starts the reduction of gradients: a command of the host (`host`), the end of
the computation of all gradients on a device (`device`), or of a leaf's gradient on a
device (`layer`). See the module docstring."""


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
    """Makes a `jax.value_and_grad(loss)` for a batch divided over a mesh axis.

    Each position of the axis differentiates `loss` on its own rows; the gradients, the
    value and `aux` are then averaged over the axis. All positions have equally many
    rows, so the average is the gradient of the mean over all rows if `loss` is a plain
    mean over rows (not weighted by a count that differs between positions). `loss` runs
    inside `jax.shard_map` with `axis_name` bound and must not reduce over this axis.

    All triggers give the same numbers within rounding (measured: bit for bit among the
    CPU devices of one process, not over gloo). `device` and `layer` may be called
    inside `jax.jit`, for example with the optimizer's update. With `host` the returned
    function is a `HostCommanded`, which may not be called inside `jax.jit`, because the
    host acts between its two programs.

    Args:
        loss: scalar mean over its rows; with `has_aux` a pair of the mean and a pytree
            of floating means.
        mesh: any mesh with the axis; its other axes are left to the partitioner.
        axis_name: the axis that divides the batch; parameters are replicated over it.
        trigger: what starts the reduction; see the module docstring.
        algorithm: algorithm of `all_reduce` for gradients; value and `aux` use `pmean`.
        has_aux: whether `loss` returns a pair.
        reduced_by_loss: for `trigger="layer"`, top-level names of `params` that `loss`
            itself passes through `reduce_in_backward`, for example inside a `lax.scan`.
            This is not checked: if `loss` does not reduce a name, the result is this
            device's own gradient, typed as if it were the mean.

    Returns:
        A function `(params, batch) -> (value, gradients)`, or `((value, aux),
        gradients)`, all replicated over the axis. Every leaf of `batch` has its rows
        in dim 0.

    Raises:
        ValueError: trigger, algorithm or axis is unknown, or `reduced_by_loss` is a
            string or is given for another trigger than "layer". On call: a name in
            `reduced_by_loss` is not in `params`, the rows cannot be divided evenly over
            the axis, or the trigger is "host" and the call is inside `jax.jit`.

    >>> import jax.numpy as jnp
    >>> from jax.sharding import AxisType
    >>> mesh = jax.make_mesh((jax.device_count(),), ("replica",), (AxisType.Auto,))
    >>> def loss(w, x):
    ...     return jnp.mean(w * x)
    >>> function = reduced_gradients(loss, mesh, "replica", trigger="layer")
    >>> value, gradient = function(jnp.float32(2), jnp.arange(8, dtype=jnp.float32))
    >>> print(value, gradient)
    7.0 3.5
    """
    _check(mesh, axis_name, trigger, algorithm, reduced_by_loss)
    if trigger == "host":
        return HostCommanded(
            loss, mesh, axis_name, algorithm=algorithm, has_aux=has_aux
        )

    def used(params: Any, batch: Any) -> Any:
        if trigger == "layer":
            params = _reduce_all_but(params, reduced_by_loss, axis_name, algorithm)
        return loss(params, batch)

    def local(params: Any, batch: Any) -> ValueAndGradients:
        value, gradients = jax.value_and_grad(used, has_aux=has_aux)(params, batch)
        if trigger == "device":
            gradients = all_reduce(gradients, axis_name, op="mean", algorithm=algorithm)
        return lax.pmean(value, axis_name), gradients

    return jax.jit(over_shares(local, mesh, axis_name, PartitionSpec()))


def reduce_in_backward(
    params: Any,
    axis_name: AxisName | None,
    *,
    op: Literal["mean", "sum"] = "mean",
    algorithm: Algorithm = "native",
) -> Any:
    """Returns the parameters unchanged; reduces their gradients in the backward pass.

    The backward pass gets one reduction for each leaf, as soon as the leaf's gradient
    is computed and before the backward operations of earlier layers. Apply the function
    to each layer's parameters where they are used. If a leaf is used twice, apply the
    function once, before both uses, so that the gradient is complete. For stacked
    layers, apply the function inside the body of the scan (also under
    `jax.checkpoint`); outside, the reduction would wait for the whole backward scan:

        def body(h, layer):
            layer = reduce_in_backward(layer, "replica")
            return apply(layer, h), None

    Leaves are not packed into one message per layer, because packing would copy every
    gradient once more, and XLA's combiner merges reductions where merging pays.

    Args:
        params: pytree of floating arrays, replicated over the axis.
        axis_name: bound axes (inside `jax.shard_map`), or None to reduce nothing.
        op: `mean` if the loss is the mean of the local losses, `sum` if the loss is
            their sum.
        algorithm: algorithm of `all_reduce`, such as "ring".

    Raises:
        ValueError: an unknown op or algorithm, or an axis that is not bound.
    """
    check_algorithm(algorithm)
    if op not in ("mean", "sum"):
        raise ValueError(f"op={op!r} is unknown here. Allowed: 'mean', 'sum'.")
    if axis_name is None:
        return params
    axis_size(axis_name)  # refuses an axis that is not bound
    return jax.tree.map(lambda x: _reduced_later(x, axis_name, op, algorithm), params)


def _check(
    mesh: Mesh,
    axis_name: str,
    trigger: Trigger,
    algorithm: Algorithm,
    reduced_by_loss: Collection[str],
) -> None:
    if trigger not in get_args(Trigger):
        raise ValueError(
            f"trigger={trigger!r} is unknown. Allowed: {', '.join(get_args(Trigger))}."
        )
    check_algorithm(algorithm)
    if axis_name not in mesh.shape:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh. Allowed: "
            f"{', '.join(map(repr, mesh.axis_names))}."
        )
    if isinstance(reduced_by_loss, str):
        raise ValueError(
            f"reduced_by_loss={reduced_by_loss!r} is a string, whose letters would be "
            f"the names. Give a collection, ({reduced_by_loss!r},)."
        )
    if reduced_by_loss and trigger != "layer":
        raise ValueError(
            f"reduced_by_loss={tuple(reduced_by_loss)} has no effect with "
            f"trigger={trigger!r}, which reduces every gradient after the backward "
            "pass. Leave it empty, or use trigger='layer'."
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
