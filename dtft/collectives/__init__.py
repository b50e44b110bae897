"""Communication between devices along named mesh axes; imports JAX only.

* `all_reduce`: mean, sum or maximum, native or in a documented order.
* `ring_reduce_scatter`, `ring_all_gather`, `broadcast`: the parts, for own designs.
* `bytes_sent`: what an all-reduce costs.

Everything is a plain function for the inside of `jax.shard_map`; with
``axis_name=None`` it is the identity, so one code path serves one device and many.
"""

from dtft.collectives.all_reduce import Algorithm, Op, all_reduce, bytes_sent
from dtft.collectives.hops import AxisName, broadcast
from dtft.collectives.ring import ring_all_gather, ring_reduce_scatter

__all__ = [
    "Algorithm",
    "AxisName",
    "Op",
    "all_reduce",
    "broadcast",
    "bytes_sent",
    "ring_all_gather",
    "ring_reduce_scatter",
]
