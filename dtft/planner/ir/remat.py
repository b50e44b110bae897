"""Rematerialization: recomputes parts of a loss in its backward pass.

`rematerialized` cuts a traced loss into blocks where few bytes cross, and wraps the
blocks in `jax.checkpoint`.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from dtft.planner.ir.flops import ATTENTION
from dtft.planner.ir.graph import item_bits
from dtft.planner.ir.jaxprs import CALLS, REMAT, bodies, is_var, operators, with_bodies
from dtft.planner.types import Remat

_FINER = 2**0.25
"""Ratio of successive limits that `best_cuts` tries for the bytes of a block."""


def best_cuts(inside: Sequence[float], crossing: Sequence[float]) -> tuple[int, ...]:
    """Selects the places where a sequence of operators is cut into blocks.

    Minimizes the bytes that cross all cuts plus the bytes inside the largest block. The
    sum is at most a factor of 1.19 above the minimum.

    Args:
        inside: bytes that each operator writes.
        crossing: for each place between two operators, the bytes written before and
            read after this place; one entry fewer than `inside`.

    Returns:
        Places of the cuts, ascending; place p is before operator p + 1.

    In the first example, cuts after operators 1 and 3 make three blocks of 10 bytes. In
    the second example, a cut would add more bytes than it saves.

    >>> best_cuts([9, 1, 9, 1, 9, 1], [9, 1, 9, 1, 9])
    (1, 3)
    >>> best_cuts([4, 4], [8])
    ()
    """
    if not inside:
        return ()
    upto = [0.0, *itertools.accumulate(inside)]
    best: tuple[float, tuple[int, ...]] = (upto[-1], ())
    limit = upto[-1]
    while limit > 0:
        limit /= _FINER
        found = _cheapest(crossing, upto, limit)
        if found is None:
            break
        cost, cuts = found
        ends = [0, *(cut + 1 for cut in cuts), len(inside)]
        widest = max(upto[b] - upto[a] for a, b in itertools.pairwise(ends))
        if cost + widest < best[0]:
            best = (cost + widest, cuts)
        limit = min(limit, widest)
    return best[1]


def _cheapest(
    crossing: Sequence[float], upto: Sequence[float], limit: float
) -> tuple[float, tuple[int, ...]] | None:
    """Finds the cuts with the fewest crossing bytes for blocks of up to `limit` bytes.

    `crossing` has for each place between two operators the bytes that cross the place:
    place p is between operators p and p + 1. `upto` has the running sums of the bytes
    that the operators write, from 0 on; it has two entries more than `crossing`.

    Returns the crossing bytes and the places of the cuts, ascending, or None if a
    single operator writes more than the limit. A sliding window holds the possible
    starts of the block that ends at an operator, the cheapest first, so that thousands
    of operators take milliseconds.
    """
    num = len(upto) - 1
    costs, before = [0.0], [0]
    window: deque[int] = deque([0])
    for end in range(1, num + 1):
        while window and upto[end] - upto[window[0]] > limit:
            window.popleft()
        if not window:
            return None
        begin = window[0]
        costs.append(costs[begin] + (crossing[end - 1] if end < num else 0.0))
        before.append(begin)
        while window and costs[window[-1]] >= costs[end]:
            window.pop()
        window.append(end)
    cuts: list[int] = []
    begin = before[num]
    while begin:
        cuts.append(begin - 1)
        begin = before[begin]
    return costs[num], tuple(reversed(cuts))


# Blocks. The body of a `lax.scan` is a block. Operators outside of scans are cut into
# blocks where few bytes cross, so that the bytes kept at the cuts and the largest block
# together are small. Wrapping the whole loss would save nothing: its backward pass
# would first recompute the whole forward pass and keep all of it. The last block is not
# wrapped, because its backward pass follows at once.


Policy = Callable[..., bool]
"""A policy of `jax.checkpoint`: whether to keep the result of a primitive."""

MATMULS = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
) | {ATTENTION[0]}
"""Primitives whose results remat=dots keeps; cuDNN's attention is one of them."""
_CONTAINERS = frozenset({"jit", "pjit", "closed_call", "call"})


def keep_nothing(*_: Any, **__: Any) -> bool:
    """The policy of remat=full: only the inputs of a block are kept."""
    return False


def keep_matmuls(primitive: Any, *_: Any, **__: Any) -> bool:
    """The policy of remat=dots: keeps results of matmuls, convolutions and attention.

    Attention is the forward pass of cuDNN's attention.
    """
    return primitive.name in MATMULS


POLICIES: Mapping[Remat, Policy] = {"dots": keep_matmuls, "full": keep_nothing}


