"""Walks and rebuilds JAX's own form of a program, nested calls included.

Says which equations only call another program, in which order their bodies are
visited, and which number each operator has: the planner's tracer and what runs a plan
must agree on these.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

CALLS: Mapping[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "call": ("call_jaxpr",),
    "eval_jaxpr": ("call_jaxpr",),
    "composite": ("jaxpr",),
    "custom_vmap_call": ("call",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "shard_map": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}
"""Primitives that only call other programs, and which parameters these are."""

_PLAIN = frozenset({"jit", "pjit", "closed_call", "call", "eval_jaxpr"})
"""Calls that mean the same as their bodies in their place."""

REMAT = frozenset({"remat2", "checkpoint"})
"""Names that `jax.checkpoint` has had."""


def bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The programs that a call runs, in the order in which they are numbered."""
    for name in CALLS.get(eqn.primitive.name, ()):
        value = eqn.params[name]
        for body in value if isinstance(value, (tuple, list)) else (value,):
            yield body.jaxpr if isinstance(body, ClosedJaxpr) else body


def with_bodies(eqn: JaxprEqn, change: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """A call with `change` applied to each of its programs, in numbering order.

    Args:
        eqn: an equation; one that is no call is returned as it is.
        change: must keep the types of a program's arguments and results.
    """
    names = CALLS.get(eqn.primitive.name)
    if not names:
        return eqn
    changed = {name: _changed(eqn.params[name], change) for name in names}
    return eqn.replace(params={**eqn.params, **changed})


def operators(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations that are no calls, in the order of their numbers.

    Depth first in program order; every body once, in place of its call; of a `while`
    the condition before the body, of a `cond` all branches.

    >>> import jax, jax.numpy as jnp
    >>> def layers(x):
    ...     return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x + 1, length=3)[0] * 2
    >>> program = jax.make_jaxpr(layers)(1.0)
    >>> [eqn.primitive.name for eqn in operators(program.jaxpr)]
    ['add', 'sin', 'mul']
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in CALLS:
            yield eqn
        for body in bodies(eqn):
            yield from operators(body)


def uncut(jaxpr: Jaxpr, start: int = 0) -> Iterator[tuple[int, int]]:
    """Operators that stay together when a program is cut into parts.

    Of each loop, branch, rematerialized part, and function with a derivative of its
    own: the number of the first operator, and of the one after the last.

    Args:
        jaxpr: a program.
        start: the number of its first operator.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(lambda x: jax.nn.silu(jax.nn.relu(x) + 1))(1.0)
    >>> [eqn.primitive.name for eqn in operators(program.jaxpr)]
    ['max', 'add', 'logistic', 'mul']
    >>> list(uncut(program.jaxpr))
    [(0, 1)]
    """
    for eqn in jaxpr.eqns:
        stop = start + (eqn.primitive.name not in CALLS)
        for body in bodies(eqn):
            if eqn.primitive.name in _PLAIN:
                yield from uncut(body, stop)
            stop += sum(1 for _ in operators(body))
        if eqn.primitive.name in CALLS and eqn.primitive.name not in _PLAIN:
            yield start, stop
        start = stop


def traced(fn: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """The program of a function of arrays, and shapes of its result.

    JAX notes on which mesh an array is, and puts operators into programs where meshes
    meet. Here arguments are taken without meshes, so that operators have the numbers
    that they have for the planner, who knows shapes only.

    Args:
        fn: any function that JAX can trace.
        *args: trees of arrays, tracers or ShapeDtypeStructs.
    """
    return jax.make_jaxpr(fn, return_shape=True)(*jax.tree.map(_shape, args))


def is_var(atom: Any) -> TypeGuard[Var]:
    """Whether an argument or result is a variable, not a constant of the text."""
    return isinstance(atom, Var)


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(array)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _changed(body: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    if isinstance(body, (tuple, list)):
        return tuple(_changed(one, change) for one in body)
    if isinstance(body, ClosedJaxpr):
        return ClosedJaxpr(change(body.jaxpr), body.consts)
    return change(body)
