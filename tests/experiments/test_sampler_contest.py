"""The sampler contest: collapse rules, scores, the two peers, replays, resumption, errors, and whole tiny runs."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from search_fixtures import rows_of, write_rows

from hwnas.errors import ConfigError, DataError, HwnasError, UnknownName
from hwnas.samplers.domain import Coding


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # and put back behind a run, which sets them too


def grid(levels: int = 3, parameters: int = 4) -> list[dict]:
    """A space of 81 rows in which accuracy grows with latency, with noise."""
    rng = np.random.default_rng(0)
    rows = []
    for values in product(range(levels), repeat=parameters):
        latency = 0.5 + sum((index + 1) * value for index, value in enumerate(values)) / 4
        accuracy = 60 + 8 * np.sqrt(sum(values)) + values[0] + rng.normal()
        rows.append({**{f"p{index}": value for index, value in enumerate(values)}, "arch": "".join(map(str, values)),
                     "accuracy": accuracy, "ms": latency, "same": sum(values)})
    return rows


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "grid.csv", grid())


def command(file: Path, out: Path, *more: str) -> list[str]:
    return [f"table={file}", "parameters=[p0,p1,p2,p3]", "accuracy=accuracy", "latency=ms", f"out={out}", *more]


def load(file: Path, *more: str, parameters: str = "parameters=[p0,p1,p2,p3]"):
    from experiments.sampler.contest.options import parse
    from experiments.sampler.contest.table import Table

    return Table.load(parse([f"table={file}", parameters, "accuracy=accuracy", "latency=ms", "out=x", *more]))


def small(tmp_path: Path, rows: list[tuple], *more: str):
    """A table with one parameter, from (parameter, accuracy, ms, group)."""
    names = ("a", "accuracy", "ms", "group")
    return load(write_rows(tmp_path / "small.csv", [dict(zip(names, row, strict=True)) for row in rows]), *more,
                parameters="parameters=[a]")


def test_bad_rows_are_left_out_before_equal_ones_are_collapsed(tmp_path):
    table = small(tmp_path, [("x", 50, 1.0, 1), ("y", 60, 3.0, 1), ("z", 70, 2.0, 1), ("v", 99, 0.049, 1),
                             ("u", 90, 4.0, 2), ("t", "nan", 4.0, 2), ("s", 90, "", 2), ("r", 10, 9.0, 3)],
                  "duplicates_by=group")
    assert table.choices == {"a": ("r", "u", "x", "y", "z")}
    np.testing.assert_allclose(table.accuracy, [60, 90, 10])
    np.testing.assert_allclose(table.latency_ms, [2, 4, 9])
    assert {table.entry[table.row_of({"a": one})] for one in "xyz"} == {0}
    assert table.entry[table.row_of({"a": "r"})] == 2
    assert table.row_of({"a": "v"}) is None
    assert table.notes == ("2 rows left out: NaN", "1 rows left out: latency below 0.05 ms",
                           "5 rows collapsed to 3 networks: mean accuracy, median latency")
    assert table.reference == (35.0, np.log2(8.0))


def test_repeated_rows_that_contradict_each_other_are_collapsed_and_counted(tmp_path):
    table = small(tmp_path, [("x", 50, 1.0, 1), ("x", 70, 2.0, 1), ("x", 60, 6.0, 1), ("y", 80, 9.0, 1),
                             ("y", 80, 9.0, 1), ("z", 40, 9.5, 1)])
    np.testing.assert_allclose(table.accuracy, [60, 80, 40])
    np.testing.assert_allclose(table.latency_ms, [2, 9, 9.5])
    assert table.notes[-1] == "1 of 3 parameter rows are there more than once with different values"
    with pytest.raises(DataError, match="several values of duplicates_by"):
        small(tmp_path, [("x", 50, 1.0, 1), ("x", 70, 2.0, 2), ("y", 80, 3.0, 2)], "duplicates_by=group")


def test_digits_keep_their_zeros_and_parquet_reads_like_csv(tmp_path, file):
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain, coded = load(file), load(file, parameters="arch_digits=arch")
    assert coded.choices == {f"digit_{place}": ("0", "1", "2") for place in range(4)}
    assert plain.choices == {f"p{place}": (0, 1, 2) for place in range(4)}
    np.testing.assert_array_equal(plain.codes, coded.codes)
    np.testing.assert_array_equal(plain.accuracy, coded.accuracy)
    pq.write_table(pa.Table.from_pylist(grid()), tmp_path / "grid.parquet")
    stored = load(tmp_path / "grid.parquet")
    assert stored.choices == plain.choices
    np.testing.assert_allclose(stored.accuracy, plain.accuracy)
    with pytest.raises(DataError, match="leading zeros"):
        load(write_rows(tmp_path / "cut.csv", [{"arch": "01", "accuracy": 1, "ms": 1}, {"arch": "1", "accuracy": 2,
                                                                                    "ms": 2}]),
             parameters="arch_digits=arch")


def test_ours_is_told_the_latency_of_the_network_and_the_median_outside(tmp_path):
    table = small(tmp_path, [("x", 50, 1.0, 1), ("y", 60, 3.0, 1), ("u", 90, 4.0, 2), ("r", 10, 9.0, 3)],
                  "duplicates_by=group", "features=[ms]")
    coding = Coding({"a": CategoricalDistribution([*table.choices["a"], "nowhere"])})
    asked = np.array([coding.encode({"a": value}) for value in ("x", "nowhere", "r")])
    np.testing.assert_allclose(table.known_latency(asked), [[2.0], [4.0], [9.0]])
    np.testing.assert_allclose(table.known_features(asked), [[1.0], [3.5], [9.0]])


def test_the_share_is_1_when_everything_is_evaluated_and_never_falls(file):
    from experiments.sampler.contest.scores import shares

    table = load(file)
    for seed in range(3):
        found = shares(table, list(np.random.default_rng(seed).permutation(len(table.accuracy))))
        assert np.all(np.diff(found) >= 0)
        assert found[0] < 0.9
        assert found[-1] == pytest.approx(1.0, abs=1e-12)


def test_hypervolume_is_that_of_moocore(file):
    moocore = pytest.importorskip("moocore", reason="moocore is not installed: pip install moocore")
    from experiments.sampler.contest.scores import shares

    table = load(file)
    networks = list(np.random.default_rng(0).permutation(len(table.accuracy)))
    losses = np.column_stack([-table.accuracy, np.log2(table.latency_ms)])
    reference = [-table.reference[0], table.reference[1]]
    true = moocore.hypervolume(losses, ref=reference)
    assert table.hypervolume == pytest.approx(true)
    for n in (1, 5, 20):
        assert shares(table, networks)[n - 1] == pytest.approx(moocore.hypervolume(losses[networks[:n]], ref=reference)
                                                               / true)


@pytest.mark.parametrize("name", ["stratified", "linas"])
def test_a_peer_proposes_every_network_once(file, name):
    from experiments.sampler.contest.replay import replay

    table = load(file)
    run = replay(table, name, 0, 81)
    assert sorted(run.networks) == list(range(81))
    assert (run.asks, run.drawn, run.outside) == (81, 0, 0)
    assert replay(table, name, 0, 30).networks == run.networks[:30]
    assert replay(table, name, 1, 20).networks != run.networks[:20]


class Stubborn(optuna.samplers.BaseSampler):
    """Asks for one setting again and again."""

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, param_name, param_distribution):
        return param_distribution.choices[-1]


def test_repeats_and_rows_outside_are_free_and_bounded(tmp_path):
    from experiments.sampler.contest.replay import MOST_FREE, Run, ask_optuna

    whole = load(write_rows(tmp_path / "whole.csv", grid()))
    run = Run("random", 0, "")
    ask_optuna(whole, Stubborn(), run, 3)
    assert run.networks[0] == 80
    assert len(set(run.networks)) == 3
    assert (run.asks, run.drawn, run.outside) == (3 + 2 * MOST_FREE, 2, 0)
    holed = load(write_rows(tmp_path / "holed.csv", grid()[:-1]))
    run = Run("random", 0, "")
    ask_optuna(holed, Stubborn(), run, 3)
    assert len(set(run.networks)) == 3
    assert (run.asks, run.drawn, run.outside) == (3 + 3 * MOST_FREE, 3, 3 * MOST_FREE)


@pytest.mark.parametrize("name", ["hwnas", "tpe_multivariate", "nsga2"])
def test_samplers_replay_the_same_with_the_same_seed(file, name):
    from experiments.sampler.contest.replay import replay

    table = load(file)
    run = replay(table, name, 3, 25)
    assert len(set(run.networks)) == 25
    assert replay(table, name, 3, 15).networks == run.networks[:15]


def test_every_name_has_a_sampler(file):
    from experiments.sampler.contest.options import AWARE, NAMES
    from experiments.sampler.contest.peers import PEERS
    from experiments.sampler.contest.samplers import limited, make

    table = load(file)
    assert set(PEERS) == set(AWARE)
    assert all(isinstance(make(name, table, 0), optuna.samplers.BaseSampler) for name in NAMES if name not in AWARE)
    assert limited("gp", 10, 400) == (3, 200)
    assert limited("nsga2", 10, 400) == (10, 400)


def made_up(name: str, levels: list[float], spread: float = 0.001):
    from experiments.sampler.contest.replay import Run
    from experiments.sampler.contest.scores import Scores

    shares = np.interp(np.arange(1, 401), [1, 25, 50, 100, 200, 250, 400], [0.1, *levels])
    run = Run(name, 0, "", asks=400, seconds=4.0)
    return Scores(name, (run, run), np.array([shares - spread, shares + spread]))


def test_the_verdict_says_plainly_where_ours_is_not_ahead():
    from experiments.sampler.contest.report import describe, verdict

    ours = made_up("hwnas", [0.8, 0.9, 0.95, 0.97, 0.98, 0.99])
    found = [ours, made_up("tpe", [0.5, 0.6, 0.7, 0.89, 0.94, 0.96]), made_up("random", [0.3] * 6),
             made_up("linas", [0.7, 0.8, 0.9, 0.9701, 0.975, 0.991]), made_up("stratified", [0.2] * 6)]
    lines = verdict(found)
    assert "yes (95.0% against 94.0%, tpe)" in lines[0]
    assert "NO (95.0% against 96.0%, tpe)" in lines[1]
    assert "yes (90.0% against 89.0%, tpe)" in lines[2]
    assert "stratified" in lines[3]
    assert "yes, at every mark (25, 50, 100, 200, 250, 400)" in lines[3]
    assert "NOT at 200 (97.0% ± 0.1 against 97.0% ± 0.1), 400 (" in lines[4]
    assert "at 25, 50, 100, 250" in lines[4]
    told = describe(found, found[:1])
    assert "98.0% ± 0.1" in told
    assert "worst accuracy" in told
    assert "did not run" in verdict(found[1:])[0]
    assert "none of Optuna" in verdict([ours])[0]
    assert ours.needed(0.95) == [105, 99]


def test_a_whole_run_writes_everything_and_is_not_run_again(file, tmp_path, capsys):
    from experiments.sampler.contest.run import main

    out = tmp_path / "out"
    arguments = command(file, out, "samplers=[random,stratified]", "seeds=2", "evals=20")
    main(arguments)
    first, printed = (out / "runs.jsonl").read_text(), capsys.readouterr().out
    assert "81 of 81 combinations" in printed
    assert "No verdict" in printed
    main(arguments)
    assert (out / "runs.jsonl").read_text() == first
    with open(out / "runs.jsonl", "a") as torn:
        torn.write('{"sampler": "rand')
    main([*arguments[:-2], "seeds=3", "evals=20"])  # more seeds go on
    assert (out / "runs.jsonl").read_text().startswith(first)
    assert len((out / "runs.jsonl").read_text().splitlines()) == 7
    rows = rows_of(out / "contest.csv")
    assert list(rows[0]) == ["sampler", "seed", "evals", "hv_share"]
    assert [(row["sampler"], row["evals"]) for row in rows] == [("random", "20")] * 3 + [("stratified", "20")] * 3
    assert [row["evals"] for row in rows_of(out / "curves.csv")][:5] == ["5", "10", "15", "20", "5"]
    summary = json.loads((out / "summary.json").read_text())
    assert [one["sampler"] for one in summary["samplers"]] == ["random", "stratified"]
    assert summary["networks"] == 81
    assert [one["sampler"] for one in summary["wide"]["samplers"]] == ["random", "stratified"]
    assert summary["wide"]["reference"]["latency_ms"] > summary["reference"]["latency_ms"]
    assert (out / "contest.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"evals 20, asked for 10.*another folder"):
        main(command(file, out, "samplers=[random]", "evals=10"))


@pytest.mark.parametrize(("more", "error", "match"), [
    (["evil=1"], UnknownName, "option 'evil'.*Did you mean evals"),
    (["samplers=[tpe,bogus]"], UnknownName, "sampler 'bogus'"),
    (["evals=0"], ConfigError, "evals must be a whole number"),
    (["accuracy=acuracy"], UnknownName, "'acuracy'.*Did you mean accuracy"),
    (["accuracy=top1", "latency=lat"], DataError, "no columns top1, lat"),
    (["table=nowhere.csv"], DataError, "cannot be read"),
])
def test_mistakes_are_one_line(file, tmp_path, more, error, match):
    from experiments.sampler.contest.run import main

    with pytest.raises(error, match=match) as caught:
        main(command(file, tmp_path / "out", *more))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, HwnasError)


def test_several_contests_are_one_picture_and_one_table(file, tmp_path, capsys):
    from experiments.sampler.contest import overview
    from experiments.sampler.contest.run import main

    for name in ("one", "another_one"):
        main(command(file, tmp_path / name, "samplers=[random,stratified]", "seeds=2", "evals=30"))
    capsys.readouterr()
    overview.main([f"out={tmp_path / 'all.png'}", str(tmp_path / "one"), str(tmp_path / "another_one")])
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert "| **another one** |" in lines[5]
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    with open(tmp_path / "one" / "summary.json") as written:
        random = json.load(written)["samplers"][0]
    assert cells[:2] == ["random", f"{100 * random['mean_25']:.1f} ± {100 * random['error_25']:.1f}"]
    assert cells[3:] == ["–"] * 4
    with pytest.raises(DataError, match="no finished contest"):
        overview.main([f"out={tmp_path / 'all.png'}", str(tmp_path / "nothing")])


def test_ours_is_told_which_settings_are_one_network(tmp_path):
    table = small(tmp_path, [("x", 50, 1.0, 1), ("y", 60, 3.0, 2), ("u", 90, 4.0, 2), ("r", 10, 9.0, 3)],
                  "duplicates_by=group")
    codes = np.array([[table.choices["a"].index(value)] for value in "ruxy"] + [[7]], float)
    found = table.canonical(codes)[:, 0]
    assert found[1] == found[3]
    assert found[[0, 2, 4]].tolist() == codes[[0, 2, 4], 0].tolist()
