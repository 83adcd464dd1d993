"""The rungs of a race: who is trained when, from whose weights, for how long, and who is dropped."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lines_fixtures import N_IMAGES, OPTIONS, Bench, by_size, course_of, cuts, cuts_of_two, predict
from optuna.trial import TrialState

from hwnas.errors import BudgetError
from hwnas.latency.measured import NotTimed
from hwnas.latency.model import Predictions
from hwnas.search import race
from hwnas.search.course import known_networks, smaller_in
from hwnas.search.race import ENDS, FINISH, KNOWN, PIXELS, REFERENCE, SIZE, TRUNK, Choose, Race, Step, Train, sure_that
from hwnas.search.racing import tell_room
from hwnas.space.architecture import Architecture
from hwnas.study.lines import pack
from hwnas.study.objective import Objective


def is_whole(architecture: Architecture) -> bool:
    """Whether it is the whole network, at any image size."""
    return replace(architecture, image_size=64) == cuts().known["whole"]


def flat(architecture: Architecture, rung: str) -> float:
    """All networks answer alike."""
    return 0.8


def whole_is_bad(architecture: Architecture, rung: str) -> float:
    return 0.3 if is_whole(architecture) else by_size(architecture, rung)


def step_until(bench: Bench, reached: Callable[[Sequence[Step]], bool]) -> None:
    """Take one step after another until those that come next are such."""
    while not reached(steps := bench.race.steps()):
        bench.take(steps[0])


def is_behind_known(steps: Sequence[Step]) -> bool:
    return not (isinstance(steps[0], Train) and steps[0].rung == KNOWN)


def run_by_clock(bench: Bench, left: list[float]) -> None:
    """Let a race run on a machine that takes 0.02 s a step, and twice that with int8's rounding. Seconds are taken
    from `left`."""
    for _ in range(300):
        if not (steps := bench.race.steps()):
            break
        before = len(bench.done)
        bench.take(steps[0])
        if len(bench.done) > before and bench.done[-1][0] != KNOWN:
            left[0] -= next(float(line.legs[-1]["seconds"]) for line in bench.lines if line.id == bench.done[-1][1])


def test_the_seconds_of_a_step_are_guessed_by_the_same_network_on_other_images() -> None:
    course = course_of()
    whole = max((known.architecture for known in course.known), key=lambda network: network.macs)
    small, begun = replace(whole, image_size=32), Race(course, ())
    others = [known.architecture for known in course.known if known.architecture != whole]
    assert min(abs(each.macs - small.macs) for each in others) < whole.macs - small.macs
    assert begun.step_s(small) == pytest.approx(begun.step_s(whole) * 0.5 ** PIXELS, rel=0.2)


def test_known_networks_come_first_then_the_trunk_slowest_first_then_sizes_from_the_size_above() -> None:
    bench = Bench(course_of(), by_size).run()
    rungs = [rung for rung, *_ in bench.done]
    assert rungs.count(KNOWN) == len(bench.course.known)
    assert {*rungs[:len(bench.course.known)]} == {KNOWN}
    assert next(bench.named()[id] for rung, id, *_ in bench.done if rung == KNOWN) == "whole"
    trunk = [entry for entry in bench.done if entry[0] == TRUNK]
    assert trunk[0][3] is None, "the slowest goes on from its own weights"
    lines = {line.id: line for line in bench.lines}
    assert all(lines[source].latency_ms >= lines[id].latency_ms for _, id, _, source in trunk[1:] if source)
    for rung, id, _, source in bench.done:
        if rung == SIZE:
            assert lines[source].architecture == replace(lines[id].architecture, image_size=lines[source].px)
            assert lines[source].px > lines[id].px
    assert max(map(rungs.index, {KNOWN, TRUNK, SIZE})) < rungs.index(FINISH)


def test_a_slower_network_that_a_faster_one_surely_beats_is_dropped_and_gets_no_smaller_images() -> None:
    bench = Bench(course_of(), whole_is_bad).run()
    whole = next(line for line in bench.lines if bench.named().get(line.id) == "whole")
    assert whole.rungs == {KNOWN, race.REFERENCE}, "others are held against it"
    assert whole.state == TrialState.COMPLETE
    assert whole.number not in (bench.chosen or ())
    assert not any(is_whole(line.architecture) and line.made == SIZE for line in bench.lines)


@pytest.mark.parametrize(("times", "better", "goes_on"), [(2.0, 10, True), (1.05, 10, False), (1.05, -1, True)])
def test_the_nearer_two_are_in_latency_the_less_sure_it_must_be_that_the_faster_is_better(times, better, goes_on):
    bench = Bench(course_of())
    step_until(bench, is_behind_known)
    faster, slower = sorted(bench.lines, key=lambda line: line.latency_ms)[:2]
    right = np.arange(N_IMAGES) < 800
    other = right.copy()
    other[:20] = False
    other[800:820 + better] = True  # some 92 % sure to be better by 10 images
    lines = [line if line.number not in (faster.number, slower.number) else replace(
        line, latency_ms=faster.latency_ms * (1.0 if line is faster else times),
        legs=({**line.legs[0], "right": pack(other if line is faster else right)},)) for line in bench.lines]
    trunk = [limb.line.number for limb in Race(bench.course, lines).trunk]
    assert faster.number in trunk
    assert (slower.number in trunk) == goes_on


def test_before_the_finish_a_line_stays_unless_a_faster_one_is_surely_better() -> None:
    """Where two are nearly as fast, their order may still change: the most accurate network must not be lost there."""
    bench = Bench(course_of())
    step_until(bench, lambda steps: isinstance(steps[0], Choose))
    faster, slower = sorted(bench.race.rivals, key=lambda line: line.latency_ms)[:2]
    right = np.arange(N_IMAGES) < 800
    for better, stays in ((10, True), (40, False)):  # some 92 % and surely
        other = right.copy()
        other[:20], other[800:820 + better] = False, True
        lines = [line if line.number not in (faster.number, slower.number) else replace(
            line, latency_ms=faster.latency_ms * (1.0 if line is faster else 1.05),
            legs=(*line.legs[:-1], {**line.legs[-1], "right": pack(other if line is faster else right)}))
            for line in bench.lines]
        step = next(iter(Race(replace(bench.course, choose=list), lines)._finish()))
        numbers = {line.number for line in step.lines}
        assert faster.number in numbers
        assert (slower.number in numbers) == stays


def test_a_faster_line_that_is_larger_drops_none_where_size_counts() -> None:
    course = course_of(objective=Objective(target_ms=0.1, known=("latency_ms", "size_mb")))
    bench = Bench(course, whole_is_bad)
    step_until(bench, is_behind_known)
    whole = next(line for line in bench.lines if bench.named()[line.id] == "whole")
    assert whole.number not in {limb.line.number for limb in bench.race.trunk}, "a cut is both faster and smaller"
    small = replace(whole.architecture, image_size=24)
    cut = min((line for line in bench.lines if line.made == KNOWN), key=lambda line: line.latency_ms)
    assert not course.is_as_cheap(small, cut.architecture)
    assert course.is_as_cheap(cut.architecture, small)
    assert course_of().is_as_cheap(small, cut.architecture), "where latency alone counts"


@pytest.mark.parametrize(("better", "kept"), [("mobilenetv2_035", 0.2), ("mobilenetv2_050", 0.2), ("", 0.0)])
def test_several_networks_race_and_the_one_whose_cuts_are_beaten_leaves_at_the_first_rung(better, kept) -> None:
    """Whole networks stay for others to be held against, but only the slowest finalist's own is trained for that."""
    def skill(architecture: Architecture, rung: str) -> float:
        return by_size(architecture, rung) - kept * (architecture.around != better)

    bench = Bench(course_of(space=cuts_of_two(), k=3), skill).run()
    assert {line.architecture.around for line in bench.lines if KNOWN in line.rungs} == {*cuts_of_two().arounds}
    trained = [line for line in bench.lines if line.rungs & {TRUNK, SIZE}]
    if better:
        fastest_ms = min(line.latency_ms for line in bench.lines if KNOWN in line.rungs
                         and line.architecture.around == better)
        assert all(line.architecture.around == better or line.latency_ms < fastest_ms for line in trained)
    else:
        assert {line.architecture.around for line in trained} == {*cuts_of_two().arounds}
    by_id = {line.id: line for line in bench.lines}
    for _, id, _, source in bench.done:
        assert source is None or by_id[source].architecture.around == by_id[id].architecture.around
    finalists = [line for line in bench.lines if line.number in (bench.chosen or ())]
    assert 0 < len(finalists) <= 3
    slowest = max(finalists, key=lambda line: line.latency_ms)
    ended = [line.architecture.around for line in bench.lines if line.id in bench.course.wholes.values()
             and line.rungs & {FINISH, REFERENCE}]
    assert slowest.architecture.around in ended
    assert not any(line.live for line in bench.lines)


