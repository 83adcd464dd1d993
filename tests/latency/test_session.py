"""The session of a machine beside its latency table: what the panel tells, and what is done where it tells nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from table_fixtures import _table

from hwnas.cli.progress import Console
from hwnas.errors import CandidateError, MeasurementInvalid, StudyError, TableError
from hwnas.latency import session
from hwnas.latency.deployment import Deployment
from hwnas.latency.measurement import Measurement, Turn
from hwnas.latency.model import LatencyModel
from hwnas.latency.session import (
    BETWEEN_SESSIONS,
    NETWORKS_APART,
    PANEL,
    Session,
    choose_panel,
    estimate_session,
    measure_session,
)
from hwnas.latency.table import LatencyTable
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.target import Host, Target

TARGET = Target("xeon_int8", "openvino", "int8")
YESTERDAY = (datetime.now(UTC) - timedelta(days=1)).isoformat(timespec="seconds")


@pytest.fixture
def table() -> LatencyTable:
    return replace(_table("xeon_int8", 24, "mnasnet_small", 10), created=YESTERDAY)


def again(table: LatencyTable, *factors: float) -> dict[str, Measurement]:
    """The first networks of the table, timed in a session in which they take `factors` times as long; the reference as
    long as the median of them."""
    timed = {}
    middle = float(np.median(factors))
    for network, factor in zip(table.networks, factors, strict=False):
        held = network.measurement
        turns = tuple(Turn(tuple(factor * ms for ms in turn.samples_ms), (middle * turn.probe_us[0],))
                      for turn in held.turns)
        timed[network.architecture.id] = Measurement(turns, middle * held.quiet_ms, held.protocol)
    return timed


def at_first(table: LatencyTable) -> Any:
    """A model that predicts the networks of the table as they were measured."""
    held = {network.architecture.id: network.measurement.latency_ms for network in table.networks}

    def predict(some: Sequence[Architecture]) -> SimpleNamespace:
        return SimpleNamespace(mean=np.array([held[each.id] for each in some]))

    return SimpleNamespace(space=SimpleNamespace(name="mnasnet_small"), predict_architectures=predict)


def test_what_the_panel_has_in_common_is_the_sessions_factor(table):
    found = estimate_session(table, at_first(table), again(table, 0.89, 0.90, 0.88, 0.89, 0.89, 0.91, 0.89))
    assert found.factor == pytest.approx(0.89, abs=0.002)
    assert NETWORKS_APART < found.log_std < 0.025
    assert "11.0% faster than the latency table's" in found.told
    assert "by 7 of its networks" in found.told
    found = estimate_session(table, at_first(table), again(table, 1.0, 1.0))
    assert found.factor == 1.0
    assert found.log_std > BETWEEN_SESSIONS
    assert "not known (2 of 2 networks were timed" in found.told
    with pytest.raises(TableError, match="does not fit this machine any more"):
        estimate_session(table, at_first(table), again(table, 0.5, 0.8, 1.1, 1.6, 2.2, 0.6, 1.9))


def test_a_reference_that_landed_badly_in_one_wave_of_the_calibration_is_no_session(table: LatencyTable) -> None:
    """The second half was timed beside a reference that took 9 % longer; its networks did not."""
    half = len(table.networks) // 2
    networks = [network if at < half else replace(network, measurement=Measurement(
        tuple(replace(turn, probe_us=(1.09 * turn.probe_us[0],)) for turn in network.measurement.turns),
        1.09 * network.measurement.quiet_ms, network.measurement.protocol))
        for at, network in enumerate(table.networks)]
    table = replace(table, networks=networks)
    space = SearchSpace.load("mnasnet_small", channels=1, classes=10, image_size=24)
    panel = {network.architecture.id: network.measurement for network in networks[half - 2 : half + 5]}
    model = LatencyModel.fit(replace(table, learnt={}), space)
    logs = np.log([measurement.latency_ms for measurement in panel.values()]) - np.log(model.predict_architectures([
        network.architecture for network in networks[half - 2 : half + 5]]).mean)
    # As a part of the calibration alone the wave's level is the model's to place: 9 % apart it would be without.
    assert np.ptp(logs) < 0.05
    assert abs(np.log(estimate_session(table, model, panel).factor)) < 0.06


def test_predictions_and_their_intervals_are_of_the_session(table: LatencyTable) -> None:
    space = SearchSpace.load("mnasnet_small", channels=1, classes=10, image_size=24)
    model = LatencyModel.fit(table, space)
    codes = space.sample(np.random.default_rng(0), 5)
    before, now = model.predict(codes), model.in_session(1.2, 0.05).predict(codes)
    np.testing.assert_allclose(now.mean, 1.2 * before.mean)
    assert np.all(now.high / now.mean > before.high / before.mean)
    assert np.all(now.low / now.mean < before.low / before.mean)
    architectures = [space.decode(space.to_params(code)) for code in codes]
    np.testing.assert_allclose(model.in_session(1.2, 0.05).predict_architectures(architectures).mean, now.mean,
                               rtol=1e-6)


def test_the_panel_is_timed_unless_the_table_is_of_this_session(table, monkeypatch):
    asked: list[int] = []

    def time_networks(networks: list[object], *given: object, **options: object) -> dict[str, Measurement]:
        asked.append(len(networks))
        return again(table, *[1.1] * PANEL)

    monkeypatch.setattr(session, "time_networks", time_networks)
    here = Deployment(TARGET, Host.detect().name, True)
    slower = measure_session(here, table, at_first(table), Console(quiet=True))
    assert slower.factor == pytest.approx(1.1)
    assert asked == [PANEL]
    fresh = replace(table, created=datetime.now(UTC).isoformat(timespec="seconds"))
    found = measure_session(here, fresh, at_first(table), Console(quiet=True))
    assert (found.factor, found.log_std, found.told) == (1.0, 0.0, "the latency table is of this session")
    assert slower.log_std > NETWORKS_APART
    away = measure_session(replace(here, host_name="other", at_hand=False), table, at_first(table),
                           Console(quiet=True))
    assert away.factor == 1.0
    assert away.log_std > BETWEEN_SESSIONS
    assert asked == [PANEL]


@pytest.mark.parametrize("error", [CandidateError("none can be exported"), MeasurementInvalid("busy")])
def test_a_panel_that_cannot_be_timed_leaves_wide_intervals(table, monkeypatch, error):
    def time_networks(*given: object, **options: object) -> dict[str, Measurement]:
        raise error

    monkeypatch.setattr(session, "time_networks", time_networks)
    found = measure_session(Deployment(TARGET, Host.detect().name, True), table, at_first(table),
                            Console(quiet=True))
    assert found.factor == 1.0
    assert found.log_std > BETWEEN_SESSIONS
    assert str(error) in found.told


def test_a_stored_session_is_of_its_table_alone(table: LatencyTable, tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    assert Session.find(path, table) is None
    found = estimate_session(table, at_first(table), again(table, *[1.05] * 5))
    found.save(path)
    assert Session.find(path, table) == found
    assert Session.find(path, replace(table, created="2020-01-01")) is None
    text = path.read_text()
    earlier = {"format": "hwnas-session/1", "factor": 1.05, "standard_error": 0.01, "n": 5, "table": found.table,
               "why": ""}
    for wrong in (text.replace('"factor": 1.0', '"factor": -1.0'), json.dumps(earlier)):
        path.write_text(wrong)
        with pytest.raises(StudyError, match=r"session\.json"):
            Session.find(path, table)


def test_the_panel_is_spread_over_the_latencies(table: LatencyTable) -> None:
    panel = choose_panel(table, "mnasnet_small")
    by_latency = sorted(table.networks, key=lambda network: network.measurement.latency_ms)
    order = [network.architecture.id for network in by_latency]
    places = [order.index(network.id) for network in panel]
    assert len(panel) == PANEL
    assert places == sorted(places)
    assert max(np.diff([-1, *places, len(order)])) <= 4
