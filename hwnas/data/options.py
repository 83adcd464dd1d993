"""DatasetOptions: the `dataset` group of the config, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwnas.cli.options import option, read_options
from hwnas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """How a data set is found and split; data sets registered from outside get `options`.

    `validation_fraction` is a share of the training images, or of all images where nothing is held out yet; so is
    `test_fraction`. `image_size` overrides the search space's; `channels` 1 or 3 overrides what the files hold.
    """

    name: str = option(help="of conf/dataset, or of a package that offers one")
    root: Path | None = option(None, what="a folder", help="the folder (null: the data folder of hwnas)")
    image_size: int | None = option(None, low=8, high=1024, help="px (null: the search space's)")
    channels: int | None = option(None, choices=(1, 3), help="null: as the files are")
    skip_unreadable: bool = option(False, help="leave unreadable and too large images out and count them")
    validation_fraction: float = option(0.15, above=0, below=0.8, help="of the training part, or of all images")
    test_fraction: float = option(0.2, above=0, below=0.8, help="of all images, where no test part is given")
    flip: bool = option(False, help="whether a mirrored image is still one of its class")
    download: bool = option(False, help="fetch it where it is missing")
    max_pixels: int = option(50_000_000, low=64, high=178_956_970,
                             help="width times height of an image at most; known before it is decoded")
    options: Mapping[str, Any] = option({}, help="handed on to a data set of another package")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DatasetOptions:
        """Read and check `conf/dataset/*.yaml`; ConfigError names key, rule and value."""
        options = read_options(cls, config, "dataset")
        if options.validation_fraction + options.test_fraction > 0.8:
            raise ConfigError("dataset.validation_fraction and dataset.test_fraction must leave at least 0.2 of the "
                              f"images to train on, got {options.validation_fraction} and {options.test_fraction}.")
        return options