def test_a_line_that_fails_ends_and_the_others_are_cut_from_another() -> None:
    whole = cuts().known["whole"].id
    bench = Bench(course_of(), failing=frozenset({(TRUNK, whole)})).run()
    assert [line.state for line in bench.lines if line.id == whole] == [TrialState.FAIL]
    assert not any(source == whole for *_, source in bench.done)
    assert any(rung == FINISH for rung, *_ in bench.done)


def test_what_is_begun_is_neither_dropped_nor_left_behind_and_nobody_is_chosen_before_it_ends() -> None:
    bench = Bench(course_of(), by_size)
    while not any(isinstance(step, Train) and step.rung == SIZE and step.line for step in bench.race.steps()):
        step = bench.race.steps()[0]
        if isinstance(step, Train) and step.rung == SIZE and step.line is None:
            bench._add(step.architecture, SIZE, step.source.number if step.source else None, step.move)
        else:
            bench.take(step)
    begun = next(step for step in bench.race.steps() if isinstance(step, Train) and step.rung == SIZE and step.line)
    number = begun.line.number if begun.line else -1
    bench.lines[number] = replace(bench.lines[number], claim={
        "rung": SIZE, "source": begun.source.number if begun.source else None, "move": begun.move, "steps": 77,
        "start": begun.start, "end": begun.end, "threads": 1, "rounded": 0.0})
    bench.skill = lambda architecture, rung: 0.99 if architecture.macs < begun.architecture.macs else 0.1  # hopeless
    for _ in range(400):  # all that other processes can do
        others = [step for step in bench.race.steps() if not (isinstance(step, Train) and step.line
                                                             and step.line.number == number)]
        if not others:
            break
        bench.take(others[0])
    assert bench.chosen is None
    left, = bench.race.steps()
    assert (left.line, left.rung, left.source.number if left.source else None) == (
        bench.lines[number], SIZE, begun.source.number if begun.source else None)
    bench.lines[number] = replace(bench.lines[number], claim=None)
    assert bench.run().chosen


