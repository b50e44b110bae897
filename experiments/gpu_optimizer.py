"""Max-AdaBelief's update on a GPU: against the memory's own speed, and against optax.

    python experiments/gpu_optimizer.py [--quick]

Three questions. How close one large leaf comes to a stream kernel of the same bytes;
what ResNet-50's 161 leaves cost with and without CUDA command buffers; what refusing
updates that are not finite costs. Needs a GPU and says so where there is none. Command
buffers are set when the backend starts, so each setting is a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

BYTES_PER_PARAMETER = 36
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="
TITLE = "The optimizer update on a GPU"
HEADER = ["case", "update", "ms", "TB/s", "over stream", "over amsgrad"]
Shapes = list[tuple[int, ...]]


def resnet50_shapes() -> Shapes:
    """The 161 trained arrays of ResNet-50 with 1000 classes: 25.56 million numbers.

    >>> shapes = resnet50_shapes()
    >>> import math
    >>> len(shapes), sum(math.prod(shape) for shape in shapes)
    (161, 25557032)
    """
    shapes: Shapes = [(7, 7, 3, 64), (64,), (64,)]
    before = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions = [
                (1, 1, before, width),
                (3, 3, width, width),
                (1, 1, width, 4 * width),
            ]
            if block == 0:
                convolutions.append((1, 1, before, 4 * width))
            for shape in convolutions:
                shapes += [shape, (shape[-1],), (shape[-1],)]
            before = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


def require_gpu(script: str = "gpu_optimizer") -> Any:
    """The first GPU; ends the program, named `script`, where there is none."""
    import jax

    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(
            f"{script}: error: this needs a GPU, and jax {jax.__version__} sees "
            f"only {device.platform}. Run it on a machine with one, with "
            "pip install -e '.[gpu]'."
        )
    return device


def updates() -> dict[str, Callable[[], Any]]:
    """The optimizers that are compared."""
    import optax

    from dtft.optim import max_adabelief

    return {
        "max_adabelief": lambda: max_adabelief(1e-3),
        "max_adabelief, apply_if_finite": lambda: optax.apply_if_finite(
            max_adabelief(1e-3), 5
        ),
        "optax.amsgrad": lambda: optax.amsgrad(1e-3),
        "optax.adabelief": lambda: optax.adabelief(1e-3),
    }


def update_runner(make: Callable[[], Any], shapes: Shapes) -> Callable[[int], float]:
    """What times n donated updates in a row: n to seconds per update."""
    import jax
    import jax.numpy as jnp
    import optax

    solver = make()
    params = [jnp.zeros(shape) for shape in shapes]
    gradients = [jnp.full(shape, 1e-3) for shape in shapes]

    def step(carried: Any, gradients: Any) -> Any:
        params, state = carried
        with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
            new, state = solver.update(gradients, state, params)
            return optax.apply_updates(params, new), state

    compiled = jax.jit(step, donate_argnums=0)
    return _timed(compiled, (params, solver.init(params)), gradients)


def stream_runner(parameters: int) -> Callable[[int], float]:
    """As `update_runner`, of a kernel that reads five arrays and writes four: 36 B."""
    import jax
    import jax.numpy as jnp

    carried = tuple(jnp.zeros(parameters) for _ in range(4))

    def step(carried: Any, x: Any) -> Any:
        return tuple(a + x for a in carried)

    compiled = jax.jit(step, donate_argnums=0)
    return _timed(compiled, carried, jnp.ones(parameters))


def _timed(
    compiled: Callable[..., Any], carried: Any, other: Any
) -> Callable[[int], float]:
    import jax

    held = [carried]
    del carried  # donated: the list has the only name of it

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            held[0] = compiled(held[0], other)
        jax.block_until_ready(held[0])
        return (time.perf_counter() - start) / steps

    run(3)
    return run


def interleaved(
    runners: dict[str, Callable[[int], float]], rounds: int, steps: int
) -> dict[str, float]:
    """Median seconds per update of each, whose turns follow one another."""
    seen: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, run in runners.items():
            seen[name].append(run(steps))
    return {name: median(times) for name, times in seen.items()}


def one_leaf(parameters: int, rounds: int) -> dict[str, float]:
    """Seconds per update of one leaf, by optimizer, with the stream kernel's."""
    runners = {"stream": stream_runner(parameters)}
    for name, make in updates().items():
        runners[name] = update_runner(make, [(parameters,)])
    return interleaved(runners, rounds, 20)


