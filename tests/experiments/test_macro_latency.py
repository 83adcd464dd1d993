"""NAS-Bench-Macro with latencies of a host: what digits stand for, what is measured, what is written, resumption."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from search_fixtures import rows_of, write_rows
from table_fixtures import MadeUpTimer, made_up_ms, table_of

import hwnas.latency.timing
import hwnas.pictures
from hwnas.errors import ConfigError, DataError
from hwnas.latency.measurement import Measurement, Protocol, Turn
from hwnas.latency.model import LatencyModel
from hwnas.latency.table import LatencyTable, table_path
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.stats import non_dominated
from hwnas.system.paths import home

QUIET_MS = 0.1
SLOWER = 1.08  # every network of a later run, by the reference
COLUMNS = ["arch", "network", "accuracy", "accuracy_std", "params", "flops", "latency_ms_predicted",
           "latency_ms_predicted_low", "latency_ms_predicted_high", "latency_ms_measured", "latency_ms_measured_low",
           "latency_ms_measured_high", "latency_ms_as_timed", "group", "calibrated", "true_front"]


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return SearchSpace.load("nas_bench_macro", channels=3, classes=10)


def network(space: SearchSpace, digits: str):
    return space.decode({f"stage{index}.op": space.parameters[index].choices[int(digit)]
                         for index, digit in enumerate(digits)})


def timed(one, ms: float, reference_ms: float = 1.002 * QUIET_MS) -> Measurement:
    noise = np.exp(0.002 * np.random.default_rng(int(one.id, 16)).standard_normal(12))
    return Measurement(tuple(Turn((ms * float(x),) * 3, (1e3 * reference_ms,)) for x in noise), QUIET_MS, Protocol())


@pytest.fixture(scope="module")
def rows(space) -> list[dict]:
    """81 rows: the first, third, fourth and fifth layer vary; 63 different networks. Accuracy grows with MACs."""
    found = []
    for a, b, c, d in product("012", repeat=4):
        one = network(space, text := f"{a}0{b}{c}{d}100")
        noise = np.random.default_rng(int(one.id, 16)).normal()
        found.append({"arch": text, "accuracy_cifar10": f"{80 + one.macs / 1e7 + noise:.4f}", "accuracy_std": "0.1",
                      "params": one.params, "flops": one.macs})
    return found


@pytest.fixture
def file(rows, tmp_path) -> Path:
    return write_rows(tmp_path / "macro.csv", rows)


@pytest.fixture
def table(hwnas_home, space, monkeypatch) -> LatencyTable:
    """A table of this host for the null runtime, which holds some of the benchmark's networks."""
    monkeypatch.setattr(hwnas.pictures, "figure_bytes", lambda figure, kind: b"picture")
    codes = np.concatenate([space.sample(np.random.default_rng(0), 40), [[0, 0, b, 0, 0, 1, 0, 0] for b in range(3)]])
    networks = {one.id: one for one in (space.decode(space.to_params(row)) for row in codes)}
    table = table_of(space, networks.values(), noise=0.002)
    table.error[space.name] = LatencyModel.fit(table, space).error
    table.save(table_path(home() / "latency_tables", table.host_name, table.key))
    return table


class Timer(MadeUpTimer):
    """On a machine that is slower than it was."""

    def measurement(self, network: Architecture, index: int) -> Measurement:
        return timed(network, SLOWER * made_up_ms(network), QUIET_MS)


def run(monkeypatch, file: Path, out: Path, *more: str, timer: Timer | None = None) -> Timer:
    from experiments.latency.macro.run import main

    timer = timer or Timer()
    monkeypatch.setattr("hwnas.validate.time_networks", timer)
    monkeypatch.setattr("hwnas.latency.session.time_networks", Timer())
    main(["+target=null_fp32", f"benchmark={file}", f"out={out}", "random=10", *more])
    return timer


