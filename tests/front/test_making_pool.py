"""Networks made side by side are those made one after the other, and one failure does not touch the rest."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from deployment_fixtures import tiny_baseline, tiny_making, tiny_network
from safetensors.numpy import load_file

from hwnas.errors import HwnasError
from hwnas.front import make
from hwnas.front.make import make_all
from hwnas.system.run_folder import RunFolder


def made(run, making, workers, networks):
    heard: list[float] = []
    found = {network.id: result for network, result in
             make_all(networks, run, making, workers, lambda share, note: heard.append(share))}
    assert heard[-1] == 1.0 or workers == 1
    return found


@pytest.mark.soak
def test_two_processes_make_the_weights_that_one_makes(tmp_path):
    networks = [tiny_network(8), tiny_network(16)]
    one, two = RunFolder.create(tmp_path / "one"), RunFolder.create(tmp_path / "two")
    alone, together = made(one, tiny_making(), 1, networks), made(two, tiny_making(), 2, networks)
    for network in networks:
        first, second = (load_file(folder.model(network.id).weights) for folder in (one, two))
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[name], second[name]) for name in first)
        assert alone[network.id].top1_fp32 == together[network.id].top1_fp32
        assert two.model(network.id).int8.is_file()
    heard: list[tuple[float, str]] = []
    list(make_all([*networks, tiny_network(24)], two, tiny_making(), 2, lambda *told: heard.append(told)))
    assert heard == [(1.0, "1 of 1 networks trained and exported")]  # what is done already says nothing of the rest


def test_a_process_that_is_ended_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "_start", os._exit)  # with arguments that it does not take
    with pytest.raises(HwnasError, match="a process that trains finalists was ended"):
        made(RunFolder.create(tmp_path / "run"), tiny_making(), 2, [tiny_network(8), tiny_network(16)])


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_network_that_fails_leaves_its_reason_and_the_others(tmp_path, workers):
    making = tiny_making()
    good = tiny_network(8)
    broken = replace(making, recipe=replace(making.recipe, lr=1e6, clip_norm=0.0, optimizer="sgd"))
    run = RunFolder.create(tmp_path / "run")
    outcomes = made(run, broken, workers, [good, tiny_baseline("test_efficientnet")])
    assert "loss" in outcomes["test_efficientnet"]
    assert not isinstance(made(run, making, 1, [good, tiny_network(16)])[good.id], str)
