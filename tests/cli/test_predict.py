"""`python -m hwnas.predict`: the class of every image, prepared as in training, and what it refuses."""

from __future__ import annotations

import csv
import io
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from deployment_fixtures import tiny_architecture, tiny_making
from PIL import Image

from hwnas.__main__ import main
from hwnas.data.dataset import Preparation
from hwnas.data.loading import load_dataset
from hwnas.front.make import make
from hwnas.front.score import fp32_top1
from hwnas.networks.network import FoundNetwork
from hwnas.system.run_folder import Manifest, ModelFolder
from hwnas.target import Target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A folder with photographs of three classes and a network trained on them, and its top-1 on test images."""
    here, rng = tmp_path_factory.mktemp("predict"), np.random.default_rng(0)
    for part, n in (("train", 20), ("test", 12)):
        for label, name in enumerate(("ash", "beech", "yew")):
            (here / "data" / part / name).mkdir(parents=True)
            for number in range(n):
                pixels = rng.integers(0, 90, (*rng.integers(40, 90, 2), 3))
                pixels[:, :, label] += 100
                Image.fromarray(pixels.astype(np.uint8)).save(here / "data" / part / name / f"{number:02}.png")
    data = load_dataset({"name": "imagefolder", "root": str(here / "data")}, 16, 0)
    network = FoundNetwork(replace(tiny_architecture(), channels=3, classes=3))
    folder = ModelFolder(here / "model")
    make(network, folder, tiny_making(Target("ort_fp32", "onnxruntime", "fp32"), dataset=data))
    return here, fp32_top1(folder.onnx, data)


@pytest.fixture
def here(made: tuple[Path, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, in which the file is not opened in a child process first."""
    monkeypatch.setattr("hwnas.runtimes.classifier.probe_model", lambda *args, **options: None)
    return shutil.copytree(made[0], tmp_path / "here")


def predict(here: Path, *more: str) -> int:
    return main(["predict", "-q", f"model={here / 'model'}", f"images={here / 'data' / 'test'}", *more])


def test_every_image_has_its_class_and_confidence(here: Path, made: tuple[Path, float]) -> None:
    assert predict(here, f"out={here / 'out.csv'}") == 0
    rows = list(csv.DictReader((here / "out.csv").read_text().splitlines()))
    assert [row["file"] for row in rows] == sorted(str(path) for path in (here / "data" / "test").rglob("*.png"))
    right = [row["class"] == Path(row["file"]).parent.name for row in rows]
    assert np.mean(right) == pytest.approx(made[1])
    assert made[1] > 0.6
    assert all(1 / 3 <= float(row["confidence"]) <= 1 for row in rows)


def test_an_image_that_cannot_be_decoded_has_an_empty_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "data" / "test" / "ash" / "00.png").write_bytes(b"none")
    assert predict(here) == 3
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "file,class,confidence"
    assert said.out.splitlines()[1].endswith("00.png,,")
    assert "1 of 36 images cannot be decoded" in said.err.splitlines()[-1]


def test_what_is_no_file_is_left_out_and_names_run_nothing(here: Path, capsys: pytest.CaptureFixture[str],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
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
    (here / "data" / "test" / "ash" / "00.png").rename(here / "data" / "test" / "ash" / "é.png")
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert predict(here) == 0
    assert rb"ash/\xe9.png," in shown.getvalue()


@pytest.mark.parametrize(("fault", "said"), [
    ("other", "model.onnx is not the file that was made"), ("foreign", "does not say how its images are prepared"),
    ("none", "has no images"), ("out", "is there already"), ("gone", "has no model.onnx")])
def test_what_cannot_be_used_is_one_line(here: Path, fault: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
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
