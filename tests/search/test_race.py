"""The rungs of a race: who is trained when, from whose weights, for how long, and who is dropped."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lines_fixtures import OPTIONS, Bench, by_size, course_of, cuts, predict
from optuna.trial import TrialState

from hwnas.errors import BudgetError
from hwnas.search.course import known_networks
from hwnas.search.race import (
    CHILD,
    CONTROL,
    FINISH,
    KNOWN,
    LEAST_STEPS,
    REFERENCE,
    SIZE,
    TRUNK,
    Train,
    sure_that,
)
from hwnas.space.architecture import Architecture


def flat(architecture: Architecture, rung: str) -> float:
    """All networks answer alike."""
    return 0.8


def test_known_networks_come_first_then_the_trunk_slowest_first_then_sizes_from_the_size_above() -> None:
    bench = Bench(course_of(n_children=0), by_size).run()
    rungs = [rung for rung, *_ in bench.done]
    assert rungs[:4] == [KNOWN] * 4
    assert next(bench.named()[id] for rung, id, *_ in bench.done if rung == KNOWN) == "whole"
    trunk = [entry for entry in bench.done if entry[0] == TRUNK]
    assert trunk[0][3] is None, "the slowest goes on from its own weights"
    lines = {line.id: line for line in bench.lines}
    assert all(lines[source].latency_ms >= lines[id].latency_ms for _, id, _, source in trunk[1:] if source)
    for rung, id, _, source in bench.done:
        if rung == SIZE:
            assert source is not None
            assert lines[source].architecture == replace(lines[id].architecture, image_size=lines[source].px)
            assert lines[source].px > lines[id].px
    assert max(map(rungs.index, {KNOWN, TRUNK, SIZE})) < rungs.index(FINISH)


def test_a_slower_network_that_a_faster_one_surely_beats_is_dropped_and_gets_no_smaller_images() -> None:
    def whole_is_bad(architecture: Architecture, rung: str) -> float:
        return 0.3 if len(architecture.stages) == 7 else by_size(architecture, rung)

    bench = Bench(course_of(n_children=0), whole_is_bad).run()
    whole = next(line for line in bench.lines if bench.named().get(line.id) == "whole")
    assert whole.rungs == {KNOWN, REFERENCE}, "others are held against it"
    assert whole.state == TrialState.COMPLETE
    assert whole.number not in (bench.chosen or ())
    assert not any(len(line.architecture.stages) == 7 and line.made == SIZE for line in bench.lines)


def test_a_line_that_fails_ends_and_the_others_are_cut_from_another() -> None:
    whole = cuts().known["whole"].id
    bench = Bench(course_of(n_children=0), failing=frozenset({(TRUNK, whole)})).run()
    assert [line.state for line in bench.lines if line.id == whole] == [TrialState.FAIL]
    assert not any(source == whole for *_, source in bench.done)
    assert any(rung == FINISH for rung, *_ in bench.done)


def test_what_is_begun_is_neither_dropped_nor_left_behind_and_nobody_is_chosen_before_it_ends() -> None:
    bench = Bench(course_of(n_children=0), by_size)
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
        "start": begun.start, "end": begun.end, "threads": 1})
    bench.skill = lambda architecture, rung: 0.99 if architecture.macs < begun.architecture.macs else 0.1  # hopeless
    for _ in range(400):  # all that other processes can do
        others = [step for step in bench.race.steps() if not (isinstance(step, Train) and step.line
                                                             and step.line.number == number)]
        if not others:
            break
        bench.take(others[0])
    assert bench.chosen is None
    left, = bench.race.steps()
    assert isinstance(left, Train)
    assert (left.line, left.rung, left.source.number if left.source else None) == (
        bench.lines[number], SIZE, begun.source.number if begun.source else None)
    bench.lines[number] = replace(bench.lines[number], claim=None)
    assert bench.run().chosen


def test_a_space_that_knows_no_network_races_from_its_reference() -> None:
    space: Any = SimpleNamespace(known={}, reference=cuts().reference, image_sizes=cuts().image_sizes,
                                 find=cuts().find, to_codes=cuts().to_codes, encode=cuts().encode)
    assert [*known_networks(space, predict, OPTIONS)] == ["reference"]


def test_every_known_network_that_stays_has_its_share_before_any_child() -> None:
    bench = Bench(course_of(k=6), by_size).run()
    first_child = next((at for at, entry in enumerate(bench.done) if entry[0] == CHILD), len(bench.done))
    trunk = [at for at, entry in enumerate(bench.done) if entry[0] in (TRUNK, SIZE)]
    assert max(trunk) < first_child


def test_children_stay_only_where_they_surely_beat_the_lines_at_their_latency() -> None:
    def kinder(architecture: Architecture, rung: str) -> float:
        return 0.99 if rung == CHILD else flat(architecture, rung)

    worse = Bench(course_of(k=6), flat).run()
    better = Bench(course_of(k=6), kinder).run()
    for bench, stay in ((worse, False), (better, True)):
        children = [line for line in bench.lines if CHILD in line.rungs]
        assert children, "the made-up latencies have moves that buy as much as smaller images"
        assert {FINISH in line.rungs for line in children} == {stay} or stay
        assert stay or all(line.state == TrialState.PRUNED for line in children)
    assert any(FINISH in line.rungs for line in better.lines if line.made == CHILD)


def test_of_the_children_of_a_part_only_the_one_that_loses_least_is_trained() -> None:
    bench = Bench(course_of(k=4, n_children=3), flat, loss=lambda architecture: float(int(architecture.id, 16) % 97))
    bench.run()
    for part in bench.race.parts:
        children = [line for line in bench.lines if line.made == CHILD and part[0] < line.latency_ms <= part[1]]
        trained = [line for line in children if CHILD in line.rungs]
        assert len(trained) <= 1
        assert not trained or trained[0].loss == min(line.loss for line in children if line.loss is not None)


def test_each_part_of_the_latencies_has_at_most_one_finalist_and_the_whole_network_is_always_one() -> None:
    bench = Bench(course_of(k=4, n_children=0), by_size).run()
    finalists = [line for line in bench.lines if FINISH in line.rungs]
    whole = cuts().known["whole"].id
    assert whole in {line.id for line in finalists}
    counts = Counter(part for part in bench.race.parts for line in finalists
                     if part[0] < line.latency_ms <= part[1] and line.id != whole)
    assert set(counts.values()) <= {1, 2}  # an empty part gives its place to another
    assert len(finalists) <= 5


def test_controls_are_trained_as_long_as_the_finalist_they_are_drawn_for() -> None:
    bench = Bench(course_of(n_children=0, n_controls=2), by_size).run()
    lines = {line.id: line for line in bench.lines}
    controls = [line for line in bench.lines if line.made == CONTROL]
    assert len(controls) == 2
    for line in controls:
        partner = lines[line.move.removeprefix("drawn for ")]
        assert line.latency_ms == pytest.approx(partner.latency_ms, rel=0.06)
        behind_first = sum(leg["steps"] for leg in partner.legs if leg["rung"] != KNOWN)
        assert line.steps == pytest.approx(behind_first, rel=0.05)


@settings(max_examples=15)
@given(st.integers(0, 10_000))
def test_any_number_of_processes_come_to_the_same_legs(seed: int) -> None:
    """Whatever is taken first of what can be done now: the trainings are the same."""
    plain = Bench(course_of(k=5, n_children=0), by_size).run()
    draw = random.Random(seed)
    mixed = Bench(course_of(k=5, n_children=0), by_size).run(draw.choice)
    assert Counter(entry[:2] for entry in mixed.done) == Counter(entry[:2] for entry in plain.done)


def test_a_race_goes_on_where_it_was() -> None:
    """A race is decided by its lines alone: stopped anywhere, it takes the same steps."""
    whole = Bench(course_of(k=4), by_size).run()
    stopped = Bench(course_of(k=4), by_size)
    while stopped.race.steps():
        again = Bench(stopped.course, by_size, lines=list(stopped.lines), chosen=stopped.chosen, done=stopped.done)
        again.take(again.race.steps()[0])
        stopped = again
    assert stopped.done == whole.done


def test_a_cap_leaves_out_what_does_not_keep_it_and_takes_smaller_images_of_it() -> None:
    free = Bench(course_of(n_children=0)).course
    cap_ms = 0.5 * free.bound_ms
    course = course_of(n_children=0, cap_ms=cap_ms)
    assert course.bound_ms == cap_ms
    assert all(course.latency_ms(known.architecture) <= cap_ms for known in course.known)
    bench = Bench(course, by_size).run()
    assert all(line.latency_ms <= cap_ms for line in bench.lines)
    assert any(known.architecture.image_size < 64 for known in course.known)


def test_a_cap_below_everything_is_an_error_that_names_the_fastest() -> None:
    with pytest.raises(BudgetError, match=r"budget.latency_ms=0.001: .* the fastest takes 0\.\d+ ms"):
        known_networks(cuts(), predict, replace(OPTIONS, cap_ms=0.001))


def test_the_seconds_are_used_up_and_no_more() -> None:
    """A unit is chosen anew for each leg; a made-up machine takes 0.02 s a step."""
    left = [200.0]
    bench = Bench(replace(course_of(None, n_children=0, k=4), left_s=lambda: left[0]), by_size)
    for _ in range(200):
        steps = bench.race.steps()
        if not steps:
            break
        before = len(bench.done)
        bench.take(steps[0])
        if len(bench.done) > before and bench.done[-1][0] != KNOWN:
            left[0] -= 0.02 * bench.done[-1][2]
    assert -5 < left[0] < 60  # the estimates of steps by MACs are rough at first


def test_no_time_left_still_ends() -> None:
    bench = Bench(replace(course_of(None, n_children=0), left_s=lambda: -10.0), by_size).run()
    assert {steps for rung, _, steps, _ in bench.done if rung != KNOWN} == {LEAST_STEPS}


def test_n_lines_bounds_what_is_begun() -> None:
    bench = Bench(course_of(n_lines=7), by_size).run()
    assert len([line for line in bench.lines if line.made != CONTROL]) <= 7


def test_smaller_images_that_cannot_win_are_not_trained() -> None:
    """Where a faster line is surely better than the source, its smaller images are not tried."""
    def fast_is_best(architecture: Architecture, rung: str) -> float:
        worse = len(architecture.stages) == 7 and rung != KNOWN
        return 0.70 if worse else 0.90

    bench = Bench(course_of(n_children=0), fast_is_best).run()
    assert not any(line.made == SIZE and len(line.architecture.stages) == 7 for line in bench.lines)


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
    bench = Bench(course_of(workers=4, n_children=0), by_size)
    while not any(isinstance(step, Train) and step.rung == TRUNK for step in bench.race.steps()):
        bench.take(bench.race.steps()[0])
    assert next(step.threads for step in bench.race.steps() if isinstance(step, Train) and step.rung == TRUNK) == 4
