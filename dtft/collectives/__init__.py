"""Communication between devices along named mesh axes; imports JAX only.

* `all_reduce`: mean, sum or maximum, native or in a documented order.
* `ring_reduce_scatter`, `ring_all_gather`, `broadcast`: the parts, for own designs.
* `bytes_sent`: what an all-reduce costs.
* `reduced_gradients`, `reduce_in_backward`, `HostCommanded`: gradients averaged on the
  host's command, on each device, or layer by layer inside the backward pass.

Everything is a plain function for the inside of `jax.shard_map`; with
``axis_name=None`` it is the identity, so one code path serves one device and many.
"""

from dtft.collectives.all_reduce import Algorithm, Op, all_reduce, bytes_sent
from dtft.collectives.gradients import (
    HostCommanded,
    Trigger,
    reduce_in_backward,
    reduced_gradients,
)
from dtft.collectives.hops import AxisName, broadcast
from dtft.collectives.ring import ring_all_gather, ring_reduce_scatter

__all__ = [
    "Algorithm",
    "AxisName",
    "HostCommanded",
    "Op",
    "Trigger",
    "all_reduce",
    "broadcast",
    "bytes_sent",
    "reduce_in_backward",
    "reduced_gradients",
    "ring_all_gather",
    "ring_reduce_scatter",
]
