"""Whole commands on small real inputs: search, resume, kill, join, another machine, verify."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import run_fixtures
from front_fixtures import without_programs
from search_fixtures import acknowledged, asked, rows_of, wait_for_trials, wait_until, workers_of

from hwnas.cli.command import compose, run_command
from hwnas.cli.progress import Console
from hwnas.errors import StudyError
from hwnas.search.__main__ import main
from hwnas.search.road import search as road
from hwnas.space.search_space import SearchSpace
from hwnas.verify import run as verify

SMALL = ["+target=xeon_int8", "workers=1", *run_fixtures.SMALL]
KNOWN = {network.id: name for name, network in SearchSpace.load("mnasnet_small", channels=1, classes=10, image_size=24
                                                                ).known.items()}
TWO_WORKERS = "workers=2"  # with processes for the finalists, too
pytestmark = pytest.mark.usefixtures("any_machine", "few_images")


def search(out: Path, *overrides: str) -> int:
    return run_command(main, "search", "usage", [*SMALL, f"out={out}", *overrides])


def start(out: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "hwnas.search", *SMALL, f"out={out}", *overrides],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL)


@pytest.fixture
def run(finished: Path) -> Path:
    return finished


@pytest.mark.soak
def test_a_search_measures_a_host_of_which_there_is_no_table(hwnas_home, tmp_path):
    assert search(tmp_path / "run", "baselines=[]", "controls=0", "finalists.k=1") == 0
    assert list((tmp_path / "home").rglob("openvino-int8-*.json"))
    assert [row["verified"] for row in rows_of(tmp_path / "run" / "front.csv")] == ["true"]


def test_the_run_folder_holds_a_verified_front(run):
    rows = rows_of(run / "front.csv")
    finalists = [row for row in rows if row["is_baseline"] == row["is_control"] == "false"]
    assert len(finalists) == 2
    control, = (row for row in rows if row["control_of"])
    assert control["control_of"] in {row["id"] for row in finalists}
    known = {row["name"] for row in rows if row["is_control"] == "true" and not row["control_of"]}
    assert known | {KNOWN[row["id"]] for row in finalists if row["id"] in KNOWN} == set(KNOWN.values())
    assert len(rows) == 5 + len(known)  # the baseline stands there with both stems
    assert any(row["on_front"] == "true" for row in finalists)
    for row in rows:
        assert row["verified"] == "true", row["reason"]
        assert 0 <= float(row["top1_test_low"]) <= float(row["top1_test"]) <= float(row["top1_test_high"]) <= 1
        assert 0 < float(row["latency_ms_low"]) <= float(row["latency_ms"]) <= float(row["latency_ms_high"])
        assert float(row["int8_share"]) > 0.5
        files = {path.name for path in (run / "models" / row["id"]).iterdir()}
        assert {"weights.safetensors", "model.onnx", "model_int8.onnx", "card.md"} <= files
    environment = json.loads((run / "environment.json").read_text())
    assert environment["host"]["name"] == rows[0]["host"]
    assert all(one["precision"] == "int8" for one in environment["executed"].values())
    for name in ("config.yaml", "study.db", "trials.csv", "front.json", "front.png", "front.svg", "report.html"):
        assert (run / name).stat().st_size > 0
    page = without_programs((run / "report.html").read_text())
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")


def test_the_same_command_resumes_to_the_new_total_and_loses_nothing(run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "again"
    shutil.copytree(run, out)
    before = {row["number"]: row["top1_proxy"] for row in rows_of(out / "trials.csv") if row["outcome"] == "evaluated"}
    monkeypatch.setattr("hwnas.search.road.verified", lambda prepared, trials, console: ([], []))
    assert search(out, "n_trials=4") == 0
    assert re.search(r"about \d+\.\d min for the trials, then about .* up to 5 networks", capsys.readouterr().err)
    after = {row["number"]: row["top1_proxy"] for row in rows_of(out / "trials.csv") if row["outcome"] == "evaluated"}
    assert len(before) == 3
    assert len(after) == 4
    assert before.items() <= after.items()
    for row in rows_of(out / "trials.csv"):  # four values are enough for a model
        if row["outcome"] == "evaluated":
            low, middle, high = (float(row[f"top1_estimated{end}"]) for end in ("_low", "", "_high"))
            assert low < middle < high


@pytest.mark.soak
def test_nothing_that_was_trained_is_trained_again(run, tmp_path):
    out = tmp_path / "again"
    shutil.copytree(run, out)
    weights = {path: path.read_bytes() for path in (out / "models").rglob("weights.safetensors")}
    assert search(out, "n_trials=4") == 0
    for path, content in weights.items():
        assert path.read_bytes() == content


@pytest.mark.parametrize(("name", "spoil", "told"), [
    ("model_int8.onnx", lambda path: path.write_bytes(path.read_bytes()[:-1]), "is not"),
    ("weights.safetensors", Path.unlink, "is missing")])
def test_a_verified_front_with_a_damaged_or_missing_file_is_made_again(run, tmp_path, capsys, monkeypatch, name, spoil,
                                                                       told):
    out = tmp_path / "out"
    shutil.copytree(run, out)
    path = next((out / "models").rglob(name))
    spoil(path)

    def stop(*args):
        raise StudyError("made again")

    monkeypatch.setattr("hwnas.search.road.make_rows", stop)
    assert search(out) == 2
    *_, said, last = capsys.readouterr().err.splitlines()
    assert said.startswith(f"the front in {out} is made and timed again: {path.parent.name}: {name} {told}")
    assert last == "StudyError: made again"


def test_a_verified_front_is_left_alone_and_is_what_the_road_returns(run, capsys):
    before = (run / "front.csv").read_bytes()
    assert search(run) == 0
    assert "verified already" in capsys.readouterr().err
    assert (run / "front.csv").read_bytes() == before
    result = road(compose("search", [*SMALL, f"out={run}"]), Console(quiet=True))
    assert (result.run.path, len(result.trials), len(result.study.trials)) == (run, 3, 3)
    assert [row.id for row in result.rows] == [row["id"] for row in rows_of(run / "front.csv")]
    known = [row.name for row in result.rows if row.is_known]
    # After so few steps the stock network may have hardly learnt anything: then a warning stands for its verdict.
    warned = any(comparison["name"] == "training" for comparison in result.comparisons)
    assert [comparison["name"] for comparison in result.comparisons if comparison["name"] != "training"] == [
        "deploy", "controls", *known, *([] if warned else ["test_efficientnet"])]


@pytest.mark.parametrize(("change", "named"), [
    ("dataset.validation_fraction=0.3", "data set"), ("proxy.lr=0.001", "accuracy"),
    ("budget.latency_ms=50", "budget.latency_ms"),
    ("+target=epyc_int8", "target")])
def test_what_changed_is_named_and_refused(run, tmp_path, change, named, capsys):
    out = tmp_path / "changed"
    shutil.copytree(run, out)
    overrides = [text for text in SMALL if not (change.startswith("+target") and text.startswith("+target"))]
    assert run_command(main, "search", "usage", [*overrides, f"out={out}", change]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "cannot resume" in last
    assert f"{named} was" in last


def test_a_cap_that_nothing_meets_names_the_nearest(run, tmp_path, capsys):
    assert search(tmp_path / "cap", "budget.latency_ms=0.001") == 2
    assert "fastest network" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.soak  # short forms: experiments/test_promises.py, study/test_faults.py
def test_killed_at_any_moment_no_acknowledged_trial_is_lost(run, tmp_path):
    out = tmp_path / "killed"
    worker = start(out, "n_trials=500", TWO_WORKERS)
    wait_for_trials(out, 2, worker)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    assert worker.returncode == -signal.SIGKILL
    kept = acknowledged(out)
    assert len(kept) >= 2
    total = len(kept) + 2
    assert search(out, f"n_trials={total}", "baselines=[]", "controls=0", "finalists.k=1") == 0
    rows = rows_of(out / "trials.csv")
    assert sum(row["outcome"] == "evaluated" for row in rows) >= total
    # of one network that two workers evaluated, the later trial is listed as a duplicate: complete all the same
    assert kept <= {row["number"] for row in rows if row["state"] == "COMPLETE"}
    assert all(row["verified"] == "true" for row in rows_of(out / "front.csv"))
    assert not list(out.rglob("*.tmp"))


@pytest.mark.soak
def test_ctrl_c_ends_cleanly_and_a_second_copy_joins(run, tmp_path):
    out = tmp_path / "joined"
    first, second = (start(out, "n_trials=500") for _ in range(2))
    wait_until(lambda: len(workers_of(out)) == 2, first, second)
    for worker in (first, second):
        worker.send_signal(signal.SIGINT)
    for worker in (first, second):
        output, _ = worker.communicate(timeout=400)
        assert worker.returncode == 130, output
        assert "same command" in output
        assert "Traceback" not in output
    left = asked(out, "select json_extract(value_json, '$.left') from trial_user_attributes join trials "
                      "using (trial_id) where key = 'claim' and state = 'RUNNING'")
    assert left == {"1"}, "the next process need not wait for them"


@pytest.mark.soak
def test_another_machine_finds_the_same_and_verifies_later(run, tmp_path, monkeypatch, capsys):
    """The machine is this one by another name, so that one worker and one seed must give one result."""
    less = ["baselines=[]", "controls=0", "finalists.k=1"]
    local = tmp_path / "here"
    assert search(local, *less) == 0
    home = tmp_path / "home"
    tables = Path(os.environ["HWNAS_HOME"]) / "latency_tables"
    here = rows_of(local / "front.csv")[0]["host"]
    shutil.copytree(tables / here, home / "latency_tables" / "some-xeon")
    for path in (home / "latency_tables").rglob("*.json"):
        path.write_text(path.read_text().replace(f'"name":"{here}"', '"name":"some-xeon"'))
    monkeypatch.setenv("HWNAS_HOME", str(home))
    out = tmp_path / "remote"
    assert search(out, "host=some-xeon", *less) == 0
    rows = rows_of(out / "front.csv")
    assert {row["verified"] for row in rows} == {"false"}
    assert {row["host"] for row in rows} == {"some-xeon"}
    assert {row["latency_ms"] for row in rows} == {""}
    assert "hwnas verify" in capsys.readouterr().err
    first, again = ([(row["id"], row["top1_proxy"]) for row in rows_of(folder / "trials.csv")]
                    for folder in (local, out))
    assert first == again
    assert run_command(verify, "verify", "", [f"run={out}"], target=False) == 2
    assert here in capsys.readouterr().err
    assert run_command(verify, "verify", "", [f"run={out}", f"host={here}"], target=False) == 0
    rows = rows_of(out / "front.csv")
    assert {row["verified"] for row in rows} == {"true"}
    assert {row["host"] for row in rows} == {here}
    first, again = ({(row["id"], row["top1_test"]) for row in rows_of(folder / "front.csv")} for folder in (local, out))
    assert again == first


@pytest.mark.soak
def test_a_search_on_a_table_imports_no_runtime_until_the_verification(run, tmp_path):
    options = [*SMALL, f"out={tmp_path}/table", "n_trials=1", "baselines=[]", "controls=0"]
    code = ("import sys; from hwnas.search import __main__ as search, road\n"
            "from hwnas.cli.command import run_command\n"
            "def verify(*_):\n"
            "    held = {'openvino', 'onnxruntime'} & set(sys.modules)\n"
            "    print('imported', sorted(held)); sys.exit(1 if held else 0)\n"
            "road.verified = verify\n"
            f"run_command(search.main, 'search', '', {options!r})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "imported []" in done.stdout


@pytest.mark.soak
def test_the_whole_road_of_convnexts_block_in_int8_onnx_runtime(tmp_path):
    given = ["+target=ort_int8", "space=convnext_small", "dataset=digits", "dataset.image_size=16", "n_trials=2",
             "workers=1", "calibration.networks=14", "calibration.minutes=4", "proxy.epochs=1", "proxy.min_steps=4",
             "proxy.train_images=256", "finalists.k=1", "finalists.recipe.epochs=1", "finalists.recipe.min_steps=4",
             "baselines=[]", "controls=0", "verification.seconds=5"]
    assert run_command(main, "search", "usage", [*given, f"out={tmp_path / 'run'}"]) == 0
    rows = rows_of(tmp_path / "run" / "front.csv")
    assert rows
    for row in rows:
        assert "cx" in row["architecture"]
        assert row["verified"] == "true", row["reason"]
        assert (row["precision"], float(row["int8_share"]), row["fallback_share"]) == ("int8", 1.0, "0")
        assert 0 < float(row["latency_ms_predicted_low"]) < float(row["latency_ms_predicted_high"])
        assert (tmp_path / "run" / "models" / row["id"] / "model_int8.onnx").stat().st_size > 0
