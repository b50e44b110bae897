"""ResNet-50 from image files to a plateau: accuracy, where it stops, input and step.

Makes a folder in ImageNet's format whose classes are patterns (rows, rings, dots ...)
of random scale, colours and noise, so that a random part of an image shows its class;
trains `resnet50_imagenet` on it with `dtft train`, as a user would, until the loss has
stopped falling; measures how fast rows are read with nothing else running. Usage:

    python experiments/resnet50_images.py [--quick]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from dtft.data import ImageFolderConfig, make_datasets
from experiments import report

NAME = "resnet50_images"
SIZE, BATCH = 64, 64
PATIENCE, MIN_DELTA, MOST_STEPS = 60, 0.03, 500
LEARNING_RATE, WARM_UP = 1e-3, 50

Pattern = Callable[[np.ndarray, np.ndarray], np.ndarray]
PATTERNS: dict[str, Pattern] = {
    "checks": lambda x, y: np.sin(x) * np.sin(y) > 0,
    "columns": lambda x, y: np.sin(x) + 0 * y > 0,
    "crosses": lambda x, y: np.minimum(abs(np.sin(x / 2)), abs(np.sin(y / 2))) < 0.25,
    "diamonds": lambda x, y: np.sin(x + y) * np.sin(x - y) > 0,
    "dots": lambda x, y: np.sin(x) + np.sin(y) > 1,
    "noise": lambda x, y: np.sin(1e3 * x * x) * np.sin(1e3 * y * y * x) > 0,
    "rings": lambda x, y: np.sin(np.hypot(x, y)) > 0,
    "rows": lambda x, y: np.sin(y) + 0 * x > 0,
    "waves": lambda x, y: np.sin(y + 2 * np.sin(x)) > 0,
    "zigzags": lambda x, y: np.sin(y + 2 * abs((x / 3) % 2 - 1)) > 0,
}
"""Where the lighter colour is; x and y in radians, 2 pi a period. No pattern changes
its class when it is mirrored."""


def make_images(folder: Path, *, train: int, val: int) -> Path:
    """Writes `train` and `val` JPEG files of each class; equal calls, equal files."""
    from PIL import Image

    random = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for name, pattern in PATTERNS.items():
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                path = folder / split / name / f"{number:04d}.JPEG"
                Image.fromarray(picture(pattern, random)).save(path, quality=85)
    return folder


def picture(pattern: Pattern, random: np.random.Generator) -> np.ndarray:
    """[H, W, 3] uint8: two colours, a scale, an offset and noise drawn at random."""
    height, width = random.integers(SIZE, SIZE * 3 // 2, 2)
    period = random.uniform(8, 16)
    x, y = (
        (np.arange(length) + random.uniform(0, 1000)) * 2 * np.pi / period
        for length in (width, height)
    )
    if pattern is PATTERNS["rings"]:  # their centre is near the image's
        x, y = ((v - v.mean()) + random.uniform(-np.pi, np.pi) for v in (x, y))
    light_HW1 = pattern(x[None], y[:, None])[..., None]
    dark, gain = random.uniform(0, 150, 3), random.uniform(30, 100, 3)
    noise = random.normal(0, 20, (height, width, 3))
    return np.clip(dark + light_HW1 * gain + noise, 0, 255).astype(np.uint8)


def trained(folder: Path, run: Path, steps: int) -> tuple[list[Any], dict[str, Any]]:
    """`dtft train` to its end: the records of its steps and its summary."""
    options: dict[str, object] = {
        "data.path": folder,
        "data.image_size": SIZE,
        "data.global_batch": BATCH,
        "data.threads": 2,
        "model.num_classes": len(PATTERNS),
        "model.compute_dtype": "float32",
        "cluster.hosts": 1,
        "optim.learning_rate": LEARNING_RATE,
        "optim.schedule.warmup_steps": min(WARM_UP, steps // 2),
        "optim.schedule.decay_steps": MOST_STEPS,
        "stop.metric": "loss",
        "stop.patience": PATIENCE,
        "stop.min_delta": MIN_DELTA,
        "stop.steps": steps,
        "checkpoint.storage_interval": 0,
        "log.every": 1,
        "log.tensorboard": False,
        "log.run_dir": run,
    }
    words = [text for k, v in options.items() for text in (f"--{k}", str(v))]
    command = [sys.executable, "-m", "dtft.cli", "train", "resnet50_imagenet", *words]
    print(" ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], json.loads(
        (run / "summary.json").read_text()
    )


def input_rate(folder: Path, batches: int) -> float:
    """Images per second that are read, decoded, cropped and stacked."""
    config = ImageFolderConfig(
        path=str(folder), image_size=SIZE, global_batch=BATCH, threads=2
    )
    source = make_datasets(config, 0).train
    ahead = source.batches(
        lambda step: range((step - 1) * BATCH, step * BATCH), 1, BATCH
    )
    next(ahead)  # threads have started
    begin = time.perf_counter()
    for _ in range(batches):
        next(ahead)
    seconds = time.perf_counter() - begin
    ahead.close()
    return batches * BATCH / seconds


def main() -> None:
    """Makes the images, trains, measures; writes table and figure unless --quick."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few images and steps")
    quick = parser.parse_args().quick
    per_class = (20, 5) if quick else (300, 60)
    with tempfile.TemporaryDirectory() as place:
        folder = make_images(Path(place) / "i", train=per_class[0], val=per_class[1])
        rate = input_rate(folder, 10 if quick else 100)
        begin = time.perf_counter()
        records, summary = trained(
            folder, Path(place) / "run", 4 if quick else MOST_STEPS
        )
        seconds = time.perf_counter() - begin
    step_s = statistics.median(it["step_ms"] for it in records if "step_ms" in it) / 1e3
    rows = [
        ["training images, test images", f"{10 * per_class[0]}, {10 * per_class[1]}"],
        ["stopped at step", summary["step"]],
        ["epochs", f"{summary['step'] * BATCH / (10 * per_class[0]):.1f}"],
        ["test accuracy", f"{summary['test_accuracy']:.4f}"],
        ["test loss", f"{summary['test_loss']:.4f}"],
        ["images/s, step and input together", f"{BATCH / step_s:.0f}"],
        ["images/s, input alone", f"{rate:.0f}"],
        ["wall time with compilation and evaluation", f"{seconds:.0f} s"],
    ]
    if quick:
        print("\n".join(report.table(["what", "figure"], rows)))
        return
    report.write(
        NAME,
        title="ResNet-50 on generated image files, to a plateau",
        command=f"python experiments/{NAME}.py",
        header=["what", "figure"],
        rows=rows,
        figure=curves(records),
        notes=[
            f"Ten classes of patterns, files of {SIZE} to {SIZE * 3 // 2} pixels, a "
            f"batch of {BATCH} parts of {SIZE} x {SIZE} pixels, float32, "
            "Max-AdaBelief. Chance is 0.1.",
            f"The run ends when the loss of a batch has not fallen by {MIN_DELTA} "
            f"below its lowest for {PATIENCE} steps.",
            "Input alone: the same files, crops and two threads, with no step beside "
            "them on the two cores.",
        ],
    )


def curves(records: list[Any]) -> Any:
    """Loss and accuracy of training over steps, as means of 20 steps."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3))
    for axis, name in zip(axes, ("loss", "accuracy"), strict=True):
        values = [it[name] for it in records]
        means = [
            statistics.mean(values[max(0, i - 19) : i + 1]) for i in range(len(values))
        ]
        axis.plot([it["step"] for it in records], means)
        axis.set(xlabel="step", title=f"training {name}, mean of 20 steps")
    return figure


if __name__ == "__main__":
    main()
