"""Every command and every file that it reads: absent, empty, torn, a folder, unreadable, of a later version. It is one
line, exit code 2, and nothing is changed, unless the command can do without the file: then it begins its work."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest
from search_fixtures import acknowledged
from workshop_fixtures import (
    IMAGES,
    QUANTIZE,
    SEARCH,
    TRAIN,
    Work,
    contents,
    make_workshop,
    ordinary_user,
)

from hwnas.__main__ import main
from hwnas.target import Host

TABLE = f"home/latency_tables/{Host.detect().name}/onnxruntime-fp32-t1-b1-8px-c1-k10.json"
TARGET = ["-q", "+target=ort_fp32", "space=tiny.yaml", *IMAGES]
MODEL = "run/models/*"
COMMANDS = {
    "search": SEARCH, "more": [*SEARCH, "n_trials=9"],
    "tried": [*TRAIN[:2], "run=run", "architecture=ID", *TRAIN[3:], "out=other"],
    "worker": ["worker", "-q", "run=run"], "verify": ["verify", "-q", "run=run"],
    "report": ["report", "-q", "run=run"], "train": [*TRAIN, "out=begun"], "trained": [*TRAIN, "out=net"],
    "quantize": QUANTIZE,
    "profile": ["profile", *TARGET, "calibration.networks=30"],
    "benchmark": ["benchmark", "-q", "+target=ort_fp32", "model=net/model.onnx"],
    "predict": ["predict", "-q", "model=net", "images=photos"],
    "reuse": [*SEARCH, "out=other", "search.reuse=run"],
    "own": [*SEARCH, "out=other", "objective=own", "target=own", "dataset=own"]}
# A command's files. "?": it may be absent. "!": it is made again, or is not looked into.
FILES = {
    "search": ["tiny.yaml", "images.npz", "known.csv", f"?{TABLE}", "?run/study.db", "?run/.hwnas.json",
               "?run/environment.json", "?run/front.csv", "?run/comparisons.json", "?run/pairs.csv"],
    "more": ["?run/environment.json", "?run/front.csv", "?run/comparisons.json"],
    "worker": ["run/config.yaml", "?run/study.db", "?run/.hwnas.json", "tiny.yaml", "known.csv", f"?{TABLE}"],
    "verify": ["run/config.yaml", "run/front.csv", "run/environment.json", "?run/trials.csv", "?run/.hwnas.json",
               f"?{MODEL}/architecture.yaml", f"!{MODEL}/model.onnx", "images.npz"],
    "report": ["!run/config.yaml", "run/front.csv", "?run/environment.json", "?run/trials.csv", "?run/comparisons.json",
               "?run/predictions.npz", "?run/pairs.csv", "?run/.hwnas.json"],
    "train": ["architecture.yaml", "images.npz", "?begun/checkpoint.safetensors", "?begun/.hwnas.json"],
    "trained": ["?net/summary.json"],
    "tried": ["!run/config.yaml", "?run/trials.csv", "?run/.hwnas.json", "?run/environment.json"],
    "quantize": ["!net/model.onnx"],
    "profile": [f"?{TABLE}", f"?{TABLE[:-5]}.partial.json", "tiny.yaml"],
    "benchmark": ["!net/model.onnx"],
    "predict": ["net/model.onnx", "?net/manifest.json"],
    "reuse": ["run/study.db"],
    "own": ["home/conf/objective/own.yaml", "!home/conf/target/own.yaml", "!home/conf/dataset/own.yaml"],
}
FAULTS = ["torn", *(pytest.param(fault, marks=pytest.mark.soak) for fault in (
    "folder", "absent", "empty", "unreadable", "later"))]
_VERSION = re.compile(r'("?(?:format|version)"?: "?(?:[a-z-]+/)?)\d+')


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workshop, which no test changes."""
    folder = tmp_path_factory.mktemp("whole")
    make_workshop(folder)
    with closing(sqlite3.connect(folder / "run" / "study.db")) as database:  # all of it in one file
        database.execute("pragma wal_checkpoint(truncate)")
    return folder


