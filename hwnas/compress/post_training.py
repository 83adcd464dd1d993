"""Post-training steps: ranges by four methods, then bias correction, then one scale for each tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from hwnas.cli.progress import Console
from hwnas.compress.step import Step, Steps
from hwnas.networks.quantize import Method, activation_ranges, copy_network, corrected, load_fp32, quantise_graph

if TYPE_CHECKING:
    from onnx import ModelProto

    from hwnas.networks.qdq import Range
    from hwnas.networks.quantize import TunedFor

_METHODS: dict[Method, str] = {"mse": "smallest squared error, the default", "minmax": "extremes",
                               "percentile": "all but 0.01 % on each side", "entropy": "smallest divergence"}
_BIAS_IMAGES = 256


@dataclass(frozen=True)
class Quantisation:
    """How a network becomes int8: `network` (fp32, perhaps with corrected biases), `original` (without)."""

    network: ModelProto
    original: ModelProto
    ranges: Mapping[str, Range]
    note: str
    tuned_for: TunedFor
    per_channel: bool = True

    def int8(self, kept: Collection[str] = ()) -> ModelProto:
        """The QDQ network; the nodes of `kept` stay in fp32."""
        network = copy_network(self.network)
        before = {node.name: node for node in self.original.graph.node}
        for node in network.graph.node:
            if node.name in kept:
                node.CopyFrom(before[node.name])
        note = f"{self.note}, fp32: {' '.join(sorted(kept))}" if kept else self.note
        quantise_graph(network, self.ranges, note=note, tuned_for=self.tuned_for, kept=kept,
                       per_channel=self.per_channel)
        return network


class PostTraining:
    """The steps that need no training, cheapest first; `best` is what later steps build on."""

    def __init__(self, steps: Steps, console: Console) -> None:
        self._steps, self._console, self._job = steps, console, steps.job
        self._original = load_fp32(self._job.source.path)
        self._found: dict[str, Step] = {}
        self._ranges, self._corrected = cache(self._calibrate), cache(self._correct_bias)

    def steps(self) -> Iterator[Step]:
        """The steps, each as soon as it is finished."""
        for method, text in _METHODS.items():
            yield self._take(method, f"weights per channel, ranges by {method} ({text})")
        yield self._take(f"{self.best_method}_bias", f"{self.best_method}, biases corrected layer by layer")
        yield self._take(f"{self.best_method}_per_tensor", f"{self.best_method}, one weight scale a tensor")

    @property
    def best_method(self) -> Method:
        """The method whose plain file is right most often on validation images; the first of equals."""
        name = _best({name: step for name, step in self._found.items() if name in _METHODS})
        return next(method for method in _METHODS if method == name)

    def best(self) -> Quantisation:
        """The quantisation of the per-channel step with most right answers."""
        return self.quantisation(_best({name: step for name, step in self._found.items() if "tensor" not in name}))

    def quantisation(self, name: str) -> Quantisation:
        """The quantisation of the step `name`."""
        method = next(method for method in _METHODS if name.startswith(method))
        plain = Quantisation(self._original, self._original, self._ranges()[method], name, self._job.tuned_for)
        if name.endswith("_per_tensor"):
            return replace(plain, per_channel=False)
        return replace(plain, network=self._corrected(method)) if name.endswith("_bias") else plain

    def _take(self, name: str, what: str) -> Step:
        def make() -> tuple[ModelProto, dict[str, Any]]:
            return self.quantisation(name).int8(), {}

        self._found[name] = self._steps.take(name, what, make)
        return self._found[name]

    def _calibrate(self) -> Mapping[Method, Mapping[str, Range]]:
        job = self._job
        with self._console.step("calibrate"):
            return activation_ranges(self._original, job.calibration, list(_METHODS), tuned_for=job.tuned_for,
                                     threads=job.threads)

    def _correct_bias(self, method: Method) -> ModelProto:
        job, images = self._job, spread(len(self._job.calibration), _BIAS_IMAGES)
        with self._console.step("correct biases") as report:
            return corrected(self._original, self._ranges()[method], job.calibration[images], tuned_for=job.tuned_for,
                             threads=job.threads, progress=report)


def _best(steps: Mapping[str, Step]) -> str:
    return max(steps, key=lambda name: (not steps[name].error, steps[name].right.sum()))


def spread(n: int, wanted: int) -> Sequence[int]:
    """At most `wanted` row numbers, evenly spread over `n`."""
    return [index * n // min(n, wanted) for index in range(min(n, wanted))]
