"""Whole searches beside each other: reading run folders, equal hypervolume, verified fronts, and what is not redone."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from front_fixtures import make_row
from study_fixtures import opened, searched

from hwnas.errors import ConfigError, DataError, StudyError, UnknownName, UserError
from hwnas.front.rows import load_front, save_front
from hwnas.study.record import trial_rows
from hwnas.system.run_folder import OF_EVERY_TRIAL as COLUMNS
from hwnas.system.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
NOON = datetime(2026, 1, 1, 12)
SMALL = ["+target=null_fp32", "dataset=digits", "n_trials=3"]
# (top-1, ms) in the order of evaluation; reference of all of them: 50 % and 8 ms
OURS = ((0.7, 2.0), (0.6, 1.0), (0.55, 8.0))
THEIRS = ((0.6, 2.0), (0.7, 4.0), (0.5, 8.0))


def trial(number: int, begin: float, end: float | None, outcome: str = "evaluated", **more) -> dict:
    """A row of trials.csv, from seconds after noon."""
    values = {"number": number, "state": "COMPLETE", "outcome": outcome, "id": f"{number:08x}", "top1_proxy": 0.5,
              "latency_ms_predicted": 1.0, "seconds": 2.0 if outcome == "evaluated" else None, "stopped": False,
              "started": (NOON + timedelta(seconds=begin)).isoformat(),
              "finished": None if end is None else (NOON + timedelta(seconds=end)).isoformat()}
    return {column: {**values, **more}.get(column) for column in COLUMNS}


def folder(path: Path, trials: list[dict], front: list | None = None) -> RunFolder:
    run = RunFolder.create(path, overwrite=True)
    run.write_config({"seed": 0, "verification": {"seconds": 5}})
    run.write_trials(trials)
    if front is not None:
        save_front(run, front)
        run.write_json(run.environment, {"cap_ms": None})
    return run


def points(found=OURS) -> list[dict]:
    return [trial(index, 3 * index, 3 * index + 3, top1_proxy=top1, latency_ms_predicted=ms)
            for index, (top1, ms) in enumerate(found)]


def run_of(path: Path, sampler: str = "hwnas", seed: int = 0, found=OURS):
    from experiments.sampler_search.reading import read_run

    return read_run(folder(path, points(found)).path, sampler, seed)


def test_evaluations_stand_in_the_order_they_ended_and_pauses_do_not_count(tmp_path):
    from experiments.sampler_search.reading import read_run

    run = read_run(folder(tmp_path, [
        trial(0, 0, 9), trial(1, 1, 5, top1_proxy=0.6), trial(2, 9, 900, "lost"), trial(3, 9, 10, "duplicate"),
        trial(4, 1000, 1004, stopped=True), trial(5, 1004, None, "running"), trial(6, 1004, 1010, "failed"),
        trial(7, 1010, 1013)]).path, "hwnas", 0)
    assert run.ids == ("00000001", "00000000", "00000004", "00000007")
    np.testing.assert_array_equal(run.top1, [0.6, 0.5, np.nan, 0.5])
    np.testing.assert_allclose(run.wall_s, [5, 9, 14, 23])
    np.testing.assert_allclose(run.training_s, [2, 4, 6, 8])
    np.testing.assert_allclose(run.asking_s, [2, 9, 12, 13])  # the duplicate's second too, not the failed one's
    assert run.asks == 8
    assert {name: run.counts[name] for name in ("evaluated", "duplicate", "lost", "failed")} == {
        "evaluated": 4, "duplicate": 1, "lost": 1, "failed": 1}


def test_a_real_study_gives_exact_moments_and_what_it_depends_on(tmp_path):
    from experiments.sampler_search.reading import read_run

    study = opened(tmp_path)
    searched(study, 5)
    folder(tmp_path, trial_rows(study))
    run = read_run(tmp_path, "random", 0)
    assert len(run.ids) == 5
    assert 0 < run.wall_s[-1] < 60
    assert (np.diff(run.wall_s) > 0).all()  # in whole seconds, as trials.csv has them, they would be equal
    assert run.identity["host"] == "zen5-2"


def test_a_search_without_evaluations_is_an_error(tmp_path):
    from experiments.sampler_search.reading import read_run

    with pytest.raises(DataError, match="no evaluated network"):
        read_run(folder(tmp_path, [trial(0, 0, 1, "failed")]).path, "hwnas", 0)


def test_hypervolumes_and_evaluations_to_the_others_final_one(tmp_path):
    from experiments.sampler_search.scores import WIDE, races, scored

    runs = [run_of(tmp_path / "a"), run_of(tmp_path / "b", "nsga2", found=THEIRS)]
    found, reference = scored(runs, WIDE)
    assert reference == (0.5, 3.0)
    np.testing.assert_allclose(found[0].hypervolume, [0.4, 0.5, 0.5])
    np.testing.assert_allclose(found[1].hypervolume, [0.2, 0.3, 0.3])
    np.testing.assert_allclose(found[1].share, [0.4, 0.6, 0.6])  # together they found no more than the first alone
    ours, theirs = races(found)
    assert (ours.sampler, ours.evaluations, ours.others_evaluations) == ("hwnas", (1,), (2,))
    assert (ours.wall_s, ours.others_wall_s) == ((3.0,), (6.0,))
    assert (theirs.evaluations, theirs.wall_s) == ((None,), (None,))
    assert theirs.ended == pytest.approx((0.6,))


def test_the_first_reference_leaves_out_the_slowest_and_least_accurate(tmp_path):
    from experiments.sampler_search.scores import reference

    runs = [run_of(tmp_path / "a", found=[(0.01 * n, 2.0**n) for n in range(1, 12)])]
    assert reference(runs, 11) == pytest.approx((0.035, 10.0))
    halves = replace(runs[0], top1=np.where(np.arange(11) < 4, np.nan, runs[0].top1))
    assert reference([halves], 11)[0] == pytest.approx(0.065)  # those stopped early are not of the finalists


def test_longer_searches_are_cut_to_the_shorter_and_stopped_networks_add_nothing(tmp_path):
    from experiments.sampler_search.scores import WIDE, rows, scored

    short = run_of(tmp_path / "b", "nsga2", found=THEIRS)
    for more in (0.99, np.nan):
        longer = run_of(tmp_path / f"a{more}", found=(*OURS, (more, 0.5)))
        np.testing.assert_allclose(scored([longer, short], WIDE)[0][0].hypervolume, [0.4, 0.5, 0.5])
    stopped = replace(short, top1=np.array([np.nan, 0.7, 0.5]))
    found, _ = scored([run_of(tmp_path / "c"), stopped], WIDE)
    np.testing.assert_allclose(found[1].hypervolume, [0.0, 0.2, 0.2])
    assert rows(found)[3]["top1_proxy"] is None


def test_searches_of_different_things_are_not_compared(tmp_path):
    from experiments.sampler_search.scores import scored

    one = replace(run_of(tmp_path / "a"), identity={"data set": "digits (1)", "seed": "0"})
    other = replace(run_of(tmp_path / "b", "nsga2"), identity={"data set": "digits (2)", "seed": "0"})
    with pytest.raises(StudyError, match=r"data set is digits \(1\) with hwnas, digits \(2\) with nsga2"):
        scored([one, other])
    assert len(scored([one, replace(other, seed=1)])[0]) == 2  # another seed may split the data otherwise


def test_verdicts_say_who_did_not_get_there_and_how_sure_it_is(tmp_path):
    from experiments.sampler_search.report import verdict
    from experiments.sampler_search.scores import WIDE, races, scored

    runs = [run_of(tmp_path / f"{name}{seed}", name, seed, found) for seed in (0, 1)
            for name, found in (("hwnas", OURS), ("nsga2", THEIRS))]
    single = races(scored(runs[:2], WIDE)[0])
    lines = verdict(single, single, 3)
    assert "hwnas reached nsga2's final hypervolume after 1 of 3 evaluations, 3 s at work" in lines[0]
    assert "(nsga2 itself: 2 evaluations, 6 s)" in lines[0]
    assert "nsga2 did NOT reach hwnas's final hypervolume in 3 evaluations: it ended at 60.0% of it" in lines[1]
    assert "one draw" in lines[-1]
    double = races(scored(runs, WIDE)[0])
    lines = verdict(double, double, 3)
    assert "with every seed, after 1.0 ± 0.0 of 3 evaluations" in lines[0]
    assert "with none of 2 seeds" in lines[1]
    swapped = races(scored([runs[0], runs[1], replace(runs[3], sampler="hwnas"), replace(runs[2], sampler="nsga2")],
                           WIDE)[0])
    lines = verdict(swapped, double, 3)
    assert "with 1 of 2 seeds only (after 1 of 3 evaluations)" in lines[0]
    assert any("as the reference point it is otherwise: hwnas reached nsga2's" in line for line in lines)


def verified(name: str, top1: float, ms: float, **more):
    return make_row(name, name=name, top1_test=top1, top1_test_low=top1 - 0.01, top1_test_high=top1 + 0.01,
                    latency_ms=ms, latency_ms_low=0.95 * ms, latency_ms_high=1.05 * ms, verified=True, **more)


def test_the_joint_front_counts_finalists_that_no_search_beats(tmp_path):
    from experiments.sampler_search.fronts import fronts, own_front

    rows = {name: verified(name, top1, ms) for name, top1, ms in (
        ("a", 0.8, 1.0), ("b", 0.9, 2.0), ("c", 0.85, 4.0), ("d", 0.7, 0.5), ("e", 0.75, 2.0))}
    first = replace(run_of(tmp_path / "a"), front=(rows["a"], rows["b"], rows["c"]))
    second = replace(run_of(tmp_path / "b", "nsga2"), front=(rows["d"], rows["e"], rows["b"]))
    ours, theirs = fronts([first, second])
    assert (ours.finalists, ours.joint) == (3, 2)
    assert (theirs.finalists, theirs.joint) == (3, 2)  # the network that both found counts for both
    assert ours.area == pytest.approx(0.1 * 1 + 0.2 * 1)  # against 70 % and 4 ms, in octaves
    assert 0 < ours.error < 0.1
    assert [row.id for row in own_front(first)] == ["a", "b"]
    assert fronts([run_of(tmp_path / "c")]) == []


def test_options_go_to_every_search_or_to_the_sampler_named(tmp_path):
    from experiments.sampler_search.options import parse
    from experiments.sampler_search.searching import plan

    options = parse([*SMALL, "samplers=[hwnas,nsga2]", "seeds=[3,5]", "nsga2.population_size=20", f"out={tmp_path}"])
    searches = plan(options)
    assert [(one.sampler, one.seed, one.verify) for one in searches] == [
        ("hwnas", 3, True), ("nsga2", 3, True), ("hwnas", 5, False), ("nsga2", 5, False)]
    assert "sampler_options.population_size=20" in searches[1].overrides
    assert not any("population_size" in text for text in searches[0].overrides)
    assert len({one.path for one in searches}) == 4
    assert "hwnas.search" in searches[0].command
    assert "hwnas.search" not in searches[2].command
    different = [line for line in zip(searches[0].config.split("\n"), searches[1].config.split("\n"), strict=False)
                 if line[0] != line[1]]
    assert [line[0].split(":")[0] for line in different[:2]] == ["out", "sampler"]


@pytest.mark.parametrize(("argument", "error", "words"), [
    ("sampler=nsga2", ConfigError, "samplers="), ("storage=sqlite:///x.db", ConfigError, "its own study"),
    ("search.reuse=runs/a", ConfigError, "know more"), ("sampler_options.population_size=9", ConfigError, "nsga2."),
    ("samplers=[hwnas]", ConfigError, "two or more"), ("samplers=[hwnas,nsga]", UnknownName, "nsga2"),
    ("nsga2.population=9", UnknownName, "population_size"), ("seeds=[0,x]", ConfigError, "whole numbers"),
    ("verify=[1,2]", ConfigError, "verify"), ("n_trails=9", ConfigError, "n_trails"), ("fast", ConfigError, "fast"),
    ("out=", ConfigError, "out=DIR")])
def test_what_cannot_be_meant_is_told_before_anything_runs(tmp_path, argument, error, words):
    from experiments.sampler_search.options import parse
    from experiments.sampler_search.searching import plan

    with pytest.raises(error, match=words) as raised:
        plan(parse([*SMALL, f"out={tmp_path}", argument]))
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


class Children:
    """Stands in for the child processes: leaves behind what they would, and keeps their commands."""

    def __init__(self, fail: str = "") -> None:
        self.commands: list[list[str]] = []
        self.fail = fail

    def __call__(self, command: list[str]) -> int:
        self.commands.append(command)
        given = dict(part.split("=", 1) for part in command if "=" in part)
        if given.get("sampler") == self.fail:
            return 2
        if "hwnas.verify" in command:
            run = RunFolder(Path(given["run"]))
            save_front(run, [replace(row, latency_ms=2 * (row.latency_ms or 0)) for row in load_front(run)])
            return 0
        ours = given["sampler"] == "hwnas"
        front = [verified("a" if ours else "b", 0.9 if ours else 0.8, 1.0), verified("both", 0.95, 2.0),
                 verified("resnet10t", 0.97, 3.0, is_baseline=True)]
        run = folder(Path(given["out"]), points(OURS if ours else THEIRS), front if "hwnas.search" in command else None)
        for row in front:
            model = run.model(row.id)
            (model.baseline if row.is_baseline else model.architecture).parent.mkdir(parents=True, exist_ok=True)
            (model.baseline if row.is_baseline else model.architecture).write_text(row.id)
            model.weights.write_text(given["sampler"]) if not model.weights.is_file() else None
            model.onnx.write_text(given["sampler"])
        return 0


@pytest.fixture
def children(monkeypatch) -> Children:
    from experiments.sampler_search import searching, together

    stand_in = Children()
    monkeypatch.setattr(searching, "start", stand_in)
    monkeypatch.setattr(together, "start", stand_in)
    return stand_in


def test_the_command_searches_once_and_goes_on_with_more_seeds(tmp_path, children, capsys):
    from experiments.sampler_search.run import main

    main([*SMALL, f"out={tmp_path}"])
    assert len(children.commands) == 3
    said = capsys.readouterr().out
    assert "hwnas reached nsga2's final hypervolume after 1 of 3 evaluations" in said
    assert "2 of its 2 finalists on the joint front; nsga2" in said
    main([*SMALL, f"out={tmp_path}"])
    assert len(children.commands) == 3
    main([*SMALL, f"out={tmp_path}", "seeds=[0,1]"])
    assert [[part for part in command if part.startswith(("sampler=", "seed="))] for command in children.commands[3:]
            ] == [["sampler=hwnas", "seed=1"], ["sampler=nsga2", "seed=1"]]
    main([*SMALL, f"out={tmp_path}", "seeds=[0,1]", "finalists.k=2"])
    assert len(children.commands) == 5 + 5  # another configuration is another matter for hwnas.search to judge
    with open(tmp_path / "search.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["sampler"], row["seed"]) for row in rows} == {(a, b) for a in ("hwnas", "nsga2") for b in "01"}
    assert {"sampler", "seed", "evaluation", "hypervolume", "seconds"} <= {*rows[0]}
    assert (tmp_path / "fronts.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["budget"] == 3
    assert [one["on_joint_front"] for one in summary["verified"][0]["fronts"]] == [2, 1]
    assert [len(one["evaluations"]) for one in summary["to_equal_hypervolume"][summary["reference"]["is"]]] == [2, 2]


def test_finalists_of_all_searches_are_timed_together_and_baselines_trained_once(tmp_path, children):
    from experiments.sampler_search.reading import read_run
    from experiments.sampler_search.run import main

    main([*SMALL, f"out={tmp_path}"])
    joint = RunFolder(tmp_path / "together" / "seed0")
    assert {row.id for row in load_front(joint)} == {"a", "b", "both", "resnet10t"}
    assert joint.model("both").onnx.read_text() == "hwnas"  # of the two the first search's
    assert joint.model("b").onnx.read_text() == "nsga2"
    run = read_run(tmp_path / "nsga2" / "seed0", "nsga2", 0, joint.path)
    assert {row.id: row.latency_ms for row in run.front} == {"b": 2.0, "both": 4.0, "resnet10t": 6.0}
    lent = RunFolder(tmp_path / "nsga2" / "seed0")
    assert lent.model("resnet10t").weights.read_text() == "hwnas"
    assert lent.model("both").weights.read_text() == "nsga2"


def test_a_child_that_fails_ends_it_in_one_line_and_what_is_done_stays(tmp_path, children):
    from experiments.sampler_search.run import main

    children.fail = "nsga2"
    with pytest.raises(UserError, match=r"sampler nsga2, seed 0 ended with exit code 2") as raised:
        main([*SMALL, f"out={tmp_path}"])
    assert "\n" not in str(raised.value)
    children.fail = ""
    main([*SMALL, f"out={tmp_path}"])
    assert sum("sampler=hwnas" in command for command in children.commands) == 1


def test_without_verification_there_is_a_picture_all_the_same(tmp_path, children):
    from experiments.sampler_search.run import main

    main([*SMALL, f"out={tmp_path}", "verify=0"])
    assert len(children.commands) == 2
    assert not (tmp_path / "together").exists()
    assert (tmp_path / "fronts.png").is_file()
