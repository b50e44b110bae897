"""Which equations of a JAX program are calls, and what they call.

Decides the numbering of operators that the whole planner shares: depth first, in the
order of the program's text, over all equations for which `bodies` is empty; each body
is visited once, in place of its call (of a while loop the condition, then the body; of
a cond every branch). Also finds how often a while loop runs. Pure; must not know
values, dims or costs.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

Body = Jaxpr | ClosedJaxpr

CALLS: Mapping[str, tuple[str, ...]] = {
    "jit": ("jaxpr",), "pjit": ("jaxpr",), "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",), "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",), "call": ("call_jaxpr",),
    "closed_call": ("call_jaxpr",), "custom_vmap_call": ("call",),
    "composite": ("jaxpr",), "shard_map": ("jaxpr",), "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",),
}  # fmt: skip
"""Primitives that only call other programs, and which parameters these are."""
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}


def bodies(eqn: JaxprEqn) -> tuple[Body, ...]:
    """The programs that an equation runs; none for an operator.

    >>> import jax
    >>> eqns = jax.make_jaxpr(lambda x: jax.nn.relu(x) + 1.0)(0.0).eqns
    >>> [(eqn.primitive.name, len(bodies(eqn))) for eqn in eqns]
    [('custom_jvp_call', 1), ('add', 0)]
    """
    found: list[Body] = []
    for name in CALLS.get(eqn.primitive.name, ()):
        value = eqn.params[name]
        found += value if isinstance(value, (tuple, list)) else (value,)
    return tuple(found)


def opened(body: Body) -> Jaxpr:
    """A body whose constants are variables of it."""
    return body.jaxpr if isinstance(body, ClosedJaxpr) else body


def while_trips(eqn: JaxprEqn, known: Sequence[Any]) -> int | None:
    """How often a while loop runs that counts from one known number to another.

    Args:
        eqn: the loop.
        known: for each operand its number where the program's text has it, else None.

    Returns:
        None where the text does not say it: the condition is not one comparison of a
        counter with a bound, or one of the numbers is only known when it runs.
    """
    condition, body = map(opened, bodies(eqn))
    num_condition, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    init = known[num_condition + num_body :]
    loop = _Carry(body, num_body, init, known[num_condition:])
    sides = _comparison(condition, known[:num_condition])
    if sides is None:
        return None
    name, left, right = sides
    for counter, bound, compare in (
        (left, right, name),
        (right, left, _MIRRORED[name]),
    ):
        if not isinstance(counter, _Place):
            continue
        start, step = init[counter.index], loop.step(counter.index)
        limit = loop.constant(bound.index) if isinstance(bound, _Place) else bound
        if None not in (start, step, limit):
            return _count(compare, start, limit, step)
    return None


class _Place:
    """A position of the loop's carry."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Carry:
    """What the body does with each position of the carry."""

    def __init__(
        self, body: Jaxpr, num_consts: int, init: Sequence[Any], consts: Sequence[Any]
    ) -> None:
        self.init, self.outs = init, body.outvars
        self.ins = body.invars[num_consts:]
        self.known = dict(zip(body.invars[:num_consts], consts, strict=False))
        self.made = {var: eqn for eqn in body.eqns for var in eqn.outvars}

    def constant(self, index: int) -> Any:
        """The number at a position that the body leaves as it is."""
        return self.init[index] if self.outs[index] is self.ins[index] else None

    def step(self, index: int) -> Any:
        """What is added to a position each time."""
        made = None
        if not isinstance(self.outs[index], Literal):
            made = self.made.get(self.outs[index])
        if made is None or made.primitive.name not in ("add", "sub"):
            return None
        left, right = made.invars
        if right is self.ins[index] and made.primitive.name == "add":
            left, right = right, left
        if left is not self.ins[index]:
            return None
        step = right.val if isinstance(right, Literal) else self.known.get(right)
        return -step if step is not None and made.primitive.name == "sub" else step


def _comparison(condition: Jaxpr, consts: Sequence[Any]) -> Any:
    """Name and both sides of a condition that is one comparison."""
    if len(condition.eqns) != 1 or condition.eqns[0].outvars != condition.outvars:
        return None
    eqn = condition.eqns[0]
    if eqn.primitive.name not in _MIRRORED:
        return None
    num_consts = len(consts)
    places = {var: index for index, var in enumerate(condition.invars)}

    def side(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        index = places.get(atom)
        if index is None:
            return None
        return consts[index] if index < num_consts else _Place(index - num_consts)

    return eqn.primitive.name, side(eqn.invars[0]), side(eqn.invars[1])


def _count(compare: str, start: Any, limit: Any, step: Any) -> int | None:
    """Trips of a counter: `compare` holds between it and `limit` before each."""
    distance, step = float(limit) - float(start), float(step)
    if compare in ("gt", "ge"):
        distance, step = -distance, -step
    if step <= 0 and compare != "ne":
        return 0 if distance < 0 or (compare in ("lt", "gt") and not distance) else None
    if compare == "ne":
        whole = step and distance / step >= 0 and (distance / step).is_integer()
        return int(distance / step) if whole else None
    if compare in ("le", "ge"):
        return max(0, math.floor(distance / step) + 1)
    return max(0, math.ceil(distance / step))
