"""How often a while loop runs, where the program's text says it.

Recognizes a counter: a position of the carry to which the body adds a known step, and
which the condition compares with a bound that is known, too. Pure; must not know
values, dims or costs.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from dtft.planner.jaxprs import bodies

_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}


def while_trips(eqn: JaxprEqn, known: Sequence[Any]) -> int | None:
    """How often a while loop runs that counts from one known number to another.

    Args:
        eqn: the loop.
        known: for each operand its number where the program's text has it, else None.

    Returns:
        None where the text does not say it: the condition is not one comparison of a
        counter with a bound, or one of the numbers is only known when it runs.
    """
    condition, body = bodies(eqn)
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
        self.known: dict[Any, Any] = dict(
            zip(body.invars[:num_consts], consts, strict=False)
        )
        self.made: dict[Any, JaxprEqn] = {
            var: eqn for eqn in body.eqns for var in eqn.outvars
        }

    def constant(self, index: int) -> Any:
        """The number at a position that the body leaves as it is."""
        return self.init[index] if self.outs[index] is self.ins[index] else None

    def step(self, index: int) -> Any:
        """What is added to a position each time."""
        out = self.outs[index]
        made = None if isinstance(out, Literal) else self.made.get(out)
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
    if compare == "ne":
        times = distance / step if step else (math.inf if distance else 0.0)
        return int(times) if times >= 0 and times.is_integer() else None
    at_bound = compare in ("le", "ge")
    if distance < 0 or not (distance or at_bound):
        return 0
    if step <= 0:
        return None
    return math.floor(distance / step) + 1 if at_bound else math.ceil(distance / step)
