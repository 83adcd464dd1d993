"""DatasetOptions: the `dataset` group of the config, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hwnas.errors import ConfigError, UnknownName


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """How a data set is found and split; `options` is handed on to data sets registered from outside.

    `validation_fraction` is taken from the training images, or from all of them where nothing is held out yet, as
    `test_fraction` is. `image_size` overrides the search space's; `channels` 1 or 3 overrides what the files hold.
    """

    name: str
    root: Path | None = None
    image_size: int | None = None
    channels: int | None = None
    skip_unreadable: bool = False
    validation_fraction: float = 0.15
    test_fraction: float = 0.2
    flip: bool = False
    download: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DatasetOptions:
        """Read and check `conf/dataset/*.yaml`; ConfigError names key, rule and value."""
        known = [f.name for f in fields(cls)]
        for key in config:
            if key not in known:
                raise UnknownName("key of dataset", key, known)
        values = {str(key): value for key, value in config.items()}
        if not isinstance(values.get("name"), str) or not values["name"]:
            raise ConfigError(f"dataset.name must be the name of a data set, got {values.get('name')!r}.")
        for key in ("skip_unreadable", "flip", "download"):
            if not isinstance(values.get(key, False), bool):
                raise ConfigError(f"dataset.{key} must be true or false, got {values[key]!r}.")
        for key in ("validation_fraction", "test_fraction"):
            _check_fraction(key, values.get(key, 0.2))
        if values.get("validation_fraction", 0.15) + values.get("test_fraction", 0.2) > 0.8:
            raise ConfigError("dataset.validation_fraction and dataset.test_fraction must leave at least 0.2 of the "
                              f"images to train on, got {values.get('validation_fraction', 0.15)} and "
                              f"{values.get('test_fraction', 0.2)}.")
        _check_size(values.get("image_size"))
        if values.get("channels") not in (None, 1, 3):
            raise ConfigError(f"dataset.channels must be 1, 3 or null, got {values['channels']!r}.")
        values["root"] = _root(values.get("root"))
        values["options"] = dict(values.get("options") or {})
        return cls(**values)


def _check_fraction(key: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 0.8:
        raise ConfigError(f"dataset.{key} must be a number above 0 and below 0.8, got {value!r}.")


def _check_size(value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 8 <= value <= 1024):
        raise ConfigError(f"dataset.image_size must be null or a whole number from 8 to 1024, got {value!r}.")


def _root(value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ConfigError(f"dataset.root must be a folder, got {value!r}.")
    return Path(os.path.abspath(os.path.expanduser(str(value))))
