"""Walks and rebuilds jaxprs, including the programs that they call.

Defines which equations are calls (such as `jit`, `scan` and `cond`: they only run other
programs), the order in which their bodies are visited, and the number of each operator.
The planner's tracer and the code that runs a plan share these definitions.
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
"""Map from each primitive that only calls programs to the names of the parameters that
hold these programs."""

_PLAIN = frozenset({"jit", "pjit", "closed_call", "call", "eval_jaxpr"})
"""Primitives of calls that are equivalent to their inlined bodies."""

REMAT = frozenset({"remat2", "checkpoint"})
"""Names of the primitive of `jax.checkpoint` in different JAX versions."""


def bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yields the programs that an equation runs, such as the body of a `jit` or `scan`.

    A `while` has its condition before its body; a `cond` has its branches in order.
    Yields nothing for equations that call no program.
    """
    for name in CALLS.get(eqn.primitive.name, ()):
        value = eqn.params[name]
        for body in value if isinstance(value, (tuple, list)) else (value,):
            yield body.jaxpr if isinstance(body, ClosedJaxpr) else body


def with_bodies(eqn: JaxprEqn, change: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """Returns a copy of an equation that runs changed programs.

    Args:
        eqn: an equation; one that runs no program is returned unchanged.
        change: function from a program (one of `bodies`) to the new program, whose
            arguments and results have the same types.
    """
    names = CALLS.get(eqn.primitive.name)
    if not names:
        return eqn
    changed = {name: _changed(eqn.params[name], change) for name in names}
    return eqn.replace(params={**eqn.params, **changed})


def operators(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields all equations that call no program, also those of nested programs.

    The position of an equation in this order is its operator number. The order is depth
    first: the programs that an equation calls are visited once, at the position of the
    equation. A `while` has its condition before its body; a `cond` has all branches.

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
    """Yields the ranges of operators that a cut of the program must not separate.

    There is a range [start, stop) of operator numbers (positions in `operators`) for
    each equation that calls a program and is not equivalent to its inlined body: a
    loop, a `cond` with all branches, a rematerialized part, a function with a custom
    derivative, and others. Equations inside of these have no range of their own.

    Args:
        jaxpr: a program.
        start: the number of its first operator.

    In the example, only `relu` (operator 0) has a custom derivative.

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
    """Traces a function; returns its program and the shapes of its result.

    JAX records the mesh of an array, and inserts operators between different meshes.
    This function drops the meshes of arguments, so that operators have the same numbers
    as in the planner, which knows shapes only.

    Args:
        fn: any function that JAX can trace.
        *args: trees of arrays, tracers or ShapeDtypeStructs.
    """
    return jax.make_jaxpr(fn, return_shape=True)(*jax.tree.map(_shape, args))


def is_var(atom: Any) -> TypeGuard[Var]:
    """Whether an argument or result of an equation is a variable, not a literal."""
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
