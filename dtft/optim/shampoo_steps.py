"""The state of Shampoo and the steps of one update, as pure functions.

Decides when statistics and inverse roots are computed, and scales each update to the
norm of the Max-AdaBelief update. `dtft.optim.shampoo` has the equations and the public
transforms.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dtft.optim.kronecker import (
    Blocks,
    blocks_of,
    gram,
    inverse_root,
    precondition,
    scalar,
)
from dtft.optim.max_adabelief import ScaleByMaxBeliefState
from dtft.optim.numerics import at_least_float32, dtype_of, widen
from dtft.optim.phases import Phases

Exchange = Callable[[Any], Any]
"""Maps the increments of one replica's statistics to their mean over all replicas; see
`dtft.optim.symmetric`."""


class Factors(NamedTuple):
    """Shampoo's statistics L and R of all blocks of one leaf, or their inverse roots.

    `left` is an array [blocks, rows, rows], `right` [blocks, columns, columns]. Both
    are at least float32.
    """

    left: jax.Array
    """[blocks, rows, rows]."""
    right: jax.Array
    """[blocks, columns, columns]."""


class ScaleByShampooState(NamedTuple):
    """State of `scale_by_shampoo`."""

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    """Number of updates made, int32."""
    graft: ScaleByMaxBeliefState
    """State of Max-AdaBelief; Shampoo preconditions the first moment `mu`."""
    statistics: Any
    """A tree like the parameters: `Factors` L and R; None for leaves that are complex,
    or not matrices after all dims but the last are merged."""
    roots: Any
    """Inverse roots of `statistics`, as last computed, in a tree of the same structure;
    identities before the first computation."""


class ShampooSteps(NamedTuple):
    """Hyperparameters of Shampoo, and the steps of an update as methods."""

    graft: Phases
    beta_preconditioner: jax.typing.ArrayLike
    exponent: jax.typing.ArrayLike
    root_eps: jax.typing.ArrayLike
    block_size: int
    precondition_frequency: jax.typing.ArrayLike
    statistics_every: jax.typing.ArrayLike
    exchange: Exchange | None

    def init(self, params: optax.Params) -> ScaleByShampooState:
        """Makes the state before the first update."""

        def zeros(p: Any) -> Factors | None:
            blocks = self._blocks(p)
            if blocks is None:
                return None
            shapes = ((blocks.number, k, k) for k in blocks.block)
            dtype = at_least_float32(dtype_of(p))
            return Factors(*(jnp.zeros(s, dtype) for s in shapes))

        statistics = jax.tree.map(zeros, params)
        return ScaleByShampooState(
            count=jnp.zeros([], jnp.int32),
            graft=self.graft.init(params),
            statistics=statistics,
            roots=jax.tree.map(
                lambda s: s + jnp.eye(s.shape[-1], dtype=s.dtype)[None], statistics
            ),
        )

    def update(
        self,
        updates: optax.Updates,
        state: ScaleByShampooState,
        params: optax.Params | None = None,
        *,
        local_gradients: optax.Updates | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, ScaleByShampooState]:
        """Makes one update, before its multiplication by the learning rate.

        Args:
            updates: the gradients; with several replicas their mean.
            state: the state before the update.
            params: not used.
            local_gradients: this replica's gradients, from which the statistics are
                computed; None computes the statistics from `updates`.
            **extra: not used.

        Returns:
            The update, and the new state.

        Raises:
            ValueError: `local_gradients` has another tree structure than `updates`, or
                `exchange` changes the tree structure.
        """
        del params, extra
        count = jnp.asarray(optax.safe_increment(state.count))
        measured = updates if local_gradients is None else local_gradients
        _check_same("local_gradients", measured, updates)
        state = state._replace(
            statistics=_as_factors(state.statistics, updates),
            roots=_as_factors(state.roots, updates),
        )
        statistics = jax.lax.cond(
            self._due(count, self.statistics_every),
            lambda old: self._accumulate(measured, old),
            lambda old: old,
            state.statistics,
        )
        roots = jax.lax.cond(
            self._due(count, self.precondition_frequency),
            lambda _: self._roots(statistics),
            lambda old: old,
            state.roots,
        )
        graft = self.graft.accumulate(updates, state.graft)
        ready = count >= jnp.asarray(self.precondition_frequency).astype(jnp.int32)
        direction = self._direction(updates, graft, roots, ready)
        return direction, ScaleByShampooState(count, graft, statistics, roots)

    def _blocks(self, leaf: Any) -> Blocks | None:
        if jnp.issubdtype(dtype_of(leaf), jnp.complexfloating):
            return None
        return blocks_of(np.shape(leaf), self.block_size)

    def _due(self, count: jax.Array, every: jax.typing.ArrayLike) -> jax.Array:
        return jnp.asarray(count % jnp.asarray(every).astype(jnp.int32) == 0)

    def _accumulate(self, gradients: optax.Updates, old: Any) -> Any:
        def increment(g: jax.Array) -> Factors | None:
            blocks = self._blocks(g)
            if blocks is None:
                return None
            return Factors(*gram(blocks.cut(widen(g, g))))

        def moved(s: jax.Array, new: jax.Array) -> jax.Array:
            decay = scalar(self.beta_preconditioner, s)
            share = jnp.where(jnp.asarray(decay) == 1, 1, 1 - decay).astype(s.dtype)
            return decay * s + share * new

        increments = jax.tree.map(increment, gradients)
        if self.exchange is not None:
            own, increments = increments, self.exchange(increments)
            _check_same("exchange", increments, own)
        return jax.tree.map(
            lambda new, s: s if new is None else jax.tree.map(moved, s, new),
            increments,
            old,
            is_leaf=lambda x: x is None or isinstance(x, Factors),
        )

    def _roots(self, statistics: Any) -> Any:
        return jax.tree.map(
            lambda s: inverse_root(s, self.exponent, self.root_eps), statistics
        )

    def _direction(
        self,
        updates: optax.Updates,
        graft: ScaleByMaxBeliefState,
        roots: Any,
        ready: jax.Array,
    ) -> optax.Updates:
        def one(g: Any, m: jax.Array, a: jax.Array, root: Any) -> jax.Array:
            blocks = None if g is None else self._blocks(g)
            if blocks is None:
                return a
            moment = blocks.cut(widen(m, g))
            turned = blocks.join(precondition(root.left, moment, root.right), a)
            sized = turned * _ratio(widen(a, g), turned)
            return jnp.where(ready, sized.astype(a.dtype), a)

        # `roots` has None in place of a leaf, which `jax.tree.map` would not match.
        direction = self.graft.direction(updates, graft)
        leaves, treedef = jax.tree.flatten(updates, is_leaf=lambda x: x is None)
        others = (graft.mu, direction, roots)
        matched = (treedef.flatten_up_to(tree) for tree in others)
        return treedef.unflatten(map(one, leaves, *matched))


def _as_factors(tree: Any, updates: optax.Updates) -> Any:
    """Turns nodes of two arrays in `tree` into `Factors`.

    `nnx.Optimizer` replaces the `Factors` of a state by nodes of another type; this
    function restores them. `updates` is a tree with a leaf or None in place of each
    such node.
    """
    gradients, treedef = jax.tree.flatten(updates, is_leaf=lambda x: x is None)

    def of(gradient: Any, node: Any) -> Any:
        if gradient is None or node is None:  # None may stand for a whole subtree
            return node
        return Factors(*jax.tree.leaves(node))

    return treedef.unflatten(map(of, gradients, treedef.flatten_up_to(tree)))


def _check_same(argument: str, tree: Any, expected: Any) -> None:
    """Raises a ValueError unless both trees have the same structure.

    A gradient missing from `local_gradients`, or a leaf missing from the result of
    `exchange`, would never be added to the statistics. `argument` is the name of the
    argument that gave `tree`, for the error.
    """
    got, want = jax.tree.structure(tree), jax.tree.structure(expected)
    if got != want:
        raise ValueError(
            f"{argument} gave a tree of another structure:\n  {got}\nAllowed: that of "
            f"what it stands for:\n  {want}\nKeep every leaf where it is."
        )


def _ratio(magnitude: jax.Array, direction: jax.Array) -> jax.Array:
    """Returns the norm of `magnitude` divided by the norm of `direction`.

    If `direction` is 0, its norm counts as 1.
    """
    norm = jnp.sqrt(jnp.sum(jnp.square(direction)))
    target = jnp.sqrt(jnp.sum(jnp.square(magnitude)))
    return target / jnp.where(norm == 0, 1, norm)
