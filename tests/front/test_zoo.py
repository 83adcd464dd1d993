"""The zoo: what is slower and less accurate by its published figures is not trained, and what was measured is kept."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import pytest

from hwnas.cli.command import compose, names_in
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, FileError, StudyError
from hwnas.front import zoo
from hwnas.front.score import Timing
from hwnas.latency.timing import reference_network
from hwnas.networks.baselines import Baseline, check_names
from hwnas.networks.network import Shape, TimmNetwork
from hwnas.runtimes.onnxruntime import OnnxRuntime
from hwnas.search.plan import make_plan
from hwnas.system.run_folder import RunFolder
from hwnas.target import Target

PUBLISHED = {"quick": 60.0, "good": 75.0, "poor": 70.0}


def networks(*more: Baseline) -> list[TimmNetwork]:
    return [TimmNetwork(baseline, Shape(3, 32, 10)) for baseline in (*map(Baseline, PUBLISHED), *more)]


@pytest.fixture
def measured(monkeypatch):
    """Latencies by id, which tests may change; each measuring is counted."""
    told = {"quick": 0.1, "good": 0.2, "poor": 0.3, "poor-24px": 0.05}
    calls = []
    monkeypatch.setattr(zoo, "time_untrained", lambda few, *_: calls.append(set(few)) or dict(told))
    return SimpleNamespace(told=told, calls=calls)


def kept(folder, *more):
    run = RunFolder(folder)
    return [network.id for network in zoo.worth_training(networks(*more), PUBLISHED, run, None, None, Console())]


def test_what_is_slower_and_less_accurate_is_left_out_and_it_is_said(measured, tmp_path, capsys):
    first = kept(tmp_path)
    assert first == ["quick", "good"]
    told = capsys.readouterr().err
    assert "poor is not trained: 0.3 ms, slower than good, and less accurate on ImageNet (70 %" in told
    measured.told["good"] = 9.0
    assert kept(tmp_path) == first  # a second call reads what was measured
    assert len(measured.calls) == 1
    # Only networks of one image size are compared; where the file holds others, all are measured.
    measured.told["good"] = 0.2
    assert kept(tmp_path, Baseline("poor", image_size=24)) == ["quick", "good", "poor-24px"]
    assert measured.calls[1:] == [{"quick", "good", "poor", "poor-24px"}]


def test_what_cannot_be_measured_is_trained_and_measured_later(measured, tmp_path, monkeypatch, capsys):
    good = measured.told.pop("good")
    assert kept(tmp_path) == ["quick", "good", "poor"]
    assert "not timed before their training: good" in capsys.readouterr().err
    measured.told["good"] = good
    assert kept(tmp_path) == ["quick", "good"]
    assert len(measured.calls) == 2
    monkeypatch.setitem(PUBLISHED, "poor", 80.0)  # other published figures are heeded
    assert kept(tmp_path) == ["quick", "good", "poor"]
    assert len(measured.calls) == 2


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"format": "hwnas-zoo/1", "networks": [{"id": "quick"}]}),
                                  json.dumps({"format": "hwnas-zoo/2", "networks": []}), '{"format": "hwnas-zoo/1"}'])
def test_a_spoilt_file_is_refused_in_one_line(measured, tmp_path, text):
    (tmp_path / zoo.FILE).write_text(text)
    with pytest.raises(StudyError, match=r"zoo\.json.*(Remove it|Update)"):
        kept(tmp_path)


@pytest.mark.parametrize("content", [{}, {"networks": []}, {"networks": {"a": "75"}}, {"networks": {"a": 0.0}},
                                     {"networks": {"a": True}}, {"networks": {"a": 101}}])
def test_a_zoo_must_hold_published_figures(content):
    with pytest.raises(ConfigError, match=r"zoo\.networks must hold timm names"):
        zoo.published_of(content)


def test_the_shipped_zoo_holds_networks_of_timm():
    assert "default" in names_in("zoo")
    published = zoo.published_of(compose("search", ["+target=xeon_int8", "zoo=default"]).zoo)
    assert len(published) > 20
    assert check_names(published) == tuple(published)


def test_without_weights_the_zoo_begins_at_random_and_it_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    monkeypatch.delenv("HWNAS_WEIGHTS", raising=False)
    given = ["+target=xeon_int8", "baselines=[]", "zoo=default", f"out={tmp_path / 'run'}", "image_sizes=[24]",
             "dataset.image_size=32"]
    plan = make_plan(compose("search", given), Console())
    assert "the zoo begins with random weights: there are no pretrained" in capsys.readouterr().err
    published = zoo.published_of(plan.options.zoo)
    assert {baseline.id for baseline in plan.baselines} == {*published, *(f"{name}-24px" for name in published)}


@pytest.mark.usefixtures("any_machine")
def test_networks_of_a_real_zoo_are_timed_in_the_runtime_but_for_those_that_it_refuses(monkeypatch):
    shape, spoilt = Shape(3, 32, 10), Baseline("test_efficientnet", image_size=24)
    few = [TimmNetwork(each, shape) for each in (Baseline("test_efficientnet"), Baseline("test_resnet"), spoilt)]
    compile = OnnxRuntime.compile

    def compiled(runtime, path, target):
        if ids.get(path.stem) == spoilt.id:
            raise FileError(path, "an operator that there is not")
        return compile(runtime, path, target)

    ids = {hashlib.sha256(network.identity.encode()).hexdigest()[:8]: network.id for network in few}
    monkeypatch.setattr(OnnxRuntime, "compile", compiled)
    said: list[str] = []
    target, timing = Target("ort_fp32", "onnxruntime", "fp32"), Timing(reference_network(3, 10, 32), 5.0, 0)
    latencies = zoo.time_untrained({network.id: network for network in few}, target, timing,
                               lambda share, text="": said.append(text))
    assert {*latencies} == {"test_efficientnet", "test_resnet"}
    assert all(value > 0 for value in latencies.values())
    assert "exported 2 of 3" in said
