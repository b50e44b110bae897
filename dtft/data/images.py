"""Image data: a folder in ImageNet's format read file by file, and synthetic images.

Numbers the files and chooses the crop of each row. The crop of a training row depends
only on the file, the experiment's seed and the row's global index, so every host reads
the same bytes for a row (with the same version of Pillow, see constraints.txt). Images
are uint8; the model normalizes them. JAX, grain, numpy and Pillow are not imported at
module level.

Legend: H height, W width, C channels.
"""

import functools
import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dtft.data.datasets import Columns, DataConfig

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image


AREA = (0.08, 1.0)
"""Smallest and largest area of a training row's random crop, as a share of the image's
area."""
ASPECT = (3 / 4, 4 / 3)
"""Smallest and largest ratio of width to height of a training row's random crop, before
the crop is resized."""

Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge of a crop, in pixels of the image."""


def random_box(width: int, height: int, random: "np.random.Generator") -> Box:
    """Returns a crop with a random area, aspect ratio and position.

    The area is 8 to 100 % of the image's area (`AREA`). The aspect ratio, width to
    height, is 3/4 to 4/3 (`ASPECT`). If none of ten random crops fits into the image,
    returns the largest centred crop with an aspect ratio in this range.

    Args:
        width: width of the image in pixels.
        height: height of the image in pixels.
        random: the source of all random numbers.

    Returns:
        The crop as (left, upper, right, lower) in pixels.
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
    """Returns the centred square whose side is `share` of the image's shorter side.

    `width` and `height` are the image's size in pixels; `share` is above 0 and at most
    1. The result is (left, upper, right, lower) in pixels.

    >>> centre_box(400, 256, 0.875)
    (88.0, 16.0, 312.0, 240.0)
    """
    side = min(width, height) * share
    return _centred(width, height, side, side)


def open_image(path: Path) -> "Image.Image":
    """Opens an image file and converts its pixels to RGB.

    Raises:
        ValueError: the file is missing, may not be read or is no image (the text names
            the file), or Pillow is not installed.
        OSError: this host cannot read the file now, for example because of its mount or
            too many open files.
    """
    reader = pillow()
    try:
        with reader.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, reader.DecompressionBombError) as error:
        if _is_of_this_host(error):
            raise
        raise ValueError(
            f"{path} cannot be read as an image: {error}. Replace the file, or remove "
            "it and start a new run: the run's identity holds the list of files."
        ) from error


_OF_INPUT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


def _is_of_this_host(error: Exception) -> bool:
    """Whether a failed access may succeed later, or on another host.

    Returns False for a missing or forbidden path, and for a file that Pillow cannot
    decode (an OSError without a number): the input is at fault. The caller turns such
    an error into a ValueError, which ends the whole job. Returns True for all other
    errors of the operating system.

    >>> _is_of_this_host(OSError(5, "Input/output error"))
    True
    >>> _is_of_this_host(FileNotFoundError(2, "No such file or directory"))
    False
    """
    is_numbered = isinstance(error, OSError) and error.errno is not None
    return is_numbered and not isinstance(error, _OF_INPUT)


