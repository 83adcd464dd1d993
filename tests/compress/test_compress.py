"""`hwnas compress`: what it leaves, that a kill loses no finished step, what it refuses in one line."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from compress_fixtures import command, job_of, overrides_of
from deployment_fixtures import measured, spoil

from hwnas.cli.command import compose
from hwnas.cli.progress import Console
from hwnas.compress import compression as compress_steps
from hwnas.compress import steps as compress_score
from hwnas.compress.job import CompressJob, Source, check_source, make_job, source_of
from hwnas.compress.steps import Step, Steps
from hwnas.data.dataset import DatasetInfo, subset
from hwnas.errors import CandidateError, MeasurementInvalid, ModelError, TargetError
from hwnas.latency import timing
from hwnas.latency.measurement import Measurement
from hwnas.networks.export import export_onnx
from hwnas.networks.origin import describe_training
from hwnas.runtimes.onnxruntime import OnnxRuntime
from hwnas.system.run_folder import Manifest

pytestmark = pytest.mark.usefixtures("clock")


def summary_of(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def table_of(out: Path) -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in csv.DictReader((out / "table.csv").read_text().splitlines())}


def drops(out: Path) -> dict[str, float]:
    return {name: float(row["drop_points"]) for name, row in table_of(out).items()}


def one_line(capsys) -> str:
    line, = capsys.readouterr().err.splitlines()
    return line


def test_the_plain_step_is_enough_where_it_keeps_the_limit(trained: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert command(trained, out, "max_drop=3") == 0
    assert list(table_of(out)) == ["fp32", "mse"]
    assert (out / "model_int8.onnx").read_bytes() == (out / "steps" / "mse.onnx").read_bytes()
    summary = summary_of(out)
    card = (out / "card.md").read_text()
    assert f"Measured: {summary['latency_ms']:.4g} ms" in card
    assert "trained for 8 epochs in" in card
    fp32 = [out / name for name in ("architecture.yaml", "weights.safetensors", "model.onnx")]
    assert [path.read_bytes() for path in fp32] == [(trained / path.name).read_bytes() for path in fp32]
    assert not Manifest.find(out).faults(out / "model_int8.onnx", *fp32)
    assert describe_training(out).startswith("trained for 8 epochs in")
    assert summary["target"] == "ort_int8"
    assert summary["keeps_limit"]
    assert summary["drop_points"] <= 3
    assert summary["test_drop_points_low"] <= summary["test_drop_points"] <= summary["test_drop_points_high"]
    assert summary["n_test"] == 359
    assert summary["int8_share"] > 0.8
    said = capsys.readouterr()
    assert "keeps the limit" in said.out
    assert str(out / "model_int8.onnx") in said.err
    assert command(out / "model_int8.onnx", tmp_path / "again") == 2
    assert "quantised already" in one_line(capsys)


@pytest.mark.soak
def test_a_hostile_network_needs_more_than_the_plain_step(
        hostile: Callable[[float], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel's range a hundred times the others': the weights of a whole tensor cannot share one scale, and its
    activations no range; what clips, corrects, computes in fp32 or trains gets most of it back."""
    small, large = tmp_path / "small", tmp_path / "large"
    with monkeypatch.context() as patch:
        patch.setattr(Step, "keeps", lambda self, reference, limit: self.name.endswith("_per_tensor"))
        assert command(hostile(0.01), small) == 0
    found = drops(small)
    assert found[next(name for name in found if name.endswith("_per_tensor"))] > found["mse"] + 2
    assert command(hostile(100.0), large, "all=true", "max_drop=2", "qat.epochs=4", "qat.lr=0.003") == 0
    found = drops(large)
    kept = [name for name in found if "_kept" in name]
    assert found["minmax"] > 5
    assert min(found[name] for name in kept) < 0.5 * found["minmax"]
    assert found["qat"] < 0.5 * found["minmax"]
    rows = table_of(large)
    assert [int(rows[name]["fp32_nodes"]) for name in kept] == list(range(1, len(kept) + 1))
    assert float(rows[kept[-1]]["int8_share"]) < float(rows["mse"]["int8_share"])
    assert json.loads((large / "steps" / "qat.json").read_text())["about"]["agreement"] >= 0.99
    assert summary_of(large)["keeps_limit"]


