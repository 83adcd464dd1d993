"""`hwnas train`: what it leaves, that an interruption changes no bit, and what it refuses in one line."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from deployment_fixtures import spoil
from safetensors.torch import load_file, save_file

from hwnas.cli.command import as_typed, compose, run_command
from hwnas.cli.progress import Console
from hwnas.errors import DataError, StudyError, TrainingError
from hwnas.networks.around import obvious_cuts
from hwnas.networks.baselines import Baseline
from hwnas.networks.export import stored_fingerprint
from hwnas.networks.network import FoundNetwork, Shape, TimmNetwork, build, load_weights, read_network
from hwnas.space.architecture import Architecture
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import ModelFolder, RunFolder
from hwnas.train import main
from hwnas.training import job as training_job
from hwnas.training import place
from hwnas.training.batches import Batches
from hwnas.training.job import TrainingJob, make_job, read_summary, train
from hwnas.training.loop import Checkpoint, make_optimizer, make_schedule, seeded
from hwnas.training.recipe import FINE_TUNING, LONG_TRAINING, Recipe

NETWORK = Architecture((("ds_r1_k3_s2_c8",), ("ir_r1_k3_s1_e2_c8_se0.25",)), 8, 1, 16, "relu", 8, 1, 10)
TINY = ["dataset=digits", "epochs=3", "batch_size=32", "train_images=96", "threads=1", "ema_decay=0.9",
        "rand_augment=5", "mixup=0.2", "cutmix=1.0", "erase=0.5", "zoom=0.1", "device=cpu"]
QUIET = Console(quiet=True)
FILES = {"architecture.yaml", "weights.safetensors", "weights.json", "model.onnx", "manifest.json", "log.csv",
         "predictions.npz", "summary.json", "card.md"}
TEACHER = "test_resnet"  # timm's smallest


@pytest.fixture(scope="module")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("network") / "architecture.yaml"
    path.write_text(NETWORK.to_yaml())
    return path


@pytest.fixture
def overrides(architecture: Path, tmp_path: Path) -> list[str]:
    return [f"architecture={architecture}", f"out={tmp_path / 'out'}", *TINY]


def job_of(overrides: list[str], *more: str) -> TrainingJob:
    return make_job(compose("train", as_typed([*overrides, *more]), target=False), QUIET)


@pytest.fixture(scope="module")
def checked(architecture: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    return job_of([f"architecture={architecture}", f"out={tmp_path_factory.mktemp('checked') / 'out'}", *TINY])


@pytest.fixture
def job(checked: TrainingJob, tmp_path: Path) -> TrainingJob:
    """The job of the options TINY, with a folder of its own."""
    return at(checked, tmp_path / "job")


def at(job: TrainingJob, folder: Path, **recipe: Any) -> TrainingJob:
    """The job in this folder, with these changes of its recipe."""
    folder.mkdir()
    return replace(job, folder=ModelFolder(folder), recipe=replace(job.recipe, **recipe))


def command(overrides: list[str], *more: str) -> int:
    return run_command(main, "train", "usage", ["-q", *as_typed([*overrides, *more])], target=False)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name not in (".training.lock", ".hwnas.json")}


@pytest.fixture(scope="module")
def whole(architecture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert command([f"architecture={architecture}", f"out={out}", *TINY]) == 0
    return out


def after(epoch: int, act: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Call `act` just before the checkpoint of `epoch` is written."""
    save = Checkpoint.save

    def saving(self: Checkpoint, path: Path) -> None:
        if len(self.rows) == epoch:
            act()
        save(self, path)

    patch.setattr(Checkpoint, "save", saving)


def stop() -> None:
    raise KeyboardInterrupt


def log(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "log.csv").read_text().splitlines()))


def weights(folder: Path) -> bytes:
    return (folder / "weights.safetensors").read_bytes()


