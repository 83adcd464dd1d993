"""Scenes drawn from digits: the same bytes everywhere, no digit in two parts, and the largest is the class."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from data_fixtures import counts

from hwnas.data.arrays import digit_images
from hwnas.data.dataset import Dataset
from hwnas.data.loading import load_dataset
from hwnas.data.scenes import PIECES, SCENES, Dice, Layer, Scenes, arrange, draw

PARTS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def scenes() -> Dataset:
    return load_dataset({"name": "digit_scenes"}, 32, 0)


@pytest.fixture(scope="module")
def plans() -> dict[str, Scenes]:
    return {part: arrange(part, digit_images()[1], 0) for part in SCENES}


def first(plan: Scenes, n: int) -> Scenes:
    """Its first scenes."""
    layers = (Layer(*(getattr(layer, name)[:n] for name in Layer.__slots__)) for layer in plan.layers)
    return Scenes(plan.labels[:n], tuple(layers), plan.ground[:n])


def test_every_host_draws_the_same_bytes(scenes: Dataset) -> None:
    drawn = [hashlib.sha256(getattr(scenes, part).images.tobytes()).hexdigest()[:12] for part in PARTS]
    assert drawn == ["3811e4c48364", "6a858b3f7dc9", "c4a9bf59a817"]
    assert scenes.fingerprint == "d9f2a651ceb9"
    assert scenes.train.images.shape == (1700, 1, 32, 32)


def test_the_digits_themselves_are_what_they_were() -> None:
    assert load_dataset({"name": "digits", "validation_fraction": 0.2, "test_fraction": 0.2}, 32, 0).fingerprint == \
        "cf16f4071154"


def test_the_classes_are_balanced(scenes: Dataset) -> None:
    for of_class, of_each in zip(counts(scenes).values(), (170, 100, 200), strict=True):
        assert set(of_class.values()) == {of_each}


def test_no_digit_is_drawn_in_two_parts(plans: dict[str, Scenes]) -> None:
    used = [set(np.concatenate([layer.source for layer in plan.layers]).tolist()) for plan in plans.values()]
    assert sum(map(len, used)) == len(set.union(*used)) > 1700
    images = digit_images()[0]
    content = [{images[row].tobytes() for row in rows} for rows in used]
    assert sum(map(len, content)) == len(set.union(*content))


def test_the_class_is_that_of_the_largest_digit(plans: dict[str, Scenes]) -> None:
    images, classes = digit_images()
    for plan in plans.values():
        *others, asked = plan.layers
        np.testing.assert_array_equal(classes[asked.source], plan.labels)
        for other in others[PIECES:]:
            assert (other.side * 2 < asked.side).all()
        # As drawn, each alone in full ink: it takes more pixels than any other in nearly every scene (a 1 is slender).
        area = [(draw(alone(first(plan, 40), layer), images[:, 0], Dice(0)) > 60).sum((1, 2, 3))
                for layer in range(PIECES, len(plan.layers))]
        assert (area[-1] > np.max(area[:-1], axis=0)).mean() > 0.9


def alone(plan: Scenes, layer: int) -> Scenes:
    """Only this layer of it, in full ink on black ground."""
    full = np.full(len(plan.labels), 255)
    return Scenes(plan.labels, (replace(plan.layers[layer], ink=full),), 0 * plan.ground)


def test_its_own_seed_draws_others_and_the_runs_does_not(scenes: Dataset) -> None:
    again = load_dataset({"name": "digit_scenes"}, 32, 5)
    np.testing.assert_array_equal(again.test.images, scenes.test.images)
    other = load_dataset({"name": "digit_scenes", "options": {"seed": 1}}, 32, 0)
    assert other.fingerprint != scenes.fingerprint
    assert not {image.tobytes() for image in other.test.images} & {image.tobytes() for image in scenes.test.images}
