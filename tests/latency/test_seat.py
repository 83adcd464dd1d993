"""The seat of a measurement: it takes the quietest core, and leaves one that others come to and stay on."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from hwnas.latency import seat as seats
from hwnas.latency.seat import LOOK_EVERY_S, PATIENCE, Seat, seated


class Machine:
    """Two cores, how busy others keep each, and a clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shares: dict[int, float]) -> None:
        self.shares, self.now, self.busy, self.ran = shares, 100.0, {0: 0.0, 1: 0.0}, 0.0
        self.pinned: list[set[int]] = []
        monkeypatch.setattr(seats, "time", SimpleNamespace(monotonic=lambda: self.now, process_time=lambda: self.ran))
        monkeypatch.setattr(seats, "allowed_cores", lambda: [0, 1])
        monkeypatch.setattr(seats, "busy_shares", lambda cores: dict(self.shares))
        monkeypatch.setattr(seats, "busy_seconds", lambda cores: dict(self.busy) if self.shares else {})
        monkeypatch.setattr(seats, "_tasks", lambda: [0])
        monkeypatch.setattr(os, "sched_setaffinity", lambda task, cores: self.pinned.append(set(cores)))

    def pass_time(self, seat: Seat, seconds: float) -> None:
        """The measurement takes what others leave of its core."""
        self.now += seconds
        for core, share in self.shares.items():
            mine = core in seat.cores
            self.busy[core] += seconds if mine else share * seconds
            self.ran += seconds * (1 - share) if mine else 0.0


@pytest.mark.parametrize(("shares", "core"), [({0: 0.0, 1: 0.9}, 0), ({0: 0.9, 1: 0.0}, 1), ({0: 0.0, 1: 0.0}, 1),
                                              ({}, 1)])
def test_the_quietest_core_is_taken_and_the_last_of_equals(shares, core, monkeypatch):
    Machine(monkeypatch, shares)
    assert Seat(1).cores == [core]


def test_a_core_that_another_process_comes_to_is_left_once_it_stays(monkeypatch):
    machine = Machine(monkeypatch, {0: 0.0, 1: 0.0})
    seat = Seat(1)
    machine.shares = {0: 0.0, 1: 0.5}
    moved = []
    for _ in range(PATIENCE + 1):
        machine.pass_time(seat, 1.1 * LOOK_EVERY_S)
        moved.append(seat.look())
    assert moved == [False] * (PATIENCE - 1) + [True, False]
    assert seat.cores == [0]
    assert machine.pinned[-1] == {0}


@pytest.mark.parametrize("shares", [{0: 0.5, 1: 0.5}, {0: 0.0, 1: 0.05}, {}])
def test_it_stays_if_others_are_everywhere_or_hardly_there_or_not_known(shares, monkeypatch):
    machine = Machine(monkeypatch, {0: 0.0, 1: 0.0} if shares else {})
    seat = Seat(1)
    machine.shares = shares
    for _ in range(5):
        machine.pass_time(seat, 1.1 * LOOK_EVERY_S)
        assert not seat.look()


def test_a_core_that_is_taken_away_ends_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, {0: 0.0, 1: 0.0})

    def gone(task: int, cores: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", gone)
    with seated(1) as seat:
        assert seat.cores == [1]
