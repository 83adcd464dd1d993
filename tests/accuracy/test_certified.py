"""`accuracy=certified`: which estimator a certificate chooses, and what is said where it chooses none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwnas.accuracy.certificate import choose, find_certificate, key_of
from hwnas.data.dataset import Dataset, Split
from hwnas.errors import ConfigError, UnknownName
from hwnas.space.search_space import SearchSpace
from hwnas.system.paths import shipped


@pytest.fixture
def space() -> SearchSpace:
    return SearchSpace.load("mnasnet_small", channels=1, classes=2)


@pytest.fixture
def dataset() -> Dataset:
    none = Split(np.empty((0, 1, 8, 8), np.uint8), np.empty(0, np.int64))
    return Dataset("mine", none, none, none, ("a", "b"), 1, 32, (0.5,), (0.5,), "mine")


@pytest.fixture
def certificate(space: SearchSpace, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """proxy: tau 0.4, 5 s each; long: tau 0.6, 10 s each; anchored: tau 0.8, 1000 s and 1 s each; chance: tau 0.1."""
    def entry(accuracy: str, tau: float, low: float, seconds: float, setup: float, **options: Any) -> dict[str, Any]:
        return {**whole["estimators"]["proxy"], "accuracy": accuracy, "options": options, "kendall_tau": tau,
                "low": low, "high": tau + 0.1, "cpu_seconds": seconds, "setup_seconds": setup,
                "setup_cpu_seconds": setup}

    whole = json.loads(min(shipped("certificates").glob("fashion*.json")).read_text())
    content = {
        **whole, "dataset": {**whole["dataset"], "key": key_of(dataset)},
        "space": {"name": space.name, "fingerprint": space.fingerprint}, "created": "2026-01-01",
        "estimators": {"proxy": entry("proxy", 0.4, 0.1, 5, 0), "long": entry("proxy", 0.6, 0.3, 10, 0, epochs=6),
                       "anchored": entry("multi_fidelity", 0.8, 0.5, 1, 1000),
                       "chance": entry("multi_fidelity", 0.9, -0.1, 0, 0)}}
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    path = tmp_path / "certificates" / "mine.json"
    path.parent.mkdir()
    path.write_text(json.dumps(content))
    return path


def test_an_estimator_that_was_taken_out_is_not_chosen(certificate: Path, space: SearchSpace, dataset: Dataset) -> None:
    content = json.loads(certificate.read_text())
    content["estimators"]["zero_cost:naswot"] = {**content["estimators"]["anchored"], "accuracy": "zero_cost",
                                                 "kendall_tau": 0.95, "setup_cpu_seconds": 0}
    certificate.write_text(json.dumps(content))
    chosen = choose({"minutes": 20}, find_certificate(dataset, space), dataset, space, 24)
    assert chosen.accuracy == "multi_fidelity"


def test_certificates_tables_and_our_sampler_need_no_library_that_trains() -> None:
    code = ("import hwnas.accuracy, hwnas.accuracy.certificate, hwnas.accuracy.tabular, hwnas.samplers.known, sys\n"
            "sys.exit(bool({'torch', 'openvino', 'onnx'} & {*sys.modules}))")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("minutes", "n_trials", "accuracy", "options"), [
    (None, 24, "proxy", {}),  # anchors would not be trained in the proxy's two minutes
    (None, 400, "multi_fidelity", {}),
    (4, 24, "proxy", {"epochs": 6}),
    (20, 24, "multi_fidelity", {}),
])
def test_the_best_within_the_time_is_chosen_with_its_options(
        certificate: Path, space: SearchSpace, dataset: Dataset, minutes: float | None, n_trials: int, accuracy: str,
        options: dict[str, Any]) -> None:
    found = choose({"minutes": minutes}, find_certificate(dataset, space), dataset, space, n_trials)
    assert (found.accuracy, dict(found.options)) == (accuracy, options)
    assert "Kendall tau" in found.why


def test_what_is_not_there_is_said_not_replaced(certificate: Path, space: SearchSpace, dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"none is shown to rank above chance within 0\.017 min"):
        choose({"minutes": 0.017}, find_certificate(dataset, space), dataset, space, 24)
    with pytest.raises(UnknownName, match="minute"):
        choose({"minute": 3}, find_certificate(dataset, space), dataset, space, 24)
    with pytest.raises(ConfigError, match="minutes must be"):
        choose({"minutes": "long"}, find_certificate(dataset, space), dataset, space, 24)
    other = SearchSpace.load("fused", channels=1, classes=2)
    with pytest.raises(ConfigError, match="there is no certificate for mine at 32 px and space fused"):
        choose({"minutes": None}, find_certificate(dataset, other), dataset, other, 24)
