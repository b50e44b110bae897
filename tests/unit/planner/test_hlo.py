"""Collectives of compiled programs, in the spellings of jax 0.10 and 0.12."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.planner.aot.hlo import (
    CompiledCollective,
    Groups,
    axes_of,
    collectives,
    groups_of,
    parse,
)

MESH = {"data": 4, "tensor": 2}

# Lines of programs that jax 0.10.2 compiled for H100, shortened.
SCAN = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%body.1 (arg: (s32[], f32[16,512], f32[64,128])) -> (s32[], f32[16,512], f32[64,128]) {
  %arg = (s32[], f32[16,512]{1,0}, /*index=2*/f32[64,128]{1,0}) parameter(0)
  %a = f32[16,512]{1,0} get-tuple-element(%arg), index=1
  %b = f32[64,128]{1,0} get-tuple-element(%arg), index=2
  %ag = ((f32[16,512]{1,0}, f32[64,128]{1,0}), (f32[128,512]{1,0}, f32[512,128]{1,0})) \
all-gather-start(%a, %b), channel_id=1, replica_groups=mesh['axis_0'=8,'axis_1'=1] \
{'axis_0'}, dimensions={0}, use_global_device_ids=true, \
metadata={op_name="jit(step)/while/body/dot_general"}
  %ag.done = (f32[128,512]{1,0}, f32[512,128]{1,0}) all-gather-done(%ag)
  %w = f32[128,512]{1,0} get-tuple-element(%ag.done), index=0
  %rs = ((f32[128,512]{1,0}), (f32[16,512]{1,0})) reduce-scatter-start(%w), \
channel_id=8, replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
  %rs.done = f32[16,512]{1,0} reduce-scatter-done(%rs)
  ROOT %out = (s32[], f32[16,512]{1,0}, f32[64,128]{1,0}) tuple(%i, %rs.done, %b)
}

%cond.1 (arg.1: (s32[], f32[16,512], f32[64,128])) -> pred[] {
  %arg.1 = (s32[], f32[16,512]{1,0}, f32[64,128]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%x, %y), direction=LT
}

%outer.1 (arg.2: (s32[])) -> (s32[]) {
  %inner = (s32[], f32[16,512]{1,0}, f32[64,128]{1,0}) while(%tuple), \
condition=%cond.1, body=%body.1, backend_config={"known_trip_count":{"n":"4"},"x":[]}
  ROOT %t = (s32[]) tuple(%i)
}

ENTRY %main (p: f32[8]) -> f32[] {
  %p = f32[8]{0} parameter(0)
  %loop = (s32[]) while(%start), condition=%cond.1, body=%outer.1, \
backend_config={"known_trip_count": {"n": "3"}}
  %loss = f32[] bitcast(%p)
  %ar = f32[] all-reduce-start(%loss), channel_id=7, replica_groups={}, to_apply=%add
  ROOT %ar.done = f32[] all-reduce-done(%ar)
}
"""