def test_a_training_leaves_every_file_and_no_checkpoint(whole: Path) -> None:
    assert names(whole) == FILES
    rows = log(whole)
    assert list(rows[0]) == ["epoch", "lr", "train_loss", "top1_validation", "top1_validation_ema", "seconds"]
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert float(rows[2]["lr"]) < float(rows[0]["lr"]) <= 0.01
    summary = json.loads((whole / "summary.json").read_text())
    with np.load(whole / "predictions.npz") as found:
        right = int((found["labels"] == found[NETWORK.id]).sum())
    assert summary["top1_test"] == right / summary["n_test"]
    assert summary["top1_test_low"] < summary["top1_test"] < summary["top1_test_high"]
    assert summary["parity_top1_agreement"] >= 0.995
    card = (whole / "card.md").read_text()
    assert f"{100 * summary['top1_test']:.2f} % (95 %: " in card
    assert 'InferenceSession("model.onnx"' in card
    assert "epochs 3, batch_size 32" in card
    assert summary["seconds_training"] == pytest.approx(sum(float(row["seconds"]) for row in rows), rel=1e-4)
    chosen = {"average": "top1_validation_ema", "last": "top1_validation"}[summary["weights"]]
    assert summary["top1_validation"] == pytest.approx(float(rows[2][chosen]), abs=1e-6)
    assert float(rows[2][chosen]) == max(float(rows[2]["top1_validation"]), float(rows[2]["top1_validation_ema"]))


def test_the_exported_file_says_how_to_feed_it_and_holds_the_weights(whole: Path) -> None:
    about = {entry.key: entry.value for entry in onnx.load(str(whole / "model.onnx")).metadata_props}
    assert about["hwnas_id"] == NETWORK.id
    assert json.loads(about["class_names"]) == [str(digit) for digit in range(10)]
    assert about["recipe"] == json.loads((whole / "summary.json").read_text())["recipe"]
    model = build(Architecture.from_yaml((whole / "architecture.yaml").read_text()))
    load_weights(model, whole / "weights.safetensors", "weights", 10)


def test_resumed_gives_the_same_bytes(overrides: list[str], whole: Path, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        after(2, stop, patch)
        assert command(overrides) == 130
    found = Checkpoint.load(tmp_path / "out" / "checkpoint.safetensors")
    assert found is not None
    assert len(found.rows) == 1
    torch.manual_seed(1)
    assert command(overrides) == 0
    assert weights(tmp_path / "out") == weights(whole)
    columns = ("epoch", "lr", "train_loss", "top1_validation", "top1_validation_ema")
    logs = [[[row[key] for key in columns] for row in log(folder)] for folder in (tmp_path / "out", whole)]
    assert logs[0] == logs[1]


def test_a_full_disk_keeps_the_last_whole_epoch(overrides, whole, tmp_path, capsys, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        after(3, lambda: patch.setattr(os, "fsync", full), patch)
        assert command(overrides) == 2
    error, = capsys.readouterr().err.splitlines()
    assert "checkpoint.safetensors: No space left on device. Free space" in error
    assert names(tmp_path / "out") == {"checkpoint.safetensors", "log.csv"}
    assert command(overrides) == 0
    assert weights(tmp_path / "out") == weights(whole)


def trained(job: TrainingJob) -> dict[str, torch.Tensor]:
    result = train(job, QUIET)
    return {name: tensor.clone() for name, tensor in result.model.state_dict().items()}


OPTIMIZERS = next(each for each in fields(Recipe) if each.name == "optimizer").metadata["rule"].choices


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", *(
    pytest.param(optimizer, marks=pytest.mark.soak) for optimizer in OPTIMIZERS)])
