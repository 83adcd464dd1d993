"""Accuracy estimators: the expected accuracy of a network, with the error of that figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwnas.face import face

if TYPE_CHECKING:
    from hwnas.accuracy.estimator import AccuracyEstimator as AccuracyEstimator
    from hwnas.accuracy.estimator import Estimate as Estimate
    from hwnas.accuracy.estimator import load_estimator as load_estimator

__getattr__, __dir__ = face(__name__, {
    "AccuracyEstimator": "estimator", "Estimate": "estimator",
    "load_estimator": "estimator"})
