"""torch -> ONNX: folded, named, dynamic, whole; the gate behind it; and pixels that a graph normalises itself."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import timm
import torch
from onnx import TensorProto, helper
from timm.layers import MixedConv2d
from timm.layers.pool2d_same import AvgPool2dSame, MaxPool2dSame
from torch import nn

from hwnas.data.dataset import normalise
from hwnas.errors import ExportError, ModelError
from hwnas.networks.export import check_parity, export_onnx, randomise, take_pixels
from hwnas.networks.quantize import quantize_static
from hwnas.runtimes.onnxruntime import run_once
from hwnas.runtimes.openvino import import_openvino
from hwnas.runtimes.runtime import load_runtime
from hwnas.target import Target

IMAGES = np.random.default_rng(0).standard_normal((256, 1, 32, 32), np.float32)
ExportedNetwork = tuple[nn.Module, Path]


def network(name: str = "semnasnet_050", channels: int = 1) -> nn.Module:
    return randomise(timm.create_model(name, in_chans=channels, num_classes=10), seed=0)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ExportedNetwork:
    model, path = network(), tmp_path_factory.mktemp("export") / "model.onnx"
    export_onnx(model, path, (1, 32, 32), {"id": "abc", "null_ms": "1.5"})
    return model, path


def test_exported_graph_is_folded_named_and_dynamic(exported: ExportedNetwork) -> None:
    proto = onnx.load(str(exported[1]))
    kinds = {node.op_type for node in proto.graph.node}
    assert not kinds & {"BatchNormalization", "Identity"}
    assert [entry.name for entry in proto.graph.input] == ["images"]
    assert [entry.name for entry in proto.graph.output] == ["logits"]
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert {entry.key: entry.value for entry in proto.metadata_props} == {"id": "abc", "null_ms": "1.5"}
    names = [node.name for node in proto.graph.node]
    for module in ("/conv_stem/", "/blocks.0.0/", "/blocks.3.2/", "/blocks.6.0/", "/classifier/"):
        assert any(module in name for name in names), module


class Spectrum(nn.Module):
    """A network with an operator that ONNX has not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(self.conv(images)).real.mean((2, 3))


def test_failed_export_prints_no_graph(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExportError, match="fft"):
        export_onnx(Spectrum(), tmp_path / "model.onnx", (1, 32, 32))
    assert "".join(capfd.readouterr()) == ""


def test_weights_that_are_standardised_in_each_call_are_computed_once(tmp_path: Path) -> None:
    model = network("test_nfnet")
    export_onnx(model, tmp_path / "model.onnx", (1, 32, 32))
    graph = onnx.load(str(tmp_path / "model.onnx")).graph
    weights = {weight.name for weight in graph.initializer}
    assert all(node.input[1] in weights for node in graph.node if node.op_type == "Conv")
    assert check_parity(model, tmp_path / "model.onnx", IMAGES).top1_agreement == 1.0


def test_export_leaves_the_mode_of_every_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    model[0].eval()
    export_onnx(model, tmp_path / "model.onnx", (1, 32, 32))
    assert model.training
    assert not model[0].training


def test_parity_holds_and_fails_on_other_weights_torn_files_and_few_images(exported: ExportedNetwork, tmp_path: Path
                                                                           ) -> None:
    model, path = exported
    parity = check_parity(model, path, IMAGES)
    assert parity.n == 256
    assert parity.top1_agreement >= 0.995
    (tmp_path / "torn.onnx").write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ExportError, match=r"ONNX Runtime cannot run .*torn\.onnx"):
        check_parity(model, tmp_path / "torn.onnx", IMAGES)
    with pytest.raises(ValueError, match="256"):
        check_parity(model, path, IMAGES[:255])
    other: Any = randomise(deepcopy(model), seed=1)
    with pytest.raises(ExportError, match="top-1 agreement"):
        check_parity(other, path, IMAGES)
    with torch.no_grad():
        other.classifier.bias[0] = float("nan")
    with pytest.raises(ExportError, match="not finite"):
        check_parity(other, path, IMAGES)


