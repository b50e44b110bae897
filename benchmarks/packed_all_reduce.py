"""Packed against plain all-reduce of symmetric matrices on limited links.

`python benchmarks/packed_all_reduce.py [--sizes 2048,4096] [--mbit 200,1000]` prints
one JSON object and one line per bandwidth. Four processes over gloo, each on its own
host (`experiments/links.py`; needs root); packed, and `pmean` of the whole matrix, take
turns. Targets: bytes <= 0.53, time <= 0.6 of plain. The four hosts share this machine's
cores, so the work of packing counts for more than on hosts of their own.
"""

import argparse
import json

from experiments.symmetric_sync import NUM_PROCESSES, all_reduce_times
from experiments.symmetric_sync_worker import PLAIN

MAX_BYTES, MAX_TIME = 0.53, 0.6
PACKED = "packed"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description="Packed against plain all-reduce on limited links."
    )
    parser.add_argument("--sizes", default="2048,4096", help="n, with commas")
    parser.add_argument("--mbit", default="200,1000", help="Mbit/s, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sizes = [int(n) for n in options.sizes.split(",")]
    for mbit_per_s in map(float, options.mbit.split(",")):
        found = all_reduce_times(sizes, (PLAIN, PACKED), mbit_per_s, options.rounds)
        results = {
            n: {
                "plain_s": wires[PLAIN][0],
                "packed_s": wires[PACKED][0],
                "plain_bytes_sent": wires[PLAIN][1],
                "packed_bytes_sent": wires[PACKED][1],
                "time_ratio": wires[PACKED][0] / wires[PLAIN][0],
                "bytes_ratio": wires[PACKED][1] / wires[PLAIN][1],
            }
            for n, wires in found.items()
        }
        setting = {"processes": NUM_PROCESSES, "mbit_per_s": mbit_per_s}
        print(json.dumps({**setting, "rounds": options.rounds, "n": results}))
        for n, result in results.items():
            print(_line(n, mbit_per_s, result))


def _line(n: str, mbit_per_s: float, result: dict[str, float]) -> str:
    bytes_, seconds = result["bytes_ratio"], result["time_ratio"]
    met = bytes_ <= MAX_BYTES and seconds <= MAX_TIME
    return (
        f"packed / plain all-reduce, n={n}, {mbit_per_s:g} Mbit/s: bytes {bytes_:.3f} "
        f"(target {MAX_BYTES}), time {seconds:.3f} (target {MAX_TIME}): "
        f"{'met' if met else 'NOT met'}"
    )


if __name__ == "__main__":
    main()
