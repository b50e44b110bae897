"""Checks the arguments of `dtft.plan` before tracing; errors name argument and path.

Finds the entry point that the arguments belong to. Defines the allowed values of a
state, a batch and the result of a step. Reads logical names of dims from parameters.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from dtft.checkpoint.state import to_paths
from dtft.planner.plan import Plan

Step = Callable[[Any, Any], tuple[Any, Any]]
"""`(state, batch) -> (state, anything)`."""

ENTRIES: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "state", "batch"),
    "loss": ("loss", "optimizer", "params", "batch"),
}
"""Map from an entry point to the names of its arguments."""

_BOTH = "Allowed: step=, state=, batch=; or loss=, optimizer=, params=, batch=."


def entry_of(given: Mapping[str, Any]) -> str:
    """Returns "step" or "loss", whichever the arguments of `dtft.plan` are for.

    Checks each argument.

    Args:
        given: the arguments that are not None, by name.

    Raises:
        ValueError: the names are neither `step`, `state`, `batch` nor `loss`,
            `optimizer`, `params`, `batch`; a step or loss cannot be called, the
            optimizer is no optax transformation, a tree has no leaves or a leaf that is
            no array, a parameter has no gradient, or an array of the batch has no rows.
    """
    for entry, names in ENTRIES.items():
        if given.keys() == set(names):
            _check(given)
            return entry
    raise ValueError(
        f"plan({', '.join(f'{name}=' for name in given)}) is neither of the two that "
        f"can be asked{_lacks(given)}. {_BOTH}"
    )


def _lacks(given: Mapping[str, Any]) -> str:
    """Returns text for an error: which arguments are missing or must be left out.

    `given` has the arguments of `dtft.plan` that are not None. Returns "" if `step` and
    `loss` are both given, or neither of them is.
    """
    meant = [names for entry, names in ENTRIES.items() if entry in given]
    if len(meant) != 1:
        return ""
    missing = [f"{name}=" for name in meant[0] if name not in given]
    more = [f"{name}=" for name in given if name not in meant[0]]
    text = f": {', '.join(missing)} missing" if missing else ""
    return text + (f": {', '.join(more)} too much" if more else "")


def _check(given: Mapping[str, Any]) -> None:
    if "step" in given:
        check_function("step", given["step"])
    else:
        check_function("loss", given["loss"])
        check_optimizer(given["optimizer"])
    for name in ("state", "params", "batch"):
        if name in given:
            check_arrays(name, given[name])
    if "params" in given:
        _check_gradients(given["params"])
    _check_rows(given["batch"])


def check_function(name: str, value: Any) -> None:
    """Checks that a step or loss can be called.

    Raises:
        ValueError: the value cannot be called; the message has `name`, the name of the
            argument (`step` or `loss`).
    """
    if not callable(value):
        first = "params" if name == "loss" else "state"
        raise ValueError(
            f"{name}={value!r:.80} cannot be called. Allowed: a function "
            f"{name}({first}, batch)."
        )


def check_optimizer(value: Any) -> None:
    """Checks that the optimizer is an optax transformation.

    Raises:
        ValueError: the value has another type, such as an optimizer of Flax.
    """
    if not isinstance(value, optax.GradientTransformation):
        hint = ""
        if hasattr(value, "gradient_transformation"):  # optax.MultiSteps
            hint = " Give its .gradient_transformation()."
        raise ValueError(
            f"optimizer={value!r:.80} is no optax transformation. Allowed: such as "
            f"optax.adamw(1e-3), called, and not wrapped for Flax (its tx).{hint}"
        )


def check_plan(value: Any, name: str = "plan") -> None:
    """Checks that a value is a Plan, not the text or path of a plan.

    `name` is the name of the argument, for the error message.

    Raises:
        ValueError: the value is no Plan; the message says how to read a plan.
    """
    if not isinstance(value, Plan):
        raise ValueError(
            f"{name}={value!r:.80} is no plan. Allowed: what dtft.plan(...) "
            "returned, or dtft.Plan.from_json(text) of a file of `dtft plan --json`."
        )


def check_arrays(name: str, value: Any) -> None:
    """Checks that a tree has leaves, all of which are arrays, numbers or shapes.

    `name` is the name of the argument, for the error message.

    Raises:
        ValueError: the tree has no leaves, or a leaf of another type; the message names
            the path of the first such leaf.
    """
    leaves = to_paths(value)
    if not leaves:
        raise ValueError(
            f"{name}={value!r} has no arrays. Allowed: a tree of arrays or "
            "jax.ShapeDtypeStruct."
        )
    for path, leaf in leaves.items():
        if not _is_array(leaf):
            raise ValueError(
                f"{_named(name, path)} is {leaf!r:.80}, a {type(leaf).__name__}. "
                "Allowed: arrays, numbers and jax.ShapeDtypeStruct, in dicts, lists, "
                "tuples or registered dataclasses. Leave it out, or close over it."
            )


def check_like(name: str, value: Any, planned: Any) -> None:
    """Checks that arrays have the tree, shapes, dtypes and order that were planned.

    Args:
        name: name of the argument, for errors.
        value: a tree of arrays.
        planned: the planned tree, of arrays or ShapeDtypeStructs.

    Raises:
        ValueError: a leaf is missing, unexpected, or of another shape or dtype; the
            message names its path and both values. Or only the order of leaves differs;
            the message has both orders.
    """
    wanted, given = to_paths(planned), to_paths(value)
    if found := _difference(wanted, given):
        path, before, after = found
        raise ValueError(
            f"{_named(name, path)} is {after}, planned was {before}. Allowed: the "
            "tree, shapes (rows too) and dtypes that were planned. Change it, or plan "
            "it again."
        )
    if list(given) != list(wanted):
        raise ValueError(
            f"{name} has its arrays in the order {', '.join(given)}, planned was "
            f"{', '.join(wanted)}. Allowed: the tree that was planned."
        )


def _difference(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[str, str, str] | None:
    """Returns the first path whose leaves differ, and the leaves' dtypes and shapes.

    The dtype and shape of a leaf are text, first of the leaf in `before`, then of the
    leaf in `after`. A leaf that one tree lacks has the text `nothing`. Returns None if
    all leaves agree.

    Args:
        before: map from a path to the leaf of the expected tree.
        after: map from a path to the leaf of the tree that is checked.
    """
    for path in {**before, **after}:
        old, new = (
            _form(part[path]) if path in part else "nothing" for part in (before, after)
        )
        if old != new:
            return path, old, new
    return None


def _form(leaf: Any) -> str:
    """Returns the dtype and shape of a leaf as text, such as `float32[2, 3]`.

    The dtype is JAX's canonical one: by default 32 bits in place of 64. For a leaf that
    is no array the text is its type, such as `a str`.
    """
    if not _is_array(leaf):
        return f"a {type(leaf).__name__}"
    # JAX's PRNG keys have an extended dtype.
    dtype = jax.dtypes.canonicalize_dtype(_dtype(leaf), allow_extended_dtype=True)
    return f"{dtype}{list(np.shape(leaf))}"


def _is_array(leaf: Any) -> bool:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return True
    return isinstance(leaf, bool | int | float | complex | np.generic)


def _check_gradients(params: Any) -> None:
    for path, leaf in to_paths(params).items():
        if not _has_gradient(leaf):
            raise ValueError(
                f"{_named('params', path)} is {_dtype(leaf)}, which has no gradient. "
                "Allowed: floating-point arrays. Keep it out of params: close over it, "
                "put it into batch, or with NNX pass only nnx.state(model, nnx.Param); "
                "or plan the whole step with step=, state=, batch=."
            )


def _check_rows(batch: Any) -> None:
    for path, leaf in to_paths(batch).items():
        if np.shape(leaf)[:1] == (0,):
            raise ValueError(
                f"{_named('batch', path)} has the shape {np.shape(leaf)}: no rows. "
                "Allowed: 1 or more in dim 0, the examples of a step."
            )


def checked_loss(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wraps a loss; the wrapper raises ValueError unless the result is a scalar.

    The scalar must be floating-point. A pair of such a scalar and aux is allowed too.
    """

    @functools.wraps(loss)
    def checked(params: Any, batch: Any) -> Any:
        result = loss(params, batch)
        is_pair = isinstance(result, tuple) and len(result) == 2
        value = result[0] if is_pair else result
        is_scalar = _is_array(value) and np.shape(value) == ()
        if not (is_scalar and jnp.issubdtype(_dtype(value), jnp.floating)):
            raise ValueError(
                f"loss returned {_words(result)}. Allowed: a floating-point scalar, or "
                "a pair of one and auxiliary values. Take the mean over the batch."
            )
        return result

    return checked


