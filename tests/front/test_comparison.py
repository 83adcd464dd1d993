"""Search against baselines: the paired interval and what is claimed from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from front_fixtures import make_row

from hwnas.front.comparison import compare
from hwnas.front.rows import FrontRow
from hwnas.networks.baselines import Baseline
from hwnas.networks.network import Shape, TimmNetwork
from hwnas.networks.weights import Pretrained
from hwnas.stats import paired_difference
from hwnas.tasks.classification import RightAnswers
from hwnas.tasks.multilabel import RankedImages

N = 1000


def right(n: int) -> np.ndarray:
    """A network that gets the first `n` of N images right."""
    return np.arange(N) < n


def graded(n: int) -> RightAnswers:
    return RightAnswers(right(n))


def row_of(id: str, ms: float, n_right: int, **changes):
    return make_row(id, latency_ms=ms, latency_ms_low=ms * 0.99, latency_ms_high=ms * 1.01,
                    top1_test=n_right / N, **changes)


def baseline(id: str, ms: float, n_right: int, name: str | None = None, **changes):
    return row_of(id, ms, n_right, is_baseline=True, **{"name": name or id, "architecture": f"timm:{id}", **changes})


def outcome(*rows: FrontRow) -> list:
    return compare(rows, {row.id: graded(round(row.top1_test * N)) for row in rows})


def test_the_interval_agrees_with_drawing_the_images_themselves():
    rng = np.random.default_rng(1)
    one, other = rng.random(400) < 0.9, rng.random(400) < 0.85
    mean, low, high = paired_difference(one, other)
    paired = one.astype(float) - other
    drawn = np.array([paired[rng.integers(0, 400, 400)].mean() for _ in range(4000)])
    assert mean == pytest.approx(paired.mean())
    np.testing.assert_allclose([low, high], np.quantile(drawn, [0.025, 0.975]), atol=0.006)
    with pytest.raises(ValueError, match="same images"):
        paired_difference(right(3), right(3)[:5])


@pytest.mark.parametrize(("only_first", "only_second", "n", "beats"), [
    (3, 0, 6, False),  # p = 0.25 by the exact test
    (16, 4, 300, True), (12, 4, 300, False), (124, 4, 10_000, True), (5, 0, 10_000, False), (6, 0, 10_000, True)])
def test_few_images_that_differ_decide_as_the_exact_test_does(only_first, only_second, n, beats):
    first, second = np.zeros(n, bool), np.zeros(n, bool)
    first[:only_first] = second[only_first : only_first + only_second] = True
    assert (paired_difference(first, second)[1] > 0) == beats


def test_why_nothing_can_be_compared_is_said_as_it_is() -> None:
    over = outcome(row_of("f", 0.1, 950, meets_cap=False), baseline("resnet", 0.1, 900))[0]
    assert over.sentence.endswith("cannot be compared with resnet: no finalist keeps the cap as measured.")
    unverified = outcome(row_of("f", 0.1, 950, verified=False), baseline("resnet", 0.1, 900))[0]
    assert unverified.sentence.endswith("no finalist was verified.")


def test_search_beats_only_when_the_interval_excludes_zero():
    clear = outcome(row_of("f", 0.1, 950), baseline("resnet", 0.1, 900))[0]
    assert clear.verdict == "beats"
    assert clear.low > 0
    assert "The search beats resnet: at equal latency, 5.00 points of top-1 more accurate" in clear.sentence
    close = outcome(row_of("f", 0.1, 902), baseline("resnet", 0.1, 900))[0]
    assert close.verdict == "does not beat"
    assert close.low <= 0 < close.difference
    assert "includes 0" in close.sentence
    slower = outcome(row_of("f", 0.12, 950), replace(baseline("resnet", 0.1, 900), latency_ms_high=0.125))[0]
    assert slower.verdict == "none as fast"  # its interval alone makes no network as fast
    behind = outcome(row_of("f", 0.1, 800), baseline("resnet", 0.1, 900))[0]
    assert behind.verdict == "does not beat"
    assert "behind by 10.00 points" in behind.sentence
    for steps, verdict in ((300, "not comparable"), (400, "beats"), (None, "beats")):
        said = outcome(row_of("f", 0.1, 950, steps=1000), baseline("resnet", 0.1, 900, steps=steps))[0]
        assert said.verdict == verdict, "a baseline that had less than a third of the steps is not said to be beaten"
    assert outcome(row_of("f", 0.1, 850, steps=1000), baseline("b", 0.1, 900, steps=9))[0].verdict == "does not beat"
    alone = outcome(row_of("f", 0.1, 930), baseline("b", 0.1, 900))[0]
    many = outcome(row_of("f", 0.1, 930), *(row_of(f"g{i}", 0.1, 100) for i in range(4)), baseline("b", 0.1, 900))[0]
    assert many.low < alone.low


def test_the_rival_is_the_best_finalist_that_is_no_slower_and_keeps_the_cap():
    found = outcome(row_of("quick", 0.05, 900), row_of("equal", 0.1005, 930),
                    row_of("slow", 0.2, 990), baseline("b", 0.1, 900))[0]
    assert (found.finalist, found.n_eligible) == ("equal", 2)
    found = outcome(row_of("f", 0.1, 990, meets_cap=False), row_of("g", 0.1, 900), baseline("b", 0.2, 900))[0]
    assert found.finalist == "g"
    found = outcome(row_of("f", 0.3, 999), baseline("b", 0.1, 500))[0]
    assert found.verdict == "none as fast"
    assert "no finalist is as fast" in found.sentence
    assert found.difference is None
    found = compare([row_of("f", 0.1, 900), baseline("b", 0.1, 900, verified=False, reason="loss was NaN.")],
                    {"f": graded(900)})[0]
    assert found.verdict == "not comparable"
    assert "loss was NaN" in found.sentence


def test_the_variant_that_is_harder_to_beat_counts():
    found = outcome(row_of("f", 0.1, 950), row_of("g", 0.5, 960),
                    baseline("b", 0.1, 700, "b"), baseline("b-stem1", 0.4, 940, "b"))
    assert len(found) == 1
    assert found[0].baseline == "b-stem1"
    assert "The search beats b-stem1:" in found[0].sentence
    found = outcome(row_of("f", 0.3, 950), baseline("b", 0.1, 700, "b"), baseline("b-stem1", 0.4, 900, "b"))[0]
    assert found.verdict == "beats"
    assert "faster than every finalist" in found.sentence


def test_a_race_in_which_a_larger_network_of_a_family_is_worse_is_called_under_trained() -> None:
    small = replace(baseline("mobilenetv3_small_100", 0.2, 800, "mobilenetv3_small_100"), macs=10)
    large = replace(baseline("mobilenetv3_large_100", 0.4, 700, "mobilenetv3_large_100"), macs=90)
    other = replace(baseline("resnet10t", 0.4, 600, "resnet10t"), macs=200)
    found = outcome(row_of("f", 0.1, 900), small, large, other)
    assert (found[0].name, found[0].verdict) == ("training", "under-trained")
    assert "mobilenetv3_large_100 70.00 % in 0.4 ms is below the smaller mobilenetv3_small_100" in found[0].sentence
    assert "finalists.recipe.epochs=" in found[0].sentence
    assert large.name not in {one.name for one in found}  # and no victory over it
    stem = replace(large, id=f"{large.name}-stem1", top1_test=0.85)
    assert [one.baseline for one in outcome(row_of("f", 0.1, 900), small, large, stem)
            if one.name == large.name] == [stem.id]
    weights = Pretrained("w.safetensors", "0" * 64, "MIT", "here", (0.5,), (0.5,))
    begun = replace(small, network=TimmNetwork(Baseline(small.name, pretrained=weights), Shape(1, 16, 10)))
    apart = outcome(row_of("f", 0.1, 900), begun, large)
    assert all(one.verdict != "under-trained" for one in apart)
    level = outcome(row_of("f", 0.1, 900), small, replace(large, top1_test=0.8), other)
    assert all(one.verdict != "under-trained" for one in level)


def test_a_race_against_a_baseline_that_has_hardly_learnt_is_called_under_trained() -> None:
    said = outcome(row_of("f", 0.1, 900), baseline("b", 0.1, 220, "b"))
    assert [one.verdict for one in said] == ["under-trained"]  # and no victory over it
    both = outcome(row_of("f", 0.1, 900), baseline("b", 0.1, 220, "b"),
                   baseline("b-stem1", 0.4, 150, "b"), baseline("c", 0.2, 300, "c"))
    assert [one.verdict for one in both] == ["under-trained"]
    assert "b 22.00 % in 0.1 ms has hardly learnt anything beside f 90.00 % in 0.1 ms" in said[0].sentence
    other_stem = outcome(row_of("f", 0.1, 900), baseline("b", 0.1, 220, "b"), baseline("b-stem1", 0.4, 800, "b"))
    assert "under-trained" not in [one.verdict for one in other_stem]


def test_faster_at_equal_accuracy_is_a_lead_and_slower_or_clearly_worse_is_none():
    (found,) = outcome(row_of("quick", 0.1, 901), row_of("slow", 0.2, 901), baseline("b", 0.3, 901))
    assert (found.verdict, found.finalist) == ("faster", "quick")
    assert "3 times as fast at equal top-1" in found.sentence
    (found,) = outcome(row_of("quick", 0.1, 880), baseline("b", 0.3, 902))
    assert (found.verdict, found.finalist) == ("does not beat", "quick")
    assert "3 times as fast: it is behind by 2.20 points" in found.sentence
    (found,) = outcome(row_of("same", 0.298, 902), baseline("b", 0.3, 902))
    assert found.verdict == "does not beat"
    (found,) = outcome(row_of("f", 0.13, 950), baseline("resnet", 0.47, 900))
    assert "The search beats resnet: 3.6 times as fast and 5.00 points of top-1 more accurate" in found.sentence
    assert "equal latency" not in found.sentence


def control(id: str, ms: float, n_right: int, of: str):
    return row_of(id, ms, n_right, is_control=True, control_of=of)


def test_finalists_are_held_against_the_random_networks_drawn_for_them():
    found, base = outcome(row_of("f", 0.1, 950), row_of("g", 0.2, 970),
                          control("c", 0.1, 900, "f"), control("d", 0.2, 960, "g"),
                          baseline("b", 0.1, 900))
    assert (found.baseline, found.verdict, found.n_eligible) == ("controls", "beats", 2)
    assert found.difference == pytest.approx(0.03)
    assert "beats random networks of its space by 3.00 points" in found.sentence
    assert "take 1.00 of the others' time" in found.sentence
    assert base.finalist == "f"  # a control is no finalist, and no baseline
    found, = compare([row_of("f", 0.1, 900), control("c", 0.1, 900, "f")], {"f": graded(900)})
    assert found.verdict == "not comparable"


def test_random_networks_are_held_against_finalists_by_the_score_of_their_task() -> None:
    rng, present = np.random.default_rng(0), np.random.default_rng(1).random((300, 4)) < 0.3
    grades = {id: RankedImages(np.clip(share * present + rng.random(present.shape) * 0.6, 0, 1), present)
              for id, share in (("f", 0.5), ("c", 0.2))}
    rows = [replace(row, metric="mAP", top1_test=grades[row.id].score)
            for row in (row_of("f", 0.1, 0), control("c", 0.1, 0, "f"))]
    found, = compare(rows, grades)
    assert (found.difference, found.low, found.high) == pytest.approx(grades["f"].minus(grades["c"]))
    assert "points of mAP" in found.sentence


@pytest.mark.parametrize(("ms", "n_right"), [(0.1, 899), (0.1, 901), (0.2, 990)])
def test_random_networks_that_are_as_good_or_faster_are_not_beaten(ms: float, n_right: int) -> None:
    """The last is more accurate, but twice as slow as its control."""
    found, = outcome(row_of("f", ms, n_right), control("c", 0.1, 900, "f"))
    assert found.verdict == "does not beat"
    assert "a random network of its space" in found.sentence
    assert ("too unequal to judge" in found.sentence) is (ms > 0.1)
    assert ("includes 0" in found.sentence) is (n_right < 902)


def test_known_networks_of_the_space_are_held_against_finalists_by_their_name() -> None:
    beaten, ahead = (row_of(name, 0.1, right, name=f"{name}_like", is_control=True)
                     for name, right in (("v2", 900), ("a1", 980)))
    pairs, first, second = outcome(row_of("f", 0.1, 950), control("c", 0.1, 930, "f"), beaten, ahead)
    assert (pairs.baseline, pairs.n_eligible, pairs.difference) == ("controls", 1, pytest.approx(0.02))
    assert (first.baseline, first.name, first.verdict, first.finalist) == ("v2", "v2_like", "beats", "f")
    assert first.difference == pytest.approx(0.05)
    assert 0 < first.low < 0.05 < first.high
    assert first.sentence.startswith("The search beats v2_like v2: at equal latency, 5.00 points of top-1 more")
    assert first.sentence.endswith("known network 90.00 % in 0.1 ms.")
    assert (second.name, second.verdict) == ("a1_like", "does not beat")
    alone, = outcome(row_of("f", 0.1, 950), beaten)  # no random ones were drawn: none are missing
    assert alone.name == "v2_like"
    missing, = compare([row_of("f", 0.1, 900), beaten], {"f": graded(900)})
    assert "the known network was not verified" in missing.sentence
