"""One class or function for each door of hwnas, as a third party would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from optuna.distributions import CategoricalDistribution
from optuna.samplers import RandomSampler

from hwnas.accuracy import Estimate
from hwnas.data import DatasetInfo, Listing
from hwnas.runtimes.onnxruntime import OnnxRuntime
from hwnas.study import KnownObjective


class MyRuntime(OnnxRuntime):
    """ONNX Runtime under another name."""

    name = "mine"

    def version(self) -> str:
        return "mine 1.0"


class Linear:
    """Believes in MACs: top-1 grows with their logarithm, `slope` a decade."""

    def __init__(self, slope: float) -> None:
        self.fingerprint = f"linear {slope}"
        self._slope = slope

    def evaluate(self, architecture: Any, seed: int) -> Estimate:
        value = min(0.99, max(0.01, self._slope * np.log10(architecture.macs) / 10))
        return Estimate(value, value, value, 0.0, "table", 0.0)


def linear(dataset: Any, space: Any, config: dict[str, Any]) -> Linear:
    return Linear(**config)


class Cheapest(RandomSampler):
    """Of ten random networks the one with the lowest predicted latency: it needs what hwnas knows beforehand."""

    def __init__(self, seed: int, context: Any = None) -> None:
        super().__init__(seed)
        self._context, self._draws = context, np.random.default_rng(seed)

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        parameters = self._context.space.parameters if self._context else ()
        return {parameter.name: CategoricalDistribution(parameter.choices) for parameter in parameters}

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
        if self._context is None:
            return {}
        codes = self._context.space.sample(self._draws, 10)
        return dict(self._context.space.to_params(codes[np.argmin(self._context.predict(codes).mean)]))


def stripes(options: Any) -> Listing:
    """Three classes of grey 12 px images with stripes of another period each; `options.options["n"]` of a class."""
    n, size = int(options.options.get("n", 30)), 12
    labels = np.repeat(np.arange(3), n)

    def read(selection: Any, image_size: int, progress: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        sets = []
        for _, rows in selection:
            column = np.arange(image_size) // (1 + labels[rows, None]) % 2
            noise = np.random.default_rng(0).integers(0, 56, (len(labels), 1, image_size, image_size))[rows]
            images = (200 * column[:, None, None, :] + noise).astype(np.uint8)
            sets.append((images, np.ones(len(rows), bool)))
        return sets

    return Listing(DatasetInfo("stripes", 1, 3, size), ("fine", "middle", "coarse"), {"train": labels.astype(np.int64)},
                   f"stripes {n}", "stripes", read)


def _count(path: Path) -> float:
    """Measured on the file that is deployed: here simply how many bytes can be read from it, in thousands."""
    return len(path.read_bytes()) / 1e3


BYTES_READ = KnownObjective("bytes_read", "bytes read", "kB", "bytes_read_predicted", "bytes_read",
                            of_block=lambda block, terms: block.macs / 1e4, of_file=_count)
