"""What a search writes down, and refuses, before its first trial."""

from __future__ import annotations

import os
from types import SimpleNamespace

import optuna
import pytest
from boxes_fixtures import write_coco
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import save_file

from hwnas.cli.command import compose
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, DataError, StudyError, TargetError
from hwnas.networks.baselines import Baseline
from hwnas.networks.network import Shape, TimmNetwork
from hwnas.search import calibration, road, trials
from hwnas.search import plan as planning
from hwnas.search.deployments import CalibratedDeployment
from hwnas.search.explorer import load_data, open_run_study, search_options
from hwnas.search.minutes import STEPS, Clock, Pace
from hwnas.search.plan import make_plan
from hwnas.search.trials import Sampled
from hwnas.study.study import database_path
from hwnas.system.clock import Deadline
from hwnas.system.run_folder import RunFolder
from hwnas.target import Target
from hwnas.worker import command as worker


class Costly:
    """An estimator of which only the name is asked."""

    fingerprint = "costly"


@pytest.mark.parametrize(("steps", "is_verified", "has_trials"), [
    (None, False, True), (200, False, False), (200, True, True)], ids=["new", "finalists begun", "more minutes"])
def test_finalists_that_were_begun_are_not_replaced_by_new_trials(
        tmp_path, monkeypatch, steps, is_verified, has_trials):
    url, run = f"sqlite:///{tmp_path / 'study.db'}", RunFolder.create(tmp_path / "run")
    study = optuna.create_study(storage=url)
    if steps:
        study.set_user_attr(STEPS, steps)
    if is_verified:
        run.report.write_text("")
    options = SimpleNamespace(n_controls=0, storage=url)
    plan = SimpleNamespace(options=options, parts=3, baselines=(), space=SimpleNamespace(known={}))
    monkeypatch.setattr(trials, "_trials_s", lambda *_: 300.0)
    monkeypatch.setattr(trials, "storage_of", lambda _: SimpleNamespace(url=url))
    Sampled(plan, run, *[None] * 4, study, Clock.start(30.0), Pace({}, 1.0), Costly()).begin(Console(quiet=True))
    until = Deadline.of(study.user_attrs[trials.UNTIL])
    assert (until.left_s > 100) == has_trials


def test_what_was_left_out_is_known_after_a_kill(tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    plan = SimpleNamespace(options=SimpleNamespace(storage=url))

    def keep(said: list[str]) -> list[str]:
        study = optuna.create_study(storage=url, study_name="one", load_if_exists=True)
        console = Console(quiet=True)
        console.remarks += said
        return road._keep_remarks(SimpleNamespace(plan=plan, run=RunFolder(tmp_path), study=study), console)

    assert keep(["no time for a", "b"]) == ["no time for a", "b"]
    assert keep(["b", "c"]) == ["no time for a", "b", "c"]  # another process, which did not hear the first


def test_a_space_with_fewer_networks_than_finalists_is_searched_without_controls():
    three, options = SimpleNamespace(size=3, name="three"), SimpleNamespace(finalists=SimpleNamespace(k=None))
    planning.check_controls(SimpleNamespace(n_controls=0, **vars(options)), three)
    with pytest.raises(ConfigError, match="Lower controls"):
        planning.check_controls(SimpleNamespace(n_controls=1, **vars(options)), three)


@pytest.mark.parametrize(("flags", "narrow"), [(["avx2"], True), (["avx2", "avx512_vnni"], False)])
def test_int8_weights_suit_the_cpu_that_is_searched_for(flags, narrow):
    deployment = SimpleNamespace(target=Target("ort_int8", "onnxruntime", "int8"))
    table = SimpleNamespace(host={"name": "far", "vendor": "intel", "flags": flags})
    calibrated = CalibratedDeployment(deployment, None, None, table)
    assert Sampled(*[None] * 3, (calibrated,), *[None] * 6).narrow == ("ort_int8",) * narrow


@pytest.mark.soak
def test_a_study_of_another_estimator_is_refused_before_that_one_works(tiny_table, tmp_path, monkeypatch):
    tiny_table("epyc_int8")
    config = compose("search", ["+target=epyc_int8", f"out={tmp_path}", "baselines=[]"])
    first, other = Costly(), Costly()
    plan, run = make_plan(config, Console(quiet=True)), RunFolder(tmp_path)
    monkeypatch.setattr(trials, "_load_estimator", lambda *_: first)
    Sampled.prepare(plan, run, Console(quiet=True))
    Sampled.prepare(plan, run, Console(quiet=True))
    other.fingerprint = "other"
    monkeypatch.setattr(trials, "_load_estimator", lambda *_: other)
    with pytest.raises(StudyError, match=r"cannot resume, accuracy was proxy \(costly\), now proxy \(other\)"):
        Sampled.prepare(plan, run, Console(quiet=True))


def test_a_study_of_another_space_is_refused_before_that_one_is_measured(tiny_table, tmp_path, monkeypatch):
    tiny_table("epyc_int8")
    given = ["+target=epyc_int8", f"out={tmp_path}", "baselines=[]"]
    run = RunFolder(tmp_path)
    Sampled.prepare(make_plan(compose("search", given), Console(quiet=True)), run, Console(quiet=True))
    monkeypatch.setattr(calibration, "latency_model", lambda *_: pytest.fail("it measures"))
    other = make_plan(compose("search", [*given, "space=fused"]), Console(quiet=True))
    with pytest.raises(StudyError, match=r"cannot resume, space was mnasnet_small \(\w+\), now fused \("):
        Sampled.prepare(other, run, Console(quiet=True))


def test_a_study_of_other_images_is_not_reused_and_that_is_known_before_measuring(tiny_table, tmp_path, monkeypatch):
    tiny_table("epyc_int8")
    given = ["+target=epyc_int8", "baselines=[]"]
    first, other = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "other")
    first.path.mkdir()
    Sampled.prepare(make_plan(compose("search", [*given, f"out={first.path}"]), Console(quiet=True)), first,
                    Console(quiet=True))
    monkeypatch.setattr(calibration, "latency_model", lambda *_: pytest.fail("it measures"))
    plan = make_plan(compose("search", [*given, f"out={other.path}", f"search.reuse={first.path}", "seed=1"]),
                     Console(quiet=True))
    with pytest.raises(StudyError, match="its data set is"):
        Sampled.prepare(plan, other, Console(quiet=True))


