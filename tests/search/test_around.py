"""The whole road around a pretrained network: its cuts are searched, fine-tuned from its weights, and verified."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
from around_fixtures import home_around, small_search
from process_fixtures import wait_until
from safetensors.torch import save_file
from search_fixtures import asked, rows_of
from table_fixtures import measurement_of

from hwnas.cli.command import compose, run_command
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, DataError, TrainingError
from hwnas.networks.around import load_space
from hwnas.networks.baselines import Baseline
from hwnas.networks.network import FoundNetwork, Shape, read_network
from hwnas.search import racer, road
from hwnas.search.__main__ import main
from hwnas.search.plan import make_plan
from hwnas.system.run_folder import ModelFolder, RunFolder
from hwnas.target import Target
from hwnas.training.job import make_job
from hwnas.training.loop import Checkpoint
from hwnas.verify import run as verify
from hwnas.worker import main as work
from hwnas.zoo.record import ZooRecord

NAME, OTHER = "test_efficientnet", "mobilenetv2_050"
SMALL = small_search(NAME)
pytestmark = pytest.mark.usefixtures("any_machine")


def save_weights(folder: Path, **more: str) -> None:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = Baseline(NAME).build(3, 1000, 32)
    facts = {"norm": "mean 0.5 std 0.25", "licence": "MIT", "origin": "a test", **more}
    save_file(model.state_dict(), folder / f"{NAME}.safetensors", facts)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, any_machine: None) -> Iterator[Path]:
    with home_around(NAME, tmp_path_factory.mktemp("home"), save_weights) as home:
        yield home


def plan_of(*more: str):
    return make_plan(compose("search", [*SMALL, *more]), Console(quiet=True))


def test_cuts_race_from_pretrained_weights_and_are_verified(home, tmp_path, capsys):
    out = tmp_path / "run"
    given = [*SMALL, f"out={out}"]
    assert run_command(main, "search", "usage", given) == 0, capsys.readouterr().err
    said = capsys.readouterr().err
    rows = {row["id"]: row for row in rows_of(out / "front.csv")}
    cuts = {id: row for id, row in rows.items() if row["is_baseline"] == "false"}
    assert {row["architecture"].partition("@")[0] for row in cuts.values()} == {f"cut:{NAME}"}
    assert all(row["verified"] == "true" for row in rows.values()), [row["reason"] for row in rows.values()]
    space = load_space(str(out / "space.yaml"), 1, 10)
    for id, row in cuts.items():
        folder = ModelFolder(RunFolder(out).model(id).path)
        network = read_network(folder, Shape(1, 32, 10))
        assert isinstance(network, FoundNetwork)
        assert network.pretrained is not None
        assert network.normalisation == ((0.5,), (0.25,))
        assert FoundNetwork(network.architecture).provenance == {}
        assert space.encode(network.architecture) is not None
        facts = {entry.key: entry.value for entry in onnx.load(folder.onnx).metadata_props}
        assert json.loads(facts["pretrained"])["licence"] == "MIT"
        assert json.loads(facts["mean"]) == [0.5], row
        assert "Origin: a test" in folder.card.read_text()
        assert "A race, seed 0" in folder.card.read_text()
    trials = {row["number"]: row for row in rows_of(out / "trials.csv")}
    for cut in (row for row in trials.values() if row["source"]):
        assert trials[cut["source"]]["steps"]  # what it was cut from was trained
        assert cut["move"]
    deploy = [entry for entry in json.loads((out / "comparisons.json").read_text()) if entry["verdict"] == "deploy"]
    assert f"models/{deploy[0]['finalist']}" in said.splitlines()[-2]
    finalist = next(row["id"] for row in rows.values() if row["is_baseline"] == "false")
    job = make_job(compose("train", [f"run={out}", f"architecture={finalist}", "pretrained=true", "dataset=digits",
                                     f"out={tmp_path / 'on'}"], target=False), Console(quiet=True))
    assert (job.dataset.mean, job.dataset.std) == ((0.5,), (0.25,))  # as the weights that it is cut from ask
    capsys.readouterr()
    assert run_command(verify, "verify", "usage", [f"run={out}"], target=False) == 0, capsys.readouterr().err
    assert "A race, seed 0" in RunFolder(out).model(finalist).card.read_text()
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
    save_weights(home / "weights", origin="another test")  # others than those of the race
    assert run_command(main, "search", "usage", given) == 2
    assert "accuracy was race" in capsys.readouterr().err.splitlines()[-1]


RACE = [*SMALL, "n_trials=5", "finalists.k=2", "finalists.recipe.min_steps=30", "finalists.recipe.max_steps=30"]


def lines_of(out: Path) -> list[tuple[str, ...]]:
    """What is to be the same after a kill, trial by trial."""
    same = ("id", "outcome", "rungs", "steps", "source", "move", "top1_proxy", "reason")
    return [tuple(row[key] for key in same) for row in rows_of(out / "trials.csv")]


def legs_in(out: Path) -> int:
    """Legs that the study of a race acknowledges."""
    found = asked(out, "select value_json from trial_user_attributes where key = 'line'")
    return sum(len(json.loads(value)["legs"]) for value in found)


@pytest.fixture(scope="module")
def undisturbed(home: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, ...]]:
    """The lines of RACE that ran from beginning to end."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(road, "verified", lambda prepared, trials, console: ([], []))
        assert run_command(main, "search", "usage", [*RACE, f"out={out}"]) == 0
    shutil.copy(out / "latencies.json", home)
    return lines_of(out)


