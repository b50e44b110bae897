"""Makes a function keep the shardings that a plan gives to values inside it.

The function's program is rebuilt with a sharding constraint after each operator that
the plan names by number (numbered as in `dtft.planner.ir.jaxprs`); nested programs stay
nested, so loops, rematerialized parts and custom derivatives mean what they meant.
Decides no sharding; must not know optimizers, losses or plans.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from dtft.planner.ir import CALLS, is_var, traced, with_bodies
from dtft.planner.types import Spec
from dtft.train.plan_shardings import partition_spec

_CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")
_SAME_RESULTS = frozenset(CALLS) - {"scan", "while", "cond", "shard_map"}
"""Calls whose results are those of their one body."""


def constrained(
    fn: Callable[..., Any], constraints: Mapping[int, Spec], mesh: Mesh
) -> Callable[..., Any]:
    """The function with sharding constraints on values inside it.

    Results are the same; on one device bit for bit. It can be jitted and differentiated
    like `fn`; a constraint then holds for the value's cotangent too. What is inside of
    a `custom_jvp` or `custom_vjp` is replaced by the rule when it is differentiated; a
    constraint on a value that the rule's function returns is also put on the call's
    result, where it stays.

    Args:
        fn: takes trees of arrays, by position, and returns one.
        constraints: number of an operator of `fn`'s program to the spec of its first
            result, without the dim that a loop around it adds.
        mesh: has the axes that the specs name.

    Raises:
        ValueError: when called: a number or a spec does not fit the program.
    """
    if not constraints:
        return fn

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        program, shape = traced(fn, *args)
        changed = insert(program, constraints, mesh)
        results = jaxpr_as_fun(changed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


def insert(
    program: ClosedJaxpr, constraints: Mapping[int, Spec], mesh: Mesh
) -> ClosedJaxpr:
    """As `constrained`, of a program that is traced already.

    Raises:
        ValueError: a number or a spec does not fit the program.
    """
    insertion = _Insertion(constraints, mesh)
    changed, _ = insertion.body(program.jaxpr)
    beyond = sorted(number for number in constraints if number >= insertion.number)
    if beyond:
        raise ValueError(
            f"constraints has operator {beyond[0]}, but the program has only "
            f"{insertion.number}, numbered from 0. Make the plan again for this "
            "function and these shapes."
        )
    # One device has nothing to divide, and what it compiles stays bit for bit the same.
    return ClosedJaxpr(changed, program.consts) if mesh.size > 1 else program


def constraint(var: Var, sharding: NamedSharding) -> tuple[Var, JaxprEqn]:
    """An equation that gives `var` its sharding, and the new variable that it reads."""
    return insertable(
        lambda value: jax.lax.with_sharding_constraint(value, sharding), var
    )


def insertable(fn: Callable[[Any], Any], var: Var) -> tuple[Var, JaxprEqn]:
    """The one equation of `fn`, writing `var`, and the new variable that it reads."""
    aval: Any = var.aval
    like = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
    program = jax.make_jaxpr(fn)(like).jaxpr
    (eqn,) = program.eqns
    return program.invars[0], eqn.replace(outvars=[var])


class _Insertion:
    """One walk over a program; counts the operators that it has passed."""

    def __init__(self, constraints: Mapping[int, Spec], mesh: Mesh) -> None:
        self.number = 0
        self._constraints, self._mesh = constraints, mesh
        self._manual = False

    def body(self, jaxpr: Jaxpr) -> tuple[Jaxpr, list[NamedSharding | None]]:
        """The program with its constraints, and those of its results."""
        eqns: list[JaxprEqn] = []
        known: dict[Var, NamedSharding] = {}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in CALLS:
                eqns += self._call(eqn, known)
            else:
                eqns += self._operator(eqn, known)
        of_results = [
            known.get(atom) if is_var(atom) else None for atom in jaxpr.outvars
        ]
        return jaxpr.replace(eqns=eqns), of_results

    def _operator(
        self, eqn: JaxprEqn, known: dict[Var, NamedSharding]
    ) -> list[JaxprEqn]:
        number, self.number = self.number, self.number + 1
        if number not in self._constraints:
            return [eqn]
        sharding = self._sharding(number, eqn)
        known[eqn.outvars[0]] = sharding
        return _after(eqn, [sharding])

    def _call(self, eqn: JaxprEqn, known: dict[Var, NamedSharding]) -> list[JaxprEqn]:
        found: list[NamedSharding | None] = []

        def change(jaxpr: Jaxpr) -> Jaxpr:
            changed, of_results = self.body(jaxpr)
            found[:] = of_results
            return changed

        outside = self._manual
        self._manual = outside or eqn.primitive.name == "shard_map"
        changed = with_bodies(eqn, change)
        self._manual = outside
        if eqn.primitive.name not in _SAME_RESULTS:
            return [changed]
        for var, sharding in zip(eqn.outvars, found, strict=True):
            if sharding is not None:
                known[var] = sharding
        return _after(changed, found) if eqn.primitive.name in _CUSTOM else [changed]

    def _sharding(self, number: int, eqn: JaxprEqn) -> NamedSharding:
        spec, aval = self._constraints[number], eqn.outvars[0].aval
        shape = getattr(aval, "shape", ())
        what = f"constraints[{number}]={spec} is for operator {eqn.primitive.name!r}"
        if self._manual:
            raise ValueError(
                f"{what} inside of jax.shard_map, where the program itself says which "
                "device has what. Leave this constraint out."
            )
        parts = [_parts(axes, self._mesh) for axes in spec]
        uneven = any(n % p for n, p in zip(shape, parts, strict=False))
        if len(spec) != len(shape) or uneven:
            raise ValueError(
                f"{what}, whose result has the shape {shape}. Allowed: one entry per "
                "dim, whose axes divide it evenly. Make the plan again for this "
                "function and these shapes."
            )
        return NamedSharding(self._mesh, partition_spec(spec))


def _after(eqn: JaxprEqn, shardings: list[NamedSharding | None]) -> list[JaxprEqn]:
    outvars, eqns = list(eqn.outvars), []
    for place, sharding in enumerate(shardings):
        if sharding is not None:
            outvars[place], added = constraint(eqn.outvars[place], sharding)
            eqns.append(added)
    return [eqn.replace(outvars=outvars), *eqns]


def _parts(axes: tuple[str, ...], mesh: Mesh) -> int:
    parts = 1
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(
                f"constraints name the axis {axis!r}, which the mesh does not have. "
                f"It has: {', '.join(mesh.shape)}."
            )
        parts *= mesh.shape[axis]
    return parts
