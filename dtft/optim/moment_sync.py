"""The two modes of `sync_moments`, an optimizer whose replicas exchange moments.

Decides for each operand of an update (a moment that the update is computed from)
whether it is reduced now, taken from an earlier reduction, or this replica's own. Use
`dtft.optim.sync`, which documents and checks the options.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dtft.collectives import Algorithm, all_reduce
from dtft.optim import exchange
from dtft.optim.exchange import Reduction
from dtft.optim.per_replica import PerReplica
from dtft.optim.phases import Phases

Mode = Literal["operands", "state"]


class SyncState(NamedTuple):
    """State of `sync_moments`: the optimizer's state, and moments as last reduced."""

    inner: Any
    """Optimizer state; fields that differ per replica are marked `PerReplica`."""
    held: dict[str, Any]
    """Moments by field name, as last reduced; used in the update until the next
    reduction, and equal on all replicas. Only moments with a period other than 1; empty
    in mode "state"."""
    taken: dict[str, jax.Array]
    """For each moment in `held`, the number of the update (int32) that last reduced the
    moment; 0 before the first update."""


class MomentSync(NamedTuple):
    """The transform of `dtft.optim.sync.sync_moments`; its fields are the options.

    `operands` is the update function of mode "operands", `replace_state` that of mode
    "state".
    """

    phases: Phases
    axis_name: str | None
    mode: Mode
    every: dict[str, int]
    op: dict[str, Reduction]
    algorithm: Algorithm
    commanded: bool
    refresh_above: float | None

    def init(self, params: optax.Params) -> SyncState:
        """Makes the state of one replica before the first update.

        Raises:
            ValueError: `every` (periods by field) or `op` (reductions by field) names a
                field that the optimizer's state does not have.
        """
        inner = self.phases.init(params)
        missing = sorted({*self.every, *self.op} - {*inner._fields})
        if missing:
            raise ValueError(
                f"every or op names {missing}, but the optimizer's state has "
                f"{list(inner._fields)}. Name fields of it."
            )
        kept = self._kept()
        return SyncState(
            inner=self._mark(inner),
            held={n: jax.tree.map(jnp.zeros_like, getattr(inner, n)) for n in kept},
            taken={n: jnp.zeros([], jnp.int32) for n in kept},
        )

    def operands(
        self,
        updates: optax.Updates,
        state: SyncState,
        params: Any = None,
        *,
        sync: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, SyncState]:
        """Makes one update in mode "operands", from moments reduced over the replicas.

        For a moment that is not reduced at this update, the result of its last
        reduction is used, so the update is equal on all replicas. The moments in the
        state stay those of this replica's gradients.

        Args:
            updates: this replica's gradients.
            state: the state before the update.
            params: not used.
            sync: a value other than 0 reduces all moments with a period (the fields
                that the option `every` names) at this update.
            **extra: not used.

        Returns:
            The update, and the new state.

        Raises:
            ValueError: `sync` is given although the option `commanded` is False, or is
                missing although the option is True.
        """
        del params, extra
        self._check_command(sync)
        inner = self.phases.accumulate(updates, _unmark(state.inner))
        fresh = [name for name in self.every if name not in state.held]
        used = {name: self._reduced(name, getattr(inner, name)) for name in fresh}
        # Read by `direction` only with Nesterov momentum; else XLA drops the reduction
        # as dead code.
        mean = all_reduce(updates, self.axis_name, op="mean", algorithm=self.algorithm)

        def direction() -> optax.Updates:
            kept = self._recorrected(held, taken, inner.count)
            return self.phases.direction(mean, inner._replace(**used, **kept))

        now = {name: self._turn(name, inner.count, sync) for name in state.held}
        held, taken = self._exchanged(now, inner, state.held, state.taken)
        update = direction()
        if held and self.refresh_above is not None:
            # The update is made from reduced operands, so all replicas decide alike.
            early = _largest(update) > self.refresh_above
            now = {name: early & (taken[name] != inner.count) for name in held}
            held, taken = self._exchanged(now, inner, held, taken)
            update = direction()
        return update, SyncState(self._mark(inner), held, taken)

    def replace_state(
        self,
        updates: optax.Updates,
        state: SyncState,
        params: Any = None,
        *,
        sync: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, SyncState]:
        """Makes one update in mode "state".

        First adds the gradient to the replica's moments. Then replaces each moment
        whose exchange is due by its reduction over the replicas. Last makes the update
        from the resulting moments and the gradient.

        Args:
            updates: this replica's gradients.
            state: the state before the update.
            params: not used.
            sync: a value other than 0 reduces all moments with a period (the fields
                that the option `every` names) at this update.
            **extra: not used.

        Returns:
            The update, which may differ between replicas, and the new state.

        Raises:
            ValueError: `sync` is given although the option `commanded` is False, or is
                missing although the option is True.
        """
        del params, extra
        self._check_command(sync)
        inner = self.phases.accumulate(updates, _unmark(state.inner))
        for name, period in self.every.items():
            own = getattr(inner, name)
            if period == 1:
                new = self._reduced(name, own)
            else:
                due = exchange.due(inner.count, period, sync)
                op = self.op.get(name, "mean")
                new = exchange.where_due(due, own, self.axis_name, op, self.algorithm)
            inner = inner._replace(**{name: new})
        update = self.phases.direction(updates, inner)
        return update, SyncState(self._mark(inner), {}, {})

    def _reduced(self, name: str, tree: Any) -> Any:
        op = self.op.get(name, "mean")
        return all_reduce(tree, self.axis_name, op=op, algorithm=self.algorithm)

    def _turn(self, name: str, count: jax.Array, sync: jax.Array | None) -> jax.Array:
        return exchange.due(count - 1, self.every[name], sync) | (count == 1)

    def _exchanged(
        self,
        now: dict[str, jax.Array],
        inner: Any,
        held: dict[str, Any],
        taken: dict[str, jax.Array],
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        def renewed(name: str) -> Any:
            return jax.lax.cond(
                now[name],
                lambda own, _: self._reduced(name, own),
                lambda _, old: old,
                getattr(inner, name),
                held[name],
            )

        number = {n: jnp.where(now[n], inner.count, taken[n]) for n in held}
        return {name: renewed(name) for name in held}, number

    def _recorrected(
        self, held: dict[str, Any], taken: dict[str, jax.Array], count: jax.Array
    ) -> dict[str, Any]:
        """Rescales moments that were reduced at earlier updates, for bias correction.

        Such a moment must be divided by 1 - decay^taken, but `Phases.direction` divides
        by 1 - decay^count. So the moment is multiplied by (1 - decay^count) / (1 -
        decay^taken) first. A moment without bias correction is returned unchanged.

        Args:
            held: the reduced moments, by field name.
            taken: for each of them, the number of the update that reduced it.
            count: number of the present update.
        """

        def scale(name: str) -> Any:
            if name not in self.phases.decay:
                return held[name]
            decay = jnp.asarray(self.phases.decay[name], jnp.float32)
            present, then = (
                1 - decay ** number.astype(jnp.float32)
                for number in (count, taken[name])
            )
            factor = present / then
            return jax.tree.map(lambda x: x * factor.astype(x.dtype), held[name])

        return {name: scale(name) for name in held}

    def _kept(self) -> list[str]:
        if self.mode == "state":
            return []
        return [name for name, period in self.every.items() if period != 1]

    def _mark(self, inner: Any) -> Any:
        """Wraps the optimizer state's fields that differ per replica in `PerReplica`.

        The count, and in mode "state" every field with a period of 1, are equal on all
        replicas and are not wrapped.
        """
        equal = {"count"}
        if self.mode == "state":
            equal |= {name for name, period in self.every.items() if period == 1}
        own = [name for name in inner._fields if name not in equal]
        return inner._replace(**{n: PerReplica(getattr(inner, n)) for n in own})

    def _check_command(self, sync: jax.Array | None) -> None:
        if self.commanded != (sync is not None):
            raise ValueError(
                f"update() was given sync={sync!r}, but commanded={self.commanded}. "
                "Give sync (int32, equal on all replicas) if and only if commanded."
            )


def _unmark(inner: Any) -> Any:
    values = {name: getattr(inner, name) for name in inner._fields}
    marked = {n: v.rows for n, v in values.items() if isinstance(v, PerReplica)}
    return inner._replace(**marked)


def _largest(update: optax.Updates) -> jax.Array:
    leaves = [u for u in jax.tree.leaves(update) if u.size]
    tops = [jnp.max(jnp.abs(u)).astype(jnp.float32) for u in leaves]
    return jnp.max(jnp.stack(tops)) if tops else jnp.zeros([], jnp.float32)
