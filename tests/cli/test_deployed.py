"""What is deployed of a run: the class of every image, files that take pixels, a model server's layout; and what is
refused."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import onnx
import pytest
import torch
from deployment_fixtures import finish, measured, tiny_architecture, tiny_making
from numpy.typing import NDArray
from PIL import Image
from process_fixtures import wait_until

import hwnas
from hwnas.__main__ import main
from hwnas.data.dataset import Preparation
from hwnas.data.decoding import decode
from hwnas.data.loading import load_dataset
from hwnas.errors import ConfigError, DataError
from hwnas.front.rows import FrontRow
from hwnas.front.score import Timing, fp32_grades
from hwnas.front.verification import SearchFacts
from hwnas.networks.network import FoundNetwork
from hwnas.runtimes.classifier import target_of
from hwnas.runtimes.openvino import compile_options, import_openvino
from hwnas.runtimes.runtime import threads_of
from hwnas.system.libraries import import_onnxruntime
from hwnas.system.run_folder import Manifest, ModelFolder, RunFolder
from hwnas.target import Host

ROOT = Path(__file__).resolve().parents[2]
CLASSES = ("ash", "beech", "yew")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with JPEG files of three classes and all shapes, and the run folder of a network trained on them."""
    here, rng = tmp_path_factory.mktemp("deployed"), np.random.default_rng(0)
    for part, n in (("train", 20), ("test", 40)):
        for label, name in enumerate(CLASSES):
            (here / "data" / part / name).mkdir(parents=True)
            for number in range(n):
                pixels = rng.integers(0, 90, (*rng.integers(14, 31, 2), 3))
                pixels[:, :, label] += 60
                Image.fromarray(pixels.astype(np.uint8)).save(here / "data" / part / name / f"{number:02}.jpg")
    data = load_dataset({"name": "imagefolder", "root": str(here / "data")}, 16, 0)
    run = RunFolder.create(here / "run")
    run.write_config("seed: 0\n")
    network = FoundNetwork(replace(tiny_architecture(), channels=3, classes=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hwnas.latency.wave.measure", lambda calls, *args, **options: {
            name: measured(0.1) for name in calls})
        row, = finish(run, [FrontRow.of(network)], tiny_making(dataset=data),
                      SearchFacts(Host.detect().name, "tiny", Timing(tiny_architecture(), seconds=1.0)))
    assert row.verified, row.reason
    shutil.copytree(run.model(row.id).path, here / "model", ignore=shutil.ignore_patterns("*int8*"))  # without its run
    alone = ModelFolder(here / "model")
    Manifest.write(alone.path, [alone.onnx, alone.weights], "recipe")
    return here


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, in which no file is opened in a child process first."""
    monkeypatch.setattr("hwnas.runtimes.classifier.probe_model", lambda *args, **options: None)
    return shutil.copytree(made, tmp_path / "here")


def files(here: Path) -> list[Path]:
    return sorted((here / "data" / "test").rglob("*.jpg"))


def model_of(here: Path) -> Path:
    path, = (here / "run" / "models").iterdir()
    return path


def predict(here: Path, *more: str) -> int:
    return main(["predict", "-q", f"model={here / 'model'}", f"images={here / 'data' / 'test'}", *more])


def export(here: Path, *options: str) -> int:
    return main(["export", f"model={model_of(here)}", *options])


def in_onnxruntime(path: Path) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    session = import_onnxruntime().InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images})[0]


def in_openvino(path: Path) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    network = import_openvino().Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda images: network(images)[0]


def answers(network: Callable[[NDArray[np.uint8]], NDArray[np.float32]], paths: list[Path]) -> list[str]:
    """As a stranger asks, who resizes as the card says."""
    pictures = [decode(Image.open(path), 16, 3).transpose(1, 2, 0)[None] for path in paths]
    return [CLASSES[int(network(np.rint(picture).astype(np.uint8)).argmax())] for picture in pictures]


def share(one_way: list[str], other: list[str]) -> float:
    return float(np.mean([a == b for a, b in zip(one_way, other, strict=True)]))


def test_a_run_answers_with_its_most_accurate_network(here: Path) -> None:
    row, = hwnas.load(here / "run").models
    run = f"run={here / 'run'}"
    for n, which in enumerate(([run], [run, f"id={row.id}"], [f"model={model_of(here)}"])):
        out = here / f"out{n}.csv"
        assert main(["predict", *which, f"images={here / 'data' / 'test'}", f"out={out}"]) == 0
        rows = list(csv.DictReader(out.read_text().splitlines()))
        right = [line["class"] == Path(line["file"]).parent.name for line in rows]
        assert np.mean(right) == pytest.approx(row.top1_test, abs=1e-6)


def test_a_model_of_a_run_answers_as_the_runs_target_does(here: Path) -> None:
    environment = here / "run" / "environment.json"
    facts = json.loads(environment.read_text())
    facts["target"]["precision"] = "fp32"
    environment.write_text(json.dumps(facts))
    said = {}
    for name, options in {"run": [f"run={here / 'run'}"], "model": [f"model={model_of(here)}"],
                          "int8": [f"model={model_of(here)}", "+target=ort_int8"]}.items():
        out = here / f"{name}.csv"
        assert main(["predict", *options, f"images={here / 'data' / 'test'}", f"out={out}"]) == 0
        said[name] = out.read_text()
    assert said["model"] == said["run"]
    assert said["int8"] != said["run"]


def test_python_takes_paths_and_arrays(here: Path) -> None:
    model, paths = hwnas.load(here / "run").best(), files(here)
    said = model.predict(paths)
    assert share([answer.label for answer in said], [path.parent.name for path in paths]) == pytest.approx(
        model.top1_test, abs=1e-6)
    assert all(1 / 3 <= answer.confidence <= 1 for answer in said)
    assert model.predict([np.asarray(Image.open(path)) for path in paths]) == said
    assert model.predict([]) == []
    pixels = np.asarray(Image.open(paths[0]))
    tensor = torch.tensor(pixels)
    for given in (str(paths[0]), Image.open(paths[0]), pixels, pixels / 255, pixels[None], tensor, tensor[None],
                  tensor.permute(2, 0, 1)):
        assert model.predict(given) == said[:1]  # one image is one image
    assert model.predict(here / "data" / "test") == model.predict(str(here / "data" / "test" / "*" / "*.jpg")) == said
    grey = np.zeros((2, 20, 20), np.uint8)
    assert len(model.predict(grey)) == len(model.predict(np.zeros((2, 20, 20, 3), np.uint8))) == 2
    with pytest.raises(DataError, match=r"no file or folder 'gone\.jpg'"):
        model.predict("gone.jpg")
    for wrong in (pixels / 255 - 1, np.zeros((20, 20, 2), np.uint8), np.zeros((3, 20, 20), np.uint8), 3):
        with pytest.raises(DataError, match="image 0: images"):
            model.predict([wrong])
    paths[3].write_bytes(b"none")
    with pytest.raises(DataError, match=paths[3].name):
        model.predict(paths)


@pytest.mark.parametrize("runtime", [in_onnxruntime, in_openvino])
def test_a_file_that_takes_pixels_answers_as_the_network_does(here: Path, runtime: Callable) -> None:
    """The reference is the network in the same runtime, fed by our own preparation."""
    assert export(here, "format=uint8", f"out={here / 'pixels.onnx'}") == 0
    target = "ort_int8" if runtime is in_onnxruntime else "xeon_int8"
    assert main(["predict", f"model={model_of(here)}", f"images={here / 'data' / 'test'}", f"out={here / 'out.csv'}",
                 f"+target={target}"]) == 0
    rows = {line["file"]: line["class"] for line in csv.DictReader((here / "out.csv").read_text().splitlines())}
    said = answers(runtime(here / "pixels.onnx"), files(here))
    assert share(said, [rows[str(path)] for path in files(here)]) >= 0.99


def test_formats_are_of_one_network_and_boxes_of_detectors(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", f"run={here / 'run'}", "format=uint8", f"out={here / 'copy'}"]) == 2
    assert "model=DIR" in capsys.readouterr().err.splitlines()[-1]
    assert predict(here, f"draw={here / 'drawn'}") == 2
    assert not (here / "drawn").exists()
    with pytest.raises(ConfigError, match="latency_ms"):
        hwnas.load(here / "run").best(latency_ms="0.3")  # type: ignore[call-overload]


def test_an_int8_file_of_any_name_is_answered_in_int8(here: Path) -> None:
    shutil.copy(model_of(here) / "model_int8.onnx", here / "mine.onnx")
    assert target_of(here / "mine.onnx").precision == "int8"
    assert target_of(here / "model" / "model.onnx").precision == "fp32"
    assert main(["predict", "-q", f"model={here / 'mine.onnx'}", f"images={here / 'data' / 'test'}",
                 f"out={here / 'mine.csv'}"]) == 0


def test_a_model_server_finds_its_layout(here: Path) -> None:
    assert export(here, "format=openvino", f"out={here / 'trees'}") == 0
    assert sorted(str(path.relative_to(here / "trees")) for path in (here / "trees").rglob("*") if path.is_file()) == [
        "1/compile_options.json", "1/model.bin", "1/model.xml"]
    target = hwnas.load(here / "run").best()._target
    assert json.loads((here / "trees" / "1" / "compile_options.json").read_text()) == compile_options(
        replace(target, threads=threads_of(target)))
    read = import_openvino().Core().read_model(str(here / "trees" / "1" / "model.xml"))
    assert read.get_rt_info(["model_info", "labels"]).astype(str).split() == list(CLASSES)
    assert str(read.input(0).get_node().get_layout()) == "[N,H,W,C]"
    network = in_openvino(here / "trees" / "1" / "model.xml")
    pictures = [np.asarray(Image.open(path).resize((16, 16))) for path in files(here)]
    said = [CLASSES[row] for row in network(np.stack(pictures)).argmax(1)]
    expected = hwnas.load(here / "run").best().predict(pictures)
    assert share(said, [answer.label for answer in expected]) >= 0.99


def test_a_file_is_quantised_under_an_accuracy_limit(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = here / "int8.onnx"
    words = ["quantize", "-q", "target=ort_int8", f"model={here / 'model' / 'model.onnx'}", "images=48", "seconds=2",
             f"dataset={here / 'data'}", f"out={out}"]
    assert main([*words, "max_drop=100"]) == 0
    said = capsys.readouterr().out
    assert "QuantizeLinear" in {node.op_type for node in onnx.load(str(out)).graph.node}
    for text in ("fp32  top-1", "int8  top-1", "on 120 test images", " ms (90 %: ", "int8 minus fp32: "):
        assert text in said
    lost = -float(said.partition("int8 minus fp32: ")[2].partition(" ")[0])
    answers = onnx_answers(out, here)
    assert np.mean(answers) == pytest.approx(float(said.partition("int8  top-1 ")[2].partition("%")[0]) / 100, abs=1e-4)
    code = main([*words, "max_drop=0", "seconds=1"])  # what hwnas wrote itself is replaced
    assert code in ((0,) if lost <= 0 else (0, 3))
    said = capsys.readouterr().out
    high = -float(re.findall(r"95 %: (\S+) to", said)[-1])
    assert ("too few to rule out a loss" in said) == (code == 0 and high > 0)
    out.write_bytes(b"mine")
    capsys.readouterr()
    assert main([*words, "max_drop=100"]) == 2
    assert out.read_bytes() == b"mine"
    assert main([*words[:2], "target=ort_fp32", *words[3:]]) == 2
    assert "int8 target" in capsys.readouterr().err.splitlines()[-1]


def test_a_file_of_one_image_or_other_answers_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, path = onnx.load(str(here / "model" / "model.onnx")), here / "other.onnx"
    fixed, features = onnx.ModelProto(), onnx.ModelProto()
    for proto in (fixed, features):
        proto.CopyFrom(whole)
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    conv = next(node for node in whole.graph.node if node.op_type == "Conv")
    features.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info(conv.output[0], 1, None))
    quantize = ["quantize", "-q", "target=ort_int8", f"model={path}", f"dataset={here / 'data'}", "max_drop=1",
                f"out={here / 'new.onnx'}"]
    predict = ["predict", f"model={path}", f"images={here / 'data' / 'test'}"]
    for proto, words, why in ((fixed, quantize, "the batch axis is fixed to 1, and int8 files are made by many"),
                              (fixed, predict, "is fixed to 1; batch=|its input is not .n, 3, 16, 16"),
                              (features, quantize, r"an image with \[\d+, \d+, \d+\] numbers; .* has 3 classes")):
        onnx.save(proto, str(path))
        assert main(words) == 2
        assert re.search(why, capsys.readouterr().err.splitlines()[-1])


def onnx_answers(path: Path, here: Path) -> list[bool]:
    """Whether ONNX Runtime answers each test image rightly."""
    data = load_dataset({"name": "imagefolder", "root": str(here / "data")}, 16, 0)
    logits = in_onnxruntime(path)(data.normalise(data.test.images))
    return [bool(right) for right in logits.argmax(1) == data.test.labels]


@pytest.fixture
def served(here: Path) -> Iterator[str]:
    """Address of the network behind `serving/serve.py`, which runs in the interpreter that HWNAS_KSERVE names."""
    if not (python := os.environ.get("HWNAS_KSERVE")):
        pytest.skip("HWNAS_KSERVE names no python with kserve and openvino, as serving/Dockerfile installs them")
    assert export(here, "format=openvino", f"out={here / 'models' / 'trees'}") == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [python, ROOT / "serving" / "serve.py", here / "models", "--http_port", port]
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=alone) as server:
        address = f"http://127.0.0.1:{port}/v2/models/trees"

        def ready() -> bool:
            with contextlib.suppress(OSError), urlopen(f"{address}/ready") as answer:
                return json.load(answer)["ready"] is True
            return server.poll() is not None

        try:
            wait_until(ready)
            yield address
        finally:
            server.terminate()


@pytest.mark.soak
def test_a_server_of_kserves_protocol_answers_pictures_as_the_front_says(here: Path, served: str) -> None:
    with urlopen(served) as answer:
        told = json.load(answer)
    assert told["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 16, 16, 3]}]
    assert told["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 3]}]

    def network(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        tensor = {"name": "images", "datatype": "UINT8", "shape": pixels.shape, "data": pixels.ravel().tolist()}
        asked = Request(f"{served}/infer", json.dumps({"inputs": [tensor]}).encode(),
                        {"Content-Type": "application/json"})
        with urlopen(asked) as answer:
            output, = json.load(answer)["outputs"]
        return np.array(output["data"], np.float32).reshape(output["shape"])

    row, = hwnas.load(here / "run").models
    said = answers(network, files(here))
    held = np.load(here / "run" / "predictions.npz")
    assert share(said, [CLASSES[label] for label in held[row.id]]) >= 0.99
    assert share(said, [path.parent.name for path in files(here)]) == pytest.approx(row.top1_test, abs=0.01)
    assert network(np.zeros((3, 16, 16, 3), np.uint8)).shape == (3, len(CLASSES))
    with pytest.raises(HTTPError):
        network(np.zeros((1, 16, 16, 4), np.uint8))


@pytest.mark.parametrize(("options", "said"), [
    (["format=uint8"], "what, and where to"), (["out={}/x"], "which format of"),
    (["format=tflite", "out={}/x"], "unknown format"), (["format=uint8", "out={}/x"], "must end in .onnx"),
    (["format=timm", "out={}/x"], "unknown format"),
    (["format=uint8", "out={}/there.onnx"], "is there already"), (["format=uint8", "run={}/run", "out={}/x"], "what,"),
    (["format=openvino", "model={}/gone", "out={}/x"], "gone"),
    (["format=uint8", "model={}/changed", "out={}/x.onnx"], "is not the file that was made"),
    (["format=uint8", "model={}/twice.onnx", "out={}/x.onnx"], "takes uint8")])
def test_what_cannot_be_written_is_one_line(here: Path, options: list[str], said: str, capsys) -> None:
    (here / "there.onnx").write_text("mine")
    if "changed" in str(options):
        (shutil.copytree(model_of(here), here / "changed") / "model_int8.onnx").write_bytes(b"none")
    elif "twice" in str(options):
        assert export(here, "format=uint8", f"out={here / 'twice.onnx'}") == 0
    before = sorted(path.name for path in here.iterdir())
    capsys.readouterr()
    assert export(here, *(option.format(here) for option in options)) == 2
    line, = capsys.readouterr().err.splitlines()
    assert said in line
    assert sorted(path.name for path in here.iterdir()) == before


def test_a_network_that_the_run_does_not_have_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (f"run={here / 'run'} id=other", "id=other model=x"):
        assert main(["predict", f"images={here}", *more.split()]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "unknown id" in first
    assert "of which run" in second


def test_every_image_has_its_class_and_confidence(here: Path) -> None:
    assert predict(here, f"out={here / 'out.csv'}") == 0
    rows = list(csv.DictReader((here / "out.csv").read_text().splitlines()))
    assert [row["file"] for row in rows] == [str(path) for path in files(here)]
    right = [row["class"] == Path(row["file"]).parent.name for row in rows]
    data = load_dataset({"name": "imagefolder", "root": str(here / "data")}, 16, 0)
    assert np.mean(right) == pytest.approx(fp32_grades(here / "model" / "model.onnx", data).score)
    assert np.mean(right) > 0.6
    assert all(1 / 3 <= float(row["confidence"]) <= 1 for row in rows)


def test_an_image_that_cannot_be_decoded_has_an_empty_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "data" / "test" / "ash" / "00.jpg").write_bytes(b"none")
    assert predict(here) == 3
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "file,class,confidence"
    assert said.out.splitlines()[1].endswith("00.jpg,,")
    assert "1 of 120 images cannot be decoded" in said.err.splitlines()[-1]


def test_what_is_no_file_is_left_out_and_names_run_nothing(here: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe would be waited for, and a link to nothing ended all; a spreadsheet and a terminal obey names."""
    folder = here / "data" / "test"
    os.mkfifo(folder / "pipe.png")
    (folder / "link.png").symlink_to("nothing")
    Image.new("RGB", (20, 20)).save(here / "=1+1.png")
    for name in ("=1+1.png", "red\x1b[31m.png"):
        shutil.copy(here / "=1+1.png", folder / name)
    monkeypatch.chdir(folder)
    assert predict(here, "images=.") == 0
    said = capsys.readouterr()
    assert "left out: 1 (link to nothing), 1 (no regular file)" in said.err
    assert "\x1b" not in said.out
    assert [row["file"] for row in csv.DictReader(said.out.splitlines())][:1] == ["./=1+1.png"]
    assert any(row["file"] == "./red\\x1b[31m.png" for row in csv.DictReader(said.out.splitlines()))