def checked_step(step: Callable[[Any, Any], Any], state: Any) -> Step:
    """Wraps a step; the wrapper checks each result with `check_result`.

    Args:
        step: the user's step.
        state: the state before the step, of arrays or ShapeDtypeStructs.
    """

    @functools.wraps(step)
    def checked(given: Any, batch: Any) -> tuple[Any, Any]:
        result = step(given, batch)
        check_result(result, state)
        return result

    return checked


def check_result(result: Any, state: Any) -> None:
    """Checks that a step returned a pair, whose state can be the next step's input.

    Args:
        result: what the step returned.
        state: the state before the step, of arrays or ShapeDtypeStructs.

    Raises:
        ValueError: the result is no pair, or the tree, a shape or a dtype of the state
            has changed.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"step returned {_words(result)}. Allowed: a pair, the state after "
            "the step and anything else. Return (state, metrics)."
        )
    if found := _difference(to_paths(state), to_paths(result[0])):
        path, before, after = found
        raise ValueError(
            f"step turned state {path!r} from {before} into {after}. Allowed: the same "
            "tree, shapes and dtypes, so that the state can be donated. Return the "
            "state first, in the form in which it was passed."
        )


def _words(result: Any) -> str:
    """Describes a function's result briefly: its length, dtype and shape, or type."""
    if isinstance(result, tuple):
        return f"{len(result)} values"
    return _form(result) if _is_array(result) else type(result).__name__


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)


