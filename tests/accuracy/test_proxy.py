from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hwnas.accuracy.proxy as proxy_module  # noqa: E402
from hwnas.accuracy.estimator import Estimate, load_estimator  # noqa: E402
from hwnas.accuracy.proxy import Proxy, ProxyOptions  # noqa: E402
from hwnas.data.dataset import Dataset  # noqa: E402
from hwnas.errors import TrainingError, UnknownName  # noqa: E402
from hwnas.space.architecture import Architecture  # noqa: E402
from hwnas.stats import binomial_std  # noqa: E402
from hwnas.testing import check_estimator  # noqa: E402
from hwnas.training.recipe import PROXY  # noqa: E402

ARCHITECTURE = Architecture((("ds_r1_k3_s2_c8",), ("ir_r1_k3_s2_e3_c16",)), 8, 1, 0, "relu", 16, 1, 4)
SHORT = replace(PROXY, epochs=3, min_steps=0, max_steps=0, batch_size=16, threads=1)


def test_it_keeps_the_contract_and_never_looks_at_the_test_set(tiny_dataset: Dataset) -> None:
    class Closed:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the test set's {name} was asked for")

    closed: Any = Closed()
    check_estimator(Proxy(replace(tiny_dataset, test=closed), SHORT), ARCHITECTURE)


def test_an_estimate_says_what_it_knows(tiny_dataset: Dataset) -> None:
    estimate = Proxy(tiny_dataset, SHORT).evaluate(ARCHITECTURE, 0)
    assert estimate.source == "proxy"
    assert estimate.value > 0.4
    assert estimate.std == pytest.approx(binomial_std(estimate.value, 80))
    assert estimate.seconds > 0


class Shapes(torch.nn.Module):
    """A layer that keeps the shapes of what it is given, and multiplies it."""

    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        self.seen, self.by = list[tuple[int, ...]](), by

    def forward(self, images: Any) -> Any:
        self.seen.append(tuple(images.shape))
        return images * self.by


def evaluated(network: torch.nn.Module, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Estimate:
    """What the estimator says of this network."""
    monkeypatch.setattr(proxy_module, "build", lambda architecture: network)
    return proxy.evaluate(ARCHITECTURE, 0)


def test_divergence_is_a_failed_candidate(tiny_dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 4), Shapes(float("inf")))
    with pytest.raises(TrainingError, match="loss is nan"):
        evaluated(broken, Proxy(tiny_dataset, SHORT), monkeypatch)


def test_subsets_and_sizes(tiny_dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = Shapes()
    network = torch.nn.Sequential(shapes, torch.nn.Flatten(), torch.nn.Linear(64, 4))
    options = ProxyOptions(train_images=64, validation_images=40, image_size=8)
    estimate = evaluated(network, Proxy(tiny_dataset, SHORT, options), monkeypatch)
    assert {shape[1:] for shape in shapes.seen} == {(1, 8, 8)}
    assert estimate.std == pytest.approx(binomial_std(estimate.value, 40))


def test_config_sets_recipe_and_options(tiny_dataset):
    proxy = load_estimator("proxy", dataset=tiny_dataset, config={"epochs": 2, "train_images": 3, "lr": 0.01})
    assert isinstance(proxy, Proxy)
    assert (proxy.recipe.epochs, proxy.recipe.lr, proxy.options.train_images) == (2, 0.01, 3)
    assert proxy.fingerprint != load_estimator("proxy", dataset=tiny_dataset).fingerprint
    with pytest.raises(UnknownName, match="key of proxy"):
        load_estimator("proxy", dataset=tiny_dataset, config={"epoch": 2})
    with pytest.raises(UnknownName, match="Did you mean proxy"):
        load_estimator("proxi", dataset=tiny_dataset)
