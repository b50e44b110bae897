"""Collective communication with explicit mesh axis names.

* `all_reduce`: mean, sum or maximum, by XLA's collective or in a documented order.
* `ring_reduce_scatter`, `ring_all_gather`, `broadcast`: building blocks of collectives.
* `bytes_sent`: the bytes that the busiest device sends in an all-reduce.
* `all_reduce_symmetric`: all-reduce of symmetric matrices at half the bytes.
* `pack_lower`, `unpack_lower`, `unpack_triangle`: the packing of
  `all_reduce_symmetric`.
* `measure_wires`: times the wire formats of `all_reduce_symmetric`, for `wire="auto"`.
* `cholesky_encode`, `cholesky_decode`, `broadcast_factor`, `qr_combine`,
  `reduce_factors`: positive definite matrices as Cholesky factors.
* `reduced_gradients`, `reduce_in_backward`, `HostCommanded`: gradients averaged on the
  host's command, on each device, or layer by layer inside the backward pass.

The functions with an ``axis_name`` are called inside `jax.shard_map`, except
`reduced_gradients`, `HostCommanded` and `measure_wires`. With ``axis_name=None`` most
of these functions communicate nothing, so the same code serves one device and many.
"""

from dtft.collectives.all_reduce import Algorithm, Op, all_reduce, bytes_sent
from dtft.collectives.cholesky import (
    CholeskyCode,
    broadcast_factor,
    cholesky_decode,
    cholesky_encode,
    qr_combine,
    reduce_factors,
)
from dtft.collectives.gradients import (
    HostCommanded,
    Trigger,
    reduce_in_backward,
    reduced_gradients,
)
from dtft.collectives.hops import AxisName, broadcast
from dtft.collectives.packing import (
    pack_lower,
    packed_size,
    unpack_lower,
    unpack_triangle,
)
from dtft.collectives.ring import ring_all_gather, ring_reduce_scatter
from dtft.collectives.symmetric import AnyWire, all_reduce_symmetric
from dtft.collectives.wire_costs import Wire, WireCosts, measure_wires

__all__ = [
    "Algorithm",
    "AxisName",
    "CholeskyCode",
    "AnyWire",
    "HostCommanded",
    "Op",
    "Trigger",
    "Wire",
    "WireCosts",
    "all_reduce",
    "all_reduce_symmetric",
    "broadcast",
    "broadcast_factor",
    "bytes_sent",
    "cholesky_decode",
    "cholesky_encode",
    "measure_wires",
    "pack_lower",
    "packed_size",
    "qr_combine",
    "reduce_factors",
    "reduce_in_backward",
    "reduced_gradients",
    "ring_all_gather",
    "ring_reduce_scatter",
    "unpack_lower",
    "unpack_triangle",
]
