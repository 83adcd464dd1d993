"""Cuts of transformers: blocks, the inside of perceptrons and smaller images, with weights, and in int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from around_fixtures import answers, choices_of, cut_of, space_around
from safetensors.torch import save_file

from hwnas.cli.command import run_command
from hwnas.errors import ConfigError, DataError
from hwnas.networks.around import describe_cuts
from hwnas.networks.baselines import Baseline, count_macs, original
from hwnas.networks.cutting import build_cut, cut_further, cut_model
from hwnas.networks.export import check_parity, export_onnx
from hwnas.networks.given import register_module
from hwnas.networks.network import Shape, TimmNetwork, build
from hwnas.networks.qdq import Graph, head_nodes
from hwnas.networks.quantize import quantize_static
from hwnas.networks.running import logits_of
from hwnas.networks.weights import PretrainedOptions, find_pretrained
from hwnas.runtimes.runtime import load_runtime
from hwnas.search.__main__ import main
from hwnas.target import Target

NAME, PX = "test_vit", 64  # six blocks of 64 channels


def test_blocks_the_inside_of_perceptrons_and_images_may_be_cut() -> None:
    space = space_around(NAME, PX)
    choices = choices_of(space)
    assert space.image_sizes == (64, 48, 32)  # of patches of 16 px
    assert choices["blocks"] == (5, 4, 3, 2, 1, 0)
    assert choices["width.inner16"] == (1.0, 0.75, 0.5, 0.375, 0.25)
    assert dict(space.known["cut_short"].chosen)["blocks"] == 2  # half of the only row there is
    least = cut_of(space, image_size=32, **{name: min(of) for name, of in choices.items()})
    model: Any = build(least)
    assert len(model.blocks[0].mlp.fc1.weight) == 48
    assert answers(model, 32).shape == (2, 10)
    # A network that takes one size of images is cut for another, and its patches may be of any number.
    sizes = space_around("vit_tiny_patch16_224", 224).image_sizes
    assert sizes == (224, 208, 192, 176, 160, 144, 128, 112, 96, 80)
    known = space_around("vit_tiny_patch16_224", PX).known
    assert all(answers(build(cut)).shape == (2, 10) for cut in known.values())


def test_what_says_nothing_is_cut_without_a_loss() -> None:
    model: Any = original(NAME, 3, 10, PX)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.fc1.weight[1::2] = 0
            block.mlp.fc2.weight[:, 1::2] = 0
        for layer in (model.blocks[4].attn.proj, model.blocks[4].mlp.fc2, model.blocks[5].attn.proj,
                      model.blocks[5].mlp.fc2):
            layer.weight.zero_()
            layer.bias.zero_()
    before = answers(model)
    part = cut_of(space_around(NAME, PX), width__inner16=0.5, blocks=3)
    assert torch.allclose(before, answers(cut_model(model, part)), atol=1e-5)


def test_a_cut_of_a_cut_keeps_weights_and_places_for_smaller_images() -> None:
    space = space_around(NAME, PX)
    torch.manual_seed(0)
    first, part = cut_of(space, blocks=3), cut_of(space, blocks=2, image_size=32, width__inner16=0.5)
    parent: Any = build_cut(first)
    child: Any = cut_further(parent.state_dict(), first, part)
    assert child.pos_embed.shape[1] == 2 * 2 + child.num_prefix_tokens
    assert torch.equal(child.blocks[1].attn.qkv.weight, parent.blocks[1].attn.qkv.weight)
    rows = {tuple(row.tolist()) for row in parent.blocks[1].mlp.fc1.weight}
    assert all(tuple(row.tolist()) in rows for row in child.blocks[1].mlp.fc1.weight)


@pytest.mark.parametrize("px", [64, 32])
def test_weights_that_were_trained_on_images_of_another_size_are_taken(tmp_path: Path, px: int) -> None:
    trained = original(NAME, 3, 10, 64)
    save_file(trained.state_dict(), tmp_path / f"{NAME}.safetensors")
    pretrained, _ = find_pretrained(NAME, PretrainedOptions(folder=tmp_path), 3)
    whole = build_cut(cut_of(space_around(NAME, px)), pretrained)
    baseline = TimmNetwork(Baseline(NAME, pretrained=pretrained), Shape(3, px, 10)).start()
    assert torch.equal(answers(whole, px), answers(baseline, px))
    if px == PX:
        assert torch.equal(answers(whole), answers(trained))


@pytest.mark.parametrize("shape", [(1, 18, 64), (1, 17, 32), (17, 64), (1, 1, 64)])
def test_places_that_are_no_square_or_of_another_width_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {**original(NAME, 3, 10, PX).state_dict(), "pos_embed": torch.zeros(shape)}
    save_file(tensors, tmp_path / f"{NAME}.safetensors")
    pretrained, _ = find_pretrained(NAME, PretrainedOptions(folder=tmp_path), 3)
    with pytest.raises(DataError, match="'pos_embed' has shape"):
        build_cut(cut_of(space_around(NAME, 32)), pretrained)


@pytest.mark.parametrize(("name", "runtime"), [
    (NAME, "openvino"), (NAME, "onnxruntime"), ("test_vit2", "onnxruntime")])  # the second ends in a mean of tokens
def test_all_layers_run_in_int8_and_the_stream_has_no_pairs(name: str, runtime: str, tmp_path: Path) -> None:
    part = cut_of(space_around(name, PX), blocks=1)
    model = build(part)
    export_onnx(model, tmp_path / "fp32.onnx", (3, PX, PX))
    images = np.random.default_rng(0).normal(size=(256, 3, PX, PX)).astype(np.float32)
    check_parity(model, tmp_path / "fp32.onnx", images)
    quantize_static(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", images[:64], tuned_for=runtime)
    proto = onnx.load(str(tmp_path / "int8.onnx"))
    producer = {name: node for node in proto.graph.node for name in node.output}
    weights = {weight.name: onnx.numpy_helper.to_array(weight) for weight in proto.graph.initializer}
    read = {node.name: [producer[name].op_type if name in producer else "" for name in node.input]
            for node in proto.graph.node}
    layers = [node for node in proto.graph.node if node.op_type == "MatMul" and node.input[1] in producer
              and producer[node.input[1]].op_type == "DequantizeLinear"]
    assert len(layers) == 2 * 4  # of two blocks; products of queries and keys stay
    for node in layers:
        assert read[node.name] == ["DequantizeLinear"] * 2
        weight, scale = (weights[name] for name in producer[node.input[1]].input[:2])
        assert (weight.dtype, scale.shape) == (np.int8, weight.shape[1:])
    assert not any("DequantizeLinear" in read[node.name] for node in proto.graph.node if node.op_type == "Add")
    compiled = load_runtime(runtime).compile(tmp_path / "int8.onnx", Target("it", runtime, "int8"))
    assert compiled.execution.fallback_share == 0
    wanted, got = (logits_of(onnx.load(str(tmp_path / file)), images[64:], 1) for file in ("fp32.onnx", "int8.onnx"))
    assert np.abs(wanted - got).max() < 0.1 * np.abs(wanted).max()
    norm, *layers = head_nodes(Graph(onnx.load(str(tmp_path / "fp32.onnx"))))  # in fp32 where int8 spoils them
    assert ("norm" in norm, [name.split("/")[1] for name in layers]) == (True, ["head"])


def test_the_stream_of_another_exporters_file_has_no_pairs_either() -> None:
    make = onnx.helper.make_node  # a layer norm as files before opset 17 have it: less the mean, over the deviation
    nodes = [make("MatMul", ["tokens", "w"], ["a"]), make("Add", ["tokens", "a"], ["stream"], "stream"),
             make("ReduceMean", ["stream"], ["mean"], axes=[-1]), make("Sub", ["stream", "mean"], ["apart"]),
             make("MatMul", ["apart", "w"], ["b"]), make("Add", ["stream", "b"], ["more"], "more"),
             make("MatMul", ["more", "w"], ["c"]), make("Add", ["b", "c"], ["sum"], "sum")]
    graph = onnx.helper.make_graph(nodes, "g", [onnx.helper.make_tensor_value_info(
        "tokens", onnx.TensorProto.FLOAT, ["batch", 4, 8])], [], [onnx.numpy_helper.from_array(np.eye(8), "w")])
    whole = Graph(onnx.helper.make_model(graph))
    assert [node.name for node in nodes if whole.adds_maps(node)] == ["sum"]


def test_operations_of_attention_are_counted() -> None:
    model: Any = original(NAME, 3, 10, PX)
    tokens, width = 4 * 4 + model.num_prefix_tokens, model.embed_dim
    layers = tokens * sum(layer.weight.numel() for block in model.blocks for layer in (
        block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2))
    attention = len(model.blocks) * 2 * tokens * tokens * width
    assert count_macs(model, (3, PX, PX)) == layers + attention + 4 * 4 * 3 * 16 * 16 * width + 10 * width
    told = space_around(NAME, 224).known["whole"].macs  # of the patches, without the token that answers
    assert told == pytest.approx(count_macs(original(NAME, 3, 10, 224), (3, 224, 224)), rel=0.01)


def test_what_a_runtime_cannot_write_is_refused_before_anything_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    assert run_command(main, "search", "usage", [
        "+target=edge_fp32", "dataset=digits", "dataset.image_size=32", f"around={NAME}", "pretrained.use=false",
        f"out={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{NAME}-cut_short_narrow cannot be deployed on edge_fp32: LiteRT has no operator" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "words"), [
    (NAME, "multiples of 16 px, and 60 is none"), ("mixer_s32_224", "only timm's ViT and DeiT"),
    ("tiny_vit_5m_224", "only timm's ViT and DeiT")])
def test_other_sizes_and_other_transformers_are_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        describe_cuts(name, 3, 10, 60)
    with pytest.raises(ConfigError, match=r"timm's name of it as around=.*pretrained\.file="):  # nor as a module
        register_module(original(NAME, 3, 10))