def _entry(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def _only(*lines: str, mesh: dict[str, int] = MESH) -> CompiledCollective:
    (found,) = collectives(_entry(*lines), mesh)
    return found


def test_loops_multiply_and_start_and_done_count_once() -> None:
    gather, scatter, loss = collectives(SCAN, {"fsdp": 8})
    assert (gather.kind, gather.axes, gather.trips) == ("all_gather", ("fsdp",), 12)
    assert gather.num_bytes == 2 * 128 * 512 * 4
    assert gather.operands == ((16, 512), (64, 128))
    assert gather.where == "jit(step)/while/body/dot_general"
    assert (scatter.kind, scatter.num_bytes, scatter.trips) == (
        "reduce_scatter",
        128 * 512 * 4,
        12,
    )
    assert (loss.kind, loss.num_bytes, loss.trips) == ("all_reduce", 4, 1)
    assert gather.trips_known and loss.trips_known


def test_a_loop_without_trips_counts_once_and_says_so() -> None:
    text = SCAN.replace('"known_trip_count":{"n":"4"},', "")
    gather, _, loss = collectives(text, {"fsdp": 8})
    assert (gather.trips, gather.trips_known) == (3, False)
    assert loss.trips_known


@pytest.mark.parametrize(
    "result",
    [
        "(bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start",  # jax 0.10
        "((bf16[4,8]{1,0}), bf16[16,8]{1,0}) all-gather-start",  # jax 0.12
        "bf16[16,8]{1,0} all-gather",
    ],
)
def test_bytes_do_not_depend_on_how_the_result_is_written(result: str) -> None:
    found = _only(
        "%p = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)",
        f"%g = {result}(%p), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={{0}}",
    )
    assert (found.axes, found.num_bytes, found.dtype) == (("data",), 256, "bf16")
    assert found.group_size == 4


def test_operands_may_have_their_types_beside_them() -> None:
    found = _only(
        "%p = f32[8]{0} parameter(0)",
        "%r = f32[8]{0} all-reduce(f32[8]{0} %p), replica_groups={{0,1},{2,3},{4,5},"
        "{6,7}}, to_apply=%add",
    )
    assert (found.axes, found.num_bytes) == (("tensor",), 32)


def test_an_all_to_all_counts_what_a_device_gives() -> None:
    pieces = ", ".join(f"f32[8]{{0}} %p.{i}" for i in range(2))
    found = _only(
        "%p.0 = f32[8]{0} parameter(0)",
        "%p.1 = f32[8]{0} parameter(1)",
        f"%a = (f32[8]{{0}}, f32[8]{{0}}) all-to-all({pieces}), "
        "replica_groups={{0,1},{2,3},{4,5},{6,7}}",
    )
    assert (found.kind, found.num_bytes) == ("all_to_all", 64)


def test_a_permutation_goes_along_the_axes_that_its_pairs_differ_in() -> None:
    found = _only(
        "%p = f32[8]{0} parameter(0)",
        "%s = f32[8]{0} collective-permute(%p), channel_id=1, "
        "source_target_pairs={{0,2},{2,4},{4,6},{6,0}}",
    )
    assert (found.kind, found.axes, found.num_bytes) == ("permute", ("data",), 32)


def test_an_asynchronous_wrapper_is_looked_into_once() -> None:
    text = (
        "HloModule m\n\n%wrapped (q: f32[8]) -> f32[8] {\n"
        "  %q = f32[8]{0} parameter(0)\n"
        "  ROOT %a = f32[8]{0} all-to-all(%q), replica_groups=[4,2]<=[8]\n}\n\n"
        + _entry(
            "%p = f32[8]{0} parameter(0)",
            "%s = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%p), calls=%wrapped",
            "%d = f32[8]{0} async-done(%s), calls=%wrapped",
        ).split("\n", 2)[2]
    )
    (found,) = collectives(text, MESH)
    assert (found.kind, found.axes) == ("all_to_all", ("tensor",))


def test_of_a_conditional_the_branch_that_communicates_most_counts() -> None:
    def branch(name: str, size: int) -> str:
        return (
            f"%{name} (q.{name}: f32[{size}]) -> f32[{size}] {{\n"
            f"  %q.{name} = f32[{size}]{{0}} parameter(0)\n"
            f"  ROOT %r.{name} = f32[{size}]{{0}} all-reduce(%q.{name}), "
            "replica_groups=[4,2]<=[8], to_apply=%add\n}\n\n"
        )

    text = (
        "HloModule m\n\n"
        + branch("small", 8)
        + branch("large", 64)
        + _entry(
            "%c = f32[8]{0} conditional(%i, %a, %b), "
            "branch_computations={%small, %large}"
        ).split("\n", 2)[2]
    )
    assert [one.num_bytes for one in collectives(text, MESH)] == [256]


def test_a_sum_that_cpu_widened_counts_in_the_programs_type() -> None:
    lines = (
        "%p = f32[8]{0} dot(%x, %y)",
        "%r = f32[8]{0} all-reduce(%p), replica_groups=[4,2]<=[8], "
        "to_apply=%add.clone_promoted",
    )
    found = _only(*lines)
    assert found.widened and (found.num_bytes, found.own_bytes) == (32, 16)
    assert not _only(lines[0], lines[1].replace("_promoted", "")).widened


WIDENED = """\
HloModule m

%convert_computation (a: bf16[8], b: s32[8]) -> f32[8] {
  %a = bf16[8]{0} parameter(0)
  %c = f32[8]{0} convert(%a)
  ROOT %d = f32[8]{0} transpose(%c), dimensions={0}
}

ENTRY %main (p: bf16[8], q: s32[8]) -> f32[16] {
  %p = bf16[8]{0} parameter(0)
  %q = s32[8]{0} parameter(1)
  %w = f32[8]{0} fusion(%p, %q), kind=kLoop, calls=%convert_computation
  %v = f32[8]{0} bitcast(%w)
  %n = f32[8]{0} convert(%q)
  %g = (f32[16]{0}, f32[16]{0}) all-gather(%v, %n), replica_groups=[4,2]<=[8]
}
"""


def test_a_gather_that_cpu_widened_counts_in_the_programs_type() -> None:
    (found,) = collectives(WIDENED, MESH)
    assert (found.num_bytes, found.own_bytes) == (2 * 64, 2 * (16 + 32))


def test_groups_of_one_device_are_no_communication() -> None:
    text = _entry(
        "%p = f32[8]{0} parameter(0)",
        "%r = f32[8]{0} all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add",
    )
    assert collectives(text, MESH) == ()


SPELLINGS = [
    ("replica_groups={{0,2,4,6},{1,3,5,7}}, x", ("data",), 4),
    ("replica_groups=[2,4]<=[4,2]T(1,0), x", ("data",), 4),
    ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, x", ("data",), 4),
    ("replica_groups=mesh[axis_0=4,axis_1=2] {axis_0}, x", ("data",), 4),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ("data",), 4),
    ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}", ("tensor",), 2),
    ("replica_groups=mesh['a'=8] {'a':(4)2}, x", ("tensor",), 2),
    ("replica_groups=mesh['a'=8] {'a':(2)2}, x", ("data",), 2),
    ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}, x", ("data", "tensor"), 4),
    ("replica_groups=[1,8]<=[8], x", ("data", "tensor"), 8),
    ("replica_groups={}, x", ("data", "tensor"), 8),
    ("channel_id=1, dimensions={0}", ("data", "tensor"), 8),
]


