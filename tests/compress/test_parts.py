"""The parts of a compression: nodes in fp32, ranges, biases, and torch's rounding, which must be the QDQ file's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from compress_fixtures import QUIET, job_of
from training_fixtures import AWAY

from hwnas.compress import qat as compress_qat
from hwnas.compress.job import CompressJob
from hwnas.compress.qat import FakeQuantised, fine_tune
from hwnas.compress.steps import KeptNodes, PostTraining, Steps
from hwnas.errors import StudyError, TrainingError
from hwnas.networks.export import export_onnx, randomise
from hwnas.networks.qdq import Graph, Range, quantised_nodes
from hwnas.networks.quantize import activation_ranges, corrected, load_fp32, quantise_graph
from hwnas.runtimes.runtime import load_runtime
from hwnas.system.libraries import declare_missing
from hwnas.target import Target
from hwnas.training.loop import Checkpoint, predict
from hwnas.training.place import PlaceOptions, device_of

declare_missing()

import onnxruntime as ort  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402

RUNTIMES = ("openvino", "onnxruntime")
IMAGES = np.random.default_rng(0).standard_normal((64, 1, 32, 32), np.float32)


def target(runtime: str, precision: str = "int8") -> Target:
    return Target(f"{runtime}_{precision}", runtime, precision, batch=32)


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.square(got - wanted).sum() / np.square(wanted).sum()))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The fp32 file of a timm network with random weights."""
    @cache
    def export(name: str) -> Path:
        path = tmp_path_factory.mktemp(name) / "fp32.onnx"
        torch.manual_seed(0)
        export_onnx(randomise(timm.create_model(name, in_chans=1, num_classes=10), 0), path, (1, 32, 32))
        return path

    return export


@cache
def mse_ranges(path: Path, runtime: str) -> Mapping[str, Range]:
    return ranges_of(path, runtime, IMAGES, "mse")


def ranges_of(path: Path, runtime: str, images: np.ndarray, method: str) -> Mapping[str, Range]:
    return activation_ranges(load_fp32(path), images, [method], tuned_for=runtime)[method]


def answers(proto: onnx.ModelProto, path: Path, runtime: str, images: np.ndarray = IMAGES):
    path.write_bytes(proto.SerializeToString())
    compiled = load_runtime(runtime).compile(path, target(runtime))
    return compiled.logits(images), compiled.execution


@pytest.mark.parametrize(("name", "runtime"), [("mobilenetv3_small_050", "onnxruntime"), ("resnet10t", "openvino")])
def test_nodes_left_in_fp32_bring_the_answers_nearer(exported: Callable[[str], Path], tmp_path: Path, name: str,
                                                     runtime: str) -> None:
    path = exported(name)
    ranges, nodes = mse_ranges(path, runtime), [node.name for node in quantised_nodes(Graph(load_fp32(path)))]
    wanted = load_runtime(runtime).compile(path, target(runtime, "fp32")).logits(IMAGES)
    errors, shares = [], []
    for kept in ((), nodes[:-1]):
        proto = load_fp32(path)
        quantise_graph(proto, ranges, note="test", tuned_for=runtime, kept=kept)
        got, execution = answers(proto, tmp_path / "int8.onnx", runtime)
        errors.append(relative_error(got, wanted))
        shares.append(execution.int8_share)
    assert errors[1] < errors[0]
    assert shares[1] < shares[0]


def test_a_kept_node_reads_and_computes_in_fp32(exported: Callable[[str], Path]) -> None:
    path = exported("semnasnet_050")
    before, proto = {node.name: list(node.input) for node in load_fp32(path).graph.node}, load_fp32(path)
    kept = [node.name for node in quantised_nodes(Graph(proto))][3:5]
    quantise_graph(proto, mse_ranges(path, "openvino"), note="test", tuned_for="openvino", kept=kept)
    after = {node.name: list(node.input) for node in proto.graph.node}
    assert all(after[name] == before[name] for name in kept)
    others = [node.name for node in quantised_nodes(Graph(load_fp32(path)), kept)]
    assert all(name.endswith("_dequantised") for node in others for name in after[node])


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_one_scale_a_tensor_runs_in_int8_too(exported: Callable[[str], Path], tmp_path: Path, runtime: str) -> None:
    path = exported("resnet10t")
    proto = load_fp32(path)
    quantise_graph(proto, mse_ranges(path, runtime), note="test", tuned_for=runtime, per_channel=False)
    scales = [onnx.numpy_helper.to_array(one) for one in proto.graph.initializer if one.name.endswith("weight_scale")]
    assert scales
    assert all(scale.ndim == 0 for scale in scales)
    assert answers(proto, tmp_path / "int8.onnx", runtime)[1].int8_share == 1.0
    assert "per-tensor" in {one.key: one.value for one in proto.metadata_props}["quantisation"]


