"""The whole road around networks of a user's own: a checkpoint of ten classes, and a module."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from around_fixtures import home_around, small_search
from safetensors.torch import save_file
from search_fixtures import rows_of

import hwnas
from hwnas.cli.command import compose, run_command
from hwnas.cli.progress import Console
from hwnas.networks.around import load_space
from hwnas.networks.baselines import Baseline
from hwnas.networks.network import FoundNetwork, Shape, read_network
from hwnas.search.__main__ import main
from hwnas.space.architecture import Cut
from hwnas.system.run_folder import ModelFolder, RunFolder
from hwnas.training.job import make_job

NAME = "test_resnet"
pytestmark = pytest.mark.usefixtures("any_machine")


@pytest.fixture(params=[NAME, "test_vit"])
def name(request: pytest.FixtureRequest) -> str:
    """A network whose weights of ten classes, as a user has them, are to be cut."""
    return str(request.param)


@pytest.fixture
def home(name: str, tmp_path: Path, any_machine: None) -> Iterator[Path]:
    def save_weights(folder: Path) -> None:
        folder.mkdir(parents=True)
        weights = Baseline(name).build(1, 10, 32).state_dict()
        save_file(weights, folder / "ours.safetensors", {"norm": "mean 0.5 std 0.25"})

    with home_around(name, tmp_path / "home", save_weights) as home:
        yield home


@pytest.mark.soak  # its short form: test_around.py::test_cuts_race_from_pretrained_weights_and_are_verified
def test_a_traced_network_of_ones_own_races_and_is_verified(name, home, tmp_path, capsys):
    out = tmp_path / "run"
    given = [*small_search(name), f"out={out}", f"pretrained.file={home / 'weights' / 'ours.safetensors'}"]
    assert run_command(main, "search", "usage", given) == 0, capsys.readouterr().err
    rows = {row["id"]: row for row in rows_of(out / "front.csv")}
    assert all(row["verified"] == "true" for row in rows.values()), [row["reason"] for row in rows.values()]
    searched = [row for row in rows.values() if row["is_baseline"] == "false"]
    assert {row["architecture"].partition("@")[0] for row in searched} == {f"cut:{name}"}
    row = searched[0]
    folder = ModelFolder(RunFolder(out).model(row["id"]).path)
    network = read_network(folder, Shape(1, 32, 10))
    assert isinstance(network, FoundNetwork)
    assert isinstance(network.architecture, Cut)
    space = load_space(str(out / "space.yaml"), 1, 10)
    assert space.encode(network.architecture) is not None
    job = make_job(compose("train", [f"run={out}", f"architecture={row['id']}", given[-1], "dataset=digits",
                                     f"out={tmp_path / 'on'}"], target=False), Console(quiet=True))
    assert job.dataset.mean == (0.5,)
    (lines,) = [block for block in re.findall(r"```python\n(.*?)```", folder.card.read_text(), re.S)
                if "read_network" in block]
    told = subprocess.run([sys.executable, "-c", lines + "\nprint(sum(p.numel() for p in model.parameters()))"],
                          cwd=folder.path, env=dict(os.environ), capture_output=True, text=True, check=True)
    assert int(told.stdout) > 0
    capsys.readouterr()
    assert run_command(main, "search", "usage", given) == 0  # goes on where it was: at its end
    assert {row["id"] for row in rows_of(out / "front.csv")} == set(rows)


@pytest.mark.soak  # short forms: networks/test_given.py
def test_a_module_of_ones_own_is_searched_around_from_python(hwnas_home, tmp_path):
    module = Baseline(NAME).build(1, 10, 32)
    name = hwnas.register_module(module, mean=[0.5], std=[0.25])
    given = (option.split("=") for option in small_search(NAME))
    options = {key: int(value) for key, value in given if value.isdigit()}
    with home_around(name, tmp_path / "home", lambda folder: None):
        run = hwnas.search("xeon_int8", "digits", around=name, out=tmp_path / "run", quiet=True, **options)
    assert all(run.to_frame()["verified"])
    assert name in {row.row.name for row in run.models}
    model = run.models[0].torch()
    images = np.random.default_rng(0).random((2, 1, 32, 32), np.float32)
    assert model(torch.from_numpy(images)).shape == (2, 10)
