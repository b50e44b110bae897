"""Enumerates the candidates of a search: meshes with a value for every other setting.

`choices_of` returns the axis sizes, microbatches and ZeRO levels that a workload and a
pool of devices allow. `enumerate_space` combines these values into candidates, and
leaves out those that cannot be the best.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dtft.planner.cluster import Pool
from dtft.planner.cost import SCHEDULES, undominated_orders
from dtft.planner.search.meshes import (
    Baseline,
    Meshes,
    MeshRules,
    baselines,
    divisors,
    num_factorisations,
)
from dtft.planner.search.pins import check_pins, nearest, pinned_sizes, why_not
from dtft.planner.search.pipeline import layers_of
from dtft.planner.search.space import (
    PLATFORMS,
    REMATS,
    Backend,
    Capabilities,
    Choices,
    MemoryFloor,
    Reason,
    Space,
)
from dtft.planner.search.tensor_sharding import candidates
from dtft.planner.types import AXES, Remat
from dtft.planner.workload import Workload

# Choices: the knobs that can be run (`CAPABILITIES`) and that this step and these
# devices can use.


_MAX_MICROBATCHES = 64
"""The search looks at no more microbatches, unless the user has fixed their number."""


def backend(pool: Pool) -> Backend:
    """Returns the backend of JAX that runs programs on the devices of a pool.

    Raises:
        ValueError: JAX runs no programs on these devices.
    """
    platform = pool.device.platform
    if platform not in PLATFORMS:
        raise ValueError(
            f"cluster: JAX runs no programs on {pool.device.name} ({platform}). "
            f"Allowed: devices of {', '.join(PLATFORMS)}; others take part by "
            "placement."
        )
    return PLATFORMS[platform]


MOST_DEVICES = 2**20
"""The largest number of devices of a cluster that is planned.

