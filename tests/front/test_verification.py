"""From finalists to a verified run folder, for real but small; only the clock is replaced."""

from __future__ import annotations

import json
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deployment_fixtures as made_up
import numpy as np
import onnx
import pytest
from deployment_fixtures import finish, measured, sides_data, tiny_architecture, tiny_finalist, tiny_making
from onnx import helper

from hwnas import verify
from hwnas.cli.command import run_command
from hwnas.cli.progress import Console
from hwnas.errors import CandidateError, DataError, ExportError, StudyError, TargetError, Unfinished
from hwnas.front import make as deployable
from hwnas.front import score, verification
from hwnas.front.picture import PlotInfo, front_figure
from hwnas.front.rows import FrontRow, load_front, save_front
from hwnas.front.score import Scores, Timing, compare_sets
from hwnas.front.verification import SearchFacts, results_of
from hwnas.latency import wave as scoring
from hwnas.latency.measurement import Turn
from hwnas.networks.network import FoundNetwork
from hwnas.networks.weights import Pretrained
from hwnas.runtimes.onnxruntime import OnnxRuntime
from hwnas.runtimes.runtime import Answers
from hwnas.study.objective import Objective
from hwnas.system.run_folder import Manifest, RunFolder
from hwnas.target import Host, Target
from hwnas.tasks.classification import RightAnswers

HERE = Host.detect().name
CONSOLE = Console(quiet=True)
BASELINE = FrontRow.of(made_up.tiny_baseline("test_efficientnet", 1), target="ort_int8")
FILES = {"config.yaml", "front.csv", "front.json", "front.png", "front.svg", "report.html", "environment.json",
         "comparisons.json", "models", ".hwnas.json", "pairs.csv"}


def facts(host: str = HERE, **changes: Any) -> SearchFacts:
    return SearchFacts(host, "tiny", Timing(tiny_architecture(), seconds=1.0), **changes)


