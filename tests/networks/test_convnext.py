"""ConvNeXt's block, in both norms and activations: counted, exported, quantised, run and sized like every other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from hwnas.latency.features import NAMES, block_features
from hwnas.networks.export import check_parity, export_onnx, randomise
from hwnas.networks.network import build
from hwnas.networks.qdq import Graph, quantised_nodes
from hwnas.networks.quantize import load_fp32, quantize_static
from hwnas.runtimes.runtime import load_runtime
from hwnas.space.architecture import Architecture
from hwnas.space.blocks.block import BlockSpec
from hwnas.space.search_space import SearchSpace
from hwnas.study.objective import file_bytes
from hwnas.target import Target

torch = pytest.importorskip("torch")

SPACE = SearchSpace.load("convnext_small", channels=1, classes=10, image_size=16)
SHAPE = (1, 16, 16)
BuildResult = tuple[Architecture, torch.nn.Module, Path]
FORMS = [("cx_e4", "relu"), ("cxl_e4", "gelu"), *(pytest.param(form, marks=pytest.mark.soak) for form in (
    ("cx_e4", "gelu"), ("cxl_e4", "relu")))]


def network(op: str, activation: str) -> Architecture:
    setting = {**SPACE.known_params["convnext_like"], "activation": activation}
    return SPACE.decode({name: op if name.endswith(".op") else value for name, value in setting.items()})


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    architecture, path = network(*request.param), tmp_path_factory.mktemp("convnext") / "model.onnx"
    torch.manual_seed(0)
    model = randomise(build(architecture), 0).eval()
    export_onnx(model, path, SHAPE)
    return architecture, model, path


def images(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, *SHAPE), dtype=np.float32)


def test_the_fp32_file_answers_as_torch_in_all_runtimes(made: BuildResult) -> None:
    _, model, path = made
    expected = model(torch.from_numpy(images(256))).detach().numpy()
    assert check_parity(model, path, images(256)).top1_agreement == 1.0
    told = {runtime: load_runtime(runtime).compile(path, Target("t", runtime, "fp32", threads=1)).logits(images(256))
            for runtime in ("openvino", "onnxruntime")}
    for runtime, answers in told.items():
        assert np.abs(answers - expected).max() < 1e-3 * max(1.0, np.abs(expected).max()), runtime


@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime"])
def test_the_int8_file_runs_every_convolution_in_int8_and_answers_alike(made, runtime, tmp_path):
    architecture, model, path = made
    quantize_static(path, tmp_path / "int8.onnx", images(64, 1), tuned_for=runtime, method="mse")
    compiled = load_runtime(runtime).compile(tmp_path / "int8.onnx", Target("t", runtime, "int8", threads=1))
    convolutions = sum(len(block.convolutions()) for block in architecture.blocks())
    assert compiled.execution.int8_share == 1.0
    assert compiled.execution.precisions["int8"] == convolutions
    expected = model(torch.from_numpy(images(256))).detach().numpy()
    answers = compiled.logits(images(256))
    assert np.corrcoef(answers.ravel(), expected.ravel())[0, 1] > 0.99
    assert (answers.argmax(1) == expected.argmax(1)).mean() > 0.9


def test_files_have_the_nodes_the_pairs_and_the_size_that_blocks_say(made: BuildResult, tmp_path: Path) -> None:
    """Layer norms and activations alone have no pairs."""
    architecture, _, path = made
    names = " ".join(node.name for node in load_fp32(path).graph.node)
    assert all(f"/blocks.{i}.{j}/" in names for i, stage in enumerate(architecture.staged_blocks()[1:-1])
               for j in range(len(stage)))
    quantize_static(path, tmp_path / "int8.onnx", None)
    nodes = onnx.load(tmp_path / "int8.onnx").graph.node
    kinds = Counter(node.op_type for node in nodes)
    inside = {name for node in nodes if node.op_type in ("Erf", "Div", "LayerNormalization") for name in node.output}
    assert not any(node.op_type == "QuantizeLinear" and node.input[0] in inside for node in nodes)
    layer_norms = sum(block.kind == "cxl" for block in architecture.blocks())
    assert (kinds["LayerNormalization"], kinds["BatchNormalization"]) == (layer_norms, 0)
    assert kinds["Erf"] == (len(architecture.blocks()) - 1 if architecture.activation == "gelu" else 0)
    assert len(quantised_nodes(Graph(load_fp32(path)))) == sum(
        role not in block.rules.fp32_roles for block in architecture.blocks() for role, *_ in block.convolutions())
    for file, precision in ((path, "fp32"), (tmp_path / "int8.onnx", "int8")):
        told = sum(file_bytes(block, Target("t", "onnxruntime", precision)) for block in architecture.blocks())
        assert told == pytest.approx(file.stat().st_size, rel=0.01)


def test_latency_features_see_norm_activation_and_kind() -> None:
    plain = BlockSpec("cx", 24, 24, 8, 7, 1, 4.0, skip=True)
    normed, smooth = replace(plain, kind="cxl"), replace(plain, activation="gelu")
    rows = {name: dict(zip(NAMES, block_features(block), strict=True))
            for name, block in (("plain", plain), ("normed", normed), ("smooth", smooth))}
    assert (rows["plain"]["norm_elements"], rows["plain"]["gelu_elements"], rows["plain"]["cx_blocks"]) == (0, 0, 1)
    assert rows["normed"]["norm_elements"] == pytest.approx(24 * 64 * 1e-5)
    assert (rows["normed"]["cx_blocks"], rows["normed"]["cxl_blocks"]) == (0, 1)
    assert rows["smooth"]["gelu_elements"] == pytest.approx((24 + 96 + 24) * 64 * 1e-5)
