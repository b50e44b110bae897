"""The steps of one process of several: in the memory of their hosts, some in storage.

What `ReplicatedCheckpointManager` does in a `jax.distributed` job. Every process makes
the same calls. Turns trees into slices and back and chooses memory or storage, alike on
every process; how steps are copied, replicated and committed is the agents' business.
"""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from dtft.checkpoint.attach import attach
from dtft.checkpoint.attached_memory import AttachedMemory
from dtft.checkpoint.job_layout import (
    config_of,
    difference,
    dynamic_part,
    layout_of,
    record_in,
    same_slices,
)
from dtft.checkpoint.job_terms import refuse_unfit, terms_of, wanted_structs
from dtft.checkpoint.manager import SaveArgs
from dtft.checkpoint.options import ReplicatedOptions, chosen_step
from dtft.checkpoint.record import LeafRecord, Record, record_of
from dtft.checkpoint.slices import Layout
from dtft.checkpoint.stored import StoredSteps
from dtft.checkpoint.storing import StorageFailed
from dtft.checkpoint.tree import listed
from dtft.checkpoint.wanted import metadata, result, wanted_of

logger = logging.getLogger(__name__)


class JobSteps:
    """See `ReplicatedCheckpointManager` for what each method promises."""

    def __init__(self, directory: epath.Path, options: ReplicatedOptions) -> None:
        """Attaches to this host's agent and waits for the other processes.

        Raises:
            ValueError: an option or the directory does not fit a job.
            NoAgent: no agent takes this process.
            TimeoutError: the other processes did not attach in time.
        """
        refuse_unfit(directory, options)
        self._options, self._stored = options, StoredSteps(directory)
        self._processes = jax.process_count()
        attached = attach(options.agent, terms_of(directory, options, self._processes))
        self._memory = AttachedMemory(
            attached,
            slot=jax.process_index(),
            chunk_bytes=options.chunk_bytes,
            directory=Path(directory),
        )
        self._listed = self._stored.steps()
        """What storage had when it could be listed last."""
        self._looks: tuple[Any, ...] | None = None
        self._layout: Layout | None = None
        """What was announced, at the first save."""

    # -------------------------------------------------------------------- steps

    def all_steps(self, read: bool = False) -> list[int]:
        """The steps on offer, ascending, once the step saved last is safe."""
        del read  # it is always listed: the agents write there
        self._memory.wait_until_finished()
        here = self._memory.in_memory
        return sorted({*self._in_storage(), *([] if here is None else [here])})

    def _in_storage(self) -> tuple[int, ...]:
        """The stored steps; where they cannot be listed, those known before."""
        try:
            self._listed = self._stored.steps()
        except OSError as error:
            logger.warning("%s cannot be listed: %s", self._stored.directory, error)
        return self._listed

    def newest(self) -> int | None:
        """The newest step on offer: what `should_save` goes by. Does not wait."""
        if self._memory.saved is not None:
            return self._memory.saved
        return max(self._in_storage(), default=None)

    def best_step(self) -> int | None:
        """The newest step: there is no `best_fn` in a job."""
        return max(self.all_steps(), default=None)

    def _chosen(self, step: int | None) -> int:
        places = f"the memory of the job nor in {self._stored.directory}"
        return chosen_step(step, self.all_steps(), places)

    # --------------------------------------------------------------------- save

    def save(
        self, step: int, args: Any, metrics: Any, custom_metadata: Any, at_once: bool
    ) -> None:
        """Copies this process's slices into its agent's memory."""
        self._memory.check()
        newest = self.newest()
        if newest is not None and step <= newest:
            raise StepAlreadyExistsError(
                f"step={step} is not above step {newest}, the newest one. Allowed in a "
                "job of several processes: steps that grow."
            )
        record, values = record_of(args, metrics, custom_metadata)
        self._announce(record, values)
        self._memory.wait_until_finished()  # at most one step is not safe
        arrays = {
            leaf.path: _as_saved(leaf, value)
            for leaf, value in zip(record.leaves, values, strict=True)
        }
        jax.block_until_ready([v for v in arrays.values() if isinstance(v, jax.Array)])
        items = dynamic_part(record)
        self._memory.save(step, args=SaveArgs(arrays=arrays, items=items))
        if at_once:
            self._memory.ask_storage(step, store=True)

    def _announce(self, record: Record, values: list[Any]) -> None:
        """Tells the agents the layout, which stays the same until the job's restart."""
        shardings = [getattr(value, "sharding", None) for value in values]
        looks = record.default, record.structures, record.leaves, shardings
        if self._looks == looks:
            return
        layout = layout_of(record.leaves, shardings, self._processes, config_of(record))
        if self._layout is None:
            self._memory.announce(layout)
        elif layout.digest != self._layout.digest:
            raise ValueError(
                f"the tree differs from that of the first save of this run: "
                f"{difference(self._layout, layout)}. Allowed in a job of several "
                "processes: the same leaves on the same shardings at every step."
            )
        self._looks, self._layout = looks, layout

    # ------------------------------------------------------------------ restore

    def restore(self, step: int | None, args: Any) -> Any:
        """A step: from memory, on whatever shardings, else from storage."""
        chosen = self._chosen(step)
        if chosen != self._memory.in_memory:
            return self._from_storage(chosen, args)
        found = self._memory.locate(chosen)
        layout = Layout.from_json(found["layout"])
        record = record_in(layout, found["items"])
        if record is None:
            raise ValueError(f"step {chosen} in memory is not a tree of this API.")
        wanted = wanted_of(record, args)
        abstract = wanted_structs(record, wanted, layout)
        arrays = self._read(found, chosen, record, layout, abstract)
        values = [arrays.get(leaf.path) for leaf in record.leaves]
        nowhere = [None] * len(values)
        return result(record, values, dict(record.json_items), wanted, nowhere)

    def _read(
        self,
        found: dict[str, Any],
        step: int,
        record: Record,
        saved: Layout,
        abstract: dict[str, Any],
    ) -> dict[str, Any]:
        """The wanted leaves: of this process's slices, or of what peers have, too."""
        leaves = [leaf for leaf in record.leaves if leaf.path in abstract]
        shardings = [abstract[leaf.path].sharding for leaf in leaves]
        wanted = layout_of(leaves, shardings, self._processes)
        if same_slices(saved, wanted):  # says the same on every process
            return self._memory.read(found, abstract)
        return self._memory.read_on(step, wanted, abstract)

    def _from_storage(self, step: int, args: Any) -> Any:
        found = self._stored.record(step)
        if found is None:
            return self._stored.stock(step, args)
        record, prints = found
        wanted = wanted_of(record, args)
        values, items = self._stored.read(step, record, prints, wanted)
        return result(record, values, items, wanted, [None] * len(values))

    # ----------------------------------------------------------------- metadata

    def _record(self, step: int) -> Record | None:
        """What was saved as a step; None if stock Orbax wrote it."""
        if step == self._memory.in_memory:
            found = self._memory.locate(step)
            return record_in(Layout.from_json(found["layout"]), found["items"])
        stored = self._stored.record(step)
        return stored[0] if stored else None

    def item_metadata(self, step: int) -> Any:
        """A struct for every leaf, without shardings."""
        step = self._chosen(step)
        record = self._record(step)
        if record is None:
            return self._stored.stock_metadata(step)
        return metadata(record, [None] * len(record.leaves))

    def metadata(self, step: int | None) -> Any:
        """Orbax's metadata of a step, or of the directory without `step`."""
        record = None if step is None else self._record(self._chosen(step))
        if step is None or record is None:
            with self._stored.manager() as manager:
                return manager.metadata(step)
        return ocp.metadata.StepMetadata(
            item_metadata=self.item_metadata(step),
            metrics=record.metrics or {},
            custom_metadata=record.custom_metadata or {},
        )

    def metrics(self, step: int) -> Any:
        """The metrics that were saved with a step, or None."""
        record = self._record(self._chosen(step))
        return record.metrics if record else None

    # ---------------------------------------------------------- waiting and ending

    def wait_until_finished(self) -> None:
        """Waits until the newest step is committed and nothing is being stored."""
        if self._layout is not None:
            self._flush(store=False)
        self.check_for_errors()

    def _flush(self, *, store: bool) -> str:
        assert self._memory.saved is not None
        limit_s = 2 * self._options.storage_timeout_s
        return self._memory.flush(self._memory.saved, store=store, limit_s=limit_s)

    def check_for_errors(self) -> None:
        """Raises AgentGone, or StorageFailed once if a step did not reach storage."""
        self._memory.check()
        errors, self._memory.storage_errors = self._memory.storage_errors, []
        if errors:
            raise StorageFailed(errors[-1])

    def is_saving_in_progress(self) -> bool:
        """Whether the step saved last is not safe yet."""
        return self._memory.is_replicating

    def delete(self, step: int) -> None:
        """Removes a step from storage; every process makes the same call."""
        if self._chosen(step) == self._memory.in_memory:
            raise ValueError(
                f"step={step} is the newest commit in memory, from which lost hosts "
                "are restored. It goes when the next step is saved. Allowed: older "
                f"steps ({listed(list(map(str, self._in_storage())))})."
            )
        with self._stored.manager(read_only=False) as manager:
            manager.delete(step)

    def close(self) -> None:
        """Brings the newest step to storage; it stays in the agents' memory, too."""
        try:
            error = self._flush(store=True) if self._layout is not None else ""
            self.check_for_errors()
        finally:
            self._memory.leave()
        if error:
            raise StorageFailed(error)

    def leave(self) -> None:
        """The process ends in trouble: the agents keep what is committed."""
        self._memory.leave()


def _as_saved(leaf: LeafRecord, value: Any) -> jax.Array | np.ndarray:
    if leaf.kind == "key":
        return jax.random.key_data(value)
    if isinstance(value, jax.Array):
        return value
    return np.asarray(value, np.dtype(leaf.dtype))
