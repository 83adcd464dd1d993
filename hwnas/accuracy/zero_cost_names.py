"""Which zero-cost scores there are, and which of them a certificate shows to be worth their time. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hwnas.errors import DataError

SCORES = ("synflow", "naswot", "grad_norm", "zico")
CONTROLS = ("params", "macs")  # known without any network: what a score must beat
ENSEMBLE = "ensemble"  # all of them together
CHOICES = (*SCORES, *CONTROLS, ENSEMBLE)


def label(score: str) -> str:
    """The name under which a certificate holds a score."""
    return f"zero_cost:{score}"


def judged(certificate: Mapping[str, Any]) -> list[str]:
    """Scores of SCORES and ENSEMBLE that a certificate holds a tau of, beside those of both controls."""
    if any(_tau(certificate, control) is None for control in CONTROLS):
        return []
    return [score for score in CHOICES if score not in CONTROLS and _tau(certificate, score) is not None]


def worthwhile(certificate: Mapping[str, Any]) -> list[str]:
    """Scores of SCORES and ENSEMBLE that rank above chance and better than both controls, the best first.

    `certificate` has `{"estimators": {"zero_cost:naswot": {"kendall_tau": x, "low": …, "high": …}, …}}`; other keys and
    estimators are left alone. A score counts when its tau is above both controls' and its interval's lower end above
    0; one without a tau (null: it told all networks the same) does not. DataError without both controls' taus, or where
    a number is none.
    """
    found = {score: _tau(certificate, score) for score in CHOICES}
    controls = [found[control] for control in CONTROLS]
    missing = [label(name) for name, control in zip(CONTROLS, controls, strict=True) if control is None]
    if missing:
        raise DataError(f"certificate without {' and '.join(missing)}, which scores are held against. Certify "
                        "them too: python -m hwnas.certify.")
    bar = max(tau for tau, _ in filter(None, controls))
    good = {score: one[0] for score, one in found.items()
            if score not in CONTROLS and one is not None and one[0] > bar and one[1] > 0}
    return sorted(good, key=lambda score: -good[score])


def _tau(certificate: Mapping[str, Any], score: str) -> tuple[float, float] | None:
    """Kendall's tau and the lower end of its interval; None where the certificate does not hold them."""
    one = certificate.get("estimators", {}).get(label(score), {})
    values: list[Any] = [one.get("kendall_tau"), one.get("low")]
    if values[0] is None:
        return None
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise DataError(f"certificate, {label(score)}: kendall_tau and low must be numbers, got {values}. Certify "
                        "again.")
    return float(values[0]), float(values[1])