def pillow() -> Any:
    """Imports and returns Pillow's Image module.

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


SUFFIXES = (".jpeg", ".jpg", ".png")
"""Suffixes, in upper or lower case, of the files that `ImageFolderConfig` reads as
samples; other files are ignored."""
VIEW_VERSION = 1
"""Version of the crops in `ImageFolderConfig.identity`; to be incremented when the same
file, seed and row no longer give the same bytes."""
_LAYOUT = "Expected PATH/train/CLASS/*.JPEG and PATH/val/CLASS/*.JPEG"
_SHIFTS = 2**16


@dataclass(frozen=True, kw_only=True)
class ImageFolderConfig(DataConfig):
    """A folder in ImageNet's format: PATH/train/CLASS/*.JPEG, PATH/val/CLASS/*.JPEG.

    Classes are numbered in the order of their names. A label is the number of the
    file's class folder. Training rows are random crops, resized and flipped at random
    (Szegedy et al., "Going deeper with convolutions", 2015, section 6); test rows are
    resized centre crops.
    """

    short_name: ClassVar[str] = "image_folder"

    path: str = ""
    """The folder that holds `train` and `val`; required."""
    image_size: int = 224
    """Height and width of the model's input images in pixels."""
    test_share: float = 0.875
    """Side of a test image's centre crop as a share of the shorter side (224 / 256)."""
    threads: int = 8
    """Number of threads that read and decode the rows of one batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(image_size=self.image_size, threads=self.threads)
        if not 0 < self.test_share <= 1:
            raise ValueError(
                f"data.test_share={self.test_share} is not a share. Allowed: above 0 "
                "and at most 1. Set --data.test_share."
            )

    def count_classes(self) -> int:
        """Returns the number of class folders in `train`.

        Raises:
            ValueError: `train` is missing or has no class folders.
            OSError: this host cannot list `train` now.
        """
        return len(_classes(Path(self.path) / "train"))

    def check(self) -> None:
        """Checks that `train` and `val` have class folders; lists no files.

        Raises:
            ValueError: `path` is not set, or `train` or `val` is missing or has no
                class folders.
            OSError: this host cannot list `train` or `val` now.
        """
        if not self.path:
            raise ValueError(
                "data.path is not set: this experiment reads images from a folder. "
                f"{_LAYOUT}. Set --data.path PATH."
            )
        for split in ("train", "val"):
            _classes(Path(self.path) / split)

    def identity(self) -> str:
        """Returns a name with a hash of file names and sizes, and the crop settings.

        File contents are not read, because there may be millions of files. So a file
        that changes but keeps its size does not change the identity. The folder is
        listed once per process.

        Raises:
            ValueError: the folder is missing, empty or not in the expected layout.
            OSError: this host cannot list a folder now.
        """
        self.check()
        digest = _listing(self.path).digest
        return (
            f"images:files_sha256={digest}:size={self.image_size}"
            f":test_share={self.test_share}:view={VIEW_VERSION}"
        )

    def load(self) -> "tuple[ImageFiles, ImageFiles]":
        """Lists the files; images (uint8 [H, W, 3]) and labels are read row by row.

        Raises:
            ValueError: the folder is missing, empty or not in the expected layout, or
                Pillow is not installed.
            OSError: this host cannot list a folder now.
        """
        self.check()
        pillow()
        listing = _listing(self.path)
        train, test = (
            ImageFiles(self, Path(self.path) / split, names, training=split == "train")
            for split, names in listing.names.items()
        )
        return train, test


class ImageFiles:
    """The images of `train` or `val`, a folder of class folders, decoded on demand."""

    def __init__(
        self,
        config: ImageFolderConfig,
        folder: Path,
        names: Sequence[str],
        *,
        training: bool,
    ) -> None:
        """Stores the file names ("class/file") of `folder`; opens no file.

        `training` chooses random crops and flips instead of centre crops.
        """
        self._config, self._folder, self._names = config, folder, names
        self._training = training
        classes = sorted({os.path.dirname(name) for name in names})
        self._labels = {name: label for label, name in enumerate(classes)}
        self.num_threads = config.threads

    def __len__(self) -> int:
        return len(self._names)

    def read(self, sample: int, entropy: tuple[int, int]) -> Columns:
        """Reads image and label of a sample.

        Args:
            sample: the number of the file, from 0.
            entropy: the experiment's seed and the row's global index, which decide the
                crop and flip of a training row.

        Raises:
            ValueError: the file is missing, may not be read or is no image; the text
                names the file.
            OSError: this host cannot read the file now.
        """
        import numpy as np

        name, size = self._names[sample], self._config.image_size
        image = open_image(self._folder / name)
        if self._training:
            random = np.random.Generator(np.random.PCG64(entropy))
            box = random_box(*image.size, random)
            flip = bool(random.integers(2))
        else:
            box, flip = centre_box(*image.size, self._config.test_share), False
        pixels_HWC = np.asarray(
            image.resize((size, size), pillow().Resampling.BILINEAR, box=box)
        )
        return {
            "image": pixels_HWC[:, ::-1] if flip else pixels_HWC,
            "label": np.int32(self._labels[os.path.dirname(name)]),
        }


@dataclass(frozen=True, kw_only=True)
class SyntheticImagesConfig(DataConfig):
    """Noise images with labels, computed from the sample's number, for speed tests."""

    short_name: ClassVar[str] = "synthetic_images"

    image_size: int = 224
    """Height and width of the images in pixels."""
    num_samples: int = 8192
    """Number of training samples; the test set has at most one batch of these."""
    num_classes: int = 1000
    """Number of different labels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(
            image_size=self.image_size,
            num_samples=self.num_samples,
            num_classes=self.num_classes,
        )
        if self.num_samples > _SHIFTS:
            raise ValueError(
                f"data.num_samples={self.num_samples} is too many. Allowed: 1 to "
                f"{_SHIFTS}. Set --data.num_samples."
            )

    def count_classes(self) -> int:
        """Returns the number of different labels."""
        return self.num_classes

    def identity(self) -> str:
        """Returns a name with the settings that determine the samples."""
        return (
            f"synthetic:samples={self.num_samples}:size={self.image_size}"
            f":classes={self.num_classes}:version=1"
        )

    def load(self) -> "tuple[SyntheticImages, SyntheticImages]":
        """Makes training and test samples; reads no file."""
        return (
            SyntheticImages(self, self.num_samples),
            SyntheticImages(self, min(self.global_batch, self.num_samples)),
        )


class SyntheticImages:
    """Noise images cut from one block of noise, so that reading a sample is cheap."""

    num_threads = 1

    def __init__(self, config: SyntheticImagesConfig, number: int) -> None:
        """Makes the block of noise from a fixed seed, for `number` samples."""
        import numpy as np

        self._config, self._number = config, number
        random = np.random.Generator(np.random.PCG64(0))
        length = config.image_size**2 * 3 + _SHIFTS
        self._noise = random.integers(0, 256, length, np.uint8)

    def __len__(self) -> int:
        return self._number

    def read(self, sample: int, entropy: tuple[int, int]) -> Columns:
        """Returns image and label, which depend only on the sample's number."""
        import numpy as np

        del entropy
        size = self._config.image_size
        start = sample * 40503 % _SHIFTS  # odd factor: every sample has another start
        window_HWC = self._noise[start : start + size * size * 3].reshape(size, size, 3)
        label = np.int32(sample % self._config.num_classes)
        return {"image": window_HWC, "label": label}


