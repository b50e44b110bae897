"""`dtft calibrate`: measures this machine, prints a table, writes a calibration file.

With logs of past runs it also fits a factor for each term of a predicted step time
(such as compute and collectives), so that predictions match the measured step times.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtft.calibration import measure_devices
from dtft.cli.out_files import check_writable, read_text
from dtft.planner.cost import Calibration, PastRun, learn, read_log
from dtft.train import keep_cpu_memory, make_cpu_devices

if TYPE_CHECKING:
    from dtft.cli.commands import CalibrateCommand


_MOST = 256
"""Largest value of --devices; each CPU device that is made has a thread."""


def run(options: "CalibrateCommand") -> int:
    """Runs `dtft calibrate`; returns the exit code 0.

    Measures the devices, or reads the calibration that --given names. Fits it to the
    logs that --runs names, prints the result, and writes it to --out.

    Raises:
        ValueError: --devices is out of range or more than the machine has, --out cannot
            be written, --runs names no file, or a given file cannot be read or is not
            of the kind that its flag needs (a calibration, a log of runs).
    """
    check_writable("--out", options.out)
    if options.runs == ():
        raise ValueError("--runs names no file. Give plan_times.jsonl of past runs.")
    runs = [run for path in options.runs or () for run in _runs(Path(path))]
    begin = time.perf_counter()
    found = Calibration.read(options.given) if options.given else _measured(options)
    learnt = learn(found, runs)
    print(table(learnt))
    if not options.given:
        print(f"measured in {time.perf_counter() - begin:.0f} s")
    if options.runs:
        print(f"{learnt.num_runs} of {len(runs)} past runs are of this cluster")
    found = learnt
    if options.out:
        Path(options.out).write_text(found.to_json() + "\n")
        print(f"written to {options.out}")
    return 0


def _measured(options: "CalibrateCommand") -> Calibration:
    keep_cpu_memory(large=True)  # as trainers with a plan do
    return measure_devices(_devices(options.devices))


def _runs(path: Path) -> list[PastRun]:
    text = read_text("--runs", str(path), "plan_times.jsonl of a run's directory")
    try:
        return read_log(text)
    except ValueError as error:
        raise ValueError(f"--runs {path}: {error}") from None


def _devices(number: int | None) -> list[Any]:
    """Returns the devices to measure; on CPU first makes `number` devices.

    No devices are made if the user has set a number of CPU devices, in XLA_FLAGS or
    JAX's option `jax_num_cpu_devices`.

    Args:
        number: number of devices; None: all devices.

    Raises:
        ValueError: `number` is below 1, above 256 (`MOST`, the largest value of
            --devices), or above the number of the machine's devices.
    """
    import jax

    if number is not None and not 1 <= number <= _MOST:
        raise ValueError(f"--devices {number}: Allowed: 1 to {_MOST}.")
    if number is not None:
        make_cpu_devices(number)
    devices = jax.devices()
    if number is not None and number > len(devices):
        raise ValueError(
            f"--devices {number}: this machine has {len(devices)}. Allowed: 1 to "
            f"{len(devices)}; CPU devices are made with JAX_PLATFORMS=cpu."
        )
    return devices[:number]


def table(found: Calibration) -> str:
    """Formats a calibration as a table: a line per figure, with its standard error.

    Errors are relative to the figure, and left empty if they are not known. Further
    lines have the median error of each fit.
    """
    efficiency = found.efficiency
    lines = [f"{found.num_devices} x {found.device}, {found.software}", ""]
    lines += [f"{'scalar':<44}{'value':>16}{'error':>9}"]

    def row(name: str, value: str, error: str = "") -> None:
        of = found.errors.get(error)
        lines.append(f"{name:<44}{value:>16}{'' if of is None else f'{of:>8.1%}'}")

    for dtype, peak in found.peak_flops.items():
        row(f"peak {dtype}", f"{peak / 1e9:.1f} GFLOP/s")
    row("e0, share of the peak", f"{efficiency.e0:.3f}", "matmul: e0")
    row("x0, rows at half of it", f"{efficiency.x0:.1f}", "matmul: x0")
    row("c0, channels at half of it", f"{efficiency.c0:.1f}", "convolutions: c0")
    row("    times as long, odd channels", f"{efficiency.odd:.2f}", "convolutions: odd")
    row("start of an operator", _us(efficiency.launch_s), "matmul: launch_s")
    row("start of a step", _us(efficiency.dispatch_s))
    reached = found.memory_bandwidth * efficiency.memory
    row("memory", f"{reached / 1e9:.1f} GB/s", "memory: bandwidth")
    cached = reached * efficiency.cache_gain
    row("cache", f"{cached / 1e9:.1f} GB/s", "memory: cache_gain")
    row("    up to", f"{efficiency.cache_bytes / 2**20:.2f} MiB")
    row("element-wise operation", _ns(efficiency.simple_s), "elements: simple_s")
    row("    one like exp", _ns(efficiency.special_s), "elements: special_s")
    row("element read across the order", _ns(efficiency.strided_s))
    row("element of a window", _ns(efficiency.window_s))
    row("    given back to it", _ns(efficiency.window_back_s))
    for key, link in found.links.items():
        for kind, curves in link.measured.items():
            for n, curve in curves.items():
                of = f"collectives on {key}, {kind} of {n}"
                row(
                    f"{kind} of {n}, {key}: latency",
                    _us(curve.latency_s),
                    f"{of}: latency_s",
                )
                rate = f"{curve.bandwidth / 1e9:.3f} GB/s"
                row("    bandwidth", rate, f"{of}: bandwidth")
        for n, seconds in link.meeting.items():
            row(f"meeting of {n} behind computing", _us(seconds))
        for n, share in link.ahead.items():
            row(f"gathers of {n} hidden beside computing", f"{share:.0%}")
    if found.links:
        row("overlap: computing slowed by", f"{efficiency.overlap_kappa:.2f}")
        row("overlap: share of computing", f"{efficiency.overlap_fraction:.2f}")
    for term, factor in found.scales.items():
        row(f"past runs: {term} takes", f"{factor:.3f} times", f"scale {term}")
    lines += ["", f"{'fit':<44}{'median error':>16}"]
    lines += [f"{name:<44}{off:>16.1%}" for name, off in found.residuals.items()]
    return "\n".join(lines)


def _ns(seconds: float) -> str:
    return f"{seconds * 1e9:.3f} ns"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us"
