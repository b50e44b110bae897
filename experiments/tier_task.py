"""What the processes of `memory_tier_vs_orbax.py` are told: layouts, sizes, tasks.

Plain values without JAX, so that the launcher and its small helpers stay light.
"""

import json
from dataclasses import asdict, dataclass

NUM_HOSTS = 4
COLUMNS = 1024
LEAVES_PER_KIND = 4
KINDS = ("params", "mu", "nu")
COPIES_AT_PEAK = 7
"""Times that either tier has a host's state in memory at most, devices included."""
STEPS_PER_BLOCK = 4
"""Steps that are timed with the tier on or off before it changes."""
TURNS = 2
"""Blocks of steps with the tier on."""
PROCESS_BYTES = 300 << 20
"""A host's processes without any state."""


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """How the leaves lie on a mesh (replica, fsdp) of one device per host."""

    replica: int
    """Size of the mesh axis `replica`."""
    params: str | None = None
    """The mesh axis that divides dim 0 of the parameters."""
    moments: str | None = None
    """The mesh axis that divides dim 0 of the moments."""


LAYOUTS = {
    "replicated": StateLayout(replica=4),
    "fsdp": StateLayout(replica=2, params="fsdp", moments="fsdp"),
    "zero1": StateLayout(replica=4, moments="replica"),
}


def num_rows(mib: int) -> int:
    """Rows of every leaf of a state of about `mib` MiB, divisible by the hosts.

    >>> num_rows(48) * COLUMNS * 4 * LEAVES_PER_KIND * len(KINDS) == 48 << 20
    True

    Raises:
        ValueError: the state would be too small to be divided.
    """
    rows = (mib << 20) // (COLUMNS * 4 * LEAVES_PER_KIND * len(KINDS))
    if rows < NUM_HOSTS:
        raise ValueError(f"mib={mib} is too small. Allowed: 1 or more. Raise --mib.")
    return rows - rows % NUM_HOSTS


def host_bytes(layout: str, mib: int) -> int:
    """Bytes of the state on each host's device.

    >>> [host_bytes(layout, 48) >> 20 for layout in LAYOUTS]
    [48, 24, 24]
    """
    found = LAYOUTS[layout]
    sizes = {"replica": found.replica, "fsdp": NUM_HOSTS // found.replica, None: 1}
    leaf = num_rows(mib) * COLUMNS * 4 * LEAVES_PER_KIND
    moments = leaf * (len(KINDS) - 1) // sizes[found.moments]
    return leaf // sizes[found.params] + moments


def needed_bytes(layout: str, mib: int) -> int:
    """Memory that a machine must have free for one side, roughly and at most."""
    return NUM_HOSTS * (COPIES_AT_PEAK * host_bytes(layout, mib) + PROCESS_BYTES)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a trainer has to do."""

    side: str
    """"ours" or "orbax_p2p"."""
    phase: str
    """"save" or "restore"."""
    layout: str
    """Key of `LAYOUTS`."""
    mib: int
    """Logical global size of the state."""
    directory: str
    """Of this side and round; the hosts' memory is in it."""
    saves: int
    """Saves that are timed one by one."""
    step_s: float
    """Wanted seconds of a step."""

    @property
    def last(self) -> int:
        """The last step that is saved."""
        return self.saves + TURNS * STEPS_PER_BLOCK

    def to_json(self) -> str:
        """JSON, to be given to the trainers."""
        return json.dumps(asdict(self))