def _has_gradient(leaf: Any) -> bool:
    """Returns whether a leaf's dtype is floating-point or complex."""
    return jnp.issubdtype(_dtype(leaf), jnp.inexact)


def _named(name: str, path: str) -> str:
    return f"{name} {path!r}" if path else name


# Logical names of the dims of a model's parameters. Flax stores these names in
# metadata: NNX variables in `out_sharding` (`nnx.with_partitioning`), Linen boxes in
# `names` (`nn.with_partitioning`).


Names = tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True)
class _Named:
    """Placeholder of an array in a tree, with the logical names of the array's dims."""

    names: Names


def logical_names(params: Any, planned: Iterable[str]) -> dict[str, Names]:
    """Maps the path of each array to the logical names of its dims.

    Arrays without logical names are left out.

    Args:
        params: a tree with NNX variables (`nnx.state(model)`) or Linen boxes.
        planned: the paths of the plan's arrays. If the plan was made for the tree
            without boxes, these paths lack the last part `value` of a box's path.

    Raises:
        ValueError: no array has names.
    """
    named = jax.tree.map(_in_place, params, is_leaf=_has_names)
    known, found = frozenset(planned), {}
    for path, leaf in to_paths(named).items():
        bare = path.removesuffix("/value")
        found[path if path in known else bare] = leaf.names
    if not found:
        raise ValueError(
            "params has no array with logical names. Allowed: NNX variables or Linen "
            "boxes made with with_partitioning(initializer, names)."
        )
    return found


def _in_place(box: Any) -> Any:
    """Replaces the array in a box (Flax's wrapper with logical names) by its names.

    The names are a `_Named` at the array's position in the box, so the path of the
    array stays the same. Returns None for a leaf without logical names.
    """
    if not _has_names(box):
        return None
    named = _Named(names=tuple(_names(box)))
    return jax.tree.map(lambda _: named, box)


def _names(leaf: Any) -> Any:
    return getattr(leaf, "out_sharding", None) or getattr(leaf, "names", None)


def _has_names(leaf: Any) -> bool:
    names = _names(leaf)
    if not isinstance(names, tuple | PartitionSpec) or not names:
        return False
    return all(name is None or isinstance(name, str) for name in names)
