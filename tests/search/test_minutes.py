"""budget.minutes: what there is time for, on a clock and a machine that are made up."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from deployment_fixtures import measured, sides_data
from front_fixtures import make_row
from search_fixtures import rows_of
from table_fixtures import write_table
from tiny_fixtures import write_space
from workshop_fixtures import SEARCH, write_accuracies, write_images

from hwnas.__main__ import main
from hwnas.data.dataset import Split
from hwnas.errors import BudgetError, TrainingError
from hwnas.front.make import BuildSettings
from hwnas.front.score import validated_share
from hwnas.latency import wave
from hwnas.search import minutes, road, trials
from hwnas.search.minutes import FEWEST_STEPS, Clock, Pace, fitted, proxy_length, timing_seconds, trials_seconds
from hwnas.space.search_space import SearchSpace
from hwnas.target import Target
from hwnas.training.recipe import FULL_TRAINING


class Time:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(minutes, "time", time)
    return time


def networks(*names: str) -> list[Any]:
    return [SimpleNamespace(id=name, trained_id=name) for name in names]


PACE = Pace({"fast": 0.1, "slow": 0.4}, making_s=5.0)


def test_minutes_are_counted_from_the_beginning_of_the_first_command(clock):
    watch = Clock.start(2.0)
    clock.now += 90
    assert (watch.spent_s, watch.left_s) == (90.0, 30.0)
    resumed = replace(Clock.start(10.0), before_s=420.0)
    clock.now += 60
    assert resumed.left_s == pytest.approx(120.0)


@pytest.mark.parametrize(("left_s", "kept"), [(25.0, {"made", "fast", "slow"}), (12.0, {"made", "slow"}),
                                              (-80.0, {"made"})])
def test_what_is_left_is_not_overrun_by_exports(left_s: float, kept: set[str]) -> None:
    """What is made already stays; a network whose export there is no time for is named."""
    rows = [make_row("made", latency_ms_predicted=0.3), make_row("slow", latency_ms_predicted=0.2),
            make_row("fast", latency_ms_predicted=0.1)]
    heard: list[str] = []
    found = minutes.affordable(rows, lambda row: row.id == "made", 10.0, left_s, heard.append)
    assert {row.id for row in found} == kept
    assert all(row.id in heard[0] for row in rows if row.id not in kept)
    assert len(minutes.affordable(rows[1:], lambda row: False, 10.0, -5.0, heard.append)) == 1
    many = [make_row(str(at), latency_ms_predicted=0.1 * (9 - at)) for at in range(9)]
    many.append(make_row("drawn", is_control=True, latency_ms_predicted=2.0))
    found = minutes.affordable(many, lambda row: False, 10.0, 35.0, heard.append)
    assert [row.id for row in found] == ["0", "4", "8"], "spread over latency; controls come last"


def test_networks_are_trained_one_after_another_or_side_by_side():
    assert PACE.seconds(networks("fast", "slow"), 100, 1) == pytest.approx(5 + 10 + 5 + 40)
    beside = minutes.BESIDE
    assert PACE.seconds(networks("fast", "slow"), 100, 2) == pytest.approx(minutes.STARTING_S + beside * 45)
    assert PACE.seconds(networks("fast", "fast", "fast"), 100, 2) == pytest.approx(minutes.STARTING_S + beside * 30)
    assert PACE.seconds(networks("slow"), 100, 2) == PACE.seconds(networks("slow"), 100, 1)
    learnt = replace(PACE, done={"slow": 40})  # in its trial
    assert learnt.seconds(networks("fast", "slow"), 100, 1) == pytest.approx(5 + 10 + 5 + 24)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_most_steps_fit_and_one_more_does_not(workers: int) -> None:
    asked = networks("fast", "slow", "fast")
    steps = PACE.most_steps(asked, 100.0, workers, 10_000)
    assert PACE.seconds(asked, steps, workers) <= 100.0 < PACE.seconds(asked, steps + 1, workers)
    assert PACE.most_steps(asked, 1e9, workers, 500) == 500
    assert PACE.most_steps(asked, 1.0, workers, 500) == 0


def test_steps_that_a_trial_has_done_leave_time_for_more() -> None:
    asked, pace = networks("slow"), replace(PACE, done={"slow": 80})  # 159 steps are trained anew, of 160 only half
    assert pace.seconds(asked, 160, 1) < pace.seconds(asked, 159, 1)
    assert pace.most_steps(asked, pace.seconds(asked, 180, 1), 1, 500) == 180


def test_a_network_that_cannot_be_trained_ends_no_search_and_counts_as_slow(monkeypatch):
    def fail(network: Any, making: Any) -> float:
        raise TrainingError("the loss is not finite")

    monkeypatch.setattr(minutes, "step_seconds", fail)
    assert PACE.with_networks(networks("fast", "broken"), None).step_s == {"fast": 0.1, "slow": 0.4, "broken": 0.4}
    def train(network: Any, making: Any, image_size: int) -> float:
        if network.id == "broken":
            raise TrainingError("the loss is not finite")
        return 0.2

    monkeypatch.setattr(minutes, "step_seconds", train)
    assert minutes.mean_step_seconds(networks("good", "broken"), None, 32, PACE) == pytest.approx((0.2 + 0.4) / 2)


def rows(finalists: int, controls: int, baselines: int) -> list[Any]:
    made = [make_row(f"f{at}") for at in range(finalists)]
    made += [make_row(f"c{at}", is_control=True, control_of="f0") for at in range(controls)]
    made += [make_row(f"b{at}", is_baseline=True) for at in range(baselines)]
    return [SimpleNamespace(id=row.id, is_control=row.is_control, is_baseline=row.is_baseline, is_known=False,
                            network=SimpleNamespace(id="slow", trained_id="slow")) for row in made]


@pytest.mark.parametrize(("left_s", "kept"), [
    (3600.0, ["f0", "f1", "f2", "f3", "c0", "b0"]), (145.0, ["f0", "f1", "f2", "f3", "b0"]),
    (95.0, ["f0", "f1", "f3"]), (1.0, ["f0", "f1", "f3"])])
def test_controls_go_first_then_baselines_and_three_finalists_stay(left_s: float, kept: list[str], clock: Time) -> None:
    watch, said = Clock.start(1.0 + left_s / 60), []
    clock.now += 60
    chosen, steps = fitted(rows(4, 1, 1), watch, PACE, 1, (FEWEST_STEPS, 400), said.append)
    assert [row.id for row in chosen] == kept
    assert steps >= FEWEST_STEPS
    assert steps == 400 or left_s < 3600
    assert bool(said) == (len(kept) < 6)
    assert all("no time for" in line for line in said)


def test_finalists_are_trained_in_full_before_more_than_one_control_and_baseline_are(clock: Time) -> None:
    wanted = rows(2, 2, 3)
    wanted[-2].network = SimpleNamespace(id="dear", trained_id="dear")
    pace = Pace({**PACE.step_s, "dear": 4.0}, 1.0)
    chosen, steps = fitted(wanted, Clock.start(4.5), pace, 1, (160, 1600), lambda line: None)
    assert [row.id for row in chosen] == ["f0", "f1", "c1", "b2"]
    assert FEWEST_STEPS <= steps < 160
    assert pace.step_s["dear"] * FEWEST_STEPS > 100
    everything, steps = fitted(wanted, Clock.start(60.0), pace, 1, (160, 1600), lambda line: None)
    assert len(everything) == 7
    assert steps >= 160


@pytest.mark.parametrize(("held", "change", "taken"), [
    ("f0 c0", {}, True), ("f0 c0 c1", {}, True), ("f0", {}, False), ("f0 c0 x", {}, False),
    ("f0 c0", {"device": "cuda"}, True), ("f0 c0", {"lr": 0.2}, False)])
def test_the_front_that_stands_is_taken_with_what_was_made_late_wherever_it_was(held, change, taken, monkeypatch):
    stands, recipe = [make_row(name, verified=True) for name in held.split()], {"device": "cpu", "lr": 0.1}
    monkeypatch.setattr(road, "_read_held", lambda run: (stands, {"recipe": recipe, "cap_p99_ms": None}))
    kept, wanted = ([make_row(name) for name in names.split()] for names in ("f0 c0", "f0 c0 c1"))
    assert road._read_verified(None, kept, wanted, {**recipe, **change}, None) == (stands if taken else [])


def test_known_networks_of_the_space_are_the_last_wanted_controls(clock: Time) -> None:
    wanted = rows(2, 3, 1)
    wanted[3].is_known = True
    wanted[4].network = SimpleNamespace(id="dear", trained_id="dear")
    pace = Pace({**PACE.step_s, "dear": 0.5}, 1.0)
    chosen, _ = fitted(wanted, Clock.start(6.0), pace, 1, (160, 160), lambda line: None)
    assert [row.id for row in chosen] == ["f0", "f1", "c0", "b0"]


@pytest.mark.parametrize(("whole", "kept"), [("", ["f0", "f1", "b2"]), ("b0", ["f0", "f1", "b0"])])
def test_the_network_that_others_are_cut_from_is_the_last_baseline_to_go(whole, kept, clock):
    wanted = rows(2, 0, 3)
    for row, cost in zip(wanted[2:], ("dear", "slow", "fast"), strict=True):
        row.network = SimpleNamespace(id=cost, trained_id=cost)
    pace = Pace({**PACE.step_s, "dear": 0.6}, 1.0)
    chosen, _ = fitted(wanted, Clock.start(3.7), pace, 1, (160, 160), lambda line: None, whole)
    assert [row.id for row in chosen] == kept


def test_too_few_minutes_name_those_that_suffice(clock: Time) -> None:
    watch = Clock.start(1.0)
    clock.now += 30
    with pytest.raises(BudgetError, match=r"budget.minutes=1 is too short .* Give budget.minutes=") as caught:
        trials_seconds(watch, PACE, networks("slow", "slow"), 1)
    enough = Clock(float(str(caught.value).split("=")[-1].split()[0]), watch.began)
    assert trials_seconds(enough, PACE, networks("slow", "slow"), 1) >= minutes.LEAST_TRIALS_S


def test_minutes_that_a_busy_machine_spent_on_preparing_are_not_thrown_away(clock: Time) -> None:
    watch = Clock.start(5.0)
    clock.now += 300
    assert trials_seconds(watch, PACE, networks("fast"), 1) == minutes.LEAST_TRIALS_S
    clock.now += 75
    with pytest.raises(BudgetError, match="too short"):
        trials_seconds(watch, PACE, networks("fast"), 1)


def test_trials_leave_time_for_a_front_and_timing_takes_what_is_left(clock: Time) -> None:
    watch = Clock.start(10.0)
    assert trials_seconds(watch, PACE, networks("fast", "fast"), 2) == pytest.approx(minutes.TRIALS * 600)
    clock.now += 550
    assert timing_seconds(watch, 4) == pytest.approx(50 - 4 * minutes.COMPILING_S - minutes.ENDING_S)
    clock.now += 100
    assert timing_seconds(watch, 4) == minutes.LEAST_TIMING_S


def test_a_machine_that_scores_slowly_gets_its_time_from_the_trials_and_the_training(clock: Time) -> None:
    slow, watch = replace(PACE, scoring_s=60.0), Clock.start(10.0)
    chosen = {pace.scoring_s: fitted(rows(2, 1, 1), watch, pace, 1, (80, 1600), lambda line: None)
              for pace in (PACE, slow)}
    assert chosen[60.0][1] < chosen[PACE.scoring_s][1]
    assert timing_seconds(watch, 4, slow.scoring_s) == pytest.approx(600 - 4 * 60 - minutes.ENDING_S)
    with pytest.raises(BudgetError, match=r"needs 1\d\d s more"):
        trials_seconds(Clock.start(2.0), slow, networks("fast", "fast"), 1)
    assert trials_seconds(Clock.start(2.0), PACE, networks("fast", "fast"), 1)


def test_only_files_of_tasks_with_pairs_are_given_time_for_validation_images() -> None:
    tasks = ("classification", "detection", "multilabel")
    assert [validated_share(replace(sides_data(), task=task)) for task in tasks] == [16 / 40, 0, 0]


@pytest.mark.parametrize(("px", "told"), [(1.0, minutes.COMPILING_S), (42.0, 42.0)])
def test_what_another_machine_takes_to_score_is_asked_once_and_no_time_of_making(px, told, clock, monkeypatch):
    made: list[Path] = []

    def make(network: Any, folder: Any, making: Any, heard: Any = lambda *_: None) -> None:
        made.append(folder.path)
        clock.now += 3.0
        for step in range(4):
            clock.now += 0.5
            heard(step + 1, 4)
        clock.now += 2.0

    def score(folder: Any) -> float:
        assert folder.path == made[-1]
        clock.now += 1000.0
        return px

    monkeypatch.setattr("hwnas.search.minutes.make", make)
    monkeypatch.setattr("hwnas.search.minutes.fp32_grades", lambda *args: 0.0)
    monkeypatch.setattr(minutes, "_take_few", lambda data, *_: data)
    data: Any = SimpleNamespace(train=[0], validation=[], test=[], task="classification", at_size=lambda *_: None)
    making = BuildSettings(data, replace(FULL_TRAINING, batch_size=1), 0, Target("xeon_int8", "openvino", "int8"))
    network: Any = SimpleNamespace(id="a", trained_id="a", shape=SimpleNamespace(image_size=8), provenance={})
    pace, without = (minutes.pace_of(network, making, how) for how in (score, None))
    assert pace == replace(without, scoring_s=told)
    assert (pace.making_s, pace.exporting_s) == (5.0, 2.0)
    assert len(made) == 4


def test_a_trained_network_is_exported_in_the_seconds_that_all_test_images_take_too(clock, monkeypatch) -> None:
    def make(network: Any, folder: Any, making: Any, heard: Any = lambda *_: None) -> None:
        for step in range(4):
            clock.now += 0.5
            heard(step + 1, 4)
        clock.now += 2.0

    def grade(path: Path, data: Any) -> None:
        clock.now += 0.01 * len(data.test)

    monkeypatch.setattr("hwnas.search.minutes.make", make)
    monkeypatch.setattr("hwnas.search.minutes.fp32_grades", grade)
    labels = np.arange(10 * minutes._SOME_IMAGES) % 2
    parts = [Split(np.zeros((n, 8, 8, 1), np.uint8), labels[:n]) for n in (64, 4, len(labels))]
    data = replace(sides_data(), train=parts[0], validation=parts[1], test=parts[2])
    making = BuildSettings(data, replace(FULL_TRAINING, batch_size=64), 0, Target("xeon_int8", "openvino", "int8"))
    network: Any = SimpleNamespace(id="a", trained_id="a", shape=SimpleNamespace(image_size=8), provenance={})
    pace = minutes.pace_of(network, making)
    assert pace.exporting_s == pytest.approx(2.0 + 0.01 * len(labels), rel=0.01)


@pytest.mark.parametrize(("seconds", "px", "least_px", "steps", "size"), [
    (75.0, 32, 32, 80, 32), (300.0, 32, 32, None, 32), (3600.0, 32, 32, 320, 32), (8.0, 32, 32, 40, 32),
    (60.0, 64, 32, 80, 32), (60.0, 64, 64, 40, 64), (150.0, 64, 32, 63, 64), (60.0, 128, 32, 80, 32),
    (200.0, 128, 32, 80, 64)])
def test_trials_are_as_long_as_the_minutes_allow(seconds, px, least_px, steps, size):
    length = proxy_length(80, 10.0, seconds, 1, lambda px: 0.03 * (px / 32) ** 2, px, least_px)
    assert (length.get("max_steps", 80), length.get("image_size", px)) == (steps or length["max_steps"], size)
    assert length.get("min_steps") == length.get("max_steps")
    if steps is None:  # as long as many trials fit
        assert 64 <= seconds / (0.03 * (length["max_steps"] + 10) + minutes.ASKING_S) < 66
    if (steps, size) == (80, px):
        assert length == {}


def test_trials_that_were_asked_for_count_and_workers_share_them():
    asked = {n: proxy_length(80, 10.0, 300.0, 1, lambda px: 0.03, 32, 32, (min(16, n), n)) for n in (8, 64, 100)}
    assert asked[8]["max_steps"] == 320
    assert asked[64]["max_steps"] == proxy_length(80, 10.0, 300.0, 1, lambda px: 0.03, 32, 32)["max_steps"] > 80
    assert asked[100] == {}
    alone, beside = (proxy_length(80, 10.0, 300.0, n, lambda px: 0.03, 32, 32)["max_steps"] for n in (1, 2))
    assert 1.5 * alone < beside <= 320


def test_a_network_of_long_steps_is_timed_by_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    images = np.zeros((64, 8, 8, 1), np.uint8)
    dataset: Any = SimpleNamespace(train=Split(images, np.zeros(64, np.int64)))
    making = BuildSettings(dataset, replace(FULL_TRAINING, batch_size=8), 0, Target("xeon_int8", "openvino", "int8"))
    network: Any = SimpleNamespace(trained_id="a", build=lambda: None, shape=SimpleNamespace(image_size=8),
                                   provenance={})
    for each_s, steps in ((0.01, 4), (3.0, 2)):
        done: list[int] = []

        def train(*_: Any, progress: Any, each_s: float = each_s, done: list[int] = done, **__: Any) -> None:
            for step in range(4):
                clock.now += each_s
                done.append(step)
                progress(step + 1, 4)

        monkeypatch.setattr("hwnas.search.minutes.train", train)
        assert minutes.step_seconds(network, making) == pytest.approx(each_s)
        assert len(done) == steps


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where a search takes moments: nothing is timed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HWNAS_HOME", "home")
    monkeypatch.setattr(wave, "measure", lambda calls, *args, **options: dict.fromkeys(calls, measured(0.2)))
    monkeypatch.setattr(trials, "measure_pace", lambda *args: Pace(defaultdict(lambda: 0.1), 1.0))
    write_images(Path("images.npz"))
    write_accuracies(Path("known.csv"), SearchSpace.load(write_space(Path()), channels=1, classes=10))
    write_table(Path("home"), "ort_fp32", space_name="tiny.yaml")
    return tmp_path


@pytest.mark.soak
def test_a_search_that_no_model_can_follow_says_so_and_ends_well(bench, monkeypatch, capsys):
    def refuse(*args: Any) -> Any:
        raise BudgetError("no setting was found that is allowed")

    monkeypatch.setattr("hwnas.search.trials.beliefs", refuse)
    assert main(SEARCH) == 0
    assert "without a model of all trials: no setting was found" in capsys.readouterr().err
    assert main(SEARCH) == 0
    row, = rows_of(bench / "run" / "front.csv")
    assert (row["verified"], row["top1_estimated"]) == ("true", "")


@pytest.mark.soak
def test_the_length_of_trials_is_decided_once_and_never_where_one_was_given(bench, monkeypatch, capsys):
    asked: list[tuple[Any, ...]] = []

    def decide(*args: Any) -> dict[str, int]:
        asked.append(args)
        return {"min_steps": 5, "max_steps": 5}

    monkeypatch.setattr(trials, "proxy_length", decide)
    monkeypatch.setattr(road, "verified", lambda prepared, trials, console: ([], []))
    proxy = [text for text in SEARCH if text != "-q" and not text.startswith(("accuracy", "tabular"))]
    command = [*proxy, "budget.minutes=600", "n_trials=2"]
    assert main(command) == 0
    assert "a trial trains for 5 steps at 8 px" in capsys.readouterr().err
    values = [row["top1_proxy"] for row in rows_of(bench / "run" / "trials.csv")]
    assert main([*command, "n_trials=3"]) == 0
    assert [row["top1_proxy"] for row in rows_of(bench / "run" / "trials.csv")][:2] == values
    assert len(asked) == 1
    assert main([*command, "out=other", "proxy.max_steps=6", "proxy.min_steps=6"]) == 0
    assert main([*command, "out=third", "budget.minutes=null"]) == 0
    assert main([*command, "out=fourth", "search.reuse=run"]) == 0  # its values are of the same length
    assert len(asked) == 1
    assert main([*command, "budget.minutes=null", "n_trials=4"]) == 0  # the study keeps its length
    assert [row["top1_proxy"] for row in rows_of(bench / "run" / "trials.csv")][:2] == values
