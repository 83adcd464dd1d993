"""The whole road around a pretrained network: its cuts are searched, fine-tuned from its weights, and verified."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import yaml
from safetensors.torch import save_file
from search_fixtures import rows_of
from table_fixtures import write_table

from hwnas.cli.command import compose, run_command
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError
from hwnas.front import make
from hwnas.networks.around import space_content
from hwnas.networks.baselines import Baseline
from hwnas.networks.network import FoundNetwork, Shape, read_network
from hwnas.search.__main__ import main
from hwnas.search.plan import make_plan
from hwnas.search.prepare import search_options
from hwnas.space.search_space import SearchSpace
from hwnas.system.run_folder import ModelFolder, RunFolder
from hwnas.training.first import FirstTraining
from hwnas.training.job import make_job
from hwnas.verify import run as verify
from hwnas.worker import main as work

NAME = "test_efficientnet"
SMALL = ["+target=xeon_int8", "dataset=digits", "dataset.image_size=32", f"around={NAME}", "n_trials=3", "workers=1",
         "inherited.epochs=1", "inherited.min_steps=2", "inherited.max_steps=2", "inherited.train_images=64",
         "finalists.k=1", "finalists.recipe.max_steps=3", "controls=1", "verification.seconds=40"]
pytestmark = pytest.mark.usefixtures("any_machine")


def save_weights(folder: Path, **more: str) -> None:
    folder.mkdir(exist_ok=True)
    model = Baseline(NAME).build(3, 1000, 32)
    facts = {"norm": "mean 0.5 std 0.25", "licence": "MIT", "origin": "a test", **more}
    save_file(model.state_dict(), folder / f"{NAME}.safetensors", facts)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, any_machine: None) -> Iterator[Path]:
    """Weights in the user's folder, and a made-up latency table of this host."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWNAS_HOME", str(home))
        patch.delenv("HWNAS_WEIGHTS", raising=False)
        few = make.calibration_images
        patch.setattr(make, "calibration_images", lambda data, n, seed: few(data, 96, seed))
        save_weights(home / "weights")
        space = home / f"around_{NAME}.yaml"
        space.write_text(yaml.safe_dump(space_content(NAME, 1, 10, 32)))
        write_table(home, "xeon_int8", None, str(space))
        yield home


def plan_of(*more: str):
    return make_plan(compose("search", [*SMALL, *more]), Console(quiet=True))


def test_cuts_are_searched_and_fine_tuned_from_what_they_keep(home, tmp_path, capsys):
    out = tmp_path / "run"
    given = [*SMALL, f"out={out}"]
    assert run_command(main, "search", "usage", given) == 0, capsys.readouterr().err
    rows = {row["id"]: row for row in rows_of(out / "front.csv")}
    assert f"{NAME}-pretrained" in rows
    assert rows[f"{NAME}-pretrained"]["is_baseline"] == "true"
    cuts = [row for row in rows.values() if row["is_baseline"] != "true"]
    assert {row["architecture"].split()[0] for row in cuts} == {f"timm:{NAME}"}
    assert all(row["verified"] == "true" for row in rows.values()), [row["reason"] for row in rows.values()]
    for id, row in rows.items():
        folder = ModelFolder(RunFolder(out).model(id).path)
        network = read_network(folder, Shape(1, 32, 10))
        assert network is not None
        assert network.pretrained is not None
        assert network.normalisation == ((0.5,), (0.25,))
        said = {entry.key: entry.value for entry in onnx.load(folder.onnx).metadata_props}
        assert json.loads(said["pretrained"])["licence"] == "MIT"
        assert json.loads(said["mean"]) == [0.5], row
        assert "Origin: a test" in folder.card.read_text()
        if isinstance(network, FoundNetwork):
            assert FoundNetwork(network.architecture).provenance == {}
    assert not (out / "trial_weights").exists()
    assert json.loads((out / "environment.json").read_text())["training"]["first_steps"] == 2
    card = RunFolder(out).model(cuts[0]["id"]).card
    assert "Before that 2 steps, as a trial of the search." in card.read_text()
    known = {row["id"] for row in cuts if row["is_control"] == "true" and not row["control_of"]}
    space = SearchSpace.load(out / "space.yaml", channels=1, classes=10)
    assert known <= {network.id for network in space.known.values()}
    assert space.known["whole"].id not in rows  # it is the baseline
    finalist = next(row["id"] for row in cuts if row["is_control"] != "true")
    for named in (finalist, str(RunFolder(out).model(finalist).path)):  # its weights ask for their normalisation
        job = make_job(compose("train", [f"run={out}" if named == finalist else "run=null", f"architecture={named}",
                                         f"weights={RunFolder(out).model(finalist).weights}", "dataset=digits",
                                         f"out={tmp_path / 'on'}"], target=False), Console(quiet=True))
        assert (job.dataset.mean, job.dataset.std) == ((0.5,), (0.25,))
    capsys.readouterr()
    assert run_command(verify, "verify", "usage", [f"run={out}"], target=False) == 0, capsys.readouterr().err
    assert "Before that 2 steps, as a trial of the search." in card.read_text()
    capsys.readouterr()
    assert run_command(main, "search", "usage", given) == 0
    assert "is verified already" in capsys.readouterr().err
    written = (out / "space.yaml").read_bytes()
    assert run_command(main, "search", "usage", [*given, "image_sizes=[24]"]) == 2
    assert "space was around_" in capsys.readouterr().err.splitlines()[-1]
    assert (out / "space.yaml").read_bytes() == written
    elsewhere = shutil.move(home / "weights", tmp_path / "elsewhere")
    assert run_command(work, "worker", "usage", [f"run={out}"], target=False) == 2
    assert run_command(work, "worker", "usage", [f"run={out}", f"pretrained.folder={elsewhere}"], target=False) == 0
    save_weights(home / "weights")  # others than those of the trials
    assert run_command(main, "search", "usage", given) == 2
    assert "accuracy was inherited" in capsys.readouterr().err.splitlines()[-1]