def rematerialized(
    program: ClosedJaxpr,
    policy: Policy,
    *,
    last: bool = False,
    joined: Callable[[JaxprEqn], bool] | None = None,
) -> ClosedJaxpr:
    """Returns a program whose blocks are wrapped in `jax.checkpoint`.

    The program must not be differentiated yet.

    Results and gradients change at most by rounding. Parts that the user's program
    already wraps in `jax.checkpoint`, operators with effects, and blocks with complex
    numbers, which `jax.checkpoint` cannot keep (JAX 0.10), are not changed.

    Args:
        program: a traced loss.
        policy: selects the results that a block keeps, in addition to its inputs.
        last: whether the last block is wrapped too. The body of a scan is wrapped in
            any case.
        joined: function that says whether an equation must be in one block with the
            next equation.
    """
    blocks = _Blocks(policy=policy, joined=joined or (lambda _: False))
    changed = _container(program.jaxpr, blocks, wrap_last=last)
    return ClosedJaxpr(changed, program.consts)


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """What holds for all blocks: which results are kept, which equations are joined.

    The fields are the arguments of `rematerialized` with these names.
    """

    policy: Policy
    joined: Callable[[JaxprEqn], bool]


def _container(jaxpr: Jaxpr, asked: _Blocks, *, wrap_last: bool) -> Jaxpr:
    """Cuts a program's equations into blocks and wraps each in `jax.checkpoint`.

    The body of a scan is one block. The body of a `jit` or similar call is cut into
    blocks too, if it contains a scan, or has more than half of the program's operators.
    A last block that is no body of a scan is wrapped only if `wrap_last`. `asked` says
    which results a block keeps, and which equations must be in one block.
    """
    last_use = _last_uses(jaxpr)
    own = _num_operators(jaxpr)
    runs = itertools.groupby(enumerate(jaxpr.eqns), lambda item: _role(item[1], own))
    eqns: list[JaxprEqn] = []
    for role, run in runs:
        numbered = list(run)
        at_end = numbered[-1][0] == len(jaxpr.eqns) - 1
        wrap = wrap_last or not at_end
        if role == "stretch":
            eqns += _stretch(jaxpr, numbered, last_use, asked, wrap_last=wrap)
            continue
        for index, eqn in numbered:
            inner = wrap_last or index < len(jaxpr.eqns) - 1
            eqns.append(_changed(eqn, role, asked, wrap_last=inner))
    return jaxpr.replace(eqns=eqns)


def _role(eqn: JaxprEqn, num_around: int) -> str:
    name = eqn.primitive.name
    if eqn.effects or name in REMAT:
        return "as it is"
    if name == "scan" and eqn.params["length"] > 1:
        return "loop"
    if name in _CONTAINERS:
        (body,) = bodies(eqn)
        if _has_loop(body) or 2 * _num_operators(body) > num_around:
            return "container"
    return "stretch"


def _changed(eqn: JaxprEqn, role: str, asked: _Blocks, *, wrap_last: bool) -> JaxprEqn:
    if role == "container":
        return with_bodies(
            eqn, lambda body: _container(body, asked, wrap_last=wrap_last)
        )
    return (
        with_bodies(eqn, lambda body: _loop_body(body, asked.policy))
        if (role == "loop")
        else eqn
    )


def _loop_body(jaxpr: Jaxpr, policy: Policy) -> Jaxpr:
    wrapped_by_user = any(eqn.primitive.name in REMAT for eqn in jaxpr.eqns)
    if wrapped_by_user or jaxpr.effects or _has_complex(jaxpr.eqns):
        return jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    inner = jaxpr.replace(constvars=[], invars=inputs)
    results = [Var(atom.aval) for atom in jaxpr.outvars]
    # Inside a scan, XLA cannot merge the recomputation with the first computation.
    eqn = _remat_equation(inner, results, policy, prevent_cse=False)
    return jaxpr.replace(eqns=[eqn], outvars=results)


def _stretch(
    jaxpr: Jaxpr,
    numbered: Sequence[tuple[int, JaxprEqn]],
    last_use: Mapping[Var, int],
    asked: _Blocks,
    *,
    wrap_last: bool,
) -> Iterator[JaxprEqn]:
    """Cuts a run of equations into blocks and wraps the blocks in `jax.checkpoint`.

    Args:
        jaxpr: the program of the equations.
        numbered: the run of equations, with their indices in the program.
        last_use: index of the last equation that reads each variable (`_last_uses`).
        asked: which results a block keeps, and which equations must be in one block.
        wrap_last: whether the last block is wrapped, too.

    Yields:
        For a block that is wrapped, one equation that calls it. For any other block,
        its own equations. Not wrapped are blocks with complex numbers, blocks without a
        result that is used after them, and without `wrap_last` the last block.
    """
    first = numbered[0][0]
    eqns = [eqn for _, eqn in numbered]
    crossing = [
        math.inf if asked.joined(eqn) else num_bytes
        for eqn, num_bytes in zip(eqns, _crossing(eqns, first, last_use), strict=False)
    ]
    inside = [0.0 if asked.joined(eqn) else _inside(eqn) for eqn in eqns]
    cuts = best_cuts(inside, crossing)
    ends = [0, *(cut + 1 for cut in cuts), len(eqns)]
    for start, end in itertools.pairwise(ends):
        if end == len(eqns) and not wrap_last:
            yield from eqns[start:end]
        else:
            block, after = eqns[start:end], first + end
            yield from _block(jaxpr, block, after, last_use, asked.policy)


