"""Known objectives other than latency, on their whole way: options, trials, samplers, reuse, front, report."""

from __future__ import annotations

import csv
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import race_fixtures
from deployment_fixtures import finish, measured, sides_data, tiny_architecture, tiny_finalist, tiny_making
from front_fixtures import make_row
from optuna.trial import TrialState
from race_fixtures import SPACE, predict
from study_fixtures import IDENTITY, OBJECTIVE, Scores, searched
from table_fixtures import write_table

from hwnas import verify
from hwnas.cli.command import run_command
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, StudyError, UnknownName
from hwnas.front.finalists import choose_finalists
from hwnas.front.picture import PlotInfo, front_figure, named
from hwnas.front.report import ReportData, read_report, report_html, write_report
from hwnas.front.rows import COLUMNS, Cost, front_csv, load_front, mark_front, save_front
from hwnas.front.score import Timing
from hwnas.front.verification import SearchFacts
from hwnas.latency import wave as scoring
from hwnas.latency.timing import prepare_network
from hwnas.pictures import figure_bytes
from hwnas.samplers import model
from hwnas.samplers.loading import StudyView
from hwnas.search.__main__ import main
from hwnas.search.reuse import reuse_trials
from hwnas.study.candidate import SearchOptions
from hwnas.study.objective import COSTS, MOST_KNOWN, Objective, check_known, file_bytes, read_objective
from hwnas.study.record import trial_rows
from hwnas.system.run_folder import RunFolder
from hwnas.target import Host, Target

INT8 = Target("t", "onnxruntime", "int8", price_per_hour=0.36)
LARGE_AND_SLOW = Objective(1.5, known=("latency_ms", "size_mb"), terms=INT8)
INFO = PlotInfo("xeon_int8", "intel-xeon-f6m143s8-2c", "digits", "21 November 2026")


def opened(folder: Path, objective: Objective = LARGE_AND_SLOW, sampler: str = "hwnas", **options: Any) -> optuna.Study:
    return race_fixtures.opened(folder, sampler, objective=objective, **options)


def search(study: optuna.Study, n: int, objective: Objective = LARGE_AND_SLOW, **options: Any) -> Any:
    return searched(study, n, SPACE, Scores(), predictor=predict, objective=objective, **options)


# Options


@pytest.mark.parametrize(("names", "told"), [
    (["latency"], "unknown known objective 'latency'. Did you mean latency_ms"), ([], "one or two of latency_ms"),
    (["macs", "macs"], "names macs twice"), (["latency_ms", "size_mb", "macs"], "got 3"),
    (["latency_ms", "price"], "latency_ms and price are proportional")])
def test_what_cannot_be_minimised_is_one_line(names: Any, told: str) -> None:
    with pytest.raises((ConfigError, UnknownName), match=told):
        check_known(names, INT8)


@pytest.mark.parametrize("price", [None, 0, -1.0, math.nan, math.inf, "cheap", True])
def test_a_price_needs_the_price_of_an_hour(price: Any) -> None:
    with pytest.raises(ConfigError, match=r"objective\.price_per_hour=NUMBER"):
        check_known(["price"], replace(INT8, price_per_hour=price))
    assert check_known(["macs"], replace(INT8, price_per_hour=price)) == ("macs",)


def test_the_order_of_names_makes_no_other_study() -> None:
    assert MOST_KNOWN == model.MOST_KNOWN  # as many as the sampler takes
    one, other = (Objective(1.5, known=names, terms=INT8) for names in (("macs", "size_mb"), ("size_mb", "macs")))
    assert str(one) == str(other) == "pareto of size_mb and macs, soft reward at 1.5 ms"
    assert one.directions == ("maximize", "minimize", "minimize")
    network = tiny_architecture()
    assert one.values(0.5, 2.0, network) == (
        0.5, pytest.approx(sum(file_bytes(block, INT8) for block in network.blocks()) / 1e6), network.macs)


