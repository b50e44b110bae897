"""Rebuilds JAX's own form of a program with its nested calls as they are.

What runs a plan changes programs with it, in the numbering of `calls`. Decides nothing;
must not know graphs, plans or devices.
"""

from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from dtft.planner.calls import CALLS, bodies, opened

REMAT = frozenset({"remat2", "checkpoint"})
"""Names that `jax.checkpoint` has had."""


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
            yield from operators(opened(body))


def is_var(atom: Any) -> bool:
    """Whether an argument or result is a variable, not a constant of the text."""
    return isinstance(atom, Var)


def _changed(body: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    if isinstance(body, (tuple, list)):
        return tuple(_changed(one, change) for one in body)
    if isinstance(body, ClosedJaxpr):
        return ClosedJaxpr(change(body.jaxpr), body.consts)
    return change(body)
