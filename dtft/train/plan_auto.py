"""Answers `plan=auto`: the planner's best plan for a config on the devices there are.

Must not know how plans are recorded or run.
"""

from collections.abc import Sequence
from typing import Any

from dtft.planner.calibration import Calibration, apply
from dtft.planner.cluster import Cluster
from dtft.planner.deciding import decide
from dtft.planner.plan import Plan
from dtft.planner.question import of_loss
from dtft.train.experiment import Experiment
from dtft.train.plan_question import asked_of


def automatic(experiment: Experiment, devices: Sequence[Any]) -> Plan:
    """The plan of a config; devices of several processes are all in its mesh.

    Args:
        experiment: model, optimizer and batch.
        devices: in slot order.

    Raises:
        ValueError: it fits in no way, the planner does not know the devices, or the
            calibration is of others.
    """
    asked = asked_of(experiment)
    question = of_loss(asked.loss, asked.optimizer, asked.params, asked.batch)
    cluster = Cluster.from_devices(devices)
    if experiment.calibration:
        cluster = apply(cluster, Calibration.read(experiment.calibration))
    processes = {device.process_index for device in devices}
    return decide(question, cluster, whole=len(processes) > 1).plan
