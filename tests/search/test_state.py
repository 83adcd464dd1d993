"""The state of the machine in which a cap is kept."""

from __future__ import annotations

import pytest

from hwnas.cli.command import compose
from hwnas.cli.progress import Console
from hwnas.latency.session import Session
from hwnas.search.plan import Plan, make_plan
from hwnas.search.prepare import _identity_unmeasured, _with_slack

NOW = "2026-11-25T00:00:00+00:00"


def plan_of(state: str) -> Plan:
    overrides = ["target=ort_fp32", "dataset=digits", "budget.latency_ms=1", "budget.p99_ms=2", f"budget.state={state}"]
    return make_plan(compose("search", overrides), Console(quiet=True))


@pytest.mark.parametrize(("state", "factor", "kept"), [
    ("now", 0.8, (1.0, 2.0)), ("worst", 0.8, (0.8, 1.6)), ("worst", 1.25, (1.0, 2.0))])
def test_caps_hold_in_the_slower_of_two_sessions(state: str, factor: float, kept: tuple[float, float]) -> None:
    console = Console(quiet=True)
    asked = plan_of(state)
    plan = _with_slack(asked, Session(factor, 0.01, 7, "table", NOW), console)
    budget = plan.options.budget
    assert (budget.latency_ms, budget.p99_ms) == pytest.approx(kept)
    assert any("budget.latency_ms=1 asks for 0.8 ms now" in line for line in console.remarks) == (kept[0] < 1)


def test_a_study_knows_the_cap_that_was_asked_for() -> None:
    class Images:
        name, fingerprint = "digits", "0"

    asked = plan_of("worst")
    plan = _with_slack(asked, Session(0.8, 0.01, 7, "table", NOW), Console(quiet=True))
    assert _identity_unmeasured(plan, Images()) == _identity_unmeasured(asked, Images())