def test_kept_nodes_are_named_with_the_reason(hostile: Callable[[float], Path], tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(compress_score, "_METHODS", {"minmax": "extremes"})
    monkeypatch.setattr(Step, "keeps", lambda self, reference, limit: "_kept1" in self.name)
    assert command(hostile(100.0), tmp_path / "out") == 0
    why, = summary_of(tmp_path / "out")["kept_in_fp32"]
    assert why["recovered"] > 0
    assert {"node", "sqnr_db", "cost_ms", "bargain"} < set(why)
    assert f"in fp32: {why['node']}" in capsys.readouterr().err
    about = {one.key: one.value for one in onnx.load(str(tmp_path / "out" / "model_int8.onnx")).metadata_props}
    assert why["node"] in about["quantisation"]


@pytest.mark.soak
def test_a_limit_out_of_reach_writes_no_file_and_names_the_nearest(
        trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    out = tmp_path / "out"
    assert command(trained, out, "max_drop=3") == 0
    monkeypatch.setattr(Step, "keeps", lambda self, reference, limit: False)
    capsys.readouterr()
    assert command(trained, out, "max_drop=0") == 0
    assert not any((out / name).exists() for name in ("model_int8.onnx", "model.onnx", "card.md"))
    said = one_line(capsys)
    assert "no step keeps the limit of 0 points" in said
    summary, table = summary_of(out), table_of(out)
    assert (summary["keeps_limit"], summary["file"]) == (False, None)
    least = min(float(row["drop_points"]) for name, row in table.items() if name != "fp32")
    assert summary["drop_points"] == pytest.approx(least, abs=1e-4)
    assert any(name.startswith("qat_kept") for name in table)  # everything was tried


def test_the_fastest_wins_and_noise_does_not() -> None:
    def step(name: str, right: int) -> Step:
        return Step(name, "", Path(name), np.arange(100) < right, {})

    fp32, found = step("fp32", 99), [step("one", 95), step("two", 98), step("three", 97), step("lossy", 50)]
    times = {"fp32": 1.0, "one": 0.2, "two": 0.2001, "three": 0.3, "lossy": 0.01}
    latency = {name: measured(ms) for name, ms in times.items()}
    chosen = compress_steps.best(found, fp32, latency, 5.0)
    assert chosen is not None
    assert chosen.name == "two"  # as fast as the fastest that keeps the limit, and more accurate
    assert compress_steps.best(found, fp32, latency, 0.5) is None
    assert compress_steps.nearest(found, fp32) is found[1]
    found.append(Step("failed", "", Path("failed"), np.zeros(0, bool), {}, "failed"))
    assert compress_steps.best(found, fp32, latency, 100.0) is found[3]
    assert compress_steps.nearest(found[-1:], fp32) is None


KILLED = """
import os, sys
from deployment_fixtures import measured
from hwnas.cli.command import run_command
from hwnas.compress import __main__ as compress
from hwnas.compress import steps as compress_score
from hwnas.latency import timing
from hwnas.compress.steps import Step, Steps
timing.measure = lambda calls, *a, **b: {name: measured(0.2) for name in calls}
store = Steps._store
def storing(self, step, *more):
    if step.name == sys.argv[1]:
        os.fsync = lambda handle: os.kill(os.getpid(), 9)
    store(self, step, *more)
Steps._store = storing
Step.keeps = lambda self, reference, limit: self.name == "percentile"
sys.exit(run_command(compress.main, "compress", "usage", ["-q", *sys.argv[2:]]))
"""


@pytest.mark.soak
def test_killed_it_goes_on_after_the_last_finished_step(trained: Path, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "keeps", lambda self, reference, limit: self.name == "percentile")
    out = tmp_path / "cut"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run([sys.executable, "-c", KILLED, "percentile", *overrides_of(trained, out)], env=environment,
                          timeout=240, check=False)
    assert done.returncode == -9
    finished = {path.stem for path in (out / "steps").glob("*.json")}
    assert finished == {"identity", "mse", "minmax"}
    assert not (out / "summary.json").exists()
    made, take = [], Steps._store

    def storing(self: Steps, step: Step, *more: Any) -> None:
        made.append(step.name)
        take(self, step, *more)

    monkeypatch.setattr(Steps, "_store", storing)
    assert command(trained, out) == 0
    assert made == ["percentile"]
    assert list(table_of(out)) == ["fp32", "mse", "minmax", "percentile"]
    assert (out / "model_int8.onnx").read_bytes() == (out / "steps" / "percentile.onnx").read_bytes()
    assert command(trained, out) == 0
    assert made == ["percentile"]


@pytest.mark.soak
def test_a_full_disk_keeps_what_is_finished(trained: Path, tmp_path: Path, capsys,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    right = Steps.right

    def scored(self, path, precision, split=None):
        if path.stem == "minmax":
            patch.setattr(os, "fsync", full)
        return right(self, path, precision, split)

    with monkeypatch.context() as patch:
        patch.setattr(Steps, "right", scored)
        assert command(trained, tmp_path, "max_drop=0", "all=true") == 2
    assert "No space left on device. Free space" in one_line(capsys)
    assert {path.stem for path in (tmp_path / "steps").glob("*.json")} == {"identity", "mse"}
    assert command(trained, tmp_path, "max_drop=3") == 0


@pytest.mark.soak
def test_a_restless_machine_fails_and_keeps_the_steps(trained: Path, tmp_path: Path, capsys,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Measurement, "reason", "no turn was quiet")
        assert command(trained, tmp_path, "max_drop=3") == 1
    assert "could not be timed" in one_line(capsys)
    assert (tmp_path / "steps" / "mse.json").is_file()
    assert not (tmp_path / "model_int8.onnx").exists()
    assert command(trained, tmp_path, "max_drop=3") == 0


def test_times_without_an_error_choose_nothing(job: CompressJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many turns as copies tell no spread: every file would count as fast as the fastest."""
    whole = measured(0.2)
    short = replace(whole, turns=whole.turns[:whole.protocol.copies])
    assert short.valid
    monkeypatch.setattr(timing, "measure", lambda calls, *_, **__: dict.fromkeys(calls, short))
    with pytest.raises(MeasurementInvalid, match="too few turns for an error"):
        Steps(job).time({"fp32": (job.source.path, "fp32")})


@pytest.mark.soak
def test_a_step_that_the_runtime_refuses_is_a_gap_in_the_table(trained: Path, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = OnnxRuntime.compile

    def compiled(self, path, target):
        if Path(path).stem == "mse":
            raise CandidateError("this runtime does not like it")
        return compile_(self, path, target)

    monkeypatch.setattr(OnnxRuntime, "compile", compiled)
    assert command(trained, tmp_path, "max_drop=100") == 0
    assert table_of(tmp_path)["mse"]["reason"] == "this runtime does not like it"
    assert summary_of(tmp_path)["step"] == "minmax"


def bare(trained: Path, path: Path, change: Callable[[onnx.ModelProto], None] = lambda proto: None) -> Path:
    proto = onnx.load(str(trained / "model.onnx"))
    change(proto)
    path.write_bytes(proto.SerializeToString())
    return path


def without_names(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        node.name = ""
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    del proto.metadata_props[:]


@pytest.mark.soak
def test_a_bare_file_gets_every_step_but_training(trained: Path, tmp_path: Path) -> None:
    model = bare(trained, tmp_path / "net.onnx", without_names)
    assert command(model, tmp_path / "out", "all=true", "max_drop=3") == 0
    table = table_of(tmp_path / "out")
    assert not any(name.startswith("qat") for name in table)
    assert any("_kept" in name for name in table)
    assert summary_of(tmp_path / "out")["keeps_limit"]
    assert model.read_bytes() == bare(trained, tmp_path / "same.onnx", without_names).read_bytes()


def torn(proto: onnx.ModelProto) -> None:
    del proto.graph.output[:]


def fixed_batch(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


def missing_operator(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].op_type = "Rrelu"


@pytest.mark.parametrize(("change", "said"), [
    (torn, "torn"), (fixed_batch, "batch axis of input 'images' is fixed to 1"), (missing_operator, "Rrelu")])
def test_a_bare_file_is_refused(trained: Path, job: CompressJob, tmp_path: Path, change: Callable[..., None],
                                said: str) -> None:
    path = bare(trained, tmp_path / "net.onnx", change)
    with pytest.raises(ModelError, match=said):
        check_source({"path": str(path), "label": "net.onnx", "copy": str(tmp_path / "copy.onnx"), "image_size": None,
                      "memory_mb": 1000}, job.target, job.runtime, lambda *_: None)


def test_a_bare_file_is_refused_in_one_line(trained: Path, tmp_path: Path, capsys) -> None:
    assert command(bare(trained, tmp_path / "net.onnx", missing_operator), tmp_path / "out") == 2
    assert "Rrelu" in one_line(capsys)
    assert not (tmp_path / "out" / "summary.json").exists()


def test_calibration_images_of_every_class_are_asked_for(trained: Path, tmp_path: Path, capsys) -> None:
    assert command(trained, tmp_path / "out", "calibration_images=9") == 2
    assert "10 classes: some would be missing" in one_line(capsys)


def test_a_target_that_is_not_int8_or_not_of_this_host(trained: Path, tmp_path: Path, capsys,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(trained, tmp_path / "out", target="ort_fp32") == 2
    assert "runs fp32; compressing is for int8 targets, such as +target=ort_int8" in one_line(capsys)

    def check(self, target):
        raise TargetError(f"target {target.name}: this host has no int8.")

    monkeypatch.setattr(OnnxRuntime, "check", check)
    assert command(trained, tmp_path / "out") == 2
    assert one_line(capsys) == "TargetError: target ort_int8: this host has no int8."


def test_folders_that_cannot_be_compressed(trained: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    steps = [("neither architecture.yaml nor baseline.yaml", "architecture.yaml"),
             ("no weights.safetensors", "weights.safetensors"), ("no model.onnx", "model.onnx")]
    for said, file in steps:
        assert command(folder, tmp_path / "out") == 2
        assert said in one_line(capsys)
        (folder / file).write_bytes((trained / file).read_bytes())
    assert command(folder, tmp_path / "out") == 2
    assert "no manifest.json" in one_line(capsys)
    assert command(tmp_path / "absent.onnx", tmp_path / "out") == 2
    assert "there is no such file" in one_line(capsys)


@pytest.mark.parametrize(("channels", "classes", "said"), [
    (3, 10, "made for 3 channels, the data set digits has 1"), (1, 7, "made for 7 classes, the data set digits has 10"),
])
def test_a_network_for_other_images(trained: Path, tmp_path: Path, capsys, channels: int, classes: int,
                                    said: str) -> None:
    import torch

    folder = tmp_path / "net"
    shutil.copytree(trained, folder)
    model = torch.nn.Sequential(torch.nn.Conv2d(channels, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(),
                                torch.nn.Linear(144, classes))
    export_onnx(model, folder / "model.onnx", (channels, 8, 8))
    Manifest.write(folder, (folder / "model.onnx", folder / "weights.safetensors"), "recipe")
    assert command(folder, tmp_path / "out") == 2
    assert said in one_line(capsys)


@pytest.mark.soak
def test_other_options_need_another_folder(trained: Path, hostile: Callable[[float], Path], tmp_path: Path,
                                           capsys) -> None:
    assert command(trained, tmp_path, "max_drop=3") == 0
    capsys.readouterr()
    assert command(trained, tmp_path, "max_drop=3", "calibration_images=64") == 2
    assert "calibration_images was 128, is 64. Give the same options, or another out=FOLDER" in one_line(capsys)
    assert command(hostile(2.0), tmp_path, "max_drop=3") == 2
    assert "identity.json is of another compression: model was" in one_line(capsys)
    (tmp_path / "steps" / "mse.json").write_text("{")
    assert command(trained, tmp_path, "max_drop=3") == 2
    assert "Remove it to take that step again" in one_line(capsys)


def test_another_split_is_said(trained: Path, tmp_path: Path, capsys) -> None:
    make_job(compose("compress", overrides_of(trained, tmp_path, "split_seed=1")), Console(quiet=True))
    assert "some of those it is judged on may have trained it" in capsys.readouterr().err


def test_another_data_set_of_the_same_shape_is_refused(trained: Path, tmp_path: Path, capsys) -> None:
    """Its answers are chance before and after, so that every limit would be kept."""
    def elsewhere(proto: onnx.ModelProto) -> None:
        next(entry for entry in proto.metadata_props if entry.key == "dataset").value = "fashion_mnist"

    assert command(bare(trained, tmp_path / "net.onnx", elsewhere), tmp_path / "out") == 2
    assert "was trained on the data set fashion_mnist, this is digits. Give dataset=fashion_mnist" in one_line(capsys)


def test_where_nothing_can_be_made_it_says_so(trained: Path, tmp_path: Path, capsys,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = OnnxRuntime.compile
    monkeypatch.setattr(compress_score, "_METHODS", {"mse": "", "minmax": ""})

    def compiled(self, path, target):
        if target.precision == "int8" and Path(path).parent.name == "steps":
            raise CandidateError("this runtime likes none")
        return compile_(self, path, target)

    monkeypatch.setattr(OnnxRuntime, "compile", compiled)
    assert command(trained, tmp_path, "all=true") == 1
    assert "no int8 file of" in (said := one_line(capsys))
    assert "this runtime likes none" in said
    assert {row["reason"] for name, row in table_of(tmp_path).items() if name != "fp32"} == {"this runtime likes none"}


def test_a_step_is_taken_again_when_its_settings_change(job: CompressJob) -> None:
    steps, made = Steps(job), list[int]()

    def make() -> tuple[onnx.ModelProto, dict[str, Any]]:
        made.append(1)
        raise CandidateError("no matter")

    for settings in ({"lr": 0.1}, {"lr": 0.1}, {"lr": 0.2}):
        steps.take("one", "", make, settings)
    assert len(made) == 2


def test_a_folder_with_the_files_of_others_is_left_alone(trained: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "net"
    shutil.copytree(trained, folder)
    (folder / "model_int8.onnx").write_bytes(b"deployed")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert command(folder, folder, "max_drop=3") == 2
    assert "the folder of a hwnas train. Choose another out=FOLDER" in one_line(capsys)
    assert before.items() <= {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}.items()


def test_a_file_refused_for_a_folder_does_not_replace_the_one_in_use(trained: Path, job: CompressJob, tmp_path: Path
                                                                     ) -> None:
    def opened(path: Path) -> Source:
        return source_of(str(path), job.target, DatasetInfo("digits", 1, 10, 8), job.options, tmp_path / "steps")

    first = opened(bare(trained, tmp_path / "net.onnx"))
    held = first.path.read_bytes()
    other = opened(bare(trained, tmp_path / "other.onnx", without_names))
    assert other.path != first.path
    assert first.path.read_bytes() == held


def test_only_images_that_the_training_had_may_be_learnt_from(trained: Path, job: CompressJob, tmp_path: Path) -> None:
    part = job_of(trained, tmp_path / "part", "train_images=200")
    rows = subset(job.dataset.train.labels, 200, 0)
    np.testing.assert_array_equal(part.dataset.train.images, job.dataset.train.images[rows])
    seen = {image.tobytes() for image in part.dataset.normalise(part.dataset.train.images)}
    assert {image.tobytes() for image in part.calibration} <= seen
    assert part.identity != job.identity


def test_answers_of_an_earlier_file_do_not_outlive_it(trained: Path, job: CompressJob) -> None:
    steps, proto = Steps(job), onnx.load(str(trained / "model.onnx"))
    steps.take("one", "", lambda: (proto, {}), {"lr": 0.1})
    stored = job.steps / "one.json"
    assert stored.is_file()

    def killed() -> tuple[onnx.ModelProto, dict[str, Any]]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steps.take("one", "", killed, {"lr": 0.2})
    assert not stored.exists()


@pytest.mark.soak
def test_a_file_of_an_earlier_limit_goes_where_every_step_fails(trained: Path, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(trained, tmp_path, "max_drop=3") == 0
    monkeypatch.setattr(Steps, "take", lambda self, name, what, *_: Step(
        name, what, self.job.steps / f"{name}.onnx", np.zeros(0, bool), {}, "failed"))
    assert command(trained, tmp_path, "max_drop=3") == 1
    assert not (tmp_path / "model_int8.onnx").exists()
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.soak
def test_a_damaged_step_is_taken_again_and_a_damaged_network_is_refused(trained: Path, tmp_path: Path, capsys) -> None:
    model, out = tmp_path / "net", tmp_path / "out"
    shutil.copytree(trained, model)
    assert command(model, out, "max_drop=3") == 0
    made = (out / "model_int8.onnx").read_bytes()
    assert "model_int8.onnx" in json.loads((out / "manifest.json").read_text())["files"]
    capsys.readouterr()
    spoil(out / "steps" / "mse.onnx")
    spoil(out / "model_int8.onnx")
    assert command(model, out, "max_drop=3") == 0
    assert "mse.onnx is not the file that was made: step mse is taken again." in capsys.readouterr().err
    assert (out / "model_int8.onnx").read_bytes() == made
    spoil(model / "model.onnx")
    assert command(model, out, "max_drop=3") == 2
    assert "model.onnx is not the file that was made: SHA-256" in one_line(capsys)
