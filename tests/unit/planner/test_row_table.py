"""Tables of training runs: read, refused, predicted, written."""

from pathlib import Path

import pytest

from dtft.cli.dispatch import main
from dtft.planner.transformer.predict import (
    FITS,
    HIGH,
    LOW,
    MEMORY,
    RATE,
    STEP,
    RowPrediction,
    pool_of,
    predict_table,
    scales_of,
)
from dtft.planner.transformer.table import (
    COUNTS,
    OPTIONAL_COUNTS,
    REQUIRED,
    Habits,
    Table,
)
from experiments.published_rows import DATA

TEXT = (DATA / "megatron_a100.csv").read_text()
HEADER: str = (
    "model,heads,hidden,layers,seq_len,vocab,gpus,tp,pp,dp,micro_batch,"
    "virtual_stages,recompute,global_batch"
)
ROW: str = "toy,16,2048,24,2048,51200,16,2,4,2,2,1,full,64"


def changed(column: str, value: str) -> str:
    names, cells = list[str](HEADER.split(",")), list[str](ROW.split(","))
    cells[names.index(column)] = value
    return f"{HEADER}\n{ROW}\n{','.join(cells)}\n"


def test_the_published_table_comes_back_with_predictions() -> None:
    table, found = predict_table(TEXT, "selene")
    assert table.header == (
        *Table.parse(TEXT).header,
        STEP,
        LOW,
        HIGH,
        RATE,
        MEMORY,
        FITS,
    )
    for cells, row in zip(table.cells, found, strict=True):
        assert float(cells[STEP]) == pytest.approx(row.step_s, rel=1e-5)
        assert float(cells[LOW]) == pytest.approx(row.low_s, rel=1e-5)
        assert float(cells[HIGH]) == pytest.approx(row.high_s, rel=1e-5)
        assert row.low_s < row.step_s < row.high_s
        assert int(cells[MEMORY]) == row.memory_bytes < row.capacity_bytes
        assert cells[FITS] == "yes"
        rate = float(cells["tflops_per_gpu"])
        assert float(cells[RATE]) == pytest.approx(rate, rel=0.15)
    again, _ = predict_table(table.text(), "selene")
    assert again.text() == table.text()
    lines = [line.split(",")[:18] for line in table.text().splitlines()]
    assert lines == [line.split(",") for line in TEXT.splitlines()]


@pytest.mark.parametrize("column", REQUIRED)
def test_a_missing_column_is_named(column: str) -> None:
    names, cells = list[str](HEADER.split(",")), list[str](ROW.split(","))
    place = names.index(column)
    del names[place], cells[place]
    with pytest.raises(ValueError, match=f"no column {column}. Required"):
        predict_table(f"{','.join(names)}\n{','.join(cells)}\n", "a100")


@pytest.mark.parametrize(
    "column, value, named, words",
    [
        ("gpus", "17", "gpus", "17 is not tp x pp x dp = 2 x 4 x 2 = 16"),
        ("dp", "3", "gpus", "16 is not tp x pp x dp"),
        ("layers", "25", "layers", "25 is not divisible by pp x virtual_stages = 4"),
        ("layers", "3", "pp", "4 stages"),
        ("heads", "15", "heads", "15 is not divisible by tp = 2"),
        ("hidden", "2050", "hidden", "2050 is not divisible by heads = 16"),
        ("global_batch", "63", "global_batch", "63 is not divisible by micro_batch"),
        ("virtual_stages", "5", "layers", "24 is not divisible by pp x virtual"),
        ("recompute", "some", "recompute", "'some'. Allowed: full, selective, none"),
        ("vocab", "many", "vocab", "'many' is no whole number above 0"),
        ("seq_len", "", "seq_len", "'' is no whole number above 0"),
        ("tp", "0", "tp", "'0' is no whole number above 0"),
        ("tp", "2.5", "tp", "'2.5' is no whole number above 0"),
        ("micro_batch", "nan", "micro_batch", "'nan' is no whole number above 0"),
        ("gpus", "inf", "gpus", "'inf' is no whole number above 0"),
    ],
)
def test_an_impossible_row_is_named(
    column: str, value: str, named: str, words: str
) -> None:
    with pytest.raises(ValueError) as refused:
        predict_table(changed(column, value), "a100")
    assert f"row 2 (toy), column {named}" in str(refused.value)
    assert words in str(refused.value)