def _block(
    jaxpr: Jaxpr,
    eqns: Sequence[JaxprEqn],
    end: int,
    last_use: Mapping[Var, int],
    policy: Policy,
) -> list[JaxprEqn]:
    written = [var for eqn in eqns for var in eqn.outvars]
    known = set(written)
    read = dict.fromkeys(
        atom
        for eqn in eqns
        for atom in eqn.invars
        if is_var(atom) and atom not in known
    )
    results = [var for var in written if last_use.get(var, -1) >= end]
    if not results or _has_complex(eqns):
        return list(eqns)
    inner = jaxpr.replace(
        constvars=[], invars=list(read), outvars=results, eqns=list(eqns), effects=set()
    )
    return [_remat_equation(inner, results, policy, prevent_cse=True)]


def _has_complex(eqns: Sequence[JaxprEqn]) -> bool:
    """Returns whether an equation, or one that it calls, has complex arrays."""
    return any(
        jnp.issubdtype(aval.dtype, jnp.complexfloating)
        for eqn in eqns
        for one in (eqn, *(o for body in bodies(eqn) for o in operators(body)))
        for aval in (atom.aval for atom in (*one.invars, *one.outvars))
        if isinstance(aval, ShapedArray)
    )


def _remat_equation(
    body: Jaxpr, results: Sequence[Var], policy: Policy, *, prevent_cse: bool
) -> JaxprEqn:
    """Makes the equation that `jax.checkpoint` would create for a program.

    Args:
        body: the program.
        results: the variables that the equation assigns.
        policy: selects the results of `body` that are kept for the backward pass.
        prevent_cse: whether the recomputation is kept apart from the first computation.
    """
    wrap = jax.checkpoint(lambda x: x, policy=policy, prevent_cse=prevent_cse)
    (eqn,) = jax.make_jaxpr(wrap)(0.0).eqns
    return eqn.replace(
        invars=list(body.invars),
        outvars=list(results),
        params={**eqn.params, "jaxpr": body},
    )


def _last_uses(jaxpr: Jaxpr) -> dict[Var, int]:
    """Maps each variable to the index of the last equation that reads the variable.

    Results of the program have the number of equations as their index.
    """
    uses: dict[Var, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        uses.update({atom: index for atom in eqn.invars if is_var(atom)})
    uses.update({atom: len(jaxpr.eqns) for atom in jaxpr.outvars if is_var(atom)})
    return uses


def _crossing(
    eqns: Sequence[JaxprEqn], first: int, last_use: Mapping[Var, int]
) -> list[float]:
    change = [0.0] * (len(eqns) + 1)
    for place, eqn in enumerate(eqns):
        for var in eqn.outvars:
            end = min(last_use.get(var, -1) - first, len(eqns))
            if end > place:
                change[place] += _num_bytes(var)
                change[end] -= _num_bytes(var)
    return list(itertools.accumulate(change))[: len(eqns) - 1]


def _inside(eqn: JaxprEqn) -> float:
    """Counts the bytes that an equation writes; 0 for a sharding constraint.

    So the constraints of a plan do not change the blocks: the step is run with the
    blocks with which its time and memory were predicted.
    """
    written = (
        [eqn]
        if eqn.primitive.name not in CALLS
        else [operator for body in bodies(eqn) for operator in operators(body)]
    )
    return sum(
        _num_bytes(var)
        for one in written
        if one.primitive.name != "sharding_constraint"
        for var in one.outvars
    )


def _num_bytes(var: Any) -> float:
    aval = var.aval
    return getattr(aval, "size", 0) * item_bits(str(getattr(aval, "dtype", "bool"))) / 8


def _num_operators(jaxpr: Jaxpr) -> int:
    return sum(1 for _ in operators(jaxpr))


def _has_loop(jaxpr: Jaxpr) -> bool:
    return any(
        (eqn.primitive.name == "scan" and eqn.params["length"] > 1)
        or any(_has_loop(body) for body in bodies(eqn))
        for eqn in jaxpr.eqns
    )
