"""Where networks are trained: every training goes where its recipe says, and what is refused or told in one line.

The fixture `away` stands in for a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from training_fixtures import AWAY, stripes_data

from hwnas.accuracy.proxy import Proxy
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset
from hwnas.errors import TargetError
from hwnas.networks.network import build
from hwnas.space.architecture import Architecture
from hwnas.system.libraries import release_memory
from hwnas.training import loop, place
from hwnas.training.batches import Batches, normalised, sent
from hwnas.training.loop import train
from hwnas.training.recipe import FINE_TUNING, FULL_TRAINING, PROXY, Recipe

ARCHITECTURE = Architecture((("ds_r1_k3_s2_c8",), ("ir_r1_k3_s2_e3_c16",)), 8, 1, 0, "relu", 16, 1, 4)
QUIET = Console(quiet=True)
SHORT = replace(PROXY, min_steps=2, max_steps=2, batch_size=16, threads=1, device=AWAY, ema_decay=0.9)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return replace(stripes_data(96), flip=True)


def test_a_short_training_goes_where_its_recipe_says_and_comes_back(dataset: Dataset, away: set[str]) -> None:
    everything = replace(SHORT, erase=0.5, mixup=0.2, rotate=10.0, zoom=0.1)
    tuning = replace(FINE_TUNING, epochs=1, max_steps=2, min_steps=0, batch_size=16, device=AWAY, threads=1)
    for recipe in (SHORT, everything, tuning):
        network = train(build(ARCHITECTURE), dataset.train, recipe=recipe, dataset=dataset, seed=0,
                        validation=dataset.validation)
        assert place.device_of(network).type == "cpu"
    Proxy(dataset, SHORT).evaluate(ARCHITECTURE, 0)
    assert away == {AWAY}


def test_images_that_are_changed_one_by_one_are_sent_too(dataset: Dataset) -> None:
    for recipe in (SHORT, replace(SHORT, rand_augment=5)):
        images, targets = next(Batches(dataset.train, dataset, recipe, 0).from_step(0))
        assert (images.device.type, targets.device.type, images.shape[0]) == (AWAY, AWAY, 12)


def test_a_long_training_goes_there(dataset: Dataset, away: set[str], tmp_path: Path) -> None:
    from hwnas.cli.command import as_typed, compose
    from hwnas.training.job import make_job
    from hwnas.training.job import train as train_job

    (tmp_path / "architecture.yaml").write_text(replace(ARCHITECTURE, classes=10, image_size=8).to_yaml())
    config = compose("train", as_typed([
        f"architecture={tmp_path / 'architecture.yaml'}", f"out={tmp_path / 'out'}", "dataset=digits", "epochs=1",
        "train_images=96", "batch_size=32", "threads=1", "device=cpu", "precision=fp32"]), target=False)
    job = make_job(config, QUIET)
    job = replace(job, recipe=replace(job.recipe, device=AWAY))
    done = train_job(job, QUIET)
    assert place.device_of(done.model).type == "cpu"
    assert away == {AWAY}
    assert job.checkpoint.is_file()
    identity = make_job(config, QUIET).identity
    assert identity == job.identity, "a checkpoint resumes on either device"


def test_a_device_and_the_cpu_see_the_same_batches(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = dataset.train.images[:20]
    assert torch.equal(normalised(sent(pixels, "cpu"), dataset), torch.from_numpy(dataset.normalise(pixels)))
    recipe = replace(SHORT, device="cpu", rotate=5.0)
    there = replace(recipe, device="cpu:0")  # the way of a GPU
    for most in (1 << 30, 0):  # kept there, or sent batch by batch
        monkeypatch.setattr("hwnas.training.batches._MOST_HELD", most)
        pairs = zip(*(islice(Batches(dataset.train, dataset, each, 3).from_step(0), 9) for each in (recipe, there)),
                    strict=True)
        assert all(torch.equal(mine, its) for batch in pairs for mine, its in zip(*batch, strict=True))


def test_a_gpu_is_refused_or_looked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (place.resolved("auto"), place.resolved("cpu")) == ("cpu", "cpu")
    with pytest.raises(TargetError, match=r"^training\.device=cuda: torch .* finds no CUDA here\. Use "
                                          r"training\.device=cpu, .*\.$"):
        place.resolved("cuda")
    with pytest.raises(TargetError, match=r"^proxy\.device=cuda: "):
        Recipe.from_config({"device": "cuda"}, PROXY, "proxy")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert Recipe.from_config({"device": "auto"}, PROXY, "proxy").device == "cuda"
    with pytest.raises(TargetError, match=r"^proxy\.precision=bf16: this GPU has no bf16"):
        Recipe.from_config({"device": "cuda", "precision": "bf16"}, PROXY, "proxy")


def test_the_place_names_no_weights(dataset: Dataset) -> None:
    for recipe in (PROXY, FULL_TRAINING):
        assert replace(recipe, device="cuda").fingerprint == recipe.fingerprint
    assert Proxy(dataset, replace(PROXY, device="cuda")).fingerprint == Proxy(dataset, PROXY).fingerprint


def test_a_gpu_that_stays_idle_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    place.tell_idle("cuda", said.append)
    assert not said
    place.tell_idle("cpu", said.append)
    line, = said
    assert "NVIDIA L4" in line
    assert "training.device=cuda trains them there" in line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    place.tell_idle("cpu", said.append)
    assert len(said) == 1


def test_few_processes_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "usable_cores", lambda: list(range(32)))
    monkeypatch.setattr(place, "free_memory_mb", lambda: 100_000)
    assert [place.processes(0, "cpu"), place.processes(0, "cuda"), place.processes(9, "cuda")] == [
        32, place.MOST_ON_A_GPU, 9]


def test_as_many_train_as_the_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "usable_cores", lambda: list(range(32)))
    for free_mb, n in ((0, 1), (3 * place.PROCESS_MB, 3)):
        monkeypatch.setattr(place, "free_memory_mb", lambda free_mb=free_mb: free_mb)
        assert place.processes(0, "cpu") == n


def test_memory_of_a_gpu_is_given_back_after_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("emptied"))
    release_memory()
    assert not seen, "there is none in use"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    release_memory()
    assert seen == ["emptied"]


def test_arithmetic_is_as_before_after_a_training() -> None:
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.deterministic, cudnn.allow_tf32, products.allow_tf32
    with loop.seeded(0, 1):
        assert (cudnn.deterministic, cudnn.allow_tf32, products.allow_tf32) == (True, False, False)
        with cudnn.flags():  # others may ask what is set
            pass
    assert before == (cudnn.deterministic, cudnn.allow_tf32, products.allow_tf32)