def test_every_method_cuts_outliers_but_extremes(tmp_path: Path) -> None:
    images = IMAGES.clip(-2, 2)
    images[0, 0, 0, :3] = 60.0
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(3600, 2))
    export_onnx(model, tmp_path / "fp32.onnx", (1, 32, 32))
    highs = {method: ranges_of(tmp_path / "fp32.onnx", "openvino", images, method)["images"][1]
             for method in ("minmax", "mse", "percentile", "entropy")}
    assert highs["minmax"] == 60.0
    assert all(1.5 < highs[method] < 60.0 for method in ("mse", "percentile", "entropy"))


def test_entropy_s_steps_begin_at_zero() -> None:
    """Where nothing lies near 0, what it cuts must not depend on how far away the smallest value is."""
    from hwnas.networks.quantize import _entropy_end

    values = np.append(np.random.default_rng(0).normal(6.5, 0.2, 20_000), [60.0] * 5).astype(np.float32)
    end = _entropy_end(values, levels=256)
    nearer = _entropy_end(np.append(values, np.float32(1e-4)), levels=256)
    assert end == pytest.approx(nearer, rel=0.01)
    assert end < 8
    assert _entropy_end(np.zeros(5, np.float32), levels=256) == float("inf")


def test_bias_correction_takes_the_mean_shift_off(job: CompressJob, tmp_path: Path) -> None:
    proto = load_fp32(job.source.path)
    ranges = {name: (low / 2, high / 2) for name, (low, high) in ranges_of(
        job.source.path, "onnxruntime", job.calibration, "minmax").items()}  # clips much: shifts means
    wanted = load_runtime("onnxruntime").compile(job.source.path, target("onnxruntime", "fp32")).logits(job.calibration)
    wide, narrow = (corrected(proto, ranges, job.calibration, tuned_for="onnxruntime", narrow=narrow, threads=1,
                              progress=lambda share: None) for narrow in (False, True))
    assert wide != narrow, "biases make up for the rounding to as many bits as the file has"
    shifts = []
    for network in (proto, wide):
        int8 = onnx.ModelProto()
        int8.CopyFrom(network)
        quantise_graph(int8, ranges, note="test", tuned_for="onnxruntime")
        got, _ = answers(int8, tmp_path / "int8.onnx", "onnxruntime", job.calibration)
        shifts.append(float(np.abs((got - wanted).mean(0)).max()))
    assert shifts[1] < 0.2 * shifts[0]


def as_written(path: Path, images: np.ndarray) -> np.ndarray:
    """What the file says, node by node, with nothing fused."""
    options = ort.SessionOptions()
    options.graph_optimization_level, options.intra_op_num_threads = ort.GraphOptimizationLevel.ORT_DISABLE_ALL, 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"images": images})[0])


@pytest.mark.parametrize(("name", "tuned_for"), [
    ("semnasnet_050", "openvino"), ("mobilenetv3_small_050", "openvino"), ("mobilenetv3_small_050", "onnxruntime"),
    ("resnet10t", "onnxruntime"), ("mobilenetv3_small_050", "tensorrt"), ("resnet10t", "tensorrt")])
def test_torch_rounds_where_the_file_does(exported: Callable[[str], Path], tmp_path: Path, name: str, tuned_for: str
                                          ) -> None:
    """Far nearer to the file than fp32 is, whatever the network is made of."""
    path = exported(name)
    proto, ranges = load_fp32(path), mse_ranges(path, tuned_for)
    quantise_graph(proto, ranges, note="test", tuned_for=tuned_for)
    (tmp_path / "int8.onnx").write_bytes(proto.SerializeToString())
    got, fp32 = as_written(tmp_path / "int8.onnx", IMAGES), as_written(path, IMAGES)
    fake = predict(FakeQuantised(path, ranges, tuned_for).eval(), IMAGES)
    assert relative_error(fake, got) < 0.5 * relative_error(fp32, got)  # a host's sums may round other ties


@pytest.mark.parametrize("runtime", ["onnxruntime", pytest.param("openvino", marks=pytest.mark.soak)])
def test_a_fine_tuned_network_and_its_file_agree(trained: Path, job: CompressJob, tmp_path: Path, runtime: str) -> None:
    if runtime == "openvino":
        job = job_of(trained, tmp_path / "epyc", target="epyc_int8")
    plain = PostTraining(Steps(job))
    model, rows = fine_tune(job, plain.quantisation("mse"), QUIET)
    proto = load_fp32(job.source.path)
    before = [one.raw_data for one in proto.graph.initializer]
    assert [one.raw_data for one in model.network(proto).graph.initializer] != before
    quantise_graph(proto, plain.quantisation("mse").ranges, note="qat", tuned_for=runtime, narrow=job.narrow)
    images = job.dataset.normalise(np.concatenate([part.images for part in (
        job.dataset.train, job.validation, job.dataset.test)]))
    fake = predict(model, images)
    for other in RUNTIMES:  # a network of ReLU is the same file for both
        got, execution = answers(proto, tmp_path / "int8.onnx", other, images)
        assert (got.argmax(1) == fake.argmax(1)).mean() >= 0.99
        assert relative_error(got, fake) < {"openvino": 0.03, "onnxruntime": 0.005}[other]
        assert execution.fallback_share == 0
        assert execution.int8_share > 0.8  # all but squeeze-and-excite
    assert [row["epoch"] for row in rows] == [1, 2]