def test_finalists_go_on_from_their_trials(home, tmp_path, monkeypatch):
    begun: dict[str, bool] = {}
    read = FirstTraining.is_kept
    monkeypatch.setattr(FirstTraining, "trained", lambda self, model, name, *_: begun.setdefault(
        name, read(self, name)) is None or model)
    out = tmp_path / "run"
    assert run_command(main, "search", "usage", [*SMALL, "finalists.k=2", "controls=0", f"out={out}"]) == 0
    rows = rows_of(out / "front.csv")
    assert begun == {NAME: False, **{row["id"]: True for row in rows if row["is_baseline"] != "true"}}
    assert len(begun) == 3


def test_the_written_space_can_be_searched_by_its_file(home):
    plan = plan_of("around=null", f"space={home / f'around_{NAME}.yaml'}", "dataset.image_size=null")
    assert plan.start is not None
    assert plan.accuracy == "inherited"
    assert [baseline.id for baseline in plan.baselines] == [f"{NAME}-pretrained"]


def test_a_worker_reads_the_same_plan_without_baselines(home):
    given = compose("search", [*SMALL, "image_sizes=[16,24]"])
    whole, part = make_plan(given, Console(quiet=True)), make_plan(given, Console(quiet=True), trials_only=True)
    assert (part.baselines, len(whole.baselines)) == ((), 3)
    assert (part.accuracy, part.start, part.space.fingerprint) == (whole.accuracy, whole.start, whole.space.fingerprint)


def test_the_largest_of_the_image_sizes_is_the_searchs(home):
    plan = plan_of("dataset.image_size=null", "image_sizes=[16,24,40]")
    assert plan.space.image_sizes == (40, 24, 16)


def test_no_supernet_stands_for_spaces_whose_stages_may_go(home, tmp_path, capsys):
    assert run_command(main, "search", "usage", [*SMALL, "accuracy=supernet", f"out={tmp_path / 'run'}"]) == 2
    assert "lets whole stages go" in capsys.readouterr().err.splitlines()[-1]


def test_without_weights_cuts_begin_at_random_and_it_is_said(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    plan = make_plan(compose("search", SMALL), Console())
    assert plan.start is None
    assert plan.accuracy == "proxy"
    assert f"cuts of {NAME} begin with random weights: there are no pretrained" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"there are no pretrained weights of {NAME} in"):
        plan_of("pretrained=true")


def test_several_files_are_refused_not_taken_for_none(home, tmp_path, monkeypatch):
    monkeypatch.setenv("HWNAS_WEIGHTS", str(tmp_path))
    for kind in ("first", "second"):
        (tmp_path / f"{NAME}_{kind}.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"several files in .* Choose: pretrained\.file="):
        plan_of()


def test_only_pretrained_baselines_stand_beside_cuts(home, capsys):
    assert [network.id for network in plan_of(f"baselines=[resnet10t,{NAME}]").baselines] == [f"{NAME}-pretrained"]


@pytest.mark.parametrize(("change", "words"), [
    ("around=resnet18", "cannot be cut: timm builds it as ResNet"), ("around=nothing", "has no network 'nothing'"),
    ("image_sizes=[64]", "larger than the search's images")])
def test_what_cannot_be_cut_is_refused_before_anything_is_read(home, tmp_path, capsys, change, words):
    assert run_command(main, "search", "usage", [*SMALL, f"out={tmp_path / 'run'}", change]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_inherited_weights_need_a_network_to_inherit_from(tmp_path, capsys):
    given = ["+target=xeon_int8", "dataset=digits", "accuracy=inherited", "baselines=[]", f"out={tmp_path / 'run'}"]
    assert run_command(main, "search", "usage", given) == 2
    assert "Add around=NAME" in capsys.readouterr().err.splitlines()[-1]


def test_the_obvious_cuts_are_tried_first_and_on_smaller_images_too(home):
    plan = plan_of()
    model = SimpleNamespace(predict_architectures=lambda networks: SimpleNamespace(mean=np.ones(len(networks))))
    first = [plan.space.decode(setting) for setting in search_options(plan, model).enqueue]
    cuts = [network for name, network in plan.space.known.items() if name != "whole"]  # which is a baseline
    assert first[:len(cuts)] == cuts
    assert plan.space.image_sizes == (32, 24, 16)
    assert {(network.stages, network.image_size) for network in first[len(cuts):]} == {
        (cut.stages, px) for cut in cuts for px in (24, 16)}
    part = make_plan(compose("search", SMALL), Console(quiet=True), trials_only=True)  # as a worker has it
    assert search_options(part, model).enqueue == search_options(plan, model).enqueue
