"""A whole search among detectors: from pictures with boxes to files that draw boxes."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from boxes_fixtures import shapes, write_coco
from PIL import Image
from search_fixtures import rows_of

import hwnas
from hwnas import predict
from hwnas.cli.command import run_command
from hwnas.front.rows import load_front, metric_of
from hwnas.search.__main__ import main
from hwnas.system.run_folder import RunFolder

NAME = "mobilenetv1_025"
pytestmark = pytest.mark.usefixtures("any_machine")


def asked(root: Path, out: Path) -> list[str]:
    return ["target=xeon_int8", "task=detection", "dataset=coco", f"dataset.root={root}", "dataset.image_size=64",
            f"around={NAME}", "pretrained.use=false", "image_sizes=[64,48]", "workers=1", "finalists.k=3",
            "finalists.recipe.max_steps=12", "finalists.recipe.min_steps=12", "baselines=[]", "verification.seconds=1",
            f"out={out}"]


@pytest.mark.soak  # short forms: tests/tasks/test_detection.py, tests/data/test_boxes.py
def test_detectors_race_and_are_verified_and_draw_boxes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = write_coco(tmp_path / "shapes", {"train": 60, "val": 24}), tmp_path / "run"
    assert run_command(main, "search", "usage", asked(root, out)) == 0, capsys.readouterr().err
    header = (out / "front.csv").read_text().partition("\n")[0].split(",")
    assert metric_of(header) == "mAP"
    assert not [name for name in header if name.startswith("top1")]
    rows = [row for row in load_front(RunFolder(out)) if row.verified]
    assert rows
    assert all(row.metric == "mAP" and row.top1_test is not None and (row.top1_test_low or 0) <= row.top1_test
               for row in rows)
    page = (out / "report.html").read_text()
    assert "<h2>Answers</h2>" in page
    assert "mAP deployed (%)" in page
    answers = RunFolder(out).read_predictions()
    assert answers["labels"].shape[1:] == (2, 5)
    frame = hwnas.load(out).to_frame()
    assert frame["mAP_test"].dtype.kind == "f"

    model = next(row.id for row in rows if not row.is_baseline)
    card = (out / "models" / model / "card.md").read_text()
    first, *others = re.findall(r"```python\n(.*?)```", card, re.S)
    Image.fromarray(shapes(24, 1)[0][0]).save(out / "models" / model / "image.jpg", quality=95)
    onnxruntime = next(block for block in others if "onnxruntime" in block)
    done = subprocess.run([sys.executable, "-I", "-c", first + onnxruntime], cwd=out / "models" / model,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    capsys.readouterr()
    assert run_command(predict.run, "predict", "usage", [
        f"run={out}", f"id={model}", f"images={root / 'val'}", f"draw={tmp_path / 'drawn'}",
        f"out={tmp_path / 'boxes.csv'}"], target=False) == 0
    with open(tmp_path / "boxes.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len({line["file"] for line in lines}) == 24  # those without an object have a row as well
    assert all(0 <= float(line["left"]) < float(line["right"]) <= 1 for line in lines if line["class"])
    assert len([*(tmp_path / "drawn").glob("*.png")]) == 24
    several = hwnas.load(out).best().predict(np.stack([image for image, _ in shapes(3, 1)]))
    assert [type(each) for each in several] == [list] * 3
    again = {row["id"] for row in rows_of(out / "front.csv")}
    assert run_command(main, "search", "usage", asked(root, out)) == 0
    assert {row["id"] for row in rows_of(out / "front.csv")} == again


@pytest.mark.parametrize(("changes", "said"), [
    (["around=null"], "give around=NAME|Give around=NAME"), (["task=classification"], "these are pictures with boxes"),
    (["task=segmentation"], "Known: classification"), (["accuracy=proxy"], "race")])
def test_what_a_detector_cannot_be_asked_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                     changes: list[str], said: str) -> None:
    root = write_coco(tmp_path / "shapes", {"train": 12, "val": 4})
    assert run_command(main, "search", "usage", [*asked(root, tmp_path / "run"), *changes]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(said, last), last


def test_pictures_with_classes_are_no_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(main, "search", "usage", ["target=xeon_int8", "task=detection", "dataset=digits",
                                                 f"out={tmp_path / 'run'}"]) == 2
    assert "these are images with one class each" in capsys.readouterr().err
