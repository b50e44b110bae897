"""Tables of training runs: reads rows of text as model shapes and layouts.

The columns are the columns of the published Megatron table
(`experiments/data/README.md`). An impossible row is an error that names the row's
number and the column to change.
"""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dtft.planner.software import SoftwareName
from dtft.planner.transformer.model import (
    RECOMPUTE,
    Dtype,
    ParallelLayout,
    Recompute,
    Shape,
)

COUNTS = (
    "heads", "hidden", "layers", "seq_len", "vocab", "gpus", "tp", "pp", "dp",
    "micro_batch", "virtual_stages", "global_batch",
)  # fmt: skip
"""Columns that a table must have, with a whole number above 0 in every row."""
REQUIRED = (*COUNTS, "recompute")
OPTIONAL_COUNTS = ("ffn", "kv_heads", "experts", "top_k", "cp", "ep")
"""Columns with a whole number above 0. By default `ffn` is 4 x `hidden`, `kv_heads` is
`heads`, `top_k` is 2 with several experts, and the others are 1."""
OPTIONAL = (
    "dtype", "zero", "sequence_parallel", "flash_attention", "gradient_bytes",
    "software", "gated", "stage_layers", *OPTIONAL_COUNTS,
)  # fmt: skip
"""Columns that a table may have. An empty cell or a missing column has the default of
`Habits`; for `zero` the default is 0, for `software` it is megatron, for `gated` (a
SwiGLU of three matrices) it is no. `stage_layers` has the layers of each stage with +
between them, such as 7+8+8+7; by default stages have equally many."""

NAMES = ("model", "params_b", "tflops_per_gpu", "pct_peak", "agg_pflops", "note")
"""Columns that a table may have and that change no prediction. Columns whose names
begin with `measured_` or `predicted_` are allowed too, and change no prediction."""

DTYPES: Mapping[str, Dtype] = {
    "float16": "float16", "fp16": "float16", "bfloat16": "bfloat16",
    "bf16": "bfloat16", "float8": "float8_e4m3fn", "fp8": "float8_e4m3fn",
    "float4": "float4_e2m1fn", "fp4": "float4_e2m1fn", "int8": "int8",
}  # fmt: skip
"""Map from a cell of the column `dtype` to the dtype of the matmuls of layers."""

SOFTWARE: tuple[SoftwareName, ...] = ("megatron", "eager", "xla")
"""Cells of the column `software`; the first is the default."""

_MOST = 10**9
"""Numbers in a table must be below this number. A program may count a dim of an array
in 32 bits."""
_LARGEST = 2**60
"""Arrays of a step must have fewer elements, so that 64 bits count their bytes."""
_SHOWN = 10
"""How many rows an error names at most."""

