"""Choosing networks to validate on."""

from __future__ import annotations

import numpy as np
import pytest

from hwnas.errors import SpaceError
from hwnas.latency import draws
from hwnas.latency.draws import FRONT, RANDOM, draw_front, draw_held_out, evolve_front
from hwnas.space.search_space import SearchSpace, macs, params


class Additive:
    """Latency in ms: MACs at a price that depends on the segment, so that some segments look like bargains."""

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.price = np.random.default_rng(1).lognormal(0, 0.1, space.n_segments)

    def __call__(self, codes: np.ndarray) -> np.ndarray:
        segments = self.space.segments(codes)
        return 0.05 + (self.space.parts(codes, macs)[..., 0] * self.price[segments]).sum(axis=1) * 1e-8


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fronts are evolved for a moment only."""
    monkeypatch.setattr(draws, "POPULATION", 200)
    monkeypatch.setattr(draws, "GENERATIONS", 1)


@pytest.fixture(scope="module")
def model(space: SearchSpace) -> Additive:
    return Additive(space)


def chosen_ids(space, model, n, seed, known=()) -> list[str]:
    return [one.id for _, one in draw_held_out(space, model, n, seed, known)]


@pytest.mark.usefixtures("quick")
def test_networks_are_new_different_and_half_of_each_group(space, model):
    known = {one.id for _, one in draw_held_out(space, model, 31, 7, set())}
    again = draw_held_out(space, model, 31, 7, known)
    ids = [one.id for _, one in again]
    assert len(set(ids)) == 31
    assert not known & set(ids)
    assert [group for group, _ in again].count(FRONT) == 15
    assert [group for group, _ in again].count(RANDOM) == 16


@pytest.mark.usefixtures("quick")
def test_the_seed_decides(space, model):
    chosen = chosen_ids(space, model, 12, 7)
    assert chosen == chosen_ids(space, Additive(space), 12, 7)
    assert chosen != chosen_ids(space, model, 12, 8)


@pytest.fixture
def codes_of(space, monkeypatch):
    """The codes of networks that were decoded since."""
    decode, codes = space.decode, {}

    def record(params):
        network = decode(params)
        codes[network.id] = space.to_codes(params)
        return network

    monkeypatch.setattr(space, "decode", record)
    return lambda networks: np.array([codes[network.id] for network in networks])


def test_the_front_beats_random_networks_and_its_mutants_lie_near_it(space, model, codes_of):
    rng = np.random.default_rng(0)

    def capacity(codes):
        return space.totals(codes, macs)[:, 0]

    front = evolve_front(space, model, macs, rng)
    random = space.sample(rng, 3000)
    assert np.all(np.diff(model(front)) >= 0)
    assert np.all(np.diff(capacity(front)) >= 0)
    below = [capacity(front)[model(front) <= ms].max(initial=0) for ms in model(random[:400])]
    assert np.mean(capacity(random[:400]) <= np.array(below)) > 0.99

    def value(architectures):  # MACs bought for a predicted ms, beyond the fixed time
        codes = codes_of(architectures)
        return np.median(capacity(codes) / (model(codes) - 0.05))

    mutants = draw_front(space, model, rng, 40, ())
    drawn = [space.decode(space.to_params(row)) for row in random[:200]]
    assert value(mutants) > value(drawn)


def test_both_groups_span_the_predicted_latencies_and_count_the_networks_own_macs(space, model, codes_of):
    codes = space.sample(np.random.default_rng(5), 20)
    networks = [space.decode(space.to_params(row)) for row in codes]
    assert space.totals(codes, macs, params).tolist() == [[one.macs, one.params] for one in networks]
    every, drawn = model(space.sample(np.random.default_rng(3), 4000)), draw_held_out(space, model, 60, 1, ())
    for group in (RANDOM, FRONT):
        found = model(codes_of([one for name, one in drawn if name == group]))
        assert found.min() < np.quantile(every, 0.1)
        assert found.max() > np.quantile(every, 0.9)


def test_a_space_without_enough_networks_says_so(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text("image_size: 16\nstem: {width: 8, stride: 2}\nhead: 0\nactivation: relu\n"
                    "stages:\n  - {channels: [8, 16, 24], repeats: [1, 2], stride: 2, op: ds, kernel: [3, 5], se: 0, "
                    "skip: true}\n")
    tiny = SearchSpace.load(file, channels=1, classes=2)
    assert len(set(chosen_ids(tiny, Additive(tiny), 8, 0))) == 8
    with pytest.raises(SpaceError, match=r"only \d+ of \d+ networks.*n=NUMBER"):
        draw_held_out(tiny, Additive(tiny), 13, 0, set())
