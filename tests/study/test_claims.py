"""Claims on the lines of a race: whose they are, and when they count as given up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from optuna.trial import TrialState
from study_fixtures import TinySpace

from hwnas.study import lines
from hwnas.study.lines import Beats, Line
from hwnas.study.storage import GRACE_S


def test_a_second_claim_of_one_process_is_not_the_first_one_grown_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(lines.time, "monotonic", lambda: now[0])
    claim = {"worker": "elsewhere/1/1", "claimed": 1, "beat": 0}
    space = TinySpace()
    line = Line(0, space.decode(space.every()[0]), 1.0, "known", None, "", (), "", TrialState.RUNNING, claim)
    beats = Beats()
    assert beats.is_held(line)
    now[0] += GRACE_S / 2
    assert beats.is_held(line)
    now[0] += GRACE_S
    assert not beats.is_held(line), "it has been silent for too long"
    assert beats.is_held(replace(line, claim={**claim, "claimed": 2})), "it is at work on another leg"
    assert not beats.is_held(replace(line, claim=None))
