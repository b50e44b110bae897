"""Answers `plan=auto`: the planner's best plan for a config on the devices there are.

Knows too whether a plan is of a config. Must not know how plans are recorded or run.
"""

from collections.abc import Sequence
from typing import Any

from dtft.planner.cluster import Cluster
from dtft.planner.cost import Calibration, apply_calibration
from dtft.planner.plan import Plan
from dtft.planner.search import decide
from dtft.planner.workload import Question, of_loss
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
    cluster = Cluster.from_devices(devices)
    if experiment.calibration:
        cluster = apply_calibration(cluster, Calibration.read(experiment.calibration))
    processes = {device.process_index for device in devices}
    return decide(_question(experiment), cluster, whole=len(processes) > 1).plan


def is_of(plan: Plan, experiment: Experiment) -> bool:
    """Whether a plan was made for the model, optimizer and batch of a config."""
    try:
        return plan.model_hash == _question(experiment).fingerprint
    except ValueError:  # none was: it cannot be planned
        return False


def _question(experiment: Experiment) -> Question:
    asked = asked_of(experiment)
    return of_loss(asked.loss, asked.optimizer, asked.params, asked.batch)
