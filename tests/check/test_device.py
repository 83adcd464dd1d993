"""The check of a network on another machine: what that one tells of its nodes is judged here as if it ran here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from device_fixtures import NEEDED, ONNX, Board

from hwnas.check import __main__ as command
from hwnas.check.report import CHECK
from hwnas.cli.command import run_command
from hwnas.latency.timing import prepare_network
from hwnas.space.architecture import Architecture
from hwnas.target import Target

ORT = Target("ort_int8", "onnxruntime", "int8")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with what ONNX Runtime leaves in fp32."""
    network = Architecture.parse("stem8s2 ir_r1_k3_s1_e3_c8_se0.25 head16 hard_swish@16", 3, 4)
    return prepare_network(network, ORT, tmp_path_factory.mktemp("file"))


def check_line(*given: str) -> int:
    return run_command(command.main, "check", command.USAGE, ["-q", "+target=ort_int8", "repeats=2", *given])


def there(board: Board) -> list[str]:
    return ["device=me@board", f"device_python={board.python}", "device_name=board-2c"]


def test_a_network_is_looked_at_there_as_here(board: Board, file: Path, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    told = {}
    for name, given in (("here", []), ("there", there(board.bare(*NEEDED, *ONNX, "onnxruntime")))):
        assert check_line(f"model={file}", f"out={tmp_path / name}.json", *given) == 0, capsys.readouterr().err
        told[name] = CHECK.read(tmp_path / f"{name}.json")
        assert "falls back: " in capsys.readouterr().out
    assert told["there"]["host"]["name"] == "board-2c" != told["here"]["host"]["name"]
    differ = ("ms", "share", "name")  # ONNX Runtime numbers what it inserts
    seen = [[{key: node[key] for key in node if key not in differ} for node in told[name]["nodes"]] for name in told]
    assert seen[0] == seen[1]
    assert any(node["role"] == "HardSwish" and node["findings"] == ["another precision"] for node in seen[1])
    for key in ("execution", "operators", "input", "runtime"):
        assert told["here"][key] == told["there"][key]


@pytest.mark.soak
def test_blocks_are_kept_under_the_devices_name(board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    given = ["space=convnext_small", "image_size=16", "channels=1", "classes=3", *there(board)]
    assert check_line(*given) == 0, capsys.readouterr().err
    kept, = (tmp_path / "home/latency_tables/board-2c/blocks").glob("*convnext_small.json")
    assert json.loads(kept.read_text())["host"]["name"] == "board-2c"
    assert "LayerNormalization in fp32" in capsys.readouterr().out


def test_a_network_that_is_refused_there_is_one_line(board: Board, file: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    given = ["+target=ort_fp32", f"model={file}", *there(board)]
    assert run_command(command.main, "check", command.USAGE, ["-q", *given]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert "is quantised" in said
    assert str(file.name) in said
