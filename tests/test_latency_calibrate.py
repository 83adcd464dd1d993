"""Calibration, for real but small: what is stored, what a second space and a second call reuse."""

from __future__ import annotations

import numpy as np
import pytest

from hwnas.command import run_command
from hwnas.latency.calibrate import CalibrationOptions, block_names, plan_networks
from hwnas.latency.table import LatencyTable
from hwnas.profile import main
from hwnas.space import SearchSpace

QUICK = ["-q", "calibration.networks=12", "calibration.profiles=3", "calibration.seconds=25"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory):
    """A user folder of its own for this module."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("HWNAS_HOME", str(folder))
        yield folder


def profile(*overrides: str) -> int:
    return run_command(main, "profile", "usage", [*QUICK, *overrides])


@pytest.mark.parametrize("target", ["ort_fp32", "ort_int8", "epyc_fp32"])
def test_a_table_holds_whole_networks_and_blocks_that_add_up_to_them(home, target):
    assert profile(f"+target={target}") == 0
    runtime, precision = ("onnxruntime", target[4:]) if target.startswith("ort") else ("openvino", "fp32")
    table = LatencyTable.load(next(home.rglob(f"{runtime}-{precision}-*.json")))
    assert len(table.networks) == 12
    profiled = [one for one in table.networks if one.block_ms]
    assert len(profiled) >= 3
    for one in profiled:
        assert sum(one.block_ms) + one.other_ms == pytest.approx(one.measurement.latency_ms, rel=0.01)
        assert one.other_ms < 0.5 * one.measurement.latency_ms
    assert table.error["mnasnet_small"]["n"] == 12
    assert 0 < table.overhead_ms < 0.1


def test_a_second_call_adds_and_never_times_a_network_twice(home, capsys):
    assert profile("+target=ort_fp32", "calibration.seed=99") == 0
    table = LatencyTable.load(next(home.rglob("onnxruntime-fp32-*.json")))
    names = [one.architecture.id for one in table.networks]
    assert len(names) == len(set(names)) > 12


def test_a_precision_that_the_runtime_lacks_is_refused_before_anything_is_measured(home, capsys):
    assert profile("+target=ort_fp32", "target.precision=bf16") == 2
    error = capsys.readouterr().err
    assert "bf16" in error
    assert "fp32, int8" in error
    assert not list(home.rglob("onnxruntime-bf16-*.json"))


def test_the_plan_is_seeded_distinct_and_spans_the_space():
    space = SearchSpace.load("mnasnet_small", channels=1, classes=10)
    plan = plan_networks(space, CalibrationOptions(networks=40, seed=5))
    assert plan == plan_networks(space, CalibrationOptions(networks=40, seed=5))
    assert plan != plan_networks(space, CalibrationOptions(networks=40, seed=6))
    assert len({one.id for one in plan}) == 40
    assert {one.id for one in space.known.values()} <= {one.id for one in plan}
    macs = np.array([one.macs for one in plan])
    assert macs.max() > 8 * macs.min()


def test_block_names_follow_the_blocks():
    one = SearchSpace.load("nas_bench_macro", channels=3, classes=10).reference
    assert len(block_names(one)) == len(one.blocks())
