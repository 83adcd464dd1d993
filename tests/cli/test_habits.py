"""Hydra's habits at the command line, the user's own YAML, doors of other packages, and `hwnas COMMAND`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from hwnas.__main__ import main
from hwnas.cli.command import COMMANDS, as_data, as_typed, compose, names_in
from hwnas.cli.options import names_of
from hwnas.data.dataset import DatasetOptions
from hwnas.errors import ConfigError, UnknownName
from hwnas.latency.calibration import CalibrationOptions
from hwnas.study.objective import CAP_QUANTILE
from hwnas.study.storage import sqlite_path
from hwnas.study.study import database_path
from hwnas.training.recipe import FINE_TUNING, LONG_TRAINING, all_recipe


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of configuration, with a name that Hydra's grammar has uses for."""
    home = tmp_path / "a home, mine"
    monkeypatch.setenv("HWNAS_HOME", str(home))
    for group in ("target", "dataset", "objective"):
        (home / "conf" / group).mkdir(parents=True)
    return home / "conf"


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main([*argv, "--show-config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_show_config_prints_every_option_with_its_value(capsys):
    config = shown(capsys, "search", "target=xeon_int8", "proxy.image_size=24", "finalists.recipe.epochs=7",
                   "threads=2", "dataset.image_size=16")
    assert config["proxy"]["image_size"] == 24
    assert config["proxy"]["lr"] == 0.005
    assert config["proxy"]["threads"] == 2
    assert (config["proxy"]["epochs"], config["proxy"]["min_steps"]) == (1, 80)
    assert config["finalists"]["recipe"]["epochs"] == 7
    assert config["sampler_options"]["n_startup_trials"] == 8
    assert list(config["calibration"]) == names_of(CalibrationOptions)
    assert list(config["dataset"]) == names_of(DatasetOptions)
    assert config["budget"]["quantile"] == CAP_QUANTILE
    empty = [key for key, value in config.items() if value == {}]
    assert not empty


def test_show_config_prints_what_a_training_takes_from_where_it_begins(capsys):
    for more, recipe in (((), LONG_TRAINING), (("pretrained=true",), FINE_TUNING)):
        config = shown(capsys, "train", "model=timm:resnet18", "lr=0.125", *more)
        expected = {**all_recipe(recipe), "lr": 0.125, "lr_end": config["lr_end"], "device": "auto",
                    "precision": "auto"}
        assert {key: config[key] for key in expected} == expected
        assert config["train_images"] is None


def test_every_option_is_read_without_torch() -> None:
    script = """import sys; from hwnas.__main__ import main
assert main(["search", "target=ort_int8", "--show-config"]) == main(["train", "--show-config"]) == 0
sys.exit(" ".join({"torch", "torchvision", "timm", "openvino"} & {*sys.modules}))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (1, "\n")
    assert "train_images:" in done.stdout


@pytest.mark.parametrize(("text", "near"), [("around=resnt18", "resnet18"),
                                            ("baselines=[resnet18,resnt50]", "resnet50")])
def test_a_misspelt_network_is_answered(text: str, near: str, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "target=ort_int8", "dataset=digits", text]) == 2
    assert f"Did you mean {near}" in capsys.readouterr().err.splitlines()[-1]


def test_a_misspelt_name_is_answered_without_timm_and_the_search() -> None:
    given = {"accuracy=rase": "race", "space=mnasnet_smal": "mnasnet_small", "sampler=rendom": "random"}
    script = f"""import sys; from hwnas.__main__ import main
for text in {[*given]}:
    assert main(["search", "target=ort_int8", "dataset=digits", text]) == 2
sys.exit(" ".join({{"torch", "torchvision", "timm", "hwnas.search.road"}} & {{*sys.modules}}))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    *lines, modules = done.stderr.split("\n")[:-1]
    assert modules == ""
    assert [f"Did you mean {near}" in line for line, near in zip(lines, given.values(), strict=True)] == [True] * 3


def test_ctrl_c_while_hydra_is_imported_is_no_traceback() -> None:
    script = """import sys; from hwnas.__main__ import main
class Interrupting:
    def find_spec(self, name, *_):
        if name == "hydra.types":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
sys.exit(main(["report", "run=nowhere"]))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted; the same command goes on from here.\n")


def test_own_files_come_before_the_shipped(own, monkeypatch):
    monkeypatch.setenv("IMAGES", "/images")
    (own / "target" / "mine.yaml").write_text('name: mine\nruntime: "null"\nprecision: fp32\n')
    (own / "target" / "ort_int8.yaml").write_text("name: ort_int8\nruntime: onnxruntime\nprecision: int8\nbatch: 4\n")
    (own / "dataset" / "parts.yaml").write_text("name: imagefolder\nroot: ${oc.env:IMAGES}/parts\n")
    (own / "objective" / "slow.yaml").write_text("name: reward\nreward: hard\ntarget_ms: 5\n")
    assert {"mine", "xeon_int8"} <= set(names_in("target"))
    config = compose("search", ["target=mine", "target.threads=2", "dataset=parts", "objective=slow"])
    assert (config.target.runtime, config.target.threads, config.target.device) == ("null", 2, "cpu")
    assert (config.dataset.root, config.dataset.validation_fraction) == ("/images/parts", 0.15)
    assert config.objective.target_ms == 5
    assert compose("search", ["target=ort_int8"]).target.batch == 4
    with pytest.raises(UnknownName, match=r"Known: .*parts"):
        compose("search", ["target=mine", "dataset=part"])


@pytest.mark.parametrize("text", ["_target_: os.system\n", "options: {a: [{_target_: os.system}]}\n",
                                  'image_size: "${oc.create:{_target_:os.system}}"\n'])
def test_own_files_cannot_run_code(own, text):
    (own / "dataset" / "bad.yaml").write_text(f"name: digits\n{text}")
    with pytest.raises(ConfigError, match="_target_: configurations cannot name code"):
        compose("search", ["target=ort_int8", "dataset=bad"])


def test_own_files_are_checked_as_the_shipped(own):
    (own / "dataset" / "bad.yaml").write_text("name: digits\nflipp: true\n")
    with pytest.raises(UnknownName, match=r"key of dataset 'flipp'\. Did you mean flip"):
        compose("search", ["target=ort_int8", "dataset=bad"])
    (own / "search.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"search\.yaml: a command's defaults cannot be changed there"):
        compose("search", ["target=ort_int8"])


PACKAGE = """
import numpy as np
from hwnas.data.dataset import Listing

def parts(options):
    raise SystemExit(f"asked for {options.name} with {dict(options.options)} at {options.image_size} px")
"""


def test_a_data_set_of_another_package_is_chosen_by_its_name(tmp_path):
    """Installed as pip leaves it: a module and a dist-info folder that names the entry point."""
    (tmp_path / "parts.py").write_text(PACKAGE)
    info = tmp_path / "parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hwnas.datasets]\nparts = parts:parts\n")
    done = subprocess.run(
        [sys.executable, "-m", "hwnas.search", "+target=null_fp32", "dataset=parts", "dataset.options.side=3",
         "dataset.image_size=16", f"out={tmp_path / 'out'}"], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])})
    assert "asked for parts with {'side': 3} at 16 px" in done.stderr


NAMES = ["ü (1), x=y", "a,b", "x=y", "it's", 'say "so"', "'quoted", "a\\b", "a\\", "a\\'b", "$HOME", "{a", "[b", " c ",
         "#%?&;*", "~", "a: b", "new\nline", "x" * 200]
PATHS = ("out", "dataset.root", "space", "storage", "search.reuse")


@pytest.mark.parametrize("names", [NAMES[:5], NAMES[5:10], NAMES[10:15], NAMES[13:]])
def test_a_path_is_taken_as_it_is_typed(names):
    config = compose("search", as_typed(["target=ort_int8", *map("=".join, zip(PATHS, names, strict=True))]))
    assert [OmegaConf.select(config, key) for key in PATHS] == [*map(os.path.expanduser, names)]


def test_the_home_of_a_device_is_no_home_here():
    config = compose("benchmark", ["target=ort_int8", "device=pi@board", "device_python=~/venv/bin/python", "out=~/b"])
    assert config.device_python == "~/venv/bin/python"
    assert config.out == os.path.expanduser("~/b")


@pytest.mark.parametrize("name", ["ü (1), x=y", "a\\'b", "#%?&;*", "${oc.env:HOME}", "\\${a}", "'whole'", "null"])
def test_a_path_passes_between_our_own_processes(name, tmp_path):
    given = str(tmp_path / name)
    config = compose("worker", [], False, {"run": as_data(given)})
    assert config.run == given
    assert sqlite_path(database_path(Path(given))) == tmp_path / name / "study.db"
    stored = yaml.safe_load(OmegaConf.to_yaml(config, resolve=True))
    assert OmegaConf.create(as_data({"deep": [stored]})).deep[0].run == given


def test_a_tilde_is_the_users_home_in_their_own_yaml_too(own):
    (own / "dataset" / "mine.yaml").write_text("name: imagefolder\nroot: ~/images\n")
    config = compose("search", as_typed(["target=ort_int8", "dataset=mine", "out=~/x"]))
    assert [config.dataset.root, config.out] == [str(Path.home() / "images"), str(Path.home() / "x")]
    assert compose("verify", as_typed(["run=~/x"]), False).run == str(Path.home() / "x")
    assert sqlite_path("sqlite:///~/x.db") == Path.home() / "x.db"


@pytest.mark.parametrize(("value", "why"), [
    ("runs/a\udcffb", "not UTF-8"), ("runs/a\udcc3\udca9", "Set PYTHONUTF8=1"),  # as Python reads é where LC_ALL=C
    ("runs/${b}", "b"), ("runs/${oc.env:NOWHERE}", "NOWHERE")])
def test_a_name_that_cannot_be_is_refused_in_one_line(value, why, capsys):
    assert main(["report", "-q", f"run={value}"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("ConfigError: ")
    assert why in said[0]


def test_a_current_folder_that_is_not_utf_8_or_gone_is_refused(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a\udcff"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert main(["report", "-q", "run=x"]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    folder.rmdir()
    assert main(["report", "-q", "run=x"]) == 2
    assert "the current folder was removed" in capsys.readouterr().err


def test_every_command_goes_by_its_name(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/hwnas"])
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        said = capsys.readouterr().out
        assert name != "search" or "xeon_int8" in said
        assert ended.value.code == 0
        assert said.startswith(f"usage: hwnas {name} ")
        assert "python -m" not in said.partition("positional")[0].replace("torchrun --nproc-per-node=2 -m", "")
    assert main(["--help"]) == main([]) == main(["--version"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in COMMANDS)
    assert main(["serch"]) == 2
    assert "Did you mean search" in capsys.readouterr().err
