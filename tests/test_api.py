"""A search from Python: what it leaves, read from its folder, an unguarded script with workers, and a notebook."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_fixtures import PATHS, ROOT
from table_fixtures import write_table

import hwnas
from hwnas.api import _compose, _dataset_options, _plain
from hwnas.data.dataset import normalise
from hwnas.data.loading import load_dataset
from hwnas.errors import BudgetError, ConfigError, DataError, StudyError, UnknownName

NOTEBOOK = ROOT / "docs" / "search.ipynb"
# The notebook trains longer, and a baseline.
LESS = {'"max_steps": 10': '"max_steps": 2', '"max_steps": 40': '"max_steps": 10', '["resnet10t"]': '[]'}


@pytest.mark.soak  # its short form: system/test_processes.py
def test_an_unguarded_script_may_have_workers(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("from run_fixtures import search_from_python\n\nsearch_from_python(workers=2)\n"
                                        "print('ended')\n")
    paths = os.pathsep.join([str(ROOT / "tests"), PATHS])
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=900,
                          check=False, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["ended"], "run once, and by the main process alone"


def test_frames_are_the_files(finished: Path) -> None:
    import pandas as pd

    environment = json.loads((finished / "environment.json").read_text())
    assert {ran["precision"] for ran in environment["executed"].values()} == {"int8"}
    run = hwnas.load(finished)
    assert run.to_frame()["verified"].all()
    front, text = run.to_frame(), pd.read_csv(finished / "front.csv")
    assert list(front.columns) == list(text.columns)
    for name in ("id", "top1_test", "latency_ms", "on_front", "is_baseline"):
        assert front[name].tolist() == text[name].tolist()
    trials = run.to_frame("trials")
    assert (trials["outcome"] == "evaluated").sum() == 3
    assert len(run.study.trials) >= 3
    with pytest.raises(ConfigError, match="'front' or 'trials'"):
        run.to_frame("models")  # type: ignore[arg-type]


def test_a_run_and_a_model_show_themselves_in_a_notebook(finished: Path) -> None:
    run = hwnas.load(finished)
    rows = run.to_frame()
    assert repr(run) == f"Run({str(finished)!r}, {rows['verified'].sum()} of {len(rows)} networks verified)"
    page, model = run._repr_html_(), run.best()
    assert page.startswith('<img alt="front"')
    assert all(id in page for id in run.front["id"])
    assert run.front["latency_ms"].is_monotonic_increasing
    assert "Deploy models/" in page
    assert repr(model).startswith(f"Model({model.id!r}, top-1 ")
    assert "\n" not in repr(model)
    assert model.classes == tuple(json.loads((finished / "environment.json").read_text())["dataset"]["class_names"])
    assert run.report == finished / "report.html"
    assert {"HwnasError", "search", "load"} <= {*dir(hwnas)}
    assert "face" not in dir(hwnas)


def test_the_best_is_the_most_accurate_within_the_limit(finished: Path) -> None:
    run = hwnas.load(finished)
    rows = run.to_frame()
    assert run.best().top1_test == rows["top1_test"].max()
    deployed = run.recommended()
    assert deployed.id in rows["id"].tolist()
    assert f"models/{deployed.id}" in json.loads((finished / "comparisons.json").read_text())[0]["sentence"]
    slowest = float(rows["latency_ms"].max())
    assert run.best(latency_ms=slowest).id == run.best().id
    with pytest.raises(BudgetError, match=r"the fastest, \S+, takes"):
        run.best(latency_ms=float(rows["latency_ms"].min()) / 2)


def test_a_model_answers_in_runtime_and_torch_alike(finished: Path) -> None:
    import torch

    model = hwnas.load(finished).best()
    assert model.card.startswith(f"# {model.id}")
    data = load_dataset({"name": "digits"}, 24, 0)
    images = normalise(data.test.images[:64], data.mean, data.std)
    answers = model.session().logits(images)
    with torch.no_grad():
        expected = model.torch()(torch.from_numpy(images)).numpy()
    assert answers.shape == expected.shape == (64, 10)
    assert np.corrcoef(answers.ravel(), expected.ravel())[0, 1] > 0.95  # int8 against fp32


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A finished run that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def test_a_model_whose_files_are_not_those_made_is_refused(copy: Path) -> None:
    model = hwnas.load(copy).best()
    folder = model.folder.model(model.id)
    for path in (folder.weights, folder.int8):
        path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(StudyError, match=r"model_int8\.onnx is not the file that was made"):
        model.session()
    with pytest.raises(StudyError, match=r"weights\.safetensors is not the file that was made"):
        model.torch()
    folder.manifest.unlink()
    with pytest.raises(StudyError, match=r"has no manifest\.json, .* Search again"):
        model.session()


def test_a_folder_that_cannot_be_written_is_read(finished: Path, copy: Path) -> None:
    for path in [*copy.rglob("*"), copy]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    run = hwnas.load(copy)
    assert len(run.to_frame()) == len(hwnas.load(finished).to_frame())
    assert len(run.study.trials) >= 3
    assert run.plot().axes
    for path in [copy, *copy.rglob("*")]:
        path.chmod(0o755)


def test_the_notebook_shows_what_it_printed() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(cell["outputs"] for cell in cells)
    assert any("<img alt=" in "".join(output.get("data", {}).get("text/html", "")) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert "site-packages" not in NOTEBOOK.read_text(), "a path of the machine: clear the warnings of other packages"


@pytest.mark.soak
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    home = tmp_path / "home"
    write_table(home, "ort_int8", 16)
    for name, value in (("HWNAS_HOME", home), ("PYTHONPATH", PATHS), ("JUPYTER_PLATFORM_DIRS", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cell, = (cell for cell in notebook.cells if "hwnas.search(" in cell.source)
    for old, new in LESS.items():
        assert old in cell.source
        cell.source = cell.source.replace(old, new)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("<img alt=" in output.get("data", {}).get("text/html", "") for output in outputs)
    assert outputs[-1]["data"]["text/plain"] == "True"
    out = tmp_path / "runs" / "notebook"
    assert (out / "report.html").is_file()
    assert (hwnas.load(out).to_frame("trials")["outcome"] == "evaluated").sum() == 4


@pytest.mark.parametrize(("values", "options", "message"), [
    (("digits",), {"dataset": "fashion_mnist"}, "dataset is given twice, once as data="),
    (("digits",), {"minutes": 5, "budget": {"minutes": 6}}, r"budget\.minutes is given twice"),
    (("digits",), {"minutes": "five"}, r"budget\.minutes must be"),
    (("digits",), {"minuets": 5}, "Did you mean minutes"), (("digits",), {"quite": True}, "Did you mean quiet"),
    ((), {"date": (1, 2)}, "Did you mean data"),
    (("digits",), {"n_trails": 3}, "Did you mean n_trials"), (("digits",), {"out": 3}, "out must be a path, got 3"),
    (("digits",), {"space": object()}, "space must be text"), ((1, 2), {}, "It takes target, data, minutes")])
def test_a_wrong_argument_is_named(values: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hwnas.search("ort_int8", *values, **options)


def test_a_folder_that_is_called_as_a_data_set_is_asked_for_by_its_path(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"\./digits"):
        hwnas.search("ort_int8", "digits")


def test_a_wrong_target_or_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean target"):
        hwnas.search(traget="ort_int8")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="target must be a name"):
        hwnas.search(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="missing a required argument: 'space'"):
        hwnas.profile("ort_int8")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="folder must be a path, got 3"):
        hwnas.load(3)  # type: ignore[arg-type]
    with pytest.raises(StudyError, match="is not a run folder"):
        hwnas.load(tmp_path)


def test_search_stays_callable_after_its_package_was_imported() -> None:
    import hwnas.search.road

    for call, values in ((hwnas.search, []), (hwnas.benchmark, ["timm:resnet18"])):
        with pytest.raises(UnknownName, match="target"):
            call(*values, "no_such_target")
    with pytest.raises(UnknownName, match="target"):
        hwnas.profile("no_such_target", "mnasnet_small")


def test_importing_loads_and_changes_nothing() -> None:
    code = ("import os, sys, logging; before = dict(os.environ), logging.root.level, list(logging.root.handlers)\n"
            "import hwnas; hwnas.search, hwnas.load, hwnas.api\n"
            "assert before == (dict(os.environ), logging.root.level, list(logging.root.handlers))\n"
            "print(sorted({'torch', 'openvino', 'onnxruntime', 'pandas', 'optuna', 'hydra'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(("value", "plain"), [
    (None, None), (np.int64(3), 3), (np.float64(0.25), 0.25), (True, True), (3, 3), ("true", "true"), ("1e3", "1e3"),
    ("it's, a=b", "it's, a=b"), ((1, "a b"), [1, "a b"]), (Path("/data/x y"), "/data/x y")])
def test_values_are_taken_as_they_are(value: Any, plain: Any) -> None:
    assert repr(_plain(value, "key")) == repr(plain)
    options = {"sampler_options.x": value, "space": "mnasnet_small"}
    assert repr(_compose("search", {"target": "ort_int8"}, options).sampler_options.x) == repr(plain)


def test_data_is_told_by_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    assert _dataset_options("digits") == {"dataset": "digits"}
    assert _dataset_options(tmp_path)["dataset"] == "imagefolder"
    images, labels = np.arange(40 * 64, dtype=np.uint8).reshape(40, 8, 8), np.arange(40) % 4
    assert _dataset_options((images, labels)) == _dataset_options((images.copy(), labels)) != _dataset_options(
        (images + 1, labels))
    (tmp_path / "parts.tar").touch()
    assert _dataset_options(str(tmp_path / "parts.tar"))["dataset"] == "timm:tar"
    with pytest.raises(DataError, match="Did you mean digits"):
        _dataset_options("digit")