def test_what_cannot_be_exported_is_an_export_error_in_one_line(tmp_path: Path) -> None:
    for model, shape in ((network(), (3, 32, 32)), (nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(7)),
                                                    (1, 32, 32))):
        with pytest.raises(ExportError) as raised:
            export_onnx(model, tmp_path / "model.onnx", shape)
        assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_norm_of_vectors_is_a_linear_layer(tmp_path: Path) -> None:
    model = randomise(nn.Sequential(nn.Conv2d(1, 8, 3, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(8),
                                    nn.ReLU(), nn.Linear(8, 2)), 0)
    export_onnx(model, tmp_path / "model.onnx", (1, 32, 32))
    assert check_parity(model, tmp_path / "model.onnx", IMAGES).max_abs_error < 1e-4
    quantize_static(tmp_path / "model.onnx", tmp_path / "int8.onnx", None, tuned_for="openvino")


def test_a_norm_without_convolution_is_quantised_as_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.BatchNorm2d(8, affine=False), nn.ReLU(), nn.Conv2d(8, 8, 3),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    export_onnx(randomise(model, 0), tmp_path / "model.onnx", (1, 32, 32))
    assert check_parity(model, tmp_path / "model.onnx", IMAGES).max_abs_error < 1e-4
    quantize_static(tmp_path / "model.onnx", tmp_path / "int8.onnx", None, tuned_for="openvino")
    graph = onnx.load(str(tmp_path / "int8.onnx")).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    (norm,) = [node for node in graph.node if any(each.name == "group" and each.i == 8 for each in node.attribute)]
    assert {made[name] for name in norm.input[:2]} == {"DequantizeLinear"}


# tf_: TensorFlow's padding, which depends on the size of each map; mixnet: batch norms behind concatenations;
# starnet, densenet: behind none
ZOO = ["tf_mobilenetv3_small_minimal_100", *(pytest.param(name, marks=pytest.mark.soak) for name in (
    "tf_efficientnet_lite0", "tf_efficientnet_lite1", "tf_efficientnet_lite2", "tf_efficientnet_b0", "mixnet_s",
    "tf_mixnet_s", "tf_efficientnetv2_b0", "tf_mobilenetv3_large_100", "tf_mobilenetv3_small_075", "mobilenetv1_100",
    "mobilenetv2_050", "mobilenetv2_100", "mobilenetv3_small_050", "mobilenetv3_large_100", "mobilenetv4_conv_small",
    "efficientnet_b0", "efficientnet_lite0", "fbnetc_100", "mnasnet_100", "semnasnet_100", "tinynet_c", "lcnet_100",
    "resnet18", "resnet10t", "regnetx_002", "ghostnet_100", "hardcorenas_a", "starnet_s1", "repvit_m1",
    "densenet121"))]


@pytest.mark.parametrize("name", ZOO)
def test_networks_of_timm_run_in_both_runtimes_and_in_int8(name: str, tmp_path: Path) -> None:
    """At an odd size, where TensorFlow's padding is another one for each map."""
    shape, (fp32, int8) = (3, 45, 45), (tmp_path / "model.onnx", tmp_path / "model_int8.onnx")
    images = np.random.default_rng(0).standard_normal((256, *shape), np.float32)[:2]
    model = network(name, channels=3).eval()
    export_onnx(model, fp32, shape)
    assert "Pad" not in {node.op_type for node in onnx.load(str(fp32)).graph.node}
    with torch.inference_mode():
        expected = model(torch.from_numpy(images)).numpy()
    for runtime in ("onnxruntime", "openvino"):
        answers = load_runtime(runtime).compile(fp32, Target(runtime, runtime, "fp32")).logits(images)
        assert np.abs(answers - expected).max() <= 1e-4 * np.abs(expected).max(), runtime
    quantize_static(fp32, int8, None, tuned_for="openvino")
    execution = load_runtime("openvino").compile(int8, Target("int8", "openvino", "int8")).execution
    assert (execution.precision, execution.int8_share > 0.3) == ("int8", True)


def test_mixed_kernels_swallow_their_padding_and_the_norm_behind_them(tmp_path: Path) -> None:
    mixed = MixedConv2d(4, 6, [3, 5], stride=2, padding="same")
    model = nn.Sequential(nn.Conv2d(1, 4, 3), mixed, nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 225, 2))
    export_onnx(randomise(model, 0), tmp_path / "model.onnx", (1, 32, 32))
    kinds = {node.op_type for node in onnx.load(str(tmp_path / "model.onnx")).graph.node}
    assert not kinds & {"Pad", "BatchNormalization", "Shape"}
    assert "Concat" in kinds
    assert check_parity(model, tmp_path / "model.onnx", IMAGES).max_abs_error < 1e-4


