"""Data sets: three disjoint sets of uint8 images with labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwnas.face import face

if TYPE_CHECKING:
    from hwnas.data.dataset import Dataset as Dataset
    from hwnas.data.dataset import DatasetInfo as DatasetInfo
    from hwnas.data.dataset import DatasetOptions as DatasetOptions
    from hwnas.data.dataset import Images as Images
    from hwnas.data.dataset import Listing as Listing
    from hwnas.data.dataset import ReadRows as ReadRows
    from hwnas.data.loading import load_dataset as load_dataset

__getattr__, __dir__ = face(__name__, {
    "Dataset": "dataset", "DatasetInfo": "dataset", "DatasetOptions": "dataset", "Images": "dataset",
    "Listing": "dataset", "ReadRows": "dataset", "load_dataset": "loading"})
