"""Pairs: thresholds that lose nothing on the images that choose them, what pays, and where it is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from deployment_fixtures import sides_data
from front_fixtures import make_pair, make_row, some_rows, without_programs
from hypothesis import given, settings
from hypothesis import strategies as st

from hwnas.data.dataset import Preparation
from hwnas.errors import StudyError, UnknownName
from hwnas.front.card import card_text
from hwnas.front.pairs import (
    LOSS,
    UNSEEN,
    Z95,
    Scored,
    choose_pairs,
    choose_threshold,
    find_pair,
    goes_on,
    load_pairs,
    save_pairs,
)
from hwnas.front.picture import PlotInfo, front_figure
from hwnas.front.report import read_report, report_html
from hwnas.front.rows import FrontRow, mark_front, save_front
from hwnas.front.verification import summary_lines
from hwnas.system.run_folder import RunFolder
from hwnas.target import Target

SOME = settings(max_examples=100, deadline=None)


def random_scores(seed: int, n: int, top1: float, levels: int) -> Scored:
    """A network whose confidence has so many values at most, and says something of its answers."""
    rng = np.random.default_rng(seed)
    right = rng.random(n) < top1
    confidence = 1 - rng.random(n) * np.where(right, 0.3, 0.7)
    return Scored(right, (np.ceil(confidence * levels) / levels).astype(np.float16))


def top1_of(fast: Scored, accurate: Scored, threshold: float) -> float:
    return float(np.where(goes_on(fast, threshold), accurate.right, fast.right).mean())


def loss_bound(fast: Scored, accurate: Scored, threshold: float) -> float:
    """The upper bound of the top-1 that the images lose that do not go on."""
    going = goes_on(fast, threshold)
    apart = np.where(going, 0, accurate.right.astype(int) - fast.right)
    return 0.0 if going.all() else float((apart.sum() + Z95 * np.sqrt(np.abs(apart).sum() + UNSEEN)) / len(apart))


@given(st.integers(0, 2**31), st.sampled_from([1, 9, 400, 2500]), st.floats(0, 1), st.floats(0, 1),
       st.sampled_from([1, 3, 4096]))
@SOME
def test_the_threshold_is_the_lowest_that_loses_hardly_anything(seed: int, n: int, low: float, high: float, levels: int
                                                                ) -> None:
    fast, accurate = random_scores(seed, n, low, levels), random_scores(seed + 1, n, high, levels)
    threshold = choose_threshold(fast, accurate)
    assert (threshold == 0) == (fast.right.mean() >= accurate.right.mean())
    if threshold:
        assert loss_bound(fast, accurate, threshold) <= LOSS
        lower = [float(value) for value in fast.confidence[goes_on(fast, threshold)]][1:200]
        assert all(loss_bound(fast, accurate, value) > LOSS for value in lower if value > fast.confidence.min())


@given(st.floats(0.001, 1), st.integers(0, 2**31))
@SOME
def test_who_compares_unrounded_confidences_decides_alike(confidence: float, seed: int) -> None:
    fast = random_scores(seed, 50, 0.5, 4096)
    threshold = choose_threshold(fast, Scored(np.ones(50, bool), fast.confidence))
    spacing = float(np.spacing(np.float16(confidence)))
    if abs(confidence - threshold) > spacing / 100:  # a tie of rounding
        assert (np.float32(confidence) < threshold) == (float(np.float16(confidence)) < threshold)


def test_equal_confidences_go_on_together_and_where_all_are_needed_all_go() -> None:
    fast = Scored(np.tile([False, True, False, True], 500), np.tile(np.array([0.5, 0.5, 1, 1], np.float16), 500))
    everything = choose_threshold(fast, Scored(np.ones(2000, bool), fast.confidence))
    assert goes_on(fast, everything).all()
    half = choose_threshold(fast, Scored(np.tile([True, True, False, True], 500), fast.confidence))
    assert goes_on(fast, half).tolist() == [True, True, False, False] * 500


@pytest.mark.parametrize(("n", "shown"), [(1000, False), (1300, True)])
def test_few_images_cannot_show_that_hardly_anything_is_lost(n: int, shown: bool) -> None:
    right = np.arange(n) % 4 > 0
    fast = Scored(right, np.where(right, 0.9, 0.5).astype(np.float16))  # it knows when it is wrong
    going = goes_on(fast, choose_threshold(fast, Scored(np.ones(n, bool), fast.confidence)))
    assert going.tolist() == ((~right).tolist() if shown else [True] * n)


@given(st.integers(0, 2**31), st.integers(2, 6), st.booleans())
@SOME
def test_pairs_pay_and_keep_what_is_asked(seed: int, n: int, capped: bool) -> None:
    rng = np.random.default_rng(seed)
    top1 = np.sort(rng.uniform(0.3, 0.99, n))
    test, validation = ({f"n{at}": random_scores(seed % 997 + at + shift, 1500, top1[at], 4096) for at in range(n)}
                        for shift in (0, 100))
    latencies_ms = np.cumsum(rng.uniform(0.05, 1, n))
    cap_ms = float(latencies_ms[-1] * rng.uniform(0.8, 2)) if capped else None
    rows = mark_front([make_row(f"n{at}", latency_ms=float(ms), latency_ms_low=0.95 * ms, latency_ms_high=1.1 * ms,
                                top1_test=float(test[f"n{at}"].right.mean())) for at, ms in enumerate(latencies_ms)],
                      cap_ms)
    by_id, pairs = {row.id: row for row in rows}, choose_pairs(rows, test, validation, cap_ms)
    for pair in pairs:
        fast, accurate = by_id[pair.fast], by_id[pair.accurate]
        assert fast.on_front
        assert accurate.on_front
        assert 0 < pair.share < 1
        assert fast.latency_ms < pair.latency_ms_mean < accurate.latency_ms < pair.latency_ms_worst
        assert pair.latency_ms_mean == pytest.approx(fast.latency_ms + pair.share * accurate.latency_ms)
        for name in ("latency_ms_mean", "latency_ms_worst", "top1_test", "difference"):
            low, high = (getattr(pair, f"{name}_{end}") for end in ("low", "high"))
            assert low <= getattr(pair, name) <= high
        assert pair.times_as_fast == pytest.approx(accurate.latency_ms / pair.latency_ms_mean)
        assert cap_ms is None or pair.latency_ms_worst <= cap_ms
        assert loss_bound(validation[fast.id], validation[accurate.id], pair.threshold) <= LOSS
        assert pair.top1_test == pytest.approx(top1_of(test[fast.id], test[accurate.id], pair.threshold))
        beaten = [row.id for row in rows if row.on_front and row.latency_ms <= pair.latency_ms_mean
                  and row.top1_test >= pair.top1_test]
        assert not beaten
    assert [pair.latency_ms_mean for pair in pairs] == sorted(pair.latency_ms_mean for pair in pairs)
    assert len({pair.accurate for pair in pairs}) == len(pairs)
    assert not choose_pairs(rows, test, {})  # without validation images
    assert not choose_pairs([replace(row, verified=False) for row in rows], test, validation)


def test_a_sum_of_p99_breaks_its_cap() -> None:
    rng = np.random.default_rng(0)
    right = np.arange(1300) < 780
    fast = Scored(right, np.where(right, rng.uniform(0.9, 1, 1300), rng.uniform(0.3, 0.8, 1300)).astype(np.float16))
    scores = {"a": fast, "b": Scored(np.ones(1300, bool), fast.confidence)}
    rows = mark_front([make_row(id, latency_ms=ms, latency_ms_low=ms, latency_ms_high=ms, latency_ms_p99=2 * ms,
                                top1_test=float(scores[id].right.mean())) for id, ms in (("a", 0.1), ("b", 1.0))])
    pair, = choose_pairs(rows, scores, scores, 1.1 + 1e-9, 2.2 + 1e-9)
    assert (pair.id, pair.share, pair.difference) == ("a+b", 0.4, 0.0)
    assert pair.latency_ms_mean == pytest.approx(0.5)
    assert not choose_pairs(rows, scores, scores, 1.0)
    assert not choose_pairs(rows, scores, scores, None, 2.1)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "run")
    made.write_config("seed: 0\n")
    save_front(made, some_rows())
    return made


def test_the_file_is_read_as_it_was_written_and_a_torn_one_is_one_line(run: RunFolder) -> None:
    assert load_pairs(run) == []
    pair = make_pair()
    save_pairs(run, [pair])
    assert find_pair(run, pair.id) == pair
    with pytest.raises(UnknownName, match=r"aaaaaaa0\+aaaaaaa3"):
        find_pair(run, "aaaaaaa3+aaaaaaa0")
    whole = run.pairs_csv.read_text()
    for torn in (whole.replace("0.9", "high", 1), "id,fast\na+b,a\n", whole[:-30]):
        run.pairs_csv.write_text(torn)
        with pytest.raises(StudyError, match=r"pairs\.csv.* hwnas verify run="):
            load_pairs(run)
    save_pairs(run, [])
    assert load_pairs(run) == []


def test_pairs_are_in_report_picture_and_printed_result(run: RunFolder) -> None:
    pairs = [make_pair(), make_pair(fast="aaaaaaa1", times_as_fast=1.2), make_pair(fast="aaaaaaa2", times_as_fast=3.4)]
    save_pairs(run, pairs)
    data = read_report(run)
    page = without_programs(report_html(data))
    table = page[page.index("<h2>Pairs"):page.index("<h2>Baselines")]
    assert all(pair.id in table for pair in pairs)
    assert "96.00" in table
    assert "<h2>Pairs" not in report_html(replace(data, pairs=[]))
    (axes,) = front_figure(data.rows, PlotInfo("t", "h", "d", "day"), pairs).axes
    marks, = (line for line in axes.lines if "pairs" in str(line.get_label()))
    assert list(marks.get_xdata()) == [pair.latency_ms_mean for pair in pairs]
    printed = [line for line in summary_lines(data.rows, [], pairs, run.report) if line.startswith("pair ")]
    assert [re.search(r"id=(\S+)", line)[1] for line in printed] == [pairs[2].id, pairs[0].id]
    for text in ("96.00 %", "−0.10 points", "0.092 ms", "0.22 ms at worst", "1.8 times", "25% go on"):
        assert text in printed[1]


@pytest.mark.parametrize(("threshold", "asked"), [(0.5, False), (0.999, True)])
def test_the_cards_lines_ask_the_accurate_network_where_the_fast_one_is_not_sure(threshold: float, asked: bool) -> None:
    given_images = replace(sides_data(), preparation=Preparation(True, (20, 16), 1))
    row: FrontRow = make_row("aaaaaaa3")
    text = card_text(row, given_images, Target("ort_int8", "onnxruntime", "int8"), date="", runtime="",
                     pair=make_pair(threshold=threshold))
    part = text[text.index("## After a faster network"):]
    assert "id=aaaaaaa0+aaaaaaa3" in part
    scope = {"classes": ["left", "right"]}
    exec(re.search(r"```python\n(.*?)\n```", part, re.DOTALL)[1], scope)
    said = scope["answer"](lambda image: np.array([[2.0, 0.0]]), lambda image: np.array([[0.0, 1.0]]), None)
    assert said == ("right" if asked else "left")
    assert "faster network" not in card_text(row, given_images, Target("a", "onnxruntime", "int8"), date="", runtime="")