def test_studies_of_before_keep_their_names() -> None:
    assert str(OBJECTIVE) == str(Objective(1.5, terms=INT8)) == "pareto, soft reward at 1.5 ms"
    assert str(Objective(1.5, "cap", known=("macs",))) == "cap, soft reward at 1.5 ms"
    assert Objective(1.5, "cap", known=("macs",)).values(0.5, 2.0) == (0.5,)


def test_a_price_is_of_a_million_images() -> None:
    """At 3.6 ms an image a million take an hour."""
    assert Objective(1.0, known=("price",), terms=INT8).values(0.5, 3.6) == (0.5, pytest.approx(0.36))
    batched = Objective(1.0, known=("price",), terms=replace(INT8, batch=4))
    assert batched.costs(3.6) == {"price_per_million_predicted": pytest.approx(0.09)}
    assert "price at 0.36 an hour" in str(batched)


def test_the_price_of_an_hour_is_the_targets_unless_it_is_given() -> None:
    target = Target("t", "openvino", "int8", price_per_hour=2.0)
    section = {"name": "pareto", "reward": "soft", "known": ["price"], "price_per_hour": None}
    assert read_objective(section, target).terms.price_per_hour == 2.0
    assert read_objective({**section, "price_per_hour": 3.0}, target).terms.price_per_hour == 3.0
    assert read_objective({"name": "pareto", "reward": "soft"}, target).known == ("latency_ms",)


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_the_formula_gives_the_size_of_the_exported_file(tmp_path: Path, precision: str) -> None:
    codes = SPACE.sample(np.random.default_rng(2), 40)
    networks = [SPACE.decode(SPACE.to_params(row)) for row in codes]
    excited = max(networks, key=lambda one: sum(block.se_channels * block.mid_channels for block in one.blocks()))
    plain = min(networks, key=lambda one: one.params)
    for index, network in enumerate((excited, plain)):
        (tmp_path / str(index)).mkdir()
        file = prepare_network(network, Target("t", "openvino", precision), tmp_path / str(index))
        told = sum(file_bytes(block, replace(INT8, precision=precision)) for block in network.blocks())
        assert told == pytest.approx(file.stat().st_size, rel=0.01)


# Search


def test_the_sampler_is_told_what_trials_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    informed = sys.modules["hwnas.samplers.informed"]  # in the package this is the name of its function
    whole = informed.KnownObjectiveSampler
    monkeypatch.setattr(informed, "KnownObjectiveSampler", lambda *args, **options: told.update(
        functions=args[1]) or whole(*args, **options))
    for known in (("latency_ms", "size_mb"), ("macs", "price"), ("price",)):
        objective = Objective(1.5, known=known, terms=INT8)
        study = opened(tmp_path / "-".join(known), objective)
        search(study, 2, objective)
        found = told["functions"].objectives(np.array([trial.user_attrs["codes"] for trial in study.trials]))
        assert found == pytest.approx(np.array([trial.values[1:] for trial in study.trials]))


@pytest.mark.parametrize(("sampler", "n"), [("hwnas", 18), pytest.param("nsga2", 16, marks=pytest.mark.soak)])
def test_the_front_is_what_nothing_beats_in_all_three(tmp_path: Path, sampler: str, n: int) -> None:
    study = opened(tmp_path, sampler=sampler)
    assert search(study, n).counts.evaluated == n
    rows = [row for row in trial_rows(study) if row["outcome"] == "evaluated"]
    points = {row["id"]: (-row["top1_proxy"], row["latency_ms_predicted"], row["size_mb_predicted"]) for row in rows}
    assert {row["objectives"] for row in rows} == {"latency_ms size_mb"}
    for row in rows:
        assert study.trials[row["number"]].values == [row["top1_proxy"], *points[row["id"]][1:]]
    expected = {name for name, mine in points.items() if not any(
        all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in points.values())}
    assert {trial.user_attrs["architecture_id"] for trial in study.best_trials} == expected


