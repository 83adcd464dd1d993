"""What other tables tell of a machine: which are taken, what they gain, and which networks tell most beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from table_fixtures import machine_table

from hwnas.latency.draws import TimingPlan
from hwnas.latency.model import Fit, FitData, LatencyModel, most_telling
from hwnas.latency.prior import MOST_TABLES, TablesPrior, fit_of, nearest_prior, stored_prior


def timed_of(table) -> FitData:
    return FitData([one.architecture.blocks() for one in table.networks],
                   np.array([one.measurement.latency_ms for one in table.networks]), np.zeros(len(table.networks)))


def prior_of(*tables) -> TablesPrior:
    return TablesPrior({f"table {index}": fit_of(table) for index, table in enumerate(tables)})


def error_on(others, few, prior) -> float:
    return float(np.abs(Fit.of(few, prior).networks(others.blocks)[0] / others.measured_ms - 1).mean())


def test_other_tables_help_networks_not_seen_whatever_their_machines_speed(space):
    few, others = timed_of(machine_table(space, 12, seed=2)), timed_of(machine_table(space, 60, seed=3))
    prior = prior_of(machine_table(space, 60, speed=0.5), machine_table(space, 60, speed=20.0, depthwise=6e-8))
    assert error_on(others, few, prior) < 0.5 * error_on(others, few, None)


def test_the_most_telling_networks_are_new_and_tell_more_than_most_draws(space):
    machine = timed_of(machine_table(space, 80, seed=2, depthwise=8e-8))
    others = timed_of(machine_table(space, 60, seed=3, depthwise=8e-8))
    prior = prior_of(machine_table(space, 60, speed=0.5))
    rng = np.random.default_rng(0)
    drawn = [error_on(others, machine[rng.permutation(80)[:10]], prior) for _ in range(9)]
    telling = most_telling(machine.blocks, prior, 10)
    assert len(set(telling)) == 10
    assert not {0, 1, 2} & {*most_telling(machine.blocks, prior, 10, known=3)}
    assert error_on(others, machine[np.array(telling)], prior) < np.median(drawn)
    assert sorted(most_telling(machine.blocks[:4], prior, 10)) == [0, 1, 2, 3]


@pytest.fixture
def shelf(space, tmp_path, monkeypatch):
    folder = tmp_path / "latency_tables"
    monkeypatch.setattr("hwnas.latency.table.table_dirs", lambda: [folder, tmp_path / "shipped"])
    table = machine_table(space, 14)

    def put(host: str, name: str) -> Path:
        path = folder / host / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table.save(path)
        return path

    return put, table.key


def names_of(prior) -> list[str]:
    return [name.partition(" of ")[0] for name in prior.names]


def test_the_nearest_tables_are_taken_together_and_broken_ones_are_noted(space, shelf):
    put, key = shelf
    put("there", "openvino-fp32-t1-b1-32px-c1-k10.json")
    put("here", "null-bf16-t1-b1-32px-c1-k10.partial.json")
    put("there", "notes.json")
    put("here", f"{key}.json")
    put("there", "null-int8-t1-b1-32px-c1-k10.json.gz")
    assert nearest_prior("here", key, space) == (None, [])
    put("there", f"{key}.json")
    put("here", "null-fp32-t1-b1-128px-c3-k10.json")
    put("here", "null-fp32-t1-b1-64px-c3-k10.json").write_text("{")
    prior, notes = nearest_prior("here", key, space)
    assert names_of(prior) == ["here/null-fp32-t1-b1-128px-c3-k10", f"there/{key}"]
    assert len(notes) == 1
    assert "64px" in notes[0]
    assert "\n" not in notes[0]
    assert np.all(prior.block_ms(space.reference.blocks()) > 0)
    for index in range(MOST_TABLES):
        put(f"host{index}", f"{key}.json")
    assert len(nearest_prior("here", key, space)[0].names) == MOST_TABLES


def test_a_fit_that_started_from_other_tables_needs_them_again(space, shelf):
    put, key = shelf
    source = put("there", f"{key}.json")
    put("yonder", f"{key}.json")
    table = machine_table(space, 14, seed=2)
    table.host["name"] = "here"
    prior, _ = nearest_prior("here", key, space)
    model = LatencyModel.fit(table, space, prior=prior)
    assert model.learnt.priors == prior.names
    assert len(prior.names) == 2
    table.learnt = {space.name: model.learnt.to_dict()}
    prior, notes = stored_prior(table, space)
    again = LatencyModel.fit(table, space, prior=prior)
    networks = [one.architecture for one in table.networks]
    np.testing.assert_allclose(again.predict_architectures(networks).mean, model.predict_architectures(networks).mean)
    assert notes == []
    source.unlink()
    rest, notes = stored_prior(table, space)
    assert "not at hand" in notes[-1]
    assert rest.names == model.learnt.priors[1:]


def test_a_first_wave_beside_a_prior_tells_most_and_known_networks_are_not_forgotten(space):
    prior = prior_of(machine_table(space, 60, speed=0.5))
    plan = TimingPlan(space, 1, set(), prior)
    first, second = plan.wave(6, None), plan.wave(24, None)
    assert [origin for origin, _ in first].count("telling") == 3
    known = {network.id for network in space.known.values()}
    assert known <= {network.id for _, network in [*first, *second]}
    ids = [network.id for _, network in [*first, *second]]
    assert len(ids) == len(set(ids)) == 30
    assert "telling" not in {origin for origin, _ in second}
    assert [network.id for _, network in TimingPlan(space, 1, set(), prior).wave(6, None)] == ids[:6]
