"""Finds small changes of a model or batch that would save time or memory.

A finding names what costs time or memory: a size that does not suit matmuls or mesh
axes, an array that is whole on every device, devices that are idle or repeat the work
of others; or a better batch near the given one. It states the seconds or bytes that a
change would save, if they are known. A `Decision` is a selected plan, with its
workload, cluster, pins and all candidates.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from dtft.planner import wording
from dtft.planner.cluster import Cluster, DeviceType, ProductRate
from dtft.planner.cost import matmul_s, runs, shape_factor
from dtft.planner.ir import (
    ATTENTION,
    CHEAP,
    PRODUCTS,
    RUNS_ON,
    Dim,
    Graph,
    OpGroup,
    has_ragged_matmul,
    item_bits,
    num_groups,
)
from dtft.planner.plan import Plan
from dtft.planner.report.text import little
from dtft.planner.search import (
    Decision,
    arrays_of,
    attention_scores,
    best_of,
    group_s,
    without_idle,
    without_scores,
)
from dtft.planner.spmd import MICRO, OperatorWork
from dtft.planner.types import Spec
from dtft.planner.wording import layered, percent, seconds, share, size
from dtft.planner.workload import Role, Workload

# Nearby batches and fewer devices. If the batch is not divisible by the device count
# (five devices, a prime batch), the plan leaves devices unused or divides other dims.
# The plans of the nearest divisible batches show the price. If launches and collectives
# dominate a small step, one device alone may be faster, so this is planned too.


_SMALL = 0.5
"""If launches and collectives take at least this share of a step, the step is compared
with that of a plan for one device."""


@dataclass(frozen=True, kw_only=True)
class Nearby:
    """A batch size near the workload's, and the best plan whose mesh divides it."""

    batch: int
    """Examples of the batch."""
    plan: Plan
    """The plan; its prediction is for the workload's own batch, not for `batch`."""
    step_s: float
    """Seconds of a step of `batch` examples."""

    @property
    def sample_s(self) -> float:
        """Seconds of a step per example."""
        return self.step_s / self.batch

    def __str__(self) -> str:
        if not self.plan.fits:
            return f"{self.batch} does not fit"
        error = self.plan.prediction.relative_error
        return (
            f"{self.batch} takes {seconds(self.step_s, error)} per step, "
            f"{seconds(self.sample_s, error)} per example "
            f"({wording.mesh(self.plan.mesh)})"
        )


