"""Quantise statically to int8: fp32 ONNX -> QDQ ONNX that OpenVINO and ONNX Runtime both run with int8 kernels."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np

from hwnas.errors import QuantizeError, one_line
from hwnas.lazy import onnx, scipy
from hwnas.networks.bias import find_mean_errors, shift_biases
from hwnas.networks.qdq import (
    Graph,
    Range,
    head_nodes,
    insert_pairs,
    quantised_nodes,
    quantised_tensors,
    range_source,
)
from hwnas.networks.running import BATCH, logits_of, session_of
from hwnas.system.paths import write_atomic
from hwnas.target import Target
from hwnas.tasks.classification import Classification
from hwnas.tasks.task import Task

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

    from hwnas.data.dataset import Dataset


Method = Literal["mse", "minmax", "percentile", "entropy"]
METHODS: tuple[Method, ...] = get_args(Method)
RECIPE = "int8 with corrected biases"  # files and scores of another recipe are made again
VNNI = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
TunedFor = Literal["openvino", "onnxruntime", "litert"]
MIN_OPSET = 13
_SAMPLES = 4096  # values kept of one tensor in one batch
_SHRINKS = np.linspace(1.0, 0.4, 21)
_TAIL = 1e-4  # share of the values that "percentile" gives up on each side
_BINS, _BIN_STEP = 2048, 16  # of the histogram that "entropy" cuts
_LEAST_JUDGES = 32  # images that are needed to choose a method on other images than made its ranges
_MOST_COST = 0.005  # if the best cost is higher, the last layers are tried in fp32
_KEPT_BEFORE_HEAD = (0, 2)  # layers before the head in fp32; five made MnasNet-A1 50 % slower
_CORRECTING = 128  # images at most by which biases are corrected
_WORTH = 0.5  # layers in fp32 take time, so they must halve the cost


def drop_unread(proto: ModelProto) -> None:
    """Remove nodes and weights that nothing reads, the last ones first."""
    # One pass from the last node on: a node stays if a later one, or the network's output, reads what it writes.
    names_read = {value.name for value in proto.graph.output}
    nodes = []
    for node in reversed(proto.graph.node):
        if names_read & {*node.output}:
            nodes.append(node)
            names_read |= {*node.input}
    weights = [weight for weight in proto.graph.initializer if weight.name in names_read]
    del proto.graph.node[:], proto.graph.initializer[:]
    proto.graph.node.extend(reversed(nodes))
    proto.graph.initializer.extend(weights)


def fold_norms(proto: ModelProto) -> None:
    """Fold each batch norm behind a convolution, or behind a concatenation of some (MixNet's), into them, in place."""
    graph, results = Graph(proto), {value.name for value in proto.graph.output}
    for norm in [node for node in proto.graph.node if node.op_type == "BatchNormalization"]:
        joined = graph.producer.get(norm.input[0])
        inputs = joined.input if joined is not None and joined.op_type == "Concat" else norm.input[:1]
        parts = [graph.producer.get(name) for name in inputs]
        weights = [name for node in (norm, *filter(None, parts)) for name in node.input[1:] if name]
        # Nothing but this norm may read the concatenation, which is of channels, and nothing but the concatenation its
        # convolutions. A norm with more outputs is one in training. All weights are constants.
        if (joined is None or len(graph.consumers[norm.input[0]]) > 1 or len(norm.output) > 1
                or results & {*inputs, norm.input[0], norm.output[0]}
                or any(each.name == "axis" and each.i != 1 for each in joined.attribute)
                or not all(part is not None and part.op_type == "Conv" and len(graph.consumers[part.output[0]]) == 1
                           for part in parts) or any(graph.constant(name) is None for name in weights)):
            continue
        # Each convolution takes its part of the norm's channels, from `first` on.
        (factor, offset), first = affine_of(graph, norm), 0
        for part in filter(None, parts):
            weight, bias = (graph.constant(name) for name in (*part.input[1:], "")[:2])
            assert weight is not None
            own = slice(first, first + len(weight))
            first += len(weight)
            scaled = weight * factor[own].reshape(-1, *[1] * (weight.ndim - 1))
            arrays = (scaled, (0.0 if bias is None else bias) * factor[own] + offset[own])
            del part.input[1:]
            for kind, array in zip(("weight", "bias"), arrays, strict=True):
                part.input.append(f"{part.output[0]}/folded_{kind}")
                folded = onnx.numpy_helper.from_array(np.asarray(array, np.float32), part.input[-1])
                proto.graph.initializer.append(folded)
        for reader in graph.consumers.get(norm.output[0], []):
            reader.input[:] = [norm.input[0] if name == norm.output[0] else name for name in reader.input]
    drop_unread(proto)


def affine_of(graph: Graph, norm: NodeProto) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the factor by which a batch norm multiplies each channel, and the offset that it then adds."""
    values: Any = [graph.constant(name) for name in norm.input[1:5]]
    scale, bias, mean, variance = values
    factor = scale / np.sqrt(variance + next((each.f for each in norm.attribute if each.name == "epsilon"), 1e-5))
    return factor, bias - mean * factor


def tuning_of(target: Target) -> TunedFor:
    """Return the runtime whose kernels a target's QDQ file should suit."""
    return cast(TunedFor, target.runtime) if target.runtime in get_args(TunedFor) else "openvino"


@dataclass(frozen=True, slots=True)
class QuantisedFile:
    """The settings of an int8 file, and how its answers agree with fp32's on images that did not make its ranges.

    `agreement`: share of the `images` with the same answer, 0 to 1. `lost`: the mean fall of the answer's probability,
    by the fp32 network's probabilities: the top-1 that is lost, 0 to 1, if these are true. `by_class_…`: the same as
    means over the classes of fp32's answers. `kept`: the nodes in fp32. `corrected`: whether biases were corrected
    (`bias.shift_biases`). `tried`: the `cost` of each way that was tried. `images` is 0 if nothing was compared.
    """

    method: str
    kept: tuple[str, ...] = ()
    weight_bits: int = 8
    agreement: float = 1.0
    lost: float = 0.0
    images: int = 0
    corrected: bool = False
    by_class_agreement: float = 1.0
    by_class_lost: float = 0.0
    tried: Mapping[str, float] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        """The measure by which the way is chosen: `lost` plus a tenth of the answers that change, as probabilities are
        not exact. Every class counts the same."""
        return self.by_class_lost + (1 - self.by_class_agreement) / 10

    @property
    def facts(self) -> dict[str, Any]:
        """Plain values for a manifest."""
        return {"text": self.text, **asdict(self), "kept": list(self.kept)}

    @property
    def text(self) -> str:
        """One line for metadata and cards."""
        fp32_part = f", the last {len(self.kept)} layers in fp32" if self.kept else ""
        bits = "" if self.weight_bits == 8 else f", weights of {self.weight_bits} bits"
        biases = ", biases corrected" if self.corrected else ""
        judged = f"; fp32's answer on {self.agreement:.1%} of {self.images} training images" if self.images else ""
        return f"{self.method}{fp32_part}{bits}{biases}{judged}"


def quantize_static(fp32_path: str | os.PathLike[str], int8_path: str | os.PathLike[str],
                    calibration: NDArray[np.float32] | None, *, tuned_for: TunedFor = "openvino",
                    method: Method | None = None, narrow: bool = False, threads: int = 1, label: str = "",
                    report: Callable[[float], None] = lambda share: None, task: Task | None = None) -> QuantisedFile:
    """Write the int8 QDQ version of an fp32 ONNX file, with its metadata; return how it was made.

    `calibration`: normalised training images [n,c,h,w]. Two thirds of them give the activations' ranges by each method
    (`activation_ranges`), and the others choose the method of least `QuantisedFile.cost`; few images do both. Its
    biases are corrected unless that costs more. If it then costs more than 0.005, the last layers stay in fp32 if this
    halves the cost. A given `method` is not compared or corrected.
    `calibration` None gives made-up ranges: right for timing, useless for answers. Its graph has the same structure as
    with real ranges and all layers in int8. `tuned_for` matters around swish, hard-swish and GELU. `narrow`: weights of
    7 bits, for CPUs whose sums of products saturate (`needs_narrow_weights`). `report` is called with the share of the
    choice that is done, 0 to 1. `task` compares answers; None: as a classifier's. Raises QuantizeError, which calls the
    network `label`, if it cannot be quantised, and UserError if the file cannot be written.
    """
    if tuned_for not in get_args(TunedFor) or (method is not None and method not in METHODS):
        raise ValueError(f"tuned_for={tuned_for!r}, method={method!r}: not among {TunedFor}, {Method}")
    proto = load_fp32(fp32_path, label)
    result = QuantisedFile(method or "", weight_bits=7 if narrow else 8)
    errors: Mapping[str, NDArray[np.float64]] = {}
    if calibration is None:
        graph, result = Graph(proto), replace(result, method="made-up ranges")
        ranges = {name: _make_up_range(graph, name) for name in quantised_tensors(graph, tuned_for)}
    elif method is not None:
        ranges = activation_ranges(proto, calibration, [method], tuned_for=tuned_for, threads=threads)[method]
    else:
        measured, judging = _split(calibration)
        by_method = activation_ranges(proto, measured, METHODS, tuned_for=tuned_for, threads=threads)
        report(1 / (len(METHODS) + 2))
        # The other images need not stay in memory.
        correcting = _some(measured).copy()
        del measured
        choice = _Choice(proto, by_method, correcting, judging, task or Classification(), tuned_for, narrow, threads,
                         report)
        result = choice.choose()
        ranges = by_method[cast(Method, result.method)]
        errors = choice.errors_of[cast(Method, result.method)] if result.corrected else {}
    quantise_graph(proto, ranges, note=result.text, tuned_for=tuned_for, kept=result.kept, narrow=narrow,
                   errors=errors)
    write_atomic(int8_path, proto.SerializeToString())
    return result


@dataclass
class _Choice:
    """The choice of a network's int8 file by the answers of some images: ranges, biases, and last layers in fp32."""

    proto: ModelProto
    ranges: Mapping[Method, dict[str, Range]]
    correcting: NDArray[np.float32]  # images by which biases are corrected
    judging: NDArray[np.float32]
    task: Task
    tuned_for: TunedFor
    narrow: bool
    threads: int
    report: Callable[[float], None]
    best: QuantisedFile | None = None
    costs: dict[str, float] = field(default_factory=dict)  # of each file that was judged
    errors_of: dict[Method, dict[str, NDArray[np.float64]]] = field(default_factory=dict)

    def choose(self) -> QuantisedFile:
        """Try all methods with all layers in int8, then with more and more of the last layers in fp32, until the cost
        is small. Each time the best method is tried once more, with corrected biases."""
        fp32_logits, methods = logits_of(self.proto, self.judging, self.threads), METHODS
        for fp32_nodes in _ends(Graph(self.proto)):
            costs = {method: self._judge(method, fp32_nodes, {}, fp32_logits) for method in methods}
            ordered = sorted(methods, key=costs.__getitem__)
            if errors := self._errors(ordered[0]):
                self._judge(ordered[0], fp32_nodes, errors, fp32_logits)
            if self.best is not None and self.best.cost <= _MOST_COST:
                break
            if fp32_nodes:  # go on with the two best methods; with the head in int8, its errors hide which are good
                methods = tuple(ordered[:2])
        assert self.best is not None  # there are methods
        return replace(self.best, tried=self.costs)

    def _judge(self, method: Method, fp32_nodes: tuple[str, ...], errors: Mapping[str, NDArray[np.float64]],
               fp32_logits: NDArray[np.float64]) -> float:
        """Return the cost of a file. It is the best one if it costs less, with more layers in fp32 half as much; with
        corrected biases it need only cost no more."""
        int8, best = deepcopy(self.proto), self.best
        quantise_graph(int8, self.ranges[method], note="", tuned_for=self.tuned_for, kept=fp32_nodes,
                       narrow=self.narrow, errors=errors)
        agreement: Any = self.task.agreement(fp32_logits, logits_of(int8, self.judging, self.threads))
        result = QuantisedFile(method, fp32_nodes, 7 if self.narrow else 8, images=len(self.judging),
                               corrected=bool(errors), **agreement)
        name = f"{method}{f', {len(fp32_nodes)} in fp32' if fp32_nodes else ''}{', corrected' if errors else ''}"
        self.costs[name] = result.cost
        # Layers in fp32 are seldom tried: not counted.
        self.report(min(1.0, (1 + len(self.costs)) / (len(METHODS) + 2)))
        most = math.inf if best is None else best.cost * (_WORTH if len(fp32_nodes) > len(best.kept) else 1.0)
        if result.cost < most or (errors and result.cost == most):
            self.best = result
        return result.cost

    def _errors(self, method: Method) -> dict[str, NDArray[np.float64]]:
        """Return the errors that biases take up with a method's ranges."""
        if method not in self.errors_of:
            self.errors_of[method] = find_errors(
                self.proto, self.ranges[method], self.correcting, tuned_for=self.tuned_for, narrow=self.narrow,
                threads=self.threads)
        return self.errors_of[method]


def find_errors(proto: ModelProto, ranges: Mapping[str, Range], images: NDArray[np.float32], *, tuned_for: TunedFor,
                narrow: bool, threads: int) -> dict[str, NDArray[np.float64]]:
    """Return the mean errors (`bias.find_mean_errors`) of the layers of an fp32 graph when all are in int8, over at
    most 128 of these images."""
    int8 = deepcopy(proto)
    quantise_graph(int8, ranges, note="", tuned_for=tuned_for, narrow=narrow)
    return find_mean_errors(int8, proto, _some(images), threads)


def _some(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the images by which biases are corrected, spread over all."""
    return images[:: -(-len(images) // _CORRECTING)]


def _split(images: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the images that make ranges and correct biases, and those that judge: every third one. If these are too
    few, all images do both."""
    judges = np.arange(len(images)) % 3 == 2
    return (images, images) if judges.sum() < _LEAST_JUDGES else (images[~judges], images[judges])


def _ends(graph: Graph) -> Iterator[tuple[str, ...]]:
    """Yield the nodes to keep in fp32: none, then the head, then the head and the layers before it."""
    yield ()
    head = head_nodes(graph)
    if not head:
        return
    layers_before = [node.name for node in quantised_nodes(graph) if node.name not in head]
    for n in _KEPT_BEFORE_HEAD:
        if n < len(layers_before):
            yield (*layers_before[len(layers_before) - n:], *head)


def needs_narrow_weights(target: Target, vendor: str, flags: Collection[str]) -> bool:
    """Return whether a target's runtime saturates uint8 × int8 sums on a CPU of this vendor with these ISA flags.

    Without VNNI, the x86 kernels of ONNX Runtime and OpenVINO add two products in 16 bits; weights of 7 bits
    cannot overflow there. Figures: docs/decisions/int8-ranges.md.
    """
    x86, saturating = vendor in ("amd", "intel", "hygon"), target.runtime in ("onnxruntime", "openvino")
    return saturating and target.device == "cpu" and x86 and not VNNI.intersection(flags)


def quantise_graph(proto: ModelProto, ranges: Mapping[str, Range], *, note: str, tuned_for: TunedFor,
                   kept: Collection[str] = (), narrow: bool = False,
                   errors: Mapping[str, NDArray[np.float64]] = MappingProxyType({})) -> None:
    """Turn an fp32 graph into its QDQ version in place; nodes named in `kept` stay in fp32.

    `ranges`: the range of every activation that could get a pair. `note`: the source of the ranges, for the metadata.
    `narrow`: weights of 7 bits. `errors`: mean errors of layers, which their biases take up. Raises QuantizeError if
    the result is not valid ONNX.
    """
    graph = Graph(proto)
    paired = {name: ranges[name] for name in quantised_tensors(graph, tuned_for, kept)}
    if tuned_for == "litert":  # LiteRT requires steps of 1/256 for a sigmoid, whatever its values
        paired |= {name: (0.0, 255 / 256) for name in paired if graph.kind(name) == "Sigmoid"}
    insert_pairs(graph, paired, kept=kept, narrow=narrow)
    if errors:
        shift_biases(proto, errors)
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    metadata["quantisation"] = f"qdq u8s8 per-channel, {note}"
    onnx.helper.set_model_props(proto, metadata)
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise QuantizeError(f"the quantised graph is not valid ONNX: {one_line(error)}") from error


def load_fp32(path: str | os.PathLike[str], label: str = "") -> ModelProto:
    """Read an ONNX network that can be quantised. Raises QuantizeError, which calls it `label` or its path, if it is
    torn, old, int8 or of 16 bits already. It is refused, too, if it has branches, loops or unnamed nodes."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    label = label or os.fspath(path)
    try:
        proto = onnx.load(os.fspath(path))
    except (OSError, DecodeError) as error:
        raise QuantizeError(f"cannot read {label}: {one_line(error)}") from error
    opset = max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    if opset < MIN_OPSET:
        raise QuantizeError(f"{label} has opset {opset}; per-channel weights need {MIN_OPSET}. Export again.")
    if any(node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") for node in proto.graph.node):
        raise QuantizeError(f"{label} is quantised already; give the fp32 file.")
    if any(weight.data_type in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
           for weight in proto.graph.initializer):
        raise QuantizeError(f"{label} holds weights of 16 bits; give the fp32 file.")
    if inner := [node.op_type for node in proto.graph.node if any(each.HasField("g") for each in node.attribute)]:
        raise QuantizeError(f"{label} holds a graph inside of {inner[0]}, and only plain graphs are quantised. Export "
                            "it with fixed sides, and without branches and loops.")
    names = [node.name for node in proto.graph.node]
    if len(set(names)) < len(names) or "" in names:
        raise QuantizeError(f"{label} has nodes without a name of their own; "
                            "export it with hwnas.networks.export.")
    _lay_out_weights(proto)
    fold_norms(proto)
    return proto


def _lay_out_weights(proto: ModelProto) -> None:
    """Rewrite the weights of layers as torch writes them, so that all are quantised: other exporters write some as
    constant nodes, and the weights of linear layers as [in, out], and name weights as inputs, too."""
    graph = Graph(proto)
    for value in [value for value in proto.graph.input if value.name in graph.weights]:
        proto.graph.input.remove(value)
    proto.ir_version = max(proto.ir_version, 4)  # before it, every weight had to be an input
    for node in [node for node in proto.graph.node if node.op_type in ("Conv", "MatMul", "Gemm")]:
        if graph.kind(node.input[1]) == "Constant" and node.input[1] not in graph.weights:
            value = np.asarray(graph.constant(node.input[1]))
            graph.weights[node.input[1]] = onnx.numpy_helper.from_array(value, node.input[1])
            proto.graph.initializer.append(graph.weights[node.input[1]])
            proto.graph.node.remove(graph.producer[node.input[1]])
        if node.op_type == "Gemm" and node.input[1] in graph.weights and not any(
                each.name == "transB" and each.i for each in node.attribute):
            weights = onnx.numpy_helper.to_array(graph.weights[node.input[1]]).T
            node.input[1] = f"{node.name}_turned_weight"
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(weights), node.input[1]))
            for each in [each for each in node.attribute if each.name == "transB"]:
                node.attribute.remove(each)
            node.attribute.append(onnx.helper.make_attribute("transB", 1))
    drop_unread(proto)


def _make_up_range(graph: Graph, name: str) -> Range:
    """Return a made-up range for a tensor, always the same one, but another one for each tensor. Equal ranges would let
    runtimes leave out rescaling."""
    source = range_source(graph, name)
    part = zlib.crc32(source.encode()) / 2**32
    return (0.0, 4 + 2 * part) if graph.non_negative(source) else (-3 - 2 * part, 3 + part)


@dataclass(slots=True)
class _Seen:
    """The extremes of one tensor over all images, 0 included, and a random sample of its values. A sample in even steps
    could see only the borders of a map, if the step and the map's width share a factor."""

    low: float = 0.0
    high: float = 0.0
    samples: list[NDArray[np.float32]] = field(default_factory=list)

    def add(self, values: NDArray[np.float32]) -> None:
        flat = values.ravel()
        self.low, self.high = min(self.low, float(flat.min())), max(self.high, float(flat.max()))
        rows = np.random.default_rng(len(self.samples)).integers(0, flat.size, _SAMPLES)
        self.samples.append(flat[rows] if flat.size > _SAMPLES else flat.copy())

    def best_range(self, method: Method) -> Range:
        """Return the range that `method` chooses (see `activation_ranges`)."""
        if method == "minmax" or self.high - self.low < 1e-6:
            return self.low, self.high
        values, low, high = np.concatenate(self.samples), self.low, self.high
        if method == "percentile":
            below, above = (float(end) for end in np.quantile(values, (_TAIL, 1 - _TAIL)))
            return min(below, 0.0), max(above, 0.0)
        if method == "entropy":
            end = _entropy_end(values, levels=128 if low < 0 else 256)
            return max(low, -end), min(high, end)
        # "mse": shrink one end after the other to where the squared error is least.
        if high > 0:
            high *= min(_SHRINKS, key=lambda shrink: _squared_error(values, low, high * shrink))
        if low < 0:
            low *= min(_SHRINKS, key=lambda shrink: _squared_error(values, low * shrink, high))
        return float(low), float(high)


def _entropy_end(values: NDArray[np.float32], levels: int) -> float:
    """Return the end at which to clip |values| so that `levels` equal steps have the least Kullback-Leibler divergence.

    Source: Migacz, 8-bit inference with TensorRT (GTC 2017). ONNX Runtime's own search takes a second per tensor.
    """
    sizes = np.abs(values[values != 0])  # zeros lose nothing at any end
    if not sizes.size:
        return float("inf")
    counts, edges = np.histogram(sizes, bins=_BINS, range=(0.0, float(sizes.max())))  # from 0, as int8's steps
    counts = counts.astype(float)
    ends = range(levels, _BINS + 1, _BIN_STEP)
    losses = []
    for end in ends:
        # The histogram clipped at `end`: the last bin gets all values beyond it. Each level covers a row of its bins.
        bins, starts = counts[:end], np.linspace(0, end, levels, endpoint=False).astype(int)
        clipped = bins.copy()
        clipped[-1] += counts[end:].sum()
        # The quantised one: each level spreads its values evenly over its bins that are not empty.
        filled_bins = np.maximum(np.add.reduceat((bins > 0).astype(float), starts), 1)
        widths = np.diff(np.append(starts, end))
        coarse = np.repeat(np.add.reduceat(bins, starts) / filled_bins, widths) * (bins > 0)
        coarse = np.maximum(coarse, 1e-4)  # a last bin that only clipping filled costs much, but not infinitely much
        losses.append(float(scipy.special.rel_entr(clipped / clipped.sum(), coarse / coarse.sum()).sum()))
    return float(edges[ends[int(np.argmin(losses))]])


def _squared_error(values: NDArray[np.float32], low: float, high: float) -> float:
    step = np.float32((high - low) / 255)
    rounded = np.rint(np.clip(values, np.float32(low), np.float32(high)) / step) * step
    return float(np.square(rounded - values).sum())


def activation_ranges(proto: ModelProto, images: NDArray[np.float32], methods: Sequence[Method], *,
                      tuned_for: TunedFor, threads: int = 1) -> dict[Method, dict[str, Range]]:
    """Return the ranges of an fp32 network's activations over normalised `images`, by each of `methods`, in one pass.

    "mse": smallest squared error; "minmax": extremes; "percentile": all but 0.01 % of the values on each side;
    "entropy": smallest divergence of the distributions. The network runs in ONNX Runtime.
    """
    if len(images) == 0:
        raise QuantizeError("no images to calibrate with; give some of the training split.")
    # Tensors that share a range are measured once, at their source. The image input is no output of a node.
    graph = Graph(proto)
    sources = {name: range_source(graph, name) for name in quantised_tensors(graph, tuned_for)}
    inside = sorted({source for source in sources.values() if source in graph.producer})
    statistics = {name: _Seen() for name in set(sources.values())}
    run, input_name = session_of(proto, inside, threads)
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        for name, values in zip(inside, run(batch), strict=True):
            if not np.isfinite(values).all():
                raise QuantizeError(f"activation {name} is not finite on the calibration images; was the network "
                                    "trained?")
            statistics[name].add(values)
        if input_name in statistics:
            statistics[input_name].add(batch)
    ranges_of = {method: {name: entry.best_range(method) for name, entry in statistics.items()} for method in methods}
    return {method: {name: ranges[source] for name, source in sources.items()} for method, ranges in ranges_of.items()}


def calibration_images(data: Dataset, n: int, seed: int) -> NDArray[np.float32]:
    """Return at most `n` normalised training images, to measure int8 ranges on. They are drawn by `seed` from all
    classes alike (`draw_by_class`), because ranges without a rare class may spoil its answers."""
    rows = draw_by_class(data.train.labels, n, seed)
    return data.normalise(np.asarray(data.train.images[rows]))


def draw_by_class(labels: NDArray[np.integer[Any]], n: int, seed: int) -> NDArray[np.int64]:
    """Draw at most `n` rows, equally many of each class as far as it has so many; sorted by class, then by row."""
    rows = np.random.default_rng(seed).permutation(len(labels))
    by_class = [rows[labels[rows] == label] for label in np.unique(labels)]
    # Sorted by its number within its class: the first row of each class, then the second of each, and so on.
    turns = np.concatenate([np.arange(len(each)) for each in by_class])
    chosen_rows = np.concatenate(by_class)[np.argsort(turns, kind="stable")[:n]]
    return np.asarray(chosen_rows[np.lexsort((chosen_rows, labels[chosen_rows]))], np.int64)


def name_nodes(proto: ModelProto) -> None:
    """Give every node a unique name, as the quantiser refers to nodes by name."""
    names = {""}
    for index, node in enumerate(proto.graph.node):
        if node.name in names:
            node.name = f"{node.op_type}_{index}_unnamed"
        names.add(node.name)
