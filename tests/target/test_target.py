"""Targets: every shipped file is one, and bad values are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hwnas.cli.options import read_options
from hwnas.runtimes.runtime import load_runtime
from hwnas.system.paths import shipped
from hwnas.target import Target, TargetSet

FILES = sorted((shipped("conf") / "target").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_target(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# @package target\n")  # otherwise `+target=` puts the fields at the top level
    if path.stem == "cpu":
        options = read_options(TargetSet, yaml.safe_load(text), "target")
        assert options.name == path.stem
        assert {*options.deployments} < {each.stem for each in FILES}
        return
    target = Target.from_config(yaml.safe_load(text))
    assert target.name == path.stem
    assert target.name.endswith(target.precision)
    assert load_runtime(target.runtime)
    assert (target.threads, target.batch) == (1, 1)
