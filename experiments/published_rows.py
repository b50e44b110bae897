"""The published training runs in `data/`, as rows that the planner can predict.

Reads the three tables with their traps (`data/README.md`) and nothing else; what is
made of them is in `public_measurements.py`.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dtft.planner.transformer import Habits, ParallelLayout, Row, Shape, Table

DATA = Path(__file__).parent / "data"
JEAN_ZAY, SELENE = "jean-zay", "selene"
ANOMALY = "775"
"""Line of BigScience's source that took as long as one with 23 % more samples."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One measured run."""

    name: str
    group: str
    row: Row
    cluster: str
    """Name of the catalog."""
    step_s: float
    """Measured seconds of a step."""
    memory_bytes: float = 0.0
    """Measured on the fullest device; 0: not recorded."""


def bigscience() -> list[Published]:
    """The rows of groups C to G that ran, whose shape is known and heads aligned.

    Heads that are no multiple of 8 wide fall off a cliff that is measured (27-34 %),
    not modelled.
    """
    rows = [r for r in _cells("bigscience_176b_a100.csv") if r["status"] == "ok"]
    kept = [r for r in rows if r["group"] in "CDEFG" and r["heads"] and r["layers"]]
    return [
        _bigscience(r) for r in kept if int(r["hidden"]) // int(r["heads"]) % 8 == 0
    ]


def ranking_set() -> list[Published]:
    """The 21 rows of one day and one model (reference section 12, T5)."""
    found = [p for p in bigscience() if p.group == "E"]
    return [p for p in found if (p.row.shape.hidden, p.row.shape.layers) == (14336, 72)]


def megatron() -> list[Published]:
    """The ten rows of Selene."""
    table = Table.parse((DATA / "megatron_a100.csv").read_text())
    found = []
    for cells, row in zip(table.cells, table.rows(Habits()), strict=True):
        flops = row.shape.flops(row.layout.global_batch, row.layout.recompute)
        rate = float(cells["tflops_per_gpu"]) * 1e12 * row.layout.gpus
        found.append(
            Published(
                name=cells["model"],
                group="megatron",
                row=row,
                cluster=SELENE,
                step_s=flops / rate,
            )
        )
    return found


def llm_foundry() -> list[Published]:
    """The rows whose activations stay on the device."""
    cells = _cells("llmfoundry_fsdp.csv")
    return [_llm_foundry(r) for r in cells if r["act_cpu_offload"] == "false"]


def _cells(name: str) -> Iterator[Mapping[str, str]]:
    with (DATA / name).open() as file:
        yield from csv.DictReader(file)


def _bigscience(cells: Mapping[str, str]) -> Published:
    number = {
        name: int(cells[name])
        for name in (
            "hidden", "layers", "heads", "tp", "pp", "dp", "micro_batch",
            "global_batch", "zero",
        )
    }  # fmt: skip
    late = cells["group"] == "G"  # fp32 sums beside the gradients; see the README
    shape = Shape(
        hidden=number["hidden"],
        layers=number["layers"],
        heads=number["heads"],
        seq_len=2048,
        vocab=250880,
    )
    layout = ParallelLayout(
        tp=number["tp"],
        pp=number["pp"],
        dp=number["dp"],
        micro_batch=number["micro_batch"],
        global_batch=number["global_batch"],
        zero=number["zero"],
        gradient_bytes=6 if late else 2,
        stage_layers=_stage_layers(shape.layers, number["pp"], 1 if late else 0),
    )
    name = cells["src_line"]
    return Published(
        name=name,
        group=cells["group"],
        row=Row(where=f"line {name}", shape=shape, layout=layout),
        cluster=JEAN_ZAY,
        step_s=float(cells["sec_per_iter"]),
        memory_bytes=float(cells["mem_gb"] or 0) * 1e9,
    )


def _stage_layers(layers: int, stages: int, ends: int) -> tuple[int, ...]:
    """Layers per stage: as many as fit on each, the rest on the last; `ends` places on
    the first and on the last stage are taken by the embedding.

    >>> _stage_layers(78, 12, 0)
    (7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 1)
    >>> _stage_layers(70, 12, 1)
    (5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5)
    """
    most = -(-(layers + 2 * ends) // stages)
    found, left = [], layers
    for stage in range(stages):
        places = most - (ends if stage in (0, stages - 1) else 0)
        found.append(min(places, left))
        left -= found[-1]
    return tuple(found)


_MPT = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12),
    "1b": (2048, 24, 16), "3b": (2560, 32, 20), "7b": (4096, 32, 32),
    "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
"""Hidden, layers, heads."""
_GPUS = {"a100_40gb": "a100-40gb", "a100_80gb": "a100", "h100_80gb": "h100"}


def _llm_foundry(cells: Mapping[str, str]) -> Published:
    hidden, layers, heads = _MPT[cells["model"]]
    shape = Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        seq_len=int(cells["seq_len"]),
        vocab=50368,
    )
    layout = ParallelLayout(
        tp=1,
        pp=1,
        dp=int(cells["gpus"]),
        micro_batch=int(cells["micro_batch"]),
        global_batch=int(cells["global_batch"]),
        recompute="full" if cells["act_ckpt"] == "true" else "none",
        zero=3 if cells["sharding"] == "FULL_SHARD" else 2,
        flash_attention=True,
        gradient_bytes=4,
        software="eager",
        dtype="float8_e4m3fn" if "fp8" in cells["precision"] else "bfloat16",
    )
    name = f"{cells['model']} s={cells['seq_len']} x{cells['gpus']}"
    return Published(
        name=name,
        group=cells["section"],
        row=Row(where=name, shape=shape, layout=layout),
        cluster=_GPUS[cells["gpu"]],
        step_s=float(cells["global_batch_tokens"]) / float(cells["tokens_per_s"]),
    )
