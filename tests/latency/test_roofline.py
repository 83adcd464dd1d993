"""The roofline: where blocks stand under the roofs, and the command."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from table_fixtures import write_table

from hwnas import roofline as command
from hwnas.cli.command import run_command
from hwnas.errors import MeasurementInvalid
from hwnas.latency.measurement import Protocol
from hwnas.latency.timing import reference_network
from hwnas.roofline import (
    COMPUTE,
    MEMORY,
    OVERHEAD,
    Bandwidths,
    cache_bytes,
    measure_bandwidths,
    measure_peak,
    place_blocks,
)
from hwnas.space.blocks.block import BlockSpec
from hwnas.system.paths import home
from hwnas.target import Target

# 20 GB/s up to 1 MiB and 5 GB/s beyond: ridges at 5 and 20 FLOP a byte in fp32, at 20 and 80 in int8
ROOFS, PEAKS = Bandwidths(20.0, 5.0, 1 << 20), {"fp32": 100.0, "int8": 400.0}
DENSE = BlockSpec("cn", 64, 64, 16, 3)
DEPTHWISE = BlockSpec("ds", 64, 8, 16, 3, se=0.25)


def ms_at(block: BlockSpec, gflops: float) -> float:
    return 2 * block.macs / gflops / 1e6


def place(*times: tuple[BlockSpec, float, float], precision: str = "fp32", batch: int = 1) -> Any:
    """Rows of blocks that take so many ms, with the standard error of each."""
    blocks, ms, std_ms = zip(*times, strict=True)
    target = Target("t", "onnxruntime", precision, batch=batch)
    return place_blocks(blocks, np.array(ms), np.array(std_ms), target, PEAKS[precision], ROOFS)


def only_point(block: BlockSpec, gflops: float, precision: str = "fp32", batch: int = 1) -> Any:
    return place((block, batch * ms_at(block, gflops), 0.0), precision=precision, batch=batch).iloc[0]


def test_a_point_stands_at_its_intensity_and_speed() -> None:
    point = only_point(DENSE, 50.0)
    assert point.gflops == pytest.approx(50.0)
    assert point.bytes_moved == 4 * (DENSE.activation_elements + DENSE.params)
    assert point.intensity == pytest.approx(2 * DENSE.macs / point.bytes_moved)
    assert point.share == pytest.approx(0.5)


def test_narrow_elements_move_fewer_bytes_and_a_batch_moves_its_weights_once() -> None:
    fp32, int8, batch = (only_point(DENSE, 50.0, *how).bytes_moved for how in (("fp32",), ("int8",), ("int8", 8)))
    assert fp32 == 4 * int8
    assert batch - int8 == 7 * DENSE.activation_elements
    assert only_point(DENSE, 50.0, batch=8).gflops == pytest.approx(50.0)
    assert only_point(DENSE, 50.0, batch=8).intensity > only_point(DENSE, 50.0).intensity


@pytest.mark.parametrize(("block", "precision", "gflops", "expected"), [
    (DENSE, "fp32", 60.0, COMPUTE), (DENSE, "fp32", 9.9, OVERHEAD), (DENSE, "int8", 60.0, COMPUTE),
    (DENSE, "int8", 30.0, OVERHEAD), (DEPTHWISE, "fp32", 30.0, MEMORY), (DEPTHWISE, "int8", 60.0, MEMORY),
    (DEPTHWISE, "fp32", 1.0, OVERHEAD)])
def test_verdicts_follow_the_ridge_and_the_share_of_the_roof(block, precision, gflops, expected) -> None:
    assert only_point(block, gflops, precision).verdict == expected


def test_a_block_too_large_for_the_cache_stands_under_the_roof_of_memory() -> None:
    large = BlockSpec("cn", 64, 64, 64, 1)
    point = only_point(large, 30.0)
    assert point.bytes_moved > 1 << 20
    assert point.ridge == pytest.approx(20.0)
    assert only_point(large, 30.0, "int8").ridge == pytest.approx(20.0)  # a quarter of the bytes fits the cache


def test_times_not_told_from_0_make_no_point() -> None:
    assert place((DENSE, 0.0, 0.0), (DEPTHWISE, 0.1, 0.11)).empty


def test_groups_are_kind_kernel_and_squeeze_and_excite() -> None:
    points = place(*((block, 0.1, 0.0) for block in (DENSE, DEPTHWISE, BlockSpec("stem", 1, 16, 32))))
    assert set(points.group) == {"cn k3", "ds k3 se", "stem"}


def test_bandwidths_are_positive_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LEAST_S", 1e-5)
    monkeypatch.setattr(command, "MEMORY_BYTES", 1 << 20)
    for threads in (1, 2):
        found = measure_bandwidths(threads)
        assert found.cache > 0 < found.memory


def test_the_size_of_a_cache_is_read_as_the_host_reports_it(tmp_path: Path) -> None:
    for index, (level, size) in enumerate([("1", "48K"), ("2", "2048K"), ("3", "?")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(level)
        (folder / "size").write_text(size)
    assert cache_bytes(tmp_path) == 2 << 20
    (tmp_path / "index1" / "size").write_text("?")
    assert cache_bytes(tmp_path) == command.CACHE_BYTES


def test_a_machine_slower_than_its_table_gives_no_peak(monkeypatch) -> None:
    monkeypatch.setattr(command, "DENSE", ((1, 8, 8, 1),))
    slow = SimpleNamespace(reference=reference_network(), quiet_ms=1e-6)
    with pytest.raises(MeasurementInvalid, match="no peak of fp32"):
        measure_peak(Target("t", "onnxruntime", "fp32"), 1, slow)


@pytest.fixture
def quick_roofs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Roofs of tiny networks and arrays, in a user folder of its own."""
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "DENSE", ((1, 32, 8, 2),))
    monkeypatch.setattr(command, "MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(command, "REPEATS", 2)
    monkeypatch.setattr(command, "LEAST_S", 1e-5)


def roofline(*overrides: str) -> int:
    return run_command(command.main, "roofline", "usage", ["-q", "seconds=10", *overrides])


def test_the_command_draws_and_stores_the_numbers(quick_roofs, capsys) -> None:
    write_table(home(), "ort_int8")
    assert roofline("+target=ort_int8", "channels=1", "classes=10", "out=one.svg") == 0
    told = json.loads(Path("one.json").read_text())
    assert told["peak"] > 0
    assert {"block", "intensity", "gflops", "share", "verdict", "ms", "std_ms"} <= set(told["blocks"][0])
    assert {block["precision"] for block in told["blocks"]} == {"int8"}
    assert "<svg" in Path("one.svg").read_text()
    assert "picture: one.svg" in capsys.readouterr().err


@pytest.mark.parametrize(("overrides", "named"), [
    (["+target=ort_int8", "channels=1", "classes=7", "target.threads=3"],
     ["hwnas profile +target=ort_int8", "classes=7", "t3"]),
    (["+target=ort_int8", "out=picture.pdf"], ["picture.pdf", ".png"]),
    (["+target=ort_int8", "against=ort_fp32"], ["against", "for each target"])])
def test_bad_input_is_one_line_and_exit_code_2(overrides, named, quick_roofs, capsys) -> None:
    assert roofline(*overrides) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note:")]
    assert all(part in line for part in named), line