@pytest.mark.soak
def test_fine_tuning_for_int8_goes_where_it_is_told(trained: Path, tmp_path: Path, away: set[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"):  # `meta` has no such kernels
        monkeypatch.setattr(torch, name, lambda values, *levels: values.clone())
    job = job_of(trained, tmp_path, "qat.epochs=1")
    base = PostTraining(Steps(job)).quantisation("minmax")
    job = replace(job, options=replace(job.options, training=PlaceOptions(AWAY)))
    model, _ = fine_tune(job, base, QUIET)
    assert device_of(model).type == "cpu"
    assert away == {AWAY}


@pytest.mark.soak
def test_fine_tuning_goes_on_bit_for_bit(trained: Path, tmp_path: Path, monkeypatch) -> None:
    def tuned(out: Path) -> dict[str, torch.Tensor]:
        job = job_of(trained, out, "qat.zoom=0.1")
        plain = PostTraining(Steps(job))
        return fine_tune(job, plain.quantisation("mse"), QUIET)[0].state_dict()

    whole, save = tuned(tmp_path / "whole"), Checkpoint.save

    def saving(self: Checkpoint, path: Path) -> None:
        save(self, path)
        if self.epoch == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", saving)
        with pytest.raises(KeyboardInterrupt):
            tuned(tmp_path / "cut")
    torch.manual_seed(5)
    again = tuned(tmp_path / "cut")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    path = compress_qat.checkpoint_of(job_of(trained, tmp_path / "cut"))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(StudyError, match="torn"):
        tuned(tmp_path / "cut")


def test_a_loss_that_is_not_finite_names_epoch_and_rate(job: CompressJob) -> None:
    options = replace(job.options, qat=replace(job.options.qat, lr=100.0, distil=0.0))
    job = replace(job, options=options, dataset=replace(job.dataset, std=(1e-38,)))
    base = PostTraining(Steps(job)).quantisation("mse")
    with pytest.raises(TrainingError, match=r"epoch 1 of 2, .*learning rate 100"):
        fine_tune(job, replace(base, ranges={name: (low, float("inf")) for name, (low, _) in base.ranges.items()}),
                  QUIET)


@pytest.mark.soak
def test_sensitive_nodes_are_left_out_by_what_they_bring_in_a_millisecond(
        hostile: Callable[[float], Path], tmp_path: Path, clock) -> None:
    job = job_of(hostile(100.0), tmp_path / "cheap", "sensitivity.nodes=3")
    steps = Steps(job)
    base = PostTraining(steps).quantisation("minmax")
    steps.take("minmax", "", lambda: (base.int8(), {}))
    found = list(KeptNodes(steps, base, "minmax").steps())
    first, *_ = found[0].kept
    assert "conv_dw" in first  # the layer behind the spoilt range
    assert all(set(one.kept) < set(other.kept) for one, other in pairwise(found))
    assert found[-1].right.mean() > steps.take("minmax", "", lambda: (base.int8(), {})).right.mean()
    assert [why["node"] for why in found[-1].about["why"]] == list(found[-1].kept)

    clock[first] = 30.0  # so dear that the others come first
    job = job_of(hostile(100.0), tmp_path / "dear", "sensitivity.nodes=3")
    steps = Steps(job)
    steps.take("minmax", "", lambda: (base.int8(), {}))
    dear = list(KeptNodes(steps, base, "minmax").steps())
    assert dear[0].kept[0] != first
    costs = [why["cost_ms"] for step in dear for why in step.about["why"] if why["node"] == first]
    assert costs == pytest.approx([29.8] * len(costs), rel=1e-2)


@pytest.mark.soak
def test_interrupted_sensitivities_go_on_with_the_next_node(trained: Path, tmp_path: Path, clock,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(trained, tmp_path, "sensitivity.nodes=1")
    steps, asked, error = Steps(job), list[tuple[str, ...]](), KeptNodes._error
    base = PostTraining(steps).quantisation("mse")
    steps.take("mse", "", lambda: (base.int8(), {}))

    def counted(self: KeptNodes, scratch: Path, kept: tuple[str, ...]) -> float:
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.append(kept)
        return error(self, scratch, kept)

    with monkeypatch.context() as patch:
        patch.setattr(KeptNodes, "_error", counted)
        with pytest.raises(KeyboardInterrupt):
            list(KeptNodes(steps, base, "mse").steps())
        before = asked.copy()
        asked.clear()
        with pytest.raises(KeyboardInterrupt):
            list(KeptNodes(steps, base, "mse").steps())
    assert before[0] == ()
    assert not set(before) & set(asked)
    assert len(list(KeptNodes(steps, base, "mse").steps())) <= 1