@pytest.fixture
def clock(monkeypatch) -> dict[str, float]:
    """Times by id instead of measured ones; every network calls its inference once."""
    times: dict[str, float] = {}

    def measure(calls, reference, protocol, **options):
        for copies in [*calls.values(), reference]:
            assert len(copies) % protocol.copies == 0
            for call in copies:
                call()
        return {name: measured(times.get(name, 0.2)) for name in calls}

    monkeypatch.setattr(scoring, "measure", measure)
    monkeypatch.setattr("hwnas.verify.load_dataset", lambda *args: sides_data())
    return times


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return begun(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run folder with a verified finalist, to be copied."""
    run = begun(tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "measure", lambda calls, *args, **options: {name: measured(0.2) for name in calls})
        finish(run, [tiny_finalist()], tiny_making(), facts())
    return run.path


@pytest.fixture
def finished(whole: Path, tmp_path) -> RunFolder:
    return RunFolder.open(shutil.copytree(whole, tmp_path / "run"))


def begun(folder: Path) -> RunFolder:
    """A search before its finalists are made."""
    run = RunFolder.create(folder / "run")
    run.write_config({"seed": 0, "dataset": {"name": "sides", "root": None},
                      "objective": {"name": "pareto", "reward": "soft"}})
    run.write_trials([{"number": 0, "state": "COMPLETE", "outcome": "evaluated", "id": tiny_finalist().id,
                       "top1_proxy": 0.8, "latency_ms_predicted": 0.1}])
    return run


def test_run_is_verified_and_every_file_is_there(run: RunFolder, clock) -> None:
    wide = tiny_finalist(16, reward_winner=True)
    clock.update({wide.id: 0.3, tiny_finalist().id: 0.1, BASELINE.id: 0.5})
    rows = {row.id: row for row in finish(run, [tiny_finalist(), wide, BASELINE], tiny_making(), facts(cap_ms=0.25))}
    assert {path.name for path in run.path.iterdir()} == {*FILES, "trials.csv", "predictions.npz", "measurements.json",
                                                          "confidences.npz"}
    assert all(row.verified and row.host == HERE and row.n_test == 40 and not row.reason for row in rows.values())
    slow, quick = rows[wide.id], rows[tiny_finalist().id]
    assert slow.latency_ms == pytest.approx(0.3, rel=0.01)
    assert (slow.meets_cap, slow.on_front) == (False, False)
    assert quick.on_front
    assert quick.precision == "int8"
    assert quick.top1_test >= 0.9  # the task is easy, so this is learnt and survives int8
    assert quick.top1_test_low < quick.top1_test
    assert rows[BASELINE.id].is_baseline
    assert {row.steps for row in rows.values()} == {24}  # a verdict needs those of both
    assert load_front(run)[0].id == quick.id
    deploy, baseline = json.loads(run.comparisons.read_text())
    assert (deploy["verdict"], baseline["baseline"]) == ("deploy", BASELINE.id)
    for row in rows.values():
        folder = run.model(row.id)
        assert all(path.is_file() for path in (folder.weights, folder.onnx, folder.int8, folder.card))
        assert HERE in folder.card.read_text()
    answers, samples = run.read_predictions(), json.loads(run.measurements.read_text())
    assert (answers[quick.id] == answers["labels"]).mean() == quick.top1_test
    assert len(samples["networks"][quick.id]["samples_us"]) == 8
    assert samples["host"] == HERE
    environment = json.loads(run.environment.read_text())
    assert environment["executed"][quick.id]["precision"] == "int8"
    assert environment["versions"]["onnxruntime"]


def test_no_report_covers_files_of_two_verifications(finished: RunFolder, clock, monkeypatch) -> None:
    def killed(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verification, "save_front", killed)  # the environment is new then, and the front is not
    with pytest.raises(KeyboardInterrupt):
        finish(finished, [tiny_finalist()], tiny_making(), facts())
    assert finished.front_csv.exists()
    assert not finished.report.exists()


def test_failed_network_is_a_row_with_its_reason(run: RunFolder, clock, monkeypatch) -> None:
    whole = deployable.check_parity

    def fails_for_baseline(model, path, images):
        if BASELINE.id in str(path):
            raise ExportError("parity failed over 256 images")
        return whole(model, path, images)

    monkeypatch.setattr(deployable, "check_parity", fails_for_baseline)
    rows = {row.id: row for row in finish(run, [tiny_finalist(), BASELINE], tiny_making(), facts())}
    assert rows[tiny_finalist().id].verified
    assert not rows[BASELINE.id].verified
    assert rows[BASELINE.id].reason == "parity failed over 256 images"
    assert not run.model(BASELINE.id).onnx.exists()
    assert "parity failed over 256 images" in run.report.read_text()


TAIL = tuple(Turn((0.1,) * 98 + (1.0,) * 2, (100.0,)) for _ in range(8))


@pytest.mark.parametrize(("found", "facts_of_it"), [
    (replace(measured(0.1), turns=()),  # its time was over
     {"verified": False, "latency_ms": None, "reason": "timing INVALID"}),
    (replace(measured(0.1), turns=measured(0.1).turns[:4]),  # as many turns as copies
     {"verified": True, "latency_ms": pytest.approx(0.1, rel=0.01), "latency_ms_low": pytest.approx(0.1, rel=0.2)}),
    (replace(measured(0.1), turns=TAIL),
     {"latency_ms_p50": 0.1, "latency_ms_p90": 0.1, "latency_ms_p99": 1.0, "meets_cap": False})])
def test_a_row_says_what_was_measured_and_how_well(whole: Path, monkeypatch, found, facts_of_it) -> None:
    monkeypatch.setattr(scoring, "measure", lambda calls, *args, **options: dict.fromkeys(calls, found))
    results = verification.verify_front(
        [tiny_finalist()], RunFolder.open(whole), tiny_making(), facts().timing, Objective(None),
        {"cap_p99_ms": 0.5, "measuring": {}}, CONSOLE)
    (row,) = results.rows
    assert row.top1_test is not None
    said = {name: getattr(row, name) for name in facts_of_it}
    assert {**said, "reason": said.get("reason", "")[:14]} == {"reason": "", **facts_of_it}
    figure = front_figure(results.rows, PlotInfo("t", "h", "d", "day"))
    assert len(figure.axes) == 1


@pytest.mark.soak
def test_what_is_not_verified_is_told_by_the_exit_code(run: RunFolder, monkeypatch, capsys) -> None:
    """And by the last line. Each reason is printed once, in the row of its network."""
    is_timed = {tiny_finalist().id: False, BASELINE.id: False}

    def measure(calls, *args, **options):
        return {name: measured(0.1) if is_timed[name] else replace(measured(0.1), turns=()) for name in calls}

    monkeypatch.setattr(scoring, "measure", measure)
    monkeypatch.setattr("hwnas.verify.load_dataset", lambda *args: sides_data())
    monkeypatch.setattr(verification, "probe_model", lambda *args, **options: None)
    finish(run, [tiny_finalist(), BASELINE], tiny_making(), facts())
    for missing, code in ((2, 1), (1, 3)):
        assert run_command(verify.run, "verify", "", ["-q", f"run={run.path}"], target=False) == code
        said = capsys.readouterr().err
        last = said.splitlines()[-1]
        assert last.startswith(f"Unfinished: {missing} of 2 networks are not verified (")
        assert BASELINE.id in last
        assert said.count("  not verified: timing INVALID") == missing
        assert last.endswith(f"hwnas verify run={run.path}")
        is_timed[tiny_finalist().id] = True
    is_timed[BASELINE.id] = True
    assert run_command(verify.run, "verify", "", ["-q", f"run={run.path}"], target=False) == 0


def test_search_for_another_host_is_completed_over_there(run: RunFolder, clock) -> None:
    (row,) = finish(run, [tiny_finalist()], tiny_making(), facts("far-host"))
    assert (row.verified, row.host, row.latency_ms, row.on_front) == (False, "far-host", None, True)
    assert row.top1_test_fp32 >= 0.9
    assert {path.name for path in run.path.iterdir()} == {*FILES, "trials.csv"}
    assert "far-host" in run.model(row.id).card.read_text()
    with pytest.raises(StudyError, match=f"search was for far-host; this is {HERE}"):
        verify.run({"run": run.path}, CONSOLE)
    verify.run({"run": run.path, "host": HERE, "verification": {"seconds": None}}, CONSOLE)
    (found,) = load_front(run)
    assert (found.verified, found.host, found.top1_proxy) == (True, HERE, 0.8)
    assert f"scored and timed on {HERE}" in run.report.read_text()


def test_verify_refuses_other_data_and_resolves_nothing_of_the_folder(finished: RunFolder, clock, monkeypatch) -> None:
    run = finished
    monkeypatch.setattr("hwnas.verify.load_dataset", lambda *args: replace(sides_data(), fingerprint="other"))
    with pytest.raises(DataError, match=r"fingerprint other.*sides-1"):
        verify.run({"run": run.path}, CONSOLE)
    config = run.read_config()
    run.write_config({**config, "dataset": {**config["dataset"], "root": "${oc.env:HOME}"}})
    with pytest.raises(StudyError, match=r"dataset\.root as it was typed.*Add dataset\.root=DIR"):
        verify.run({"run": run.path}, CONSOLE)


def test_verify_refuses_a_target_before_images_are_read(finished: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: OnnxRuntime, target: Target) -> None:
        raise TargetError("no integers here")

    monkeypatch.setattr("hwnas.verify.load_dataset", lambda *args: pytest.fail("images are read"))
    monkeypatch.setattr(OnnxRuntime, "check", check)
    with pytest.raises(TargetError, match="no integers here"):
        verify.run({"run": finished.path}, CONSOLE)


def test_verify_again_drops_the_old_reason(finished: RunFolder, clock, monkeypatch) -> None:
    (row,) = load_front(finished)
    save_front(finished, [replace(row, verified=False, latency_ms=None, reason="timing INVALID")])
    monkeypatch.setattr(verification, "probe_model", lambda *args, **options: None)
    verify.run({"run": finished.path}, CONSOLE)
    (row,) = load_front(finished)
    assert (row.verified, row.reason) == (True, "")


@pytest.mark.parametrize("name", ["model_int8.onnx", "weights.safetensors", "architecture.yaml"])
def test_verify_does_not_publish_a_damaged_file(finished: RunFolder, clock, monkeypatch, name: str) -> None:
    run = finished
    monkeypatch.setattr(verification, "probe_model", lambda *args, **options: pytest.fail("opened"))
    path = run.model(tiny_finalist().id).path / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(Unfinished, match="1 of 1 networks are not verified"):
        verify.run({"run": run.path}, CONSOLE)
    (row,) = load_front(run)
    assert not row.verified
    assert row.latency_ms is None
    assert row.reason.startswith(f"{name} is not the file that was made: ")


def test_verify_opens_a_file_of_others_in_a_limited_child(run: RunFolder, clock) -> None:
    """A network of under 300 bytes that asks for 40 GB, with a manifest that knows it."""
    finish(run, [tiny_finalist()], tiny_making(Target("ort_fp32", "onnxruntime", "fp32")), facts())
    folder = run.model(tiny_finalist().id)
    folder.onnx.write_bytes(greedy())
    Manifest.write(folder.path, (folder.weights, folder.onnx), "recipe")
    with pytest.raises(Unfinished, match="1 of 1 networks are not verified"):
        verify.run({"run": run.path}, CONSOLE)
    (row,) = load_front(run)
    assert row.latency_ms is None
    assert re.search(r"model\.onnx: .*memory", row.reason)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 1.5 * 2**20  # KiB


def greedy() -> bytes:
    """images [n, 1, 16, 16] -> logits [n, 2], with 10^10 floats on the way that a runtime computes when it compiles."""
    size = helper.make_tensor("size", onnx.TensorProto.INT64, [1], [10**10])
    axes = helper.make_tensor("axes", onnx.TensorProto.INT64, [1], [0])
    nodes = [helper.make_node("ConstantOfShape", ["size"], ["huge"]),
             helper.make_node("ReduceMax", ["huge"], ["top"], keepdims=0),
             helper.make_node("Add", ["images", "top"], ["logits"])]
    graph = helper.make_graph(
        nodes, "greedy", [helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["n", 1, 16, 16])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["n", 1, 16, 16])], [size, axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert len(model.SerializeToString()) < 300
    return model.SerializeToString()


@pytest.mark.parametrize("begun_with", [None, Pretrained("w.safetensors", "0" * 64, "MIT", "here", (0.5,), (0.5,))])
def test_cuts_that_began_with_random_weights_are_said_to_in_every_verdict(run: RunFolder, begun_with) -> None:
    cut = FoundNetwork(replace(tiny_architecture(), around="test_efficientnet"), begun_with)
    rows = [replace(row, verified=True, latency_ms=ms, top1_test=0.5)
            for row, ms in ((FrontRow.of(cut), 0.1), (BASELINE, 0.2))]
    making = tiny_making()
    labels = making.dataset.test.labels
    scores = Scores(rows, {row.id: Answers(labels, np.ones(len(labels), np.float16)) for row in rows},
                    {row.id: RightAnswers(labels == labels, labels) for row in rows})
    results = results_of(scores, run, making, Objective(None), {})
    assert len(results.comparisons) >= 2
    assert {each.sentence.endswith("(These cuts began with random weights.)") for each in results.comparisons} == {
        begun_with is None}


@pytest.mark.parametrize(("test", "validation", "is_gap"), [(0.1, 0.9, True), (0.5, 0.55, False)])
def test_test_images_that_are_harder_than_validation_images_are_a_remark(
        tmp_path: Path, monkeypatch, test: float, validation: float, is_gap: bool) -> None:
    data = sides_data()
    monkeypatch.setattr("hwnas.front.score.fp32_grades", lambda path, given: RightAnswers(
        np.arange(len(given.test)) < round((test if given.test is data.test else validation) * len(given.test))))
    assert compare_sets(tmp_path, data).startswith("test images differ from validation images") == is_gap


def test_an_fp32_file_is_graded_on_a_few_threads_however_many_cores_there_are(monkeypatch):
    """Several processes grade at once, and a search plans the seconds of deployed files by it."""
    threads: list[int] = []

    def compile(path: Path, target: Target) -> None:
        threads.append(target.threads)
        raise CandidateError("seen")

    monkeypatch.setattr(score, "load_runtime", lambda name: SimpleNamespace(compile=compile))
    for cores in (1, 256):
        monkeypatch.setattr(score, "usable_cores", lambda cores=cores: [*range(cores)])
        with pytest.raises(CandidateError):
            score.fp32_grades(Path("model.onnx"), sides_data())
    assert threads == [1, score.GRADING_THREADS]