@pytest.mark.soak
def test_over_the_cap_a_stand_in_has_the_costs_that_are_known(tmp_path: Path) -> None:
    study = opened(tmp_path, Objective(1.5, known=("size_mb", "macs"), terms=INT8), sampler="nsga2", cap_ms=0.25)
    search(study, 10, Objective(1.5, known=("size_mb", "macs"), terms=INT8), cap_ms=0.25)
    over = [trial for trial in study.trials if trial.user_attrs.get("outcome") == "infeasible"]
    seen = {trial.number: trial.values for trial in StudyView(study).get_trials()}
    assert over
    for trial in over:
        assert seen[trial.number][1:] == [trial.user_attrs["size_mb_predicted"], trial.user_attrs["macs"]]


def test_a_study_of_other_known_objectives_is_not_resumed(tmp_path: Path) -> None:
    opened(tmp_path / "a")
    opened(tmp_path / "a", Objective(1.5, known=("size_mb", "latency_ms"), terms=INT8))
    for other in (OBJECTIVE, Objective(1.5, known=("macs", "latency_ms"))):
        with pytest.raises(StudyError, match="objective was pareto of latency_ms and size_mb"):
            opened(tmp_path / "a", other)
    opened(tmp_path / "b", OBJECTIVE)
    with pytest.raises(StudyError, match=r"objective was pareto, .*, now pareto of macs"):
        opened(tmp_path / "b", Objective(1.5, known=("macs",)))


def test_accuracies_of_a_search_on_latency_are_reused_for_size(tmp_path: Path) -> None:
    search(opened(tmp_path / "a", OBJECTIVE), 2, OBJECTIVE)
    study = opened(tmp_path / "b", identity={**IDENTITY, "objective": str(LARGE_AND_SLOW)})
    assert reuse_trials(study, tmp_path / "a", SPACE, predict, SearchOptions(9, LARGE_AND_SLOW)) == 2
    for row, trial in zip(trial_rows(study), study.trials, strict=True):
        assert trial.values == [row["top1_proxy"], row["latency_ms_predicted"], row["size_mb_predicted"]]
        blocks = SPACE.decode(trial.params).blocks()
        assert row["size_mb_predicted"] == pytest.approx(sum(file_bytes(block, INT8) for block in blocks) / 1e6)
    search(study, 1)
    assert sum(trial.state == TrialState.COMPLETE for trial in study.trials) == 3


# Finalists and front


def trial(id: str, top1: float, ms: float, mb: float, **changes: Any) -> dict[str, Any]:
    return {"id": id, "state": "COMPLETE", "outcome": "evaluated", "top1_proxy": top1, "latency_ms_predicted": ms,
            "objectives": "latency_ms size_mb", "size_mb_predicted": mb, "reward": None, **changes}


def test_finalists_are_spread_over_both_costs_where_they_are_known() -> None:
    crowd = [trial(f"c{i}", 0.9 + i / 1000, 1.0 + i / 1000, 1.0 + i / 1000) for i in range(20)]
    small, fast = trial("small", 0.7, 0.99, 0.01), trial("fast", 0.7, 0.01, 0.99)
    assert {row["id"] for row in choose_finalists([*crowd, small, fast], 3)} == {"c19", "small", "fast"}
    assert len(choose_finalists([*crowd, small, fast], 7)) == 7
    unknown = trial("b", 0.9, 0.1, 0.1, size_mb_predicted=None)
    assert [row["id"] for row in choose_finalists([small, unknown], 3)] == ["small"]
    winner = trial("winner", 0.6, 0.02, 1.5, reward=0.9)  # beaten, and nearest to the fast one
    assert {row["id"] for row in choose_finalists([*crowd, small, fast, winner], 3)} == {"c19", "small", "winner"}


