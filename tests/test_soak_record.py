"""Which soak tests a change touches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from soak_record import area_of, read_touched, touched_by


@pytest.mark.parametrize(("paths", "areas"), [
    (["docs/guides/train.md", "README.md", "tests/soak.json"], set()),
    (["experiments/race/minutes.py"], {"experiments"}),
    (["hwnas/latency/table.py"], {"latency", "search", "experiments", "api", "wheel"}),
    (["tests/training/test_train.py"], {"training", "search", "experiments", "api", "wheel"}),
    (["tests/test_wheel.py", "hwnas/verify.py"], None),
    (["constraints.txt"], None)])
def test_a_change_touches_its_own_area_and_whole_commands(paths: list[str], areas: set[str] | None) -> None:
    assert touched_by(paths) == areas


def test_what_is_not_known_touches_all(tmp_path: Path) -> None:
    record = tmp_path / "soak.json"
    assert read_touched(record) is None
    record.write_text(json.dumps({"commit": "0" * 40}))
    assert read_touched(record) is None


def test_an_area_is_the_package_or_the_command() -> None:
    here = Path(__file__).parent
    assert area_of(here / "latency" / "test_table.py") == "latency"
    assert area_of(here / "test_api.py") == "api"
