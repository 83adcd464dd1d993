"""The contest's images, as hwnas.train reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.contest.options import RECIPE, Options
from hwnas.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hwnas.data.dataset import Dataset, DatasetInfo


def dataset_config(options: Options, *more: str) -> dict[str, Any]:
    """The `dataset` section that every training has, with `more` overrides."""
    from omegaconf import OmegaConf

    from hwnas.cli.command import as_typed, compose

    config = compose("train", as_typed([*options.dataset, *more]), target=False)
    return OmegaConf.to_container(config.dataset, resolve=True)  # type: ignore[return-value]


def data_info(options: Options) -> DatasetInfo:
    """Channels and classes."""
    from hwnas.data.loading import inspect_dataset

    return inspect_dataset(dataset_config(options))


class Images:
    """The data set at each network's own image size, read when it is first needed."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._sets: dict[int, Dataset] = {}

    def of(self, name: str, summary: Mapping[str, Any]) -> Dataset:
        """What the training `name` was made on; DataError when other images lie there now."""
        from hwnas.data.loading import load_dataset

        size, wanted = int(summary["identity"]["image_size"]), summary["identity"]["dataset.fingerprint"]
        if size not in self._sets:
            config = dataset_config(self._options, f"dataset.image_size={size}")
            self._sets[size] = load_dataset(config, size, RECIPE["split_seed"])
        found = self._sets[size]
        if found.fingerprint != wanted:
            raise DataError(f"{name} was trained on data {wanted}, root={self._options.root} holds "
                            f"{found.fingerprint}. Give the root of the same images.")
        return found
