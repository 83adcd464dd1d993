"""Certificates: their statistics against hand-computed and library values, which one is found, what a report says."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from certify_fixtures import digits, plan_of, pretend_trained, tiny_space
from front_fixtures import Balance

from hwnas.accuracy.certificate import (
    COLUMNS,
    Certificate,
    certificate_facts,
    favoured,
    find_certificate,
    keep,
    key_of,
    look_up,
    read_certificate,
    rows,
    sentences,
)
from hwnas.certify.results import ESTIMATES, Judged, Truth, certificate_figure, certificate_of
from hwnas.certify.truth import CertifyPlan
from hwnas.cli.progress import text_table
from hwnas.data.dataset import Dataset
from hwnas.errors import DataError, StudyError
from hwnas.front.picture import PlotInfo
from hwnas.front.report import ReportData, report_html
from hwnas.pictures import figure_bytes
from hwnas.space.search_space import SearchSpace


@pytest.fixture(scope="module")
def data() -> Dataset:
    return digits()


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> SearchSpace:
    return tiny_space(tmp_path_factory.mktemp("space"))


@pytest.fixture
def plan(tmp_path: Path, space: SearchSpace) -> CertifyPlan:
    return plan_of(tmp_path / "out", space)


def top1(row: int, seed: int) -> float:
    return 0.8 + 0.01 * row + (0.004 if seed else -0.004)


def write_estimates(plan: CertifyPlan, label: str, values: Any, seconds: float = 2.0, setup: float = 0.0,
                    fingerprint: str = "f", accuracy: str = "proxy") -> Judged:
    judged = Judged(label, accuracy, {"label": label})
    path = judged.file(plan.out)
    path.parent.mkdir(exist_ok=True)
    told = [{"reason": "nan"} if value is None else {"value": value, "std": 0.01, "curve": [], "stopped": False}
            for value in values]
    results = [{"id": network.id, "seed": 0, "seconds": 2 * seconds, "cpu_seconds": seconds, **one}
               for network, one in zip(plan.networks, told, strict=True)]
    path.write_text(json.dumps({
        **ESTIMATES.header, "label": label, "accuracy": accuracy, "options": judged.options, "fingerprint": fingerprint,
        "setup_seconds": setup, "setup_cpu_seconds": None, "results": results}))
    return judged


GOOD = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.7]
BAD = [0.2, 0.1, 0.3, 0.5, 0.4, 0.6, 0.8, 0.7]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, data: Dataset, space: SearchSpace) -> dict[str, Any]:
    plan = plan_of(tmp_path_factory.mktemp("made"), space)
    pretend_trained(plan, data, top1)
    judged = [write_estimates(plan, "good", GOOD, setup=600), write_estimates(plan, "bad", BAD, seconds=0.5),
              write_estimates(plan, "flat", [0.5] * 8)]
    return certificate_of(Truth(plan, data), judged, data, space)


@pytest.fixture
def content(made: dict[str, Any]) -> dict[str, Any]:
    """Of three estimators; each test has its own."""
    return copy.deepcopy(made)


def test_a_certificate_says_how_each_ranks_and_what_it_costs(content: dict[str, Any]) -> None:
    good, bad, flat = (content["estimators"][label] for label in ("good", "bad", "flat"))
    assert content["best"] == "good"
    assert good["kendall_tau"] == pytest.approx((27 - 1) / 28)
    assert good["low"] < good["kendall_tau"] <= good["high"]
    assert good["cpu_seconds_amortised"] == pytest.approx(2 + 600 / 200)
    assert good["share_of_full"] == pytest.approx(5 / 40)
    assert (bad["cpu_seconds"], bad["seconds"]) == (0.5, 1.0)
    assert bad["behind_best"][0] == pytest.approx(good["kendall_tau"] - bad["kendall_tau"])
    assert flat["kendall_tau"] is None
    assert (good["n"], good["failed"]) == (8, 0)
    truth = content["truth"]
    assert truth["std_seeds"] == pytest.approx(0.004 * 2**0.5)
    assert (truth["trainings"], truth["failed"], truth["cpu_seconds"]) == (16, 0, 40)
    assert content["ceiling"]["kendall_tau"] == pytest.approx(1)
    assert [one["top1"] for one in content["networks"]] == pytest.approx([0.8 + 0.01 * row for row in range(8)])


def test_the_format_is_what_readers_of_it_rely_on(content: dict[str, Any]) -> None:
    assert content["format"] == "hwnas-certificate/1"
    assert set(content) == {
        "format", "created", "host", "versions", "dataset", "space", "n", "seed", "cost", "cost_source", "k", "level",
        "truth", "ceiling", "estimators", "networks", "best"}
    assert set(content["estimators"]["bad"]) == {
        "accuracy", "options", "fingerprint", "setup_seconds", "setup_cpu_seconds", "n", "failed", "stopped", "seconds",
        "cpu_seconds", "cpu_seconds_amortised", "share_of_full", "kendall_tau", "low", "high", "spearman",
        "spearman_low", "spearman_high", "top_k_regret", "hypervolume_loss", "hypervolume_loss_of_truth", "behind_best"}
    assert json.loads(json.dumps(content, allow_nan=False)) == content


def test_the_mean_of_two_evaluations_costs_both(plan: CertifyPlan, data: Dataset, space: SearchSpace) -> None:
    pretend_trained(plan, data, top1)
    judged = write_estimates(plan, "twice", GOOD)
    path = judged.file(plan.out)
    document = json.loads(path.read_text())
    document["results"] += [{**one, "seed": 1} for one in document["results"]]
    path.write_text(json.dumps(document))
    one = certificate_of(Truth(plan, data), [judged], data, space)["estimators"]["twice"]
    assert (one["n"], one["cpu_seconds"], one["seconds"]) == (8, 4.0, 8.0)


def test_what_failed_is_left_out_and_said(plan: CertifyPlan, data: Dataset, space: SearchSpace) -> None:
    pretend_trained(plan, data, lambda row, seed: None if row == 0 or (row, seed) == (1, 1) else top1(row, seed))
    judged = [write_estimates(plan, "some", [0.9, 0.2, None, 0.4, 0.5, 0.6, 0.7, 0.8])]
    truth = Truth(plan, data)
    content = certificate_of(truth, judged, data, space)
    assert truth.whole
    assert content["estimators"]["some"]["n"] == 6  # neither the untrained first nor the third
    assert content["estimators"]["some"]["kendall_tau"] == pytest.approx(1)
    assert content["networks"][0]["trainings"][0]["reason"] == "loss is nan in epoch 1"
    assert content["networks"][1]["top1"] == pytest.approx(0.806)  # of the seed that did not fail
    assert any("3 trainings failed; no estimate by some on 1" in line for line in sentences(content))


def test_too_few_trainings_or_other_images_are_refused(plan: CertifyPlan, data: Dataset) -> None:
    with pytest.raises(DataError, match=r"0 networks of 8 are trained .* without only=estimators"):
        Truth(plan, data)
    pretend_trained(plan, data, top1)
    with pytest.raises(DataError, match="trained on other images"):
        Truth(plan, replace(data, fingerprint="another"))
    network = plan.networks[0]
    (plan.folder(network, 0) / "summary.json").write_text((plan.folder(network, 1) / "summary.json").read_text())
    with pytest.raises(StudyError, match="of another training"):
        Truth(plan, data)


def test_half_of_the_trainings_are_enough_for_a_preliminary_one(plan: CertifyPlan, data: Dataset, space: SearchSpace
                                                               ) -> None:
    first = replace(plan, seeds=1)
    pretend_trained(first, data, top1)
    truth = Truth(plan, data)
    content = certificate_of(truth, [write_estimates(plan, "good", GOOD)], data, space)
    assert not truth.whole
    assert content["ceiling"] is None
    assert content["truth"]["std_seeds"] is None
    assert any("that takes seeds=2" in line for line in sentences(content))


def test_the_favoured_is_the_best_that_keeps_the_time(content: dict[str, Any]) -> None:
    certificate = Certificate(Path("c.json"), content)
    assert favoured(certificate, 600 + 200 * 2, 200) == "good"
    assert favoured(certificate, 600 + 200 * 2 - 1, 200) == "bad"
    assert favoured(certificate, 99, 200) is None
    worse = copy.deepcopy(content)
    for one in worse["estimators"].values():
        one["low"] = -0.1
    assert favoured(Certificate(Path(), worse), 1e9, 200) is None


def test_the_words_name_who_is_favoured_and_whose_interval_overlaps(content: dict[str, Any]) -> None:
    said = " ".join(sentences(content))
    assert "no estimator can" not in said  # two trainings' mean, the truth, may be ranked better than by one
    assert "8 networks, spread over MACs, trained in full 16 times (3 epochs, 40 s of a core each)" in said
    assert "bad is favoured" in said  # 10 % of 40 s are 4 s a network, and good takes 5
    assert "Without that limit good ranks best." in said
    content["truth"]["cpu_seconds"] = 60.0
    assert "good is favoured: tau 0.93" in " ".join(sentences(content))
    assert not any("Costs taken otherwise" in line for line in sentences(content))
    content["estimators"]["good"]["cost_source"] = "scaled by another's"
    assert "Costs taken otherwise: good: scaled by another's." in sentences(content)
    content["ceiling"]["kendall_tau"] = 0.1
    assert "by chance more than by merit" in " ".join(sentences(content))
    lines = text_table([COLUMNS, *rows(content)])
    assert [line.split()[0] for line in lines] == ["estimator", "good", "bad", "flat"]


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_kept_found_by_data_and_space_and_not_replaced_by_less(content: dict[str, Any], data: Dataset,
                                                               space: SearchSpace, own_home: Path) -> None:
    assert find_certificate(data, space) is None
    place, put = keep(content, json.dumps(content))
    assert put
    assert place.parent == own_home / "certificates"
    found = find_certificate(data, space)
    assert found is not None
    assert dict(found.content) == json.loads(json.dumps(content))
    assert find_certificate(replace(data, image_size=16), space) is None
    assert find_certificate(replace(data, class_names=data.class_names[:-1]), space) is None
    assert find_certificate(replace(data, fingerprint="another split"), space) is not None
    less = copy.deepcopy(content)
    less["truth"]["trainings"] = 3
    assert keep(less, json.dumps(less)) == (place, False)
    assert read_certificate(place).trainings == 16


def test_one_of_an_earlier_space_of_the_same_name_gives_way_and_is_not_found(
        content: dict[str, Any], data: Dataset, space: SearchSpace, own_home: Path) -> None:
    keep(content, json.dumps(content))
    content["space"]["fingerprint"] = "changed"
    content["truth"]["trainings"] = 3
    place, put = keep(content, json.dumps(content))
    assert put
    assert read_certificate(place).content["space"]["fingerprint"] == "changed"
    assert find_certificate(data, space) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "hwnas-certificate/2"}', '{"format": "hwnas-certificate/1"}'])
def test_a_torn_or_foreign_certificate_is_named_and_ends_no_search(text: str, data: Dataset, space: SearchSpace,
                                                                   own_home: Path) -> None:
    path = own_home / "certificates" / "a.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(StudyError, match=str(path)):
        find_certificate(data, space)
    line, = certificate_facts(look_up(data, space), data, space, "proxy", {}, "f")["lines"]
    assert line.startswith("No certificate could be looked up")
    assert str(path) in line


def page_of(facts: dict[str, Any]) -> str:
    page = report_html(ReportData(PlotInfo("t", "h", "d", "day"), [], [], [], {"certificate": facts}))
    checker = Balance()
    checker.feed(page)
    assert (checker.wrong, checker.open) == ([], [])
    return page[page.index("<h2>Certificate"):page.index("<h2>Environment") if "<h2>Environment" in page else None]


def test_the_report_without_a_certificate_says_how_to_make_one(data: Dataset, space: SearchSpace, own_home: Path
                                                               ) -> None:
    page = page_of(certificate_facts(look_up(data, space), data, space, "tabular", {}, "f"))
    assert "No certificate for digits at 8 px and space tiny" in page
    assert f"hwnas certify dataset=digits dataset.image_size=8 space={space.source} n=16 seeds=2" in page
    shipped = SearchSpace.load("mnasnet_small", channels=1, classes=10, image_size=8)
    facts = certificate_facts(look_up(data, shipped), data, shipped, "tabular", {}, "f")
    assert "image_size=8 space=mnasnet_small n=16" in page_of(facts)


@pytest.mark.parametrize(("name", "fingerprint", "images", "options", "said"), [
    ("digits", "f", None, {"label": "good"}, "with this recipe (good): Kendall tau 0.93"),
    ("digits", "g", None, {"label": "good"}, "with another recipe of it (good)"),
    ("digits", "g", "others", {"label": "bad"}, "with other images of this data set (bad)"),
    ("digits", "g", "others", {"label": "good", "threads": 2}, "with other images of this data set (good)"),
    ("digits", "g", "others", {"label": "good", "seeds": 3}, "with another recipe of it (good)"),
    ("imagefolder", "g", "others", {"label": "good"}, "with other images of the same classes, those in parts (good)")])
def test_the_report_says_what_the_certificate_is_worth_here(
        name: str, fingerprint: str, images: str | None, options: dict[str, Any], said: str, content: dict[str, Any],
        data: Dataset, space: SearchSpace, own_home: Path) -> None:
    data = replace(data, name=name)
    content["dataset"] |= {"key": key_of(data), "folder": "parts"}
    place, _ = keep(content, json.dumps(content))
    data = replace(data, fingerprint=images or data.fingerprint)
    facts = certificate_facts(look_up(data, space), data, space, "proxy", options, fingerprint)
    page = page_of(json.loads(json.dumps(facts)))
    assert said in page
    assert place.name in page
    assert page.count("<tr") == 1 + len(rows(content))
    assert "does not judge" in page_of(certificate_facts(look_up(data, space), data, space, "tabular", {}, "f"))


def test_a_picture_is_drawn_also_without_correlations(content: dict[str, Any]) -> None:
    assert [axes.get_title(loc="left") for axes in certificate_figure(content).axes[1:]] == ["good", "bad"]
    for one in content["estimators"].values():
        one["kendall_tau"] = None
    content["ceiling"] = None
    assert figure_bytes(certificate_figure(content), "png").startswith(b"\x89PNG")


def test_equal_data_sets_have_equal_keys(data: Dataset) -> None:
    assert key_of(data) == key_of(replace(data, fingerprint="x", flip=True))
    assert key_of(data) != key_of(replace(data, channels=3))
