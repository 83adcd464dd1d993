"""The deployments that a search chooses among: which of a set can run, which two a network is verified in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from deployment_fixtures import tiny_baseline, tiny_finalist, tiny_making, tiny_network
from hypothesis import given
from hypothesis import strategies as st
from run_fixtures import SMALL
from search_fixtures import rows_of

from hwnas.benchmark.__main__ import command as time_one
from hwnas.cli.command import compose, run_command
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, TableError, TargetError, UserError
from hwnas.front import make as deployable
from hwnas.front.make import fingerprint, make
from hwnas.latency.calibration import CalibrationOptions
from hwnas.latency.deployment import Deployment
from hwnas.latency.model import Predictions
from hwnas.latency.target_set import read_deployments
from hwnas.latency.timing import HERE
from hwnas.networks.network import Shape, read_network
from hwnas.predict import command as predict
from hwnas.runtimes.onnxruntime import OnnxRuntime
from hwnas.search import calibration
from hwnas.search.__main__ import main
from hwnas.search.deployments import BestOf, CalibratedDeployment, choose_deployments, deploy_rows
from hwnas.search.plan import make_plan
from hwnas.search.road import _is_made
from hwnas.study.candidate import SearchOptions
from hwnas.study.objective import Objective
from hwnas.system.run_folder import Manifest, ModelFolder, RunFolder
from hwnas.target import Host, Target
from hwnas.verify import command as verify

pytestmark = pytest.mark.usefixtures("any_machine", "few_images")
INT8, FP32 = Target("ort_int8", "onnxruntime", "int8"), Target("ort_fp32", "onnxruntime", "fp32")


def read(deployments: Sequence[str], console: Console | None = None, **more: Any) -> list[Target]:
    section = {"name": "mine", "deployments": list(deployments), **more}
    return [each.target for each in read_deployments(section, None, HERE, console or Console(quiet=True))]


def test_a_set_of_one_is_it_and_one_leaves_out_what_cannot_run_here_and_says_why(monkeypatch):
    def check(self: OnnxRuntime, target: Target) -> None:
        if target.precision == "int8":
            raise TargetError("no integers here.")

    (only,) = read_deployments({"name": "ort_int8", "runtime": "onnxruntime", "precision": "int8"}, None, HERE,
                               Console(quiet=True))
    assert only.target == INT8
    monkeypatch.setattr(OnnxRuntime, "check", check)
    console = Console(quiet=True)
    assert read(["ort_int8", "ort_fp32"], console) == [FP32]
    assert console.remarks == ["note: not deployed as ort_int8. ort_int8: no integers here."]
    with pytest.raises(ConfigError, match=r"no deployment of target=mine can run here. ort_int8: no integers here."):
        read(["ort_int8"])


def test_threads_multiply_a_set() -> None:
    assert [(target.name, target.threads) for target in read(["ort_int8", "ort_fp32"], threads=[1, 2])] == [
        ("ort_int8-t1", 1), ("ort_int8-t2", 2), ("ort_fp32-t1", 1), ("ort_fp32-t2", 2)]
    assert [(target.name, target.threads) for target in read(["ort_int8"], threads=[2])] == [("ort_int8", 2)]


def test_more_threads_than_cores_are_told() -> None:
    console, cores = Console(quiet=True), Host.detect().cores
    for threads in (1, cores, cores + 1):
        Deployment.of(replace(INT8, threads=threads), None, console)
    only, = console.remarks
    assert f"has {cores + 1} threads" in only


@pytest.mark.parametrize(("names", "said"), [
    (["xeon_int8", "epyc_int8"], "xeon_int8 and epyc_int8 are one deployment"), ([], "names no target"),
    (["cuda_fp16"], "cuda_fp16 runs on a GPU"), (["ort_int9"], r"ort_int9.*ort_int8")])
def test_sets_that_are_none_are_refused(names: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(names)


@pytest.mark.parametrize(("text", "said"), [
    ("name: own\nruntime: onnxruntime\nprecision: fp32\nbatch: 8\n", "their batches differ"),
    ("name: ort_int8\nruntime: onnxruntime\nprecision: fp32\n", "'ort_int8' is no plain name of one of them alone"),
    ("name: a b\nruntime: onnxruntime\nprecision: fp32\n", "'a b' is no plain name"),
    ("name: [\n", "own.yaml cannot be read"), ("- 1\n", "target must be a section")])
def test_a_targets_file_that_does_not_suit_a_set_is_refused_in_one_line(tmp_path, monkeypatch, text, said):
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    (tmp_path / "conf" / "target").mkdir(parents=True)
    (tmp_path / "conf" / "target" / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        read(["ort_int8", "own"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["target.deployments=null", "target.deployments=ort_int8"])
def test_a_set_that_is_no_list_is_refused_by_every_command(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(main, "search", "usage", ["+target=cpu", change, "dataset=digits"]) == 2
    assert "target.deployments must be a list of names of targets" in capsys.readouterr().err
    assert time_one(["+target=cpu", change, "model=none.onnx"]) == 2
    assert "target=cpu is a set of targets" in capsys.readouterr().err


class BuildResult:
    """A latency model that says the same of all networks but for a factor of each."""

    def __init__(self, ms: Sequence[float]) -> None:
        self.ms = np.array(ms)

    def predict(self, codes: np.ndarray) -> Predictions:
        ms = self.ms[: len(codes)]
        return Predictions(ms, 0.9 * ms, 1.1 * ms)

    predict_architectures = predict


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=8))
def test_a_network_takes_what_its_fastest_deployment_takes(pairs: list[tuple[float, float]]) -> None:
    first, second = zip(*pairs, strict=True)
    best = BestOf({"a": BuildResult(first), "b": BuildResult(second)}).predict(np.zeros((len(pairs), 1)))  # type: ignore[dict-item]
    assert best.mean.tolist() == [min(pair) for pair in pairs]
    assert best.deployment.tolist() == ["a" if one <= other else "b" for one, other in pairs]
    assert np.allclose(best.high, 1.1 * best.mean)


@given(st.dictionaries(st.sampled_from(["i1", "i2", "f1", "f2"]), st.floats(0.01, 10), min_size=1))
def test_a_network_is_verified_in_its_fastest_deployment_and_in_one_of_the_other_kind(ms: dict[str, float]) -> None:
    chosen = choose_deployments(ms, {"i1", "i2"})
    assert ms[chosen[0]] == min(ms.values())
    others = [name for name in ms if name[0] != chosen[0][0]] or [name for name in ms if name != chosen[0]]
    assert chosen[1:] == ([] if not others else [chosen[1]])
    assert not others or (chosen[1] in others and ms[chosen[1]] == min(ms[name] for name in others))


def calibrated(target: Target, *ms: float) -> CalibratedDeployment:
    deployment: Any = SimpleNamespace(target=target)
    return CalibratedDeployment(deployment, BuildResult(ms), None)  # type: ignore[arg-type]


def test_rows_name_their_deployments() -> None:
    finalist = tiny_finalist(top1_proxy=0.8, reward_winner=True)
    baseline = replace(tiny_finalist(), id=tiny_baseline().id, network=tiny_baseline(), is_baseline=True,
                       latency_ms_predicted=None)
    control = replace(tiny_finalist(16), is_control=True, control_of=finalist.id)
    rows = deploy_rows([finalist, baseline, control], [calibrated(FP32, 0.3), calibrated(INT8, 0.1)],
                       {}, SearchOptions(1, Objective(0.1, "reward")), tiny_network().architecture, print)
    name, other = tiny_network().id, tiny_network(16).id
    assert [row.id for row in rows] == [f"{name}-ort_int8", f"{name}-ort_fp32", f"{tiny_baseline().id}-ort_int8",
                                        f"{tiny_baseline().id}-ort_fp32", f"{other}-ort_int8"]
    assert [row.deployment for row in rows] == ["ort_int8", "ort_fp32", "ort_int8", "ort_fp32", "ort_int8"]
    assert [row.latency_ms_predicted for row in rows] == [0.1, 0.3, None, None, 0.1]
    assert [row.reward_winner for row in rows] == [True, False, False, False, False]
    assert {row.trained_id for row in rows} == {name, other, tiny_baseline().id}
    assert rows[-1].control_of == rows[0].id
    alone = deploy_rows([finalist], [calibrated(INT8, 0.1)], {}, SearchOptions(1, Objective(0.1)),
                        tiny_network().architecture, print)
    assert alone == [finalist]
    assert (alone[0].deployment, alone[0].trained_id) == ("", finalist.id)


def test_a_network_is_made_once_the_files_of_all_its_deployments_are(tmp_path: Path) -> None:
    run, targets = RunFolder.create(tmp_path / "run"), (INT8, FP32)
    making = replace(tiny_making(), target=INT8, targets=targets)
    row = tiny_finalist()
    deployed = [replace(row, id=network.id, network=network, target=network.deployment) for network in (
        tiny_network().deployed_as(target.name) for target in targets)]
    for each in deployed:
        assert not _is_made(deployed, run, making, row)
        folder = run.model(each.id)
        folder.path.mkdir(parents=True)
        for path in (folder.onnx, folder.int8):
            path.write_bytes(b"whole")
        Manifest.write(folder.path, (folder.onnx, folder.int8), fingerprint(each.network, making))
    assert _is_made(deployed, run, making, row)


def test_a_second_deployment_keeps_the_cap_and_is_one_that_can_run_it():
    rows = [tiny_finalist(), replace(tiny_finalist(), id=tiny_baseline().id, network=tiny_baseline(), is_baseline=True,
                                     latency_ms_predicted=None)]
    able = {tiny_baseline().trained_id: ("ort_fp32",)}
    deployed = deploy_rows(rows, [calibrated(FP32, 0.3), calibrated(INT8, 0.1)], able,
                           SearchOptions(1, Objective(0.1), cap_ms=0.2), tiny_network().architecture, print)
    assert [row.target for row in deployed] == ["ort_int8", "ort_fp32"]
    assert [row.is_baseline for row in deployed] == [False, True]
    told: list[str] = []
    nowhere = {tiny_baseline().trained_id: ("edge_fp32",)}
    left = deploy_rows(rows, [calibrated(FP32, 0.3), calibrated(INT8, 0.1)], nowhere,
                       SearchOptions(1, Objective(0.1)), tiny_network().architecture, told.append)
    assert [row.is_baseline for row in left] == [False, False]
    assert len(told) == 1
    assert tiny_baseline().id in told[0]


def test_a_deployment_that_cannot_be_calibrated_is_left_out_for_good(tmp_path, monkeypatch):
    fails: set[str] = {"ort_int8"}

    def latency_model(deployment: Deployment, *_: object) -> tuple[None, Any]:
        if deployment.target.name in fails:
            raise TableError("its table is of another runtime.")
        return None, SimpleNamespace(in_session=lambda *_: BuildResult([1.0]))

    monkeypatch.setattr(calibration, "latency_model", latency_model)
    def kept_table(deployment: Deployment, space: object) -> None:
        if deployment.target.name in fails:  # as a table of another version does, before anything is calibrated
            raise TableError("its table is of another runtime.")

    monkeypatch.setattr(calibration, "kept_table", kept_table)
    monkeypatch.setattr(calibration, "_find_session", lambda *_: SimpleNamespace(factor=1.0, log_std=0.0))
    config = compose("search", ["+target=cpu", "target.deployments=[ort_int8,ort_fp32]", "dataset=digits",
                                f"out={tmp_path}", "baselines=[]"])
    console, run = Console(quiet=True), RunFolder(tmp_path)
    left = calibration.calibrate(make_plan(config, console), run, console)
    assert [each.deployment.target for each in left] == [FP32]
    assert console.remarks == ["note: not deployed as ort_int8: its table is of another runtime."]
    fails.clear()  # another process, or a later call, keeps to what was decided
    assert [each.name for each in calibration.calibrate(make_plan(config, console), run, console)] == ["ort_fp32"]
    more = compose("search", ["+target=cpu", "target.deployments=[ort_fp32,ort_int8]", "dataset=digits",
                              f"out={tmp_path}", "baselines=[]"])
    assert len(calibration.calibrate(make_plan(more, console), run, console)) == 2  # the study refuses it
    fails.update({"ort_int8", "ort_fp32"})
    run.deployments.unlink()
    with pytest.raises(ConfigError, match="no deployment of target=cpu could be calibrated"):
        calibration.calibrate(make_plan(config, console), run, console)


def test_a_network_remembers_its_deployment_and_has_the_weights_of_the_first(tmp_path, monkeypatch):
    for network in (tiny_network().deployed_as("ort_fp32"), tiny_baseline().deployed_as("ort_fp32"), tiny_network()):
        folder = ModelFolder(tmp_path / network.id)
        folder.path.mkdir()
        (folder.path / network.file).write_text(network.describe())
        assert read_network(folder, Shape(1, 16, 2)) == network
    making, network = tiny_making(INT8, targets=(INT8, FP32)), tiny_network()
    first, second = (ModelFolder(tmp_path / network.deployed_as(name).id) for name in ("ort_int8", "ort_fp32"))
    make(network.deployed_as("ort_int8"), first, making)
    monkeypatch.setattr(deployable, "_train", None)  # it would be called
    made = make(network.deployed_as("ort_fp32"), second, making)
    assert first.weights.read_bytes() == second.weights.read_bytes()
    assert (first.int8.is_file(), second.int8.is_file(), made.reused) == (True, False, False)


@pytest.mark.soak  # its short forms are above
def test_a_search_among_deployments_ends_with_a_front_that_names_them(tiny_table, tmp_path, capsys):
    out = tmp_path / "run"
    for name in ("ort_fp32", "ort_int8"):
        tiny_table(name, 24)
    given = ["+target=cpu", "target.deployments=[ort_fp32,ort_int8]", *SMALL, "workers=1", f"out={out}"]
    assert run_command(main, "search", "usage", given) == 0, capsys.readouterr().err
    rows = rows_of(out / "front.csv")
    assert all(row["verified"] == "true" for row in rows), [row["reason"] for row in rows]
    assert {row["target"] for row in rows} == {"ort_fp32", "ort_int8"}
    assert all(row["id"].endswith(f"-{row['target']}") for row in rows)
    assert {row["precision"] for row in rows if row["target"] == "ort_int8"} == {"int8"}
    assert {row["deployment"] for row in rows_of(out / "trials.csv")} <= {"ort_fp32", "ort_int8"}
    assert sorted(path.name for path in out.glob("session*.json")) == ["session-ort_fp32.json", "session-ort_int8.json"]
    environment = json.loads((out / "environment.json").read_text())
    assert [each["name"] for each in environment["target"]["targets"]] == ["ort_fp32", "ort_int8"]
    capsys.readouterr()
    assert run_command(main, "search", "usage", given) == 0
    assert "is verified already" in capsys.readouterr().err
    assert verify([f"run={out}", "verification.seconds=2"]) == 0, capsys.readouterr().err
    again = rows_of(out / "front.csv")
    assert {row["id"]: row["top1_test"] for row in again} == {row["id"]: row["top1_test"] for row in rows}
    assert {row["latency_ms_predicted"] for row in again} == {row["latency_ms_predicted"] for row in rows}
    (tmp_path / "images").mkdir()
    for row in rows[:2]:
        assert predict([f"model={out / 'models' / row['id']}", f"images={tmp_path / 'images'}"]) == 2
        assert "has no images" in capsys.readouterr().err


def test_all_calibrations_of_a_set_take_twice_as_long_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """But each a wave of networks at least."""
    names = ["kept", "first", "second", "third", "fourth"]
    monkeypatch.setattr(calibration, "has_table", lambda name, _: name == "kept")
    clock = [0.0]
    monkeypatch.setattr(calibration.time, "monotonic", lambda: clock[0])
    divided, minutes = calibration._divide_minutes(names, None, CalibrationOptions()), dict[str, float]()
    for name, options in divided:
        minutes[name] = options.minutes
        # What is measured is known at once; the third takes longer than it was told to.
        clock[0] += {"kept": 0.0, "first": 100.0, "second": 33.0, "third": 50.0, "fourth": 0.0}[name]
    assert minutes["first"] == 1.5
    assert minutes["second"] == pytest.approx((100 / 3 - calibration.CALIBRATION_ENDS_S) / 60)
    assert minutes["third"] == pytest.approx((67 / 2 - calibration.CALIBRATION_ENDS_S) / 60)
    assert minutes["fourth"] == calibration.LEAST_CALIBRATION
