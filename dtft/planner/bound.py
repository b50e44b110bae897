"""No plan of a step is faster than this: what the devices must do at the least.

Pure; must not know meshes.
"""

from dtft.planner.cluster import Pool
from dtft.planner.question import Question


def lower_bound_s(question: Question, pool: Pool) -> float:
    """Seconds that all devices together need for the operations and arrays of a step.

    The larger of two floors: matmuls and convolutions at the peak of their dtype,
    divided evenly; and every parameter and optimizer value read and written once, each
    by one device. Nothing is said of communication: one device needs none.

    Args:
        question: the step.
        pool: the devices.
    """
    graph, device = question.graph, pool.device
    computing = 0.0
    for operator in graph.operators:
        if operator.kind in ("matmul", "convolution") and operator.inputs:
            dtype = graph.values[operator.inputs[0]].dtype
            computing += operator.flops * operator.trips / device.peak(dtype)
    paths = (*question.paths("parameter"), *question.paths("optimizer"))
    num_bytes = sum(graph.values[graph.inputs[path]].num_bytes for path in paths)
    moving = 2 * num_bytes / device.memory_bandwidth
    return max(computing, moving) / pool.num_devices
