"""int8 QDQ: where pairs go, what ranges do, and that both runtimes agree with the fp32 network."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st

from hwnas import quantize as command
from hwnas.cli.progress import Console
from hwnas.errors import DataError, QuantizeError
from hwnas.networks import quantize
from hwnas.networks.export import export_onnx, randomise
from hwnas.networks.qdq import Graph, head_nodes
from hwnas.networks.quantize import METHODS, QuantisedFile, load_fp32, needs_narrow_weights, quantize_static
from hwnas.networks.running import logits_of
from hwnas.runtimes.runtime import load_runtime
from hwnas.target import Host, Target
from hwnas.tasks.classification import Classification

IMAGES = np.random.default_rng(0).standard_normal((64, 1, 32, 32), np.float32)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The fp32 file of a network."""
    folder = tmp_path_factory.mktemp("fp32")

    @cache
    def export(name: str) -> Path:
        model = timm.create_model(name, in_chans=1, num_classes=10)
        export_onnx(randomise(model, 0), folder / f"{name}.onnx", (1, 32, 32), {"id": "abc"})
        return folder / f"{name}.onnx"

    return export


@pytest.fixture(scope="module")
def fp32(exported: Callable[[str], Path]) -> Path:
    return exported("semnasnet_050")


def structure(path: Path) -> list[tuple[object, ...]]:
    return [(node.op_type, node.name, *node.input, *node.output) for node in onnx.load(str(path)).graph.node]


def logits(path: Path, images: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"images": images})[0])


def foreign_file(path: Path, **changes: bool) -> Path:
    """A small network as other exporters write it."""
    rng, make = np.random.default_rng(0), onnx.helper.make_node
    w1, w2, w3 = (onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
                  for name, shape in (("w1", (8, 1, 3, 3)), ("w2", (8, 8, 3, 3)), ("w3", (8, 10))))
    float_, shape = onnx.TensorProto.FLOAT, {"kernel_shape": [3, 3], "pads": [1] * 4}
    nodes = [make("Constant", [], ["w2"], name="w2", value=w2),
             make("Conv", ["images", "w1"], ["c1"], name="conv1", **shape), make("Relu", ["c1"], ["r1"], name="relu1"),
             make("Conv", ["r1", "w2"], ["c2"], name="conv2", **shape), make("Clip", ["c2"], ["r2"], name="clip"),
             make("GlobalAveragePool", ["r2"], ["g"], name="pool")]
    numbers = [onnx.numpy_helper.from_array(np.array([value]), f"i{value}") for value in (0, 1)]
    if changes.get("has_norm"):
        nodes[1].output[0] = "c0"
        nodes.insert(2, make("BatchNormalization", ["c0", *(f"norm{at}" for at in range(4))], ["c1"], name="norm"))
    if changes.get("adds_sides"):
        nodes += [make("Shape", ["g"], ["s"], name="shape"), make("Gather", ["s", "i0"], ["n"], name="n"),
                  make("Gather", ["s", "i1"], ["c"], name="c"), make("Sub", ["c", "i1"], ["d"], name="sub"),
                  make("Add", ["d", "n"], ["e"], name="add"), make("Sub", ["e", "n"], ["h"], name="sub2"),
                  make("Add", ["h", "i1"], ["k"], name="add2"), make("Concat", ["n", "k"], ["t"], name="cat", axis=0),
                  make("Reshape", ["g", "t"], ["f"], name="reshape")]
    else:
        nodes += [make("Flatten", ["g"], ["f"], name="flatten")]
    row = onnx.numpy_helper.from_array(rng.standard_normal((1, 10)).astype(np.float32), "row")
    nodes += [make("Gemm", ["f", "w3", *["row"] * changes.get("adds_row", False)], ["logits"], name="fc")]
    ends = [onnx.helper.make_tensor_value_info("logits", float_, ["batch", 10])]
    if changes.get("shows_map"):
        ends.append(onnx.helper.make_tensor_value_info("r1", float_, ["batch", 8, 32, 32]))
    norm = [onnx.numpy_helper.from_array(rng.uniform(0.5, 2, 8).astype(np.float32), f"norm{at}") for at in range(4)]
    weights = [w1, w3, row, *norm, *numbers]
    more = [onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims) for weight in weights]
    graph = onnx.helper.make_graph(nodes, "g", [onnx.helper.make_tensor_value_info(
        "images", float_, ["batch", 1, 32, 32]), *more * changes.get("weights_are_inputs", False)], ends, weights)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=(
        3 if changes.get("weights_are_inputs") else 8)), str(path))
    return path