NO_COUNTS = ("", "nan", "inf", "-1", "0", "2.5", "1e300", "1" + 400 * "0", "True")


@pytest.mark.parametrize("column", [*COUNTS, *OPTIONAL_COUNTS])
@pytest.mark.parametrize("value", [*NO_COUNTS, "1000000000"])
def test_what_is_no_count_names_row_column_and_what_is_allowed(
    column: str, value: str
) -> None:
    cells = dict(zip(HEADER.split(","), ROW.split(","), strict=True))
    cells[column] = value
    table = Table.parse(f"{','.join(cells)}\n{','.join(cells.values())}\n")
    if column in OPTIONAL_COUNTS and not value:
        assert len(table.rows(Habits())) == 1
        return
    with pytest.raises(ValueError) as refused:
        table.rows(Habits())
    said = str(refused.value)
    assert said.startswith(f"row 1 (toy), column {column}: ") and len(said) < 250
    assert f"no whole number above 0 and below 1000000000. Change {column}." in said


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("hidden", "536870912", "hidden: an array would have 2.08e.19 elements"),
        ("seq_len", "268435456", "seq_len: an array would have .* layers, heads"),
        ("layers", "999999996", "layers: an array would have .* seq_len, layers"),
        ("global_batch", "999999996", "global_batch: an array .* below 1.15e.18"),
        ("vocab", "999999999", ""),
    ],
)
def test_arrays_whose_bytes_64_bits_do_not_count_are_refused(
    column: str, value: str, said: str
) -> None:
    if not said:
        assert predict_table(changed(column, value), "a100")[1][1].step_s > 0
        return
    with pytest.raises(ValueError, match=f"row 2 .*column {said}"):
        predict_table(changed(column, value), "a100")


def test_every_bad_row_is_named_and_nothing_is_predicted() -> None:
    cells = [ROW.replace(",16,", f",{n},", 1) for n in range(3, 17)]
    text = f"{HEADER},dtype\n{ROW},\n" + "".join(f"{row},\n" for row in cells)
    with pytest.raises(ValueError) as refused:
        predict_table(f"{text}{ROW},float8\n{ROW},\n", "a100")
    first, *lines, last = str(refused.value).splitlines()
    assert first == "12 of 17 rows cannot be predicted:"
    assert len(lines) == 10 and lines[0].startswith("row 2 (toy), column heads: 3 is")
    assert last == "and 2 more rows."
    with pytest.raises(ValueError) as refused:  # of a cell, the device, the cluster
        predict_table(f"{HEADER},dtype\n{ROW},half\n{ROW},\n{ROW},fp8\n", "2x4xA100")
    first, *lines = str(refused.value).splitlines()
    assert first == "3 of 3 rows cannot be predicted:"
    columns = [line.split("column ")[1].split(":")[0] for line in lines]
    assert columns == ["dtype", "gpus", "dtype"]


def test_text_that_is_no_table_is_refused() -> None:
    text = f'{HEADER}\n"{ROW}\n{140000 * "x"}\n'
    with pytest.raises(ValueError, match="split into cells: .* quote that is not clos"):
        predict_table(text, "a100")


def test_interleaving_needs_a_pipeline() -> None:
    row = "toy,16,2048,24,2048,51200,4,2,1,2,2,2,full,64"
    with pytest.raises(ValueError, match="row 1 .*column virtual_stages: 2 with pp=1"):
        predict_table(f"{HEADER}\n{row}\n", "a100")


@pytest.mark.parametrize("text", ["", HEADER + "\n"])
def test_an_empty_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Give a header with the columns heads"):
        predict_table(text, "a100")


def test_what_does_not_fit_is_said_in_the_table() -> None:
    table, found = predict_table(TEXT, "rtx4090")
    assert {cells[FITS] for cells in table.cells} == {"no"}
    assert not any(row.fits for row in found)