def test_a_short_race_has_fewer_sizes() -> None:
    long, short = (smaller_in(cuts(), is_short) for is_short in (False, True))
    whole = cuts().known["whole"]
    assert [network.image_size for network in long(whole)] == [56, 48, 40]
    assert [network.image_size for network in short(whole)] == [48, 36]


def test_a_race_asks_for_what_may_still_run_at_moments_at_which_nobody_trains():
    timed, waves, bench = set[str](), list[list[Architecture]](), None

    def ask(networks: Sequence[Architecture]) -> Predictions:
        if missing := [network for network in networks if network.id not in timed]:
            raise NotTimed(SimpleNamespace(), missing)  # type: ignore[arg-type]
        return predict(networks)

    known = [*known_networks(cuts(), predict, OPTIONS).values()]
    timed |= {network.id for network in known}
    bench = Bench(course_of(predictor=ask), by_size)
    for _ in range(400):
        assert all(np.isfinite([*bench.race.outlook().values()]))  # also where nothing was timed since
        try:
            steps = bench.race.steps()
        except NotTimed as untimed:
            waves.append([*untimed.networks])
            timed |= {network.id for network in untimed.networks}
            assert not any(line.claim for line in bench.lines)
            continue
        if not steps:
            break
        bench.take(steps[0])
    undisturbed = Bench(course_of(), by_size).run()
    assert bench.done == undisturbed.done
    trunk = {limb.line.architecture for limb in bench.race.trunk}
    assert {replace(network, image_size=64) for network in waves[0]} <= trunk
    assert len(waves[0]) < len(known) * 7
    assert all(len(wave) <= 4 for wave in waves[1:])  # sizes between two