_YES_NO: Mapping[str, bool] = {
    "true": True, "yes": True, "1": True, "false": False, "no": False, "0": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Options that training programs usually have on a device type.

    A table's empty cells get these options.
    """

    fused: bool = False
    """Whether programs use flash attention, sequence parallelism and fp32 gradient sums
    (Hopper and later). Earlier programs use fp16 gradients and unfused attention. But
    programs without recomputation use flash attention on all devices: unfused attention
    would not fit at these sizes."""
    dtype: Dtype = "bfloat16"
    """Dtype of matmuls."""

    def flash_attention(self, recompute: Recompute) -> bool:
        """Returns whether a run whose cell `flash_attention` is empty has used it.

        True for all runs on devices since Hopper (field `fused`). On earlier devices,
        True only for runs without recomputation.

        Args:
            recompute: what the row's run recomputes in the backward pass.
        """
        return self.fused or recompute == "none"

    def sequence_parallel(self, recompute: Recompute) -> bool:
        """Returns whether a run whose cell `sequence_parallel` is empty has used it.

        True for all runs on devices since Hopper (field `fused`). On earlier devices,
        True for runs without full recomputation, because sequence parallelism was
        published together with selective recomputation (arXiv 2205.05198).

        Args:
            recompute: what the row's run recomputes in the backward pass.
        """
        return self.fused or recompute != "full"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: one training run, as a model's shape and its layout."""

    where: str
    """Number and name of the row, for messages."""
    shape: Shape
    layout: ParallelLayout


@dataclass(frozen=True, kw_only=True)
class Table:
    """A header and its rows, as text.

    `cells` has for each row a map from the name of a column to the row's cell.
    """

    header: tuple[str, ...]
    cells: tuple[Mapping[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> "Table":
        """Reads a table from comma-separated text with a header row.

        Raises:
            ValueError: the text cannot be split into cells, there is no header or row,
                a column is duplicate, or a row has another length than the header.
        """
        try:
            lines = [line for line in csv.reader(io.StringIO(text)) if line]
        except csv.Error as error:
            raise ValueError(
                f"the table cannot be split into cells: {error}. Allowed: text with a "
                "line for each row and commas between cells. Look for a quote that is "
                "not closed."
            ) from None
        if len(lines) < 2:
            raise ValueError(
                f"the table has {len(lines)} lines. Give a header with the columns "
                f"{', '.join(REQUIRED)}, and at least one row."
            )
        header = tuple(name.strip() for name in lines[0])
        if twice := [name for name in header if name and header.count(name) > 1]:
            raise ValueError(
                f"the header has the column {twice[0]} {header.count(twice[0])} times. "
                "Leave one of them, or rename the others."
            )
        for number, line in enumerate(lines[1:], 1):
            if len(line) != len(header):
                raise ValueError(
                    f"row {number} has {len(line)} cells, the header has "
                    f"{len(header)}. Give one cell per column; empty ones too."
                )
        cells = [dict(zip(header, line, strict=True)) for line in lines[1:]]
        return cls(header=header, cells=tuple(cells))

    def with_columns(self, columns: Mapping[str, Sequence[object]]) -> "Table":
        """Returns a table with more columns; columns of the same name are replaced.

        Args:
            columns: map from a column's name to its values, one per row.
        """
        header = tuple(dict.fromkeys((*self.header, *columns)))
        cells = tuple(
            {**row, **{name: str(values[number]) for name, values in columns.items()}}
            for number, row in enumerate(self.cells)
        )
        return Table(header=header, cells=cells)

    def text(self) -> str:
        """Writes the table as comma-separated text."""
        out = io.StringIO()
        writer = csv.DictWriter(out, self.header, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.cells)
        return out.getvalue()

    def rows(
        self, habits: Habits, check: Callable[[Row], None] | None = None
    ) -> tuple[Row, ...]:
        """Reads the training runs of the table.

        Args:
            habits: The options of empty cells.
            check: Function that raises a ValueError for a run that is not wanted.

        Raises:
            ValueError: a column is missing or not known, a cell cannot be read, a run
                is impossible, or `check` raised an error. For bad rows, the message has
                a line for each of the first ten, which names row and column.
        """
        if missing := [name for name in REQUIRED if name not in self.header]:
            raise ValueError(
                f"the table has no column {', '.join(missing)}. Required: "
                f"{', '.join(REQUIRED)}. May be added: {', '.join(OPTIONAL)}."
            )
        known = {*REQUIRED, *OPTIONAL, *NAMES}
        for name in self.header:
            if name not in known and not name.startswith(("measured_", "predicted_")):
                raise ValueError(
                    f"column {name!r} is not known, and could change a prediction. "
                    f"Columns that do: {', '.join((*REQUIRED, *OPTIONAL))}. Columns "
                    f"that do not: {', '.join(NAMES)}, measured_..., predicted_.... "
                    f"Leave it out, or rename it to measured_{name or 'x'} if it says "
                    "what was measured."
                )
        found, errors = [], []
        for number, cells in enumerate(self.cells, 1):
            try:
                row = _row(f"row {number}{_name(cells)}", cells, habits)
                if check is not None:
                    check(row)
            except ValueError as error:
                errors.append(str(error))
            else:
                found.append(row)
        if errors:
            raise ValueError(_together(errors, len(self.cells)))
        return tuple(found)


def _together(errors: Sequence[str], num_rows: int) -> str:
    """Joins the errors of a table's bad rows, at most ten of them, to one text.

    Args:
        errors: the error of each bad row.
        num_rows: the number of all rows of the table.
    """
    if len(errors) == 1:
        return errors[0]
    shown = [f"{len(errors)} of {num_rows} rows cannot be predicted:", *errors[:_SHOWN]]
    if len(errors) > _SHOWN:
        shown.append(f"and {len(errors) - _SHOWN} more rows.")
    return "\n".join(shown)


def _name(cells: Mapping[str, str]) -> str:
    return f" ({cells['model']})" if cells.get("model") else ""


def _row(where: str, cells: Mapping[str, str], habits: Habits) -> Row:
    count = {name: _count(where, name, cells[name]) for name in COUNTS}
    recompute = _recompute(where, cells["recompute"])
    given = {
        name: _count(where, name, cells[name])
        for name in OPTIONAL_COUNTS
        if cells.get(name, "").strip()
    }
    experts = given.get("experts", 1)
    shape = Shape(
        **{name: count[name] for name in ("hidden", "layers", "heads", "seq_len")},
        vocab=count["vocab"],
        ffn=given.get("ffn", 0),
        gated=_flag(where, "gated", cells, False),
        kv_heads=given.get("kv_heads", 0),
        experts=experts,
        top_k=given.get("top_k", min(2, experts)),
    )
    fused = habits.flash_attention(recompute)
    apart = habits.sequence_parallel(recompute)
    layout = ParallelLayout(
        tp=count["tp"],
        pp=count["pp"],
        dp=count["dp"],
        cp=given.get("cp", 1),
        ep=given.get("ep", 1),
        micro_batch=count["micro_batch"],
        global_batch=count["global_batch"],
        virtual_stages=count["virtual_stages"],
        recompute=recompute,
        dtype=_dtype(where, cells, habits.dtype),
        zero=_choice(where, "zero", cells, (0, 1, 2, 3), 0),
        gradient_bytes=_choice(
            where, "gradient_bytes", cells, (2, 4, 6), 4 if habits.fused else 2
        ),
        flash_attention=_flag(where, "flash_attention", cells, fused),
        sequence_parallel=_flag(where, "sequence_parallel", cells, apart),
        software=_software(where, cells),
        stage_layers=_stage_layers(where, cells),
    )
    _check(where, shape, layout, count["gpus"])
    _check_arrays(where, shape, layout)
    return Row(where=where, shape=shape, layout=layout)


def _check(where: str, shape: Shape, layout: ParallelLayout, gpus: int) -> None:
    """Checks that a layout divides the model and the batch, and has `gpus` devices.

    `where` names the row in errors.

    Raises:
        ValueError: a size is not divisible, the number of devices is wrong, `top_k`
            exceeds the number of experts, or virtual stages have no pipeline or too few
            layers. The message names row and column.
    """
    tp, pp, dp, parts = layout.tp, layout.pp, layout.dp, layout.virtual_stages
    axes = ("tp", "pp", "dp", *(("cp",) if layout.cp > 1 else ()))
    words = " x ".join(axes)
    if layout.gpus != gpus:
        raise ValueError(
            f"{where}, column gpus: {gpus} is not {words} = "
            f"{' x '.join(str(getattr(layout, axis)) for axis in axes)} = "
            f"{layout.gpus}. Change gpus, or one of {', '.join(axes)}."
        )
    if shape.top_k > shape.experts:
        raise ValueError(
            f"{where}, column top_k: {shape.top_k} of experts={shape.experts}. "
            f"Allowed: 1 to {shape.experts}. Change top_k or experts."
        )
    if parts > 1 and pp == 1:
        raise ValueError(
            f"{where}, column virtual_stages: {parts} with pp=1. Interleaving needs a "
            "pipeline: set virtual_stages 1, or pp above 1."
        )
    if layout.stage_layers:
        _check_stages(where, shape, layout)
    if pp * parts > shape.layers:
        raise ValueError(
            f"{where}, column pp: {pp} stages of {parts} virtual_stages for "
            f"layers={shape.layers}. Allowed: pp x virtual_stages at most "
            f"{shape.layers}."
        )
    equal = 1 if layout.stage_layers else pp * parts
    sizes = (
        ("layers", shape.layers, equal, "pp x virtual_stages"),
        ("heads", shape.heads, tp, "tp"),
        ("hidden", shape.hidden, shape.heads, "heads"),
        ("hidden", shape.hidden, tp, "tp"),
        ("heads", shape.heads, shape.kv_heads or 1, "kv_heads"),
        ("kv_heads", shape.kv_heads or tp, tp, "tp"),
        ("ffn", shape.ffn_width, tp, "tp"),
        ("seq_len", shape.seq_len, layout.cp, "cp"),
        ("dp", dp, layout.ep, "ep"),
        ("experts", shape.experts, layout.ep, "ep"),
        ("seq_len", shape.seq_len * shape.top_k, shape.experts, "experts"),
        (
            "global_batch",
            layout.global_batch,
            layout.micro_batch * dp,
            "micro_batch x dp",
        ),
    )
    for column, size, divisor, words in sizes:
        if size % divisor:
            raise ValueError(
                f"{where}, column {column}: {size} is not divisible by {words} = "
                f"{divisor}. Change {column}, or {words.replace(' x ', ' or ')}."
            )


def _check_stages(where: str, shape: Shape, layout: ParallelLayout) -> None:
    """Checks that `stage_layers` agrees with the other columns of a row.

    `where` names the row in errors.

    Raises:
        ValueError: there are more or fewer stages or layers than the row has, or stages
            are interleaved. The message names row and column.
    """
    text = "+".join(map(str, layout.stage_layers))
    begin = f"{where}, column stage_layers: {text} has"
    if len(layout.stage_layers) != layout.pp:
        raise ValueError(
            f"{begin} {len(layout.stage_layers)} stages, and pp={layout.pp}. Allowed: "
            f"{layout.pp} numbers. Change stage_layers or pp."
        )
    if sum(layout.stage_layers) != shape.layers:
        raise ValueError(
            f"{begin} the sum {sum(layout.stage_layers)}, and layers={shape.layers}. "
            "Allowed: the same number. Change stage_layers or layers."
        )
    if layout.virtual_stages > 1:
        raise ValueError(
            f"{begin} stages of its own, and virtual_stages={layout.virtual_stages}. "
            "Allowed: virtual_stages 1. Change one of the two columns."
        )


def _check_arrays(where: str, shape: Shape, layout: ParallelLayout) -> None:
    """Checks that the largest arrays of a step have fewer than 2**60 elements.

    The limit is `_LARGEST`. The arrays are the weights of all layers, their
    activations, attention scores without flash attention, and the logits. `where` names
    the row in errors.

    Raises:
        ValueError: an array is too large; the message names row and column.
    """
    layers, hidden = ("layers", shape.layers), ("hidden", shape.hidden)
    rows = (("global_batch", layout.global_batch), ("seq_len", shape.seq_len))
    wide = shape.ffn_width * (2 if shape.gated else 1)
    ffn = ("ffn" if shape.ffn else "hidden", wide)
    scores = () if layout.flash_attention else (("heads", shape.heads), rows[1])
    arrays = (
        (layers, hidden, ("hidden", 3 * shape.hidden)),
        (layers, hidden, ffn, ("experts", shape.experts)),
        (*rows, layers, ("hidden", 3 * shape.hidden)),
        (*rows, layers, ffn, ("top_k", shape.top_k)),
        (*rows, layers, *scores),
        (*rows, ("vocab", shape.vocab)),
    )
    for array in arrays:
        size = math.prod(number for _, number in array)
        if size >= _LARGEST:
            column, _ = max(array, key=lambda pair: pair[1])
            words = ", ".join(dict.fromkeys(name for name, _ in array))
            raise ValueError(
                f"{where}, column {column}: an array would have {size:.3g} elements "
                f"({words}). Allowed: below {_LARGEST:.3g}. Change {column}."
            )


def _count(where: str, column: str, text: str) -> int:
    value = _whole(text)
    if value is None or not 1 <= value < _MOST:
        raise ValueError(
            f"{where}, column {column}: {text!r:.80} is no whole number above 0 and "
            f"below {_MOST}. Change {column}."
        )
    return value


def _whole(text: str) -> int | None:
    """Returns the whole number that a cell has, such as 8 or 8.0; None if it has none.

    >>> _whole("8.0"), _whole("8.5"), _whole("inf")
    (8, None, None)
    """
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if math.isfinite(value) and value.is_integer() else None


def _recompute(where: str, text: str) -> Recompute:
    for known in RECOMPUTE:
        if text.strip().lower() == known:
            return known
    raise ValueError(
        f"{where}, column recompute: {text!r:.80}. Allowed: {', '.join(RECOMPUTE)}."
    )


def _dtype(where: str, cells: Mapping[str, str], default: Dtype) -> Dtype:
    text = cells.get("dtype", "").strip().lower()
    if not text:
        return default
    if text not in DTYPES:
        raise ValueError(
            f"{where}, column dtype: {text!r:.80}. Allowed: {', '.join(DTYPES)}: the "
            "dtype of layers' matmuls, with 2 bytes for each parameter and activation "
            "(sums of int8 are sent in 4). Leave the cell empty for the device's usual "
            "one."
        )
    return DTYPES[text]


def _software(where: str, cells: Mapping[str, str]) -> SoftwareName:
    text = cells.get("software", "").strip().lower()
    for known in SOFTWARE:
        if text in (known, ""):
            return known
    raise ValueError(
        f"{where}, column software: {text!r:.80}. Allowed: {', '.join(SOFTWARE)}: the "
        "rules of kernels and overlap. Leave the cell empty for megatron."
    )


def _stage_layers(where: str, cells: Mapping[str, str]) -> tuple[int, ...]:
    text = cells.get("stage_layers", "").strip()
    if not text:
        return ()
    found = [_whole(one) for one in text.split("+")]
    if any(one is None or not 1 <= one < _MOST for one in found):
        raise ValueError(
            f"{where}, column stage_layers: {text!r:.80}. Allowed: a whole number of "
            "layers for each stage, with + between them, such as 7+8+8+7. Leave the "
            "cell empty for equal stages."
        )
    return tuple(one for one in found if one is not None)


def _choice(
    where: str,
    column: str,
    cells: Mapping[str, str],
    allowed: Sequence[int],
    default: int,
) -> int:
    text = cells.get(column, "").strip()
    if not text:
        return default
    value = _whole(text)
    if value is None or value not in allowed:
        values = ", ".join(map(str, allowed))
        raise ValueError(f"{where}, column {column}: {text!r:.80}. Allowed: {values}.")
    return value


def _flag(where: str, column: str, cells: Mapping[str, str], default: bool) -> bool:
    text = cells.get(column, "").strip().lower()
    if not text:
        return default
    if text not in _YES_NO:
        raise ValueError(
            f"{where}, column {column}: {text!r:.80}. Allowed: {', '.join(_YES_NO)}."
        )
    return _YES_NO[text]
