"""The sentence on what to deploy, and the table of who was cut from whom."""

from __future__ import annotations

import numpy as np
import pytest
from front_fixtures import make_row

from hwnas.front.comparison import compare_deployed
from hwnas.front.rows import FrontRow
from hwnas.networks.network import FoundNetwork
from hwnas.space.search_space import SearchSpace
from hwnas.tasks.classification import RightAnswers

N = 3000
ANY = SearchSpace.load("mnasnet_small", channels=1, classes=10).reference


def row_of(id: str, ms: float, n_right: int, **changes) -> FrontRow:
    return make_row(id, latency_ms=ms, latency_ms_low=ms * 0.99, latency_ms_high=ms * 1.01, top1_test=n_right / N,
                    **changes)


def deployed(*rows: FrontRow) -> tuple[str, str]:
    """The network that is to be deployed, and the sentence."""
    found = compare_deployed(rows, {row.id: RightAnswers(np.arange(N) < round(row.top1_test * N)) for row in rows})
    assert len(found) == 1
    assert found[0].verdict == "deploy"
    assert f"Deploy models/{found[0].finalist}:" in found[0].sentence
    return found[0].finalist, found[0].sentence


def test_the_fastest_that_is_surely_as_good_as_the_best_is_deployed() -> None:
    best, near, far = row_of("best", 0.4, 2910), row_of("near", 0.2, 2908), row_of("far", 0.1, 2880)
    assert deployed(best, near, far)[0] == "near", "far is one point behind"
    assert deployed(best, far) == (
        "best", "Deploy models/best: best 97.00 % in 0.4 ms (95 %: 94.0 to 98.0 %): no network is more accurate.")
    baseline = row_of("net", 0.15, 2915, is_baseline=True)
    assert deployed(best, near, baseline)[0] == "net", "also where it is no finalist"


def test_much_that_int8_takes_names_another_precision_where_there_is_one() -> None:
    lost = {"precision": "int8", "top1_test_fp32": 2910 / N}
    assert "int8 takes 2.0 points of its top-1" in deployed(row_of("a", 0.2, 2850, target="xeon_int8", **lost))[1]
    for target, n_right in (("edge_int8", 2850), ("xeon_int8", 2900)):  # LiteRT has no bf16; a third of a point
        assert "bf16" not in deployed(row_of("a", 0.2, n_right, target=target, **lost))[1]


def test_of_networks_that_could_not_be_timed_those_that_may_be_better_are_named() -> None:
    best = row_of("best", 0.4, 2700)
    unknown = row_of("unknown", 0.2, 2900, verified=False, reason="timing INVALID")
    sentence, = (one.sentence for one in compare_deployed([best, unknown], {"best": RightAnswers(np.arange(N) < 2700)}))
    assert "no network of the verified ones is more accurate" in sentence
    assert "unknown may be better: 96.67 %, predicted 0.1 ms" in sentence
    assert "of the verified ones" not in deployed(best)[1]


def test_no_control_nor_what_breaks_the_cap_is_deployed():
    chosen, said = deployed(row_of("kept", 0.2, 2800, meets_cap=True), row_of("over", 0.9, 2950, meets_cap=False),
                            row_of("drawn", 0.1, 2900, is_control=True, control_of="kept"))
    assert chosen == "kept"
    assert "no network that keeps the cap is more accurate" in said
    assert compare_deployed([row_of("net", 0.2, 2800, is_baseline=True)], {"net": RightAnswers(np.ones(N, bool))}) == []
    assert compare_deployed([row_of("f", 0.2, 2800, verified=False)], {"f": RightAnswers(np.ones(N, bool))}) == []
    rows = [row_of("kept", 0.2, 2800), row_of("drawn", 0.3, 2900, is_control=True, control_of="kept")]
    chosen, said = deployed(*rows)
    assert chosen == "kept"
    assert "no network is more accurate, but drawn 96.67 % in 0.3 ms, trained as a control." in said


def test_the_best_obvious_cut_is_held_against_the_fastest_finalist_that_is_as_good() -> None:
    cut = row_of("cut", 0.3, 2850, is_baseline=True, network=FoundNetwork(ANY, None, "cut_early"))
    _, said = deployed(row_of("slow", 0.6, 2950), row_of("fast", 0.1, 2851), cut)
    assert "At the top-1 of the best obvious cut, cut 95.00 % in 0.3 ms, fast 95.03 % in 0.1 ms is 3.00 times as fast" \
        in said
    assert "(2.94 to 3.06; +0.03 points)" in said
    _, said = deployed(row_of("slow", 0.6, 2950), cut)
    assert "No finalist is faster than the best obvious cut" in said


@pytest.mark.parametrize(("row", "kind", "whole"), [
    (make_row("0a", name="net", architecture="cut:net+same@64 relu a=1", is_baseline=True), "whole network", False),
    (make_row("net-stem1", name="net", architecture="timm:net stem_stride=1", is_baseline=True), "baseline", False),
    (make_row("0a", name="net", architecture="cut:net+same@64 relu a=1"), "whole network", True),
    (make_row("0a", name="net at 48 px", architecture="cut:net@48 relu a=1"), "searched", False)])
def test_the_whole_network_is_known_in_a_race(row: FrontRow, kind: str, whole: bool) -> None:
    assert (row.kind, row.is_whole) == (kind, whole)
