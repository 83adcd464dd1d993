"""Which of several pretrained networks is cut: the comparison, and what stands in the run folder of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from search_fixtures import rows_of
from table_fixtures import MadeUpTimer

from hwnas.cli.command import compose, run_command
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, FileError, MissingWeights, StudyError
from hwnas.front.score import Timing
from hwnas.latency.timing import reference_network
from hwnas.networks.baselines import Baseline
from hwnas.networks.network import Shape, TimmNetwork
from hwnas.runtimes.onnxruntime import OnnxRuntime
from hwnas.search import families
from hwnas.search.__main__ import main
from hwnas.search.families import FILE, choose_family, find_choice, judge, levels
from hwnas.target import Target

NAMES = ("test_efficientnet", "mobilenetv2_035")
SMALL = ["+target=xeon_int8", "dataset=digits", "dataset.image_size=32", "workers=1", "n_trials=8", "finalists.k=2",
         "finalists.recipe.min_steps=20", "finalists.recipe.max_steps=20", "verification.seconds=5"]
pytestmark = pytest.mark.usefixtures("any_machine", "few_images")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of two networks in a user's folder."""
    home = tmp_path_factory.mktemp("made") / "home"
    (home / "weights").mkdir(parents=True)
    for name in NAMES:
        save_file(Baseline(name).build(3, 1000, 32).state_dict(), home / "weights" / f"{name}.safetensors",
                  {"norm": "mean 0.5 std 0.25"})
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It as the user's folder: files are replaced there, never written into, so that links will do."""
    home = shutil.copytree(made, tmp_path / "home", copy_function=os.link)
    monkeypatch.setenv("HWNAS_HOME", str(home))
    monkeypatch.delenv("HWNAS_WEIGHTS", raising=False)
    monkeypatch.setattr(families, "STEPS", (2, 4))
    monkeypatch.setattr("hwnas.latency.measured.time_networks", MadeUpTimer())
    monkeypatch.chdir(tmp_path)
    return home


def chosen(*given: str) -> families.Choice:
    config = choose_family(compose("search", [*SMALL, *given]), Console(quiet=True))
    choice = find_choice(Path(config["out"]))
    assert config["around"] == choice.chosen
    return choice