def test_baselines_begin_with_the_pretrained_weights_that_are_there(hwnas_home, tmp_path, capsys):
    network = TimmNetwork(Baseline("test_efficientnet"), Shape(3, 32, 10))
    weights = dict(network.build().state_dict())
    save_file(weights, tmp_path / "test_efficientnet.safetensors", {"norm": "mean 0.5 std 0.5"})
    given = ["+target=xeon_int8", f"out={tmp_path / 'run'}", "baselines=[test_efficientnet,resnet10t]"]

    def baselines(*more):
        plan = make_plan(compose("search", [*given, *more]), Console())
        return {baseline.id: baseline for baseline in plan.baselines}

    begun = baselines(f"pretrained.folder={tmp_path}")
    assert {"resnet10t", "test_efficientnet-pretrained"} <= {*begun}
    assert not any(name in begun for name in ("test_efficientnet", "resnet10t-pretrained"))
    assert begun["test_efficientnet-pretrained"].normalisation == ((0.5,), (0.5,))  # digits are grey
    assert "no pretrained weights of resnet10t: trained from scratch" in capsys.readouterr().err
    assert all(not baseline.provenance for baseline in baselines().values())
    with pytest.raises(ConfigError, match="there are no pretrained weights of test_efficientnet in"):
        baselines("pretrained=true")
    with pytest.raises(ConfigError, match="are for baselines, and there are none"):
        baselines("pretrained=true", "baselines=[]")
    with pytest.raises(ConfigError, match="is of one network, and there are 2"):
        baselines(f"pretrained.file={tmp_path / 'test_efficientnet.safetensors'}")


def test_a_target_that_the_machine_cannot_run_is_refused_before_images_are_read(hwnas_home, tmp_path):
    given = ["+target=ort_fp32", "target.precision=bf16", f"out={tmp_path / 'run'}", "baselines=[]"]
    with pytest.raises(TargetError, match="cannot run bf16"):
        make_plan(compose("search", given), Console(quiet=True))