def test_a_digit_is_an_operation_and_equal_networks_are_one(space, file, rows):
    from experiments.latency.macro.benchmark import Benchmark

    found = Benchmark.load(file, space)
    assert len(found.rows) == 81
    assert len(found.networks) == 63  # 3 of the first layer, 3 * 7 of the second stage
    for row, index in zip(rows, found.network_of, strict=True):
        assert found.networks[index].id == network(space, row["arch"]).id
    where = {row["arch"]: index for row, index in zip(rows, found.network_of, strict=True)}
    assert where["00102100"] != where["00201100"]
    assert where["00101100"] == where["00110100"]  # an identity that changes nothing comes before or behind
    kinds = [str(stage) for stage in found.networks[where["10200100"]].stages]
    assert ["ir" in kind for kind in kinds] == [True, False, True, False, False, True, False, False]
    assert "_e3" in kinds[0] and "_e6" in kinds[2]  # noqa: PT018


@pytest.mark.soak
def test_the_published_file_is_understood_as_a_whole(space, data_root):
    from experiments.latency.macro.benchmark import Benchmark

    path = data_root.parent / "benchmarks" / "nas_bench_macro.csv"
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    found = Benchmark.load(path, space)
    assert len(found.rows) == space.size == 6561
    assert len(found.networks) == 3969


@pytest.mark.parametrize(("change", "named"), [
    ({"arch": "1000100"}, ["row 2", "1000100", "leading zeros"]), ({"arch": "00000103"}, ["row 2", "00000103"]),
    ({"flops": "1"}, ["row 2", "FLOPs", "nas_bench_macro"]), ({"accuracy_cifar10": "best"}, ["row 2", "'best'"])])
def test_a_file_that_is_not_the_benchmark_is_refused(space, rows, tmp_path, change, named):
    from experiments.latency.macro.benchmark import Benchmark

    path = write_rows(tmp_path / "odd.csv", [{**rows[0], **change}, *rows[1:]])
    with pytest.raises(DataError) as caught:
        Benchmark.load(path, space)
    assert all(word in str(caught.value) for word in named)
    assert "\n" not in str(caught.value)


def test_near_the_front_is_what_is_on_it_in_the_best_case():
    from experiments.latency.macro.choice import near_front

    rng = np.random.default_rng(0)
    for _ in range(20):
        accuracy, ms = rng.integers(0, 12, 30).astype(float), rng.integers(1, 20, 30).astype(float)
        low, high = 0.9 * ms, 1.1 * ms
        best = [non_dominated(np.column_stack([accuracy, np.where(np.arange(30) == i, low, high)]), (False, True))[i]
                for i in range(30)]
        assert near_front(accuracy, low, high).tolist() == best


def test_what_is_chosen(space, file, table):
    from experiments.latency.macro.benchmark import Benchmark
    from experiments.latency.macro.choice import calibrated_on, chosen_networks

    found = Benchmark.load(file, space)
    predicted = np.array([made_up_ms(one) for one in found.networks])
    known = calibrated_on(table)

    def choose(near: float, n_random: int = 10, seed: int = 7) -> dict[str, set[str]]:
        chosen = chosen_networks(found, predicted, table, near=near, n_random=n_random, seed=seed)
        assert len({one.id for _, one in chosen}) == len(chosen)
        return {name: {one.id for group, one in chosen if group == name} for name, _ in chosen}

    exact, wide = choose(0.0), choose(0.1)
    assert "near" not in exact
    assert wide["near"]
    assert exact["front"] == wide["front"]
    assert len(exact["random"]) == 10
    assert not exact["random"] & known
    assert choose(0.0) == exact
    assert choose(0.0, seed=8)["random"] != exact["random"]
    with pytest.raises(ConfigError, match="random must be at most"):
        choose(0.0, n_random=60)


