"""A classifier that is fitted to what stands before it, and the statistics of batch norms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hwnas.data.dataset import Dataset, Split
from hwnas.training import classifier
from hwnas.training.classifier import fit_classifier
from hwnas.training.loop import grade


class Net(nn.Module):
    """A fixed layer, a batch norm and a classifier, as timm's networks have one."""

    def __init__(self, classifier: nn.Module, px: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 24, px, px), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten())
        self.classifier = classifier

    def get_classifier(self) -> nn.Module:
        return self.classifier

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.body(images))  # type: ignore[no-any-return]


def bars(n: int) -> Dataset:
    """Bright bars in one of four places, sorted by class as folders are."""
    rng = np.random.default_rng(0)
    labels = np.sort(np.arange(n) % 4)
    images = rng.integers(0, 80, (n, 1, 16, 16)).astype(np.uint8)
    for at, label in enumerate(labels):
        images[at, :, 4 * label:4 * label + 4] += 150
    part = Split(images, labels.astype(np.int64))
    return Dataset("bars", part, part, part, tuple("abcd"), 1, 16, (0.4,), (0.3,), "bars")


def net(classifier: nn.Module | None = None) -> Net:
    torch.manual_seed(0)
    return Net(classifier or nn.Linear(24 * 16, 4))


def test_without_a_step_it_answers_what_the_layers_can_tell() -> None:
    data, model = bars(200), net()
    before = grade(model, data.test, data).score
    assert fit_classifier(model, data)
    assert grade(model, data.test, data).score > max(0.95, before)


class TwoHeads(Net):
    """A network that answers with the mean of two convolutions of one pixel."""

    def forward(self, images: Tensor) -> Tensor:
        maps = self.body(images)[..., None, None]
        return sum(head(maps) for head in self.classifier).flatten(1) / 2  # type: ignore[operator,union-attr]


def test_a_classifier_without_a_bias_is_fitted_too() -> None:
    data, model = bars(200), net(nn.Linear(24 * 16, 4, bias=False))
    assert fit_classifier(model, data)
    assert grade(model, data.test, data).score > 0.95


def test_convolutions_of_one_pixel_and_several_last_layers_are_fitted_too() -> None:
    data, model = bars(200), TwoHeads(nn.ModuleList(nn.Conv2d(24 * 16, 4, 1) for _ in range(2)))
    model.default_cfg = {"classifier": ("classifier.0", "classifier.1")}  # type: ignore[assignment]
    assert fit_classifier(model, data)
    assert grade(model, data.test, data).score > 0.95


@pytest.mark.parametrize("n", [20, 40, 60])
def test_the_regression_is_ridge_regression_with_few_images_and_with_many(n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    features, wanted = (torch.randn(n, columns, generator=generator, dtype=torch.double) for columns in (40, 3))
    weight, bias = classifier._solve(features, wanted)
    rows, centre = features - features.mean(0), wanted.mean(0)
    ridge = classifier.RIDGE * rows.square().mean() * n * torch.eye(40, dtype=torch.double)
    right = torch.linalg.solve(rows.T @ rows + ridge, rows.T @ (wanted - centre))
    torch.testing.assert_close(weight, right)
    torch.testing.assert_close(features.mean(0) @ right + bias, centre)


@pytest.mark.parametrize(("n", "classes"), [(900, 4), (5000, 4), (5000, 600), (60_000, 4000)])
def test_of_the_images_that_it_is_fitted_to_all_are_chosen_again(n: int, classes: int) -> None:
    labels = np.arange(n) % classes
    rows = classifier.rows_of(labels, classes)
    assert len(rows) <= 1.25 * classifier.MOST_IMAGES
    assert classifier.rows_of(labels[rows], classes).tolist() == [*range(len(rows))]


def test_batch_norms_have_the_statistics_of_these_images_and_their_momentum() -> None:
    data, model = bars(256), net()
    norm = model.body[1]
    assert isinstance(norm, nn.BatchNorm2d)
    norm.running_mean.fill_(100.0)  # type: ignore[union-attr]
    fit_classifier(model, data)
    seen = model.body[0](torch.from_numpy(data.normalise(data.train.images)))
    torch.testing.assert_close(norm.running_mean, seen.mean((0, 2, 3)), atol=0.02, rtol=0.02)
    torch.testing.assert_close(norm.running_var, seen.var((0, 2, 3)), atol=0.02, rtol=0.1)
    assert norm.momentum == 0.1
    assert not norm.training


def test_the_same_images_give_the_same_classifier() -> None:
    first, second = net(), net()
    for model in (first, second):
        fit_classifier(model, bars(120))
    assert torch.equal(first.classifier.weight, second.classifier.weight)  # type: ignore[arg-type]


def test_a_classifier_that_knows_these_classes_stays() -> None:
    data, model = bars(200), net()
    fit_classifier(model, data)
    known = model.classifier.weight.clone()  # type: ignore[operator,union-attr]
    assert not fit_classifier(model, data)
    assert torch.equal(model.classifier.weight, known)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 3, 17, 130])
def test_a_handful_of_images_is_enough_to_go_on(n: int) -> None:
    for model in (net(), Net(nn.Linear(24, 4), px=16)):  # the second's map is of one pixel
        fit_classifier(model, bars(n))
        assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


def test_a_network_that_answers_no_numbers_is_left_to_its_training() -> None:
    model = net()
    with torch.no_grad():
        model.body[0].weight.fill_(torch.nan)  # type: ignore[operator,union-attr]
    assert not fit_classifier(model, bars(60))


def test_a_classifier_of_another_kind_is_left_alone() -> None:
    model = net(nn.Sequential(nn.Linear(24 * 16, 4), nn.Softmax(1)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not fit_classifier(model, bars(40))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