@pytest.fixture
def workshop(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, where no command gets beyond reading."""
    here = shutil.copytree(whole, tmp_path / "here")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HWNAS_HOME", "home")

    def work(*values: object, **options: object) -> None:
        raise Work

    for place in ("hwnas.latency.calibration._Calibration.run", "tabular.Tabular.evaluate",
                  "hwnas.search.road.make_rows", "hwnas.search.road.verify_front", "hwnas.verify.verify_front",
                  "hwnas.training.loop.Training.run",
                  "hwnas.runtimes.child.run_child",
                  "hwnas.front.report.write_report"):
        monkeypatch.setattr(place, work)
    monkeypatch.setattr(import_module("hwnas.benchmark.files"), "run_child", work)  # hwnas.benchmark is a function
    return here


def damage(path: Path, fault: str) -> bool:
    """Whether the file can have this fault; it then has it."""
    content = path.read_bytes() if path.is_file() else b""
    if fault == "absent":
        path.unlink()
    elif fault == "empty":
        path.write_bytes(b"")
    elif fault == "torn":
        share = 0.5 if path.suffix == ".yaml" else 0.9
        path.write_bytes(content[: min(int(share * len(content)), len(content) - 2)])
    elif fault == "folder":
        path.unlink()
        path.mkdir()
    elif fault == "unreadable":
        path.chmod(0)
    else:
        text = content.decode(errors="ignore")
        if not _VERSION.search(text[:2000]):
            return False
        path.write_text(_VERSION.sub(r"\g<1>99", text, count=2))
    return True


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("command", "name"), [(command, name) for command, names in FILES.items() for name in names])
def test_a_file_that_cannot_be_used_is_one_line_and_changes_nothing(command, name, fault, workshop, capsys):
    path = min(workshop.glob(name.lstrip("?!")), default=workshop / "nowhere")
    if not damage(path, fault):
        pytest.skip("a file of no version")
    before = contents(workshop)
    network = min((workshop / "run" / "models").iterdir(), key=lambda path: len(path.name)).name
    trials = set() if path.name == "study.db" else acknowledged(workshop / "run")
    try:
        with ordinary_user():
            code = main([text.replace("=ID", f"={network}") for text in COMMANDS[command]])
    except Work:
        code = 0
    lines = capsys.readouterr().err.splitlines()
    if code in (0, 1):
        blank = path.name in ("study.db", "trials.csv") and fault == "empty"  # that of a search that has only begun
        if name[0] != "!" and not blank and (name[0] != "?" or fault != "absent"):
            pytest.fail(f"{fault} {path.name}: it is not noticed", pytrace=False)
        return
    if (code, len(lines)) != (2, 1):
        pytest.fail(f"exit code {code}: {lines}", pytrace=False)
    after = contents(workshop)
    # a folder may be marked, and hold an empty study; a search writes facts about itself into its study
    changed = {key for key in before | after if before.get(key) != after.get(key)
               and not key.startswith("other") and key not in ("run/study.db", "run/spent.json")
               and not (key.endswith("/.hwnas.json") and key not in before)}
    assert not trials or acknowledged(workshop / "run") == trials
    if changed:
        pytest.fail(f"changed: {changed}", pytrace=False)


@pytest.mark.parametrize("command", ["search", "profile", "train"])
def test_a_home_that_cannot_be_written_is_one_line_or_not_needed(command: str, workshop: Path, capsys) -> None:
    for path in (workshop / "home", *(workshop / "home").rglob("*/")):
        path.chmod(0o555)
    (workshop / TABLE).with_suffix(".lock").unlink(missing_ok=True)
    before = contents(workshop / "home")
    try:
        with ordinary_user():
            code = main(COMMANDS[command])
    except Work:
        code = 0
    assert code == 0 or (code, len(capsys.readouterr().err.splitlines())) == (2, 1)
    assert contents(workshop / "home") == before
