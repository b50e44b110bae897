"""Drills compare a run with injected faults to the same run without faults.

* `drill`: the two runs of `dtft drill`, and the faults at their steps. `compare`:
  judges both runs. `leftovers`: processes, sockets and memory that an ended job has
  left on this machine.
* `soak`: `dtft soak`, many drills with random faults. `fault_schedule`: draws them.
* `bench`: `dtft bench`, the memory tier's cost per step.
* `options`: values that the commands of drills and jobs compute from their flags, such
  as the run directory, the secret and a host's address.

`dtft.elastic` kills the processes and cuts the networks.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.drills.bench import measure_tier, run_bench, tier_off
    from dtft.drills.drill import run_drill
    from dtft.drills.options import (
        bind_address,
        cluster_options,
        handed_on,
        host_name,
        own_certificate,
        prepare_run,
        read_secret,
        settings,
        store_address,
    )
    from dtft.drills.soak import run_soak

_PUBLIC = {
    "bind_address": "options",
    "cluster_options": "options",
    "handed_on": "options",
    "host_name": "options",
    "measure_tier": "bench",
    "own_certificate": "options",
    "prepare_run": "options",
    "read_secret": "options",
    "run_bench": "bench",
    "run_drill": "drill",
    "run_soak": "soak",
    "settings": "options",
    "store_address": "options",
    "tier_off": "bench",
}

__all__ = [
    "bind_address",
    "cluster_options",
    "handed_on",
    "host_name",
    "measure_tier",
    "own_certificate",
    "prepare_run",
    "read_secret",
    "run_bench",
    "run_drill",
    "run_soak",
    "settings",
    "store_address",
    "tier_off",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