The number of meshes grows with the number of devices without limit.
"""


def check_num_devices(pool: Pool) -> None:
    """Checks that a pool is not too large to enumerate its meshes.

    Raises:
        ValueError: the pool has more than 2**20 devices (`MOST_DEVICES`).
    """
    if pool.num_devices > MOST_DEVICES:
        raise ValueError(
            f"cluster: {pool.words} has {pool.num_devices:,} devices. Allowed: up to "
            f"{MOST_DEVICES:,}. Give fewer hosts."
        )


def choices_of(
    question: Workload,
    pool: Pool,
    can: Capabilities,
    batch: int,
    pins: Mapping[str, Any],
) -> Choices:
    """Returns the axis sizes, microbatches and ZeRO levels to search for a workload.

    The caller sets the fields for remat policies, memory limit and smaller numbers of
    devices (`remat`, `memory`, `fewer`), which keep their defaults here.

    Args:
        question: the workload of a step.
        pool: a pool of equal devices.
        can: the settings that may be searched.
        batch: samples in a step; the data axes of each mesh must divide it.
        pins: settings that the user has fixed.

    Raises:
        ValueError: the name or value of a pin is never allowed (`check_pins`), the pin
            `stage_layers` has more or fewer layers than the workload, or
            `virtual_stages` or `schedule` is pinned where no pipelines are searched.
    """
    check_pins(pins)
    _check_pipeline_pins(pins, can)
    divides: dict[str, tuple[int, ...]] = {"replica": (), "fsdp": (), "tensor": ()}
    if "sequence" in can.axes and question.sequence_dims:
        sizes = (question.graph.dims[d].sizes[0] for d in question.sequence_dims)
        divides["sequence"] = tuple(sizes)
    if "expert" in can.axes and question.expert_arrays:
        dims = {question.graph.dims[d] for d in question.expert_arrays.values()}
        divides["expert"] = tuple({size for dim in dims for size in dim.sizes})
    why_one = question.why_one_microbatch if can.microbatches else ""
    parts = can.microbatches and not why_one
    layers = layers_of(question, pool.device) if "stage" in can.axes else None
    if layers is not None:
        uneven = "stage_layers" in pins
        if uneven and sum(pins["stage_layers"]) != layers.count:
            raise ValueError(
                f"stage_layers={pins['stage_layers']!r} has the sum "
                f"{sum(pins['stage_layers'])}, but the step has {layers.count} equal "
                f"layers. Allowed: numbers with the sum {layers.count}."
            )
        divides["stage"] = () if uneven else (layers.count,)
    most = max(_MAX_MICROBATCHES, pins.get("microbatches", 1))
    return Choices(
        num_devices=pool.num_devices,
        batch=batch,
        divides={axis: sizes for axis, sizes in divides.items() if axis in can.axes},
        data_axes=("replica", "fsdp", "expert"),
        levels=tuple(level.size for level in pool.levels),
        max_microbatches=min(batch, most) if parts else 1,
        why_one_microbatch=why_one,
        zero=tuple(sorted(can.zero)),
    )


def _check_pipeline_pins(pins: Mapping[str, Any], can: Capabilities) -> None:
    """Checks that settings of pipelines are pinned only where pipelines are searched.

    Raises:
        ValueError: `can` has no axis `stage`, and a setting of pipelines is pinned to
            another value than that of a step without pipeline.
    """
    for name, usual in (("virtual_stages", 1), ("schedule", SCHEDULES[0])):
        if "stage" not in can.axes and pins.get(name, usual) != usual:
            raise ValueError(
                f"{name}={pins[name]!r} is pinned, and no pipelines are searched here. "
                "Allowed: with what_if=True (dtft plan --what-if); or leave it out."
            )


def check_offload(pins: Mapping[str, Any], can: Capabilities, pool: Pool) -> None:
    """Checks that optimizer state can be kept in host memory if the user asks for it.

    Raises:
        ValueError: `pins` has offload=True, but `can` excludes offload, or the pool has
            no `host_link` (link from a device to its host's memory).
    """
    if pins.get("offload") and (not can.offload or pool.host_link is None):
        lacks = "this entry point cannot" if not can.offload else "no link to the host"
        raise ValueError(
            f"offload=True cannot be met on {pool.words}: {lacks}. Plan with loss= and "
            "optimizer=, for devices whose `host_link` is known (`Pool.host_link`)."
        )


def remats(can: Capabilities, pins: Mapping[str, Any]) -> tuple[Remat, ...]:
    """Returns the remat policies to price, by increasing memory savings and time.

    These are the policies that `can` allows. If the user has fixed one of them in
    `pins`, returns only this one.
    """
    if pins.get("remat") in can.remat:
        return (pins["remat"],)
    return tuple(remat for remat in REMATS if remat in can.remat)


# Enumeration proceeds in this order: sizes of axes and baselines, knobs, removal of
# candidates that do not fit in memory, orders on the fabric. `Reason` records how many
# candidates each rule left.


_Columns = dict[str, np.ndarray]


def enumerate_space(choices: Choices, pins: Mapping[str, Any] | None = None) -> Space:
    """Enumerates all candidates that may be the best, including the baselines.

    A candidate is a mesh with a value for every knob (a setting such as the ZeRO
    level). Leaves out candidates with an axis that does not divide the array sizes
    listed for it (`Choices.divides`), and candidates whose state has no room in a
    device's memory (`Choices.memory`). Also leaves out orders of the axes on the fabric
    that are never better than another order (`undominated_orders`).

    Baselines (meshes of common rules of thumb) stay even without room, unless a pin (a
    value that the user has fixed) rules them out. Their meshes are combined with all
    values of the other knobs.

    If no mesh of all devices divides the batch into two or more parts, candidates with
    a rounded-up batch (`MeshRules.workable`) and with fewer devices (`MeshRules.fewer`)
    are added. Meshes with the numbers of devices in `choices.fewer` are added if they
    divide the batch.

    Args:
        choices: the values that each knob may take.
        pins: pinned values: sizes of axes, other knobs by name (`remat` as the name of
            the policy), and `order`, the axes that must lie in this order on the
            fabric, outermost first.

    Returns:
        The candidates. Empty if there is no baseline and no candidate has room, or if
        nothing is pinned and the choices allow no candidate. `Space.reasons` has the
        number of candidates that remained after each rule.

    Raises:
        ValueError: the name or value of a pin is never allowed (`check_pins`), or the
            pins cannot be met even with unlimited memory. In the latter case the error
            names nearby values that can be met, if there are any.

    In the example, the size of `tensor` must divide 12, so `tensor` cannot be 8.

    >>> space = enumerate_space(
    ...     Choices(num_devices=8, batch=16, divides={"replica": (), "tensor": (12,)})
    ... )
    >>> [dict(space[at].mesh) for at in range(len(space))]
    [{'replica': 2, 'tensor': 4}, {'replica': 4, 'tensor': 2}, {'replica': 8}]
    """
    pins = dict(pins or {})
    check_pins(pins)
    space = _enumerated(choices, pins)
    if pins and not len(space):
        # If only memory is missing, the reasons give the required bytes.
        if choices.memory is None or not len(_enumerated(_roomy(choices), pins)):
            raise _impossible(_roomy(choices), pins)
    return space


def _roomy(choices: Choices) -> Choices:
    return replace(choices, memory=None)


def _enumerated(choices: Choices, pins: Mapping[str, Any]) -> Space:
    rules = _rules(choices, pins)
    meshes, reasons = _meshes(rules, pins)
    meshes = _with_fewer(meshes, rules, choices.fewer or (), reasons)
    host_size = choices.levels[0] if choices.levels else choices.num_devices
    known = baselines(rules, host_size)
    for baseline in known:
        meshes = meshes.joined(baseline.meshes)
    meshes, zero, reason = _with_zero(meshes, choices, pins)
    columns = _with_knobs(meshes, zero, choices, pins)
    columns["baseline"] = _numbers(columns, known)
    num_knobs = len(columns["batch"])
    rule = "these with each level of zero, remat and number of microbatches"
    reasons += [reason, Reason(rule=rule, left=num_knobs, of=num_knobs)]
    columns["room"] = np.ones(num_knobs, bool)
    if choices.memory is not None:
        columns, reason = _with_room(columns, choices.memory)
        reasons.append(reason)
    space = _with_orders(columns, choices, pins.get("order", ()), reasons)
    return replace(space, stage_layers=tuple(map(int, pins.get("stage_layers", ()))))


def _rules(choices: Choices, pins: Mapping[str, Any]) -> MeshRules:
    return MeshRules(
        num_devices=choices.num_devices,
        batch=choices.batch,
        divides=choices.divides,
        data_axes=choices.data_axes,
        pins=pinned_sizes(pins),
    )


def _meshes(rules: MeshRules, pins: Mapping[str, Any]) -> tuple[Meshes, list[Reason]]:
    """Enumerates meshes, and counts how many meshes remain after each rule.

    The rules are allowed sizes and pins, then that the mesh divides the batch. If no
    mesh of all devices divides it into two or more parts, meshes with a rounded-up
    batch or of fewer devices are added. Returns the meshes, and for each rule its text
    and counts.
    """
    num_devices, batch = rules.num_devices, rules.batch
    num = num_factorisations(num_devices, len(rules.divides))
    allowed, exact = rules.all(num_devices), rules.exact(num_devices)
    words = f"meshes of {num_devices} devices over {', '.join(rules.divides)} that "
    reasons = [
        Reason(rule=words + "keep to sizes and pins", left=len(allowed), of=num),
        Reason(
            rule=f"of these divide the batch of {batch}",
            left=len(exact),
            of=len(allowed),
        ),
    ]
    meshes = rules.workable()
    if len(meshes) > len(exact):
        rule = "meshes with the batch rounded up, as none divides it"
        reasons.append(
            Reason(rule=rule, left=len(meshes) - len(exact), of=len(allowed))
        )
    if not len(meshes) and len(replace(rules, pins={}).workable()):
        return meshes, reasons  # pins that need fewer devices are an error instead
    fewer = rules.fewer()
    if len(fewer):
        used = int(fewer.devices_used[0])
        rule = f"meshes of {used} of {num_devices} devices that divide the batch"
        reasons.append(Reason(rule=rule, left=len(fewer), of=len(fewer)))
    return meshes.joined(fewer), reasons


def _with_fewer(
    meshes: Meshes, rules: MeshRules, fewer: tuple[int, ...], reasons: list[Reason]
) -> Meshes:
    """Adds the meshes whose number of devices is in `fewer` and that divide the batch.

    Appends to `reasons` how many meshes of each number of devices are added.
    """
    for number in fewer:
        some = rules.exact(number)
        rule = f"meshes of {number} of {rules.num_devices} devices, searched too"
        reasons.append(Reason(rule=rule, left=len(some), of=len(some)))
        meshes = meshes.joined(some)
    return meshes


def _with_zero(
    meshes: Meshes, choices: Choices, pins: Mapping[str, Any]
) -> tuple[Meshes, np.ndarray, Reason]:
    """Combines meshes with ZeRO levels, or with the level that the user has fixed.

    A mesh whose axis `fsdp` has size one has level 0, any other mesh the levels above
    0. Returns the meshes, the level of each (int [meshes]), and how many meshes
    remain.
    """
    zeros = _left(sorted(choices.zero), pins.get("zero"))
    fsdp = meshes.sizes[:, AXES.index("fsdp")]
    row, at = np.nonzero((zeros > 0) == (fsdp > 1)[:, None])
    words = ", ".join(map(str, zeros.tolist())) or "none"
    reason = Reason(
        rule=f"meshes, baselines too, that have fsdp just if zero is not 0 ({words})",
        left=len(np.unique(row)),
        of=len(meshes),
    )
    return meshes.where(row), zeros[at], reason


def _with_knobs(
    meshes: Meshes, zero: np.ndarray, choices: Choices, pins: Mapping[str, Any]
) -> _Columns:
    """Combines meshes, each with its ZeRO level, with microbatches and remat policies.

    Offload, virtual stages and schedule have one value each: the one that the user has
    fixed, or the default.

    Args:
        meshes: the meshes.
        zero: the ZeRO level of each mesh; int [meshes].
        choices: the values that may be combined.
        pins: values that the user has fixed; other values of these settings are left
            out.

    Returns:
        The candidates as columns: map from a name to an array with one entry per
        candidate.
    """
    samples = meshes.batch // _rules(choices, pins).slots(meshes.sizes)
    parts = {part for each in np.unique(samples) for part in divisors(int(each))}
    counts = sorted(part for part in parts if part <= choices.max_microbatches)
    counts = _left(counts, pins.get("microbatches"))
    row, at = np.nonzero(samples[:, None] % counts == 0)
    microbatches, zero, meshes = counts[at], zero[row], meshes.where(row)

    remats = [REMATS.index(remat) for remat in choices.remat]
    pin = REMATS.index(pins["remat"]) if "remat" in pins else None
    remat = _left(sorted(remats), pin)
    row = np.repeat(np.arange(len(meshes)), len(remat))
    meshes = meshes.where(row)
    return {
        **{axis: meshes.sizes[:, at] for at, axis in enumerate(AXES)},
        "microbatches": microbatches[row],
        "zero": zero[row],
        "remat": np.tile(remat, len(microbatches)),
        **{
            name: np.full(len(row), value)
            for name, value in (
                ("offload", int(pins.get("offload", False))),
                ("virtual_stages", pins.get("virtual_stages", 1)),
                ("schedule", SCHEDULES.index(pins.get("schedule", SCHEDULES[0]))),
            )
        },
        "batch": meshes.batch,
        "devices_used": meshes.devices_used,
    }


def _left(values: list[int], pin: int | None) -> np.ndarray:
    kept = [value for value in values if pin is None or value == pin]
    return np.array(kept, np.int64)


def _sizes(columns: _Columns) -> np.ndarray:
    return np.stack([columns[axis] for axis in AXES], axis=1)


def _numbers(columns: _Columns, known: list[Baseline]) -> np.ndarray:
    """Finds the rule of thumb (baseline) that each candidate follows; int [candidates].

    A baseline is given by its number (position in `BASELINES`); 0 for none. A candidate
    follows a baseline if it has the baseline's axis sizes and ZeRO level. This level is
    0, or for a baseline that divides the state, the highest level of the candidates.

    Args:
        columns: the candidates, with columns for the axis sizes and `zero`.
        known: the baselines; if a candidate follows several, the first one counts.
    """
    sizes = _sizes(columns)
    numbers = np.zeros(len(sizes), np.int64)
    for baseline in reversed(known):  # the first match wins
        # FSDP uses the highest ZeRO level of the candidates.
        zero = columns["zero"].max(initial=0) if baseline.divided else 0
        same = (sizes == baseline.meshes.sizes).all(axis=1)
        numbers[same & (columns["zero"] == zero)] = baseline.number
    return numbers


def _with_room(columns: _Columns, memory: MemoryFloor) -> tuple[_Columns, Reason]:
    floor = memory.bytes_of(_sizes(columns), columns["zero"])
    room = floor <= memory.capacity
    least = f"; the least takes {floor.min():,.0f}" if len(floor) else ""
    reason = Reason(
        rule=f"have room for their state in {memory.capacity:,} bytes{least}",
        left=int(room.sum()),
        of=len(room),
    )
    columns["room"] = room
    return _selected(columns, room | (columns["baseline"] > 0)), reason


def _selected(columns: _Columns, rows: np.ndarray) -> _Columns:
    return {name: column[rows] for name, column in columns.items()}


def _with_orders(
    columns: _Columns, choices: Choices, before: tuple[str, ...], reasons: list[Reason]
) -> Space:
    """Combines candidates with the orders of their axes that may be best on the fabric.

    Each candidate becomes one candidate for each of these orders. If it is a baseline
    (mesh of a common rule of thumb), only the one with the first order still counts as
    a baseline. The others are left out if their state has no room.

    Args:
        columns: the candidates, with the column `room` (whether their state has room).
        choices: the choices, with the levels of the fabric.
        before: axes that the user has fixed to lie in this order, outermost first.
        reasons: the results of earlier rules, for `Space.reasons`.
    """
    sizes = _sizes(columns)
    meshes, mesh = np.unique(sizes, axis=0, return_inverse=True)
    levels = choices.levels or (choices.num_devices,)
    orders = undominated_orders(AXES, meshes, levels, before)
    num_orders = np.bincount(orders.mesh, minlength=len(meshes))
    first = np.cumsum(num_orders) - num_orders
    repeats = num_orders[mesh]
    row = np.repeat(np.arange(len(mesh)), repeats)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    columns = _selected(columns, row)
    columns["mesh"] = first[mesh[row]] + nth
    columns["order"] = orders.order[columns["mesh"]]
    usual = nth == 0
    columns["baseline"] *= usual
    columns = _selected(columns, columns.pop("room") | usual)
    num = len(columns["mesh"])
    rule = f"with each order on the fabric, for {len(mesh):,} without"
    reasons = [*reasons, Reason(rule=rule, left=num, of=num)]
    return Space(columns=columns, orders=orders.named, reasons=tuple(reasons))


def _impossible(choices: Choices, pins: Mapping[str, Any]) -> ValueError:
    pinned = ", ".join(f"{name}={value}" for name, value in pins.items())
    text = [f"{pinned} cannot be met on {choices.num_devices} devices"]
    text[0] += f" with a batch of {choices.batch}."
    alone = len(text)
    for name, value in pins.items():
        reason = why_not(choices, name, value)
        if reason:
            text.append(f"{name}={value}: {reason}.")
        others = {other: pins[other] for other in pins if other != name}
        near = _values_near(_enumerated(choices, others), name, value)
        if near:
            beside = ", the other pins as they are" if others else ""
            text.append(f"Nearest values of {name} that work{beside}: {near}.")
    sizes = pinned_sizes(pins)
    together = math.prod(sizes.values())
    if len(sizes) > 1 and choices.num_devices % together:
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        text.append(f"Together {shown} are {together} devices.")
    if len(text) == alone:
        text.append("No change of one pin alone makes the others work.")
    fewer = _rules(choices, pins).fewer()
    if len(fewer):
        used = int(fewer.devices_used[0])
        text.append(f"As pinned, {used} devices can be used: plan for these alone.")
    return ValueError(" ".join(text))


def _values_near(space: Space, name: str, value: Any) -> str:
    """Lists for an error the values of a setting that occur in a space, near `value`.

    For `remat`, lists all policies that occur; for other settings, the three numbers
    nearest to `value`. Of all candidates, reads only those that use the most devices.
    Returns '' for the pins `order` and `stage_layers`, and for an empty space.
    """
    if not len(space) or name in ("order", "stage_layers"):
        return ""
    used = space.columns["devices_used"]
    values = np.unique(space.columns[name][used == used.max()])
    if name == "remat":
        return ", ".join(REMATS[at] for at in values)
    return ", ".join(map(str, nearest(values, value)))


# Fewer devices. If some devices of the best mesh repeat the work of others (7 devices,
# a batch of 512), 4 devices may be faster. A number of devices is priced only if it
# divides the product of the batch and the size of a weight dim.


_MOST = 3
"""How many numbers of devices `worthwhile` returns at most. The search also gets the
meshes of each of these numbers."""


def worthwhile(
    question: Workload, pins: Mapping[str, Any], num_devices: int, batch: int
) -> tuple[int, ...]:
    """Returns smaller numbers of devices that can divide the work evenly.

    Returns up to three numbers (`_MOST`): the largest that divide the batch, or the
    batch times the size of a weight's dim. The data axes can then divide the batch, and
    `tensor` the dim.

    Args:
        question: the workload, whose weights have dims that `tensor` may divide.
        pins: settings that the user has fixed; each number of devices is a multiple of
            the product of the fixed axis sizes.
        num_devices: the number of all devices.
        batch: samples that the data axes divide.
    """
    graph = question.graph
    sizes = {math.gcd(*graph.dims[dim].sizes) for dim in candidates(question)} | {1}
    pinned = math.prod(pinned_sizes(pins).values())
    below = range((num_devices - 1) // pinned * pinned, 0, -pinned)
    shared = (n for n in below if any(batch * size % n == 0 for size in sizes))
    return tuple(n for n, _ in zip(shared, range(_MOST), strict=False))
