"""One data set in every form that is read. With another `change` a pixel is another, and no file has another size."""

from __future__ import annotations

import gzip
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hwnas.data.dataset import Dataset

CLASSES, A_CLASS = ("bolt", "nut", "washer"), 12
LABELS = np.repeat(np.arange(len(CLASSES)), A_CLASS)


def counts(data: Dataset) -> dict[str, dict[str, int]]:
    """Images of each class in each set."""
    names, sets = data.class_names, {name: getattr(data, name) for name in ("train", "validation", "test")}
    return {name: dict(zip(names, np.bincount(part.labels, minlength=len(names)).tolist(), strict=True))
            for name, part in sets.items()}


def pixels(change: int = 0) -> np.ndarray:
    """Colour images [n, h, w, 3] in the order of LABELS, larger than what the tests ask for."""
    images = np.random.default_rng(0).integers(0, 256, (len(LABELS), 20, 24, 3), np.uint8)
    images[3, 4, 5] ^= change
    return images


def folder(root: Path, change: int = 0) -> dict[str, Any]:
    """A folder for each class. Each form is answered with its section `dataset`."""
    for row, image in enumerate(pixels(change)):
        path = root / CLASSES[LABELS[row]] / f"{row:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path, compress_level=0)  # of one size whatever it shows
    return {"name": "imagefolder", "root": str(root)}


def npz(root: Path, change: int = 0) -> dict[str, Any]:
    """Images with their channels last, and numbers of classes."""
    root.mkdir(exist_ok=True)
    np.savez(root / "x.npz", images=pixels(change), labels=LABELS, class_names=np.array(CLASSES))
    return {"name": "arrays", "root": str(root / "x.npz")}


def npy(root: Path, change: int = 0) -> dict[str, Any]:
    """Images with their channels first, and names of classes."""
    root.mkdir(exist_ok=True)
    np.save(root / "images.npy", np.moveaxis(pixels(change), 3, 1))
    np.save(root / "labels.npy", np.array(CLASSES)[LABELS])
    return {"name": "arrays", "root": str(root)}


def table(change: int = 0) -> Any:
    """A Hugging Face data set."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    rows = [{"bytes": b"P6 24 20 255 " + image.tobytes(), "path": None} for image in pixels(change)]
    return datasets.Dataset.from_dict({"image": rows, "label": LABELS}, features=features)


def parquet(root: Path, change: int = 0) -> dict[str, Any]:
    """That data set in a parquet file."""
    root.mkdir(exist_ok=True)
    table(change).to_parquet(str(root / "train-00000-of-00001.parquet"))
    return {"name": "timm:hfds", "root": str(root)}


def saved(root: Path, change: int = 0) -> dict[str, Any]:
    """That data set, saved."""
    table(change).save_to_disk(str(root))
    return {"name": "timm:hfds", "root": str(root)}


def tar(root: Path, change: int = 0) -> dict[str, Any]:
    """The folder in a tar file."""
    folder(root / "files", change)
    with tarfile.open(root / "train.tar", "w") as file:
        file.add(root / "files", arcname=".")
    shutil.rmtree(root / "files")
    return {"name": "timm:tar", "root": str(root / "train.tar")}


def fashion(root: Path, change: int = 0, sizes: tuple[int, int] = (40, 40), packed: bool = False) -> dict[str, Any]:
    """Files of Fashion-MNIST, of so many training and test images."""
    root.mkdir(exist_ok=True, parents=True)
    for stem, n in zip(("train", "t10k"), sizes, strict=True):
        images = np.random.default_rng(n).integers(0, 256, (n, 28, 28), np.uint8)
        images[0, 0, 0] ^= change
        for kind, array in (("images-idx3", images), ("labels-idx1", (np.arange(n) % 10).astype(np.uint8))):
            content = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">i4").tobytes() + array.tobytes()
            path = root / f"{stem}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)
    return {"name": "fashion_mnist", "root": str(root)}
