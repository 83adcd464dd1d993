"""The supernet: what is shared, that an interruption changes no bit, and what is refused in one line."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from training_fixtures import stripes

from hwnas.accuracy.estimator import Prepares, load_estimator
from hwnas.accuracy.supernet import CHECKPOINT, Supernet
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset, Task, cross_entropy
from hwnas.errors import ConfigError, DataError, SpaceError, StudyError, TrainingError, UserError
from hwnas.networks.build import build
from hwnas.space.search_space import SearchSpace
from hwnas.testing import check_estimator
from hwnas.training.loop import Checkpoint, Training
from hwnas.training.supernet import (
    Curriculum,
    SupernetTraining,
    bank_of,
    covering,
    extreme,
    inherit,
    load_inherited,
    note_other_split,
    recalibrate,
)

SPACE = """
image_size: 16
stem: {width: [8, 16], stride: 2}
head: [16, 24]
activation: relu
stages:
  - {channels: [8, 16], repeats: [1, 2], stride: 1, op: [ds, ir_e2, conv_k3], kernel: [3, 5], se: [0, 0.5], skip: true}
  - {channels: [16, 24], repeats: [1, 3], stride: 2, op: [ir_e2, ir_e3], kernel: [3, 5], se: 0, skip: [true, false]}
"""
QUIET = Console(quiet=True)
SHORT: dict[str, Any] = {"epochs": 3, "min_steps": 0, "batch_size": 32, "sandwich": 0.5, "threads": 1,
                         "training_threads": 1, "train_images": 96, "recalibration_images": 64}


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> SearchSpace:
    return SearchSpace.load(write(tmp_path_factory.mktemp("space")), channels=1, classes=4)


def write(folder: Path, text: str = SPACE) -> Path:
    path = folder / "small.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset("stripes", stripes(256, 0), stripes(80, 1), stripes(80, 2), ("a", "b", "c", "d"), 1, 16,
                   (0.3,), (0.2,), "stripes")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def supernet(dataset: Dataset, space: SearchSpace, **changes: Any) -> Supernet:
    found = load_estimator("supernet", dataset=dataset, space=space, config={**SHORT, **changes})
    assert isinstance(found, Supernet)
    return found


@pytest.fixture(scope="module")
def trained(space: SearchSpace, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user folder in which the short supernet is trained, to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWNAS_HOME", str(folder))
        supernet(dataset, space).prepare(QUIET)
    return folder


@pytest.fixture
def first(trained: Path, home: Path, space: SearchSpace, dataset: Dataset) -> Supernet:
    """The short supernet, trained by another."""
    shutil.copytree(trained, home)
    found = supernet(dataset, space)
    found.prepare(QUIET)
    assert not found.setup_here
    return found


def images_of(dataset: Dataset, n: int = 8) -> torch.Tensor:
    return torch.from_numpy(dataset.normalise(dataset.train.images[:n]))


@pytest.mark.parametrize("name", ["mnasnet_small", "fused", "nas_bench_macro"])
def test_every_network_of_a_space_has_its_weights_in_the_bank(name: str) -> None:
    space = SearchSpace.load(name, channels=3, classes=10)
    bank = bank_of(space)
    for row in space.sample(np.random.default_rng(0), 25):
        architecture = space.decode(space.to_params(row))
        network = build(architecture)
        shapes = {name: tensor.shape for name, tensor in bank.slices(network, architecture)}
        assert shapes == {name: tensor.shape for name, tensor in network.named_parameters()}


def test_the_covering_networks_have_every_branch_at_its_largest(space: SearchSpace) -> None:
    found = {(block.kind, block.kernel, block.expansion, block.se) for network in covering(space)
             for block in network.staged_blocks()[1]}
    assert {("ds", 5, 1.0, 0.5), ("ds", 3, 1.0, 0.5), ("ir", 5, 2.0, 0.5), ("ir", 3, 2.0, 0.5), ("cn", 3, 1.0, 0.0)} \
        == found


def test_a_sub_network_is_the_built_network_with_shared_weights(space: SearchSpace, dataset: Dataset) -> None:
    bank, images = bank_of(space), images_of(dataset)
    for row in space.sample(np.random.default_rng(1), 6):
        architecture = space.decode(space.to_params(row))
        network = build(architecture)
        with torch.no_grad():
            for name, shared in bank.slices(network, architecture):
                dict(network.named_parameters())[name].copy_(shared)
        torch.testing.assert_close(bank(images, architecture), network(images))


def test_gradients_reach_just_the_slices_that_were_used(space: SearchSpace, dataset: Dataset) -> None:
    bank = bank_of(space)
    smallest = space.decode(extreme(space, {}, min))
    bank(images_of(dataset), smallest).sum().backward()
    weight = bank.shared["conv_stem/weight/k3"].grad
    assert weight is not None
    assert weight[:8].abs().sum() > 0
    assert weight[8:].abs().sum() == 0
    untouched = [key for key, tensor in bank.shared.items() if tensor.grad is None]
    assert any(key.startswith("0/0/cn/") for key in untouched)
    assert any(key.startswith("1/2/") for key in untouched)
    assert not any(key.startswith("0/0/ds/conv_pw") for key in untouched)


def test_a_sandwich_has_the_largest_and_the_smallest_of_its_operations(space: SearchSpace) -> None:
    curriculum = Curriculum(space, 2, 1.0, 0.1, 0.4)
    step = curriculum.step(0.9, np.random.default_rng(0))
    big, small, *others = step.networks
    assert len(others) == 2
    assert step.distil
    assert big.macs == max(network.macs for network in covering(space))
    assert big.params > small.params
    kinds = [[stage[0].kind for stage in network.block_defs()] for network in (big, small)]
    assert kinds[0] == kinds[1]


def test_stages_open_one_after_the_other(space: SearchSpace) -> None:
    curriculum = Curriculum(space, 8, 0.0, 0.2, 0.4)
    own = space.decode(curriculum.largest).block_defs()

    def differing(done: float) -> int:
        """In how many stages a network of these has another operation than the largest, at most."""
        networks = [one for seed in range(20) for one in curriculum.step(done, np.random.default_rng(seed)).networks]
        return max(sum((a[0].kind, a[0].expansion) != (b[0].kind, b[0].expansion)
                       for a, b in zip(one.block_defs(), own, strict=True)) for one in networks)

    assert [differing(done) for done in (0.0, 0.25, 0.45, 1.0)] == [0, 1, 2, 2]


def test_batch_norm_is_measured_over_the_images_given(space: SearchSpace, dataset: Dataset) -> None:
    network = build(space.decode(extreme(space, {}, max)))
    recalibrate(network, dataset.train.images[:128], dataset)
    stem = network.conv_stem
    assert isinstance(stem, torch.nn.Module)
    expected = stem(images_of(dataset, 128)).mean((0, 2, 3))
    norm: Any = network.bn1
    torch.testing.assert_close(norm.running_mean, expected.detach(), rtol=1e-4, atol=1e-5)
    assert norm.momentum is not None
    before = norm.running_mean.clone()
    small = dataset.at_size(2)  # maps of one pixel, of which a batch of one image has no variance
    recalibrate(network, small.train.images[:129], small)
    assert not torch.equal(norm.running_mean, before)


def test_batch_norm_is_measured_alike_where_images_lie_class_by_class(space: SearchSpace, dataset: Dataset) -> None:
    """Folders of images do: each batch would hold one class, and have next to no variance."""
    shape = (256, *dataset.train.images.shape[1:])
    by_class = np.concatenate([np.full(shape, grey, np.uint8) for grey in (0, 255)])
    network = build(space.decode(extreme(space, {}, max)))
    recalibrate(network, by_class, dataset)
    stem, norm = network.conv_stem, cast("torch.nn.BatchNorm2d", network.bn1)
    assert isinstance(stem, torch.nn.Module)
    answers = stem(torch.from_numpy(dataset.normalise(by_class)))
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_var, answers.var((0, 2, 3)).detach(), rtol=0.05, atol=1e-5)


def test_it_keeps_the_contract_and_its_networks_learnt(space: SearchSpace, dataset: Dataset) -> None:
    estimator = supernet(dataset, space, epochs=12, train_images=256)
    assert isinstance(estimator, Prepares)
    assert estimator.setup_seconds == 0
    estimator.prepare(QUIET)
    assert estimator.setup_seconds > 0
    largest = space.decode(extreme(space, {}, max))
    check_estimator(estimator, largest)
    found = estimator.evaluate(largest)
    assert found.source == "supernet"
    assert found.value > 0.5
    assert not estimator.network(largest).training


def test_another_process_finds_it_trained(space: SearchSpace, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
                                          ) -> None:
    first, largest = supernet(dataset, space), space.decode(extreme(space, {}, max))
    first.prepare(QUIET)
    assert first.setup_here
    monkeypatch.setattr(SupernetTraining, "run", lambda *_: pytest.fail("trained twice"))
    second = supernet(dataset, space, path=str(first.folder))
    second.prepare(QUIET)
    assert not second.setup_here
    assert second.fingerprint == first.fingerprint
    assert replace(second.evaluate(largest), seconds=0) == replace(first.evaluate(largest), seconds=0)


def test_an_interruption_changes_no_bit(space: SearchSpace, dataset: Dataset, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    whole = supernet(dataset, space)
    whole.prepare(QUIET)
    path = whole.folder / CHECKPOINT
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "other"))
    broken, epoch = supernet(dataset, space), Training._epoch

    def until_the_third(self: Any, number: int, progress: Any) -> tuple[float, float]:
        if number == 3:
            raise KeyboardInterrupt
        return epoch(self, number, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_epoch", until_the_third)
        with pytest.raises(KeyboardInterrupt):
            broken.prepare(QUIET)
    broken.prepare(QUIET)
    one, other = (Checkpoint.load(each) for each in (path, broken.folder / CHECKPOINT))
    assert one is not None
    assert other is not None
    assert one.epoch == other.epoch == 3
    assert all(torch.equal(tensor, other.model[name]) for name, tensor in one.model.items())
    assert all(torch.equal(tensor, other.average[name]) for name, tensor in one.average.items())


def test_a_training_may_begin_with_its_weights(space: SearchSpace, dataset: Dataset, first: Supernet) -> None:
    largest, path = space.decode(extreme(space, {}, max)), first.folder / CHECKPOINT
    network = build(largest)
    assert load_inherited(network, largest, path)
    inherited = dict(first.network(largest).named_parameters())
    assert all(torch.equal(tensor, inherited[name]) for name, tensor in network.named_parameters())
    with pytest.raises(DataError, match="the supernet knows 4 classes, the architecture has 3"):
        load_inherited(network, replace(largest, classes=3), path)
    for data, said in ((dataset, ""), (replace(dataset, image_size=32, fingerprint="x"), ""),
                       (replace(dataset, fingerprint="x"), "another split of stripes")):
        stream = io.StringIO()
        note_other_split(path, data, Console(stream=stream))
        assert bool(said) == bool(stream.getvalue())
        assert said in stream.getvalue()
    other = path.with_name("weights.safetensors")
    save_file({"a": torch.zeros(1)}, other)
    assert not load_inherited(network, largest, other)


def test_cost_is_stated_before_it_starts(space: SearchSpace, dataset: Dataset, capsys: pytest.CaptureFixture[str]
                                         ) -> None:
    supernet(dataset, space).prepare(Console(quiet=True))
    said = capsys.readouterr().err.splitlines()
    assert "MB of shared weights" in said[0]
    assert "3 epochs of 3 steps of 32 images, about" in said[0]


@pytest.mark.parametrize(("other", "word"), [
    ({"seed": 1}, "training was"), ({"train_images": 64}, "train_images was 96, is 64"),
])
def test_a_checkpoint_of_another_training_is_refused(space: SearchSpace, dataset: Dataset, first: Supernet,
                                                     other: dict[str, Any], word: str) -> None:
    with pytest.raises(StudyError, match=word):
        supernet(dataset, space, path=str(first.folder), **other).prepare(QUIET)


def test_a_checkpoint_of_another_space_or_image_size_is_refused(space: SearchSpace, dataset: Dataset, first: Supernet,
                                                                tmp_path: Path) -> None:
    text = SPACE.replace("repeats: [1, 3]", "repeats: [1, 2]")
    other = SearchSpace.load(write(tmp_path, text), channels=1, classes=4)
    with pytest.raises(StudyError, match="space was small"):
        supernet(dataset, other, path=str(first.folder)).prepare(QUIET)
    with pytest.raises(StudyError, match=r"image_size was 16, is 8.* leave supernet\.path out"):
        supernet(dataset, space, path=str(first.folder), image_size=8).prepare(QUIET)


def test_a_torn_or_missing_checkpoint_is_one_line(space: SearchSpace, dataset: Dataset, first: Supernet,
                                                  tmp_path: Path) -> None:
    path = first.folder / CHECKPOINT
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StudyError, match="torn or no checkpoint"):
        supernet(dataset, space).prepare(QUIET)
    with pytest.raises(StudyError, match=f"no {CHECKPOINT} in"):
        supernet(dataset, space, path=str(tmp_path)).prepare(QUIET)


def test_a_full_disk_leaves_the_last_whole_epoch(space: SearchSpace, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    estimator, replaced = supernet(dataset, space), 0

    def full(*_: object) -> None:
        nonlocal replaced
        replaced += str(_[1]).endswith(CHECKPOINT)
        if replaced == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        kept(*_)  # type: ignore[arg-type]

    kept = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(UserError, match="Free space"):
            estimator.prepare(QUIET)
    found = Checkpoint.load(estimator.folder / CHECKPOINT)
    assert found is not None
    assert found.epoch == 1


def ask_by(loss: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `loss` be that of every data set's task."""
    monkeypatch.setattr(Dataset, "task", property(lambda data: Task(data.class_names, loss=loss)))


