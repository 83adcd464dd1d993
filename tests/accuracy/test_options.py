"""Options decide fingerprints of studies, and certificates that are in use: their texts stay as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from hwnas.accuracy.estimator import load_estimator
from hwnas.accuracy.multi_fidelity import MULTI_FIDELITY, FidelityOptions
from hwnas.accuracy.proxy import ProxyOptions
from hwnas.certify.truth import in_full, training_config
from hwnas.cli.options import read_options
from hwnas.data.dataset import Dataset, DatasetOptions, Split
from hwnas.space.search_space import SearchSpace
from hwnas.target import Target
from hwnas.training.recipe import FULL_TRAINING, PROXY, recipe_of

PROXY_TEXT = ("ProxyOptions(train_images=5120, validation_images=2048, image_size=0, seeds={}, "
              "stop_ratio={}, min_history=8)")
FIDELITY = ("FidelityOptions(rungs={}, eta=3, quantile={}, min_history=8, train_images=1152, validation_images=2048, "
            "image_size=0, untrained={}, anchors=8)")


@pytest.mark.parametrize(("cls", "given", "text"), [
    (ProxyOptions, {}, PROXY_TEXT.format(1, 0.5)),
    (ProxyOptions, {"stop_ratio": 0, "seeds": 2}, PROXY_TEXT.format(2, 0)),
    (ProxyOptions, {"stop_ratio": 0.25}, PROXY_TEXT.format(1, 0.25)),
    (FidelityOptions, {}, FIDELITY.format((2, 4), 0.9, 0.5)),
    (FidelityOptions, {"rungs": [1, 3], "untrained": 1}, FIDELITY.format((1, 3), 0.9, 1)),
    (FidelityOptions, {"quantile": 0.8, "untrained": 0.0}, FIDELITY.format((2, 4), 0.8, 0.0)),
    (Target, {"name": "x", "runtime": "openvino", "precision": "int8", "price_per_hour": 2},
     "Target(name='x', runtime='openvino', precision='int8', threads=1, batch=1, vendor='', device='cpu', "
     "price_per_hour=2)"),
    (DatasetOptions, {"name": "digits"},
     "DatasetOptions(name='digits', root=None, image_size=None, channels=None, skip_unreadable=False, "
     "validation_fraction=0.15, test_fraction=0.2, flip=False, download=False, max_pixels=50000000, options={})"),
])
def test_the_text_of_options_stays(cls, given, text):
    assert str(read_options(cls, given)) == text


def test_recipes_that_certificates_judge_keep_their_fingerprint():
    assert (PROXY.fingerprint, MULTI_FIDELITY.fingerprint) == ("b5da6f5683a4", "c25b60710a1f")


SHIPPED = sorted((Path(__file__).parents[2] / "certificates").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_certificates_judge_the_estimators_and_the_full_training_of_now(path: Path) -> None:
    """Their estimators have the fingerprints of today's, and their networks were trained as finalists are."""
    content = json.loads(path.read_text())
    about, full = content["dataset"], content["truth"]["options"]
    images = Split(np.zeros((64, about["channels"], 8, 8), np.uint8), np.arange(64) % 10)
    dataset = Dataset(about["name"], images, images, images, tuple(about["class_names"]), about["channels"],
                      about["image_size"], (0.5,) * about["channels"], (0.5,) * about["channels"], about["fingerprint"])
    space = SearchSpace.load("mnasnet_small", channels=about["channels"], classes=10, image_size=None)
    assert space.fingerprint == content["space"]["fingerprint"]
    for label in ("proxy", "multi_fidelity"):
        held = content["estimators"][label]
        now = load_estimator(held["accuracy"], dataset=dataset, space=space, config={"threads": 1, **held["options"]})
        assert now.fingerprint == held["fingerprint"], label
    recipe = recipe_of(training_config({"name": "digits"}, full))
    long = full["train_images"] // recipe.batch_size
    assert recipe.length(long) == FULL_TRAINING.length(long) == 936
    assert replace(recipe, name="full", min_steps=160, max_steps=2000) == FULL_TRAINING
    now = in_full({})
    assert {key: now[key] for key in full} == full
