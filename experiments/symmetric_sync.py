"""What a symmetric matrix costs on the wire: full, packed, or as its Cholesky factor.

Bytes, codec time, error and definiteness are measured here; the all-reduce between four
processes over gloo, each on a host of its own with a limited link (`links.py`, needs
root). A codec's break-even is the point-to-point link below which it pays:
bytes saved / (time to encode + time to decode).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dtft.collectives import (
    cholesky_decode,
    cholesky_encode,
    pack_lower,
    unpack_lower,
)
from dtft.elastic.processes import free_port
from experiments import links, report
from experiments.symmetric_sync_worker import WIRES, definite
from experiments.worlds import run_world

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_PROCESSES = 4
CONDITION = 1e4
Reduced = dict[str, dict[str, tuple[float, float]]]
"""n -> wire -> median seconds of the slowest process, bytes sent per process."""


def all_reduce_times(
    sizes: Sequence[int], wires: Sequence[str], mbit_per_s: float, rounds: int
) -> Reduced:
    """Measures all-reduces between four hosts with limited links.

    Raises:
        links.CannotLimitError: where links cannot be limited.
    """
    with links.limited_hosts(NUM_PROCESSES, mbit_per_s) as limited:
        arguments = (",".join(map(str, sizes)), ",".join(wires), str(rounds))
        answers = run_world(
            "experiments.symmetric_sync_worker",
            [arguments] * NUM_PROCESSES,
            address=f"{limited.gateway}:{free_port()}",
            deadline_s=1800,
            prefixes=[host.prefix for host in limited.hosts],
        )
    return {
        n: {
            wire: (
                statistics.median(
                    max(times)
                    for times in zip(
                        *(a[n][wire]["seconds"] for a in answers), strict=True
                    )
                ),
                statistics.fmean(
                    statistics.median(a[n][wire]["bytes"]) for a in answers
                ),
            )
            for wire in wires
        }
        for n in answers[0]
    }


def codecs(wire: str, n: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Jitted encode and decode of a wire; decode gives float32."""
    dtype = WIRES[wire].get("wire_dtype", jnp.float32)
    kind = WIRES[wire]["wire"]
    if kind == "cholesky":
        encode = lambda d: cholesky_encode(d, wire_dtype=dtype).packed  # noqa: E731
        return jax.jit(encode), jax.jit(lambda p: cholesky_decode(p, n))
    if kind == "packed":
        encode = lambda d: pack_lower(d).astype(dtype)  # noqa: E731
        return jax.jit(encode), jax.jit(lambda p: unpack_lower(p.astype("f4"), n))
    return (lambda d: d), (lambda p: p)


def codec_row(wire: str, n: int, rounds: int) -> dict[str, float]:
    """Bytes, seconds, relative error, smallest eigenvalue, break-even in GB/s."""
    matrix = jnp.asarray(definite(n, CONDITION))
    encode, decode = codecs(wire, n)
    coded = encode(matrix)
    decoded = np.asarray(decode(coded), np.float64)
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        jax.block_until_ready(decode(encode(matrix)))
        times.append(time.perf_counter() - begun)
    seconds = 0.0 if wire == "full" else statistics.median(times)
    saved = matrix.nbytes - coded.nbytes
    exact = np.asarray(matrix, np.float64)
    return {
        "bytes": coded.nbytes,
        "seconds": seconds,
        "error": float(np.linalg.norm(decoded - exact) / np.linalg.norm(exact)),
        "smallest": float(np.linalg.eigvalsh(decoded).min()),
        "break_even": saved / seconds / 1e9 if seconds else float("nan"),
    }


def main() -> None:
    """Measures, prints the table, and writes it unless `--quick`."""
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser(description="Symmetric matrices on the wire.")
    parser.add_argument("--quick", action="store_true", help="small; nothing is kept")
    quick = parser.parse_args().quick
    sizes = (128, 256) if quick else (128, 256, 512, 1024, 2048)
    rounds = 2 if quick else 5
    rates = (200.0,) if quick else (100.0, 1000.0)
    reduced, notes = _reduced(sizes, rates, rounds)
    coded = {(n, w): codec_row(w, n, rounds) for n in sizes for w in WIRES}
    header = ["n", "wire", "bytes / n^2", "codec [ms]", "error", "smallest eigenvalue"]
    header.append("break-even [GB/s]")
    for rate in reduced:
        header += [f"all-reduce at {rate:g} Mbit/s [ms]", "sent per process [MB]"]
    rows = [
        _row(n, wire, coded[n, wire], [r[str(n)][wire] for r in reduced.values()])
        for n, wire in coded
    ]
    if quick:
        print("\n".join([*report.table(header, rows), *notes]))
        return
    report.write(
        "symmetric_sync",
        title="Symmetric matrices on the wire: full, packed, Cholesky factor",
        command="python experiments/symmetric_sync.py",
        header=header,
        rows=rows,
        figure=_figure(sizes, coded, reduced),
        notes=notes,
    )


def _reduced(
    sizes: Sequence[int], rates: Sequence[float], rounds: int
) -> tuple[dict[float, Reduced], list[str]]:
    notes = [
        f"Matrices: float32, condition {CONDITION:g}, largest eigenvalue 1. bytes, "
        "codec (encode + decode), error (Frobenius, relative), smallest eigenvalue: "
        "one matrix, one process. Break-even: the point-to-point link below which the "
        "codec pays "
        "against sending the full matrix, bytes saved / codec time."
    ]
    try:
        reduced = {
            rate: all_reduce_times(sizes, tuple(WIRES), rate, rounds) for rate in rates
        }
    except links.CannotLimitError as error:
        return {}, [*notes, f"No all-reduce was measured: {error}"]
    notes.append(
        f"All-reduce: {NUM_PROCESSES} processes over gloo, each in a network namespace "
        "whose interface tc limits in both directions; median over rounds of the "
        "slowest process, wires in turns; bytes as the interface counted them. "
        "XLA's CPU backend sends sums of bfloat16 as float32. A "
        "Cholesky "
        "all-reduce gathers every process's factor, because factors cannot be added."
    )
    return reduced, notes


def _row(
    n: int, wire: str, code: dict[str, float], network: list[tuple[float, float]]
) -> list[object]:
    row: list[object] = [
        n,
        wire,
        f"{code['bytes'] / n**2:.3f}",
        f"{code['seconds'] * 1e3:.2f}",
        f"{code['error']:.1e}",
        f"{code['smallest']:+.1e}",
        "" if wire == "full" else f"{code['break_even']:.3f}",
    ]
    for seconds, sent in network:
        row += [f"{seconds * 1e3:.1f}", f"{sent / 1e6:.3f}"]
    return row


def _figure(
    sizes: Sequence[int],
    coded: dict[tuple[int, str], dict[str, float]],
    reduced: dict[float, Reduced],
) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * (1 + len(reduced)), 4))
    left, *others = np.atleast_1d(figure.subplots(1, 1 + len(reduced)))
    for wire in list(WIRES)[1:]:
        left.loglog(sizes, [coded[n, wire]["break_even"] for n in sizes], label=wire)
    left.set(title="the codec pays on links below", xlabel="n", ylabel="GB/s")
    left.legend()
    for ax, (rate, times) in zip(others, reduced.items(), strict=True):
        for wire in WIRES:
            ratio = [times[str(n)][wire][0] / times[str(n)]["full"][0] for n in sizes]
            ax.semilogx(sizes, ratio, label=wire)
        ax.set(title=f"all-reduce at {rate:g} Mbit/s", xlabel="n", ylabel="time / full")
        ax.set_ylim(bottom=0)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
