"""Asks JAX which operators of a program it has kernels for, on platforms it knows.

Lowers for a platform that need not be here: nothing is compiled or run. The answer goes
to the planner as data (`planner.kernels.Kernels.lacking`), which must not ask itself.
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
    """The operators of a function of arrays that platforms have no lowering for.

    Args:
        fn: any function that JAX can trace.
        *args: trees of arrays or of `jax.ShapeDtypeStruct`.
        platforms: JAX's names of them, or a cluster, whose types have them.

    Returns:
        Platform to numbers of operators (as in `dtft.planner.trace`), empty
        ones left out.

    Raises:
        ValueError: a platform that JAX does not lower for.

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
        # All at once first: mostly nothing is lacking.
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
    """Equal for equations that lower alike."""
    avals = tuple(str(atom.aval) for atom in eqn.invars)
    return eqn.primitive.name, avals, str(eqn.params)


def _alone(eqn: JaxprEqn) -> Callable[..., Any]:
    """A function of an equation's variables that runs nothing else."""

    def run(*variables: Any) -> Any:
        given = iter(variables)
        read = [a.val if isinstance(a, Literal) else next(given) for a in eqn.invars]
        return eqn.primitive.bind(*read, **eqn.params)

    return run


def _shapes(eqn: JaxprEqn) -> list[jax.ShapeDtypeStruct]:
    """Of its variables, one by one."""
    avals: list[Any] = [a.aval for a in eqn.invars if not isinstance(a, Literal)]
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
