"""`dtft plan predict`: adds predictions to a CSV table with a training run per row.

Reads and writes the files and prints a line per run. `dtft.planner.transformer`
predicts step time and memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtft.cli.out_files import check_apart, check_writable, read_text

if TYPE_CHECKING:
    from dtft.cli.commands import PredictCommand
    from dtft.planner.transformer import RowPrediction, Table


def run(options: "PredictCommand") -> int:
    """Runs `dtft plan predict`; returns the exit code 0.

    Raises:
        ValueError: the table cannot be read or has an invalid row, the cluster is
            unknown or too small, or the result cannot be written or would overwrite an
            input file.
    """
    from dtft.planner.transformer import predict_table

    check_writable("--out", options.out)
    files = {"ROWS.csv": options.rows, "--cluster": options.cluster}
    check_apart({**files, "--out": options.out})
    allowed = "a table (CSV) with the columns of experiments/data/megatron_a100.csv"
    text = read_text("ROWS.csv", options.rows, allowed)
    table, found = predict_table(text, options.cluster)
    Path(options.out).write_text(table.text())
    print("\n".join(lines(table, found)))
    print(f"{len(found)} rows written to {options.out}")
    return 0


def lines(table: "Table", found: Sequence["RowPrediction"]) -> list[str]:
    """Formats the prediction for each row of the table as a line.

    A line has the seconds per step, the interval in which they are expected, the
    TFLOP/s and the bytes of memory per device. If the bytes exceed the device's
    capacity, the line has the difference too. If the device has no peak FLOP/s for the
    row's dtype, the line says which peak was used.
    """
    from dtft.planner.cluster import INTERVAL_SHARE

    made = []
    for number, (cells, row) in enumerate(zip(table.cells, found, strict=True), 1):
        name = cells.get("model") or f"row {number}"
        over = row.memory_bytes - row.capacity_bytes
        fits = f"  {over / 1e9:.1f} GB too large" if over > 0 else ""
        said = "".join(f"; {text}" for text in row.unlisted)
        made.append(
            f"{name}: {row.step_s:.4g} s per step ({INTERVAL_SHARE * 100:.0f} % "
            f"interval: {row.low_s:.3g} to {row.high_s:.3g} s), "
            f"{row.tflops_per_gpu:.4g} TFLOP/s per device, "
            f"{row.memory_bytes / 1e9:.1f} GB{fits}{said}"
        )
    return made