@pytest.mark.soak  # a short form: test_race.py::test_a_race_goes_on_where_it_was
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_a_race_that_is_killed_ends_with_the_same_networks_and_steps(home, undisturbed, tmp_path, monkeypatch, n):
    out = RunFolder.create(tmp_path / "run", overwrite=False).path
    shutil.copy(home / "latencies.json", out)  # another process times nothing anew
    search = subprocess.Popen([sys.executable, "-m", "hwnas.search", *RACE, f"out={out}"], stderr=subprocess.DEVNULL)
    wait_until(lambda: legs_in(out) >= n or search.poll() is not None)
    search.kill()
    assert search.wait() == -9, "it was at work"
    monkeypatch.setattr(road, "verified", lambda prepared, trials, console: ([], []))
    assert run_command(main, "search", "usage", [*RACE, f"out={out}"]) == 0
    assert lines_of(out) == undisturbed


@pytest.mark.soak
def test_a_kill_behind_the_last_leg_of_a_line_leaves_it_finished(home, undisturbed, tmp_path, monkeypatch):
    def killed(*_):
        raise SystemExit

    out = tmp_path / "run"
    monkeypatch.setattr(road, "verified", lambda prepared, trials, console: ([], []))
    with monkeypatch.context() as patch:
        patch.setattr(racer.Racer, "_finish", killed)
        with pytest.raises(SystemExit):
            run_command(main, "search", "usage", [*RACE, f"out={out}"])
    assert run_command(main, "search", "usage", [*RACE, f"out={out}"]) == 0
    assert lines_of(out) == undisturbed


@pytest.mark.soak
def test_a_disk_that_is_full_for_a_while_costs_no_line(home, undisturbed, tmp_path, monkeypatch, capsys):
    tries, save = [], Checkpoint.save

    def full(state: Checkpoint, path: Path) -> None:
        tries.append(path)
        if len(tries) <= 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, path)

    out = tmp_path / "run"
    monkeypatch.setattr(Checkpoint, "save", full)
    monkeypatch.setattr(road, "verified", lambda prepared, trials, console: ([], []))
    assert run_command(main, "search", "usage", [*RACE, f"out={out}"]) == 0
    said = capsys.readouterr().err
    assert said.count("weights cannot be kept") == 1
    assert "No space left on device" in said
    assert lines_of(out) == undisturbed
    assert {*tries} == {*(out / "lines").glob("*.safetensors")}, "all were kept in the end"