def many_leaves(rounds: int) -> dict[str, float]:
    """Seconds per update of ResNet-50, by optimizer, with the stream kernel's."""
    shapes = resnet50_shapes()
    runners = {"stream": stream_runner(25_557_032)}
    for name, make in updates().items():
        runners[name] = update_runner(make, shapes)
    return interleaved(runners, rounds, 100)


def measure_apart(part: str, quick: bool, flags: str) -> dict[str, Any]:
    """Runs one part of the measurement in a process of its own, with XLA flags.

    Raises:
        SystemExit: it failed or took more than five minutes.
    """
    inherited = os.environ.get("XLA_FLAGS", "")
    environment = {**os.environ, "XLA_FLAGS": f"{inherited} {flags}".strip()}
    command = [sys.executable, __file__, "--part", part, *["--quick"] * quick]
    try:
        done = subprocess.run(
            command, env=environment, timeout=300, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"gpu_optimizer: error: {part} took over 300 s") from None
    if done.returncode:
        raise SystemExit(done.stderr[-4000:].strip())
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(case: str, seconds: dict[str, float], parameters: int) -> list[list[Any]]:
    """The table's rows of one case.

    >>> rows_of("one", {"stream": 1.0, "optax.amsgrad": 2.0}, 10**12)
    [['one', 'stream', '1000.000', '36.00', '1.000', '0.500'], \
['one', 'optax.amsgrad', '2000.000', '18.00', '2.000', '1.000']]
    """
    moved = BYTES_PER_PARAMETER * parameters
    return [
        [
            case,
            name,
            f"{time_s * 1e3:.3f}",
            # The stream's bytes; adabelief moves 28 of them.
            f"{moved / time_s / 1e12:.2f}",
            f"{time_s / seconds['stream']:.3f}",
            f"{time_s / seconds['optax.amsgrad']:.3f}",
        ]
        for name, time_s in seconds.items()
    ]


def show(
    cases: dict[str, tuple[dict[str, float], int]], machine: str, quick: bool
) -> None:
    """Prints the table; unless `quick`, writes it with its figure."""
    import matplotlib.pyplot as plt

    from experiments import report

    rows = [row for case, (s, n) in cases.items() for row in rows_of(case, s, n)]
    if quick:
        print("\n".join(report.table(HEADER, rows)))
        return
    figure, axes = plt.subplots(1, len(cases), figsize=(4 * len(cases), 3.5))
    for panel, (case, (seconds, _)) in zip(axes, cases.items(), strict=True):
        panel.barh(list(seconds), [value * 1e3 for value in seconds.values()])
        panel.axvline(seconds["stream"] * 1e3, color="black", linewidth=0.8)
        panel.set(title=case, xlabel="ms per update")
    figure.tight_layout()
    report.write(
        "gpu_optimizer",
        title=TITLE,
        command="python experiments/gpu_optimizer.py",
        header=HEADER,
        rows=rows,
        figure=figure,
        notes=[
            "`stream` is one kernel that reads and writes the same 36 bytes per "
            "parameter. TB/s counts 36 bytes for every row; optax.adabelief moves 28.",
        ],
        machine=machine,
    )


def main() -> None:
    """Measures each part in its own process and writes the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small and inexact")
    parser.add_argument(
        "--part", choices=["device", "one", "many"], help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    rounds = 3 if options.quick else 15
    large = (16 if options.quick else 256) * 2**20
    if options.part:
        device = require_gpu()
        if options.part == "device":
            print(json.dumps({"machine": f"one {device.device_kind}"}))
        elif options.part == "one":
            print(json.dumps(one_leaf(large, rounds)))
        else:
            print(json.dumps(many_leaves(rounds)))
        return

    def apart(part: str, flags: str = "") -> dict[str, Any]:
        return measure_apart(part, options.quick, flags)

    machine = apart("device")["machine"]
    small = 25_557_032
    cases = {
        f"one leaf, {large // 2**20} Mi": (apart("one"), large),
        "ResNet-50, command buffers": (apart("many"), small),
        "ResNet-50, without": (apart("many", NO_COMMAND_BUFFERS), small),
    }
    show(cases, machine, options.quick)


if __name__ == "__main__":
    main()
