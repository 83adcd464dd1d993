"""Latencies that are timed when they are asked for: by one process at a time, kept for all, never made up."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from table_fixtures import MadeUpTimer, made_up_ms, sample_networks

from hwnas.cli.progress import Console
from hwnas.errors import CandidateError, MeasurementInvalid, StudyError, TableError
from hwnas.latency import measured
from hwnas.latency.deployment import Deployment
from hwnas.latency.measured import MeasuredLatency, NotTimed, answered
from hwnas.latency.table import LatencyTable
from hwnas.latency.timing import WAVE
from hwnas.space.search_space import SearchSpace
from hwnas.target import Host, Target

SPACE = SearchSpace.load("mnasnet_small", channels=1, classes=10)
DEPLOYMENT = Deployment(Target("t", "null", "fp32"), Host.detect().name, at_hand=True)
NETWORKS = sample_networks(SPACE, 5, 0)
QUIET = Console(quiet=True)


def latency_in(folder: Path, deployment: Deployment = DEPLOYMENT) -> MeasuredLatency:
    return MeasuredLatency(deployment, SPACE, folder / "latencies.json", contextlib.nullcontext)  # type: ignore[arg-type]


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> MadeUpTimer:
    timer = MadeUpTimer()
    monkeypatch.setattr(measured, "time_networks", timer)
    return timer


def test_a_network_is_timed_once_when_it_is_first_asked_for_and_kept_for_all(timer, tmp_path):
    one, other = latency_in(tmp_path), latency_in(tmp_path)
    with pytest.raises(NotTimed) as untimed:
        one.predict_architectures([*NETWORKS[:3], NETWORKS[0]])
    assert untimed.value.networks == NETWORKS[:3]
    told = answered(lambda: one.predict_architectures(NETWORKS[:3]), QUIET)
    assert told.mean == pytest.approx([made_up_ms(network) for network in NETWORKS[:3]], rel=0.02)
    assert (told.low < told.mean).all()
    assert (told.mean < told.high).all()
    codes = SPACE.sample(np.random.default_rng(0), 10)[:4]  # those of NETWORKS
    again = answered(lambda: other.predict(codes), QUIET)
    np.testing.assert_array_equal(again.mean[:3], told.mean)
    assert timer.asked == [network.id for network in NETWORKS[:4]]
    np.testing.assert_array_equal(one.predict(codes).mean, again.mean)


def test_what_cannot_be_timed_is_infinite_says_why_and_is_not_tried_for_ever(tmp_path, monkeypatch):
    tries = []

    def fail(networks: Any, *_: object, failed: dict[str, str], **__: object) -> dict[str, Any]:
        tries.append(len(networks))
        if len(networks) == 1:
            raise CandidateError("the runtime ended")
        failed[networks[0].id] = "no such operator"
        return {networks[1].id: replace(MadeUpTimer().measurement(networks[1], 0), turns=())}

    monkeypatch.setattr(measured, "time_networks", fail)
    latency = latency_in(tmp_path)
    assert np.isinf(answered(lambda: latency.predict_architectures(NETWORKS[:2]), QUIET).mean).all()
    assert tries == [2, 1], "an INVALID one is timed once more"
    assert latency_in(tmp_path).table.failed == {NETWORKS[0].id: "no such operator",
                                                 NETWORKS[1].id: "the runtime ended"}


def test_a_network_that_ends_its_process_costs_itself_alone(timer, tmp_path, monkeypatch):
    def time_all(networks: Any, *rest: Any, **options: Any) -> Any:
        if NETWORKS[1] in networks:
            raise MeasurementInvalid("a process was ended")
        return timer(networks, *rest, **options)

    monkeypatch.setattr(measured, "time_networks", time_all)
    latency = latency_in(tmp_path)
    told = answered(lambda: latency.predict_architectures(NETWORKS[:4]), QUIET)
    assert np.isinf(told.mean).tolist() == [False, True, False, False]
    latency.forget_invalid()  # the next command tries it again, alone
    with pytest.raises(NotTimed):
        latency.predict_architectures(NETWORKS[1:2])
    assert np.isinf(answered(lambda: latency.predict_architectures(NETWORKS[1:2]), QUIET).mean).all()


def test_where_every_process_is_ended_it_is_not_the_networks(tmp_path, monkeypatch):
    def end(networks: Any, *_: object, **__: object) -> Any:
        raise MeasurementInvalid("a process was ended")

    monkeypatch.setattr(measured, "time_networks", end)
    latency = latency_in(tmp_path)
    with pytest.raises(MeasurementInvalid, match="was ended"):
        answered(lambda: latency.predict_architectures(NETWORKS[:4]), QUIET)
    assert not latency.table.failed


def test_networks_whose_timing_was_invalid_may_be_timed_again(timer, tmp_path, monkeypatch):
    latency = latency_in(tmp_path)
    monkeypatch.setattr(measured, "time_networks", lambda networks, *_, failed, **__: {
        network.id: replace(MadeUpTimer().measurement(network, 0), turns=()) for network in networks})
    assert np.isinf(answered(lambda: latency.predict_architectures(NETWORKS[:1]), QUIET).mean).all()
    assert latency_in(tmp_path).table.failed[NETWORKS[0].id].startswith("INVALID: ")
    monkeypatch.setattr(measured, "time_networks", timer)
    again = latency_in(tmp_path)
    again.forget_invalid()
    assert np.isfinite(answered(lambda: again.predict_architectures(NETWORKS[:1]), QUIET).mean).all()


def test_a_process_that_is_elsewhere_waits_for_one_at_the_machine(timer, tmp_path, monkeypatch):
    far = replace(DEPLOYMENT, at_hand=False)
    with pytest.raises(StudyError, match="has timed the networks of this race yet"):
        latency_in(tmp_path, far)
    near = latency_in(tmp_path)
    answered(lambda: near.predict_architectures(NETWORKS[:1]), QUIET)
    other = latency_in(tmp_path, far)
    monkeypatch.setattr(measured.time, "sleep", lambda seconds: near.time(NETWORKS[:2], lambda share, note="": None))
    told = answered(lambda: other.predict_architectures(NETWORKS[:2]), QUIET)
    assert told.mean == pytest.approx([made_up_ms(network) for network in NETWORKS[:2]], rel=0.02)


def test_a_process_that_is_ended_says_nothing_of_the_networks_and_earlier_waves_are_kept(tmp_path, monkeypatch):
    def end(networks: Any, *given: object, **options: Any) -> dict[str, Any]:
        if networks[0] in many[WAVE:]:
            raise MeasurementInvalid("a process was ended")
        return MadeUpTimer()(networks, *given, **options)

    many, latency = sample_networks(SPACE, WAVE + 2, 0), latency_in(tmp_path)
    monkeypatch.setattr(measured, "time_networks", end)
    with pytest.raises(MeasurementInvalid):
        answered(lambda: latency.predict_architectures(many), QUIET)
    monkeypatch.setattr(measured, "time_networks", timer := MadeUpTimer())
    again = latency_in(tmp_path)
    assert np.isfinite(answered(lambda: again.predict_architectures(many), QUIET).mean).all()
    assert timer.asked == [network.id for network in many[WAVE:]]


@pytest.mark.parametrize("changed", [
    Deployment(Target("t", "null", "fp32", threads=2), DEPLOYMENT.host_name, at_hand=True),
    replace(DEPLOYMENT, host_name="another", at_hand=False), None])
def test_times_of_another_version_or_deployment_are_no_times(changed, timer, tmp_path):
    answered(lambda: latency_in(tmp_path).predict_architectures(NETWORKS[:1]), QUIET)
    if changed is None:
        table = LatencyTable.load(path := tmp_path / "latencies.json")
        table.runtime_version = "null 0"
        table.save(path)
    with pytest.raises(TableError, match=r"measured for .*begin a new search"):
        latency_in(tmp_path, changed or DEPLOYMENT)
