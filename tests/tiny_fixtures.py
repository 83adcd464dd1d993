"""A tiny space and its data set, which tests share."""

from __future__ import annotations

from pathlib import Path

from hwnas.data.dataset import Dataset
from hwnas.data.loading import load_dataset
from hwnas.space.search_space import SearchSpace

SPACE = """
image_size: 8
stem: {width: 8, stride: 1}
head: 16
activation: relu
defaults: {op: [ds, ir_e2], kernel: [3, 5], se: 0, skip: true, multipliers: [0.5, 1, 2]}
stages:
  - {channels: 8, repeats: 1, stride: 1}
  - {channels: 16, repeats: 1, stride: 2}
"""


def write_space(folder: Path, text: str = SPACE) -> Path:
    """The tiny space as a file."""
    path = folder / "tiny.yaml"
    path.write_text(text)
    return path


def load_tiny_space(folder: Path) -> SearchSpace:
    """The tiny space for digits."""
    return SearchSpace.load(write_space(folder), channels=1, classes=10)


def digits(seed: int = 0) -> Dataset:
    """Digits at 8 px."""
    return load_dataset({"name": "digits", "validation_fraction": 0.2, "test_fraction": 0.2}, 8, seed)
