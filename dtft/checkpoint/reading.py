"""Which copy of a step is read: the one in memory, else the one in storage.

Knows what is on offer in both, refuses a copy in memory that has a wrong byte, and says
what a step consists of. Must not know how steps get into memory or into storage.
"""

import copy
import dataclasses
import logging
from typing import Any

import orbax.checkpoint as ocp

from dtft.checkpoint.options import chosen_step
from dtft.checkpoint.storing import Storing
from dtft.checkpoint.tree import listed
from dtft.checkpoint.versions import Corrupt, Versions
from dtft.checkpoint.wanted import metadata, result, wanted_of

logger = logging.getLogger(__name__)


class Reader:
    """The steps of one manager, for reading; the caller holds the manager's lock."""

    def __init__(self, versions: Versions, storing: Storing) -> None:
        """Reads from both, memory first."""
        self._versions, self._storing = versions, storing

    def steps(self) -> list[int]:
        """The steps on offer, ascending."""
        return sorted({*self._versions.steps, *self._storing.steps})

    @property
    def offered(self) -> str:
        """The steps on offer, for messages."""
        return listed([str(step) for step in self.steps()])

    def chosen(self, step: int | None) -> int:
        """The step, or the newest one on offer.

        Raises:
            FileNotFoundError: it is not on offer, or nothing is.
        """
        places = f"memory nor in {self._storing.stored.directory}"
        return chosen_step(step, self.steps(), places)

    def restore(self, step: int | None, args: Any) -> Any:
        """A step as `args` asks for it; see the manager's `restore`."""
        while True:
            chosen = self.chosen(step)
            if chosen not in self._versions.steps:
                return self._from_storage(chosen, args)
            try:
                return self._from_memory(chosen, args)
            except Corrupt as error:
                if chosen not in self._storing.steps and step is not None:
                    raise
                logger.warning("%s", error)

    def _from_memory(self, step: int, args: Any) -> Any:
        wanted = wanted_of(self._versions.get(step).record, args)
        version, values = self._versions.read(step)
        items = copy.deepcopy(dict(version.record.json_items))
        return result(version.record, values, items, wanted, version.shardings)

    def _from_storage(self, step: int, args: Any) -> Any:
        stored = self._storing.stored
        found = stored.record(step)
        if found is None:
            return stored.stock(step, args)
        record, prints = found
        wanted = wanted_of(record, args)
        values, items = stored.read(step, record, prints, wanted)
        return result(record, values, items, wanted, [None] * len(values))

    def item_metadata(self, step: int) -> Any:
        """A struct for every leaf, in the tree or trees that were saved."""
        step = self.chosen(step)
        if step in self._versions.steps:
            version = self._versions.get(step)
            return metadata(version.record, version.shardings)
        found = self._storing.stored.record(step)
        if found is not None:
            return metadata(found[0], [None] * len(found[0].leaves))
        return self._storing.stored.stock_metadata(step)

    def metadata(self, step: int | None) -> Any:
        """Orbax's metadata of a step, or of the directory without `step`."""
        if step is not None and self.chosen(step) in self._versions.steps:
            record = self._versions.get(step).record
            return ocp.metadata.StepMetadata(
                item_metadata=self.item_metadata(step),
                metrics=record.metrics or {},
                custom_metadata=record.custom_metadata or {},
            )
        with self._storing.stored.manager() as manager:
            found = manager.metadata(step)
        if step is None:
            return found
        return dataclasses.replace(found, item_metadata=self.item_metadata(step))