@pytest.mark.parametrize("changes", [{}, {"adds_sides": True}, {"shows_map": True}, {"adds_row": True},
                                     {"weights_are_inputs": True}, {"has_norm": True}], ids=lambda each: "".join(each))
def test_every_layer_of_another_exporters_file_is_quantised(tmp_path: Path, changes: dict[str, bool]) -> None:
    given = foreign_file(tmp_path / "fp32.onnx", **changes)
    made = quantize_static(given, tmp_path / "int8.onnx", IMAGES)
    assert not made.kept
    assert "BatchNormalization" not in {node.op_type for node in onnx.load(str(tmp_path / "int8.onnx")).graph.node}
    names = {node.input[0] for node in onnx.load(str(tmp_path / "int8.onnx")).graph.node
             if node.op_type == "DequantizeLinear"}
    assert sum("weight" in name or name.startswith("w1") or name.startswith("w2") for name in names) == 3
    apart = np.abs(logits(tmp_path / "int8.onnx", IMAGES) - logits(given, IMAGES)).max()
    assert apart < 0.1 * np.abs(logits(given, IMAGES)).max()


def test_a_limit_that_nothing_keeps_ends_with_the_best_file_and_a_layer_in_int8(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 255, (120, 1, 32, 32), dtype=np.uint8)
    data: Any = SimpleNamespace(train=SimpleNamespace(labels=np.repeat(np.arange(10), 12), images=images),
                                normalise=lambda pixels: (pixels / 255).astype(np.float32))
    options: Any = SimpleNamespace(images=64, seed=0, max_drop=0.0)

    def answer(job: command._Job, path: Path, precision: str, report: object = None) -> np.ndarray:
        return np.arange(1000) >= (precision == "int8")  # int8 always loses one

    monkeypatch.setattr(command._Job, "_right", answer)
    target = Target("ort_int8", "onnxruntime", "int8")
    job = command._Job(foreign_file(tmp_path / "fp32.onnx"), "net", target, data, options, tmp_path)
    chosen = job.search(Console(quiet=True))
    assert chosen.drop[0] == pytest.approx(0.1)
    assert sorted(path.name for path in tmp_path.glob("int8-*.onnx")) == ["int8-0.onnx", "int8-1.onnx", "int8-2.onnx"]


@pytest.mark.parametrize(("name", "tuned_for"), [
    ("mobilenetv3_small_050", "openvino"), ("mobilenetv3_small_050", "onnxruntime"), ("resnet10t", "onnxruntime"),
    *(pytest.param(*case, marks=pytest.mark.soak) for case in (
        ("resnet10t", "openvino"), *product(("semnasnet_050", "mobilenetv2_050"), ("openvino", "onnxruntime"))))])
def test_made_up_ranges_give_the_structure_of_real_ones(exported, tmp_path: Path, name: str, tuned_for: str) -> None:
    quantize_static(exported(name), tmp_path / "a.onnx", None, tuned_for=tuned_for)
    quantize_static(exported(name), tmp_path / "b.onnx", IMAGES[:16], tuned_for=tuned_for, method="minmax")
    assert structure(tmp_path / "a.onnx") == structure(tmp_path / "b.onnx")
    zeros = [[int(np.count_nonzero(onnx.numpy_helper.to_array(weight)) > 0) for weight in
              onnx.load(str(tmp_path / file)).graph.initializer if weight.name.endswith("_zero")
              and weight.data_type == onnx.TensorProto.UINT8] for file in ("a.onnx", "b.onnx")]
    assert zeros[0] == zeros[1]  # a zero point that is 0 lets runtimes leave work out


def test_recipe_on_a_network_with_squeeze_and_excite(fp32: Path, tmp_path: Path) -> None:
    quantize_static(fp32, tmp_path / "int8.onnx", IMAGES, method="mse")
    proto = onnx.load(str(tmp_path / "int8.onnx"))
    producer = {name: node for node in proto.graph.node for name in node.output}
    weights = {weight.name: onnx.numpy_helper.to_array(weight) for weight in proto.graph.initializer}
    for node in proto.graph.node:
        inputs = [producer[name].op_type if name in producer else "" for name in node.input]
        if node.op_type == "Conv" and "/se/" in node.name:
            assert "DequantizeLinear" not in inputs
        elif node.op_type in ("Conv", "Gemm"):
            assert inputs == ["DequantizeLinear"] * 3
            weight, scale = (weights[name] for name in producer[node.input[1]].input[:2])
            assert weight.dtype == np.int8
            assert scale.shape == (len(weight),)
        elif node.op_type == "Add":
            assert inputs == ["DequantizeLinear"] * 2
        elif node.op_type == "QuantizeLinear":
            assert weights[node.input[2]].dtype == np.uint8
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    assert metadata["id"] == "abc"
    assert "mse" in metadata["quantisation"]


