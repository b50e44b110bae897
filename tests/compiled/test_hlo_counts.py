"""What is counted in a compiled program, on small texts."""

import pytest

from dtft.planner.aot.hlo import parse
from tests.support.hlo import aliases, bytes_moved, collectives, copies, kernels

TEXT = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), \
{1}: (0, {}, must-alias) }, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}

%fused_add (param_0: f32[8,4], param_1: f32[]) -> f32[8,4] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  %param_1 = f32[] parameter(1)
  ROOT %add.9 = f32[8,4]{1,0} add(%param_0, %param_1)
}

%wrapped_copy (param_0.1: f32[8,4]) -> f32[8,4] {
  %param_0.1 = f32[8,4]{1,0} parameter(0)
  ROOT %copy.9 = f32[8,4]{1,0} copy(%param_0.1)
}

%command_buffer (p: f32[8,4], q: f32[]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %q = f32[] parameter(1)
  ROOT %inner_fusion = f32[8,4]{1,0} fusion(%p, %q), kind=kLoop, calls=%fused_add
}

ENTRY %main.2 (a.1: f32[8,4], b.1: bf16[16]) -> (f32[8,4], /*index=1*/f32[8,4]) {
  %a.1 = f32[8,4]{1,0} parameter(0), metadata={op_name="a (of %b)"}
  %b.1 = bf16[16]{0:T(256)} parameter(1)
  %s = f32[] constant(2)
  %pair = (f32[8,4]{1,0}, /*index=1*/f32[]) fusion(%a.1, %s), calls=%fused_add
  %part = f32[8,4]{1,0} get-tuple-element(%pair), index=0
  %copy.1 = f32[8,4]{1,0} copy(%part)
  %copy.2 = f32[] copy(%s)
  %copy_fusion = f32[8,4]{1,0} fusion(%copy.1), kind=kLoop, calls=%wrapped_copy
  %call = f32[8,4]{1,0} call(%copy_fusion, %s), to_apply=%command_buffer
  %start = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%call), dimensions={0}
  %done = f32[8,4]{1,0} all-gather-done(%start)
  %sum = f32[8,4]{1,0} all-reduce(%done), to_apply=%fused_add
  ROOT %tuple.1 = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%sum, %call)
}
"""


def _names(operations: list) -> list[str]:
    return [operation.name for operation in operations]


def test_kernels_are_found_where_they_are_called_and_not_in_their_bodies() -> None:
    assert _names(kernels(parse(TEXT), 32)) == ["pair", "inner_fusion"]
    assert _names(kernels(parse(TEXT), 33)) == []


def test_copies_are_found_as_operations_and_as_kernels() -> None:
    assert _names(copies(parse(TEXT), 32)) == ["copy.1", "copy_fusion"]
    assert _names(copies(parse(TEXT), 1)) == ["copy.1", "copy.2", "copy_fusion"]


def test_each_communication_counts_once() -> None:
    assert collectives(parse(TEXT)) == {"all-gather": 1, "all-reduce": 1}


def test_aliases_name_outputs_and_their_inputs() -> None:
    assert aliases(TEXT) == {0: 1, 1: 0}
    single = "HloModule f, input_output_alias={ {}: (3, {}, may-alias) }\n"
    assert aliases(single + TEXT.split("\n", 1)[1]) == {0: 3}


def test_bytes_are_those_of_operands_and_results() -> None:
    text = TEXT.split("ENTRY")[0] + (
        "ENTRY %main (a: f32[8,4], b: bf16[16]) -> f32[8,4] {\n"
        "  %a = f32[8,4]{1,0} parameter(0)\n"
        "  %b = bf16[16]{0} parameter(1)\n"
        "  ROOT %f = f32[8,4]{1,0} fusion(%a, %b, %a), calls=%fused_add\n"
        "}\n"
    )
    assert bytes_moved(parse(text)) == 128 + 32 + 128


def test_a_text_without_a_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("HloModule nothing\n")
