"""A small folder in ImageNet's format: one colour per class, unlike sizes and modes."""

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"n01": (200, 40, 40), "n02": (40, 200, 40), "n03": (40, 40, 200)}


def make_folder(folder: Path, *, train: int = 12, val: int = 4) -> Path:
    """Writes `train` and `val` images per class; equal calls give equal files."""
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for name, colour in COLOURS.items():
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                path = folder / split / name / f"{name}_{number:02d}.JPEG"
                _save(path, number, colour, random)
    (folder / "train" / "n01" / "notes.txt").write_text("no image")
    return folder


def _save(
    path: Path, number: int, colour: tuple[int, int, int], random: np.random.Generator
) -> None:
    height, width = random.integers(24, 60, 2)
    noise = random.integers(-40, 40, (height, width, 3))
    image = Image.fromarray((np.array(colour) + noise).astype(np.uint8))
    # What ImageNet has as well: grey, CMYK, and a PNG that is called JPEG.
    mode = {1: "L", 2: "CMYK"}.get(number, "RGB")
    kind = "PNG" if number == 3 else "JPEG"
    image.convert(mode).save(path, kind)