def test_every_optimizer_is_resumed_bit_for_bit(optimizer, job, tmp_path, monkeypatch):
    first, second = (at(job, tmp_path / name, optimizer=optimizer, epochs=2, lr=0.002, lr_end=0.0, ema_decay=0.0)
                     for name in ("first", "second"))
    with monkeypatch.context() as patch:
        after(2, stop, patch)
        with pytest.raises(KeyboardInterrupt):
            train(second, QUIET)
    one, other = trained(first), trained(second)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_learning_rate_rises_and_falls() -> None:
    recipe = replace(LONG_TRAINING, warmup=0.2, lr=1.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    found = make_schedule(optimizer, recipe, 50)
    rates = []
    for step in range(50):
        found.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(0.04)
    assert rates[:11] == sorted(rates[:11])
    assert max(rates) == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.9


def test_a_torn_checkpoint_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    Checkpoint({}, 1, [], {"weight": torch.zeros(100)}, {}, {}).save(path)
    content = path.read_bytes()
    save_file({"a": torch.zeros(1)}, path)
    for torn, why in ((content[:-100], "is torn"), (content[:50], "is torn"), (b"", "is torn"),
                      (path.read_bytes(), "not a checkpoint of hwnas")):
        path.write_bytes(torn)
        with pytest.raises(StudyError, match=f"{path}.* {why}"):
            Checkpoint.load(path)
        assert path.read_bytes() == torn


def test_a_checkpoint_of_another_training_is_refused(overrides: list[str], tmp_path: Path, capsys, monkeypatch) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(replace(NETWORK, head=24).to_yaml())
    with monkeypatch.context() as patch:
        after(2, stop, patch)
        command(overrides)
    capsys.readouterr()
    for change, named in (("lr=0.02", "lr was 0.01, is 0.02"), ("train_images=64", "train_images was 98, is 62"),
                          ("split_seed=1", "dataset.fingerprint was"),
                          (f"architecture={other}", "network was stem8s1 ds_r1_k3_s2_c8")):
        assert command(overrides, change) == 2
        error, = capsys.readouterr().err.splitlines()
        assert named in error
        assert "another out=FOLDER" in error


def test_a_finished_training_is_not_done_again(whole: Path, architecture: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(training_job, "_JobTraining", lambda job: pytest.fail("trained again"))
    mine, before = [f"architecture={architecture}", f"out={whole}", *TINY], weights(whole)
    assert command(mine, "threads=2") == 0  # another number of threads is no other training
    assert "test top-1" in capsys.readouterr().err
    cut = {**json.loads((whole / "summary.json").read_text()), "network": f"cut:x@48 relu6 {900 * 'y'}"}
    with monkeypatch.context() as patch:
        patch.setattr("hwnas.train.read_summary", lambda job, console: cut)
        assert command(mine) == 0
    assert "cut:x@48 relu6 …: test top-1" in capsys.readouterr().err
    assert command(mine, "lr=0.02") == 2
    assert "summary.json is of another training: lr was 0.01, is 0.02" in capsys.readouterr().err
    assert weights(whole) == before


def test_a_loss_that_is_not_finite_names_epoch_and_rate(overrides, tmp_path, capsys, monkeypatch):
    from_step = Batches.from_step

    def spoilt(self: Batches, first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step, (images, targets) in enumerate(from_step(self, first), first):
            yield images * (float("nan") if step == 8 else 1.0), targets

    monkeypatch.setattr(Batches, "from_step", spoilt)
    assert command(overrides) == 1
    error, = capsys.readouterr().err.splitlines()
    assert "TrainingError: training: loss is nan after 8 steps, learning rate 0.00" in error
    found = Checkpoint.load(tmp_path / "out" / "checkpoint.safetensors")
    assert found is not None
    assert len(found.rows) == 1
    assert all(tensor.isfinite().all() for tensor in found.model.values())


def test_out_of_memory_is_one_line(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def large(*_: object, **__: object) -> None:
        torch.empty(1 << 50)

    monkeypatch.setattr("torch.nn.functional.cross_entropy", large)
    with pytest.raises(TrainingError, match="out of memory while training at batch 12, 8 px"):
        train(job, QUIET)


@pytest.fixture
def tried(tmp_path: Path) -> RunFolder:
    """A run with one network in trials.csv, another and a baseline in models/."""
    run = RunFolder.create(tmp_path / "run")
    run.write_config({"seed": 0})
    run.write_trials([{"number": 0, "id": NETWORK.id, "architecture": str(NETWORK)}])
    for network in (FoundNetwork(replace(NETWORK, head=32)), TimmNetwork(Baseline(TEACHER, 1), Shape(1, 8, 10))):
        write_atomic(run.model(network.id).path / network.file, network.describe())
    return run


def test_a_network_of_a_run_is_named_by_its_id_or_its_text(overrides: list[str], tried: RunFolder) -> None:
    other = replace(NETWORK, head=32)
    for given, wanted in ((NETWORK.id, NETWORK), (other.id, other), (f"{TEACHER}-stem1", Baseline(TEACHER, 1))):
        assert str(job_of(overrides, f"architecture={given}", f"run={tried.path}").network) == str(wanted)
    assert job_of(overrides, f"architecture={NETWORK}").network == FoundNetwork(NETWORK)


def test_images_that_are_not_the_runs_are_told_before_the_training(overrides, tried, capsys):
    mine = compose("train", as_typed([*overrides, f"architecture={NETWORK.id}", f"run={tried.path}"]), target=False)
    data = make_job(mine, QUIET).dataset
    for fingerprint, told in ((data.fingerprint, False), ("other", True)):
        tried.write_json(tried.environment, {
            "format": "hwnas-environment/1", "dataset": {"fingerprint": fingerprint, "image_size": data.image_size}})
        make_job(mine, Console(quiet=True))
        assert ("does not compare with its front" in capsys.readouterr().err) == told


def test_bf16_trains_otherwise_than_fp32(job: TrainingJob, tmp_path: Path) -> None:
    one, other = (trained(at(job, tmp_path / precision, epochs=1, precision=precision))
                  for precision in ("bf16", "fp32"))
    assert all(tensor.dtype == other[name].dtype for name, tensor in one.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in one.items())


PRETRAINED = "test_efficientnet"


@pytest.fixture
def pretrained(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options that train a timm network of grey images from weights of colour ones."""
    monkeypatch.setenv("HWNAS_WEIGHTS", str(tmp_path))
    with seeded(3):
        save_file(Baseline(PRETRAINED).build(3, 1000, 32).state_dict(), tmp_path / f"{PRETRAINED}.safetensors",
                  {"norm": "mean 0.5,0.5,0.5 std 0.25,0.25,0.25", "pad": "same", "licence": "MIT"})
    return [*overrides, "architecture=null", f"model=timm:{PRETRAINED}", "dataset.image_size=16", "pretrained=true"]


def test_pretrained_weights_are_trained_on_as_they_ask_and_named(pretrained: list[str], tmp_path: Path, capsys) -> None:
    assert command(pretrained, "epochs=1") == 0
    folder = tmp_path / "out"
    sha256 = hashlib.sha256((tmp_path / f"{PRETRAINED}.safetensors").read_bytes()).hexdigest()
    job = job_of(pretrained, "epochs=1")
    assert (job.dataset.mean, job.dataset.std) == ((0.5,), (0.25,))
    start = hashlib.sha256(f"{sha256}|(0.5,)|(0.25,)".encode()).hexdigest()[:12]
    assert job.identity["network"] == f"timm:{PRETRAINED} pad_type=same pretrained={start}"
    about = {entry.key: entry.value for entry in onnx.load(str(folder / "model.onnx")).metadata_props}
    assert (about["mean"], about["std"]) == ("[0.5]", "[0.25]")
    assert json.loads(about["pretrained"]) == {
        "file": f"{PRETRAINED}.safetensors", "sha256": sha256, "licence": "MIT", "origin": "unknown", "mean": [0.5],
        "std": [0.25]}
    card = (folder / "card.md").read_text()
    for text in (f"SHA-256 `{sha256}`. Licence: MIT. Origin: unknown.", "mean = [0.5], std = [0.25]",
                 "read_network(folder, Shape(1, 16, 10)).build()"):
        assert text in card
    network = read_network(ModelFolder(folder), Shape(1, 16, 10))
    assert network is not None
    load_weights(network.build(), folder / "weights.safetensors", "w", 10)
    assert network.fed(job.dataset.at_size(8)).mean == (0.5,)

    tensors = load_file(tmp_path / f"{PRETRAINED}.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / f"{PRETRAINED}.safetensors")
    assert command(pretrained, "epochs=1") == 2
    assert re.search(r"pretrained=[0-9a-f]{12}, is timm:test_efficientnet pretrained=", capsys.readouterr().err)


def test_pretrained_weights_have_a_recipe_of_their_own(pretrained: list[str], overrides: list[str]) -> None:
    begun = [text for text in pretrained if text.split("=")[0] not in ("epochs", "ema_decay")]
    named = {"shift": 0.1, "batch_size": 32}  # of these only what the user or conf/train.yaml names differs
    for options, recipe in ((begun, FINE_TUNING), ([*begun, "pretrained=false"], LONG_TRAINING)):
        read = job_of(options).recipe
        for key in ("epochs", "lr", "warmup", "ema_decay", "layer_decay"):
            assert getattr(read, key) == getattr(recipe, key), key
        assert {key: getattr(read, key) for key in named} == named
    assert job_of(begun, "lr=0.5", "pretrained.use=true").recipe.lr == 0.5


WRONG = NETWORK.id[:-1] + "x"


@pytest.mark.parametrize(("more", "why"), [
    ("architecture=/nowhere", "/nowhere"),
    ("model=timm:resnet18", "architecture=PATH .*model=timm:NAME"), ("architecture=null", "which network"),
    ("architecture=null model=resnet18", "model must be timm:NAME"),
    ("architecture=null model=timm:resnet10x", "resnet10x.*resnet10t"), ("dataset.image_size=16", "8 px.* 16"),
    ("device=cuda", "device=cuda: torch .*finds no CUDA"),
    ("precision=bf16", "this CPU has no bf16"),
    ("architecture=classes.yaml", "made for 7 classes, the data set digits has"),
    ("architecture=channels.yaml", "made for 3 channels, the data set digits has"),
    (f"architecture={WRONG} run=run", rf"Did you mean {NETWORK.id}\?.*lists the 1"),
    (f"architecture={WRONG}", f"there is no file {WRONG}.*run=FOLDER"),
    (f"architecture={WRONG} run=.", "is not a run folder"),
    ("TEXT", "word 5.*must be <activation>"),
    ("PRETRAINED pretrained.folder=nowhere", f"there are no pretrained weights of {PRETRAINED} in .*nowhere"),
    ("PRETRAINED pretrained.file=classes.yaml", "pretrained weights .*classes.yaml is text"),
    ("PRETRAINED model=null architecture=classes.yaml", "pretrained goes with model=timm:NAME")])
def test_bad_options_are_one_line(more, why, pretrained, overrides, tried, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for key, value in (("classes", 7), ("channels", 3)):
        (tmp_path / f"{key}.yaml").write_text(replace(NETWORK, **{key: value}).to_yaml())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(place, "_BF16", set())
    words = [f"architecture={str(NETWORK)[:-4]}" if word == "TEXT" else word for word in more.split()]
    begun = pretrained if words[0] == "PRETRAINED" else overrides
    assert command(begun, *(word for word in words if word != "PRETRAINED")) == 2
    error, = capsys.readouterr().err.splitlines()
    assert re.search(why, error), error


def test_each_layer_has_its_share_of_the_rate_of_the_one_behind_it() -> None:
    model: Any = Baseline(PRETRAINED).build(3, 4, 32)
    recipe = Recipe("x", epochs=1, lr=0.1, lr_end=0.0, layer_decay=0.5, warmup=0.3)
    optimizer = make_optimizer(model, recipe)
    steps = make_schedule(optimizer, recipe, 20)
    for step in range(10):
        steps.step_update(step)
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    assert len(groups) == len(list(model.parameters()))
    last = list(model.blocks)[-1][-1]
    depth = sum(map(len, model.blocks))  # a block is a layer, the last one with the head's convolution
    whole = groups[id(model.classifier.weight)]["lr"]
    for module, layer in ((model.classifier, 0), (model.conv_head, 1), (last, 1), (model.conv_stem, 1 + depth)):
        for parameter in module.parameters():
            group = groups[id(parameter)]
            assert group["lr"] == pytest.approx(0.5**layer * whole)
            assert group["weight_decay"] == (0.05 if parameter.ndim > 1 else 0)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, path = build(NETWORK), tmp_path / "w.safetensors"
    for other, why in ((replace(NETWORK, classes=7), "w knows 7 classes, the data set has 10"),
                       (replace(NETWORK, head=24), r"w is of another network: '.*' has shape"),
                       (replace(NETWORK, head=0), r"w is of another network: .* is in only one of them")):
        save_file(build(other).state_dict(), path)
        with pytest.raises(DataError, match=why):
            load_weights(model, path, "w", 10)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="is torn or no file of tensors"):
        load_weights(model, path, "w", 10)


@pytest.mark.parametrize(("length", "why"), [(90_000_000, "8388608 are read"), (2**62, "8388608 are read"),
                                             (None, "cannot be read")])
def test_a_header_that_asks_for_more_than_its_file_is_refused(tmp_path: Path, length: int | None, why: str) -> None:
    """And one that is as large as it says, which the library takes gigabytes to read."""
    header = b'{"a":{"dtype":"F32","shape":[10000000000],"data_offsets":[0,40000000000]}}'
    path = tmp_path / "w.safetensors"
    path.write_bytes((length or len(header)).to_bytes(8, "little") + header)
    if length == 90_000_000:
        os.truncate(path, length + 8)
    with pytest.raises(DataError, match=why):
        load_weights(build(NETWORK), path, "w", 10)
    assert stored_fingerprint(path) is None
    with pytest.raises(StudyError, match="is torn or no checkpoint"):
        Checkpoint.load(path)


def batches(job: TrainingJob, epoch: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = Batches(job.train, job.dataset, job.recipe, seed)
    return list(islice(made.from_step((epoch - 1) * made.per_epoch), made.per_epoch))


def test_batches_follow_from_seed_and_epoch_alone(job: TrainingJob) -> None:
    with seeded(0):
        one = batches(job, 2)
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        again, later, other = batches(job, 2), batches(job, 3), batches(job, 2, seed=1)
    assert len(one) == 8
    for (images, targets), (same, shares) in zip(one, again, strict=True):
        assert torch.equal(images, same)
        assert torch.equal(targets, shares)
    assert not torch.equal(one[0][0], later[0][0])
    assert not torch.equal(one[0][0], other[0][0])


STILL = {"rand_augment": 0, "mixup": 0.0, "cutmix": 0.0, "erase": 0.0, "zoom": 0.0, "shift": 0.0}


def test_an_epoch_shows_every_image_once_when_nothing_changes_them(job: TrainingJob, tmp_path: Path) -> None:
    job = replace(at(job, tmp_path / "still", **STILL), train=job.train.take(np.arange(96)))  # eight batches of twelve
    with seeded(0):
        found = batches(job, 1)
    shown = torch.cat([images for images, _ in found]).flatten(1)
    expected = torch.from_numpy(job.dataset.normalise(job.train.images)).flatten(1)
    assert sorted(map(tuple, shown.tolist())) == sorted(map(tuple, expected.tolist()))
    labels = torch.cat([targets for _, targets in found])
    assert torch.equal(labels.bincount(minlength=10), torch.from_numpy(job.train.labels).bincount(minlength=10))
    assert not torch.equal(labels, torch.from_numpy(job.train.labels))


def test_each_augmentation_changes_images_and_mixing_the_targets(job: TrainingJob, tmp_path: Path) -> None:
    with seeded(0):
        plain = batches(at(job, tmp_path / "plain", **STILL), 1)[0]
        for key, value in {"rand_augment": 9, "mixup": 0.4, "cutmix": 1.0, "erase": 1.0, "shift": 0.2}.items():
            images, targets = batches(at(job, tmp_path / key, **{**STILL, key: value}), 1)[0]
            assert not torch.equal(images, plain[0]), key
            assert images.isfinite().all()
            if key in ("mixup", "cutmix"):
                assert torch.allclose(targets.sum(1), torch.ones(12))
            else:
                assert torch.equal(targets, plain[1])
        strong = at(job, tmp_path / "strong", rand_augment=10)
        coloured = replace(job.dataset, mean=(0.5,) * 3, std=(0.3,) * 3, channels=3)
        split = replace(job.train, images=np.repeat(job.train.images, 3, 1))
        images, _ = next(Batches(split, coloured, strong.recipe, 0).from_step(0))
    assert images.shape == (12, 3, 8, 8)
    assert not torch.equal(images[:, 0], images[:, 1])


def test_a_summary_that_is_none_is_refused(job: TrainingJob) -> None:
    assert read_summary(job, QUIET) is None
    for content, why in (("{", "torn, not whole JSON"), ("{}", "not the summary of a training")):
        job.summary.write_text(content)
        with pytest.raises(StudyError, match=why):
            read_summary(job, QUIET)


@pytest.mark.soak
def test_a_damaged_file_of_a_finished_training_is_made_again(overrides: list[str], tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert command(overrides) == 0
    made = {name: (out / name).read_bytes() for name in ("model.onnx", "weights.safetensors", "summary.json")}
    capsys.readouterr()
    for name in ("model.onnx", "manifest.json", "weights.safetensors"):
        if name == "manifest.json":
            (out / name).unlink()
        else:
            spoil(out / name)
        assert command(overrides) == 0
        said = capsys.readouterr().err.splitlines()[0]
        assert name in said
        assert said.endswith("Trained again.")
        assert {path: (out / path).read_bytes() for path in ("model.onnx", "weights.safetensors")} == \
            {path: made[path] for path in ("model.onnx", "weights.safetensors")}
    assert names(out) == FILES


def test_a_cut_of_a_pretrained_network_is_trained_on_as_it_was_searched(pretrained, tmp_path, capsys):
    cut, plain = (obvious_cuts(around, Shape(1, 16, 10), ())["cut_early"] for around in (
        f"{PRETRAINED}+same", PRETRAINED))
    cut_options = [*pretrained, "model=null", f"architecture={cut}"]
    job = job_of(cut_options)
    start = job.network.pretrained
    assert start is not None
    assert job.identity["network"] == f"{cut} pretrained={start.key}"
    source = TimmNetwork(Baseline(PRETRAINED, pad_type="same", pretrained=start), Shape(1, 16, 1000)).start()
    kept = {name: tensor for name, tensor in job.network.start().state_dict().items() if name.startswith("blocks")}
    assert kept
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in kept.items())
    assert job_of(cut_options, "pretrained=false").network.pretrained is None
    assert command(pretrained, "model=null", f"architecture={plain}", f"out={tmp_path / 'other'}") == 2
    assert "another padding" in capsys.readouterr().err