@pytest.mark.soak  # the others here take its choice apart
def test_of_two_networks_one_is_cut_and_the_run_says_why(home, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    given = [*SMALL, f"around=[{','.join(NAMES)}]", f"out={out}"]
    assert run_command(main, "search", "usage", given) == 0, capsys.readouterr().err
    choice = find_choice(out)
    assert choice.sentence in capsys.readouterr().err
    assert {tried.network for tried in choice.cuts} == {*NAMES} == {*choice.networks}
    around = [row["architecture"].replace("@", " ").split()[0] for row in rows_of(out / "front.csv")]
    assert {name.partition(":")[2] for name in around} == {choice.chosen}
    assert json.loads((out / "environment.json").read_text())["family"] == choice.sentence
    assert f"The networks are {choice.sentence}" in (out / "report.html").read_text()
    assert yaml.safe_load((out / "config.yaml").read_text())["around"] == choice.chosen

    def never(*given: object) -> None:
        raise AssertionError("compared again")

    monkeypatch.setattr(families, "_compared", never)
    assert run_command(main, "search", "usage", given) == 0
    assert "is verified already" in capsys.readouterr().err
    assert run_command(main, "search", "usage", [*SMALL, "around=zoo", f"out={out}"]) == 2
    assert f"is of another comparison: around was {' '.join(sorted(NAMES))}, is zoo" in (
        capsys.readouterr().err.splitlines()[-1])
    (out / FILE).unlink()
    assert run_command(main, "search", "usage", given) == 2
    assert "holds a search that chose among no networks" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.soak
def test_zoo_is_all_that_can_be_cut_and_has_weights(home, tmp_path):
    save_file(Baseline("resnet18").build(3, 10, 32).state_dict(), home / "weights" / "resnet18.safetensors")
    assert {*chosen("around=zoo").networks} == {*NAMES, "resnet18"}
    assert (tmp_path / "runs" / "xeon_int8-families-digits" / FILE).is_file()


@pytest.mark.parametrize(("given", "error", "words"), [
    (["around=[]"], ConfigError, "around must be a timm name, a list of different ones, or zoo"),
    (["around=[mobilenetv2_035,mobilenetv2_035]"], ConfigError, "a list of different ones"),
    (["around={a: 1}"], ConfigError, "a list of different ones"),
    (["around=[mobilenetv2_035,test_resnet]"], MissingWeights, "no pretrained weights of test_resnet"),
    (["around=[mobilenetv2_035,test_efficientnet]", "pretrained.use=false"], ConfigError, "compares pretrained"),
    (["around=[mobilenetv2_035,test_efficientnet]", "accuracy=proxy"], ConfigError, "a race estimates nothing"),
    (["around=zoo", "pretrained.file=FOLDER/mobilenetv2_035.safetensors"], ConfigError, "is of one network"),
    (["around=zoo", "n_trials=1"], ConfigError, "n_trials=1"),
])
def test_what_cannot_be_compared_is_refused(home, given, error, words):
    with pytest.raises(error, match=words.replace("[", r"\[")):
        chosen(*(word.replace("FOLDER", str(home / "weights")) for word in given))


def test_a_zoo_without_weights_is_refused(home):
    shutil.rmtree(home / "weights")
    with pytest.raises(MissingWeights, match="no pretrained weights in"):
        chosen("around=zoo")


@pytest.mark.soak
def test_a_network_that_cannot_be_timed_here_is_left_out_and_said(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(families, "time_untrained", lambda networks, *_: {
        name: 0.1 for name in networks if name.startswith(NAMES[1])})
    out = tmp_path / "run"
    config = choose_family(compose("search", [*SMALL, f"around=[{','.join(NAMES)}]", f"out={out}"]), Console())
    assert config["around"] == NAMES[1]
    assert f"{NAMES[0]}, cut_" in (said := capsys.readouterr().err)
    assert "not compared: it cannot be exported and timed as xeon_int8" in said
    monkeypatch.setattr(families, "time_untrained", lambda *_: {})
    with pytest.raises(ConfigError, match="is left to compare"):
        chosen(f"around=[{','.join(NAMES)}]", f"out={tmp_path / 'other'}")


def test_a_network_that_cannot_keep_the_cap_is_left_out(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(families, "time_untrained", lambda networks, *_: {
        name: 5.0 if name.startswith(NAMES[0]) else 0.5 for name in networks})
    given = [*SMALL, f"around=[{','.join(NAMES)}]", f"out={tmp_path / 'run'}", "budget.latency_ms=1"]
    assert choose_family(compose("search", given), Console())["around"] == NAMES[1]
    assert f"{NAMES[0]}: not compared: its fastest obvious cut takes 5 ms" in capsys.readouterr().err


@pytest.mark.soak
def test_a_choice_of_another_form_is_one_line(home, tmp_path):
    out = tmp_path / "run"
    given = f"around=[{','.join(NAMES)}]", f"out={out}"
    chosen(*given)
    content = json.loads((out / FILE).read_text())
    for change in ({"chosen": "${oc.env:HOME}", "networks": ["${oc.env:HOME}"]}, {"chosen": "resnet18"}, {"sure": "x"}):
        (out / FILE).write_text(json.dumps({**content, **change}))
        with pytest.raises(StudyError, match=r"families\.json"):
            chosen(*given)


def test_one_network_is_not_compared():
    config = compose("search", [*SMALL, "around=mobilenetv2_035"])
    assert choose_family(config, Console(quiet=True)) == config
    alone = compose("search", [*SMALL, "around=[mobilenetv2_035]"])
    assert choose_family(alone, Console(quiet=True))["around"] == "mobilenetv2_035"


def answers(share: float, n: int = 1000) -> np.ndarray:
    """A network that answers this share of the images rightly, the first ones."""
    return np.arange(n) < round(share * n)


def test_the_network_whose_cuts_are_better_at_the_same_latency_is_chosen():
    fast = {"a": (0.10, answers(0.80)), "b": (0.20, answers(0.86))}
    slow = {"a": (0.20, answers(0.84)), "b": (0.40, answers(0.90))}
    choice = judge({"slow": slow, "fast": fast}, steps=100)
    assert choice.chosen == "fast"
    assert choice.sure > 0.9
    assert choice.at_ms == pytest.approx(0.2)
    assert "at 0.2 ms its cuts answer 86.0% of 1000 validation images after 100 steps each, those of slow 84.0%" in (
        choice.sentence)
    mine = {"a": (0.10, answers(0.80)), "b": (0.20, answers(0.86))}
    other = {"a": (0.10, answers(0.79)), "b": (0.2, answers(0.85))}
    choice = judge({"x": {**mine, "bad": (0.199, answers(0.40))}, "y": other}, 10)
    assert choice.chosen == "x"
    assert {tried.cut for tried in choice.cuts} == {"a", "b", "bad"}, "all are told"
    rng = np.random.default_rng(0)
    own = [{"a": (0.1, rng.random(500) < 0.8), "b": (0.2, rng.random(500) < 0.85)} for _ in range(2)]
    assert judge(dict(zip("xy", own, strict=True)), 10).sure < 0.999
    same = judge({"x": own[0], "y": own[0]}, 10)
    assert (same.chosen, same.sure) == ("x", 0.5)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.0, 0.2), st.lists(st.floats(0.3, 0.7), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_levels_find_lines_of_one_slope_wherever_their_cuts_lie(slope, heights, seed):
    rng = np.random.default_rng(seed)
    family = np.repeat(np.arange(len(heights)), 3)
    at = rng.uniform(-3, 0, len(family))
    top1 = np.array(heights)[family] + slope * at
    found = levels(family, at, top1[:, None])[:, 0]
    assert np.allclose(found, np.array(heights) + slope * at.mean())


def test_networks_are_timed_in_the_runtime_but_for_those_that_it_refuses(monkeypatch):
    shape, spoilt = Shape(3, 32, 10), Baseline("test_efficientnet", image_size=24)
    few = [TimmNetwork(each, shape) for each in (Baseline("test_efficientnet"), Baseline("test_resnet"), spoilt)]
    compile = OnnxRuntime.compile

    def compiled(runtime, path, target):
        if ids.get(path.stem) == spoilt.id:
            raise FileError(path, "an operator that there is not")
        return compile(runtime, path, target)

    ids = {hashlib.sha256(network.identity.encode()).hexdigest()[:8]: network.id for network in few}
    monkeypatch.setattr(OnnxRuntime, "compile", compiled)
    said: list[str] = []
    target, timing = Target("ort_fp32", "onnxruntime", "fp32"), Timing(reference_network(3, 10, 32), 5.0, 0)
    latencies = families.time_untrained({network.id: network for network in few}, target, timing,
                               lambda share, text="": said.append(text))
    assert {*latencies} == {"test_efficientnet", "test_resnet"}
    assert all(value > 0 for value in latencies.values())
    assert "exported 2 of 3" in said
