"""Packed against full all-reduce of symmetric matrices on limited links.

`python benchmarks/packed_all_reduce.py [--sizes 2048,4096] [--mbit 1000] [--rounds 5]`
prints one JSON object and one line. Four processes over gloo, each on a host of its own
(`experiments/links.py`; needs root); packed and full take turns. Targets: bytes <= 0.53,
time <= 0.6 of full.
"""

import argparse
import json

from experiments.symmetric_sync import NUM_PROCESSES, all_reduce_times

MAX_BYTES, MAX_TIME = 0.53, 0.6


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="2048,4096", help="n, with commas")
    parser.add_argument("--mbit", type=float, default=1000, help="Mbit/s of every link")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sizes = [int(n) for n in options.sizes.split(",")]
    found = all_reduce_times(sizes, ("full", "packed"), options.mbit, options.rounds)
    results = {
        n: {
            "full_s": wires["full"][0],
            "packed_s": wires["packed"][0],
            "full_bytes_sent": wires["full"][1],
            "packed_bytes_sent": wires["packed"][1],
            "time_ratio": wires["packed"][0] / wires["full"][0],
            "bytes_ratio": wires["packed"][1] / wires["full"][1],
        }
        for n, wires in found.items()
    }
    setting = {"processes": NUM_PROCESSES, "mbit_per_s": options.mbit}
    print(json.dumps({**setting, "rounds": options.rounds, "n": results}))
    worst_bytes = max(r["bytes_ratio"] for r in results.values())
    worst_time = max(r["time_ratio"] for r in results.values())
    met = worst_bytes <= MAX_BYTES and worst_time <= MAX_TIME
    print(
        f"packed / full all-reduce, n={options.sizes}, {options.mbit:g} Mbit/s: bytes "
        f"{worst_bytes:.3f} (target {MAX_BYTES}), time {worst_time:.3f} "
        f"(target {MAX_TIME}): {'met' if met else 'NOT met'}"
    )


if __name__ == "__main__":
    main()
