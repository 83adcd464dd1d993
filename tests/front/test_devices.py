"""Devices compared: ranks of the same networks, and the pairs that flip for certain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from search_fixtures import rows_of
from table_fixtures import write_table

from hwnas.cli.command import run_command
from hwnas.errors import ConfigError
from hwnas.front.devices import MACS, Device, Timed, agreements, devices_figure, flips, largest_group, read_devices
from hwnas.latency.table import LatencyTable
from hwnas.pictures import figure_bytes
from hwnas.report import command
from hwnas.search.__main__ import main as search


def device(name: str, times: list[float]) -> Device:
    return Device.of(name, name, {f"n{i:02}": Timed(ms, 0.001, None, float(i + 1)) for i, ms in enumerate(times)})


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


SMALL = ["dataset=digits", "dataset.image_size=16", "n_trials=1", "workers=1", "proxy.epochs=1", "proxy.min_steps=2",
         "proxy.train_images=256", "finalists.k=1", "finalists.recipe.max_steps=4", "baselines=[]",
         "controls=0", "verification.seconds=60"]
TARGETS = ("ort_fp32", "xeon_fp32")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, any_machine: None) -> tuple[Path, list[Path]]:
    """The user's folder, and the runs of two targets; their tables hold the same networks."""
    home, folders = tmp_path_factory.mktemp("home"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWNAS_HOME", str(home))
        for target in TARGETS:
            write_table(home, target, 16)
            folders.append(tmp_path_factory.mktemp("runs") / target)
            assert run_command(search, "search", "", [f"+target={target}", *SMALL, f"out={folders[-1]}"]) == 0
    return home, folders


@pytest.fixture
def home(runs: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HWNAS_HOME", str(runs[0]))
    return runs[0]


def compare(folders: list[Path], out: Path) -> int:
    return command(["-q", f"compare=[{','.join(map(str, folders))}]", f"out={out}"])


def test_runs_are_compared_by_their_fronts_and_the_tables_that_they_asked(
        runs: tuple[Path, list[Path]], home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "d.png"
    assert compare(runs[1], out) == 0, capsys.readouterr().err
    said = json.loads(out.with_suffix(".json").read_text())
    tables = [LatencyTable.load(path) for path in home.rglob("latency_tables/*/*.json")]
    for device, run in zip(said["devices"], runs[1], strict=True):
        verified = {row["id"] for row in rows_of(run / "front.csv") if row["verified"] == "true"}
        (table,) = [table for table in tables if str(table.path) in device["sources"]]
        assert device["sources"] == {str(table.path): len(table.networks), str(run): len(verified)}
        assert verified
        assert device["networks"] == len(verified | {network.architecture.id for network in table.networks})
    names = [device["name"] for device in said["devices"]]
    between, = (row for row in rows_of(out.with_suffix(".csv")) if [row["first"], row["second"]] == names)
    assert int(between["n"]) >= len(tables[0].networks)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_comparison_replaces_its_own_files_and_no_stranger_s(
        runs: tuple[Path, list[Path]], home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "d.png"
    for _ in range(2):
        assert compare(runs[1], out) == 0, capsys.readouterr().err
    for suffix in (".png", ".csv", ".json"):
        own = out.with_suffix(suffix).read_bytes()
        out.with_suffix(suffix).write_text("first,second,n\n1,2,3\n")
        assert compare(runs[1], out) == 2
        assert f"d{suffix}: hwnas did not write this file" in capsys.readouterr().err
        assert out.with_suffix(suffix).read_text() == "first,second,n\n1,2,3\n"
        out.with_suffix(suffix).write_bytes(own)
    assert compare(runs[1], tmp_path / "d.svg") == 2
    assert "out must be a .png file" in capsys.readouterr().err


def test_runs_without_their_tables_are_told_what_is_missing(
        runs: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    assert compare(runs[1], tmp_path / "d.png") == 2
    said, = capsys.readouterr().err.splitlines()
    assert "have 8 networks in common" in said
    assert "give tables" in said
    assert compare(runs[1][:1] * 2, tmp_path / "d.png") == 2
    said, = capsys.readouterr().err.splitlines()
    assert "alone in" in said
    assert not [*tmp_path.glob("d.*")]


def test_a_table_of_another_runtime_version_is_not_the_run_s(
        runs: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    table = LatencyTable.load(write_table(tmp_path, TARGETS[0], 16))
    devices = {device.name: device for device in read_devices(runs[1])}
    (mine,) = [device for device in devices.values() if str(runs[1][0]) in device.sources]
    assert str(table.path) in mine.sources
    table.runtime_version = "onnxruntime 0.1"
    table.save(table.path)
    devices = {device.name: device for device in read_devices(runs[1])}
    assert [*devices[mine.name].sources] == [str(runs[1][0])]