@pytest.mark.soak
def test_lines_of_a_machine_with_another_folder_stay_for_it(home, undisturbed, tmp_path, monkeypatch, capsys):
    """Weights that lie elsewhere end the command, and no line."""
    out, ended = tmp_path / "run", []

    def leave(*given: object) -> None:
        ended.append(record(*given))
        if len(ended) == 5:  # those that are judged, and a piece of the first
            raise SystemExit

    record = racer.record_leg
    monkeypatch.setattr(road, "verified", lambda prepared, trials, console: ([], []))
    with monkeypatch.context() as patch:
        patch.setattr(racer, "record_leg", leave)
        with pytest.raises(SystemExit):
            run_command(main, "search", "usage", [*RACE, f"out={out}"])
    (out / "lines").rename(tmp_path / "lines")
    with monkeypatch.context() as patch:
        patch.setattr(racer, "gethostname", lambda: "another")
        assert run_command(main, "search", "usage", [*RACE, f"out={out}"]) == 2
    assert "share their run folder" in capsys.readouterr().err.splitlines()[-1]
    shutil.rmtree(out / "lines", ignore_errors=True)
    (tmp_path / "lines").rename(out / "lines")
    assert run_command(main, "search", "usage", [*RACE, f"out={out}"]) == 0
    assert lines_of(out) == undisturbed


def test_a_worker_that_comes_before_the_race_is_told_so(home, tmp_path, monkeypatch, capsys):
    def leave(*given: object) -> None:
        raise SystemExit

    out = tmp_path / "run"
    monkeypatch.setattr(road.ObviousCuts, "begin", leave)
    with pytest.raises(SystemExit):
        run_command(main, "search", "usage", [*RACE, f"out={out}"])
    assert run_command(work, "worker", "usage", [f"run={out}"], target=False) == 2
    assert "has not started" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("change", "said"), [
    (["n_trials=2"], "n_trials=2: a race begins with the 3 networks that are known by name (whole, cut_"),
    (["sampler=random"], "a race asks no sampler"), (["controls=1"], "a race draws no random networks"),
    (["search.reuse={folder}"], "a race estimates nothing"),
    (["around=mobilevit_xxs"], "reads tokens"), (["around=nothing"], "has no network 'nothing'"),
    (["around=[]"], "around must be a timm name, a list of different ones, or auto"),
    ([f"around=[{NAME},{NAME}]"], "a list of different ones"), (["around={{a: 1}}"], "a list of different ones"),
    ([f"around=[{NAME},test_resnet]"], "no pretrained weights of test_resnet"),
    ([f"around=[{NAME},test_resnet]", "pretrained.file={folder}/study.db"], "is of one network"),
    (["image_sizes=[64]"], "larger than the search's images"),
    (["around=null", "space=mnasnet_small", "accuracy=race"], "space mnasnet_small is cut from no network"),
    (["accuracy=proxy"], "a race estimates nothing"), (["proxy.epochs=2"], "a race estimates nothing"),
    (["max_asks=9"], "a race asks no sampler"),
    (["host=another"], "another")])