@dataclass(frozen=True, kw_only=True)
class _Listing:
    names: dict[str, tuple[str, ...]]
    digest: str


@functools.cache
def _listing(path: str) -> _Listing:
    names: dict[str, tuple[str, ...]] = {}
    digest = hashlib.sha256()
    classes = {split: _classes(Path(path) / split) for split in ("train", "val")}
    for name in sorted({*classes["train"]} ^ {*classes["val"]}):
        split, other = (
            ("train", "val") if name in classes["train"] else ("val", "train")
        )
        raise ValueError(
            f"data.path={path!r}: class {name!r} is in {split}/ but not in {other}/. "
            "Both need the same class folders, or labels would not mean the same."
        )
    for split, folders in classes.items():
        files = [file for name in folders for file in _files(Path(path) / split, name)]
        digest.update("".join(f"{split}/{n}\0{size}\n" for n, size in files).encode())
        names[split] = tuple(name for name, _ in files)
    return _Listing(names=names, digest=digest.hexdigest())


def _classes(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            found = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        if _is_of_this_host(error):
            raise
        raise ValueError(
            f"data.path: {folder} cannot be listed ({error.strerror}). {_LAYOUT}. "
            "Set --data.path to the folder that holds train and val."
        ) from error
    if not found:
        raise ValueError(f"data.path: {folder} holds no class folders. {_LAYOUT}.")
    return found


def _files(folder: Path, name: str) -> list[tuple[str, int]]:
    with os.scandir(folder / name) as entries:
        found = sorted(
            (f"{name}/{entry.name}", entry.stat().st_size)
            for entry in entries
            if entry.name.lower().endswith(SUFFIXES)
        )
    if not found:
        raise ValueError(
            f"data.path: {folder / name} holds no image. Allowed endings: "
            f"{', '.join(SUFFIXES)}, in either case. {_LAYOUT}."
        )
    return found


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(
                f"data.{name}={value} is not positive. Set --data.{name} to 1 or more."
            )
