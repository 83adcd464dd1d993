"""hwnas zoo with images and weights: deployed files are scored, by ImageNet's classes."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from boxes_fixtures import write_coco
from PIL import Image
from run_fixtures import on_any_machine
from safetensors.torch import load_file, save_file

from hwnas.__main__ import main
from hwnas.cli.progress import Console
from hwnas.errors import DataError, TableError
from hwnas.networks.weights import PretrainedOptions
from hwnas.target import Target
from hwnas.zoo.published import PublishedNetwork
from hwnas.zoo.record import ZooRecord
from hwnas.zoo.result import ZooRow, mark_front
from hwnas.zoo.scoring import Scoring, by_promise, imagenet_classes

WHOLE, HEADLESS = "test_efficientnet", "test_vit"
COCK, GOLDFISH = "n01514668", "n01443537"  # 7 and 1 of ImageNet


def write_images(folder: Path) -> None:
    """Nine images of a class, and three of another."""
    rng = np.random.default_rng(0)
    for name, n in ((COCK, 9), (GOLDFISH, 3)):
        for part in ("train", "val"):
            (folder / part / name).mkdir(parents=True)
            for at in range(n):
                Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).save(folder / part / name / f"{at}.png")


def write_weights(folder: Path) -> None:
    """Of a network that answers 7, a cock, to everything, and of one without its classifier."""
    folder.mkdir()
    torch.manual_seed(0)
    model = timm.create_model(WHOLE)
    with torch.no_grad():
        model.classifier.bias[7] += 1000.0
    save_file(model.state_dict(), folder / f"{WHOLE}.safetensors")
    save_file(timm.create_model(HEADLESS, num_classes=0).state_dict(), folder / f"{HEADLESS}.safetensors")


def test_deployed_files_are_scored_by_the_classes_of_imagenet(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                              ) -> None:
    write_images(tmp_path / "images")
    write_weights(tmp_path / "weights")
    with on_any_machine(tmp_path) as patch:
        patch.setenv("HWNAS_HOME", str(tmp_path / "home"))
        patch.chdir(tmp_path)
        given = ["zoo", "target=ort_int8", f"names=[{WHOLE},{HEADLESS}]", "dataset=imagefolder", "minutes=10",
                 f"dataset.root={tmp_path / 'images'}", f"pretrained.folder={tmp_path / 'weights'}"]
        assert main(given) == 0
    said = capsys.readouterr()
    assert f"{WHOLE} at" in said.out
    assert "75.0 %" in said.out  # nine of twelve
    assert "published by timm" not in said.out
    rows = {row["name"].partition(".")[0]: row
            for row in csv.DictReader((tmp_path / "runs" / "ort_int8-zoo" / "zoo.csv").read_text().splitlines())}
    assert (float(rows[WHOLE]["top1"]), int(rows[WHOLE]["images"])) == (75.0, 12)
    assert float(rows[WHOLE]["top1_low"]) < 75 < float(rows[WHOLE]["top1_high"])
    assert rows[WHOLE]["weights"] == str(tmp_path / "weights" / f"{WHOLE}.safetensors")
    assert (rows[WHOLE]["on_front"], rows[HEADLESS]["on_front"]) == ("true", "false")
    assert "no classifier of 1000 classes" in rows[HEADLESS]["reason"]
    assert rows[HEADLESS]["latency_ms"]


def test_a_score_is_kept_for_the_same_weights_and_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "images")
    write_weights(tmp_path / "weights")
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    target = Target("ort_int8", "onnxruntime", "int8")
    rows = [ZooRow(PublishedNetwork(f"{WHOLE}.tag", 64, 70.0, 5.0, 1.0, 3.0), target, (1.0, 0.9, 1.1))]
    made = list[Path]()

    def top1(root: Path = tmp_path / "images", seconds: float = 600.0) -> float | None:
        scoring = Scoring({"name": "imagefolder", "root": str(root)}, PretrainedOptions(folder=tmp_path / "weights"), 0,
                          tmp_path, Console(quiet=True), [ZooRecord.open(target)])
        deploy = scoring._deploy
        monkeypatch.setattr(scoring, "_deploy", lambda fp32, *rest: made.append(fp32) or deploy(fp32, *rest))
        (row,) = scoring.score(rows, None, seconds, lambda share, what: None)
        return row.scored[0] if row.scored else None

    assert (top1(), len(made)) == (75.0, 1)
    assert (top1(seconds=0.0), len(made)) == (75.0, 1)  # nothing is made again, and no second is needed
    others = tmp_path / "others"
    write_images(others)
    for path in (others / "val" / COCK).iterdir():
        path.write_bytes((others / "val" / GOLDFISH / "0.png").read_bytes()) if path.stem < "3" else None
    assert top1(others, seconds=0.0) is None
    assert (top1(others), len(made)) == (75.0, 2)
    weights = tmp_path / "weights" / f"{WHOLE}.safetensors"
    state = load_file(weights)
    state["classifier.bias"] += 2000.0 * (torch.arange(1000) == 1)
    save_file(state, weights)
    assert (top1(), len(made)) == (25.0, 3)
    record = ZooRecord.open(target)
    record.path.write_text(record.path.read_text().replace('"right": 3', '"right": 30'))
    with pytest.raises(TableError, match="30 of 12"):
        ZooRecord.open(target)


@pytest.mark.parametrize(("given", "said"), [
    (["pretrained.folder=weights"], "no images to score"),
    (["dataset=imagefolder", "dataset.root=images", "pretrained.folder=images"], "no pretrained weights in"),
    (["dataset=imagefolder", "dataset.root=images", "pretrained.folder=weights", "names=[resnet50]"],
     "none of them is among the"),
    (["dataset=digits", "pretrained.folder=weights"], "3 channels"),
    (["dataset=imagefolder", "dataset.root=others", "pretrained.folder=weights"], "WordNet id"),
    (["dataset=imagefolder", "dataset.root=images", "pretrained.folder=weights", "dataset.image_size=32"],
     "dataset.image_size"),
    (["dataset=coco", "dataset.root=boxes", "pretrained.folder=weights"], "is for detection"),
    (["dataset=imagefolder", "dataset.root=images", "pretrained.folder=twice"], "several files in"),
    (["dataset=imagefolder", "dataset.root=images", f"pretrained.file=weights/{WHOLE}.safetensors"], "names=[NAME]")])
def test_what_cannot_be_scored_is_said_before_anything_is_timed(
        given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    write_images(tmp_path / "images")
    write_images(tmp_path / "others")
    for part in ("train", "val"):
        (tmp_path / "others" / part / COCK).rename(tmp_path / "others" / part / "cock")
    write_weights(tmp_path / "weights")
    write_coco(tmp_path / "boxes", {"train": 4, "val": 2})
    (tmp_path / "twice").mkdir()
    for name in "ab":
        (tmp_path / "twice" / f"{WHOLE}.{name}.safetensors").write_bytes(
            (tmp_path / "weights" / f"{WHOLE}.safetensors").read_bytes())
    assert main(["zoo", "-q", "target=ort_int8", *given]) == 2
    assert said in (told := capsys.readouterr().err)
    assert told.count("\n") == 1


def test_classes_are_told_by_their_names_and_not_by_their_order() -> None:
    assert imagenet_classes([COCK, GOLDFISH], "here").tolist() == [7, 1]
    numbers = sorted(map(str, range(1000)))
    assert imagenet_classes(numbers, "here").tolist() == [int(number) for number in numbers]
    for names in (["n00000001"], ["0", "1"]):
        with pytest.raises(DataError, match=f"'{names[0]}' is none of"):
            imagenet_classes(names, "here")


def test_a_front_of_scored_rows_leaves_out_what_was_not_scored() -> None:
    target = Target("ort_int8", "onnxruntime", "int8")
    rows = [ZooRow(PublishedNetwork(f"{name}.tag", 224, top1, 5.0, 1.0, 3.0), target, (ms, ms, ms))
            for name, top1, ms in (("a", 70.0, 2.0), ("b", 80.0, 3.0), ("c", 60.0, 1.0), ("d", 65.0, 2.5))]
    assert [row.network.name for row in by_promise(rows)] == ["a", "b", "c", "d"]
    larger = replace(rows[0], network=replace(rows[0].network, image_size=288))
    assert by_promise([larger, *rows[1:]])[2] == larger  # those of one size share images
    scored = [ZooRow(row.network, target, row.latency, scored=(top1, 0.0, 100.0, 50)) for row, top1 in zip(
        rows[:3], (60.0, 59.0, 50.0), strict=True)] + [
        ZooRow(rows[3].network, target, rows[3].latency, reason="not scored: the minutes were over")]
    assert [row.network.name for row in mark_front(scored, None) if row.on_front] == ["c", "a"]