def test_a_terminal_that_lacks_a_letter_gets_its_number(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "data" / "test" / "ash" / "00.jpg").rename(here / "data" / "test" / "ash" / "é.jpg")
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert predict(here) == 0
    assert rb"ash/\xe9.jpg," in shown.getvalue()


@pytest.mark.parametrize(("fault", "said"), [
    ("other", "model.onnx is not the file that was made"), ("foreign", "does not say how its images are prepared"),
    ("none", "has no images"), ("out", "is there already"), ("gone", "model.onnx is missing")])
def test_what_cannot_be_predicted_with_is_one_line(here: Path, fault: str, said: str, capsys) -> None:
    folder, more = ModelFolder(here / "model"), []
    if fault == "gone":
        folder.onnx.unlink()
    elif fault == "none":
        shutil.rmtree(here / "data" / "test" / "ash")
        more = [f"images={here / 'model'}"]
    elif fault == "out":
        (here / "out.csv").write_text("mine")
        more = [f"out={here / 'out.csv'}"]
    else:
        model = onnx.load(str(folder.onnx))
        del model.metadata_props[:]
        onnx.save(model, str(folder.onnx))
        if fault == "foreign":
            Manifest.write(folder.path, [folder.onnx], "recipe")
    assert predict(here, *more) == 2
    line, = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("preparation", [
    Preparation(True, (64,), 3), Preparation(True, (64, 32), 1), Preparation(False, (8, 10, 16), 1)])
def test_the_words_of_a_preparation_read_back(preparation: Preparation) -> None:
    assert Preparation.of_facts(preparation.facts()) == preparation
    for words in ("shorter side to 64", "64", "64 given, then", "999999 given", "0 given"):
        with pytest.raises(ValueError, match=r"not known|px"):
            Preparation.of_facts({**preparation.facts(), "resize": words})
