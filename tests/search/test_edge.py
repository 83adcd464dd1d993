"""A search for LiteRT, whole and small: what is deployed, verified, shown on the card and asked is its own file."""

from __future__ import annotations

import json
import shutil
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
from device_fixtures import NEEDED, Board
from PIL import Image
from search_fixtures import rows_of

pytest.importorskip("ai_edge_litert")

from hwnas import predict, verify
from hwnas.cli.command import run_command
from hwnas.front import make
from hwnas.networks.litert.tflite import read_tflite
from hwnas.runtimes.runtime import Execution, load_runtime
from hwnas.search.__main__ import main
from hwnas.system.run_folder import Manifest
from hwnas.target import Host, Target
from hwnas.tasks.classification import Classification

pytestmark = pytest.mark.usefixtures("any_machine")


@pytest.fixture
def run(finished_run) -> Path:
    """A run on a made-up table of this host."""
    return Path(finished_run("litert"))


def model_of(run: Path) -> Path:
    row, = rows_of(run / "front.csv")
    return run / "models" / row["id"]


def test_the_file_that_is_deployed_is_verified_and_says_how_to_use_it(run):
    row, = rows_of(run / "front.csv")
    assert row["verified"] == "true", row["reason"]
    assert (row["precision"], row["fallback_share"], row["target"]) == ("int8", "0", "edge_int8")
    assert float(row["latency_ms"]) > 0
    model = model_of(run)
    manifest, path = Manifest.find(model), model / "model_int8.tflite"
    assert manifest.faults(path, model / "model_int8.onnx") == []
    assert manifest.parity["deployed_agreement"] >= 0.98
    from ai_edge_litert.interpreter import Interpreter

    said = read_tflite(path).metadata
    assert json.loads(said["class_names"]) == [str(digit) for digit in range(10)]
    assert len(json.loads(said["mean"])) == len(json.loads(said["std"])) == 1
    assert said["onnx_sha256"] == manifest.files["model_int8.onnx"].sha256
    assert said["hwnas_id"] == model.name
    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    (given,), (told,) = interpreter.get_input_details(), interpreter.get_output_details()
    images = np.random.default_rng(0).standard_normal((1, 16, 16, 1), np.float32)
    interpreter.set_tensor(given["index"], images)
    interpreter.invoke()
    compiled = load_runtime("litert").compile(path, Target("t", "litert", "int8"))
    assert np.array_equal(interpreter.get_tensor(told["index"]), compiled.logits(images.transpose(0, 3, 1, 2)))
    section = (model / "card.md").read_text().split("## LiteRT")[1].split("## ")[0]
    code = section.split("```python\n")[1].split("```")[0]
    assert "Measured:" in section
    names = {"images": np.zeros((1, 1, 16, 16), np.float32), "classes": [str(digit) for digit in range(10)]}
    with chdir(model):
        exec(code, names)
    assert names["logits"].shape == (1, 10)


def test_a_run_answers_through_its_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).save(tmp_path / "a.png")
    opened = []
    real = type(load_runtime("litert")).compile
    monkeypatch.setattr(type(load_runtime("litert")), "compile",
                        lambda self, path, target: opened.append(Path(path).name) or real(self, path, target))
    assert run_command(predict.run, "predict", "usage", [
        f"run={run}", f"images={tmp_path}", f"out={tmp_path / 'a.csv'}"], target=False) == 0
    assert opened == ["model_int8.tflite"]
    assert (tmp_path / "a.csv").read_text().count("\n") == 2


def test_a_damaged_file_is_not_verified_again(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = model_of(copy) / "model_int8.tflite"
    path.write_bytes(path.read_bytes()[:-64] + bytes(64))
    assert run_command(verify.run, "verify", "usage", [f"run={copy}"], target=False) == 1
    assert "model_int8.tflite is not the file that was made" in capsys.readouterr().err


@pytest.mark.soak
def test_a_baseline_that_cannot_be_deployed_is_named_before_anything_is_done(tmp_path, capsys):
    out = tmp_path / "run"
    assert run_command(main, "search", "usage", ["+target=edge_int8", "dataset=digits", "dataset.image_size=32",
                                                 "baselines=[mobilevitv2_050]", f"out={out}"]) == 2
    said = capsys.readouterr().err
    assert "mobilevitv2_050 cannot be deployed on edge_int8: LiteRT has no operator" in said
    assert not out.exists()


def test_answers_unlike_onnx_runtime_s_are_no_deployment(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        execution = Execution("int8", {}, None, 0.0)

        def logits(self, images: np.ndarray) -> np.ndarray:
            return np.eye(10, dtype=np.float32)[np.arange(len(images)) % 10]

    monkeypatch.setattr(type(load_runtime("litert")), "compile", lambda self, path, target: Other())
    images = np.random.default_rng(0).standard_normal((64, 1, 16, 16), np.float32)
    with pytest.raises(make.CandidateError, match=r"answers as ONNX Runtime does to .* of 64 images only; 98\.0%"):
        make._agreement(model_of(run) / "model_int8.onnx", model_of(run) / "model_int8.tflite",
                        Target("t", "litert", "int8"), images, Classification())


@pytest.mark.usefixtures("few_images")
@pytest.mark.soak  # short forms: those above, and latency/test_device.py for what runs there
def test_a_front_is_searched_here_and_verified_there(sshd, tiny_table, tmp_path, capsys):
    (tmp_path / "board").mkdir()
    python = Board(tmp_path / "board").bare(*NEEDED, "ai_edge_litert", "flatbuffers").python
    tiny_table("edge_int8", 16, host_name="loopback-2c")
    out = tmp_path / "run"
    given = ["+target=edge_int8", "dataset=digits", "dataset.image_size=16", "n_trials=1", "workers=1",
             "proxy.epochs=1", "proxy.min_steps=2", "proxy.train_images=256", "finalists.k=1", "controls=0",
             "finalists.recipe.max_steps=8", "baselines=[]", "verification.seconds=5", "space=mnasnet_small",
             f"device={sshd.name}", f"device_python={python}", "device_name=loopback-2c", f"out={out}"]
    assert run_command(main, "search", "", given) == 0, capsys.readouterr().err
    row, = rows_of(out / "front.csv")
    assert (row["verified"], row["host"], row["precision"]) == ("true", "loopback-2c", "int8")
    environment = json.loads((out / "environment.json").read_text())
    assert environment["runtime"].startswith("litert ")
    assert environment["verified_from"] == Host.detect().name
    sent = {path.suffix for path in (sshd.folder / ".cache/hwnas-agent/files").iterdir()}
    assert ".tflite" in sent
    assert ".onnx" not in sent
