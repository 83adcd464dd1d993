"""Devices compared: ranks of the same networks, and the pairs that flip for certain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deployment_fixtures import tiny_architecture
from table_fixtures import write_table

from experiments.devices.run import MACS, Device, Timed, agreements, compare, devices_figure, flips, largest_group
from hwnas.errors import ConfigError
from hwnas.pictures import figure_bytes


def device(name: str, times: list[float]) -> Device:
    network = tiny_architecture()
    return Device(name, {f"n{i:02}": Timed(ms, 0.001, network, float(i + 1)) for i, ms in enumerate(times)})


def test_ranks_and_flips_are_those_of_the_times() -> None:
    rising = [float(ms) for ms in range(1, 11)]
    turned = [*rising[:8], rising[9], rising[8]]
    rows = agreements([device("a", rising), device("b", turned)])
    taus = {(row.first, row.second): row.tau for row in rows}
    assert taus == {("a", "b"): pytest.approx(43 / 45), ("a", MACS): 1.0, ("b", MACS): pytest.approx(43 / 45)}
    assert next(row.flipped for row in rows if row.second == "b") == pytest.approx(1 / 45)
    (flip,) = flips([device("a", rising), device("b", turned)])
    assert (flip.quick, flip.slow) == ("n08", "n09")
    assert flip.factor_first == pytest.approx(10 / 9)
    assert flip.factor_second == pytest.approx(9 / 10)
    devices = [device("a", rising), device("b", turned)]
    assert largest_group(devices)[1] == sorted(devices[0].networks)
    assert figure_bytes(devices_figure(devices, rows), "png").startswith(b"\x89PNG")


@pytest.mark.soak
def test_tables_of_two_targets_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    out = tmp_path / "d.png"
    tables = [write_table(tmp_path / "home", target, 16) for target in ("ort_fp32", "xeon_fp32")]
    compare(tables, out)
    said = json.loads(out.with_suffix(".json").read_text())
    assert [device["networks"] for device in said["devices"]] == [24, 24]
    assert out.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="two are needed"):
        compare(tables[:1], tmp_path / "other.png")
