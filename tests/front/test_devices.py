"""Devices compared: ranks of the same networks, and the pairs that flip for certain."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwnas.errors import ConfigError
from hwnas.front.devices import MACS, Device, Timed, agreements, devices_figure, flips, largest_group, read_devices
from hwnas.pictures import figure_bytes
from hwnas.report import command


def device(name: str, times: list[float]) -> Device:
    return Device(name, name, {f"n{i:02}": Timed(ms, 0.001, None, float(i + 1)) for i, ms in enumerate(times)})


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


def test_what_cannot_be_compared_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="neither a run folder"):
        read_devices([tmp_path])
    for options in ([f"compare=[{tmp_path}]"], ["compare=[a,b]", "run=c"], ["compare=7"]):
        assert command(["-q", *options]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
