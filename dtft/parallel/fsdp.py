"""ZeRO level 3: parameters are divided over `fsdp` and gathered at each use.

The traced program of the loss is rebuilt, so that every parameter stays divided until
an operator computes with it. The gather is placed inside the scan over layers, inside
jitted and rematerialized parts, and after casts and slices. The gradient of a parameter
is divided again at once. Without explicit gathers XLA's partitioner gathers
activations, or the parameters of all layers together. With jax 0.10.2 on CPU the
partitioner also computed wrong gradients, see `dtft.parallel.step`. The specs of
parameters come from the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import Mesh, NamedSharding

from dtft._jax_internals import scan_arguments
from dtft.parallel.plan_shardings import constraint, insertable, partition_spec
from dtft.planner.ir import REMAT, is_var, item_bits, with_bodies
from dtft.planner.types import Spec

AXIS = "fsdp"
_ENTERED = REMAT | {"jit", "pjit", "closed_call", "call"}
"""Primitives that call a single body with their own operands. Gathers are inserted into
the body."""
_LAYOUT = frozenset(
    {"convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim"}
)
"""Primitives besides gathers whose results the backward pass recomputes. Such a result
may be a gathered parameter that was cast or reshaped, which should not stay in
memory."""


@dataclass(kw_only=True, eq=False)
class Gathering:
    """Inserts gathers of parameters, over the axis `fsdp`, into a traced loss.

    If `jax.checkpoint` rematerializes the loss with the method `policy` as its policy,
    the backward pass gathers the parameters again. So gathered parameters are not kept
    in memory from the forward pass to the backward pass.
    """

    mesh: Mesh
    _seen: set[tuple[Any, ...]] = field(default_factory=set)
    _results: set[Var] = field(default_factory=set)

    def apply(self, program: ClosedJaxpr, specs: Mapping[int, Spec]) -> ClosedJaxpr:
        """Returns a program that gathers its divided arguments before they are used.

        Each equation that computes with a divided argument gets its own gather. If the
        equation is in the body of a call, or of a scan over the argument's first dim,
        the gather is in that body too. Casts, slices and squeezes that need only a
        device's own shard run before the gather.

        Args:
            program: a traced loss.
            specs: map from the index of an argument to its spec; arguments that are not
                divided over `fsdp` are not gathered.
        """
        divided = {
            program.jaxpr.invars[index]: spec
            for index, spec in specs.items()
            if _is_divided(spec)
        }
        return ClosedJaxpr(self.body(program.jaxpr, divided), program.consts)

    def policy(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        """Returns, as a `jax.checkpoint` policy, whether to keep a primitive's result.

        The backward pass gathers parameters again, instead of keeping them. It also
        recomputes results of casts, reshapes, transposes, squeezes and broadcasts
        (`_LAYOUT`): such a result may be a gathered parameter with another dtype or
        shape. All other results are kept.
        """
        if primitive.name == "sharding_constraint":
            return (avals[0].shape, params["sharding"]) not in self._seen
        return primitive.name not in _LAYOUT

    def gathers(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation is a gather that this object inserted.

        Remat, which wraps blocks of equations in `jax.checkpoint`, must not end a block
        between a gather and the next equation.
        """
        return any(var in self._results for var in eqn.outvars)

    def body(self, jaxpr: Jaxpr, divided: Mapping[Var, Spec]) -> Jaxpr:
        """Returns a jaxpr that gathers its divided arguments before they are used.

        Each equation that computes with a divided argument gets its own gather. If the
        equation is in the body of a call, or of a scan over the argument's first dim,
        the gather is in that body too. Casts, slices and squeezes that need only a
        device's own shard run before the gather.

        Args:
            jaxpr: the program itself, or the body of a call in the program.
            divided: map from an argument that is divided over `fsdp` to its spec.
        """
        level = _Level(gathering=self, divided=dict(divided))
        for eqn in jaxpr.eqns:
            level.add(eqn)
        return jaxpr.replace(eqns=level.eqns)

    def gather(self, var: Var, spec: Spec) -> tuple[Var, JaxprEqn]:
        """Makes an equation that gathers `var` over `fsdp`.

        In the backward pass the cotangent is constrained to `spec`, so that it is
        divided like `var`. A cotangent of at most one dim is first constrained to
        `spec` without `fsdp`. Otherwise XLA would also divide all arrays from which the
        cotangent is computed, and then gather them again.

        Args:
            var: a variable that is divided over `fsdp`.
            spec: the spec by which `var` is divided.

        Returns:
            The new variable that the equation writes, and the equation.
        """
        divided = NamedSharding(self.mesh, partition_spec(spec))
        whole = NamedSharding(self.mesh, partition_spec(gathered(spec)))
        aval: Any = var.aval
        self._seen.add((aval.shape, whole))

        @jax.custom_vjp
        def gather(value: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(value, whole)

        def forward(value: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.with_sharding_constraint(value, whole), None

        def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
            if cotangent.ndim <= 1:  # see `planned_step.sum_specs`
                cotangent = jax.lax.with_sharding_constraint(cotangent, whole)
            return (jax.lax.with_sharding_constraint(cotangent, divided),)

        gather.defvjp(forward, backward)
        result = Var(var.aval)
        self._results.add(result)
        read, eqn = insertable(gather, result)
        return result, eqn.replace(
            invars=[var if atom is read else atom for atom in eqn.invars]
        )


@dataclass(kw_only=True, eq=False)
class _Level:
    """Rebuilds one jaxpr: the program itself, or the body of a call in it.

    `add` appends an equation to `eqns`, after gathers of the divided variables that it
    reads. `divided` maps each variable that is divided over `fsdp` to its spec.
    """

    gathering: Gathering
    divided: dict[Var, Spec]
    eqns: list[JaxprEqn] = field(default_factory=list)

    def add(self, eqn: JaxprEqn) -> None:
        """Appends an equation, after gathers of the divided variables that it reads.

        For a jitted or rematerialized call the gathers are inserted into the call's
        body instead. For a scan the gather of a variable is inserted into the scan's
        body if the scan runs over the variable's first dim and this dim is not divided.
        A cast, slice or squeeze that works on shards is appended without a gather, and
        its result counts as divided.
        """
        specs = [self.divided.get(a) if is_var(a) else None for a in eqn.invars]
        if not any(specs):
            self.eqns.append(eqn)
        elif eqn.primitive.name in _ENTERED:
            self.eqns.append(self._entered(eqn, specs))
        elif eqn.primitive.name == "scan":
            self._scan(eqn, specs)
        elif (after := _still_divided(eqn, specs[0])) is not None:
            self._followed(eqn, after)
        else:
            self.eqns.append(self._with_gathered(eqn))

    def _followed(self, eqn: JaxprEqn, spec: Spec) -> None:
        # Without the constraint the partitioner may gather before a cast to fewer bits.
        (result,) = eqn.outvars
        sharding = NamedSharding(self.gathering.mesh, partition_spec(spec))
        fresh, pinned = constraint(result, sharding)
        self.divided[result] = spec
        self.eqns += [eqn.replace(outvars=[fresh]), pinned]

    def _entered(self, eqn: JaxprEqn, specs: Sequence[Spec | None]) -> JaxprEqn:
        def change(jaxpr: Jaxpr) -> Jaxpr:
            inside = {
                var: spec
                for var, spec in zip(jaxpr.invars, specs, strict=True)
                if spec is not None
            }
            return self.gathering.body(jaxpr, inside)

        return with_bodies(eqn, change)

    def _scan(self, eqn: JaxprEqn, specs: Sequence[Spec | None]) -> None:
        first = sum(scan_arguments(eqn))
        layers = [
            spec[1:] if index >= first and spec and not spec[0] else None
            for index, spec in enumerate(specs)
        ]
        kept = {place for place, spec in enumerate(layers) if spec is not None}
        before = self._with_gathered(eqn, besides=kept)
        self.eqns.append(self._entered(before, layers) if kept else before)

    def _with_gathered(
        self, eqn: JaxprEqn, besides: frozenset[int] | set[int] = frozenset()
    ) -> JaxprEqn:
        invars = [
            atom if place in besides else self._gathered(atom)
            for place, atom in enumerate(eqn.invars)
        ]
        return eqn.replace(invars=invars)

    def _gathered(self, atom: Any) -> Any:
        spec = self.divided.get(atom) if is_var(atom) else None
        if spec is None:
            return atom
        # Each reader gets its own gather. A shared gathered parameter would be kept
        # until all readers are differentiated. In the forward pass XLA merges equal
        # gathers.
        whole, eqn = self.gathering.gather(atom, spec)
        self.eqns.append(eqn)
        return whole


def _still_divided(eqn: JaxprEqn, spec: Spec | None) -> Spec | None:
    """Returns the spec of an equation's result, if devices need only their own shards.

    A device computes its shard of the result from its own shard of the operand in a
    cast to a dtype with as many or fewer bits, a slice that does not cut divided dims,
    and a squeeze. Returns None for all other equations.

    Args:
        eqn: an equation, whose first operand may be divided.
        spec: spec of the first operand; with None the result is None.
    """
    if spec is None:
        return None
    before: Any = eqn.invars[0].aval
    after: Any = eqn.outvars[0].aval
    name = eqn.primitive.name
    if name == "convert_element_type":
        fewer = item_bits(str(after.dtype)) <= item_bits(str(before.dtype))
        return spec if fewer else None
    if name in ("slice", "dynamic_slice"):
        same = all(
            not axes or old == new
            for axes, old, new in zip(spec, before.shape, after.shape, strict=True)
        )
        return spec if same else None
    if name == "squeeze":
        gone = {dim % len(spec) for dim in eqn.params["dimensions"]}
        return tuple(axes for dim, axes in enumerate(spec) if dim not in gone)
    return None


def _is_divided(spec: Spec) -> bool:
    return any(AXIS in axes for axes in spec)


def gathered(spec: Spec) -> Spec:
    """Removes the axis `fsdp` from a spec, which has a tuple of axes for each dim.

    >>> gathered(((), ("fsdp", "tensor")))
    ((), ('tensor',))
    """
    return tuple(tuple(axis for axis in axes if axis != AXIS) for axes in spec)