def sized(id: str, ms: float, top1: float, predicted: float, exact: float | None, **changes: Any) -> Any:
    return make_row(id, latency_ms=ms, latency_ms_low=ms, latency_ms_high=ms, top1_test=top1,
                    objectives=("latency_ms", "size_mb"), costs=(Cost("size_mb", predicted, exact),), **changes)


def some_rows() -> list[Any]:
    return mark_front([
        sized("quick", 0.1, 0.90, 0.3, 0.31), sized("small", 0.2, 0.89, 0.1, 0.06), sized("both", 0.2, 0.89, 0.1, 0.09),
        sized("unsized", 0.1, 0.99, 0.1, None, verified=False), sized("good", 0.3, 0.98, 0.4, None),
        sized("base", 0.4, 0.97, 0.5, 0.9, is_baseline=True)])


def test_the_front_counts_exact_costs_first() -> None:
    rows = {row.id: row for row in some_rows()}
    assert {name for name, row in rows.items() if row.on_front} == {"quick", "small", "good"}
    assert (rows["both"].dominated_by, rows["base"].dominated_by, rows["small"].dominated_by) == ("small", "good", "")


def test_front_csv_and_json_hold_the_costs_and_default_fronts_are_written_as_before(tmp_path: Path) -> None:
    assert front_csv([make_row()]).splitlines()[0] == ",".join(COLUMNS)
    run = RunFolder(tmp_path)
    save_front(run, [make_row()])
    assert "objectives" not in run.front_json.read_text()
    path = tmp_path / "front.csv"
    path.write_text(front_csv(some_rows()))
    assert sorted(load_front(run), key=lambda row: row.id) == sorted(some_rows(), key=lambda row: row.id)
    assert path.read_text().splitlines()[0] == ",".join([*COLUMNS, "objectives", "size_mb_predicted", "size_mb"])
    save_front(run, some_rows())
    assert '"size_mb": 0.06' in run.front_json.read_text()
    counted = make_row(objectives=("macs",), costs=(Cost("macs", 678901.0, 678901.0),))
    path.write_text(front_csv([counted]))
    assert path.read_text().splitlines()[0] == ",".join([*COLUMNS, "objectives"])
    assert load_front(run) == [counted]
    path.write_text(front_csv([counted]).replace(",macs\n", ",weight\n"))
    with pytest.raises(StudyError, match="line 2: objectives cannot be 'weight'"):
        load_front(run)
    path.write_text(front_csv([sized("a", 0.1, 0.9, 0.3, 0.31)]).replace("0.31", "big"))
    with pytest.raises(StudyError, match="size_mb cannot be 'big'"):
        load_front(run)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "measure", lambda calls, *args, **options: {name: measured(0.2) for name in calls})


@pytest.mark.soak
@pytest.mark.usefixtures("clock")
def test_a_verified_front_holds_what_was_exported_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.write_config({"seed": 0, "dataset": {"name": "sides", "root": None}, "objective": {
        "name": "pareto", "reward": "soft", "known": ["size_mb", "price"], "price_per_hour": 0.36}})
    here = Host.detect().name
    objective = Objective(None, known=("size_mb", "price"), terms=INT8)
    finish(run, [tiny_finalist(), tiny_finalist(16)], tiny_making(),
           SearchFacts(here, "tiny", Timing(tiny_architecture(), seconds=1.0)), objective)
    for row in load_front(run):
        size, price = row.costs
        assert row.verified
        assert row.objectives == ("size_mb", "price")
        assert size.exact == pytest.approx(run.model(row.id).int8.stat().st_size / 1e6, rel=1e-5)
        assert size.predicted == pytest.approx(size.exact, rel=0.25)  # of so small a file its notes are much
        assert price.exact == pytest.approx(row.latency_ms * 0.1, rel=1e-4)
        assert price.predicted == pytest.approx(0.01)
    small, wide = sorted(load_front(run), key=lambda row: row.params)
    assert small.on_front  # as fast as the other here, and smaller
    assert wide.on_front == (wide.top1_test > small.top1_test)
    before = {row.id: row.costs for row in load_front(run)}
    monkeypatch.setattr("hwnas.verify.load_dataset", lambda *args: sides_data())
    verify.run({"run": run.path}, Console(quiet=True))
    assert {row.id: row.costs for row in load_front(run)} == before
    shutil.rmtree(run.path / "models")
    write_report(run, read_report(run))
    assert {row.id: row.costs for row in load_front(run)} == before


