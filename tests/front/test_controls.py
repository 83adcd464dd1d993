"""Controls: random networks of the space, as fast as the finalists."""

from __future__ import annotations

import numpy as np
import pytest
from front_fixtures import make_row
from tiny_fixtures import write_space

from hwnas.front.finalists import WITHIN, draw_controls, known_controls
from hwnas.front.rows import FrontRow, front_csv, load_front
from hwnas.latency.model import Predictions
from hwnas.space.search_space import SearchSpace
from hwnas.system.run_folder import RunFolder


def predict(codes: np.ndarray) -> Predictions:
    """A machine whose latency is the sum of the codes."""
    mean = 0.01 * (1.0 + np.asarray(codes).sum(1))
    return Predictions(mean, 0.9 * mean, 1.1 * mean)


def finalists(space: SearchSpace, *quantiles: float) -> list[FrontRow]:
    ms = np.quantile(predict(space.sample(np.random.default_rng(7), 2000)).mean, quantiles)
    return [make_row(f"f{at}", latency_ms_predicted=float(value)) for at, value in enumerate(ms)]


def test_each_is_as_fast_as_the_finalist_that_it_was_drawn_for_as_the_seed_says(space):
    rows = finalists(space, 0.1, 0.5, 0.9)
    controls = draw_controls(rows, space, predict, 5, 0, pytest.fail)
    by_id = {row.id: row for row in rows}
    assert len({row.id for row in controls}) == 5
    assert {row.control_of for row in controls} == set(by_id)
    for row in controls:
        assert row.is_control
        assert not row.is_finalist
        assert row.latency_ms_predicted == pytest.approx(by_id[row.control_of].latency_ms_predicted, rel=WITHIN)
        assert row.id == row.network.id
    rows = finalists(space, 0.3, 0.6)
    drawn = [[row.id for row in draw_controls(rows, space, predict, 2, seed, pytest.fail)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])
    rows = finalists(space, 0.1, 0.4, 0.6, 0.9)
    assert [row.control_of for row in draw_controls(rows, space, predict, 1, 0, pytest.fail)] == ["f3"]
    assert {row.control_of for row in draw_controls(rows, space, predict, 2, 0, pytest.fail)} == {"f0", "f3"}
    assert draw_controls(rows, space, predict, 0, 0, pytest.fail) == []


def test_a_latency_that_the_space_does_not_have_is_told(space: SearchSpace) -> None:
    said: list[str] = []
    rows = [make_row("far", latency_ms_predicted=100.0), *finalists(space, 0.5)]
    controls = draw_controls(rows, space, predict, 2, 0, said.append)
    assert [row.control_of for row in controls] == ["f0"]
    assert len(said) == 1
    assert "far's 100 ms" in said[0]


def test_known_networks_of_the_space_stand_beside_the_random_ones(space, tmp_path):
    finalist, = finalists(space, 0.5)
    rows = known_controls(space, predict, [finalist], None, 0.5, pytest.fail)
    assert [row.name for row in rows] == list(space.known)
    assert [row.id for row in rows] == [network.id for network in space.known.values()]
    for row in rows:
        assert (row.is_control, row.is_known, row.is_finalist) == (True, True, False)
        assert row.latency_ms_predicted == pytest.approx(row.latency_ms_predicted_high / 1.1)
        assert (row.target, row.host) == (finalist.target, finalist.host)
    control, = draw_controls([finalist], space, predict, 1, 0, pytest.fail)
    assert not control.is_known
    path = tmp_path / "front.csv"
    path.write_text(front_csv([finalist, control, *rows]))
    assert {row.name for row in load_front(RunFolder(tmp_path)) if row.is_known} == set(space.known)
    none = SearchSpace.load(write_space(tmp_path), channels=1, classes=10)
    assert none.known == {}
    assert known_controls(none, predict, finalists(space, 0.5), None, 0.5, pytest.fail) == []


def test_a_known_network_that_is_a_finalist_or_over_the_cap_is_no_control(space: SearchSpace) -> None:
    said: list[str] = []
    first, second, *_ = rows = known_controls(space, predict, finalists(space, 0.5), None, 0.5, pytest.fail)
    chosen = make_row(first.id)
    assert [row.id for row in known_controls(space, predict, [chosen], None, 0.5, pytest.fail)] == [
        row.id for row in rows[1:]]
    cap_ms = min(first.latency_ms_predicted, second.latency_ms_predicted) * 1.05
    kept = known_controls(space, predict, finalists(space, 0.5), cap_ms, 0.5, said.append)
    assert all(row.latency_ms_predicted <= cap_ms for row in kept)
    assert len(kept) + len(said) == len(rows)
    assert said
    assert "is left out: its predicted" in said[0]
    assert len(known_controls(space, predict, finalists(space, 0.5), cap_ms, 0.9, said.append)) < len(kept)