@pytest.mark.parametrize("column", ["rope", "kv_head", "Hidden", ""])
def test_a_column_that_is_not_known_is_refused(column: str) -> None:
    text = f"{HEADER},{column}\n{ROW},2\n"
    with pytest.raises(ValueError, match=f"column {column!r} is not known"):
        predict_table(text, "a100")


def test_what_was_measured_may_be_kept() -> None:
    text = f"{HEADER},measured_s,note\n{ROW},2.5,first\n"
    table, _ = predict_table(text, "a100")
    assert table.cells[0]["measured_s"] == "2.5" and table.cells[0]["note"] == "first"


def test_the_software_of_a_row_is_priced() -> None:
    """Kernels of PyTorch move more than XLA's; collectives of activations wait."""
    text = f"{HEADER},software\n" + "".join(
        f"{ROW},{name}\n" for name in ("", "megatron", "eager", "xla")
    )
    _, (usual, megatron, eager, xla) = predict_table(text, "a100")
    assert usual == megatron
    assert eager.terms["matmul"] == megatron.terms["matmul"]
    # JAX leaves out what no gradient needs; the scalars are those of PyTorch.
    assert xla.terms["matmul"] < eager.terms["matmul"] / scales_of("a100").matmul
    assert eager.terms["elementwise"] < megatron.terms["elementwise"]  # no dropout
    assert min(xla.terms["tensor"], eager.terms["tensor"]) > 0
    said = "row 1 .*column software: 'torch'. Allowed: megatron, eager, xla"
    with pytest.raises(ValueError, match=said):
        predict_table(f"{HEADER},software\n{ROW},torch\n", "a100")


def test_a_column_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="header has the column tp 2 times"):
        Table.parse(f"{HEADER},tp\n{ROW},2\n")


def test_devices_that_run_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="no training step runs on fpga-u280"):
        predict_table(TEXT, "fpga-u280")


def test_a_short_row_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has 3 cells, the header has 14"):
        predict_table(f"{HEADER}\n1,2,3\n", "a100")


@pytest.mark.parametrize(
    "column, value", [("zero", "4"), ("flash_attention", "maybe"), ("zero", "x")]
)
def test_optional_columns_are_checked(column: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"row 1 .*column {column}: .*Allowed"):
        predict_table(f"{HEADER},{column}\n{ROW},{value}\n", "a100")


def test_optional_columns_count() -> None:
    def memory_of(extra: str, value: str) -> int:
        _, found = predict_table(f"{HEADER},{extra}\n{ROW},{value}\n", "a100")
        return found[0].memory_bytes

    assert memory_of("zero", "1") < memory_of("zero", "0") == memory_of("zero", "")
    assert memory_of("zero", "1.0") == memory_of("zero", "1")  # as pandas writes it
    assert memory_of("gradient_bytes", "4") > memory_of("gradient_bytes", "2")
    fused, plain = "flash_attention,sequence_parallel", "true,yes"
    assert memory_of(fused, plain) < memory_of(fused, "no,0")


def dtyped(dtype: str, cluster: str) -> tuple[RowPrediction, RowPrediction]:
    """A row of a dtype, and one with an empty cell."""
    text = f"{HEADER},dtype\n{ROW},{dtype}\n{ROW},\n"
    _, (found, usual) = predict_table(text, cluster)
    return found, usual


@pytest.mark.parametrize(
    ("cluster", "usual"),
    [("v100", "fp16"), ("t4", "float16"), ("a100", "bf16"), ("cpu", "bfloat16")],
)
def test_an_empty_dtype_is_the_usual_one_of_the_device(
    cluster: str, usual: str
) -> None:
    found, empty = dtyped(usual, cluster)
    assert found == empty


def test_the_dtype_of_a_row_is_priced_and_what_has_no_peak_is_said() -> None:
    slow, usual = dtyped("bfloat16", "v100")
    assert slow.terms["matmul"] > 3 * usual.terms["matmul"] and not usual.unlisted
    assert slow.unlisted == (
        "bfloat16 has no known peak on v100: priced as float32, 15.7 TFLOP/s. "
        "float16 has 125",
    )
    fast, bfloat16 = dtyped("fp8", "h100")
    assert 0.5 < fast.terms["matmul"] / bfloat16.terms["matmul"] < 0.8
    assert not fast.unlisted
    for name, size in bfloat16.memory.items():  # operands of products are narrower
        narrower = 0.1 * size if name in ("activations", "reserve") else 0
        assert size - narrower <= fast.memory[name] <= size


