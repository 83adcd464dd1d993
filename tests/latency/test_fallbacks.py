"""Kinds of blocks in every precision: which fall back is measured, kept beside the tables, and told to a search."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hwnas.check import __main__ as command
from hwnas.cli.command import run_command
from hwnas.cli.progress import Console
from hwnas.errors import CandidateError, TableError
from hwnas.latency import fallbacks
from hwnas.latency.fallbacks import (
    FALLBACKS_TABLE,
    CheckedBlock,
    blocks_path,
    check_blocks,
    find_blocks,
    kinds_of,
    network_of,
    save_blocks,
    warning,
)
from hwnas.latency.table import TableKey
from hwnas.latency.timing import HERE
from hwnas.runtimes.runtime import load_runtime
from hwnas.search.prepare import _without_fallbacks
from hwnas.space.blocks import KINDS
from hwnas.space.search_space import SearchSpace
from hwnas.target import Host, Target

ORT = Target("ort_int8", "onnxruntime", "int8")
ROW = CheckedBlock("ds", False, "relu", "ds/…", "int8", 0.1, 0.0, 0.0, "")


def quiet(share: float, note: str = "") -> None:
    """Progress that nobody hears."""


@pytest.mark.parametrize("name", ["mnasnet_small", "convnext_small", "fused"])
def test_every_kind_of_a_space_has_a_network(name: str) -> None:
    space = SearchSpace.load(name, channels=1, classes=10, image_size=32)
    kinds = kinds_of(space)
    words = {word for kind in KINDS.values() for word in kind.words}
    assert {block.kind for block in kinds} <= words
    assert len({(block.kind, block.se > 0, block.activation) for block in kinds}) == len(kinds)
    for block in kinds:
        three = network_of(block, 1, 10).staged_blocks()[1]
        assert [(each.kind, each.se > 0, each.activation, each.stride) for each in three] == [
            (block.kind, block.se > 0, block.activation, 1)] * 3


def test_a_kind_that_another_machine_refuses_is_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent, and compiled when it is profiled."""
    def refuses(*_: Any) -> Any:
        raise CandidateError("the device has no such operator")

    sent = SimpleNamespace(profile=refuses)
    monkeypatch.setattr(fallbacks, "inspected", lambda *_: sent)
    monkeypatch.setattr(fallbacks, "prepare_network", lambda *_: Path("sent.onnx"))
    space = SearchSpace.load("mnasnet_small", channels=1, classes=10, image_size=16)
    rows = check_blocks(space, ORT, load_runtime("onnxruntime"), 3, quiet, ["fp32"])
    assert len(rows) == len(kinds_of(space))
    assert all(row.refused == "the device has no such operator" and row.costly for row in rows)


def test_what_counts_as_fallback() -> None:
    assert not ROW.in_fallback
    assert not replace(ROW, fallback_share=0.01).in_fallback
    assert replace(ROW, fallback_share=0.06).in_fallback
    assert replace(ROW, weighted_falls=True).in_fallback
    assert replace(ROW, refused="no operator").in_fallback
    rows = [ROW, replace(ROW, kind="ir", se=True, fallback_share=0.5, falls="Swish in fp32"),
            replace(ROW, precision="fp32", fallback_share=1.0)]
    assert warning(rows, ORT) == ("ort_int8 runs 1 of 2 kinds of blocks in fallback: ir with squeeze-and-excite, relu: "
                                  "Swish in fp32, 50% of its time")
    assert warning([ROW], ORT) == ""


def test_they_are_kept_beside_the_tables_and_told_to_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    host, key = Host.detect(), TableKey.of(ORT, (32,), 1, 10)
    space = SearchSpace.load("mnasnet_small", channels=1, classes=10)
    deployment = SimpleNamespace(target=ORT, at_hand=True, device=HERE)
    options = SimpleNamespace(fallbacks=True, device=None)
    plan: Any = SimpleNamespace(deployment=deployment, space=space, options=options, others=())
    table: Any = SimpleNamespace(host_name=host.name, key=key, runtime_version="onnxruntime 1")
    model: Any = None  # asked of traced networks only

    def told() -> str:
        _without_fallbacks(plan, table, model, "sqlite:///none/study.db", Console())
        return capsys.readouterr().err

    assert told() == ""
    rows = [ROW, replace(ROW, kind="ir", fallback_share=0.3, falls="HardSwish in fp32")]
    path = save_blocks(rows, key, host, "onnxruntime 1", space.name)
    assert path == blocks_path(tmp_path / "latency_tables", host.name, key, space.name)
    assert find_blocks(host.name, key, space.name, "onnxruntime 1") == rows
    assert find_blocks(host.name, key, space.name, "onnxruntime 2") is None
    assert re.search(r"note: ort_int8 runs 1 of 2 .*ir, relu: HardSwish in fp32, 30%", told())
    save_blocks([ROW], key, host, "onnxruntime 1", space.name)
    assert told() == ""
    for torn in ("{", '{"format": "hwnas-block-check", "version": 1}',
                 path.read_text().replace('"kind"', '"sort"')):
        path.write_text(torn)
        with pytest.raises(TableError, match=re.escape(path.name)):
            find_blocks(host.name, key, space.name, "onnxruntime 1")


def test_the_command_finds_layer_norms_and_activations_that_stay_in_floating_point(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    arguments = ["-q", "+target=ort_int8", "space=convnext_small", "repeats=2", "image_size=16",
                 f"out={tmp_path / 'b.csv'}"]
    assert run_command(command.main, "check", command.USAGE, arguments) == 0
    printed = capsys.readouterr().out
    assert "against fp32" in printed
    assert "kinds of blocks in fallback: " in printed
    assert (tmp_path / "b.csv").read_text().startswith("kind,se,activation,block,precision,ms,")
    kept, = (tmp_path / "latency_tables").rglob("*convnext_small.json")
    rows = [CheckedBlock(**row) for row in FALLBACKS_TABLE.read(kept)["blocks"]]
    assert {row.precision for row in rows} == {"int8", "fp32"}
    int8 = {(row.kind, row.activation): row for row in rows if row.precision == "int8"}
    normed, folded = (next(name for name in int8 if name[1] == "relu" and ("LayerNormalization" in int8[name].falls)
                           is normal) for normal in (True, False))
    assert int8[normed].fallback_share > 0
    assert not int8[folded].in_fallback
    assert "Gelu in fp32" in int8[folded[0], "gelu"].falls
    assert not any(row.falls for row in rows if row.precision == "fp32")
    assert all(row.ms and row.ms > 0 and 0 <= row.inserted_share <= 1 for row in rows)
    for wrong in ("space=absent", "quantize=true"):
        assert run_command(command.main, "check", command.USAGE, [*arguments, wrong]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
