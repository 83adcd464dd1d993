"""A pair of a run answers as its two networks were scored, from the command and from Python."""

from __future__ import annotations

import csv
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deployment_fixtures import finish, measured, pictures, tiny_architecture, tiny_making
from front_fixtures import make_pair
from PIL import Image

import hwnas
from hwnas.__main__ import main
from hwnas.data.dataset import Preparation
from hwnas.data.decoding import LazyImage
from hwnas.data.loading import load_dataset
from hwnas.errors import BudgetError, ConfigError, DataError
from hwnas.front.pairs import Pair, save_pairs
from hwnas.front.rows import FrontRow, load_front, save_front
from hwnas.front.score import Timing
from hwnas.front.verification import SearchFacts
from hwnas.networks.network import FoundNetwork
from hwnas.runtimes.classifier import Cascade, Classifier, ModelFile
from hwnas.system.run_folder import RunFolder
from hwnas.target import Host


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and the verified run of two networks for images of 16 and of 24 px, which pretend to be a pair."""
    here = tmp_path_factory.mktemp("pairs")
    data = load_dataset({"name": "imagefolder", "root": str(pictures(here / "data", train=20, test=12))}, 24, 0)
    run = RunFolder.create(here / "run")
    run.write_config("seed: 0\n")
    networks = [FoundNetwork(replace(tiny_architecture(width, size), channels=3, classes=3))
                for width, size in ((8, 16), (16, 24))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hwnas.latency.wave.measure", lambda calls, *args, **options: {
            name: measured(0.1 if name == networks[0].id else 0.3) for name in calls})
        rows = finish(run, [FrontRow.of(network) for network in networks], tiny_making(dataset=data),
                      SearchFacts(Host.detect().name, "tiny", Timing(tiny_architecture(), seconds=1.0)))
    assert all(row.verified for row in rows)
    fast, accurate = networks[0].id, networks[1].id
    with np.load(run.confidences) as held:
        scored = {name: held[name] for name in held.files}
    assert scored.keys() == {"labels", *(f"{id}{kind}" for id in (fast, accurate)
                                         for kind in ("", ".confidence", ".test_confidence"))}
    assert scored["labels"].tolist() == data.validation.labels.tolist()
    confidence = np.sort(scored[f"{fast}.test_confidence"].astype(float))
    threshold = round(float(confidence[17:19].mean()), 4)
    save_pairs(run, [make_pair(fast=fast, accurate=accurate, threshold=threshold, top1_test=1.0,
                               latency_ms_mean=0.25, latency_ms_worst=0.4)])
    return here


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, in which no file is opened in a child process first."""
    monkeypatch.setattr("hwnas.runtimes.classifier.probe_model", lambda *args, **options: None)
    return shutil.copytree(made, tmp_path / "here")


def pair_of(here: Path) -> Pair:
    return hwnas.load(here / "run").pairs[0].facts


def expected(here: Path, pair: Pair) -> list[str]:
    """What the two networks' scored answers to the test images make of the pair."""
    answers = RunFolder(here / "run").read_predictions()
    with np.load(here / "run" / "confidences.npz") as held:
        unsure = held[f"{pair.fast}.test_confidence"].astype(float) < pair.threshold
    assert 0 < unsure.sum() < len(unsure)
    return [f"class{at}" for at in np.where(unsure, answers[pair.accurate], answers[pair.fast])]


def test_a_pair_answers_image_by_image_as_it_was_scored(here: Path) -> None:
    pair = pair_of(here)
    images, which = here / "data" / "test", [f"run={here / 'run'}", f"id={pair.id}"]
    assert main(["predict", "-q", *which, f"images={images}", f"out={here / 'all.csv'}"]) == 0
    rows = list(csv.DictReader((here / "all.csv").read_text().splitlines()))
    named = sorted(rows, key=lambda row: (Path(row["file"]).parent.name, Path(row["file"]).name))
    assert [row["class"] for row in named] == expected(here, pair)
    model = hwnas.load(here / "run").pairs[0]
    paths = sorted(images.rglob("*.jpg"), key=lambda path: (path.parent.name, path.name))
    assert [model.predict(path)[0].label for path in paths] == expected(here, pair)
    (images / "class1" / "broken.jpg").write_bytes(b"none")
    assert main(["predict", "-q", *which, f"images={images}", f"out={here / 'some.csv'}"]) != 0
    rows = list(csv.DictReader((here / "some.csv").read_text().splitlines()))
    assert [Path(row["file"]).name for row in rows if not row["class"]] == ["broken.jpg"]
    assert len(rows) == len(paths) + 1
    with pytest.raises(DataError, match="broken"):
        model.predict(images)


def test_an_unknown_pair_is_one_line(here: Path, capsys: Any) -> None:
    assert main(["predict", "-q", f"run={here / 'run'}", "id=a+b", f"images={here / 'data' / 'test'}"]) == 2
    said = capsys.readouterr().err.strip()
    assert "unknown pair" in said
    assert "\n" not in said


def test_networks_of_different_classes_are_no_pair() -> None:
    file = ModelFile(Path("a.onnx"), Preparation(True, (16,), 3), (0.5,), (0.5,), ("ash", "beech"))
    other = replace(file, path=Path("b.onnx"), classes=("ash", "yew"))
    compiled: Any = None
    with pytest.raises(ConfigError, match=r"a\.onnx and b\.onnx know different classes"):
        Cascade(Classifier(file, compiled), Classifier(other, compiled), 0.5)


def test_images_may_be_as_large_as_pillow_opens() -> None:
    class Bright:
        def logits(self, images: np.ndarray) -> np.ndarray:
            return np.eye(2, dtype=np.float32)[(images.mean((1, 2, 3)) > 0).astype(int)]

    file, compiled = ModelFile(Path("a.onnx"), Preparation(True, (16,), 1), (0.5,), (0.5,), ("ash", "beech")), Bright()
    answer, = Classifier(file, compiled).answers([LazyImage("large", partial(Image.new, "1", (8000, 8000), 1))])
    assert [each.label for each in answer] == ["beech"]


def test_the_best_on_average_may_be_a_pair_and_within_a_limit_its_worst_case_counts(here: Path) -> None:
    run = hwnas.load(here / "run")
    rows = load_front(run.folder)
    save_front(run.folder, [replace(row, top1_test=0.9 if row.id == rows[0].id else 0.95) for row in rows])
    pair = run.pairs[0]
    assert repr(pair).startswith(f"ModelPair('{pair.id}', top-1 100.00%, 0.25 ms")
    assert run.best(mean_latency_ms=0.26) == pair
    assert (pair.latency_ms, pair.top1_test) == (0.25, 1.0)
    for limits, id in (({"mean_latency_ms": 0.2}, pair.fast.id), ({}, pair.accurate.id),
                       ({"latency_ms": 0.35, "mean_latency_ms": 0.26}, pair.fast.id),
                       ({"latency_ms": 0.35, "mean_latency_ms": 1.0}, pair.accurate.id)):
        assert run.best(**limits).id == id
    with pytest.raises(BudgetError, match="was measured within"):
        run.best(mean_latency_ms=0.05)
