"""The two memory tiers that `memory_tier_vs_orbax.py` compares, behind one shape.

Each is opened by its constructor, which is what the experiment times: dtft's manager
against an agent of its host, or Orbax's peer-to-peer manager on a ramdisk.
"""

from pathlib import Path
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp

from dtft.checkpoint.managers import (
    AgentCheckpointManager,
    AgentLink,
    Dialogue,
    RestoreArgs,
    SaveArgs,
)
from experiments.tier_agent import CHUNK_BYTES, LIMIT_S, socket_of
from experiments.tier_state import State, slices_of


class Tier(Protocol):
    """One side of the comparison, open."""

    def settle(self) -> None:
        """Waits for what the tier does once, in the background, when it is opened."""
        ...

    def save(self, step: int, state: State) -> None:
        """What the training thread calls and waits for."""
        ...

    def await_turn(self) -> None:
        """What a training loop waits for before it saves again, if anything."""
        ...

    def wait(self) -> None:
        """Waits until the last save is complete."""
        ...

    def restore(self) -> tuple[State, int]:
        """The newest state, on the devices, and its step."""
        ...


class Ours:
    """dtft: the manager of a trainer whose host has an agent."""

    def __init__(
        self, directory: Path, rank: int, abstract: dict[str, Any], last: int
    ) -> None:
        """Connects to the agent; a state to restore is fetched before this returns.

        `last` is the last step that is saved, which a training loop knows.
        """
        self._abstract = abstract
        link = AgentLink.connect(socket_of(directory, rank), LIMIT_S)
        dialogue = Dialogue(link, LIMIT_S)
        self._manager = AgentCheckpointManager(
            dialogue,
            slot=rank,
            chunk_bytes=CHUNK_BYTES,
            storage_directory=directory / "storage",
            last=last,
        )
        dialogue.start(self._manager.take)
        self._manager.announce(slices_of(abstract))

    def settle(self) -> None:
        """See `Tier.settle`: the memory that was reserved is mapped."""
        self._manager.wait_until_mapped()

    def save(self, step: int, state: State) -> None:
        """See `Tier.save`."""
        self._manager.save(step, args=SaveArgs(arrays=state))

    def await_turn(self) -> None:
        """At most one step runs ahead of replication, as in `dtft.train.loop`."""
        self._manager.wait_until_finished()

    def wait(self) -> None:
        """See `Tier.wait`: until the step is committed."""
        self._manager.wait_until_finished()

    def restore(self) -> tuple[State, int]:
        """See `Tier.restore`."""
        found = self._manager.restore(args=RestoreArgs(abstract=self._abstract))
        if found is None:
            raise RuntimeError("there is nothing to restore in memory")
        step = self._manager.latest_step()
        assert step is not None
        return jax.block_until_ready(found[0]), step


class Orbax:
    """`orbax.checkpoint.experimental.emergency.p2p`, a directory in memory per host."""

    def __init__(
        self, directory: Path, rank: int, abstract: dict[str, Any], last: int
    ) -> None:
        """Opens the manager, which prefetches what its host lacks."""
        del last
        from orbax.checkpoint.experimental.emergency.p2p import (
            args,
            checkpoint_manager,
            options,
        )

        self._args, self._abstract = args, abstract
        local = directory / f"host{rank}"
        local.mkdir(exist_ok=True)
        self._manager = checkpoint_manager.CheckpointManager(
            next(iter(abstract.values())).sharding.mesh,
            abstract,
            local,
            options=options.CheckpointManagerOptions(
                local=options.LocalCheckpointOptions(
                    save_interval_steps=1, max_to_keep=2
                ),
                replica_axis_index=0,
            ),
        )

    def settle(self) -> None:
        """Orbax takes the memory for each save anew."""

    def save(self, step: int, state: State) -> None:
        """See `Tier.save`."""
        wanted = self._args.Composite(state=ocp.args.PyTreeSave(state))
        self._manager.save(step, args=wanted)

    def await_turn(self) -> None:
        """Orbax waits inside `save` for the one before."""

    def wait(self) -> None:
        """See `Tier.wait`."""
        self._manager.wait_until_finished()

    def restore(self) -> tuple[State, int]:
        """See `Tier.restore`."""
        step = self._manager.latest_step()
        if step is None:
            raise RuntimeError("latest_step() is None: nothing to restore")
        wanted = self._args.Composite(state=ocp.args.PyTreeRestore(self._abstract))
        found = self._manager.restore(step, args=wanted)
        if found is None:
            raise RuntimeError(f"restore({step}) returned nothing")
        return jax.block_until_ready(found.state), step


SIDES: dict[str, type[Ours] | type[Orbax]] = {"ours": Ours, "orbax_p2p": Orbax}