def test_padding_of_poolings_becomes_theirs(tmp_path: Path) -> None:
    pools = MaxPool2dSame(3, 2), nn.Conv2d(4, 4, 1), AvgPool2dSame(3, 2)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *pools, nn.Flatten(), nn.Linear(4 * 8 * 8, 2))
    export_onnx(model, tmp_path / "model.onnx", (1, 32, 32))
    nodes = {node.op_type: node for node in onnx.load(str(tmp_path / "model.onnx")).graph.node}
    assert "Pad" not in nodes
    for kind in ("MaxPool", "AveragePool"):
        assert next(list(each.ints) for each in nodes[kind].attribute if each.name == "pads") == [0, 0, 1, 1]
    assert check_parity(model, tmp_path / "model.onnx", IMAGES).max_abs_error < 1e-5


class PaddedByHalf(nn.Module):
    """Pads by an amount that the map's shape decides."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(images, (images.shape[0] * 0 + 2, 1, 0, 0))


@pytest.mark.parametrize("pad", [nn.ReflectionPad2d((2, 1, 0, 0)), PaddedByHalf()])
def test_padding_that_is_no_convolutions_own_stays(pad: nn.Module, tmp_path: Path) -> None:
    """timm's blurred poolings repeat the border."""
    model = nn.Sequential(pad, nn.Conv2d(1, 2, 4, stride=4), nn.Flatten(), nn.Linear(128, 4))
    export_onnx(model, tmp_path / "model.onnx", (1, 32, 32))
    assert "Pad" in {node.op_type for node in onnx.load(str(tmp_path / "model.onnx")).graph.node}
    assert check_parity(model, tmp_path / "model.onnx", IMAGES).max_abs_error < 1e-4


def test_randomised_networks_are_reproducible_and_have_no_zeroed_branch() -> None:
    fresh = timm.create_model("resnet10t", in_chans=1, num_classes=10)
    norms = [name for name, value in fresh.state_dict().items() if name.endswith("bn2.weight") and not value.any()]
    assert norms  # timm zeroes the gain of every branch
    one, two = network("resnet10t").state_dict(), network("resnet10t").state_dict()
    for name in norms:
        assert one[name].all()
        assert torch.equal(one[name], two[name])


@pytest.mark.soak
def test_a_process_that_never_imported_timm_can_export(tmp_path: Path) -> None:
    """timm imports torchvision, which lacks its operators beside some builds of torch."""
    script = ("import sys\nfrom torch import nn\nfrom hwnas.networks.export import export_onnx\n"
              "export_onnx(nn.Conv2d(1, 2, 3), sys.argv[1], (1, 8, 8))\n")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "model.onnx")], capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr


def nothing(channels: int, size: int) -> onnx.ModelProto:
    """A network that answers with its images."""
    shape = ["batch", channels, size, size]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("images", "logits")]
    graph = helper.make_graph([helper.make_node("Relu", ["images"], ["logits"])], "nothing", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_normalised_to_the_last_bit_of_training(tmp_path: Path) -> None:
    """With mean and std 0.5 every level lies half way between two of int8, so that the last bit decides."""
    mean, std = (0.5, 0.4, 0.3), (0.5, 0.2, 0.1)
    proto, path = nothing(3, 16), tmp_path / "pixels.onnx"
    proto.graph.node[0].op_type = "Identity"
    assert take_pixels(proto, 3, 16, mean, std) == ["batch", 16, 16, 3]
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, path)
    levels = np.repeat(np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1), 3, 3)
    expected = normalise(levels.transpose(0, 3, 1, 2), mean, std)
    np.testing.assert_array_equal(run_once(path, levels), expected)
    network = import_openvino().Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    np.testing.assert_array_equal(network(levels)[0], expected)
    np.testing.assert_allclose(expected[0, :, 12, 12], [0.6, 2.0, 5.0], atol=0.01)


def test_a_preparation_is_taken_once() -> None:
    proto = nothing(3, 4)
    take_pixels(proto, 3, 4, (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(ModelError, match="only once"):
        take_pixels(proto, 3, 4, (0.5,) * 3, (0.5,) * 3)
