"""A search for LiteRT on another machine, over OpenSSH: a Python there with LiteRT and what is needed alone."""

from __future__ import annotations

import json

import pytest
from device_fixtures import NEEDED, Board
from search_fixtures import rows_of

pytest.importorskip("ai_edge_litert")

from hwnas.cli.command import run_command
from hwnas.search.__main__ import main
from hwnas.target import Host

pytestmark = pytest.mark.usefixtures("any_machine", "few_images")


@pytest.mark.soak  # short forms: test_edge.py, and latency/test_device.py for what runs there
def test_a_front_is_searched_here_and_verified_there(sshd, tiny_table, tmp_path, capsys):
    (tmp_path / "board").mkdir()
    python = Board(tmp_path / "board").bare(*NEEDED, "ai_edge_litert", "flatbuffers").python
    tiny_table("edge_int8", 16, host_name="loopback-2c")
    out = tmp_path / "run"
    given = ["+target=edge_int8", "dataset=digits", "dataset.image_size=16", "n_trials=1", "workers=1",
             "proxy.epochs=1", "proxy.min_steps=2", "proxy.train_images=256", "finalists.k=1", "controls=0",
             "finalists.recipe.max_steps=8", "baselines=[]", "verification.seconds=5", "space=mnasnet_small",
             f"device={sshd.name}", f"device_python={python}", "device_name=loopback-2c", f"out={out}"]
    assert run_command(main, "search", "", given) == 0, capsys.readouterr().err
    row, = rows_of(out / "front.csv")
    assert (row["verified"], row["host"], row["precision"]) == ("true", "loopback-2c", "int8")
    environment = json.loads((out / "environment.json").read_text())
    assert environment["runtime"].startswith("litert ")
    assert environment["verified_from"] == Host.detect().name
    sent = {path.suffix for path in (sshd.folder / ".cache/hwnas-agent/files").iterdir()}
    assert ".tflite" in sent
    assert ".onnx" not in sent