def test_what_cannot_be_timed_and_what_is_over_the_cap_after_all_is_not_trained() -> None:
    def without(networks: Sequence[Architecture]) -> Predictions:
        told = predict(networks)
        sizes = np.array([network.image_size for network in networks])
        told.mean[sizes == 56] = told.high[sizes == 56] = np.inf
        told.high[sizes == 48] = 1e9
        return told

    bench = Bench(course_of(cap_ms=1e6, predictor=without), by_size).run()
    sizes = {line.px for line in bench.lines if SIZE in line.rungs}
    assert {40, 32} <= sizes
    assert not sizes & {48, 56}


def test_no_size_is_asked_for_while_a_known_network_is_in_training() -> None:
    bench = Bench(course_of(), by_size)
    step_until(bench, is_behind_known)
    last = next(line for line in bench.lines if line.legs)
    bench._change(last, legs=(), claim={"rung": KNOWN, "source": None, "move": "", "steps": 9, "start": 1.0, "end": 1.0,
                                        "threads": 1})
    assert [step.rung for step in bench.race.steps() if isinstance(step, Train)] == [KNOWN]


def test_k_lines_and_minutes_bound_what_is_trained():
    bench = Bench(course_of(k=4), by_size).run()
    finalists = [line for line in bench.lines if FINISH in line.rungs]
    whole = cuts().known["whole"].id
    assert whole in {line.id for line in finalists}
    assert 4 <= len(finalists) <= 5
    bench = Bench(course_of(n_lines=7), by_size).run()
    assert len(bench.lines) <= 7
    bench = Bench(replace(course_of(None), left_s=lambda: -10.0), by_size).run()
    assert {steps for rung, _, steps, _ in bench.done if rung != KNOWN} == {race.LEAST_STEPS}


@pytest.mark.parametrize(("int8_loss", "rounds"), [(0.002, False), (0.004, True)])
def test_last_legs_end_with_the_rounding_of_int8_where_that_loses_accuracy(int8_loss: float, rounds: bool) -> None:
    bench = Bench(course_of(), by_size, int8_loss=int8_loss).run()
    assert all(leg["rung"] in ENDS for line in bench.lines for leg in line.legs if leg["rounded"])
    last = [line.legs[-1] for line in bench.lines if line.rungs & ENDS]
    assert {leg["rung"] for leg in last} == {FINISH}
    assert all(bool(leg["rounded"] * leg["steps"]) == rounds for leg in last)
    floats = Bench(replace(bench.course, is_int8=False), by_size, int8_loss=int8_loss).run()
    assert not any(leg["rounded"] for line in floats.lines for leg in line.legs)


@cache
def taken_in_order() -> Counter[tuple[str, str]]:
    """Rung and network of each leg of a race whose steps are taken in order."""
    return Counter(entry[:2] for entry in Bench(course_of(k=5), by_size).run().done)


@pytest.mark.soak
@settings(max_examples=15)
@given(st.integers(0, 10_000))
def test_any_number_of_processes_come_to_the_same_legs(seed: int) -> None:
    """Whatever is taken first of what can be done now: the trainings are the same."""
    mixed = Bench(course_of(k=5), by_size).run(random.Random(seed).choice)
    assert Counter(entry[:2] for entry in mixed.done) == taken_in_order()