def test_a_loss_that_is_not_finite_stops_and_names_epoch_and_learning_rate(
        space: SearchSpace, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_by(lambda logits, *_: logits.sum() * float("nan"), monkeypatch)
    with pytest.raises(TrainingError, match="supernet: loss is nan in epoch 1 of 3, step 1 of 3, learning rate"):
        supernet(dataset, space).prepare(QUIET)


def test_a_loss_that_is_not_finite_is_seen_in_any_network_of_a_step(
        space: SearchSpace, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def last_is_not(*arguments: Any) -> torch.Tensor:
        nonlocal asked
        asked += 1
        return cross_entropy(*arguments) * (1.0 if asked % 2 else float("nan"))

    monkeypatch.setattr(SupernetTraining, "forecast", lambda _: "")
    ask_by(last_is_not, monkeypatch)
    estimator = supernet(dataset, space, sandwich=0, n_random=2)
    with pytest.raises(TrainingError, match="loss is nan in epoch 1 of 3"):
        estimator.prepare(QUIET)
    assert asked == 2


def test_out_of_memory_is_one_line(space: SearchSpace, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(SupernetTraining, "gradients", full)
    with pytest.raises(TrainingError, match="out of memory while training the supernet at batch 32, 16 px"):
        supernet(dataset, space).prepare(QUIET)


def test_what_cannot_share_weights_is_named(space: SearchSpace, dataset: Dataset, tmp_path: Path) -> None:
    sizes = SearchSpace.load(write(tmp_path, SPACE.replace("image_size: 16", "image_size: [16, 24]")), channels=1,
                             classes=4)
    with pytest.raises(ConfigError, match="image sizes 16, 24, which one supernet cannot share"):
        supernet(dataset, sizes)
    assert supernet(dataset, sizes, image_size=16).options.image_size == 16
    wider = SearchSpace.load(write(tmp_path, SPACE.replace("channels: [16, 24]", "channels: [16, 32]")), channels=1,
                             classes=4)
    with pytest.raises(SpaceError, match="of another space than the supernet"):
        inherit(bank_of(space), wider.decode(extreme(wider, {}, max)), dataset.train.images[:8], dataset)


@pytest.mark.parametrize(("config", "said"), [
    ({"epoch": 3}, "epoch"), ({"epochs": 0}, "supernet.epochs must be a whole number from 1"),
    ({"lr": "big"}, "supernet.lr must be a number"), ({"path": ""}, "supernet.path must be"),
])
def test_bad_options_are_one_line(config: dict[str, Any], said: str, space: SearchSpace, dataset: Dataset) -> None:
    with pytest.raises(UserError, match=said):
        load_estimator("supernet", dataset=dataset, space=space, config=config)


def test_fewer_images_than_a_batch_are_refused(space: SearchSpace, dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="there are 96 images to train on"):
        supernet(dataset, space, batch_size=128)