def test_quantised_network_answers_like_the_fp32_one(tmp_path: Path) -> None:
    """On one that has structure to answer with: a random linear readout of random features, well conditioned."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 16, 3, 2, 1), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, 2, 1),
                                torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32 * 64, 10))
    export_onnx(model, tmp_path / "fp32.onnx", (1, 32, 32))
    expected, host = logits(tmp_path / "fp32.onnx", IMAGES), Host.detect()
    narrow = needs_narrow_weights(Target("t", "onnxruntime", "int8"), host.vendor, host.flags)
    for method in ("mse", "minmax"):
        quantize_static(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", IMAGES, method=method, narrow=narrow)
        got = logits(tmp_path / "int8.onnx", IMAGES)
        assert np.abs(got - expected).max() < 0.08 * np.ptp(expected)
        assert (got.argmax(1) == expected.argmax(1)).mean() > 0.9


def small(path: Path, *layers: torch.nn.Module, factor: float = 1.0) -> Path:
    """A convolution and `layers` that end in a linear one. The first channel is `factor` times as loud as the others,
    and counts as much as they do."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 16, 3, 2), torch.nn.ReLU(), *layers)
    with torch.no_grad():
        model[0].weight[0] *= factor
        model[0].bias[0] *= factor
        model[-1].weight[:, 0] /= factor
        model[-1].weight *= 10  # decided answers
    export_onnx(model, path, (1, 32, 32))
    return path


def test_ranges_are_chosen_by_the_answers_of_other_images(tmp_path: Path) -> None:
    images = np.random.default_rng(0).standard_normal((192, 1, 32, 32), np.float32)
    images[:128:3, 0, 0, 0] = 3000.0  # among those that make ranges; no other third judges
    images[1:128:3, 0, 0, 0] = 3000.0
    path = small(tmp_path / "fp32.onnx", torch.nn.Flatten(), torch.nn.Linear(16 * 225, 10))
    made = [quantize_static(path, tmp_path / f"{name}.onnx", images) for name in "ab"]
    assert made[0] == made[1]
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert (made[0].images, made[0].kept) == (64, ())
    assert made[0].method != "minmax"
    assert made[0].cost == min(made[0].tried[method] for method in METHODS) < made[0].tried["minmax"]
    metadata = {entry.key: entry.value for entry in onnx.load(str(tmp_path / "a.onnx")).metadata_props}
    assert metadata["quantisation"] == f"qdq u8s8 per-channel, {made[0].text}"
    assert f"{made[0].agreement:.1%} of 64 training images" in made[0].text


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 40))
def test_images_for_ranges_are_of_all_classes_alike_as_far_as_there_are_so_many(labels: list[int], n: int) -> None:
    rows = quantize.draw_by_class(np.array(labels), n, seed=1)
    assert len(set(rows.tolist())) == len(rows) == min(n, len(labels))
    drawn, there = (Counter(np.array(labels)[index].tolist()) for index in (rows, range(len(labels))))
    fewest = min(drawn[label] for label in there if drawn[label] < there[label]) if len(rows) < len(labels) else n
    assert all(drawn[label] <= fewest + 1 for label in there)


def test_ranges_that_spoil_a_rare_class_lose_to_those_that_spoil_a_common_one_a_little() -> None:
    """Of 100 answers 4 are of the rare class: one way gets these wrong, the other 6 of the common one."""
    wanted = np.full((100, 2), [3.0, 0.0])
    wanted[:4] = [0.0, 3.0]
    spoils_rare, spoils_common = wanted.copy(), wanted.copy()
    spoils_rare[:4] = [3.0, 0.0]
    spoils_common[10:16] = [0.0, 3.0]
    rare, common = (QuantisedFile("m", **Classification().agreement(wanted, got))
                    for got in (spoils_rare, spoils_common))
    assert rare.agreement > common.agreement
    assert rare.cost > common.cost