# What is shown


def test_the_picture_shows_the_third_objective() -> None:
    axes = front_figure(some_rows(), INFO).axes[0]
    texts = [item.get_text() for item in axes.texts]
    assert all(any(text.endswith(wanted) for text in texts) for wanted in ("quick · 0.31 MB", "good · 0.4 MB"))
    steps = next(line for line in axes.lines if line.get_drawstyle() == "steps-post")
    assert list(steps.get_xdata()) == [0.1, 0.3]  # the small one lies below the staircase
    priced = make_row(objectives=("size_mb", "price"), costs=(Cost("size_mb", 1.0, 2.0), Cost("price", 0.1, 0.2)))
    assert named("x", priced) == "x · 2 MB"
    assert named("x", replace(priced, costs=priced.costs[1:])) == "x · 0.2"
    assert figure_bytes(axes.figure, "png").startswith(b"\x89PNG")


def test_the_report_has_the_column_and_every_known_objective_can_be_shown() -> None:
    page = report_html(ReportData(INFO, some_rows(), [], [], {}))
    assert "file size (MB)</th>" in page
    assert "as good in top-1, latency and file size" in page
    assert '<td class="n">0.06000</td>' in page
    assert "file size" not in report_html(ReportData(INFO, [make_row()], [], [], {}))
    assert {name: one.shown(2e6) for name, one in COSTS.items()} == {
        "latency_ms": "2e+06 ms", "size_mb": "2e+06 MB", "macs": "2 M MACs", "price": "2e+06"}
    assert COSTS["price"].shown(None) == ""


# Whole commands


SMALL = ["+target=ort_int8", "dataset=digits", "n_trials=2", "workers=1", "proxy.epochs=1", "proxy.min_steps=4",
         "proxy.train_images=128", "finalists.k=1", "finalists.recipe.max_steps=4", "dataset.image_size=16",
         "baselines=[]", "controls=0"]


def command(out: Path, *overrides: str) -> int:
    return run_command(main, "search", "usage", [*SMALL, f"out={out}", *overrides])


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A host that is not this one, so that nothing needs to be measured."""
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    write_table(tmp_path / "home", "ort_int8", 16, host_name="elsewhere-4c")
    return "host=elsewhere-4c"


@pytest.mark.parametrize("sampler", ["hwnas", pytest.param("nsga2", marks=pytest.mark.soak)])
def test_a_search_with_three_objectives(tmp_path, elsewhere, sampler, capsys):
    known = "objective.known=[latency_ms,size_mb]"
    assert command(tmp_path / "a", elsewhere, f"sampler={sampler}", known) == 0, capsys.readouterr().err
    with (tmp_path / "a" / "trials.csv").open(newline="") as file:
        trials = list(csv.DictReader(file))
    rows = load_front(RunFolder.open(tmp_path / "a"))
    assert len(trials) == 2
    row, = rows
    found = next(float(one["size_mb_predicted"]) for one in trials if one["id"] == row.id)
    assert row.costs == (Cost("size_mb", pytest.approx(found, rel=1e-4), pytest.approx(found, rel=0.02)),)
    assert "file size (MB)" in (tmp_path / "a" / "report.html").read_text()
    assert command(tmp_path / "a", elsewhere, f"sampler={sampler}") == 2
    assert "objective was pareto of latency_ms and size_mb" in capsys.readouterr().err.splitlines()[-1]
