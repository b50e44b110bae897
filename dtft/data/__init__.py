"""Data sets, and their rows by number.

The rows of a run are numbered from 0 over all steps and epochs (the global index). A
data slot is a position along the mesh axes that divide the batch.

* `datasets`: the base class of data configs, and configs of small data sets.
* `images`: configs of an image folder and of synthetic images.
* `rows`: which sample each row is, and which rows each data slot reads at a step.

`dtft.parallel.feed` puts rows on a mesh as arrays.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.data.datasets import (
        CharsConfig,
        Columns,
        DataConfig,
        DigitsConfig,
        Samples,
    )
    from dtft.data.images import ImageFolderConfig, SyntheticImagesConfig
    from dtft.data.rows import Source, make_datasets, rows_of

_PUBLIC = {
    "CharsConfig": "datasets",
    "Columns": "datasets",
    "DataConfig": "datasets",
    "DigitsConfig": "datasets",
    "ImageFolderConfig": "images",
    "Samples": "datasets",
    "Source": "rows",
    "SyntheticImagesConfig": "images",
    "make_datasets": "rows",
    "rows_of": "rows",
}

__all__ = [
    "CharsConfig",
    "Columns",
    "DataConfig",
    "DigitsConfig",
    "ImageFolderConfig",
    "Samples",
    "Source",
    "SyntheticImagesConfig",
    "make_datasets",
    "rows_of",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
