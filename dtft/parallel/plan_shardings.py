"""Applies a plan's shardings: meshes, NamedShardings by path, sharding constraints.

The paths of a user's trees are checked against the paths of the plan.
"""

import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint.state import from_paths, listed, to_paths
from dtft.planner.ir import CALLS, is_var, traced, with_bodies
from dtft.planner.types import Spec


def mesh_of(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Makes a mesh over devices in their given order; the last axis varies fastest.

    Args:
        sizes: map from axis name to size, slowest-varying first.
        devices: the devices of the mesh; by default JAX's devices: in a single process
            the first ones that the mesh needs, in several processes all.

    Raises:
        ValueError: the product of the sizes is not the number of devices.
    """
    wanted = math.prod(sizes.values())
    found = list(jax.devices() if devices is None else devices)
    if devices is None and jax.process_count() == 1:
        found = found[:wanted]
    if len(found) != wanted:
        text = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"devices: {len(found)} of them, but the plan's mesh {text} has {wanted}. "
            f"Pass {wanted} devices, or make a plan for a cluster of {len(found)}."
        )
    grid = np.asarray(found).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def partition_spec(spec: Spec) -> PartitionSpec:
    """Converts a plan's spec, a tuple of mesh axes for each dim, to a PartitionSpec.

    >>> tuple(partition_spec(((), ("replica", "fsdp"), ("tensor",))))
    (None, ('replica', 'fsdp'), 'tensor')
    """
    return PartitionSpec(
        *(axes[0] if len(axes) == 1 else axes or None for axes in spec)
    )


HOST = "pinned_host"
"""JAX's memory kind of host memory that devices can access directly."""


def sharding_tree(
    what: str,
    like: Any,
    specs: Mapping[str, Spec],
    mesh: Mesh,
    host: Container[str] = (),
) -> Any:
    """Returns a tree with a NamedSharding for every leaf of `like`.

    Args:
        what: name of the tree in errors, such as `batch`.
        like: a tree of arrays or ShapeDtypeStructs.
        specs: map from the path of each leaf to its spec.
        mesh: the plan's mesh.
        host: paths of leaves that are kept in host memory.

    Raises:
        ValueError: the paths are not those of `specs`, or a leaf cannot be divided by
            its spec; the message names the path.
    """
    leaves = to_paths(like)
    _check_paths(what, leaves, specs)
    shardings = {
        path: _sharding(f"{what} {path!r}", leaf, specs[path], mesh)
        for path, leaf in leaves.items()
    }
    for path, sharding in shardings.items():
        if path in host:
            shardings[path] = sharding.with_memory_kind(HOST)
    return from_paths(like, shardings)


def signature(tree: Any) -> Any:
    """Returns a hashable key of a tree: its structure, and each leaf's shape and dtype.

    For a Python number the key has the number's type in place of a dtype. Trees with
    equal keys can be arguments of the same compiled program.
    """
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((np.shape(leaf), _dtype(leaf)) for leaf in leaves)


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", type(leaf))


def _check_paths(
    what: str, leaves: Mapping[str, Any], specs: Mapping[str, Spec]
) -> None:
    if leaves.keys() == specs.keys():
        return
    missing = [path for path in specs if path not in leaves]
    unexpected = [path for path in leaves if path not in specs]
    raise ValueError(
        f"{what} is another tree than the plan was made for. Only in the plan: "
        f"{listed(missing)}. Not in the plan: {listed(unexpected)}. Pass "
        f"the {what} that was planned, or make a plan for this one."
    )


def _sharding(what: str, leaf: Any, spec: Spec, mesh: Mesh) -> NamedSharding:
    shape = tuple(np.shape(leaf))
    if len(spec) != len(shape):
        raise ValueError(
            f"{what} has the shape {shape}, but the plan has a spec of {len(spec)} "
            f"dims for it: {spec}. Make a plan for this shape."
        )
    for dim, axes in enumerate(spec):
        unknown = [axis for axis in axes if axis not in mesh.shape]
        if unknown:
            raise ValueError(
                f"{what} is divided over the axis {unknown[0]!r}, which is not in the "
                f"plan's mesh. It has: {', '.join(mesh.shape)}."
            )
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dim] % parts:
            raise ValueError(
                f"{what} has the shape {shape}: dim {dim} is not divisible by {parts} "
                f"({' x '.join(axes)}). Allowed: multiples of {parts}. Pass such a "
                "shape, in a batch with rows that the loss leaves out; or make a plan "
                "for this one."
            )
    return NamedSharding(mesh, partition_spec(spec))


