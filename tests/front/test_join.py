"""Networks of a training or compression join a front: measured with the others, marked, kept, and whole at any kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from deployment_fixtures import (
    finish,
    measured,
    tiny_architecture,
    tiny_dataset,
    tiny_finalist,
    tiny_making,
    tiny_network,
)
from workshop_fixtures import contents

from hwnas import verify
from hwnas.cli.command import as_typed, compose
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, DataError, StudyError, UserError
from hwnas.front import join, verification
from hwnas.front.make import make
from hwnas.front.picture import front_figure
from hwnas.front.report import read_report, report_html
from hwnas.front.rows import FrontRow, load_front
from hwnas.front.score import Timing
from hwnas.front.verification import Facts
from hwnas.latency import timing
from hwnas.networks.origin import COMPRESSION, SUMMARY
from hwnas.system.run_folder import Manifest, ModelFolder, RunFolder, WorkFolder
from hwnas.target import Host

ID = tiny_network().id
TRAINED = {**SUMMARY.header, "epochs": 30, "seconds_training": 244.0,
           "identity": {"dataset.fingerprint": "sides-1", "teacher.model": None}}
COMPRESSED = {**COMPRESSION.header, "target": "ort_int8", "what": "mse", "trained": "trained for 30 epochs in 244 s",
              "trained_on": "sides-1", "identity": {"dataset.fingerprint": "sides-1"}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verified run, and folders as of hwnas.train and hwnas.compress."""
    here = tmp_path_factory.mktemp("made")
    run = RunFolder.create(here / "run")
    run.write_config({"seed": 0, "dataset": {"name": "sides", "root": None}})
    run.write_trials([])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "measure", lambda calls, *args, **options: {name: measured(0.2) for name in calls})
        patch.setattr(verification, "write_report", lambda *args: None)
        finish(run, [tiny_finalist()], tiny_making(), Facts(Host.detect().name, "tiny", Timing(tiny_architecture())))
    long, small = (ModelFolder(WorkFolder(here / name, kind).take_up().path)
                   for name, kind in (("long", "train"), ("small", "compress")))
    make(tiny_network(), small, tiny_making(seed=1))
    for path in (small.architecture, small.weights, small.onnx):
        shutil.copy(path, long.path)
    listed(long)
    for folder, summary in ((long, TRAINED), (small, COMPRESSED)):
        (folder.path / "summary.json").write_text(json.dumps(summary))
    return here