def test_a_race_goes_on_where_it_was() -> None:
    """A race is decided by its lines alone: stopped anywhere, it takes the same steps."""
    whole = Bench(course_of(k=4), by_size).run()
    stopped = Bench(course_of(k=4), by_size)
    while stopped.race.steps():
        again = Bench(stopped.course, by_size, lines=list(stopped.lines), chosen=stopped.chosen, done=stopped.done)
        again.take(again.race.steps()[0])
        stopped = again
    assert stopped.done == whole.done


def test_a_cap_leaves_out_what_does_not_keep_it_and_takes_smaller_images_of_it():
    free = Bench(course_of()).course
    cap_ms = 0.5 * free.bound_ms
    course = course_of(cap_ms=cap_ms)
    assert course.bound_ms == cap_ms
    assert all(course.latency_ms(known.architecture) <= cap_ms for known in course.known)
    bench = Bench(course, by_size).run()
    assert all(line.latency_ms <= cap_ms for line in bench.lines)
    assert any(known.architecture.image_size < 64 for known in course.known)
    with pytest.raises(BudgetError, match=r"budget.latency_ms=0.001: .* the fastest takes 0\.\d+ ms"):
        known_networks(cuts(), predict, replace(OPTIONS, cap_ms=0.001))
    bound_ms, said = course_of().bound_ms, list[str]()
    console: Any = SimpleNamespace(remark=said.append)
    for cap_ms in (None, 1.9 * bound_ms):
        tell_room(course_of(cap_ms=cap_ms), cap_ms, console)
    assert not said
    tell_room(course_of(cap_ms=4 * bound_ms), 4 * bound_ms, console)
    assert len(said) == 1
    assert said[0].endswith("try dataset.image_size=128.")


@pytest.mark.parametrize("int8_loss", [0.0, 0.01])
def test_the_seconds_are_used_up_and_no_more(int8_loss: float) -> None:
    """A unit is chosen anew for each leg."""
    left = [200.0]
    bench = Bench(replace(course_of(None, k=4), left_s=lambda: left[0]), by_size, int8_loss=int8_loss)
    run_by_clock(bench, left)
    assert -5 < left[0] < 60  # the estimates of steps by MACs are rough at first


def test_seconds_kept_for_more_finalists_than_there_are_train_those_there_are() -> None:
    bench = Bench(course_of(None, k=60, left_s=100.0), by_size)
    while bench.chosen is None:
        bench.take(bench.race.steps()[0])
    assert 0 < len(bench.chosen) < 60
    with_reserve = Race(replace(bench.course, making_s=5.0), bench.lines, bench.chosen)
    assert with_reserve.unit() / bench.race.unit() == pytest.approx(1 + 0.05 * (60 - len(bench.chosen)))


def test_smaller_images_that_cannot_win_are_not_trained() -> None:
    """Where a faster line is surely better than the source, its smaller images are not tried."""
    def fast_is_best(architecture: Architecture, rung: str) -> float:
        worse = is_whole(architecture) and rung != KNOWN
        return 0.70 if worse else 0.90

    bench = Bench(course_of(), fast_is_best).run()
    assert not any(line.made == SIZE and is_whole(line.architecture) for line in bench.lines)


def test_certainty_is_that_of_paired_images() -> None:
    right = np.arange(1000) < 800
    assert sure_that(right, right) == 0.5
    better = right.copy()
    better[800:830] = True
    assert sure_that(better, right) > 0.999
    other = right.copy()
    other[:200], other[800:] = False, True
    assert sure_that(other, right) == pytest.approx(0.5, abs=0.01)


def test_a_training_leg_has_threads_of_all_workers_in_the_trunk() -> None:
    bench = Bench(course_of(workers=4), by_size)
    step_until(bench, lambda steps: any(isinstance(step, Train) and step.rung == TRUNK for step in steps))
    assert next(step.threads for step in bench.race.steps() if isinstance(step, Train) and step.rung == TRUNK) == 4