# A function's program is rebuilt with a sharding constraint after each operator that
# the plan names by number (`dtft.planner.ir.operators` defines the numbers). Nested
# programs stay nested, so loops, rematerialized parts and custom derivatives do not
# change.


_CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")
_SAME_RESULTS = frozenset(CALLS) - {"scan", "while", "cond", "shard_map"}
"""Calls that have a single body and return the results of the body."""


def constrained(
    fn: Callable[..., Any], constraints: Mapping[int, Spec], mesh: Mesh
) -> Callable[..., Any]:
    """Wraps a function, so that values inside it have sharding constraints.

    Results are the same up to rounding; on one device bit for bit. The wrapped function
    can be jitted and differentiated like `fn`; a constraint then also holds for the
    value's cotangent. Differentiation replaces the body of a `custom_jvp` or
    `custom_vjp` by its rule. Therefore a constraint on a result of such a body is also
    put on the result of the call, which differentiation keeps.

    Args:
        fn: a function from trees of arrays, by position, to a tree of arrays.
        constraints: map from the number of an operator of `fn`'s program to the spec of
            its first result. The function `dtft.planner.ir.operators` yields the
            operators in the order of their numbers, from 0. For an operator in a loop,
            the result is that of one iteration.
        mesh: a mesh with the axes of the specs.

    Raises:
        ValueError: raised by the wrapped function if a number or a spec does not fit
            the program.
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
    """Inserts a sharding constraint after each operator in `constraints`.

    `constraints` maps the number of an operator to the spec of its result, as for
    `constrained`. On a mesh of one device the constraints are only checked.

    Raises:
        ValueError: the program has no operator with such a number, or a spec does not
            fit the operator's result.
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
    # On one device the unchanged program keeps results bit for bit the same.
    return ClosedJaxpr(changed, program.consts) if mesh.size > 1 else program


def constraint(var: Var, sharding: NamedSharding) -> tuple[Var, JaxprEqn]:
    """Makes an equation that applies a sharding constraint and writes `var`.

    Returns the new variable that the equation reads, and the equation.
    """
    return insertable(
        lambda value: jax.lax.with_sharding_constraint(value, sharding), var
    )


def insertable(fn: Callable[[Any], Any], var: Var) -> tuple[Var, JaxprEqn]:
    """Makes an equation that applies `fn` and writes its result to `var`.

    `fn` must trace to a single equation. Returns the new variable that the equation
    reads, and the equation.
    """
    aval: Any = var.aval
    like = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
    program = jax.make_jaxpr(fn)(like).jaxpr
    (eqn,) = program.eqns
    return program.invars[0], eqn.replace(outvars=[var])


class _Insertion:
    """Walks over a program once, and inserts sharding constraints into it.

    Operators are numbered in the order of the walk, which enters the bodies of calls.
    """

    def __init__(self, constraints: Mapping[int, Spec], mesh: Mesh) -> None:
        self.number = 0
        self._constraints, self._mesh = constraints, mesh
        self._manual = False

    def body(self, jaxpr: Jaxpr) -> tuple[Jaxpr, list[NamedSharding | None]]:
        """Inserts the constraints into a program or into the body of a call.

        Returns the new jaxpr, and for each result the sharding of its constraint, or
        None for a result without a constraint.
        """
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