def listed(folder: ModelFolder) -> None:
    """Write the manifest of what hwnas.train leaves."""
    Manifest.write(folder.path, [folder.architecture, folder.weights, folder.onnx], "recipe")


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, where nothing is measured or drawn and no child process is started."""
    monkeypatch.setattr(verification, "write_report", lambda *args: None)
    monkeypatch.setattr(timing, "measure", lambda calls, *args, **options: {
        name: measured(0.1 if "-" in name else 0.2) for name in calls})
    monkeypatch.setattr("hwnas.verify.load_dataset", lambda *args: tiny_dataset())
    for module in (join, verification):
        monkeypatch.setattr(module, "probe_model", lambda *args, **options: None)
    return shutil.copytree(made, tmp_path / "here")


def add(here: Path, *names: str, **options: Any) -> dict[str, FrontRow]:
    folder = here / "run"
    verify.run({"run": folder, "add": [str(here / name) for name in names], "host": None, "target": None,
                "dataset": {}, "verification": {}, **options}, Console(quiet=True))
    return {row.id: row for row in load_front(RunFolder.open(folder))}


def test_a_network_joins_with_its_origin_in_front_report_picture_and_card(here: Path) -> None:
    rows = add(here, "long", "small")
    run = RunFolder.open(here / "run")
    assert set(rows) == {ID, f"{ID}-train", f"{ID}-compress"}
    assert all(row.verified and row.top1_test is not None and row.n_test == 40 for row in rows.values())
    joined = rows[f"{ID}-train"]
    assert (joined.origin, joined.latency_ms) == ("trained for 30 epochs in 244 s", pytest.approx(0.1, rel=0.01))
    assert (joined.is_finalist, joined.is_contender, joined.on_front) == (False, True, True)
    assert rows[f"{ID}-compress"].origin == "trained for 30 epochs in 244 s; int8 by compress (mse)"
    assert rows[ID].origin == ""
    data = read_report(run)
    assert "<td class=\"id\">" + joined.id in report_html(data)
    assert ">trained for 30 epochs in 244 s<" in report_html(data)
    legend = front_figure(data.rows, data.trials, data.info).axes[0].get_legend()
    assert "joined: trained for 30 epochs in 244 s" in [text.get_text() for text in legend.get_texts()]
    assert "It joined the front after the search: trained for 30 epochs" in run.model(joined.id).card.read_text()
    assert not Manifest.find(run.model(joined.id).path).faults(run.model(joined.id).int8, run.model(joined.id).weights)
    answers = run.read_predictions()
    assert (answers[joined.id] == answers["labels"]).mean() == joined.top1_test


def test_a_joined_network_is_quantised_for_this_cpu_and_its_manifest_says_how(
        here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hwnas.verify.needs_narrow_weights", lambda *given: True)
    add(here, "long")
    told = json.loads(RunFolder.open(here / "run").model(f"{ID}-train").manifest.read_text())["quantisation"]
    assert told["weight_bits"] == 7


def test_it_survives_later_verifications_and_is_not_copied_twice(here: Path, capsys) -> None:
    first = add(here, "long")
    shutil.copytree(here / "long", here / "again")
    shutil.rmtree(here / "long")
    assert set(add(here)) == set(first)
    assert set(add(here, "again")) == set(first)
    assert f"again has joined as {ID}-train already" in capsys.readouterr().err
    other = ModelFolder(here / "again")
    model = onnx.load(str(other.onnx))
    model.doc_string = "of another training"
    onnx.save(model, str(other.onnx))
    listed(other)
    assert set(add(here, "again")) == {*first, f"{ID}-train-2"}


def test_a_row_whose_folder_was_removed_leaves_with_a_line(here: Path, capsys) -> None:
    add(here, "long")
    shutil.rmtree(here / "run" / "models" / f"{ID}-train")
    assert set(add(here)) == {ID}
    assert f"{ID}-train is no longer in" in capsys.readouterr().err


def edited(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(here: Path) -> None:
        path = here / name / "summary.json"
        summary = json.loads(path.read_text())
        change(summary)
        path.write_text(json.dumps(summary))

    return edit


@pytest.mark.parametrize(("name", "spoil", "said"), [
    ("long", lambda here: (here / "long" / "summary.json").unlink(), "hwnas.train or hwnas.compress that has ended"),
    ("run", lambda here: None, "is not the folder of a python -m hwnas.train"),
    ("nowhere", lambda here: None, "is not the folder of a python -m hwnas.train"),
    ("long", lambda here: (here / "long" / "model.onnx").write_bytes(b"x"), "model.onnx is not the file that was made"),
    ("long", lambda here: (here / "long" / "architecture.yaml").unlink(), "does not say which network it holds"),
    ("small", lambda here: (here / "small" / "model_int8.onnx").unlink(), "model_int8.onnx is missing"),
    ("long", edited("long", lambda summary: summary["identity"].update({"dataset.fingerprint": "sides-2"})),
     "knows the data set sides-2, the front is of sides-1"),
    ("small", edited("small", lambda summary: summary.update(trained_on="sides-2")), "knows the data set sides-2"),
    ("small", edited("small", lambda summary: summary.update(target="xeon_int8")),
     "compressed for xeon_int8, the front is of ort_int8"),
    ("long", edited("long", lambda summary: summary.pop("identity")), "summary.json: not whole"),
    ("long", lambda here: (here / "long" / "architecture.yaml").write_text(replace(
        tiny_architecture(), image_size=8).to_yaml()), "architecture.yaml is not the file that was made"),
])
def test_what_does_not_fit_is_refused_and_nothing_changes(here: Path, name: str, spoil: Callable[[Path], object],
                                                          said: str) -> None:
    spoil(here)
    before = contents(here)
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        add(here, *{"small", name} if name != "small" else ["long", name])
    assert contents(here) == before


def test_a_network_of_another_size_is_refused(here: Path) -> None:
    folder = ModelFolder(here / "long")
    folder.architecture.write_text(tiny_architecture(size=32).to_yaml())
    listed(folder)
    with pytest.raises(DataError, match="image_size=32"):
        add(here, "long")


@pytest.mark.parametrize("place", ["front.join.quantize_static", "front.join.fp32_top1", "front.join.os.replace",
                                   "verify.verify_front", "front.verification.save_front"])
def test_a_kill_leaves_the_front_whole_and_the_same_call_goes_on(here: Path, place: str,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.open(here / "run")
    before = run.front_csv.read_text()

    def killed(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"hwnas.{place}", killed)
        with pytest.raises(KeyboardInterrupt):
            add(here, "long")
    assert run.front_csv.read_text() == before
    assert set(add(here, "long")) == {ID, f"{ID}-train"}
    assert not list((run.path / "models").glob(".*"))


def test_another_target_is_refused_with_the_way_there(here: Path) -> None:
    assert set(add(here, target={"name": "ort_int8"})) == {ID}
    with pytest.raises(ConfigError, match=r"\+target=xeon_int8 search\.reuse=.*run out=OTHER"):
        add(here, target={"name": "xeon_int8"})
    assert compose("verify", ["+target=xeon_int8"], target=False).target.name == "xeon_int8"


def test_folders_are_written_as_they_are(tmp_path: Path) -> None:
    for typed, wanted in (("add=runs/my (small)", ["runs/my (small)"]), ("add=a,b c", ["a", "b c"]),
                          ("add=[a,b]", ["a", "b"]), ("add=null", None)):
        assert compose("verify", as_typed([typed]), target=False).add == wanted


def test_an_origin_that_cannot_be_read_is_an_error(here: Path) -> None:
    add(here, "long")
    (here / "run" / "models" / f"{ID}-train" / "origin.json").write_text("{")
    with pytest.raises(StudyError, match=r"origin\.json: torn"):
        add(here)
