"""Finds those operators of a program that JAX cannot lower for a platform.

The platform need not be on this machine: operators are lowered, but not compiled or
run. `dtft.placement.Kernels(lacking=...)` takes the result.
"""

from collections.abc import Callable, Iterable
from typing import Any, get_args

import jax
from jax.extend.core import JaxprEqn, Literal

from dtft.planner.cluster import Cluster, Platform
from dtft.planner.ir import operators, traced

_PLATFORMS = tuple(name for name in get_args(Platform) if name != "other")


def lacking(
    fn: Callable[..., Any], *args: Any, platforms: Iterable[str] | Cluster
) -> dict[str, frozenset[int]]:
    """Returns, by platform, those operators of a function that JAX cannot lower.

    Args:
        fn: any function that JAX can trace.
        *args: trees of arrays or of `jax.ShapeDtypeStruct`.
        platforms: JAX's names of platforms, or a cluster, whose device types name their
            platforms. The platform `other` of a cluster is skipped.

    Returns:
        Map from a platform to the numbers of the operators (as in
        `dtft.planner.trace`). Platforms without such operators are left out.

    Raises:
        ValueError: a name is not a platform that JAX lowers for.

    In the example operator 0 is `sin`. Operator 1 is `schur`, which JAX cannot lower
    for CUDA:

    >>> import jax.numpy as jnp
    >>> def triangle(x):
    ...     return jax.lax.linalg.schur(jnp.sin(x))[0]
    >>> lacking(triangle, jnp.ones((3, 3)), platforms=("cpu", "cuda"))
    {'cuda': frozenset({1})}
    """
    if isinstance(platforms, Cluster):
        types = {pool.device.platform for pool in platforms.pools}
        platforms = sorted(types - {"other"})
    platforms = [platforms] if isinstance(platforms, str) else list(platforms)
    if unknown := [platform for platform in platforms if platform not in _PLATFORMS]:
        raise ValueError(
            f"platforms has {unknown[0]!r}. Allowed: a cluster "
            "(dtft.planner.Cluster.parse(...)), or some of "
            f"{', '.join(_PLATFORMS)}; what else there is, is registered in Kernels."
        )
    found = {}
    for platform in platforms:
        # The whole program is lowered first, because usually all operators lower.
        if _lowers(fn, args, platform):
            continue
        program, _ = traced(fn, *args)
        known: dict[Any, bool] = {}
        numbers = set()
        for number, eqn in enumerate(operators(program.jaxpr)):
            key = _key(eqn)
            if key not in known:
                known[key] = _lowers(_alone(eqn), _shapes(eqn), platform)
            if not known[key]:
                numbers.add(number)
        if numbers:
            found[platform] = frozenset(numbers)
    return found


def _lowers(fn: Callable[..., Any], args: Iterable[Any], platform: str) -> bool:
    try:
        jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,))
    except NotImplementedError:
        return False
    return True


def _key(eqn: JaxprEqn) -> Any:
    """Returns an equation's primitive, operand types and parameters, as a dict key.

    Of equations with the same key only one is lowered.
    """
    avals = tuple(str(atom.aval) for atom in eqn.invars)
    return eqn.primitive.name, avals, str(eqn.params)


def _alone(eqn: JaxprEqn) -> Callable[..., Any]:
    """Makes a function that runs a single equation on the values of its variables."""

    def run(*variables: Any) -> Any:
        given = iter(variables)
        read = [a.val if isinstance(a, Literal) else next(given) for a in eqn.invars]
        return eqn.primitive.bind(*read, **eqn.params)

    return run


def _shapes(eqn: JaxprEqn) -> list[jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each variable that an equation reads."""
    avals: list[Any] = [a.aval for a in eqn.invars if not isinstance(a, Literal)]
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