def test_what_cannot_be_cut_or_raced_is_one_line(home, tmp_path, capsys, change, said):
    (tmp_path / "study.db").touch()
    change = [each.format(folder=tmp_path) for each in change]
    assert run_command(main, "search", "usage", [*SMALL, f"out={tmp_path / 'run'}", *change]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_race_of_which_nothing_comes_through_is_an_error_and_says_why(home, tmp_path, monkeypatch, capsys):
    legs = []

    def diverge(stretch, *_, **__):
        legs.append(stretch.leg)
        raise TrainingError("loss is nan after 3 steps")

    monkeypatch.setattr(racer, "train_leg", diverge)
    assert run_command(main, "search", "usage", [*SMALL, f"out={tmp_path / 'run'}"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("StudyError: no network came through the race")
    assert legs
    assert all(3 * leg.warmup <= leg.steps for leg in legs), "a short leg is no warm-up alone"
    assert "loss is nan" in last


def test_a_plan_follows_from_the_written_space_the_sizes_and_the_weights(home):
    plan = plan_of("around=null", f"space={home / f'around_{NAME}.yaml'}", "dataset.image_size=null")
    assert [*plan.starts] == [NAME]
    assert plan.accuracy == "race"
    for each in (plan, plan_of(f"baselines=[resnet10t,{NAME}]")):  # others are left out: they are not pretrained
        assert [baseline.id for baseline in each.baselines] == [f"{NAME}-pretrained"]
    assert plan_of("dataset.image_size=null", "image_sizes=[16,24,40]").space.image_sizes == (40, 24, 16)
    given = compose("search", [*SMALL, "image_sizes=[16,24]"])  # a worker reads the same without baselines
    whole, part = make_plan(given, Console(quiet=True)), make_plan(given, Console(quiet=True), trials_only=True)
    assert (part.baselines, len(whole.baselines)) == ((), 3)
    assert (part.accuracy, part.starts, part.space.fingerprint) == (
        whole.accuracy, whole.starts, whole.space.fingerprint)


def test_missing_weights_are_an_error_and_so_are_several(home, tmp_path, monkeypatch):
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "efficientnet-test.pth").write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"{NAME}.* in {folder}.*efficientnet-test\.pth.*pretrained\.use=false"):
        plan_of()
    plan = plan_of("pretrained.use=false")
    assert plan.starts == {}
    assert plan.accuracy == "race"
    for kind in ("first", "second"):
        (folder / f"{NAME}_{kind}.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"several files in .* or choose: pretrained\.file="):
        plan_of()


@pytest.fixture
def home_of_two(tmp_path, monkeypatch):
    """Weights of two networks that can be cut, both on the front as they were timed."""
    folder = tmp_path / "home" / "weights"
    folder.mkdir(parents=True)
    for name in (NAME, OTHER):
        save_file(Baseline(name).build(3, 1000, 64).state_dict(), folder / f"{name}.safetensors",
                  {"norm": "mean 0.5 std 0.25"})
    monkeypatch.setenv("HWNAS_HOME", str(folder.parent))
    ZooRecord.open(Target("xeon_int8", "openvino", "int8")).keep(
        {f"{name}@32": measurement_of(ms) for name, ms in ((NAME, 1.0), (OTHER, 2.0))}, {})
    return folder.parent


def test_weights_of_one_of_several_networks_that_do_not_fit_are_refused_before_the_race(home, home_of_two, tmp_path):
    folder, several = home_of_two / "weights", ["n_trials=20", f"out={tmp_path / 'run'}"]
    shutil.copy(folder / f"{NAME}.safetensors", folder / f"{OTHER}.safetensors")
    with pytest.raises(DataError, match=rf"{OTHER}\.safetensors is of another network"):
        plan_of(f"around=[{NAME},{OTHER}]", *several)
    assert [*plan_of("around=auto", *several).starts] == [NAME]  # it chooses the other one


@pytest.mark.soak
def test_two_networks_race_and_the_run_says_what_the_front_is_cut_from(home, home_of_two, tmp_path, capsys):
    out = tmp_path / "run"
    given = [*SMALL, "around=auto", "n_trials=9", f"out={out}"]
    assert run_command(main, "search", "usage", given) == 0, capsys.readouterr().err
    rows = rows_of(out / "front.csv")
    arounds = {row["architecture"].partition("@")[0].removeprefix("cut:") for row in rows}
    assert arounds <= {NAME, OTHER}
    family = json.loads((out / "environment.json").read_text())["family"]
    assert all(around in family for around in arounds)
    assert family in (report := (out / "report.html").read_text())
    assert f"around=auto chose {OTHER}" in report
    assert all(row["verified"] == "true" for row in rows), [row["reason"] for row in rows]
    capsys.readouterr()
    assert run_command(main, "search", "usage", given) == 0
    assert "is verified already" in capsys.readouterr().err
    assert run_command(main, "search", "usage", [*given, f"around={NAME}"]) == 2
    assert "space" in capsys.readouterr().err.splitlines()[-1]