def test_pretrained_weights_that_do_not_fit_are_refused_before_the_trials(hwnas_home, tmp_path):
    weights = dict(Baseline("test_efficientnet").build(3, 10, 32).state_dict())
    weights["conv_stem.weight"] = weights["conv_stem.weight"][:2].clone()
    save_file(weights, tmp_path / "test_efficientnet.safetensors", {"norm": "mean 0.5 std 0.5"})
    with pytest.raises(DataError, match=r"is of another network: 'conv_stem\.weight'"):
        make_plan(compose("search", ["+target=xeon_int8", f"out={tmp_path / 'run'}", "baselines=[test_efficientnet]",
                                     f"pretrained.folder={tmp_path}"]), Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_what_does_not_move_boxes_is_refused_before_the_trials(hwnas_home, tmp_path):
    root = write_coco(tmp_path / "shapes", {"train": 20})
    with pytest.raises(ConfigError, match="do not move boxes"):
        make_plan(compose("search", ["+target=xeon_int8", "dataset=coco", f"dataset.root={root}", "task=multilabel",
                                     "baselines=[]", "finalists.recipe.mixup=0.2"]), Console(quiet=True))


def test_a_worker_needs_no_weights_of_baselines(tmp_path, monkeypatch):
    given = []
    read = planning.make_plan
    monkeypatch.setattr("hwnas.worker.make_plan", lambda *values, **more: given.append(read(*values, **more)))
    explorer = SimpleNamespace(work=lambda console: None)
    monkeypatch.setattr("hwnas.worker.explorer_of", lambda _: SimpleNamespace(prepare=lambda *_: explorer))
    run = RunFolder.create(tmp_path / "run")
    config = compose("search", ["+target=xeon_int8", "baselines=[resnet10t]", "pretrained=true", "cuts=true",
                                "pretrained.folder=/nowhere"])
    run.write_config(OmegaConf.to_yaml(config))
    optuna.create_study(storage=database_path(run.path))
    assert worker([f"run={run.path}"]) == 0
    assert given[0].baselines == ()


def test_baselines_are_tried_on_smaller_images_too_and_cut(hwnas_home, tmp_path, capsys):
    given = ["+target=xeon_int8", f"out={tmp_path / 'run'}", "baselines=[test_efficientnet]", "dataset.image_size=32"]
    plan = make_plan(compose("search", [*given, "image_sizes=[24,32,16]"]), Console(quiet=True))
    sizes = {baseline.id: baseline.shape.image_size for baseline in plan.baselines}
    assert sizes == {"test_efficientnet": 32, "test_efficientnet-stem1": 32, "test_efficientnet-24px": 24,
                     "test_efficientnet-16px": 16}
    assert {baseline.name for baseline in plan.baselines} == {"test_efficientnet"}  # the best of them is the rival
    given[2] = "baselines=[test_efficientnet,resnet10t,mobilevitv2_050]"
    plan = make_plan(compose("search", [*given, "cuts=true"]), Console())
    ids = {baseline.id for baseline in plan.baselines}
    assert {"test_efficientnet-cut_early-32px", "resnet10t-cut_early-32px"} <= ids
    said = capsys.readouterr().err
    assert "no obvious cuts of mobilevitv2_050: around=mobilevitv2_050: places of its maps attend" in said
    sized = make_plan(compose("search", [*given, "cuts=true", "image_sizes=[24,32]"]), Console(quiet=True))
    cuts = [id.removesuffix("-32px") for id in ids if "-cut" in id]
    assert {baseline.id for baseline in sized.baselines} - ids == {
        f"{name}-24px" for name in ("test_efficientnet", "resnet10t", "mobilevitv2_050", *cuts)}
    with pytest.raises(ConfigError, match="48 px is larger than the search's images"):
        make_plan(compose("search", [*given, "image_sizes=[48]"]), Console(quiet=True))


def test_a_plan_writes_nothing(tmp_path):
    plan = make_plan(compose("search", ["+target=xeon_int8", f"out={tmp_path / 'run'}", "baselines=[]"]),
                     Console(quiet=True))
    assert plan.out == tmp_path / "run"
    assert not list(tmp_path.iterdir())


def fill(root, value):
    """Two classes of eight grey images, none like another, all files of one size."""
    for row in range(16):
        (root / "ab"[row % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), value + row).save(root / "ab"[row % 2] / f"{row}.png", compress_level=0)


def test_other_pixels_in_files_of_the_same_size_and_age_are_refused(tmp_path):
    fill(tmp_path / "data", 100)
    plan = make_plan(compose("search", ["+target=epyc_int8", "dataset=imagefolder", f"dataset.root={tmp_path / 'data'}",
                                        f"out={tmp_path / 'run'}", "baselines=[]"]), Console(quiet=True))
    run = RunFolder.create(plan.out, False)

    def begin():
        dataset = load_data(plan, run, {}, Console(quiet=True))
        open_run_study(plan, run, dataset, (), search_options(plan, 1.0), {"accuracy": "proxy"})

    begin()
    begin()
    ages = {path: path.stat() for path in (tmp_path / "data").rglob("*.png")}
    fill(tmp_path / "data", 200)
    for path, age in ages.items():
        assert path.stat().st_size == age.st_size
        os.utime(path, ns=(age.st_atime_ns, age.st_mtime_ns))
    with pytest.raises(StudyError, match="cannot resume, data set was imagefolder"):
        begin()