@pytest.mark.parametrize(("text", "axes", "size"), SPELLINGS)
def test_the_spellings_of_groups(text: str, axes: tuple[str, ...], size: int) -> None:
    groups = groups_of(text, MESH)
    assert axes_of(groups, tuple(MESH.items())) == (axes, size)


def test_a_spelling_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="replica_groups='<0:4>"):
        groups_of("replica_groups=<0:4>, x", MESH)


def test_groups_of_another_mesh_are_refused() -> None:
    with pytest.raises(ValueError, match="number 7"):
        axes_of(((0, 7),), (("data", 4),))


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), picked=st.integers(0, 15)
)
def test_axes_are_found_again_in_every_spelling(sizes: list[int], picked: int) -> None:
    mesh = {f"axis{i}": size for i, size in enumerate(sizes)}
    chosen = [i for i in range(len(sizes)) if picked >> i & 1 and sizes[i] > 1]
    if not chosen:
        return
    others = [i for i in range(len(sizes)) if i not in chosen]
    members = math.prod(sizes[i] for i in chosen)
    order = ",".join(map(str, [*others, *chosen]))
    shape = f"[{math.prod(sizes) // members},{members}]"
    iota = f"replica_groups={shape}<=[{','.join(map(str, sizes))}]T({order}), x"
    axes = ",".join(f"'{name}'={size}" for name, size in mesh.items())
    names = ",".join(f"'axis{i}'" for i in chosen)
    meshed = f"replica_groups=mesh[{axes}] {{{names}}}, x"
    listed = groups_of(iota, mesh)
    assert groups_of(meshed, mesh) == listed
    text = ",".join("{" + ",".join(map(str, group)) + "}" for group in listed)
    assert groups_of(f"replica_groups={{{text}}}, x", mesh) == listed
    expected = tuple(f"axis{i}" for i in chosen), members
    assert axes_of(listed, tuple(mesh.items())) == expected


def test_parse_refuses_what_is_no_program() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("HloModule nothing\n")


def test_group_numbers_are_positions_in_the_mesh() -> None:
    groups: Groups = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert axes_of(groups, (("data", 2), ("tensor", 4))) == (("tensor",), 4)
    assert axes_of(groups, (("a", 2), ("b", 2), ("c", 2))) == (("b", "c"), 4)