@pytest.mark.parametrize(
    ("cluster", "allowed"), [("a100", "bfloat16"), ("t4", "float16")]
)
def test_a_dtype_of_8_bits_needs_a_device_that_multiplies_it(
    cluster: str, allowed: str
) -> None:
    with pytest.raises(ValueError) as refused:
        dtyped("float8", cluster)
    said = str(refused.value)
    assert "row 1 (toy), column dtype: float8_e4m3fn" in said
    assert f"{cluster} has no known peak" in said
    allowed_text = said.split("Allowed on ")[1]
    assert allowed in allowed_text and "Change dtype, or the cluster" in said


@pytest.mark.parametrize(
    ("cluster", "dtype", "wider"),
    [("h100", "int8", "bf16"), ("tpu-v5e", "int8", "bf16"), ("b200", "fp4", "fp8")],
)
@pytest.mark.parametrize("experts", ["", "4"])
def test_every_dtype_with_a_peak_is_priced_by_it(
    cluster: str, dtype: str, wider: str, experts: str
) -> None:
    text = f"{HEADER},dtype,experts\n{ROW},{dtype},{experts}\n{ROW},{wider},{experts}\n"
    _, (narrow, wide) = predict_table(text, cluster)
    assert narrow.terms["matmul"] < 0.9 * wide.terms["matmul"]
    assert not narrow.unlisted


@pytest.mark.parametrize(("cluster", "dtype"), [("h100", "fp4"), ("v100", "int8")])
def test_a_dtype_without_a_peak_names_the_device(cluster: str, dtype: str) -> None:
    said = f"column dtype: .*, but {cluster} has no known peak for it"
    with pytest.raises(ValueError, match=said):
        dtyped(dtype, cluster)


@pytest.mark.parametrize("dtype", ["float32", "int4", "half", "8"])
def test_a_dtype_that_is_not_known_names_row_value_and_what_is_allowed(
    dtype: str,
) -> None:
    said = f"row 1 \\(toy\\), column dtype: '{dtype}'. Allowed: float16, fp16, bfloat16"
    with pytest.raises(ValueError, match=said):
        dtyped(dtype, "a100")


def test_habits_are_those_of_the_device() -> None:
    table = Table.parse(f"{HEADER}\n{ROW}\n{ROW.replace('full', 'selective')}\n")
    old, new = table.rows(Habits()), table.rows(Habits(fused=True))
    assert [row.layout.flash_attention for row in old] == [False, False]
    assert [row.layout.sequence_parallel for row in old] == [False, True]
    assert all(row.layout.flash_attention for row in new)
    assert {row.layout.gradient_bytes for row in new} == {4}


@pytest.mark.parametrize("gpus, words", [(1, "a100"), (4, "4xa100"), (12, "3x4xa100")])
def test_a_name_is_sized_by_the_row(gpus: int, words: str) -> None:
    assert pool_of("a100", gpus).words == words
    assert pool_of("a100", gpus).num_devices == gpus


def test_a_torus_and_a_shorthand_are_clusters_too() -> None:
    assert pool_of("tpu-v5p", 64).num_devices == 64
    _, found = predict_table(f"{HEADER}\n{ROW}\n", "4x8xH100")
    assert found[0].step_s > 0


def test_a_cluster_that_is_too_small_names_the_row() -> None:
    with pytest.raises(
        ValueError, match="row 1 .*column gpus: 16 devices, but cluster"
    ):
        predict_table(f"{HEADER}\n{ROW}\n", "8xA100")


def test_an_unknown_cluster_lists_the_known() -> None:
    with pytest.raises(ValueError, match="Known: .*a100"):
        predict_table(f"{HEADER}\n{ROW}\n", "z100")