def batches(decision: Decision) -> tuple[Nearby, ...]:
    """Finds the best plans for the nearest batch sizes that the device count divides.

    The batch sizes are the multiples of the device count next below and next above the
    workload's batch. A batch size is left out if no mesh for it has the settings that
    the user has fixed, or if every plan for it repeats work on some devices. Compute
    seconds are those of the workload's batch, scaled with the batch size; all other
    terms stay the same. Returns () if the batch is a multiple of the device count, or
    the device count is a multiple of the batch.
    """
    asked, there = decision.question.batch_size, decision.cluster.num_devices
    if math.gcd(asked, there) == min(asked, there):
        return ()
    near = (asked // there * there, -(-asked // there) * there)
    found = (_at(decision, asked, batch) for batch in near if batch)
    return tuple(one for one in found if one is not None)


def _examples_each(question: Workload) -> int:
    """Returns how many examples each element of the batch's divisible dim stands for.

    The divisible dim is the one that mesh axes can divide (`question.batch_size` is its
    size). A loss that reshapes its 64 examples to 8 x 8 has a divisible dim of size 8,
    so the result is 8. Without such a reshape the result is 1.
    """
    each, rest = divmod(question.num_examples, max(1, question.batch_size))
    return 1 if rest else max(1, each)


def _at(decision: Decision, asked: int, batch: int) -> Nearby | None:
    """Finds the best plan for another batch size.

    Both batch sizes are sizes of the dim that mesh axes can divide. An element of this
    dim can stand for several examples (`_examples_each`).

    Args:
        decision: the decision for the workload's own batch.
        asked: the workload's own batch size.
        batch: the other batch size.

    Returns:
        The other batch size in examples, its best plan in which no device repeats the
        work of others, and the seconds of a step; None if no mesh for this batch size
        has the settings that the user has fixed, or if there is no such plan.
    """
    try:
        best = best_of(
            decision.question,
            decision.cluster,
            decision.pins,
            what_if=decision.what_if,
            batch=batch,
        )
    except ValueError:  # pins that need fewer devices
        return None
    busy = without_idle(best) if best.idle and best.plan.fits else best
    if busy is None:
        return None
    found = busy.plan
    more = found.prediction.terms["compute"] * (batch / asked - 1)
    examples = batch * _examples_each(decision.question)
    return Nearby(batch=examples, plan=found, step_s=found.prediction.step_s + more)


def batch_text(decision: Decision) -> tuple[str, float]:
    """Describes the seconds lost because the devices do not divide the batch evenly.

    Returns a text ('' for nothing to report) and the seconds of a step that another
    batch would save:

    * If a pin (a setting that the user has fixed) leaves no mesh that divides the
      batch: a text on padding rows, and the seconds that the padding adds.
    * If no nearby batch sizes are compared (`batches` is empty): a text on unused
      devices, or '' if all devices are used; and 0.
    * Otherwise: a text on the nearby batch sizes, and the seconds that the fastest of
      them saves per example, times the number of examples. If none of them is faster,
      the seconds are 0. Then the text is '' if all devices are used and none repeats
      the work of others.
    """
    each, there = _examples_each(decision.question), decision.cluster.num_devices
    asked = max(1, decision.question.batch_size) * each
    plan, rows = decision.plan, decision.candidate.batch * each
    error = plan.prediction.relative_error
    if rows > asked:  # a pin leaves no mesh that divides it
        more_s = plan.prediction.step_s * (rows / asked - 1)
        return (
            f"the mesh does not divide the batch of {asked}: give it {rows} rows, "
            f"{rows - asked} of them padding that the loss leaves out (by a mask in "
            f"the batch). They take up to {seconds(more_s, error)} of a step "
            f"({percent(rows / asked - 1)}) on top of what is predicted. Or plan "
            f"without the pin, or for a batch of {rows}"
        ), more_s
    known = batches(decision)
    used = math.prod(plan.mesh.values())
    if not known:
        return (_fewer_text(decision) if used < there else ""), 0.0
    here_s = plan.prediction.step_s / asked
    faster = [one for one in known if one.plan.fits and one.sample_s < here_s]
    if used == there and not faster and not decision.idle:
        return "", 0.0
    saved = max((here_s - one.sample_s for one in faster), default=0.0) * asked
    stands = "they repeat work of each other" if decision.idle else "the plan stands"
    used_text = f"{used} of {there} devices are used" if used < there else stands
    text = (
        f"{there} devices do not divide the batch of {asked}: {used_text}, at "
        f"{seconds(here_s, error)} per example{_on_all(decision)}"
    )
    return (
        f"{text}. Nearest that they divide: {_listed(known)}. To use all, make the "
        "batch one of these and plan again"
    ), saved


def _fewer_text(decision: Decision) -> str:
    """Describes how many of the devices the plan uses, its mesh and its step's seconds.

    The text is for plans that use fewer devices than there are. If a plan that uses all
    devices fits, the text also has the seconds of the fastest such plan.
    """
    plan, there = decision.plan, decision.cluster.num_devices
    used = math.prod(plan.mesh.values())
    step = seconds(plan.prediction.step_s, plan.prediction.relative_error)
    return (
        f"{used} of {there} devices are used ({wording.mesh(plan.mesh)}), at "
        f"{step} per step{_on_all(decision)}"
    )


def _on_all(decision: Decision) -> str:
    """Describes the step seconds of the fastest searched plan that uses all devices.

    Returns '' if the selected plan itself uses all devices, or if no plan that uses all
    devices fits.
    """
    there, least_s = decision.cluster.num_devices, math.inf
    for one in decision.found.values():
        space, priced = one.priced.space, one.priced
        rows = priced.fits & (space.columns["devices_used"] == there)
        least_s = min(least_s, priced.step_s.min(initial=math.inf, where=rows))
    used = math.prod(decision.plan.mesh.values())
    if used == there or math.isinf(least_s):
        return ""
    least = seconds(least_s, decision.plan.prediction.relative_error)
    return f" (all {there} take {least} per step)"


def _listed(known: tuple[Nearby, ...]) -> str:
    return ", ".join(map(str, known))


def alone_text(decision: Decision) -> tuple[str, float]:
    """Describes how many seconds of a step one device alone would save.

    Returns a text and the saved seconds. Both are empty ("" and 0.0) in these cases:

    * One device is not faster, or has too little memory. (The plan for one device keeps
      none of the settings that the user has fixed.)
    * The decision's plan uses one device.
    * Launches and collectives take less than half (`_SMALL`) of the plan's step.
    """
    terms, step_s = decision.plan.prediction.terms, decision.plan.prediction.step_s
    used = math.prod(decision.plan.mesh.values())
    waited = terms["launch"] + terms["collectives"]
    if used == 1 or waited < _SMALL * step_s:
        return "", 0.0
    pool = replace(decision.cluster.uniform, levels=())
    alone = best_of(decision.question, Cluster(pools=(pool,))).plan
    saved = step_s - alone.prediction.step_s
    if not alone.fits or saved <= 0:
        return "", 0.0
    error = decision.plan.prediction.relative_error
    return (
        f"one device alone takes {seconds(alone.prediction.step_s, error)} per step, "
        f"{seconds(saved, error)} ({share(saved, step_s, error)}) less than {used}: "
        "the step is mostly starts and messages, which more devices do not shorten"
    ), saved


LEAST = 0.005
"""Least share of a step's seconds that a finding on matmul sizes or attention scores
must cost to be reported."""
_LEAST_BYTES = 2**20
_SHARE = 0.01
"""Least share to be reported: of the bytes of all parameters (or of all optimizer
state) for an array, of a step's flops for a dim or a dtype."""


@dataclass(frozen=True, kw_only=True)
class Lint:
    """One finding on a model or batch, with its cost in seconds or bytes if known."""

    kind: Literal[
        "alignment",
        "tiles",
        "indivisible",
        "replicated",
        "batch",
        "repeated",
        "attention",
        "ragged",
        "precision",
        "constants",
        "unpriced",
        "unsupported",
    ]
    text: str
    cost_s: float = 0.0
    """Seconds of a step that the finding costs; 0 if none, or if they are unknown."""
    num_bytes: int = 0
    """Bytes of each device that the finding costs; 0 if none."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def find_lints(decision: Decision) -> tuple[Lint, ...]:
    """Lists all findings without duplicates, the most serious kind first.

    The order is: kernels that do not run on the devices, repeated work, batches,
    attention scores in memory, ragged matmuls in which XLA multiplies all rows by every
    group's matrix, dtypes without a known peak, matmul sizes, indivisible dims,
    replicated arrays, arrays that the program closes over, and operators without a cost
    rule.
    """
    found = (
        *kernels(decision),
        *repeated(decision.plan),
        *batch(decision),
        *attention(decision),
        *ragged(decision),
        *precision(decision),
        *products(decision),
        *indivisible(decision),
        *replicated(decision),
        *constants(decision),
        *unpriced(decision),
    )
    return tuple(dict.fromkeys(found))


# ----------------------------------------------------------------- sizes of matmuls


def products(decision: Decision) -> tuple[Lint, ...]:
    """Finds matmuls whose sizes do not suit the device, costliest first.

    Either a size is no multiple of the device's alignment, or the last tiles of the
    matmul are only partly filled (a device multiplies in tiles of a fixed size).
    Findings that cost less than 0.5 % (`LEAST`) of a step are left out.
    """
    lost: dict[tuple[str, str], float] = defaultdict(float)
    where: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for group, done, sizes in _works(decision):
        if not done.sizes:
            continue
        for kind, text, cost_s in _product(decision, group, done, sizes):
            lost[kind, text] += cost_s
            where[kind, text][_name(decision.question.graph, group)] += 1
    step_s = decision.plan.prediction.step_s
    error = decision.plan.prediction.relative_error
    ranked = sorted(lost.items(), key=lambda item: -item[1])
    found = []
    for (kind, text), cost_s in ranked:
        if cost_s >= LEAST * step_s:
            price = f"{seconds(cost_s, error)} of a step "
            price += f"({share(cost_s, step_s, error)})"
            places = ", ".join(list(where[kind, text])[:3])
            line = f"{text}: {price}, in {places}"
            known = "alignment" if kind == "alignment" else "tiles"
            found.append(Lint(kind=known, text=line, cost_s=cost_s))
    return tuple(found)


def _works(
    decision: Decision,
) -> Iterable[tuple[OpGroup, OperatorWork, dict[str, Any]]]:
    """Yields each group of operators, its work on one device, and the axis sizes.

    A group has operators of equal cost, or operators that XLA fuses (`OpGroup`). The
    work is that of one execution under the selected plan. The sizes also have the
    number of microbatches, as if it were the size of an axis (`MICRO`).
    """
    chosen, candidate = decision.found[decision.plan.knobs.remat], decision.candidate
    sizes = {**candidate.mesh, MICRO: candidate.knobs.microbatches}
    division = chosen.priced.division_of(decision.at)
    for group, done in chosen.search.works(division):
        yield group, done, sizes


def _product(
    decision: Decision, group: OpGroup, done: OperatorWork, sizes: dict[str, Any]
) -> Iterable[tuple[str, str, float]]:
    """Yields the findings on the sizes of one group of equal matmuls.

    A finding has its kind ("alignment": a size is no multiple of the alignment;
    "tiles": the device's tiles are not filled), a text, and the wasted seconds per
    step.

    Args:
        decision: the decision, with the workload and the device.
        group: the group of matmuls.
        done: the work of a device in one execution.
        sizes: map from a mesh axis to its size; also has the number of microbatches.
    """
    question, device = decision.question, decision.cluster.uniform.device
    dtype = question.graph.operand_dtype(group.operator)
    how = group.operator.precision
    *shape, number = (float(amount.at(sizes)) for amount in done.sizes)

    def takes(rows: float, columns: float, depth: float) -> float:
        return float(matmul_s(device, rows, columns, depth, number, dtype, how))

    times = group.times * runs(done, sizes)
    row = max(1, device.alignment_bytes * 8 // item_bits(dtype))
    odd = [at for at in (1, 2) if shape[at] % row]
    if odd:
        fitting = [-(-n // row) * row if at else n for at, n in enumerate(shape)]
        gain = takes(*shape) - takes(*fitting)
        pairs = sorted({(shape[at], fitting[at]) for at in odd})
        text = (
            f"{' and '.join(f'{n:g}' for n, _ in pairs)} on a device, no multiple of "
            f"{row} ({device.alignment_bytes} bytes of {dtype}) as "
            f"{' and '.join(f'{n:g}' for _, n in pairs)} is"
        )
        yield "alignment", text, times * gain
    tiles = [math.ceil(n / tile) for n, tile in zip(shape, device.tile, strict=True)]
    padded = [n * tile for n, tile in zip(tiles, device.tile, strict=True)]
    used = math.prod(shape) / math.prod(padded)
    rows, columns, depth = shape
    if used < 1 and shape_factor(device, rows, columns, depth, number, dtype) <= used:
        sides = " x ".join(f"{n:g}" for n in shape)
        text = f"a matmul of {sides} on a device fills {percent(used)} of its tiles"
        yield "tiles", text, times * takes(*shape) * (1 - used)


# ----------------------------------------------------------------- attention


_CUDNN = "jax.nn.dot_product_attention with implementation='cudnn'"


def attention(decision: Decision) -> tuple[Lint, ...]:
    """Finds attention whose scores are arrays in memory, costliest first.

    Returns () for CPU, which has no kernel that keeps scores on the chip. Findings that
    cost less than 0.5 % (`LEAST`) of a step are left out. The first finding has the
    seconds and bytes that the best plan without any scores in memory saves.
    """
    question, device = decision.question, decision.cluster.uniform.device
    if device.platform == "cpu":
        return ()
    kernel = _CUDNN if _runs(ATTENTION[0], device) else "one of Pallas"
    cost_s: dict[tuple[int, ...], float] = defaultdict(float)
    found = attention_scores(question)
    for group, done, sizes in _works(decision):
        operator = group.operator
        if operator.kind not in (*CHEAP, "reduction"):
            continue
        known = found.keys() & arrays_of(question, group)
        for dims in known:
            all_s = group_s(question.graph, device, group, done, sizes)
            cost_s[found[dims]] += all_s / len(known)
    step_s = decision.plan.prediction.step_s
    error = decision.plan.prediction.relative_error
    lints = [
        Lint(
            kind="attention",
            text=f"scores of {_times(shape)} in all are read and written in memory: "
            f"{seconds(each_s, error)} of a step "
            f"({share(each_s, step_s, error)}). A fused kernel keeps them on the chip, "
            f"such as {kernel}",
            cost_s=each_s,
        )
        for shape, each_s in sorted(cost_s.items(), key=lambda item: -item[1])
        if each_s >= LEAST * step_s
    ]
    if lints:
        lints[0] = _with_fused(lints[0], decision)
    return tuple(lints)


def _with_fused(lint: Lint, decision: Decision) -> Lint:
    """Adds to a finding on attention what the best plan with fused attention saves.

    Fused attention keeps no scores in memory, which may make room for a faster mesh. So
    the plan may save more than the time of reading and writing scores. What a kernel
    saves further by skipping scores that a mask hides is not counted. A plan that saves
    nothing is not mentioned.
    """
    plan = decision.plan
    fused = best_of(
        without_scores(decision.question),
        decision.cluster,
        decision.pins,
        what_if=decision.what_if,
    ).plan
    saved_s = plan.prediction.step_s - fused.prediction.step_s
    saved_bytes = plan.memory_bytes - fused.memory_bytes
    if saved_s <= 0 or not fused.fits:
        return lint
    error = plan.prediction.relative_error
    text = (
        f"{lint.text}. The best plan with it ({wording.mesh(fused.mesh)}) takes about "
        f"{seconds(saved_s, error)} less "
        f"({share(saved_s, plan.prediction.step_s, error)})"
    )
    if saved_bytes > 0:
        text += f", and {size(saved_bytes)} less on a device"
    return replace(lint, text=text, cost_s=saved_s, num_bytes=max(0, saved_bytes))


# ----------------------------------------------------------------- ragged matmuls


def ragged(decision: Decision) -> tuple[Lint, ...]:
    """Finds ragged matmuls in which XLA multiplies all rows by every group's matrix.

    A ragged matmul (`jax.lax.ragged_dot`) multiplies groups of rows by one matrix each.
    Returns at most one finding, for all of them together; () if there are none, and for
    platforms on which XLA multiplies each group only by its own matrix.
    """
    graph, device = decision.question.graph, decision.cluster.uniform.device
    groups, step_s, cost_s = 1, decision.plan.prediction.step_s, 0.0
    if has_ragged_matmul(device.platform):
        return ()
    for group, done, sizes in _works(decision):
        number = num_groups(graph, group.operator)
        groups = max(groups, number)
        all_s = group_s(graph, device, group, done, sizes)
        cost_s += all_s * (1 - 1 / number)
    if groups == 1:
        return ()
    error = decision.plan.prediction.relative_error
    text = (
        f"for ragged_dot, XLA multiplies all rows by the matrices of all {groups} "
        f"groups and keeps those of each row's own: {seconds(cost_s, error)} of a step "
        f"({share(cost_s, step_s, error)}). No axis of the plan divides its rows or "
        "its groups. Give each expert a fixed number of rows, in an array with a dim "
        "of experts (jnp.einsum): axis expert divides these. Or divide the rows by "
        "yourself, in a jax.shard_map that exchanges them: each device multiplies "
        "those of its own experts"
    )
    return (Lint(kind="ragged", text=text, cost_s=cost_s),)


# ----------------------------------------------------------------- kernels


def kernels(decision: Decision) -> tuple[Lint, ...]:
    """Finds custom kernels that do not run on the devices that the plan is for.

    The planner predicts their seconds as if they ran on these devices.
    """
    question, device = decision.question, decision.cluster.uniform.device
    names = dict.fromkeys(group.operator.primitive for group in question.groups)
    rules = dict.fromkeys(RUNS_ON[name] for name in names if not _runs(name, device))
    return tuple(
        Lint(
            kind="unsupported",
            text=f"{rule.words} does not run on {device.name}, but is priced as if it "
            f"did: it runs on {rule}. Take {rule.instead}, or plan for other devices",
        )
        for rule in rules
    )


def _runs(kernel: str, device: DeviceType) -> bool:
    """Returns whether a custom kernel runs on a device.

    `kernel` is the name of its primitive. `RUNS_ON` lists the kernels that need a dtype
    or platform. A primitive that is not listed is assumed to run on all devices.
    """
    rule = RUNS_ON.get(kernel)
    if rule is None:
        return True
    listed = not rule.dtype or device.rate(rule.dtype).listed
    return listed and (not rule.platforms or device.platform in rule.platforms)


# ----------------------------------------------------------------- precision


def precision(decision: Decision) -> tuple[Lint, ...]:
    """Finds matmuls and convolutions in a dtype for which the device lists no peak.

    Custom kernels, such as cuDNN's attention, count too. A finding says which peak is
    used instead, and is for all operators with this peak. The finding with the most
    operations is first. Findings with less than 1 % (`_SHARE`) of the operations of
    matmuls, convolutions and kernels are left out.
    """
    question, device = decision.question, decision.cluster.uniform.device
    flops: dict[ProductRate, float] = defaultdict(float)
    for group in question.groups:
        operator = group.operator
        if operator.kind in PRODUCTS:
            dtype = question.graph.operand_dtype(operator)
            rate = device.rate(dtype, operator.precision)
            flops[rate] += operator.flops * group.times
    every = sum(flops.values())
    return tuple(
        Lint(
            kind="precision",
            text=f"{device.unlisted_text(rate)}. It is in {percent(each / every)} of "
            "the operations of matmuls, convolutions and custom kernels",
        )
        for rate, each in sorted(flops.items(), key=lambda item: -item[1])
        if not rate.listed and each >= _SHARE * every
    )


# ----------------------------------------------------------------- operators


def unpriced(decision: Decision) -> tuple[Lint, ...]:
    """Finds operators without a cost rule, and while loops of unknown trip count.

    The planner computes the seconds of these operators from their bytes alone, and
    counts one iteration of these loops.
    The finding with the most bytes is first.
    """
    unknown = decision.question.graph.unknown
    found: list[Lint] = []
    for name, num_bytes in sorted(unknown.items(), key=lambda item: -item[1]):
        moved = (
            f"the {size(num_bytes)} that it reads and writes in a step of all devices"
        )
        if name == "while":
            text = (
                f"a while loop with an unknown trip count is priced as one iteration: "
                f"{moved}. A lax.scan or lax.fori_loop has a known one"
            )
        else:
            text = (
                f"{name} has no rule, so it is priced by {moved}. If it computes much, "
                f"call dtft.planner.register_kernel({name!r}, flops), or give a "
                "pallas_call its cost_estimate"
            )
        found.append(Lint(kind="unpriced", text=text))
    return tuple(found)


def _name(graph: Graph, group: OpGroup) -> str:
    shape = graph.values[group.operator.outputs[0]].shape
    return f"{group.region} {group.operator.primitive} {_times(shape)}"


def _times(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


# ----------------------------------------------------------------- dims and axes


def indivisible(decision: Decision) -> tuple[Lint, ...]:
    """Finds dims of large matmuls and convolutions that axis `tensor` cannot divide.

    If the plan's mesh has no axis `tensor`, the size of the axis is taken to be the
    smallest factor above 1 of the device count. Returns () for one device.
    """
    parts = decision.plan.mesh.get("tensor", 1)
    if parts == 1:
        parts = _smallest_factor(decision.cluster.num_devices)
    if parts == 1:
        return ()
    found = undivided(decision.question, parts)
    return tuple(
        Lint(kind="indivisible", text=f"tensor={parts} cannot divide {text}")
        for text in found
    )


def undivided(question: Workload, parts: int) -> tuple[str, ...]:
    """Describes dims of large matmuls and convolutions that `parts` does not divide.

    There is one text per dim, with the reason; the dim with the most flops is first.
    Dims that index examples or positions (of tokens) are left out, because other axes
    divide them. Dims of at most `parts` elements and dims that a loop slices are left
    out, too. So are dims whose operators have less than 1 % (`_SHARE`) of all flops.

    Args:
        question: the workload.
        parts: the size of the axis `tensor`.
    """
    graph, seen = question.graph, {}
    data = {*question.batch_dims, *question.sequence_dims}
    for group in question.groups:
        operator = group.operator
        if operator.kind not in ("matmul", "convolution"):
            continue
        part = operator.flops * group.times / max(1.0, graph.flops)
        for index in (*operator.inputs, *operator.outputs):
            for dim in graph.values[index].dims:
                root = question.root(dim)
                known = graph.dims[dim]
                if root in data or known.loop or known.divisible_by(parts):
                    continue
                if known.sizes[-1] > parts:
                    text = f"{_why(known, parts)} ({_name(graph, group)})"
                    seen.setdefault(root, [text, 0.0])[1] += part
    ranked = sorted(seen.values(), key=lambda item: -item[1])
    return tuple(text for text, part in ranked if part >= _SHARE)


def undivided_text(question: Workload, parts: int) -> str:
    """Describes up to four dims that `parts` does not divide, in one text.

    These are the dims with the most flops (`undivided`). Returns '' if there are none.

    Args:
        question: the workload.
        parts: the size of the axis `tensor`.
    """
    found = undivided(question, parts)
    return f"tensor={parts} cannot divide {'; '.join(found[:4])}" if found else ""


def _why(dim: Dim, parts: int) -> str:
    whole, first = dim.sizes[-1], dim.sizes[0]
    if whole % parts:
        return f"{whole}, whose next multiple is {-(-whole // parts) * parts}"
    return f"{whole}, whose leading part is {first}"


def _smallest_factor(number: int) -> int:
    return next((part for part in range(2, number + 1) if number % part == 0), 1)


# ----------------------------------------------------------------- arrays and batch


def replicated(decision: Decision) -> tuple[Lint, ...]:
    """Finds large parameters and optimizer state that are whole on every device.

    Reports them only if the mesh has an axis that could divide them: `tensor`, or
    `fsdp` at a ZeRO level that divides such arrays. Arrays below 1 MiB
    (`_LEAST_BYTES`), or below 1 % (`_SHARE`) of the bytes of all parameters (or of all
    optimizer state), are left out.
    """
    question, plan = decision.question, decision.plan
    found: dict[str, list[int]] = defaultdict(list)
    levels: dict[Role, int] = {"parameter": 3, "optimizer": 1}
    for role, level in levels.items():
        axes = _dividing(plan, level)
        if axes:
            _collect(found, question, plan, role, axes)
    ranked = sorted(found.items(), key=lambda item: -sum(item[1]))
    return tuple(
        Lint(
            kind="replicated",
            text=f"{text}: {size(sum(each))} on every device",
            num_bytes=sum(each),
        )
        for text, each in ranked
    )


def _dividing(plan: Plan, level: int) -> tuple[str, ...]:
    """Selects the mesh axes of size above 1 that could divide an array.

    These are `tensor`, and `fsdp` if the plan's ZeRO level is at least `level`.

    Args:
        plan: the plan.
        level: the least ZeRO level at which `fsdp` divides the array: 1 for optimizer
            state, 3 for parameters.
    """
    names = ("fsdp", "tensor") if plan.knobs.zero >= level else ("tensor",)
    return tuple(axis for axis in names if plan.mesh.get(axis, 1) > 1)


def _collect(
    found: dict[str, list[int]],
    question: Workload,
    plan: Plan,
    role: Role,
    axes: tuple[str, ...],
) -> None:
    graph = question.graph
    values = {p: graph.values[graph.inputs[p]] for p in question.paths(role)}
    least = _SHARE * sum(value.num_bytes for value in values.values())
    for path, value in values.items():
        if value.num_bytes < max(least, _LEAST_BYTES) or any(_spec(plan, path)):
            continue
        fitting = any(n % plan.mesh[a] == 0 for n in value.shape for a in axes)
        why = "dividing it saves no time" if fitting else "no dim is divisible"
        over = ", ".join(f"{axis}={plan.mesh[axis]}" for axis in axes)
        text = f"{layered(path)} ({_times(value.shape)}) is whole beside {over}, {why}"
        found[text].append(value.num_bytes)


def _spec(plan: Plan, path: str) -> Spec:
    """Returns the spec with which a leaf of the state is kept between steps.

    Args:
        plan: the plan.
        path: the leaf's path in the traced program; its first part names the tree, such
            as `optimizer`.
    """
    tree, _, rest = path.partition("/")
    specs = plan.optimizer if tree == "optimizer" and plan.optimizer else plan.state
    return specs[rest]


def constants(decision: Decision) -> tuple[Lint, ...]:
    """Finds arrays that the step or loss closes over, if they take much memory.

    They take much if they have at least 1 MiB (`_LEAST_BYTES`), and at least 1 %
    (`_SHARE`) of a device's memory.
    """
    question, plan = decision.question, decision.plan
    num_bytes = question.constant_bytes
    if num_bytes < max(_LEAST_BYTES, _SHARE * plan.capacity_bytes):
        return ()
    text = (
        f"arrays that the {question.entry} closes over are constants of the program: "
        f"{size(num_bytes)} whole on every device. Plan with step=, state=, batch= and "
        "put them into the state, so that axes can divide them"
    )
    return (Lint(kind="constants", text=text, num_bytes=num_bytes),)


def batch(decision: Decision) -> tuple[Lint, ...]:
    """Finds the seconds that a better number of examples or devices would save.

    The findings are on a batch that the devices do not divide, on unused devices, and
    on a step that one device alone would run faster.
    """
    known = (batch_text(decision), alone_text(decision))
    return tuple(
        Lint(kind="batch", text=text, cost_s=cost_s) for text, cost_s in known if text
    )


def repeated(plan: Plan) -> tuple[Lint, ...]:
    """Finds mesh axes that divide no array, or less than half of the work.

    The devices along such an axis repeat the same work.
    """
    specs = (plan.state, plan.optimizer, plan.batch, plan.constraints)
    used = {
        axis
        for found in specs
        for spec in found.values()
        for part in spec
        for axis in part
    }
    texts = dict(little(plan)) | {
        axis: f"{axis}={number} divides no array: these {number} devices do the "
        "work of one"
        for axis, number in plan.mesh.items()
        if number > 1 and axis not in used and axis != "stage"
    }
    return tuple(Lint(kind="repeated", text=text) for text in texts.values())
