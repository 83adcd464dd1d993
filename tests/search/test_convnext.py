"""The whole road on ConvNeXt's block: timed, searched, trained, quantised, verified."""

from __future__ import annotations

from pathlib import Path

import pytest
from search_fixtures import rows_of

from hwnas.cli.command import run_command
from hwnas.search.__main__ import main

INPUT = ["+target=ort_int8", "space=convnext_small", "dataset=digits", "dataset.image_size=16"]
SMALL = ["n_trials=2", "workers=1", "calibration.networks=14", "calibration.minutes=4",
         "proxy.epochs=1", "proxy.min_steps=4", "proxy.train_images=256", "finalists.k=1",
         "finalists.recipe.epochs=1", "finalists.recipe.min_steps=4", "baselines=[]",
         "controls=0", "verification.seconds=5"]


@pytest.mark.soak
@pytest.mark.usefixtures("any_machine")
def test_the_whole_road_on_digits_in_int8_onnx_runtime(tmp_path: Path) -> None:
    assert run_command(main, "search", "usage", [*INPUT, *SMALL, f"out={tmp_path / 'run'}"]) == 0
    rows = rows_of(tmp_path / "run" / "front.csv")
    assert rows
    for row in rows:
        assert "cx" in row["architecture"]
        assert row["verified"] == "true", row["reason"]
        assert (row["precision"], float(row["int8_share"]), row["fallback_share"]) == ("int8", 1.0, "0")
        assert 0 < float(row["latency_ms_predicted_low"]) < float(row["latency_ms_predicted_high"])
        assert (tmp_path / "run" / "models" / row["id"] / "model_int8.onnx").stat().st_size > 0