def test_corrected_biases_bring_each_layers_mean_output_back_to_that_of_fp32(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    path = small(tmp_path / "fp32.onnx", torch.nn.Conv2d(16, 16, 3, groups=16), torch.nn.ReLU(),
                 torch.nn.Conv2d(16, 8, 1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 10))
    images, others = (rng.gamma(0.5, 1.0, (96, 1, 32, 32)).astype(np.float32) for _ in range(2))
    proto = load_fp32(path)
    # Ranges that cut off a part of all values shift the means.
    ranges = {name: (low / 2, high / 2) for name, (low, high) in quantize.activation_ranges(
        proto, images, ["minmax"], tuned_for="openvino")["minmax"].items()}
    errors = quantize.find_errors(proto, ranges, images, tuned_for="openvino", narrow=False, threads=1)
    files = {}
    for name, of in (("plain", {}), ("corrected", errors)):
        files[name] = load_fp32(path)
        quantize.quantise_graph(files[name], ranges, note="", tuned_for="openvino", errors=of)
    assert [node.op_type for node in files["plain"].graph.node] == [
        node.op_type for node in files["corrected"].graph.node]
    expected = logits_of(proto, others, 1).mean(0)
    plain, corrected = (np.abs(logits_of(files[name], others, 1).mean(0) - expected).mean() for name in files)
    assert corrected < plain / 2


def test_a_head_that_int8_would_spoil_stays_in_fp32(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((192, 1, 32, 32), np.float32)
    images *= rng.uniform(0.2, 3.0, (192, 1, 1, 1)).astype(np.float32)  # means alone do not repair the answers
    path = small(tmp_path / "fp32.onnx", torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10),
                 factor=2000)
    made = quantize_static(path, tmp_path / "int8.onnx", images)
    assert made.kept == head_nodes(Graph(load_fp32(path)))
    assert [name.rpartition("/")[2] for name in made.kept] == ["GlobalAveragePool", "Gemm"]
    assert made.cost < min(made.tried[method] for method in METHODS) / 2
    expected, got = logits(path, images), logits(tmp_path / "int8.onnx", images)
    assert (got.argmax(1) == expected.argmax(1)).mean() > 0.9


@pytest.mark.parametrize(("runtime", "vendor", "flags", "narrow"), [
    ("onnxruntime", "intel", ("avx2",), True), ("onnxruntime", "amd", ("avx2", "avx512f"), True),
    ("onnxruntime", "amd", ("avx2", "avx_vnni"), False), ("onnxruntime", "intel", ("avx512f", "avx512_vnni"), False),
    ("onnxruntime", "aarch64", ("asimd",), False), ("openvino", "intel", ("avx2",), True),
    ("openvino", "amd", ("avx2", "avx512f", "avx512_vnni"), False), ("litert", "amd", ("avx2",), False),
    ("another", "intel", ("avx2",), False)])
def test_weights_are_narrow_where_sums_would_overflow(runtime, vendor, flags, narrow):
    assert needs_narrow_weights(Target("t", runtime, "int8"), vendor, flags) == narrow


def test_narrow_weights_cannot_overflow_16_bits(tmp_path: Path) -> None:
    path = small(tmp_path / "fp32.onnx", torch.nn.Flatten(), torch.nn.Linear(16 * 225, 10))
    for narrow, largest in ((False, 127), (True, 64)):
        made = quantize_static(path, tmp_path / "int8.onnx", IMAGES, method="mse", narrow=narrow)
        tensors = onnx.load(str(tmp_path / "int8.onnx")).graph.initializer
        weights = [onnx.numpy_helper.to_array(tensor) for tensor in tensors if tensor.name.endswith("weight_quantised")]
        assert max(int(np.abs(weight.astype(int)).max()) for weight in weights) == largest
        assert ("7 bits" in made.text) == narrow
    assert 2 * 255 * 64 < 2**15


def test_a_dead_channel_keeps_its_bias(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
                                torch.nn.Flatten(), torch.nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[1] = 0.0
        model[0].bias[1] = 2.0
    export_onnx(model, tmp_path / "fp32.onnx", (1, 32, 32))
    quantize_static(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", IMAGES)
    expected, got = logits(tmp_path / "fp32.onnx", IMAGES), logits(tmp_path / "int8.onnx", IMAGES)
    assert np.abs(got - expected).max() < 0.02 * np.abs(expected).max()


class Places(torch.nn.Module):
    """A map to which a layer adds an encoding of positions: of numbers in the file, or of numbers computed of them."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        self.map, self.encode, self.head = (torch.nn.Conv2d(*sides, 1) for sides in ((1, 8), (2, 8), (8, 10)))
        self.places, self.computed = torch.nn.Parameter(torch.randn(1, 2, 32, 32)), computed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.encode(self.places.sin() if self.computed else self.places)
        return self.head((self.map(x) + places).relu()).mean((2, 3))


@pytest.mark.parametrize("computed", [False, True])
def test_layers_that_read_no_image_stay_in_fp32(tmp_path: Path, computed: bool) -> None:
    torch.manual_seed(0)
    export_onnx(Places(computed), tmp_path / "fp32.onnx", (1, 32, 32))
    quantize_static(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", IMAGES, method="minmax")
    compiled = load_runtime("openvino").compile(tmp_path / "int8.onnx", Target("t", "openvino", "int8", threads=1))
    assert compiled.execution.precisions["int8"] == 2
    expected = logits(tmp_path / "fp32.onnx", IMAGES)
    assert np.abs(compiled.logits(IMAGES) - expected).max() < 0.05 * np.abs(expected).max()


def test_errors_are_of_the_candidate_and_name_the_file(fp32: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    (tmp_path / "torn.onnx").write_bytes(fp32.read_bytes()[:3000])
    for source in (tmp_path / "torn.onnx", tmp_path / "absent.onnx"):
        with pytest.raises(QuantizeError, match=source.name):
            quantize_static(source, out, None)
    quantize_static(fp32, tmp_path / "int8.onnx", None)
    with pytest.raises(QuantizeError, match="quantised already"):
        quantize_static(tmp_path / "int8.onnx", out, None)
    with pytest.raises(QuantizeError, match="no images"):
        quantize_static(fp32, out, IMAGES[:0])
    with pytest.raises(QuantizeError, match="not finite"):
        quantize_static(fp32, out, IMAGES * np.float32("inf"))
    with pytest.raises(ValueError, match="method"):
        quantize_static(fp32, out, None, method="best")  # type: ignore[arg-type]
    assert not out.exists()


def test_a_file_with_its_channels_last_is_to_be_exported_anew() -> None:
    options: Any = SimpleNamespace(model="net.onnx", dataset={"name": "digit_scenes"})
    for shape, said in (((32, 32, 1), "channels first"), ((3, 32, 32), "data set that it was trained on")):
        with pytest.raises(DataError, match=said):
            command._images(options, onnx.ModelProto(), shape, Console(quiet=True))


def test_it_is_said_with_which_mean_and_std_a_file_is_fed_that_names_none(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, said = SimpleNamespace(fingerprint="", mean=(0.25,), std=(0.5,)), list[str]()
    monkeypatch.setattr(command, "read_images", lambda *given: SimpleNamespace(at_size=lambda px: data))
    options: Any = SimpleNamespace(model="net.onnx", dataset={"name": "digit_scenes"}, split_seed=0)
    console: Any = SimpleNamespace(remark=said.append)
    assert command._images(options, onnx.load(str(foreign_file(tmp_path / "a.onnx"))), (1, 32, 32), console) is data
    assert re.search(r"0\.25.*0\.5.*metadata_props", "".join(said))


def test_what_of_another_exporters_file_cannot_be_quantised_is_said(tmp_path: Path) -> None:
    whole, make = onnx.load(str(foreign_file(tmp_path / "whole.onnx"))), onnx.helper.make_node

    def halve(network: onnx.ModelProto) -> None:
        network.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((8, 1, 3, 3), np.float16), "w1"))

    def branch(network: onnx.ModelProto) -> None:
        inner = onnx.helper.make_graph([make("Identity", ["r1"], ["x"], name="x")], "inner", [], [
            onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)])
        network.graph.node.append(make("If", ["i1"], ["y"], name="if", then_branch=inner, else_branch=inner))

    def hold_one_image(network: onnx.ModelProto) -> None:
        network.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 8]), "sides"))
        node = next(node for node in network.graph.node if node.name == "flatten")
        node.CopyFrom(make("Reshape", ["g", "sides"], ["f"], name="flatten"))

    for change, why in ((halve, "16 bits"), (branch, "inside of If"), (hold_one_image, "32 images at a time")):
        network = onnx.ModelProto()
        network.CopyFrom(whole)
        change(network)
        onnx.save(network, str(tmp_path / "fp32.onnx"))
        with pytest.raises(QuantizeError, match=why):
            quantize_static(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", IMAGES)
