"""Accuracy by short fine-tuning of what a cut network keeps of the original's weights: the `inherited` estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hwnas.accuracy.proxy import Proxy, ProxyOptions
from hwnas.cli.options import Config, read_options
from hwnas.data.dataset import Dataset
from hwnas.errors import ConfigError
from hwnas.networks.around import find_start
from hwnas.networks.cutting import build_member
from hwnas.networks.weights import PretrainedOptions
from hwnas.space.search_space import SearchSpace
from hwnas.training.recipe import INHERITED, all_with_recipe, read_with_recipe

_WEIGHTS = "pretrained"  # the section of a configuration that says where they are


def all_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option with its value, for `--show-config`."""
    return all_with_recipe(ProxyOptions, {key: given[key] for key in given if key != _WEIGHTS}, INHERITED, "inherited")


def load(config: Config, dataset: Dataset, space: SearchSpace | None = None) -> Proxy:
    """The door of `hwnas.accuracy.load_estimator`: a Proxy whose networks begin with the original's weights, in their
    normalisation. ConfigError for a space whose networks are cut from none, or where its weights are not found."""
    around = "" if space is None else space.definition.around
    if not around:
        raise ConfigError("accuracy=inherited is for networks that are cut from a pretrained one. Add around=NAME, or "
                          "choose another accuracy.")
    options, recipe = read_with_recipe(ProxyOptions, {key: config[key] for key in config if key != _WEIGHTS}, INHERITED,
                                       "inherited")
    asked = read_options(PretrainedOptions, config.get(_WEIGHTS) or {}, _WEIGHTS)
    pretrained = find_start(around, asked, dataset.channels)
    fed = replace(dataset, mean=pretrained.mean, std=pretrained.std)
    return Proxy(fed, recipe, options, partial(build_member, pretrained=pretrained), begun=pretrained.key)
