"""The race: the obvious cuts are judged untrained, and those that no faster one beats share the seconds."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lines_fixtures import N_IMAGES, OPTIONS, STEP_S, Bench, by_size, changed, course_of, cuts, cuts_of_two, predict
from optuna.trial import TrialState
from race_fixtures import opened

from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset, Split
from hwnas.errors import BudgetError, StudyError
from hwnas.front.make import BuildSettings
from hwnas.latency.measured import NotTimed
from hwnas.latency.model import Predictions
from hwnas.networks.network import FoundNetwork
from hwnas.search import racer, racing
from hwnas.search.course import Length, known_networks, smaller_of
from hwnas.search.minutes import Clock, Pace
from hwnas.search.race import (
    ENOUGH_STEPS,
    FALL,
    FEWEST,
    FINISH,
    FIRST,
    LEAST_PIECES,
    LEAST_STEPS,
    MOST_PIECES,
    NEARLY,
    PIECE,
    PIXELS,
    SHRUNK,
    Race,
    Step,
    Train,
    sure_that,
)
from hwnas.search.racer import Event, Racer, RaceSetting, state_path
from hwnas.search.racing import judged_in, story_of, tell_room
from hwnas.search.spread import guess_ms, spread_over_latency
from hwnas.space.architecture import Architecture
from hwnas.study.lines import pack, read_lines
from hwnas.study.objective import Objective
from hwnas.study.record import KNOWN
from hwnas.training.classifier import IMAGES
from hwnas.training.line import Keeping, Leg, Stretch
from hwnas.training.loop import Checkpoint
from hwnas.training.recipe import FINE_TUNING

WHOLE = cuts().known["whole"].id


def whole_is_bad(architecture: Architecture, rung: str) -> float:
    return 0.3 if replace(architecture, image_size=64) == cuts().known["whole"] else by_size(architecture, rung)


def step_until(bench: Bench, reached: Callable[[Sequence[Step]], bool]) -> None:
    """Take one step after another until those that come next are such."""
    while not reached(steps := bench.race.steps()):
        bench.take(steps[0])


def rung_is(*rungs: str) -> Callable[[Sequence[Step]], bool]:
    return lambda steps: isinstance(steps[0], Train) and steps[0].rung in rungs


def seconds_of(bench: Bench) -> Mapping[str, float]:
    return {line.id: sum(leg["seconds"] for leg in line.legs) for line in bench.lines}


def finished(bench: Bench) -> list[Any]:
    return [line for line in bench.lines if line.number in (bench.chosen or ())]


@settings(max_examples=20, deadline=None)
@given(seconds=st.floats(5, 500), k=st.integers(3, 10), is_timed=st.booleans())
def test_all_seconds_are_spent_and_every_network_that_is_chosen_had_its_last_leg(seconds, k, is_timed):
    """By a clock, or by what steps should take."""
    spent = [0.0]
    course = course_of(None if is_timed else seconds, k=k)
    bench = Bench(changed(course, left_s=lambda: seconds - spent[0]))
    while steps := bench.race.steps():
        bench.take(steps[0])
        spent[0] = sum(leg["seconds"] for line in bench.lines for leg in line.legs)
    assert abs(seconds - spent[0]) < 0.15 * seconds + k * LEAST_STEPS * STEP_S * 2
    assert 2 <= len(finished(bench)) <= max(k, FEWEST)
    assert all(line.state == TrialState.COMPLETE and line.legs[-1]["end"] == 0 for line in finished(bench))
    assert not any(line.live for line in bench.lines)


@pytest.mark.parametrize(("top1", "pieces"), [(0.5, MOST_PIECES), (0.99, LEAST_PIECES)])
def test_the_first_network_is_trained_until_more_of_it_hardly_counts(top1: float, pieces: int) -> None:
    bench = Bench(course_of(200.0, k=6), lambda architecture, rung: top1).run()
    assert Counter(rung for rung, id, *_ in bench.done if id == WHOLE) == {KNOWN: 1, FIRST: pieces, FINISH: 1}
    assert seconds_of(bench)[WHOLE] / 200 == pytest.approx(PIECE * (1 + FALL) * pieces, abs=0.05)


@pytest.mark.parametrize(("k", "n_known", "n_baselines", "share"), [(1, 9, 0, 1.0), (6, 1, 0, 1.0), (1, 9, 2, 0.7)])
def test_a_network_beside_which_nothing_is_trained_has_all_seconds(
        k: int, n_known: int, n_baselines: int, share: float) -> None:
    """As the only finalist, or the only network. Exports that are not needed give theirs, and baselines keep theirs."""
    spent, making_s = [0.0], 4.0
    course = course_of(None, k=k, n_smaller=0, making_s=making_s, baselines_s=[STEP_S] * n_baselines,
                       left_s=lambda: 200.0 - spent[0])
    bench = Bench(replace(course, known=course.known[:n_known]), lambda architecture, rung: 0.5)
    while steps := bench.race.steps():
        bench.take(steps[0])
        spent[0] = sum(seconds_of(bench).values())
    assert len(finished(bench)) == 1
    assert spent[0] == pytest.approx(share * (200.0 + (k - 1) * making_s), rel=0.02)


@pytest.mark.parametrize(("most_k", "n_baselines"), [(3, 0), (8, 0), (8, 1), (8, 4)])
def test_minutes_that_the_planned_networks_leave_go_into_further_ones(most_k: int, n_baselines: int) -> None:
    spent, seconds, making_s = [0.0], 400.0, 4.0
    course = changed(course_of(None, k=3), most_k=most_k, making_s=making_s, left_s=lambda: seconds - spent[0],
                     baselines_s=[STEP_S] * n_baselines)
    bench = Bench(course, step_s=lambda network: STEP_S * (network.image_size / 64) ** PIXELS * (
        1.0 if network.id == WHOLE else 0.4))
    while steps := bench.race.steps():
        bench.take(steps[0])
        spent[0] = sum(leg["seconds"] for line in bench.lines for leg in line.legs)
    n = len(finished(bench))
    assert n == 3 if most_k == 3 else n <= most_k
    assert n > 3 or most_k == 3 or n_baselines
    assert spent[0] + (n - 3) * making_s < 1.1 * seconds
    each_s = [seconds_of(bench)[line.id] for line in finished(bench) if line.id != WHOLE]
    assert seconds - spent[0] - (n - 3) * making_s >= 0.7 * n_baselines * min(each_s), "baselines have theirs"


@pytest.mark.parametrize("n_baselines", [0, 1])
def test_seconds_that_nothing_else_could_take_go_into_more_steps_than_the_first_had(n_baselines: int) -> None:
    spent, seconds = [0.0], 400.0
    course = course_of(None, k=8, n_smaller=0, baselines_s=[STEP_S] * n_baselines, left_s=lambda: seconds - spent[0])

    def step_s(network: Architecture) -> float:
        return STEP_S * (1.0 if network.id == WHOLE else 0.1)

    known = [replace(each, step_s=step_s(each.architecture)) for each in course.known[:3]]
    bench = Bench(replace(course, known=known), lambda architecture, rung: 0.99, step_s=step_s)
    while steps := bench.race.steps():
        bench.take(steps[0])
        spent[0] = sum(seconds_of(bench).values())
    n_steps = {line.id: line.steps for line in finished(bench)}
    assert len(n_steps) == 3
    assert (spent[0] > 0.95 * seconds) == (min(n_steps.values()) == n_steps[WHOLE] < max(n_steps.values())) == (
        not n_baselines), "baselines have theirs"


@pytest.mark.parametrize("slower", [1.5, 2.0, 3.0])
def test_a_first_network_that_is_slower_than_measured_leaves_the_others_their_seconds(slower: float) -> None:
    """As on two cores, where its threads hinder one another."""
    spent = [0.0]
    course = changed(course_of(None, k=6), left_s=lambda: 200.0 - spent[0])
    bench = Bench(course, step_s=lambda network: STEP_S * (network.image_size / 64) ** PIXELS * (
        slower if network.id == WHOLE else 1.0))
    while steps := bench.race.steps():
        bench.take(steps[0])
        spent[0] = sum(leg["seconds"] for line in bench.lines for leg in line.legs)
    assert seconds_of(bench)[WHOLE] / 200 <= PIECE * (1 + FALL) * MOST_PIECES * 1.2


def test_each_other_network_has_a_leg_that_ends_at_zero_from_its_own_weights_or_from_larger_images() -> None:
    bench = Bench(course_of(k=8)).run()
    first = next(line for line in bench.lines if FIRST in line.rungs)
    others = [line for line in bench.lines if line.state == TrialState.COMPLETE and line is not first]
    assert len(others) > 3
    full = {known.architecture.id for known in bench.course.known}
    assert story_of(first, {}).startswith("judged untrained, ")
    lines = {line.number: line for line in bench.lines}
    for line in others:
        assert [leg["rung"] for leg in line.legs] == [KNOWN, FINISH]
        larger = [other for other in [first, *others] if other.px > line.px
                  and other.architecture == replace(line.architecture, image_size=other.px)]
        assert (line.source is None) == (line.id in full or not larger)
        if larger:
            assert lines[line.source] == min(larger, key=lambda other: other.px), "which is trained before"


def test_known_networks_are_judged_untrained_and_those_that_a_faster_one_beats_are_dropped() -> None:
    bench = Bench(course_of(300.0, k=8), whole_is_bad).run()
    n = len(bench.course.known)
    assert [(rung, steps) for rung, _, steps, _ in bench.done[:n]] == [(KNOWN, 0)] * n
    after = [rung for rung, *_ in bench.done[n:]]
    judged = after.index(FIRST)
    assert judged > 2, "known networks on smaller images are judged too"
    assert set(after[:judged]) == {KNOWN}
    whole = next(line for line in bench.lines if line.id == WHOLE)
    assert whole.rungs == {KNOWN}
    assert whole.state == TrialState.PRUNED
    full = {known.architecture.id for known in bench.course.known}
    own = [line for line in finished(bench) if line.id in full]
    assert own
    assert all(line.source is None and FINISH in line.rungs for line in own), "they go on with their own weights"


def test_answers_behind_random_weights_drop_no_network() -> None:
    bench = Bench(course_of(k=8, is_pretrained=False), whole_is_bad).run()
    assert FIRST in next(line for line in bench.lines if line.id == WHOLE).rungs


@pytest.mark.parametrize(("times", "better", "goes_on"), [(2.0, 10, True), (1.05, 10, False), (1.05, -1, True)])
def test_the_nearer_two_are_in_latency_the_less_sure_it_must_be_that_the_faster_is_better(times, better, goes_on):
    bench = Bench(course_of())
    step_until(bench, rung_is(FIRST))
    faster, slower = sorted(bench.lines, key=lambda line: line.latency_ms)[:2]
    right = np.arange(N_IMAGES) < 800
    other = right.copy()
    other[:20] = False
    other[800:820 + better] = True  # some 92 % sure to be better by 10 images
    lines = [line if line.number not in (faster.number, slower.number) else replace(
        line, latency_ms=faster.latency_ms * (1.0 if line is faster else times),
        legs=({**line.legs[0], "right": pack(other if line is faster else right)},)) for line in bench.lines]
    reasons = Race(bench.course, lines)._reasons
    assert faster.number not in reasons
    assert (slower.number not in reasons) == goes_on


def test_a_faster_line_that_is_larger_drops_none_where_size_counts() -> None:
    course = course_of(objective=Objective(target_ms=0.1, known=("latency_ms", "size_mb")))
    whole = cuts().known["whole"]
    small = replace(whole, image_size=24)
    cut = min(course.known, key=lambda known: course.latency_ms(known.architecture)).architecture
    assert not course.is_as_cheap(small, cut)
    assert course.is_as_cheap(cut, small)
    assert course_of().is_as_cheap(small, cut), "where latency alone counts"
    bench = Bench(course, lambda network, rung: 0.9 - 0.2 * (replace(network, image_size=64) != whole))
    step_until(bench, rung_is(FIRST))
    free = Race(replace(course, options=OPTIONS), bench.lines)
    assert {*bench.race._reasons} < {*free._reasons}
    assert all(any(other.latency_ms < line.latency_ms and course.is_as_cheap(other.architecture, line.architecture)
                   for other in bench.lines) for line in bench.lines if line.number in bench.race._reasons)


@pytest.mark.parametrize("better", ["mobilenetv2_035", "mobilenetv2_050"])
def test_several_networks_race_and_the_one_whose_cuts_are_beaten_leaves_at_the_first_rung(better: str) -> None:
    def skill(architecture: Architecture, rung: str) -> float:
        return by_size(architecture, rung) - 0.2 * (architecture.around != better)

    bench = Bench(course_of(space=cuts_of_two(), k=3), skill).run()
    assert {line.architecture.around for line in bench.lines if KNOWN in line.rungs} == {*cuts_of_two().arounds}
    fastest_ms = min(line.latency_ms for line in bench.lines if line.architecture.around == better)
    assert all(line.architecture.around == better or line.latency_ms < fastest_ms for line in bench.lines if line.steps)
    assert 0 < len(finished(bench)) <= 3
    assert not any(line.live for line in bench.lines)


def test_where_seconds_are_few_there_are_fewer_networks_and_each_has_enough_steps() -> None:
    counts = []
    for seconds in (4.0, 30.0, 200.0):
        done = finished(Bench(course_of(seconds, k=10)).run())
        counts.append(len(done))
        if len(done) > FEWEST:
            assert min(line.steps for line in done) >= 0.7 * ENOUGH_STEPS * SHRUNK
    assert counts[0] <= FEWEST + 1
    assert counts[0] < counts[-1]


def test_seconds_are_kept_for_baselines_behind_the_race_and_exports_that_are_not_needed_give_theirs() -> None:
    alone, beside = (Bench(course_of(100.0, k=4, baselines_s=each)).run() for each in ((), (STEP_S,) * 4))
    assert sum(line.steps for line in finished(beside)) < 0.8 * sum(line.steps for line in finished(alone))
    left = course_of(None, k=40, left_s=lambda: 100.0)
    bench = Bench(left)
    step_until(bench, lambda steps: isinstance(steps[0], Train)
               and steps[0].rung == FINISH and FIRST not in steps[0].line.rungs)
    task = bench.race.steps()[0]
    with_reserve = Race(changed(left, making_s=5.0), bench.lines)
    assert with_reserve.leg_steps(task) > bench.race.leg_steps(task)


def test_a_network_that_fails_gives_its_place_to_the_next_and_a_cut_that_fails_to_no_one() -> None:
    bench = Bench(course_of(100.0, k=5), failing=frozenset({(FIRST, WHOLE)})).run()
    assert len({id for rung, id, *_ in bench.done if rung == FIRST}) == 2
    assert sum(line.state == TrialState.COMPLETE for line in bench.lines) >= 2
    course = course_of(100.0, k=5)
    bench = Bench(course, failing=frozenset((FINISH, known.architecture.id) for known in course.known[1:])).run()
    assert bench.lines[0].state == TrialState.COMPLETE
    assert bench.chosen is not None


@pytest.mark.parametrize("rung", [FIRST, FINISH])
def test_if_the_network_that_beat_the_whole_one_fails_the_whole_one_is_trained(rung: str) -> None:
    course = course_of(100.0, k=4)
    cut = course.known[1].architecture.id
    bench = Bench(course, lambda architecture, rung: {cut: 0.9, WHOLE: 0.5}.get(architecture.id, 0.1),
                  failing=frozenset({(rung, cut)})).run()
    assert (FINISH, WHOLE) in [entry[:2] for entry in bench.done]
    assert bench.chosen


def test_there_are_no_more_networks_than_trials_or_parts() -> None:
    for options in ({"k": 3}, {"k": 9, "n_lines": 8}):
        bench = Bench(course_of(400.0, **options)).run()  # type: ignore[arg-type]
        assert len(finished(bench)) <= options["k"]
        assert len(bench.lines) <= options.get("n_lines", 100)
        latencies_ms = [line.latency_ms for line in finished(bench)]
        assert min(latencies_ms) < 0.5 * max(latencies_ms), "they are spread over latency"


def test_a_spread_takes_the_most_promising_of_each_part_of_the_latencies() -> None:
    known, macs_of = cuts().known["whole"], attrgetter("macs")
    networks = [replace(known, image_size=px) for px in (64, 56, 48, 40, 32)]
    latency_ms = dict(zip((each.id for each in networks), (1.0, 0.5, 0.55, 0.24, 0.25), strict=True))
    chosen = spread_over_latency(networks, lambda each: latency_ms[each.id], macs_of, 3, 1.0)
    assert [each.image_size for each in chosen] == [64, 56, 40], "48 px is slower than 56 px, and 32 px than 40 px"
    near = dict(zip((each.id for each in networks), (1.0, 0.5, 0.3, 0.26, 0.24), strict=True))
    fastest = spread_over_latency(networks, lambda each: near[each.id], macs_of, 2, 1.0)[-1]
    assert fastest.image_size == 32, "of the fastest part the fastest"
    assert spread_over_latency([], lambda each: 1.0, macs_of, 3, 1.0) == []
    assert len(spread_over_latency(networks, lambda each: latency_ms[each.id], macs_of, 1, 1.0)) == 1


def test_smaller_images_are_those_of_networks_that_answer_well_untrained() -> None:
    """Of networks as fast; without weights to judge them by, also those of others."""
    best = sorted(cuts().known.values(), key=lambda network: network.macs)[2]

    def smaller(is_pretrained: bool) -> set[bool]:
        bench = Bench(course_of(k=6, is_pretrained=is_pretrained),
                      lambda network, rung: 0.9 if replace(network, image_size=64) == best else 0.4)
        step_until(bench, rung_is(FIRST))
        least_ms = predict([replace(best, image_size=36)]).mean[0]
        return {replace(line.architecture, image_size=64) == best for line in bench.lines
                if line.px < 64 and line.latency_ms > least_ms}

    assert smaller(True) == {True}
    assert False in smaller(False)


def test_smaller_images_end_at_a_last_map_of_one_pixel() -> None:
    whole = cuts().known["whole"]
    assert [network.image_size for network in smaller_of(cuts(), whole)] == [*range(60, 28, -4)]


def test_the_seconds_of_a_step_are_guessed_by_the_same_network_on_other_images() -> None:
    course = course_of()
    whole = max((known.architecture for known in course.known), key=lambda network: network.macs)
    small, begun = replace(whole, image_size=32), Race(course, ())
    others = [known.architecture for known in course.known if known.architecture != whole]
    assert min(abs(each.macs - small.macs) for each in others) < whole.macs - small.macs
    assert begun.step_s(small) == pytest.approx(begun.step_s(whole) * 0.5 ** PIXELS, rel=0.2)


def test_what_is_begun_is_neither_dropped_nor_left_behind_and_nobody_is_chosen_before_it_ends() -> None:
    bench = Bench(course_of(k=6))
    step_until(bench, lambda steps: isinstance(steps[0], Train)
               and steps[0].rung == FINISH and FIRST not in steps[0].line.rungs)
    begun = bench.race.steps()[0]
    assert isinstance(begun, Train)
    number = begun.line.number
    bench.lines[number] = replace(bench.lines[number], claim={
        "rung": FINISH, "source": begun.source.number if begun.source else None, "move": begun.move, "steps": 77,
        "start": begun.start, "end": begun.end, "threads": 1})
    for _ in range(400):  # all that other processes can do
        others = [step for step in bench.race.steps() if not (isinstance(step, Train)
                                                             and step.line.number == number)]
        if not others:
            break
        bench.take(others[0])
    assert bench.chosen is None
    left, = bench.race.steps()
    assert (left.line, left.rung, left.source.number if left.source else None) == (
        bench.lines[number], FINISH, begun.source.number if begun.source else None)
    bench.lines[number] = replace(bench.lines[number], claim=None)
    assert bench.run().chosen


def test_a_race_asks_for_smaller_images_at_once_when_nobody_trains():
    timed, waves = set[str](), list[list[Architecture]]()

    def ask(networks: Sequence[Architecture]) -> Predictions:
        if missing := [network for network in networks if network.id not in timed]:
            raise NotTimed(SimpleNamespace(), missing)  # type: ignore[arg-type]
        return predict(networks)

    timed |= {network.id for network in known_networks(cuts(), predict, OPTIONS).values()}
    bench = Bench(course_of(predictor=ask))
    for _ in range(400):
        try:
            steps = bench.race.steps()
        except NotTimed as untimed:
            waves.append([*untimed.networks])
            timed |= {network.id for network in untimed.networks}
            assert not any(line.claim or line.steps for line in bench.lines)
            continue
        if not steps:
            break
        bench.take(steps[0])
    assert bench.done == Bench(course_of()).run().done
    assert len(waves) == 1
    assert max(network.image_size for network in waves[0]) < 64


def test_what_cannot_be_timed_and_what_is_over_the_cap_after_all_is_not_trained() -> None:
    def without(networks: Sequence[Architecture]) -> Predictions:
        told = predict(networks)
        sizes = np.array([network.image_size for network in networks])
        refused = (sizes > 40) & (sizes < 64)
        told.mean[refused] = told.high[refused] = np.inf
        return told

    bench = Bench(course_of(cap_ms=1e6, predictor=without, k=8)).run()
    sizes = {line.px for line in bench.lines if line.legs}
    assert sizes & {*range(24, 44, 4)}
    assert not sizes & {*range(44, 64, 4)}


def test_without_minutes_the_number_of_processes_changes_no_training() -> None:
    alone, beside = (Bench(course_of(400.0, k=6, workers=workers)).run(pick) for workers, pick in (
        (1, lambda steps: steps[0]), (4, lambda steps: steps[-1])))
    for first, second in zip(*(sorted((line.id, line.steps) for line in bench.lines) for bench in (alone, beside)),
                             strict=True):
        assert first[0] == second[0]
        assert second[1] == pytest.approx(first[1], rel=0.05, abs=3)


def test_one_timed_network_guesses_that_smaller_images_are_faster() -> None:
    whole = cuts().known["whole"]
    smaller = [replace(whole, image_size=px) for px in (56, 48, 32)]
    guessed = guess_ms(smaller, [whole], [0.3])
    assert [*guessed] == sorted(guessed, reverse=True)
    assert 0.1 < guessed[-1] < guessed[0] < 0.3


@cache
def taken_in_order() -> Counter[tuple[str, str]]:
    """Rung and network of each leg of a race whose steps are taken in order."""
    return Counter(entry[:2] for entry in Bench(course_of(k=5)).run().done)


def test_no_leg_of_many_processes_outlasts_the_seconds() -> None:
    for workers in (4, 16):
        for baselines_s in ((), (STEP_S, STEP_S)):
            bench = Bench(course_of(k=8, workers=workers, baselines_s=baselines_s))
            while not any(FINISH in line.rungs for line in bench.lines):
                bench.take(bench.race.steps()[0])
            race = Race(changed(bench.course, total_s=None, left_s=lambda: 30.0), bench.lines)
            legs = [step for step in race.steps() if isinstance(step, Train)]
            assert len(legs) > 1
            for leg in legs:
                assert race.leg_steps(leg) * race.step_s(leg.line.architecture) <= 1.01 * 30.0


def test_behind_a_new_head_the_largest_images_are_kept_of_networks_about_as_fast() -> None:
    bench = Bench(course_of(k=8, is_pretrained=False, has_new_head=True)).run()
    judged = {line.id: line for line in bench.lines}
    done = finished(bench)
    for line in done:
        others = [other for other in judged.values() if other.px > line.px and other is not line
                  and 1 / NEARLY <= other.latency_ms / line.latency_ms <= NEARLY]
        assert not others, "larger images are as fast"
    assert any(line.px == max(other.px for other in done) for line in done[1:])


def test_behind_a_new_head_every_cut_begins_with_the_trained_weights_of_what_it_is_cut_from() -> None:
    bench = Bench(course_of(k=8, is_pretrained=False, has_new_head=True)).run()
    first = next(line for line in bench.lines if FIRST in line.rungs)
    others = [line for line in bench.lines if line.state == TrialState.COMPLETE and line is not first]
    assert len(others) > 3
    lines = {line.number: line for line in bench.lines}
    for line in others:
        assert line.source is not None, "which has the trained head"
        source = lines[line.source]
        assert source.px >= line.px
        kept, whole = dict(line.architecture.chosen), dict(source.architecture.chosen)
        assert all(kept[name] <= whole[name] for name in kept)
        assert line.move in (f"{source.px} to {line.px} px", f"cut from trial {source.number}")
    mixed = [Bench(course_of(k=8, is_pretrained=False, has_new_head=True, space=cuts_of_two())).run(
        random.Random(seed).choice).done for seed in range(4)]
    legs = {frozenset(Counter((rung, id, source) for rung, id, _, source in done).items()) for done in mixed}
    assert len(legs) == 1, "whatever is taken first"


@pytest.mark.soak
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_any_number_of_processes_come_to_the_same_legs(seed: int) -> None:
    """Whatever is taken first of what can be done now: the trainings are the same."""
    mixed = Bench(course_of(k=5)).run(random.Random(seed).choice)
    assert Counter(entry[:2] for entry in mixed.done) == taken_in_order()


def test_a_length_reads_back_and_that_of_another_version_is_refused() -> None:
    length = Length({"whole": 0.1}, 4, 100.0, baselines_s=[0.2])
    held = json.loads(json.dumps(asdict(length)))
    assert Length.of(held, "run") == length
    earlier = {key: value for key, value in held.items() if key not in ("first_threads", "speedup")}
    assert Length.of(earlier, "run") == length  # its threads are timed when it goes on
    for values in ({**held, "unit_steps": 9}, {key: value for key, value in held.items() if key != "parts"}):
        with pytest.raises(StudyError, match="run: another version"):
            Length.of(values, "run")


def test_a_lower_number_of_networks_counts_until_a_higher_one_is_given(tmp_path: Path) -> None:
    study, length, parts = opened(tmp_path, "random"), Length({"whole": 0.1}, 8, first_threads=1), []
    for k in (3, 6, 20):
        plan: Any = SimpleNamespace(parts=k, workers=1, options=SimpleNamespace(threads=1), baselines=(), space=cuts())
        race = racing.ObviousCuts(plan, *[None] * 5, study, Clock.start(5.0), Pace({}, 1.0), {}, 1.0)
        length = race._go_on(length, Console(quiet=True))
        parts.append(length.parts)
    assert parts == [3, 6, 8]


def test_a_race_goes_on_where_it_was() -> None:
    """A race is decided by its lines alone: stopped anywhere, it takes the same steps."""
    whole = Bench(course_of(k=4)).run()
    stopped = Bench(course_of(k=4))
    while stopped.race.steps():
        again = Bench(stopped.course, lines=list(stopped.lines), chosen=stopped.chosen, done=stopped.done)
        again.take(again.race.steps()[0])
        stopped = again
    assert stopped.done == whole.done


def test_a_cap_leaves_out_what_does_not_keep_it_and_takes_smaller_images_of_it():
    free = course_of()
    slowest_ms = free.latency_ms(free.known[0].architecture)
    course = course_of(cap_ms=0.5 * slowest_ms)
    assert all(course.latency_ms(known.architecture) <= 0.5 * slowest_ms for known in course.known)
    bench = Bench(course).run()
    assert all(line.latency_ms <= 0.5 * slowest_ms for line in bench.lines)
    assert any(known.architecture.image_size < 64 for known in course.known)
    with pytest.raises(BudgetError, match=r"budget.latency_ms=0.001: .* the fastest takes 0\.\d+ ms"):
        known_networks(cuts(), predict, replace(OPTIONS, cap_ms=0.001))
    said = list[str]()
    console: Any = SimpleNamespace(remark=said.append)
    for cap_ms in (None, 1.9 * slowest_ms):
        tell_room(course_of(cap_ms=cap_ms), console)
    assert not said
    tell_room(course_of(cap_ms=4 * slowest_ms), console)
    assert len(said) == 1
    assert said[0].endswith("try dataset.image_size=128.")


def test_certainty_is_that_of_paired_images() -> None:
    right = np.arange(1000) < 800
    assert sure_that(right, right) == 0.5
    better = right.copy()
    better[800:830] = True
    assert sure_that(better, right) > 0.999
    other = right.copy()
    other[:200], other[800:] = False, True
    assert sure_that(other, right) == pytest.approx(0.5, abs=0.01)


def test_the_first_network_has_threads_of_all_workers() -> None:
    bench = Bench(course_of(workers=4))
    step_until(bench, rung_is(FIRST))
    assert next(step.threads for step in bench.race.steps() if isinstance(step, Train) and step.rung == FIRST) == 4


def test_the_first_leg_takes_its_part_of_the_seconds_on_a_machine_of_many_cores() -> None:
    course = course_of(None, left_s=lambda: 300.0, workers=64, first_threads=8, speedup=3.0)
    bench = Bench(course)
    step_until(bench, rung_is(FIRST))
    leg = next(step for step in bench.race.steps() if isinstance(step, Train) and step.rung == FIRST)
    assert leg.threads == 8
    assert bench.race.leg_steps(leg) * STEP_S / 3.0 == pytest.approx(PIECE * 300.0, rel=0.05)


@pytest.mark.soak
def test_a_race_that_was_interrupted_goes_on_and_ends(tmp_path: Path) -> None:
    """With real trainings: judged untrained, trained, interrupted, finished by a second call."""
    labels = np.arange(96) % 10
    images = np.random.default_rng(0).integers(0, 256, (96, 3, 64, 64)).astype(np.uint8)
    part = Split(images, labels.astype(np.int64))
    data = Dataset("noise", part, part, part, tuple("abcdefghij"), 3, 64, (0.5,) * 3, (0.25,) * 3, "noise")
    study, seconds, heard = opened(tmp_path, "random"), [9.0], list[str]()
    course = course_of(None, k=3, left_s=lambda: seconds[0])
    setting = RaceSetting(study, data, FoundNetwork, replace(FINE_TUNING, batch_size=16, threads=1), 0,
                          tmp_path / "lines", course)

    def tell(event: Event) -> None:
        heard.append(event.rung)
        seconds[0] -= 0.05 * (event.kind == "training")
        if event.rung == FIRST and event.step >= 5 and "interrupted" not in heard:  # a slow machine leaves out steps
            heard.append("interrupted")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Racer(setting, Keeping(pytest.fail), tell).run()
    Racer(setting, Keeping(pytest.fail), tell).run()
    lines = read_lines(study, cuts())
    ended = [line for line in lines if line.state == TrialState.COMPLETE]
    assert ended
    assert all(line.legs[0]["rung"] == KNOWN and line.legs[0]["steps"] == 0 and line.steps for line in ended)
    assert not any(line.live for line in lines)
    for line in ended:
        assert Keeping(pytest.fail).average(state_path(tmp_path / "lines", line, FINISH), line.key)


def test_a_network_ends_as_it_was_judged_untrained_if_its_steps_did_harm(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = (np.arange(60) % 10).astype(np.int64)
    part = Split(np.random.default_rng(0).integers(0, 256, (60, 3, 64, 64)).astype(np.uint8), labels)
    data = Dataset("noise", part, part, part, tuple("abcdefghij"), 3, 64, (0.5,) * 3, (0.25,) * 3, "noise")
    course = course_of(None, k=3, n_smaller=0, left_s=lambda: 5.0)
    fastest = min(course.known, key=lambda known: known.architecture.macs)
    setting = RaceSetting(opened(tmp_path, "random"), data, FoundNetwork,
                          replace(FINE_TUNING, batch_size=16, threads=1), 0, tmp_path / "lines",
                          replace(course, known=[fastest]))
    legs = list[Leg]()

    def train(stretch: Stretch, before: Path, path: Path, *, keep: Keeping, **more: Any) -> Any:
        legs.append(stretch.leg)
        model = stretch.begin().eval()
        keep.save(path, Checkpoint({"line": stretch.after}, 0, [], model.state_dict(), {}, {}))
        return model, stretch.leg.steps

    monkeypatch.setattr(racer, "train_leg", train)
    monkeypatch.setattr(racer, "grade", lambda *_: SimpleNamespace(per_image=np.full(60, legs[-1].steps == 0)))
    Racer(setting, Keeping(pytest.fail)).run()
    line, = read_lines(setting.study, cuts())
    assert (line.state, line.top1, line.legs[-1]["undone"]) == (TrialState.COMPLETE, 1.0, 1.0)
    # No step was heard of, as if killed processes had trained all: they count as the race expects them.
    assert line.legs[-1]["seconds"] >= line.legs[-1]["steps"] * fastest.step_s
    assert story_of(line, {}).endswith("all undone, as it answered better untrained")
    assert Keeping(pytest.fail).average(state_path(tmp_path / "lines", line, FINISH), line.key)


@pytest.mark.parametrize(("workers", "own", "speeds", "chosen"), [
    (1, 1, {}, (1, 1.0)), (2, 1, {2: 0.9}, (1, 1.0)), (2, 1, {2: 1.6}, (2, 1.6)),
    (64, 1, {2: 1.7, 4: 2.5, 8: 2.6}, (4, 2.5)), (6, 1, {2: 1.9, 4: 3.0, 6: 4.0}, (6, 4.0)), (8, 8, {}, (8, 1.0))])
def test_the_first_network_has_as_many_threads_as_pay(
        workers: int, own: int, speeds: dict[int, float], chosen: tuple[int, float],
        monkeypatch: pytest.MonkeyPatch) -> None:
    """`own`: threads that each training has anyway. No more of them are timed than needed."""
    recipe = replace(FINE_TUNING, threads=own)
    making = BuildSettings(None, recipe, 0, None)  # type: ignore[arg-type]
    monkeypatch.setattr(BuildSettings, "steps_in_a_step", lambda self, network: 1.0)
    monkeypatch.setattr(racing, "making_of", lambda plan, dataset: making)
    monkeypatch.setattr(racing, "line_recipe", lambda plan, dataset: recipe)
    monkeypatch.setattr(racing, "step_seconds", lambda network, on: 0.1 / speeds[on.recipe.threads])
    plan: Any = SimpleNamespace(workers=workers, space=None, network=lambda network: network)
    race = racing.ObviousCuts(plan, *[None] * 8, {"whole": None}, 1.0)
    threads, speedup = race._threads_of_first({"whole": 0.1}, Console(quiet=True))
    assert (threads, pytest.approx(speedup)) == chosen


@pytest.mark.parametrize(("seconds", "image_s", "timing_s", "judged"), [
    (200.0, 0.006, 2.0, (2048, None)),  # five minutes of a core
    (148.0, 0.0122, 5.7, (512, 2)),  # of half a core
    (1500.0, 0.0122, 5.7, (2048, None)),
    (1.0, 10.0, 60.0, (512, 2))])
def test_judging_and_timing_leave_seconds_for_steps(
        seconds: float, image_s: float, timing_s: float, judged: tuple[int, int | None]) -> None:
    assert judged_in(seconds, image_s, timing_s, 10, IMAGES) == judged


@pytest.mark.parametrize("n_smaller", [None, 4])
def test_each_of_several_networks_is_judged_on_smaller_images(n_smaller: int | None) -> None:
    """Also where the multiply-adds of one are so cheap that at each latency it has the most."""
    most = max(cuts_of_two().known.values(), key=lambda network: network.macs).around

    def cheap(networks: Sequence[Architecture]) -> Predictions:
        mean = np.array([network.macs * (1e-8 if network.around == most else 2e-8) for network in networks])
        return Predictions(mean, 0.97 * mean, 1.03 * mean)

    bench = Bench(course_of(space=cuts_of_two(), k=6, n_smaller=n_smaller, predictor=cheap),
                  lambda network, rung: 0.8 + 0.03 * math.log(cheap([network]).mean[0]))
    step_until(bench, rung_is(FIRST))
    smaller = Counter(line.architecture.around for line in bench.lines if line.px < 64)
    assert min(smaller[around] for around in cuts_of_two().arounds) >= 2
    assert n_smaller is None or smaller.total() <= n_smaller


@pytest.mark.parametrize("n", [1, 2])
def test_a_race_judges_no_more_smaller_images_than_it_has_seconds_for(n: int) -> None:
    bench = Bench(course_of(k=8, n_smaller=n))
    step_until(bench, rung_is(FIRST))
    known = {known.architecture.id for known in bench.course.known}
    assert sum(line.id not in known for line in bench.lines) == n
