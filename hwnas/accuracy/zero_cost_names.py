"""Names of zero-cost scores, for those who choose among them without computing any: it imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hwnas.errors import DataError

SCORES = ("synflow", "naswot", "grad_norm", "zico")
CONTROLS = ("params", "macs")  # known without building a network; a useful score must beat them
ENSEMBLE = "ensemble"  # all scores together
CHOICES = (*SCORES, *CONTROLS, ENSEMBLE)


def label(score: str) -> str:
    """The name under which a certificate holds a score."""
    return f"zero_cost:{score}"


def judged(certificate: Mapping[str, Any]) -> list[str]:
    """Scores of SCORES and ENSEMBLE whose tau a certificate holds, if it holds the taus of both controls as well."""
    if any(_tau(certificate, control) is None for control in CONTROLS):
        return []
    return [score for score in CHOICES if score not in CONTROLS and _tau(certificate, score) is not None]


def worthwhile(certificate: Mapping[str, Any]) -> list[str]:
    """Scores of SCORES and ENSEMBLE that rank above chance and better than both controls, the best first.

    `certificate` has `{"estimators": {"zero_cost:naswot": {"kendall_tau": x, "low": …, "high": …}, …}}`; other keys and
    estimators are ignored. A score counts when its tau is above both controls' taus, and the lower end of its interval
    is above 0. A score without a tau does not count (null: it gave all networks the same value). DataError when a
    control's tau is missing, or a value is no number.
    """
    taus = {score: _tau(certificate, score) for score in CHOICES}
    controls = [taus[control] for control in CONTROLS]
    missing = [label(name) for name, control in zip(CONTROLS, controls, strict=True) if control is None]
    if missing:
        raise DataError(f"certificate without {' and '.join(missing)}, which scores are held against. Certify "
                        "them too: python -m hwnas.certify.")
    bar = max(tau for tau, _ in filter(None, controls))
    good = {score: tau[0] for score, tau in taus.items()
            if score not in CONTROLS and tau is not None and tau[0] > bar and tau[1] > 0}
    return sorted(good, key=lambda score: -good[score])


def _tau(certificate: Mapping[str, Any], score: str) -> tuple[float, float] | None:
    """Kendall's tau and the lower end of its interval; None when the certificate does not hold them."""
    entry = certificate.get("estimators", {}).get(label(score), {})
    values: list[Any] = [entry.get("kendall_tau"), entry.get("low")]
    if values[0] is None:
        return None
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise DataError(f"certificate, {label(score)}: kendall_tau and low must be numbers, got {values}. Certify "
                        "again.")
    return float(values[0]), float(values[1])
