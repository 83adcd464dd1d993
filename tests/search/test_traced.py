"""The whole road around a network that arch-def words cannot say: traced, searched, verified, and read again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from safetensors.torch import save_file
from search_fixtures import rows_of
from table_fixtures import write_table

from hwnas.cli.command import compose, run_command
from hwnas.cli.progress import Console
from hwnas.front import make
from hwnas.networks.around import space_content
from hwnas.networks.baselines import Baseline
from hwnas.networks.network import FoundNetwork, Shape, read_network
from hwnas.search.__main__ import main
from hwnas.space.family import Member
from hwnas.space.search_space import SearchSpace
from hwnas.system.run_folder import ModelFolder, RunFolder
from hwnas.training.job import make_job

NAME = "test_resnet"
SMALL = ["+target=xeon_int8", "dataset=digits", "dataset.image_size=32", f"around={NAME}", "workers=1", "n_trials=6",
         "finalists.k=2", "finalists.recipe.min_steps=4", "finalists.recipe.max_steps=4", "controls=1",
         "verification.seconds=5"]
pytestmark = pytest.mark.usefixtures("any_machine")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, any_machine: None) -> Iterator[Path]:
    """A checkpoint of ten classes as the user has it, and a made-up latency table of this host."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWNAS_HOME", str(home))
        patch.delenv("HWNAS_WEIGHTS", raising=False)
        few = make.calibration_images
        patch.setattr(make, "calibration_images", lambda data, n, seed: few(data, 96, seed))
        save_file(Baseline(NAME).build(1, 10, 32).state_dict(), home / "ours.safetensors",
                  {"norm": "mean 0.5 std 0.25"})
        space = home / f"around_{NAME}.yaml"
        space.write_text(yaml.safe_dump(space_content(NAME, 1, 10, 32)))
        write_table(home, "xeon_int8", None, str(space))
        yield home


def test_a_traced_network_of_ones_own_races_and_is_verified(home: Path, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    given = [*SMALL, f"out={out}", f"pretrained.file={home / 'ours.safetensors'}"]
    assert run_command(main, "search", "usage", given) == 0, capsys.readouterr().err
    rows = {row["id"]: row for row in rows_of(out / "front.csv")}
    assert all(row["verified"] == "true" for row in rows.values()), [row["reason"] for row in rows.values()]
    searched = [row for row in rows.values() if row["is_baseline"] == "false"]
    assert {row["architecture"].partition("@")[0] for row in searched} == {f"cut:{NAME}"}
    row = searched[0]
    folder = ModelFolder(RunFolder(out).model(row["id"]).path)
    network = read_network(folder, Shape(1, 32, 10))
    assert isinstance(network, FoundNetwork)
    assert isinstance(network.architecture, Member)
    space = SearchSpace.load(out / "space.yaml", channels=1, classes=10)
    assert space.find(network.architecture) is not None
    job = make_job(compose("train", [f"run={out}", f"architecture={row['id']}", f"weights={folder.weights}",
                                     "dataset=digits", f"out={tmp_path / 'on'}"], target=False), Console(quiet=True))
    assert job.dataset.mean == (0.5,)
    (lines,) = [block for block in re.findall(r"```python\n(.*?)```", folder.card.read_text(), re.S)
                if "networks.build" in block]
    told = subprocess.run([sys.executable, "-c", lines + "\nprint(sum(p.numel() for p in model.parameters()))"],
                          cwd=folder.path, env=dict(os.environ), capture_output=True, text=True, check=True)
    assert int(told.stdout) > 0
    capsys.readouterr()
    assert run_command(main, "search", "usage", given) == 0  # goes on where it was: at its end
    assert {row["id"] for row in rows_of(out / "front.csv")} == set(rows)
