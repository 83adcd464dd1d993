"""The roofline: where blocks stand under the roofs, what the two precisions are compared by, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwnas import roofline as command
from hwnas import roofline as making
from hwnas.cli.command import run_command
from hwnas.errors import MeasurementInvalid, UnknownName
from hwnas.latency import roofs as measuring
from hwnas.latency.roofs import Bandwidth, Dense, Peak, Roofs, cache_bytes, measured_bandwidths, measured_peak
from hwnas.latency.table import LatencyTable, Measurement, Protocol, TableKey, TimedNetwork, Turn, table_path
from hwnas.roofline import (
    COMPUTE,
    MEMORY,
    OVERHEAD,
    BlockTime,
    Roofline,
    blocks_of,
    bytes_moved,
    describe,
    group_of,
    groups_of,
    inferred_times,
    points_of,
    profiled_times,
    ratios_of,
    roofline_figure,
)
from hwnas.runtimes.runtime import NullRuntime, load_runtime
from hwnas.space.architecture import Architecture
from hwnas.space.blocks.block import BlockSpec
from hwnas.space.search_space import SearchSpace
from hwnas.system.paths import home
from hwnas.target import Host, Target

# peaks 100 and 400 GFLOP/s, 20 GB/s up to 1 MiB and 5 GB/s beyond: ridges at 5 and 20, 20 and 80 FLOP a byte
ROOFS = Roofs((Peak("fp32", 100.0, "made up", "null 1", {}), Peak("int8", 400.0, "made up", "null 1", {})),
              Bandwidth("L2", 20.0, "copy of 256 KiB", 1 << 18, 1 << 20),
              Bandwidth("memory", 5.0, "copy of 1 MiB", 1 << 20, None), 1 << 20, None)
DENSE = BlockSpec("cn", 64, 64, 16, 3)
DEPTHWISE = BlockSpec("ds", 64, 8, 16, 3, se=0.25)


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return SearchSpace.load("mnasnet_small", channels=1, classes=10)


def network(one: Architecture, block_ms: tuple[float, ...] = (), space: str = "mnasnet_small") -> TimedNetwork:
    ms = sum(block_ms) or 1.0
    turns = tuple(Turn((ms * (1 + i / 1000),), 0.1) for i in range(8))
    return TimedNetwork(space, one, Measurement(turns, 0.1, Protocol()), block_ms)


def sample(space: SearchSpace, n: int) -> list[Architecture]:
    found = [space.decode(space.to_params(row)) for row in space.sample(np.random.default_rng(0), 2 * n)]
    return list({one.id: one for one in found}.values())[:n]


def ms_at(block: BlockSpec, gflops: float) -> float:
    return 2 * block.macs / gflops / 1e6


def only_point(block: BlockSpec, gflops: float, precision: str = "fp32", batch: int = 1) -> Any:
    [point] = points_of({block: BlockTime(batch * ms_at(block, gflops), 0.0)}, precision, ROOFS, batch)
    return point


def test_a_point_stands_at_its_intensity_and_speed() -> None:
    point = only_point(DENSE, 50.0)
    assert point.gflops == pytest.approx(50.0)
    assert point.bytes_moved == 4 * (DENSE.activation_elements + DENSE.params)
    assert point.intensity == pytest.approx(2 * DENSE.macs / point.bytes_moved)
    assert point.share == pytest.approx(0.5)


def test_narrow_elements_move_fewer_bytes_and_a_batch_moves_its_weights_once() -> None:
    assert bytes_moved(DENSE, "fp32") == 2 * bytes_moved(DENSE, "bf16") == 4 * bytes_moved(DENSE, "int8")
    assert bytes_moved(DENSE, "int8", 8) - bytes_moved(DENSE, "int8") == 7 * DENSE.activation_elements
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
    assert (point.roof, point.ridge) == ("memory", pytest.approx(20.0))
    assert only_point(large, 30.0, "int8").roof == "L2"  # a quarter of the bytes fits


def test_times_not_told_from_0_make_no_point() -> None:
    times = {DENSE: BlockTime(0.0, 0.0), DEPTHWISE: BlockTime(0.1, 0.11)}
    assert points_of(times, "fp32", ROOFS) == []
    assert len(points_of({DENSE: BlockTime(0.1, float("nan"))}, "fp32", ROOFS)) == 1


def test_profiled_times_are_medians_over_networks_of_the_space_with_a_pooled_error(space) -> None:
    one, *others = sample(space, 12)
    blocks = one.blocks()
    networks = [network(one, tuple(scale * (i + 1) for i in range(len(blocks)))) for scale in (0.9, 1.0, 1.3)]
    foreign = network(one, (99.0,) * len(blocks), space="elsewhere")
    unlike = next(other for other in others if set(other.blocks()) - set(blocks))
    times = profiled_times([*networks, foreign, network(unlike)], space.name)
    alone = [block for block in blocks if blocks.count(block) == 1]
    assert {block: times[block].ms for block in alone} == {block: blocks.index(block) + 1 for block in alone}
    assert all(times[block].n == 3 for block in alone)
    assert times[alone[0]].std_ms / times[alone[0]].ms == pytest.approx(times[alone[-1]].std_ms / times[alone[-1]].ms)
    assert 0.05 < times[alone[0]].std_ms / times[alone[0]].ms < 0.5
    assert set(times) == set(blocks)  # networks that were not profiled tell nothing
    assert set(blocks) < set(blocks_of([*networks, network(unlike)], space.name))


def test_blocks_met_once_have_no_error_and_are_never_called_slower(space) -> None:
    one = next(one for one in sample(space, 12) if len(set(one.blocks())) == len(one.blocks()))
    slow, quick = (profiled_times([network(one, (ms,) * len(one.blocks()))], space.name) for ms in (2.0, 1.0))
    assert all(np.isnan(time.std_ms) for time in slow.values())
    ratios = ratios_of(points_of(slow, "int8", ROOFS), points_of(quick, "fp32", ROOFS))
    assert {ratio.ratio for ratio in ratios} == {2.0}
    assert not any(ratio.slower for ratio in ratios)


def test_inferred_times_are_the_models_entries() -> None:
    class Model:
        def block_ms(self, blocks: Any) -> tuple[np.ndarray, np.ndarray]:
            return np.arange(1.0, len(blocks) + 1), np.full(len(blocks), 0.1)

    assert inferred_times(Model(), [DENSE, DEPTHWISE]) == {DENSE: BlockTime(1.0, 0.1), DEPTHWISE: BlockTime(2.0, 0.1)}


def test_ratios_compare_the_same_blocks_and_heed_the_errors() -> None:
    third = BlockSpec("cn", 8, 8, 16, 3)
    mine = points_of({DENSE: BlockTime(1.3, 0.13), DEPTHWISE: BlockTime(1.3, 0.01), third: BlockTime(1, 0)}, "int8",
                     ROOFS)
    other = points_of({DENSE: BlockTime(1.0, 0.15), DEPTHWISE: BlockTime(1.0, 0.01)}, "fp32", ROOFS)
    found = {ratio.block: ratio for ratio in ratios_of(mine, other)}
    assert set(found) == {DENSE, DEPTHWISE}
    assert found[DENSE].ratio == pytest.approx(1.3)
    assert (found[DENSE].slower, found[DEPTHWISE].slower) == (False, True)


def test_groups_are_kind_kernel_and_squeeze_and_excite() -> None:
    assert [group_of(block) for block in (DENSE, DEPTHWISE, BlockSpec("stem", 1, 16, 32))] == [
        "cn k3", "ds k3 se", "stem"]
    wide = BlockSpec("cn", 128, 128, 16, 3)
    points = points_of({DEPTHWISE: BlockTime(ms_at(DEPTHWISE, 1.0), 0), DENSE: BlockTime(ms_at(DENSE, 40.0), 0),
                        wide: BlockTime(ms_at(wide, 60.0), 0)}, "fp32", ROOFS)
    dense, depthwise = groups_of(points, ratios_of(points[:1], points[:1]))
    assert (dense.name, dense.n, dense.gflops, dense.verdict) == ("cn k3", 2, pytest.approx(50.0), COMPUTE)
    assert (dense.ratio, depthwise.ratio) == (None, 1.0)
    assert (dense.left_of_ridge, depthwise.left_of_ridge, depthwise.verdict) == (0.0, 1.0, OVERHEAD)


def some_roofline(space: SearchSpace, n: int = 12, **changes: Any) -> Roofline:
    blocks = blocks_of([network(one) for one in sample(space, n)], space.name)
    quick = {block: BlockTime(ms_at(block, 40.0) + 0.001, 1e-5) for block in blocks}
    slow = {block: BlockTime(time.ms * (1.5 if block.se else 0.5), 1e-5) for block, time in quick.items()}
    mine, other = points_of(slow, "int8", ROOFS), points_of(quick, "fp32", ROOFS)
    values = {"others": other, "ratios": ratios_of(mine, other), **changes}
    names = ("here_int8", "here_fp32" if values["others"] else "")
    return Roofline(space.name, names, ("null 1", "null 1"), "inferred", {"name": "here"}, "2026-01-01T00:00:00+00:00",
                    ROOFS, mine, **values)


def test_the_words_name_the_kinds_that_do_not_gain(space) -> None:
    found = some_roofline(space)
    last = describe(found)[-1]
    slower = [one.name for one in found.groups if one.ratio and one.ratio > 1]
    assert slower
    assert all(("se" in name) == (name in slower) for name in (one.name for one in found.groups) if name[0] in "id")
    assert all(f"{name} (1.50)" in last for name in slower)
    assert "cn k3 (" not in last
    assert "above their roof" not in " ".join(describe(some_roofline(space, others=(), ratios=())))


def test_the_file_holds_everything_as_plain_json(space) -> None:
    found = some_roofline(space)
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (data["format"], data["version"]) == ("hwnas-roofline", 1)
    assert data["targets"] == ["here_int8", "here_fp32"]
    assert len(data["points"]) == 2 * len(found.points) == 2 * len(data["ratios"])
    assert data["roofs"]["memory"]["how"] == "copy of 1 MiB"
    assert data["roofs"]["cache"]["gb_per_s"] == 20.0
    assert {"block", "intensity", "gflops", "share", "verdict", "ms", "std_ms"} <= set(data["points"][0])
    assert set(data["groups"]) == {"here_int8", "here_fp32"}


@pytest.mark.parametrize("n", [1, 12])
def test_the_picture_draws_every_point_and_every_roof(space, n) -> None:
    found = some_roofline(space, n)
    left, right = roofline_figure(found).axes
    drawn = sum(len(item.get_offsets()) for item in left.collections)
    assert drawn == len(found.points) + len(found.others) + sum(ratio.ratio > 1 for ratio in found.ratios)
    words = " ".join(item.get_text() for item in left.texts)
    for part in ("fp32 peak 100 GFLOP/s", "int8 peak 400 GOP/s", "L2  20 GB/s", "memory  5 GB/s (copy of 1 MiB)"):
        assert part in words
    low, high = left.get_xlim()
    assert all(low < point.intensity < high for point in (*found.points, *found.others))
    assert len(right.get_yticks()) == len(found.groups)
    assert sum(len(item.get_offsets()) for item in right.collections if len(item.get_offsets())) >= len(found.ratios)


def test_one_precision_alone_is_one_panel(space) -> None:
    [axes] = roofline_figure(some_roofline(space, others=(), ratios=())).axes
    assert not any("slower" in text.get_text() for text in axes.get_legend().get_texts())


def test_bandwidths_are_positive_and_say_how(monkeypatch) -> None:
    monkeypatch.setattr(measuring, "LEAST_S", 1e-5)
    for threads in (1, 2):
        cache, memory = measured_bandwidths(threads, memory_bytes=1 << 20, repeats=2)
        assert cache.gb_per_s > 0 < memory.gb_per_s
        assert (cache.level, memory.level) == ("L2", "memory")
        assert ("2 threads" in memory.how) == (threads == 2)
    assert memory.array_bytes == 1 << 19
    assert memory.how.startswith("copy of 512 KiB")
    assert cache.reach_bytes == 4 * cache.array_bytes
    assert memory.reach_bytes is None


def test_cache_sizes_are_read_as_the_host_reports_them(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate([("1", "Instruction", "64K"), ("1", "Data", "48K"),
                                                 ("2", "Unified", "2M"), ("3", "Unified", "?")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(value)
    assert [cache_bytes(level, tmp_path) for level in (1, 2, 3, 4)] == [48 << 10, 2 << 20, None, None]


def test_the_peak_is_the_best_network_by_its_macs() -> None:
    small, large = Dense(1, 8, 8, 2), Dense(3, 16, 8, 2)
    assert large.macs == 2 * 9 * 16 * 16 * 64
    peak = measured_peak(NullRuntime(ms=0.5), Target("t", "null", "fp32"), [small, large], seconds=10)
    assert peak.how == str(large)
    assert set(peak.tried) == {str(small), str(large)}
    assert 0 < peak.gflops <= 2 * large.macs / 0.5e6  # no call is shorter than programmed


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_real_runtime_has_a_peak(precision) -> None:
    peak = measured_peak(load_runtime("onnxruntime"), Target("t", "onnxruntime", precision), [Dense(3, 16, 8, 2)],
                         seconds=10)
    assert peak.gflops > 0
    assert peak.runtime.startswith("onnxruntime")


def test_a_machine_slower_than_its_table_gives_no_peak(space) -> None:
    with pytest.raises(MeasurementInvalid, match="no peak of fp32"):
        measured_peak(load_runtime("onnxruntime"), Target("t", "onnxruntime", "fp32"), [Dense(1, 8, 8, 1)],
                      seconds=1, reference=space.reference, quiet_ms=1e-6)


def stored_table(space: SearchSpace, precision: str, factor: float) -> LatencyTable:
    """A table of this host for ONNX Runtime, of made-up block times and without a quiet time to be held to."""
    target = Target("t", "onnxruntime", precision)
    rng = np.random.default_rng(0)
    networks = [network(one, tuple(factor * (ms_at(block, 40.0) + 0.001) * float(rng.uniform(0.9, 1.1))
                                   for block in one.blocks())) for one in sample(space, 14)]
    key = TableKey.of(target, space.image_sizes, space.channels, space.classes)
    table = LatencyTable(key, Host.detect().to_dict(), load_runtime("onnxruntime").version(), "2026-01-01", Protocol(),
                         space.reference, 0.0, 0.001, networks, {})
    table.save(table_path(home() / "latency_tables", Host.detect().name, key))
    return table


@pytest.fixture
def quick_roofs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Roofs of tiny networks and arrays, in a user folder of its own."""
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measuring, "DENSE", (Dense(1, 32, 8, 2),))
    monkeypatch.setattr(measuring, "MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(measuring, "REPEATS", 2)
    monkeypatch.setattr(measuring, "LEAST_S", 1e-5)


def roofline(*overrides: str) -> int:
    return run_command(command.main, "roofline", "usage", ["-q", "times=profiled", "seconds=10", *overrides])


def test_the_command_draws_both_precisions_and_stores_the_numbers(space, quick_roofs, capsys) -> None:
    stored_table(space, "int8", 0.5)
    stored_table(space, "fp32", 1.0)
    assert roofline("+target=ort_int8", "channels=1", "classes=10") == 0
    data = json.loads(Path("runs/roofline.json").read_text())
    assert data["targets"] == ["ort_int8", "ort_fp32"]
    assert Path("runs/roofline.png").read_bytes().startswith(b"\x89PNG")
    assert {one["precision"] for one in data["roofs"]["peaks"]} == {"int8", "fp32"}
    assert 0.3 < np.median([one["ratio"] for one in data["ratios"]]) < 0.7
    said = capsys.readouterr().err
    assert "no gain in the median: no kind of block" in said
    assert "runs/roofline.png" in said


def test_without_the_other_table_one_precision_is_drawn_and_the_command_said(space, quick_roofs, capsys) -> None:
    stored_table(space, "int8", 1.0)
    assert roofline("+target=ort_int8", "channels=1", "classes=10", "out=one.svg") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert said == ["ort_fp32 is left out: no table yet. Measure it: python -m hwnas.profile +target=ort_fp32 "
                    "space=mnasnet_small channels=1 classes=10"]
    assert json.loads(Path("one.json").read_text())["ratios"] == []
    assert "<svg" in Path("one.svg").read_text()


@pytest.mark.parametrize(("overrides", "named"), [
    (["+target=ort_int8", "channels=1", "classes=7", "target.threads=3"],
     ["python -m hwnas.profile +target=ort_int8", "classes=7", "target.threads=3"]),
    (["+target=ort_int8", "out=picture.pdf"], ["picture.pdf", ".png"]),
    (["+target=ort_int8", "times=guessed"], ["guessed", "profiled"]),
    (["+target=ort_int8", "against=ort_fp23"], ["ort_fp23", "Did you mean ort_fp32"]),
    (["+target=xeon_int8", "against=epyc_int8"], ["epyc_int8", "itself"]),
    (["+target=ort_int8", "seconds=0"], ["seconds", "0"])])
def test_bad_input_is_one_line_and_exit_code_2(overrides, named, quick_roofs, capsys) -> None:
    assert roofline(*overrides) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note:")]
    assert all(part in line for part in named), line


def test_the_other_target_is_the_same_runtimes_fp32_with_the_same_threads() -> None:
    found = making.against_of(None, Target("x", "openvino", "int8", threads=2, vendor="amd"))
    assert found is not None
    assert (found.name, found.precision, found.threads) == ("epyc_fp32", "fp32", 2)
    assert making.against_of(None, Target("x", "openvino", "fp32")) is None
    with pytest.raises(UnknownName):
        making.named_target("nothing")
