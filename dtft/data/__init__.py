"""Data sets, and rows by global index.

* `datasets`: configs of data sets, and the small ones. `images`: a folder of images,
  and synthetic ones.
* `rows`: which row is which sample, in which order, and which rows a data slot reads.

How rows become arrays on a mesh is in `dtft.parallel.feed`.
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
