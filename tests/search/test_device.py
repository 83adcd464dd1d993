"""Whole commands whose networks are timed elsewhere: search, profile, benchmark, verify, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from device_fixtures import Board
from search_fixtures import rows_of
from tiny_fixtures import digits

from hwnas.benchmark.__main__ import main as benchmark
from hwnas.cli.command import run_command
from hwnas.front.score import scoring_seconds
from hwnas.latency.table import LatencyTable
from hwnas.latency.timing import prepare_network
from hwnas.profile import profile
from hwnas.runtimes.runtime import FP32
from hwnas.search.__main__ import main as search
from hwnas.system.documents import load_yaml
from hwnas.system.run_folder import ModelFolder, RunFolder
from hwnas.target import Host
from hwnas.verify import run as verify
from hwnas.worker import _options
from hwnas.worker import command as worker

pytestmark = pytest.mark.usefixtures("any_machine")
SMALL = ["+target=ort_fp32", "dataset=digits", "dataset.image_size=24", "n_trials=2", "workers=2", "proxy.epochs=1",
         "proxy.min_steps=4", "proxy.train_images=256", "finalists.k=1", "finalists.recipe.max_steps=4", "baselines=[]",
         "verification.seconds=5", "controls=0"]


def options(board: Board, name: str = "board-2c") -> list[str]:
    return ["device=me@board", f"device_python={board.python}", f"device_name={name}"]


@pytest.mark.soak
def test_a_front_is_searched_here_and_verified_there(board, tiny_table, tmp_path, capsys):
    tiny_table("ort_fp32", 24, host_name="board-2c")
    out = tmp_path / "run"
    assert run_command(search, "search", "", [*SMALL, *options(board), f"out={out}"]) == 0, capsys.readouterr().err
    row, = rows_of(out / "front.csv")
    assert (row["verified"], row["host"]) == ("true", "board-2c")
    environment = json.loads((out / "environment.json").read_text())
    assert (environment["host"]["name"], environment["searched_for"]) == ("board-2c", "board-2c")
    assert environment["verified_from"] == Host.detect().name
    assert f"scored and timed on board-2c, over ssh from {Host.detect().name}" in (out / "report.html").read_text()
    kept = load_yaml((out / "config.yaml").read_text())
    assert (kept["host"], kept["device"], kept["device_name"]) == ("board-2c", None, None)
    assert board.calls >= 1
    capsys.readouterr()
    assert run_command(verify, "verify", "", [f"run={out}"], target=False) == 2  # this is another machine
    assert "device=user@host" in capsys.readouterr().err
    calls = board.calls
    assert run_command(verify, "verify", "", [f"run={out}", *options(board)], target=False) == 0
    again, = rows_of(out / "front.csv")
    assert (again["host"], again["top1_test"]) == (row["host"], row["top1_test"])
    assert board.calls == calls + 2  # one to look and score, and one to time
    assert run_command(verify, "verify", "", [f"run={out}", *options(board, "other-4c")], target=False) == 2
    assert "the search was for board-2c; this is other-4c" in capsys.readouterr().err


@pytest.mark.soak
def test_deployments_of_a_device_are_searched_by_all_workers_and_verified_there(board, tiny_table, tmp_path, capsys):
    for name in ("ort_fp32", "ort_int8"):
        tiny_table(name, 24, host_name="board-2c")
    out = tmp_path / "run"
    given = ["+target=cpu", "target.deployments=[ort_fp32,ort_int8]", *SMALL[1:], *options(board)]
    assert run_command(search, "search", "", [*given, f"out={out}"]) == 0, capsys.readouterr().err
    assert "ended" not in capsys.readouterr().err.replace("search ended: ", "").replace("nothing has ended yet", "")
    rows = rows_of(out / "front.csv")
    assert {(row["target"], row["verified"], row["host"]) for row in rows} == {
        ("ort_fp32", "true", "board-2c"), ("ort_int8", "true", "board-2c")}
    assert worker(["-q", f"run={out}"]) == 0, capsys.readouterr().err  # it cannot ask the device what it is able to
    assert load_yaml((out / "config.yaml").read_text())["target"]["deployments"] == ["ort_fp32", "ort_int8"]
    assert run_command(verify, "verify", "", [f"run={out}", *options(board)], target=False) == 0
    assert {row["verified"] for row in rows_of(out / "front.csv")} == {"true"}


@pytest.mark.soak
def test_a_device_is_calibrated_under_its_name(board, hwnas_home, capsys):
    quick = ["+target=ort_fp32", "calibration.networks=12", "calibration.minutes=60"]
    assert run_command(profile, "profile", "", [*quick, *options(board)]) == 0, capsys.readouterr().err
    path, = (hwnas_home / "latency_tables/board-2c").glob("*.json")
    table = LatencyTable.load(path)
    assert table.host["given"] == "board-2c"
    assert len(table.networks) == 12


def test_a_file_is_benchmarked_there(board, hwnas_home, tmp_path, capsys):
    given = ["+target=ort_fp32", "model=timm:mobilenetv3_small_050", "image_size=32", "batch=1,2", "seconds=3",
             f"out={tmp_path / 'b.json'}", *options(board)]
    assert run_command(benchmark, "benchmark", "", given, lists=("batch",)) == 0, capsys.readouterr().err
    saved = json.loads((tmp_path / "b.json").read_text())
    assert saved["host"]["name"] == "board-2c"
    assert [row["batch"] for row in saved["latency"]] == [1, 2]
    torn = tmp_path / "torn.onnx"
    torn.write_bytes(os.urandom(100))
    assert run_command(benchmark, "benchmark", "", ["+target=ort_fp32", f"model={torn}", *options(board)]) == 2
    assert "torn.onnx is not an ONNX file" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "why"), [
    (["device=me@board;reboot"], "device must be user@host"), (["device=-oProxyCommand=x"], "device must be user@host"),
    (["device=me@board", "device_python='a b'"], "device_python must be"),
    (["device_name=x"], "device_name goes with device=user@host"),
    (["device=me@board", "device_python=no-such"], "has no no-such")])
def test_what_names_no_device_ends_with_2_in_one_line(board, given, why, capsys):
    for main, name in ((search, "search"), (profile, "profile")):
        assert run_command(main, name, "", ["+target=ort_fp32", *given]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert why in lines[0]


def test_no_folder_says_where_to_connect_to(board: Board, tmp_path: Path) -> None:
    """A run folder of somebody else may name a device; a worker does not go there."""
    folder = RunFolder.create(tmp_path / "run")
    folder.write_config("device: me@board\ndevice_python: python3\nhost: null\nstorage: null\ndataset: {root: null}\n")
    given = {"storage": "sqlite:///x.db", "dataset": {"root": None}, "pretrained": {"folder": None}}
    read = _options(folder, {**given, "training": {"device": "cpu"}})
    assert read["training"] == {"device": "cpu"}
    assert read["device"] is None
    assert board.calls == 0


def test_images_are_sent_once_when_a_device_is_asked_how_long_it_scores(board, hwnas_home, tiny_space, tmp_path):
    folder = ModelFolder(tmp_path / "model")
    folder.path.mkdir()
    prepare_network(tiny_space.reference, FP32, folder.path).rename(folder.onnx)
    before, device = len([*board.files.glob("*")]), board.device()
    network = SimpleNamespace(fed=lambda data, **_: data)
    for _ in range(2):
        assert scoring_seconds(folder, network, digits(), FP32, device) > 0
    assert len([*board.files.glob("*")]) - before == 2  # the network, and all its images
    device.close()
