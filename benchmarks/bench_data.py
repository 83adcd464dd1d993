"""What it costs at a start to know the content of a data set's files, and to decode them."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hwnas.data import contents
from hwnas.data.dataset import DatasetOptions
from hwnas.data.folder import image_folder
from hwnas.data.loading import load_dataset

FILES, DECODED, CLASSES = 50_000, 3_000, 10


def fill(root: Path, n: int) -> dict[str, Any]:
    """`n` JPEG files of 64 x 64 pixels, no two of one content."""
    rng = np.random.default_rng(0)
    file = io.BytesIO()
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
    coarse.resize((64, 64), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    for row in range(n):
        folder = root / f"class{row % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{row:06}.jpg").write_bytes(file.getvalue() + row.to_bytes(4, "big"))
    return {"name": "imagefolder", "root": str(root)}


def name(options: DatasetOptions) -> str:
    """List the files, and name their content."""
    listing = image_folder(options)
    assert listing.contents is not None
    return listing.contents.identity


def test_name_files_for_the_first_time(benchmark: Any, within: Any, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "SETTLED_NS", 10**18)  # no list is kept: each round reads every file
    options = DatasetOptions.from_config(fill(tmp_path / "data", FILES))
    benchmark.pedantic(name, args=(options,), rounds=3, warmup_rounds=1)
    within(benchmark, 4)


def test_name_files_again(benchmark: Any, within: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing them alone takes half a second; before contents were read, that was all."""
    monkeypatch.setattr(contents, "SETTLED_NS", 0)
    options = DatasetOptions.from_config(fill(tmp_path / "data", FILES))
    benchmark.pedantic(name, args=(options,), rounds=5, warmup_rounds=1)
    assert len(os.listdir(tmp_path / "home" / "cache")) == 1
    within(benchmark, 1.5)


def test_decode(benchmark: Any, within: Any, tmp_path: Path) -> None:
    section = fill(tmp_path / "data", DECODED)
    benchmark.pedantic(load_dataset, args=(section, 32, 0), rounds=5, warmup_rounds=1)
    within(benchmark, 1e-3, DECODED)
