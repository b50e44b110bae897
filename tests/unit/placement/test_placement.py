"""Where operators of a program go: each clause of the rule, and never a bad answer."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.placement.api import place, place_tasks
from dtft.placement.heuristics import split
from dtft.placement.kernels import Kernels
from dtft.placement.list_scheduler import as_they_come, by_rank, schedule
from dtft.placement.nodes import Nodes
from dtft.placement.problem import Problem
from dtft.placement.result import Placement
from dtft.placement.tasks import Passed, Tasks, tasks_of
from dtft.planner.cluster.topology import Cluster, cluster_from_text
from dtft.planner.ir.graph import Graph
from dtft.planner.ir.tracing import trace
from experiments.placement_cases import Case

LAB = """
name: lab
pools:
  - shorthand: h100
  - device:
      name: fpga
      platform: other
      peak_flops: {float32: 1.0e15}
      memory_bytes: 8.0e9
      memory_bandwidth: 1.0e13
      kernels: [conv, layout]
  - device:
      name: asic
      platform: other
      peak_flops: {float32: 1.0e12}
      memory_bytes: 8.0e9
      memory_bandwidth: 1.0e14
      kernels: [activation]
between: {kind: PCIe, latency_s: 1.0e-7, bandwidth: 1.0e12}
"""
FPGA, ASIC = "fpga:0", "asic:0"


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32")


@pytest.fixture(scope="module")
def program() -> Graph:
    """A convolution, an activation, a dense layer."""

    def run(kernel: jax.Array, dense: jax.Array, x: jax.Array) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=dims
        )
        return jnp.tanh(h) @ dense

    return trace(run, shape(7, 7, 256, 256), shape(256, 256), shape(32, 64, 64, 256))


@pytest.fixture(scope="module")
def lab() -> Cluster:
    return cluster_from_text(LAB)


def on(placement: Placement, name: str) -> str:
    """The node of the first task whose name ends so."""
    task = next(t for t, words in enumerate(placement.tasks) if words.endswith(name))
    return placement.nodes[placement.node_of[task]]


def chain(seconds: list[list[float]], num_bytes: float = 0.0) -> Tasks:
    """Tasks that each read what the one before made."""
    return Tasks(
        names=tuple(f"task {number}" for number in range(len(seconds))),
        kinds=("matmul",) * len(seconds),
        seconds=np.array(seconds),
        passed=tuple(
            Passed(producer=task, num_bytes=num_bytes, readers=(task + 1,))
            for task in range(len(seconds) - 1)
        ),
    )


def test_only_nodes_that_have_a_kernel_run_an_operator(
    program: Graph, lab: Cluster
) -> None:
    placement = place(program, lab)
    assert on(placement, "conv_general_dilated") in (FPGA, "h100:0")
    assert on(placement, "dot_general") == "h100:0"
    slow = place(program, lab, [0.0, 1.0, 1.0], kernels=registered("fpga", "dense"))
    assert on(slow, "dot_general") == FPGA and on(slow, "tanh") == ASIC


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": "depth"}, "order='depth'. Allowed: rank, traversal"),
        ({"grain": "layer"}, "grain='layer'. Allowed: operator, block"),
        ({"backward": "yes"}, "backward='yes'. Allowed: True, False"),
        ({"together": [5]}, r"together=\[5\]. Allowed: pairs of the first"),
        ({"together": [[100]]}, r"together=\[\[100\]\]. Allowed: pairs"),
        ({"together": None}, "together=None. Allowed: pairs"),
        ({"cluster": "h100", "weights": [1e-320]}, "weight 0, or next to it"),
        ({"moves": 1.5}, "moves=1.5 is no whole number of 0 or more"),
        ({"moves": -1}, "moves=-1 is no whole number"),
        ({"microbatches": 2.0}, "microbatches=2.0 is no whole number of 1 or more"),
        ({"weights": {"fpga:0": 1.0}}, "weights=.*finite number of 0 or more for each"),
        ({"weights": ["fast"] * 3}, r"weights=\['fast.*each of 3 nodes \(h100:0"),
        ({"weights": 1.0}, "weights=1.0. Allowed"),
        ({"cluster": None}, "cluster=None is no cluster, but a NoneType"),
        ({"graph": len}, "Trace it first: dtft.planner.trace"),
    ],
)
def test_arguments_of_another_kind_are_refused(
    program: Graph, lab: Cluster, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        place(**{"graph": program, "cluster": lab, **options})


def registered(device: str, *names: str) -> Kernels:
    return Kernels(registered={device: frozenset(names)})


def test_what_no_registry_has_is_not_there(program: Graph, lab: Cluster) -> None:
    others = Cluster(pools=lab.pools[1:], between=lab.between)
    with pytest.raises(ValueError, match=r"no node has a kernel for dot_general.*fpga"):
        place(program, others)
    bare = cluster_from_text(LAB.replace("      kernels: [activation]\n", ""))
    only = Cluster(pools=bare.pools[2:])
    with pytest.raises(ValueError, match="no node has a kernel for conv_general"):
        place(program, only)


def test_what_jax_cannot_lower_is_not_there(program: Graph) -> None:
    dot = next(n for n, op in enumerate(program.operators) if op.kind == "matmul")
    lacking = Kernels(lacking={"cuda": frozenset({dot})})
    placement = place(program, "h100+v5e", kernels=lacking)
    assert placement.types[placement.of_operator[dot]] != "h100"


def test_a_custom_kernel_runs_only_where_it_is_registered(lab: Cluster) -> None:
    graph = trace(lambda x: jnp.tanh(x) + 1, shape(8, 8))
    custom = replace(graph.operators[0], primitive="ffi_call", kind="opaque")
    changed = replace(graph, operators=(custom, *graph.operators[1:]))
    with pytest.raises(ValueError, match="no node has a kernel for ffi_call"):
        place(changed, lab)
    placement = place(changed, lab, kernels=registered("gpu", "ffi_call"))
    assert on(placement, "ffi_call") == "h100:0"
    listed = replace(lab.pools[0].device, kernels=frozenset({"ffi_call", "add"}))
    named = replace(lab, pools=(replace(lab.pools[0], device=listed), *lab.pools[1:]))
    assert on(place(changed, named), "ffi_call") == "h100:0"


def test_a_program_without_operators_is_refused() -> None:
    graph = trace(lambda x: x, shape(8, 8))
    with pytest.raises(ValueError, match="graph has no operators"):
        place(graph, "2xh100")


@pytest.mark.parametrize("num_bytes, stays", [(0.5, False), (3.0, True)])
def test_a_task_goes_where_it_ends_first_with_its_inputs_sent(
    num_bytes: float, stays: bool
) -> None:
    # The second task is 2 s faster on the other node: worth it if that is not spent
    # on the link (1 byte/s).
    tasks = chain([[1.0, np.inf], [4.0, 2.0]], num_bytes)
    placement = place_tasks(tasks, Nodes.joined([1e9, 1e9], bandwidth=1.0))
    assert placement.node_of == (0, 0 if stays else 1)
    assert placement.makespan_s == (5.0 if stays else 3.5)
    assert len(placement.transfers) == (0 if stays else 1)


def test_a_value_is_sent_to_a_node_once() -> None:
    tasks = Tasks(
        names=("a", "b", "c"),
        kinds=("matmul",) * 3,
        seconds=np.array([[1.0, np.inf], [np.inf, 1.0], [np.inf, 1.0]]),
        passed=(Passed(producer=0, num_bytes=2.0, readers=(1, 2)),),
    )
    placement = place_tasks(tasks, Nodes.joined([9.0, 9.0], bandwidth=1.0))
    assert [(t.start_s, t.end_s) for t in placement.transfers] == [(1.0, 3.0)]
    assert placement.makespan_s == 5.0


def test_parts_of_a_gradient_are_added_up_before_they_are_sent() -> None:
    # What task 0 makes is read twice on node 1 and once on node 2, and comes back once
    # from each; node 1 sends when its second backward task, the one of task 1, is done.
    forward = Tasks(
        names=("a", "b", "c", "d"),
        kinds=("matmul",) * 4,
        seconds=np.array(
            [[1.0, np.inf, np.inf]] + [[np.inf, 1.0, np.inf]] * 2 + [[np.inf] * 2 + [1]]
        ),
        passed=(Passed(producer=0, num_bytes=2.0, readers=(1, 2, 3)),),
    )
    nodes = Nodes.joined([9.0] * 3, bandwidth=1.0)
    placement = place_tasks(forward.with_backward([1.0] * 4), nodes)
    ends = {run.task: run.end_s for run in placement.schedule}
    back = {t.source: t for t in placement.transfers if t.is_gradient}
    assert len(back) == sum(t.is_gradient for t in placement.transfers) == 2
    assert back[1].num_bytes == 2.0 and back[1].start_s >= max(ends[5], ends[6])
    first = min(run.start_s for run in placement.schedule if run.task == 7)
    assert first >= max(one.end_s for one in back.values())
    # Node 0: two gradients. Others: the value and one gradient, which is summed.
    assert placement.memory_bytes == (4, 4, 4)


def test_an_argument_is_sent_to_the_second_node_that_reads_it() -> None:
    tasks = Tasks(
        names=("a", "b"),
        kinds=("matmul",) * 2,
        seconds=np.array([[1.0, np.inf], [np.inf, 1.0]]),
        passed=(Passed(producer=-1, num_bytes=2.0, readers=(0, 1)),),
    )
    placement = place_tasks(tasks, Nodes.joined([9.0, 9.0], bandwidth=1.0))
    (sent,) = placement.transfers
    assert sent.num_bytes == 2.0 and placement.makespan_s == 3.0
    assert placement.memory_bytes == (2, 2)


def test_all_nodes_are_simulated_one_task_and_one_transfer_at_a_time() -> None:
    # Two producers on node 0, two readers on node 1: the second value waits for the
    # port, a third task fills the gap meanwhile.
    tasks = Tasks(
        names=("a", "b", "c", "d", "e"),
        kinds=("matmul",) * 5,
        seconds=np.array([[1.0, np.inf]] * 2 + [[np.inf, 1.0]] * 3),
        passed=(
            Passed(producer=0, num_bytes=4.0, readers=(2,)),
            Passed(producer=1, num_bytes=4.0, readers=(3,)),
        ),
    )
    placement = place_tasks(tasks, Nodes.joined([99.0, 99.0], bandwidth=1.0))
    ends = {run.task: run.end_s for run in placement.schedule}
    assert ends == {0: 1.0, 1: 2.0, 2: 6.0, 3: 10.0, 4: 1.0}
    check(placement, tasks)


def test_devices_that_share_a_port_wait_for_each_other() -> None:
    text = """
    pools:
      - {device: h100, levels: [{size: 2, link: {kind: PCIe, latency_s: 0,
         bandwidth: 1.0, shared_by: SHARED}}]}
      - {device: a100, levels: [{size: 2, link: nvlink-3}]}
    between: {kind: Ethernet, latency_s: 0, bandwidth: 1.0, shared_by: SHARED}
    """
    inf = np.inf
    tasks = Tasks(
        names=("a", "b", "c", "d"),
        kinds=("matmul",) * 4,
        seconds=np.array(
            [
                [1, inf, inf, inf],
                [inf, 1, inf, inf],
                [inf, inf, 1, inf],
                [inf] * 3 + [1],
            ]
        ),
        passed=(
            Passed(producer=0, num_bytes=3.0, readers=(2,)),
            Passed(producer=1, num_bytes=3.0, readers=(3,)),
        ),
    )
    ends = []
    for shared in ("1", "2"):
        nodes = Nodes.of(cluster_from_text(text.replace("SHARED", shared)))
        ends.append(place_tasks(tasks, nodes).makespan_s)
    assert ends == [5.0, 8.0]


def test_types_show_in_the_speed_table_and_in_the_placement(
    program: Graph, lab: Cluster
) -> None:
    placement = place(program, lab)
    speeds = placement.speeds
    assert min(speeds["convolution"], key=speeds["convolution"].__getitem__) == "fpga"
    assert set(speeds["matmul"]) == {"h100"}
    assert on(placement, "conv_general_dilated") == FPGA
    assert on(placement, "tanh") != FPGA


def test_types_can_be_pinned(program: Graph, lab: Cluster) -> None:
    pins = {"dot_general": "gpu", "conv": "fpga", "activation": "asic"}
    placement = place(program, lab, affinity=pins)
    assert on(placement, "dot_general") == "h100:0"
    assert on(placement, "conv_general_dilated") == FPGA
    assert on(placement, "tanh") == ASIC
    node = place(program, lab, affinity={"conv": "h100:0"})
    assert on(node, "conv_general_dilated") == "h100:0"


@pytest.mark.parametrize(
    "pins, said",
    [
        ({"dense": "fpga"}, "affinity wants dot_general .*only on h100:0"),
        ({"dense": "npu"}, "no such node. Allowed: a node .h100:0, fpga:0, asic:0"),
        ({"dense": "npu"}, "or a platform .cuda, gpu, other"),
        ({"sort": "npu"}, "'sort'.='npu': the cluster has no such node"),
        ({"dot_genral": "gpu"}, "did you mean 'dot_general'.*a word .dense, conv"),
        ("gpu", "affinity='gpu' is no mapping"),
    ],
)
def test_a_pin_that_cannot_be_met_says_so(
    program: Graph, lab: Cluster, pins: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        place(program, lab, affinity=pins)


def test_a_pin_of_what_the_program_lacks_is_noted(lab: Cluster) -> None:
    mlp = trace(lambda x, w: jnp.tanh(x @ w), shape(8, 8), shape(8, 8))
    pins = {"dot_general": "gpu", "conv": "fpga", "activation": "asic"}
    placement = place(mlp, lab, affinity=pins)
    assert on(placement, "tanh") == ASIC
    (note,) = placement.notes
    assert "no conv, which is wanted on fpga" in note and note in placement.table()


def test_the_pin_of_a_primitive_comes_before_its_class(
    program: Graph, lab: Cluster
) -> None:
    placement = place(program, lab, affinity={"activation": "asic", "tanh": "gpu"})
    assert on(placement, "tanh") == "h100:0"


@pytest.mark.parametrize(
    "kernels, said",
    [
        (("fpga", "densee"), "'densee', which is no operator .did you mean 'dense'"),
        (("fpgaa", "dense"), r"has 'fpgaa', .*no device \(did you mean 'fpga'.*h100"),
    ],
)
def test_misspelt_kernels_are_refused(
    program: Graph, lab: Cluster, kernels: tuple[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        place(program, lab, kernels=registered(*kernels))


@pytest.mark.parametrize(
    "kernels, said",
    [
        ({"registered": {"fpga": "dense"}}, "registered=.*Allowed: a mapping to sets"),
        ({"registered": 3}, "registered=3. Allowed: a mapping to sets"),
        ({"lacking": {"cuda": "tanh"}}, "lacking=.*sets of numbers of operators"),
        ({"lacking": {"gpu": {0}}}, "'gpu', for which JAX .*Allowed: cpu, cuda"),
        ({"lacking": {"cuda": {"tanh"}}}, "has 'tanh'. Allowed: numbers of operators"),
        ({"lacking": {"cuda": {99}}}, r"lacking\['cuda'\] has 99"),
    ],
)
def test_kernels_of_another_form_are_refused(
    program: Graph, lab: Cluster, kernels: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        place(program, lab, kernels=Kernels(**kernels))


def test_misspelt_kernels_and_platforms_of_cluster_files_are_refused(
    program: Graph,
) -> None:
    with pytest.raises(ValueError, match="kernels of device 'fpga' has 'convv'"):
        place(program, cluster_from_text(LAB.replace("[conv,", "[convv,")))
    with pytest.raises(ValueError, match="platform='fpga'. Allowed: cpu, cuda"):
        cluster_from_text(LAB.replace("platform: other", "platform: fpga"))


def test_weights_scale_the_load_that_a_node_is_given() -> None:
    tasks = Tasks(
        names=tuple(f"task {number}" for number in range(12)),
        kinds=("matmul",) * 12,
        seconds=np.ones((12, 2)),
        passed=(),
    )
    nodes = Nodes.joined([9.0, 9.0])
    even = place_tasks(tasks, nodes)
    uneven = place_tasks(tasks, nodes, [1.0, 0.5])
    alone = place_tasks(tasks, nodes, [0.0, 1.0])
    assert even.node_of.count(0) == 6 and even.makespan_s == 6.0
    assert uneven.node_of.count(0) == 8 and uneven.makespan_s == 8.0
    assert set(alone.node_of) == {1} and alone.idle == ("node:0",)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, np.nan]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"weights=.*for each of 2 nodes"):
        place_tasks(chain([[1.0, 1.0]]), Nodes.joined([1.0, 1.0]), weights)


def test_no_microbatch_is_refused() -> None:
    with pytest.raises(ValueError, match="microbatches=0 is no whole number"):
        place_tasks(chain([[1.0]]), Nodes.joined([1.0]), microbatches=0)


def test_a_slow_node_is_left_idle_and_the_table_says_so() -> None:
    tasks = chain([[1.0, 50.0], [1.0, 50.0]], 1.0)
    placement = place_tasks(tasks, Nodes.joined([9.0, 9.0], bandwidth=1.0))
    assert placement.idle == ("node:1",)
    assert placement.dropped == {"node:1": 2.0}
    assert "left idle, as a step is not faster with them: node:1" in placement.table()
    assert "svg" in placement.html()


def test_memory_divides_what_speed_would_not() -> None:
    tasks = Tasks(
        names=("a", "b"),
        kinds=("matmul",) * 2,
        seconds=np.array([[1.0, 9.0], [1.0, 9.0]]),
        passed=tuple(
            Passed(producer=-1, num_bytes=6.0, readers=(task,)) for task in range(2)
        ),
    )
    roomy = place_tasks(tasks, Nodes.joined([12.0, 12.0]))
    tight = place_tasks(tasks, Nodes.joined([11.0, 11.0]))
    assert roomy.idle and not tight.idle
    assert tight.memory_bytes == (6, 6) and "one node" not in tight.baselines
    with pytest.raises(ValueError, match="no placement was found for which memory"):
        place_tasks(tasks, Nodes.joined([11.0, 5.0]))


def test_memory_of_what_nothing_reads_any_more_is_used_again() -> None:
    tasks = chain([[1.0]] * 5, 4.0)
    placement = place_tasks(tasks, Nodes.joined([8.0]))
    assert placement.memory_bytes == (8,)


def test_items_are_split_over_very_many_unlike_nodes() -> None:
    # 2^64 numbers of used nodes, which is 0 modulo 2^64.
    rows = split(np.ones((70, 1)) * (1 + np.arange(64) / 64))
    assert rows is not None
    ends = [0, *(row.stop for row in rows)]
    assert [row.start for row in rows] == ends[:-1] and ends[-1] == 70
    assert max(row.stop - row.start for row in rows) == 2


def test_the_seeds_plain_order_is_there() -> None:
    # By rank the long task goes first; in the order of the program it comes late.
    tasks = Tasks(
        names=("short", "short too", "long"),
        kinds=("matmul",) * 3,
        seconds=np.array([[1.0, 1.0], [1.0, 1.0], [4.0, 4.0]]),
        passed=(),
    )
    nodes = Nodes.joined([9.0, 9.0])
    problem = Problem(tasks, nodes)
    plain, ranked = (
        schedule(problem, order)
        for order in (as_they_come(problem), by_rank(problem, "mean"))
    )
    assert plain is not None and plain.makespan_s == 5.0
    assert ranked is not None and ranked.makespan_s == 4.0
    row = place_tasks(chain([[1.0, 2.0]] * 2), nodes, order="traversal")
    assert row.how == "earliest finish in the order of the program"


def test_a_loop_and_a_block_are_one_task_each() -> None:
    def run(stacked: jax.Array, rest: list[jax.Array], x: jax.Array) -> jax.Array:
        def layer(c: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(c @ w), None

        x, _ = jax.lax.scan(layer, x, stacked)
        for w in rest:
            x = jnp.tanh(x @ w) + x
        return x

    graph = trace(run, shape(4, 16, 16), [shape(16, 16)] * 6, shape(8, 16))
    nodes = Nodes.of(Cluster.parse("2xh100"))
    fine = tasks_of(graph, nodes, kernels=Kernels())
    coarse = tasks_of(graph, nodes, kernels=Kernels(), grain="block")
    assert fine.tasks.kinds.count("loop") == 1 and len(fine.operators) == 1 + 18
    assert coarse.tasks.kinds == ("loop",) + ("block",) * 6
    assert [stop - start for start, stop in coarse.operators] == [2] + [3] * 6
    # What a loop is given and gives back is passed on once, its inside is not.
    reads = [value for value in fine.tasks.passed if 0 in value.readers]
    assert sorted(value.num_bytes for value in reads) == [4 * 8 * 16, 4 * 4 * 16 * 16]
    kept = place(graph, "2xh100", together=[(2, 5)])
    assert kept.operators[1] == (2, 5)
    assert len(kept.of_operator) == len(graph.operators)


def test_the_backward_pass_runs_in_reverse_on_the_same_nodes(
    program: Graph, lab: Cluster
) -> None:
    placement = place(program, lab, backward=True, microbatches=4)
    num = len(placement.operators)
    assert placement.node_of[:num] == placement.node_of[num:][::-1]
    ends = {run.task: run.end_s for run in placement.schedule}
    assert all(ends[2 * num - 1 - task] >= ends[task] for task in range(num))
    forward = {(t.value, t.source, t.target) for t in placement.transfers}
    back = {(t.value, t.target, t.source) for t in placement.transfers if t.is_gradient}
    assert back <= forward
    assert ("gradient of value" in placement.html()) == bool(back)
    fullest = max(placement.busy_s)
    assert placement.step_s >= placement.makespan_s + 3 * fullest


def test_only_what_is_between_parameters_and_the_loss_has_a_gradient() -> None:
    def loss(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        wanted = jnp.sin(x) * 2
        h = jnp.tanh(x @ w)
        return jnp.sum(h * wanted), jnp.sum(jnp.cos(h))

    graph = trace(loss, shape(8, 8), shape(8, 8))
    nodes = Nodes.of(Cluster.parse("2xh100"))

    def moved(params: str | None) -> set[str]:
        made = tasks_of(graph, nodes, kernels=Kernels(), params=params)
        some = [v for v in made.tasks.passed if v.has_gradient and v.producer >= 0]
        return {made.tasks.names[v.producer].split()[1] for v in some}

    assert moved(None) == moved("0") == {"dot_general", "tanh", "mul", "reduce_sum"}
    assert moved("1") > {"sin"}
    with pytest.raises(ValueError, match=r"params='w': .*Allowed: .*\(0, 1\)"):
        moved("w")


def test_it_survives_its_json(program: Graph, lab: Cluster) -> None:
    placement = place(program, lab, backward=True)
    assert Placement.from_json(placement.to_json()) == placement
    with pytest.raises(ValueError, match="schema=7"):
        Placement.from_json('{"schema": 7}')
    with pytest.raises(ValueError, match="has not what a placement has"):
        Placement.from_json('{"schema": 1, "nodes": []}')
    with pytest.raises(ValueError, match="is no JSON.*not the path of its file"):
        Placement.from_json("placement.json")
    with pytest.raises(ValueError, match="no placement: the key node_of stands more"):
        Placement.from_json('{"schema": 1, "node_of": [0], "node_of": [1]}')


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"node_of": [7]}, "node_of has 1 entries instead of 3"),
        ({"node_of": [0, 1, 7]}, "node_of has 7; allowed: 0 to 2"),
        ({"node_of": 3}, "has not what a placement has"),
        ({"weights": [1.0]}, "weights has 1 entries instead of 3"),
        ({"schedule": [{"task": 0}]}, "has not what a placement has"),
        ({"operators": [[0, 1], [2, 3]]}, r"operators has \[2, 3\] after 1"),
        ({"operators": [1]}, "has not what a placement has"),
    ],
)
def test_json_of_another_shape_is_refused(
    program: Graph, lab: Cluster, changes: dict[str, Any], words: str
) -> None:
    items = json.loads(place(program, lab).to_json())
    with pytest.raises(ValueError, match=words):
        Placement.from_json(json.dumps({**items, **changes}))


def test_pictures_of_other_kinds_and_in_no_folder_are_refused(
    program: Graph, lab: Cluster, tmp_path: Path
) -> None:
    placement = place(program, lab)
    with pytest.raises(ValueError, match="ends in '.xyz'. Allowed: .png, .svg, .pdf"):
        placement.save_picture(tmp_path / "schedule.xyz")
    with pytest.raises(ValueError, match="there is no folder .*missing"):
        placement.save_picture(tmp_path / "missing" / "schedule.png")


def check(placement: Placement, tasks: Tasks) -> None:
    """Nothing overlaps, inputs are there, memory and bound are kept to."""
    runs = {run.task: run for run in placement.schedule}
    for node in range(len(placement.nodes)):
        own = sorted((r.start_s, r.end_s) for r in runs.values() if r.node == node)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(own))
        for end in ("source", "target"):
            spans = sorted(
                (t.start_s, t.end_s)
                for t in placement.transfers
                if getattr(t, end) == node
            )
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))
    came = {(t.value, t.target): t.end_s for t in placement.transfers}
    for number, value in enumerate(tasks.passed):
        for reader in value.readers if value.producer >= 0 else ():
            made = runs[value.producer]
            ready = came.get((number, runs[reader].node), made.end_s)
            if runs[reader].node != made.node:
                assert (number, runs[reader].node) in came
            assert runs[reader].start_s >= ready - 1e-9
    for used, has in zip(placement.memory_bytes, placement.capacity_bytes, strict=True):
        assert used <= has
    assert placement.bound_s <= placement.step_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_schedules_hold_and_no_baseline_is_better(seed: int) -> None:
    case = Case.random(3 * seed)  # one pass: values have their own numbers
    try:
        placement = place_tasks(case.tasks, case.nodes)
    except ValueError:
        return  # not enough memory
    check(placement, case.tasks)
    assert all(
        placement.step_s <= step_s * (1 + 1e-9)
        for step_s in (*placement.baselines.values(), *placement.dropped.values())
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_it_is_near_the_best_of_all_placements(seed: int) -> None:
    case = Case.random(seed)
    if len(case.tasks.together) > 4:
        return
    for gap in case.gaps():
        assert not gap.worse
        if gap.rule == "placed":
            assert 1 - 1e-9 <= gap.ratio < 1.5


def test_equal_questions_give_equal_placements() -> None:
    case = Case.random(12)
    first, second = (place_tasks(case.tasks, case.nodes) for _ in range(2))
    assert first == second
