"""A race with few minutes: the obvious cuts are judged untrained, and those that are not beaten share the seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lines_fixtures import OPTIONS, Bench, by_size, course_of, cuts, predict
from optuna.trial import TrialState
from race_fixtures import opened

from hwnas.data.dataset import Dataset, Split
from hwnas.networks.network import FoundNetwork
from hwnas.search.race import FALL, FINISH, KNOWN, LEAST_STEPS, PIXELS, TRUNK
from hwnas.search.racer import Event, RaceSetting, run_race, state_path
from hwnas.search.racing import story_of
from hwnas.search.short_race import ENOUGH_STEPS, FEWEST, LEAST_PIECES, MOST_PIECES, PIECE, SHRUNK, spread
from hwnas.space.architecture import Architecture
from hwnas.study.lines import read_lines
from hwnas.training.line import Keeping
from hwnas.training.recipe import FINE_TUNING

STEP_S = 0.02  # of every network of a bench on images of 64 px
WHOLE = cuts().known["whole"].id


def short(left: list[float], **options: object) -> Bench:
    """A short race with so many seconds, which `run_out` takes away as they are spent."""
    course = course_of(None, **options)  # type: ignore[arg-type]
    return Bench(replace(course, is_short=True, left_s=lambda: left[0],
                         known=[replace(known, step_s=STEP_S) for known in course.known]),
                 step_s=lambda architecture: STEP_S * (architecture.image_size / 64) ** PIXELS)


def run_out(bench: Bench, left: list[float]) -> Bench:
    for _ in range(200):
        if not (steps := bench.race.steps()):
            return bench
        before = len(bench.done)
        bench.take(steps[0])
        if len(bench.done) > before and bench.done[-1][:2] not in bench.failing:
            left[0] -= next(line.legs[-1]["seconds"] for line in bench.lines if line.id == bench.done[-1][1])
    raise AssertionError("the race does not end")


def shares(bench: Bench) -> Mapping[str, float]:
    """Seconds of each network as shares of all."""
    seconds = {line.id: sum(leg["seconds"] for leg in line.legs) for line in bench.lines}
    return {id: each / sum(seconds.values()) for id, each in seconds.items()}


@settings(max_examples=20, deadline=None)
@given(seconds=st.floats(5, 500), k=st.integers(3, 10), loss=st.sampled_from([0.0, 0.1]))
def test_all_seconds_are_spent_and_every_network_that_is_chosen_had_its_last_leg(seconds, k, loss):
    left = [seconds]
    bench = short(left, k=k)
    bench.int8_loss = loss
    run_out(bench, left)
    assert abs(left[0]) < 0.15 * seconds + k * LEAST_STEPS * STEP_S * 2
    chosen = [line for line in bench.lines if line.number in (bench.chosen or ())]
    assert 2 <= len(chosen) <= max(k, FEWEST)
    assert all(line.state == TrialState.COMPLETE and line.legs[-1]["end"] == 0 for line in chosen)
    assert not any(line.live for line in bench.lines)


@pytest.mark.parametrize(("top1", "pieces"), [(0.5, MOST_PIECES), (0.99, LEAST_PIECES)])
def test_the_first_network_is_trained_until_more_of_it_hardly_counts(top1: float, pieces: int) -> None:
    left = [200.0]
    bench = short(left, k=6)
    bench.skill = lambda architecture, rung: top1
    run_out(bench, left)
    assert Counter(rung for rung, id, *_ in bench.done if id == WHOLE) == {KNOWN: 1, TRUNK: pieces, FINISH: 1}
    assert shares(bench)[WHOLE] == pytest.approx(PIECE * (1 + FALL) * pieces, abs=0.05)


def test_each_other_network_has_a_leg_that_ends_at_zero_from_its_own_weights_or_from_larger_images() -> None:
    left = [200.0]
    bench = run_out(short(left, k=8), left)
    first = next(line for line in bench.lines if TRUNK in line.rungs)
    others = [line for line in bench.lines if line.state == TrialState.COMPLETE and line is not first]
    assert len(others) > 3
    full = {known.architecture.id for known in bench.course.known}
    assert story_of(first, {}).startswith("judged untrained, ")
    for line in others:
        assert [leg["rung"] for leg in line.legs] == [KNOWN, FINISH]
        larger = [other for other in [first, *others] if other.px > line.px
                  and other.architecture == replace(line.architecture, image_size=other.px)]
        assert (line.source is None) == (line.id in full or not larger)


def test_known_networks_are_judged_untrained_and_those_that_a_faster_one_beats_are_dropped() -> None:
    def skill(architecture: Architecture, rung: str) -> float:
        return 0.3 if architecture.id == WHOLE else by_size(architecture, rung)

    left = [300.0]
    bench = short(left, k=8)
    bench.skill = skill
    run_out(bench, left)
    n = len(bench.course.known)
    assert [(rung, steps) for rung, _, steps, _ in bench.done[:n]] == [(KNOWN, 0)] * n
    after = [rung for rung, *_ in bench.done[n:]]
    judged = after.index(TRUNK)
    assert judged > 2, "known networks on smaller images are judged too"
    assert set(after[:judged]) == {KNOWN}
    whole = next(line for line in bench.lines if line.id == WHOLE)
    assert whole.rungs == {KNOWN}
    assert whole.state == TrialState.PRUNED
    full = {known.architecture.id for known in bench.course.known}
    finished = [line for line in bench.lines if line.id in full and line.number in (bench.chosen or ())]
    assert finished
    assert all(line.source is None and FINISH in line.rungs for line in finished), "they go on with their own weights"


def test_where_seconds_are_few_there_are_fewer_networks_and_each_has_enough_steps() -> None:
    counts = []
    for seconds in (4.0, 30.0, 200.0):
        left = [seconds]
        bench = run_out(short(left, k=10), left)
        finished = [line for line in bench.lines if line.state == TrialState.COMPLETE]
        counts.append(len(finished))
        if len(finished) > FEWEST:
            assert min(line.steps for line in finished) >= 0.7 * ENOUGH_STEPS * SHRUNK
    assert counts[0] == FEWEST
    assert counts[0] < counts[-1]


def test_a_network_that_fails_gives_its_place_to_the_next_and_a_cut_that_fails_to_no_one() -> None:
    left = [100.0]
    bench = short(left, k=5)
    bench.failing = frozenset({(TRUNK, WHOLE)})
    run_out(bench, left)
    assert len({id for rung, id, *_ in bench.done if rung == TRUNK}) == 2
    assert sum(line.state == TrialState.COMPLETE for line in bench.lines) >= 2
    left = [100.0]
    bench = short(left, k=5)
    bench.failing = frozenset((FINISH, known.architecture.id) for known in bench.course.known[1:])
    run_out(bench, left)
    assert bench.lines[0].state == TrialState.COMPLETE
    assert bench.chosen is not None


def test_if_the_network_that_beat_the_whole_one_fails_the_whole_one_is_trained() -> None:
    left = [100.0]
    bench = short(left, k=4)
    cut = bench.course.known[1].architecture.id
    bench.skill = lambda architecture, rung: {cut: 0.9, WHOLE: 0.5}.get(architecture.id, 0.1)
    bench.failing = frozenset({(TRUNK, cut)})
    run_out(bench, left)
    assert (FINISH, WHOLE) in [entry[:2] for entry in bench.done]
    assert bench.chosen


def test_one_on_smaller_images_waits_for_the_same_network_on_larger_ones() -> None:
    left = [400.0]
    bench = run_out(short(left, k=10), left)
    lines = {line.number: line for line in bench.lines}
    for line in bench.lines[1:]:
        siblings = [other for other in bench.lines if other.px > line.px and FINISH in line.rungs & other.rungs
                    and other.architecture == replace(line.architecture, image_size=other.px)]
        if siblings:
            assert lines[line.source or 0] == min(siblings, key=lambda other: other.px)


def test_there_are_no_more_networks_than_trials_or_parts() -> None:
    for options in ({"k": 3}, {"k": 9, "n_lines": 8}):
        left = [400.0]
        bench = run_out(short(left, **options), left)
        finished = [line for line in bench.lines if line.state == TrialState.COMPLETE]
        assert len(finished) <= options["k"]
        assert len(bench.lines) <= options.get("n_lines", 100)
        latencies_ms = [line.latency_ms for line in finished]
        assert min(latencies_ms) < 0.5 * max(latencies_ms), "they are spread over latency"


def test_a_spread_takes_the_most_multiply_adds_of_each_part_of_the_latencies() -> None:
    known = cuts().known["whole"]
    networks = [replace(known, image_size=px) for px in (64, 56, 48, 40, 32)]
    latency_ms = dict(zip((each.id for each in networks), (1.0, 0.5, 0.55, 0.24, 0.25), strict=True))
    chosen = spread(networks, lambda each: latency_ms[each.id], 3, 1.0)
    assert [each.image_size for each in chosen] == [64, 56, 40], "48 px is slower than 56 px, and 32 px than 40 px"
    near = dict(zip((each.id for each in networks), (1.0, 0.5, 0.3, 0.26, 0.24), strict=True))
    fastest = spread(networks, lambda each: near[each.id], 2, 1.0)[-1]
    assert fastest.image_size == 32, "of the fastest part the fastest"
    assert spread([], lambda each: 1.0, 3, 1.0) == []
    assert len(spread(networks, lambda each: latency_ms[each.id], 1, 1.0)) == 1


@pytest.mark.soak
def test_a_short_race_that_was_interrupted_goes_on_and_ends(tmp_path: Path) -> None:
    """With real trainings: judged untrained, trained, interrupted in the trunk, finished by a second call."""
    labels = np.arange(96) % 10
    images = np.random.default_rng(0).integers(0, 256, (96, 3, 64, 64)).astype(np.uint8)
    part = Split(images, labels.astype(np.int64))
    data = Dataset("noise", part, part, part, tuple("abcdefghij"), 3, 64, (0.5,) * 3, (0.25,) * 3, "noise")
    study, seconds, heard = opened(tmp_path, "random"), [9.0], list[str]()
    course = replace(short(seconds, k=3).course, is_int8=False)
    setting = RaceSetting(study, cuts(), predict, data, FoundNetwork, replace(FINE_TUNING, batch_size=16, threads=1), 0,
                          tmp_path / "lines", OPTIONS, course)

    def tell(event: Event) -> None:
        heard.append(event.rung)
        seconds[0] -= 0.05 * (event.kind == "training")
        if event.rung == TRUNK and event.step == 5 and heard.count(TRUNK) < 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_race(setting, Keeping(pytest.fail), tell)
    run_race(setting, Keeping(pytest.fail), tell)
    lines = read_lines(study, cuts())
    ended = [line for line in lines if line.state == TrialState.COMPLETE]
    assert ended
    assert all(line.legs[0]["rung"] == KNOWN and line.legs[0]["steps"] == 0 and line.steps for line in ended)
    assert not any(line.live for line in lines)
    for line in ended:
        assert Keeping(pytest.fail).average(state_path(tmp_path / "lines", line, FINISH), line.key)
