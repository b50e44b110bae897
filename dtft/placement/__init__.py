"""Placement: assigns the operators of a program to nodes of different types.

* `api`: `place` makes a `Placement` from a traced program and a cluster.
* `result`: the placement, its tables and pictures.
* `kernels`: the operators that each device can run, and pins.
* `nodes`: the devices of a cluster and the links between each pair.
* `problem`: tasks on nodes as plain numbers, and a lower bound.
* `tasks`: operators, loops or layers as tasks.
* `list_scheduler`: simulates the times of tasks on nodes.
* `heuristics`: candidates (HEFT and baselines), then moves of tasks to other nodes.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.placement.api import PricedTasks, place, place_tasks
    from dtft.placement.heuristics import Order, Search, find_placement
    from dtft.placement.kernels import Kernels, words_of_platform
    from dtft.placement.list_scheduler import TAKEN, as_they_come, by_rank, schedule
    from dtft.placement.nodes import Nodes
    from dtft.placement.problem import Problem
    from dtft.placement.result import Placement
    from dtft.placement.tasks import Passed, TaskGraph, Tasks

_PUBLIC = {
    "Kernels": "kernels",
    "Nodes": "nodes",
    "Order": "heuristics",
    "Passed": "tasks",
    "Placement": "result",
    "PricedTasks": "api",
    "Problem": "problem",
    "Search": "heuristics",
    "TAKEN": "list_scheduler",
    "TaskGraph": "tasks",
    "Tasks": "tasks",
    "as_they_come": "list_scheduler",
    "by_rank": "list_scheduler",
    "find_placement": "heuristics",
    "place": "api",
    "place_tasks": "api",
    "schedule": "list_scheduler",
    "words_of_platform": "kernels",
}

__all__ = [
    "Kernels",
    "Nodes",
    "Order",
    "Passed",
    "Placement",
    "PricedTasks",
    "Problem",
    "Search",
    "TAKEN",
    "TaskGraph",
    "Tasks",
    "as_they_come",
    "by_rank",
    "find_placement",
    "place",
    "place_tasks",
    "schedule",
    "words_of_platform",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