def test_the_table_says_what_is_predicted_and_what_was_measured(space, file, rows, table, tmp_path, monkeypatch,
                                                                capsys):
    timer = run(monkeypatch, file, tmp_path / "out")
    found = rows_of(tmp_path / "out" / "table.csv")
    assert list(found[0]) == COLUMNS
    assert [row["arch"] for row in found] == [row["arch"] for row in rows]  # leading zeros and order survive
    points = np.array([[float(row["accuracy"]), float(row["latency_ms_measured"] or "nan")] for row in found])
    front = non_dominated(points, (False, True))
    for row, on_front in zip(found, front, strict=True):
        truth = made_up_ms(network(space, row["arch"]))
        assert float(row["latency_ms_predicted"]) == pytest.approx(truth, rel=0.05)
        assert (row["latency_ms_measured"] != "") == (row["network"] in timer.asked)
        if row["latency_ms_measured"]:
            # the panel tells that the run was slower, which is taken out where it stands beside predictions
            assert float(row["latency_ms_measured"]) == pytest.approx(truth, rel=0.01)
            assert float(row["latency_ms_as_timed"]) == pytest.approx(SLOWER * truth, rel=0.01)
            assert row["true_front"] == str(int(on_front))
        else:
            assert row["latency_ms_as_timed"] == row["true_front"] == ""
        if row["group"] == "random":
            assert row["calibrated"] == "0"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    measured = summary["measured"]
    assert measured["networks"] == len({row["network"] for row in found if row["latency_ms_measured"]})
    assert measured["held_out"]["random"]["n"] == 10
    assert set(measured["true_front"]) <= {row["arch"] for row in found if row["true_front"] == "1"}
    assert len(measured["true_front"]) == len({row["network"] for row in found if row["true_front"] == "1"})
    assert summary["columns"]["latency_ms_predicted"].startswith("predicted, for all 63")
    assert f"measured, for {measured['networks']} of 63" in capsys.readouterr().out


def test_predictions_alone_time_nothing_and_a_contest_reads_them(file, table, tmp_path, monkeypatch, capsys):
    timer = run(monkeypatch, file, tmp_path / "out", "measure=false")
    assert not timer.asked
    assert {row["latency_ms_measured"] for row in rows_of(tmp_path / "out" / "table.csv")} == {""}
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["measured"] is None
    assert "nothing was measured" in capsys.readouterr().out
    from experiments.sampler.contest.options import parse
    from experiments.sampler.contest.table import Table

    given = [f"table={tmp_path / 'out' / 'table.csv'}", "arch_digits=arch", "accuracy=accuracy",
             "latency=latency_ms_predicted", "out=x"]
    assert len(Table.load(parse(given)).accuracy) == 81
    assert len(Table.load(parse([*given, "duplicates_by=network"])).accuracy) == 63


def test_an_interrupted_run_goes_on_and_a_finished_one_times_nothing(file, table, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = Timer(breaks_after=5)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, file, out, timer=first)
    assert not (out / "table.csv").exists()
    assert (out / "measured.partial.json").is_file()
    second = run(monkeypatch, file, out)
    assert len(first.asked) == 5
    assert not {*first.asked} & {*second.asked}
    before, at = rows_of(out / "table.csv"), json.loads((out / "summary.json").read_text())["measured"]["measured_at"]
    assert not run(monkeypatch, file, out).asked
    for old, new in zip(before, rows_of(out / "table.csv"), strict=True):
        assert {name: new[name] for name in ("network", "group", "true_front")}.items() <= old.items()
        assert float(new["latency_ms_measured"] or 0) == pytest.approx(float(old["latency_ms_measured"] or 0), rel=1e-3)
    assert json.loads((out / "summary.json").read_text())["measured"]["measured_at"] == at
    more = run(monkeypatch, file, out, "random=15").asked
    assert 0 < len(more) <= 15  # what was timed for fewer is not timed again


def test_what_was_invalid_is_left_blank_and_timed_again(file, table, tmp_path, monkeypatch, capsys):
    first = run(monkeypatch, file, tmp_path / "out", timer=Timer(invalid=3))
    blank = {row["network"] for row in rows_of(tmp_path / "out" / "table.csv") if not row["latency_ms_measured"]}
    assert {*first.asked[:3]} & blank
    assert not {*first.asked[3:]} & blank
    assert "3 networks INVALID" in capsys.readouterr().out
    assert {*run(monkeypatch, file, tmp_path / "out").asked} == {*first.asked[:3]}
