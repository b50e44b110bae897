"""From an image file to pixels, and which part of an image a row shows.

Parts are pure functions of sizes and of a random generator. Must stay free of numpy and
Pillow imports at module level, and must not know folders, classes or rows.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

AREA = (0.08, 1.0)
"""Share of the image that a training row shows, smallest and largest."""
ASPECT = (3 / 4, 4 / 3)
"""Width by height of that part before it is resized."""

Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge in pixels."""


def random_box(width: int, height: int, random: "np.random.Generator") -> Box:
    """A part of an image with a random area (AREA) and aspect ratio (ASPECT).

    Ten tries; then the largest part in the centre with an allowed aspect ratio.
    """
    low, high = math.log(ASPECT[0]), math.log(ASPECT[1])
    for _ in range(10):
        area = width * height * random.uniform(*AREA)
        aspect = math.exp(random.uniform(low, high))
        wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            left = int(random.integers(width - wide + 1))
            upper = int(random.integers(height - tall + 1))
            return (left, upper, left + wide, upper + tall)
    wide = min(width, height * ASPECT[1])
    return _centred(width, height, wide, min(height, wide / ASPECT[0]))


def centre_box(width: int, height: int, share: float) -> Box:
    """The square in the centre that takes `share` of the shorter side.

    >>> centre_box(400, 256, 0.875)
    (88.0, 16.0, 312.0, 240.0)
    """
    side = min(width, height) * share
    return _centred(width, height, side, side)


def open_image(path: Path) -> "Image.Image":
    """The pixels of a file, as red, green and blue.

    Raises:
        ValueError: it cannot be read as an image; names it.
    """
    reader = pillow()
    try:
        with reader.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, reader.DecompressionBombError) as error:
        raise ValueError(
            f"{path} cannot be read as an image: {error}. Replace the file, or remove "
            "it and start a new run: the run's identity holds the list of files."
        ) from error


def pillow() -> Any:
    """Pillow's Image module.

    Raises:
        ValueError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(
            "image files need Pillow, which is not installed. "
            "Install it with: pip install 'dtft[images]'"
        ) from error
    return Image


def _centred(width: int, height: int, wide: float, tall: float) -> Box:
    left, upper = (width - wide) / 2, (height - tall) / 2
    return (left, upper, left + wide, upper + tall)