@pytest.mark.parametrize(
    "row",
    [
        "one,16,2048,24,2048,51200,1,1,1,1,1,1,none,8",
        "wide,32,4096,32,2048,51200,512,1,1,512,2,1,none,1024",
        "across,64,8192,64,2048,51200,32,16,2,1,1,1,full,32",
        "long,32,4096,32,8192,128256,64,8,1,8,1,1,none,64",
        "deep,128,20480,105,2048,51200,280,8,35,1,1,3,selective,280",
    ],
)
@pytest.mark.parametrize("cluster", ["a100", "h100"])
def test_rows_unlike_those_fitted(row: str, cluster: str) -> None:
    """Between a tenth and four fifths of the peak, as programs that people run are."""
    _, (found,) = predict_table(f"{HEADER}\n{row}\n", cluster)
    peak = {"a100": 312, "h100": 989}[cluster]
    assert 0.1 * peak < found.tflops_per_gpu < 0.8 * peak
    assert all(value >= -1e-9 for value in found.terms.values())


def test_the_command_says_which_peak_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    rows.write_text(f"{HEADER},dtype\n{ROW},bf16\n{ROW},\n")
    words = ["plan", "predict", str(rows), "--cluster", "t4", "--out", str(out)]
    assert main(words) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    assert "; bfloat16 has no known peak on t4: priced as float32" in first
    assert "no known peak" not in second


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    rows.write_text(f"{HEADER}\n{ROW}\n{ROW.replace('2048,24', '20480,24')}\n")
    words = ["plan", "predict", str(rows), "--cluster", "a100", "--out", str(out)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "2 rows written" in shown and "GB too large" in shown
    added = f"{STEP},{LOW},{HIGH},{RATE},{MEMORY},{FITS}"
    assert out.read_text().splitlines()[0] == f"{HEADER},{added}"
    assert "s per step (80 % interval: " in shown
    rows.write_bytes(b"\xef\xbb\xbf" + rows.read_bytes())  # as Excel begins a file
    assert main(words) == 0
    assert capsys.readouterr().out == shown and shown.startswith("toy: ")
    assert main([*words[:-1], str(rows)]) == 2
    assert "is the file of ROWS.csv, too" in capsys.readouterr().err
    rows.write_text(changed("gpus", "17"))
    assert main(words) == 2
    before = out.read_text()
    assert "row 2 (toy), column gpus" in capsys.readouterr().err
    assert out.read_text() == before
    assert main([*words[:2], str(tmp_path / "none.csv"), *words[3:]]) == 2


def uneven(text: str, **others: str) -> str:
    names, cells = list[str](HEADER.split(",")), list[str](ROW.split(","))
    for name, value in others.items():
        cells[names.index(name)] = value
    return f"{HEADER},stage_layers\n{','.join(cells)},{text}\n"


def test_uneven_stages_are_read_and_priced() -> None:
    seconds = {}
    for text in ("", "6+6+6+6", "5+7+7+5", "9+5+5+5"):
        (found,) = predict_table(uneven(text), "a100")[1]
        seconds[text] = found.step_s
    assert seconds[""] == pytest.approx(seconds["6+6+6+6"])
    # The first and the last stage have the vocabulary beside their layers.
    assert seconds["5+7+7+5"] < seconds[""] < seconds["9+5+5+5"]
    # 26 layers cannot be divided evenly by 4 stages.
    predict_table(uneven("6+7+7+6", layers="26"), "a100")


@pytest.mark.parametrize(
    ("text", "others", "words"),
    [
        ("6+x+6+6", {}, "Allowed: a whole number of layers for each stage"),
        ("6+0+12+6", {}, "Allowed: a whole number of layers for each stage"),
        ("8+8+8", {}, "has 3 stages, and pp=4. Allowed: 4 numbers"),
        ("7+7+7+7", {}, "has the sum 28, and layers=24"),
        ("6+6+6+6", {"virtual_stages": "2"}, "Allowed: virtual_stages 1"),
    ],
)
def test_stages_that_cannot_be_are_refused(
    text: str, others: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match="column stage_layers") as error:
        predict_table(uneven(text, **others), "a100")
    assert words in str(error.value)
