"""Training to quantised file: what is written, what is reused, what a failure leaves behind."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from deployment_fixtures import sides_data, tiny_baseline, tiny_making, tiny_network, tiny_recipe
from safetensors.numpy import load_file, save_file

from hwnas.data.dataset import Preparation
from hwnas.errors import ExportError, TrainingError
from hwnas.front import make as deployable
from hwnas.front.make import fingerprint, make, other_start
from hwnas.networks.export import parity_images, stored_fingerprint
from hwnas.networks.quantize import METHODS, calibration_images
from hwnas.networks.weights import PretrainedOptions, find_pretrained
from hwnas.space.architecture import Architecture
from hwnas.system.run_folder import Manifest, ModelFolder
from hwnas.target import Target
from hwnas.training import loop
from hwnas.training.loop import Checkpoint, seeded
from hwnas.training.recipe import FINE_TUNING, FULL_TRAINING


@pytest.fixture
def folder(tmp_path) -> ModelFolder:
    return ModelFolder(tmp_path / "models" / "one")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a network that was made, to be copied."""
    folder = ModelFolder(tmp_path_factory.mktemp("whole") / "one")
    make(tiny_network(), folder, tiny_making())
    return folder.path


@pytest.fixture
def done(whole: Path, tmp_path: Path) -> ModelFolder:
    return ModelFolder(shutil.copytree(whole, tmp_path / "done"))


def names(folder: ModelFolder) -> set[str]:
    return {path.name for path in folder.path.iterdir()}


def test_onnx_metadata_say_how_to_feed_it(folder: ModelFolder) -> None:
    dataset = replace(sides_data(), preparation=Preparation(True, (16,), 1))
    make(tiny_network(), folder, tiny_making(dataset=dataset))
    for path in (folder.onnx, folder.int8):
        found = {entry.key: entry.value for entry in onnx.load(str(path)).metadata_props}
        assert found["hwnas_id"] == tiny_network().id
        assert json.loads(found["class_names"]) == ["left", "right"]
        assert json.loads(found["mean"]) == [0.4]
        assert "(pixels / 255 - mean) / std" in found["input"]
        assert json.loads(found["preparation"]) == {"channels": "grey", "size": 16, "crop": "centre",
                                                    "resize": "shorter side to 16, bilinear, anti-aliased"}


def test_a_pretrained_network_begins_with_its_weights_and_keeps_their_normalisation(folder, tmp_path, monkeypatch):
    plain = tiny_baseline("test_efficientnet")
    with seeded(5):
        given = {name: tensor.numpy() for name, tensor in plain.build().state_dict().items()}
    save_file(given, tmp_path / "w.safetensors", {"norm": "mean 0.5 std 0.25"})
    weights, _ = find_pretrained(plain.name, PretrainedOptions(file=tmp_path / "w.safetensors"), 1)
    begun = replace(plain, baseline=replace(plain.baseline, pretrained=weights))
    monkeypatch.setattr(deployable, "train", lambda model, *_, dataset, **options: (
        model if dataset.mean == (0.5,) else None))
    make(begun, folder, tiny_making())
    assert all(np.array_equal(tensor, given[name]) for name, tensor in load_file(folder.weights).items())
    for path in (folder.onnx, folder.int8):
        about = {entry.key: json.loads(entry.value) for entry in onnx.load(str(path)).metadata_props
                 if entry.key in ("mean", "std", "pretrained")}
        assert (about["mean"], about["std"], about["pretrained"]["sha256"]) == ([0.5], [0.25], weights.sha256)
    (tmp_path / "w.safetensors").unlink()
    assert make(begun, folder, tiny_making()).reused  # trained already, so that they are not needed
    making, data = tiny_making(), sides_data()
    assert fingerprint(begun, making) != fingerprint(plain, making)
    otherwise = replace(begun, baseline=replace(begun.baseline, pretrained=replace(weights, std=(0.5,))))
    assert fingerprint(begun, making) != fingerprint(otherwise, making)
    assert not other_start(begun, folder, making)
    assert "are others" in other_start(otherwise, folder, making)
    assert not other_start(plain, folder, making)
    assert (making.recipe_of(plain).name, making.recipe_of(begun).name) == (making.recipe.name, FINE_TUNING.name)
    n = len(data.train)
    for batch, own in ((FULL_TRAINING.batch_size, min(FINE_TUNING.batch_size, n // 8)), (8, 8)):
        asked = replace(making, recipe=replace(making.recipe, batch_size=batch))
        fine = asked.recipe_of(begun)
        assert fine.batch_for(n) == own
        assert fine.steps_for(n) == asked.recipe.steps_for(n) * asked.recipe.batch_for(n) // own
        assert asked.steps_in_a_step(begun) == fine.steps_for(n) / asked.recipe.steps_for(n)
        assert asked.steps_in_a_step(plain) == 1
    slower = replace(making, recipe=replace(making.recipe, lr=1e-3, ema_decay=FULL_TRAINING.ema_decay)).recipe_of(begun)
    assert (slower.lr, slower.ema_decay, slower.layer_decay) == (1e-3, FINE_TUNING.ema_decay, FINE_TUNING.layer_decay)


def test_fp32_target_makes_no_int8_file(folder: ModelFolder) -> None:
    make(tiny_baseline("test_efficientnet"), folder, tiny_making(Target("ort_fp32", "onnxruntime", "fp32")))
    assert names(folder) == {"baseline.yaml", "weights.safetensors", "model.onnx", "manifest.json"}


@pytest.mark.soak
def test_files_that_a_user_put_beside_the_network_stay(folder: ModelFolder) -> None:
    make(tiny_baseline(), folder, tiny_making())
    theirs = [folder.path / name for name in ("model.xml", "model.bin", "model_int8.engine")]
    for path in theirs:
        path.write_bytes(b"theirs")
    (folder.path / "model.d").mkdir()
    making = tiny_making()
    made = make(tiny_baseline(), folder, replace(making, seed=making.seed + 1))
    assert not made.reused
    assert not made.remarks
    assert all(path.read_bytes() == b"theirs" for path in theirs)


def test_second_call_trains_nothing_and_changes_no_weight(done: ModelFolder, monkeypatch) -> None:
    weights = done.weights.read_bytes()
    done.onnx.unlink()
    monkeypatch.setattr(deployable, "_train", lambda *args: pytest.fail("trained again"))
    assert make(tiny_network(), done, tiny_making()).reused
    assert done.weights.read_bytes() == weights
    assert done.onnx.is_file()


def test_whole_files_are_not_made_again_but_for_other_calibration_images(done: ModelFolder, monkeypatch) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in done.path.iterdir()}
    make(tiny_network(), done, tiny_making())
    assert {path.name: path.stat().st_mtime_ns for path in done.path.iterdir()} == before
    make(tiny_network(), done, replace(tiny_making(), n_calibration=16))
    assert {path.name for path in done.path.iterdir() if path.stat().st_mtime_ns != before[path.name]} >= {
        "model.onnx", "model_int8.onnx", "manifest.json"}


def test_int8_files_of_another_recipe_are_made_again(done: ModelFolder, monkeypatch) -> None:
    before = done.weights.read_bytes(), done.int8.stat().st_mtime_ns
    monkeypatch.setattr(deployable, "RECIPE", "another")
    assert make(tiny_network(), done, tiny_making()).reused
    assert done.weights.read_bytes() == before[0]
    assert done.int8.stat().st_mtime_ns != before[1]


def test_same_seed_gives_the_same_weights_and_another_trains_again(folder: ModelFolder, done: ModelFolder) -> None:
    make(tiny_network(), folder, tiny_making())
    assert folder.weights.read_bytes() == done.weights.read_bytes()
    assert not make(tiny_network(), done, tiny_making(seed=1)).reused
    assert folder.weights.read_bytes() != done.weights.read_bytes()


def test_fingerprint_tells_networks_recipes_and_seeds_apart() -> None:
    making = tiny_making()
    networks = [tiny_network(8), tiny_network(16), tiny_baseline("resnet10t"), tiny_baseline("resnet10t", 1)]
    assert len({fingerprint(one, making) for one in networks}) == 4
    longer = tiny_making(recipe=tiny_recipe(epochs=4))
    assert len({fingerprint(networks[0], each) for each in (making, longer, tiny_making(seed=1))}) == 3


def test_torn_weights_count_as_none(folder: ModelFolder, done: ModelFolder) -> None:
    assert stored_fingerprint(folder.weights) is None
    assert stored_fingerprint(done.weights)
    done.weights.write_bytes(done.weights.read_bytes()[:-20])
    assert stored_fingerprint(done.weights) is None
    assert not make(tiny_network(), done, tiny_making()).reused


def end_late(step: int, steps: int) -> None:
    """Be killed in the last epoch."""
    if step > steps - 2:
        raise KeyboardInterrupt


def test_a_killed_training_goes_on_and_ends_with_the_same_weights(
        folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_S", -1.0)  # every step is kept
    making, heard = tiny_making(recipe=tiny_recipe(epochs=4)), list[int]()
    whole = ModelFolder(tmp_path / "models" / "whole")
    make(tiny_network(), whole, making)

    with pytest.raises(KeyboardInterrupt):
        make(tiny_network(), folder, making, end_late)
    assert folder.training.is_file()
    make(tiny_network(), folder, making, lambda step, steps: heard.append(step))
    assert heard[0] > 1  # the first steps are not trained again
    assert folder.weights.read_bytes() == whole.weights.read_bytes()
    assert not folder.training.exists()


@pytest.mark.parametrize("content", [b"torn", None, "renamed"], ids=["torn", "of another recipe", "of other versions"])
def test_the_state_of_another_training_is_not_taken(
        folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | str | None) -> None:
    monkeypatch.setattr(loop, "SAVE_S", -1.0)

    with pytest.raises(KeyboardInterrupt):
        make(tiny_network(), folder, tiny_making(seed=1), end_late)
    if isinstance(content, bytes):
        folder.training.write_bytes(content)
    elif content:
        state = Checkpoint.load(folder.training)
        state.model["renamed.weight"] = state.model.pop(next(iter(state.model)))
        replace(state, identity={"training": fingerprint(tiny_network(), tiny_making())}).save(folder.training)
    whole = ModelFolder(tmp_path / "models" / "whole")
    for each in (folder, whole):
        make(tiny_network(), each, tiny_making())
    assert folder.weights.read_bytes() == whole.weights.read_bytes()


def fail_with(monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]) -> None:
    """Let a step of the making end with this error."""
    def fails(*args: object, **options: object) -> None:
        raise error("it ended")

    monkeypatch.setattr(deployable, step, fails)


@pytest.mark.parametrize(("place", "step", "error", "left"), [
    ("folder", "_train", KeyboardInterrupt, {"architecture.yaml"}),
    ("folder", "check_parity", ExportError, {"architecture.yaml", "weights.safetensors", "manifest.json"}),
    ("done", "_train", TrainingError, {"architecture.yaml"})], ids=["training", "parity", "beside old exports"])
def test_what_ends_the_making_leaves_nothing_that_is_not_whole(request, monkeypatch, place, step, error, left):
    where: ModelFolder = request.getfixturevalue(place)
    fail_with(monkeypatch, step, error)
    with pytest.raises(error):
        make(tiny_network(), where, tiny_making(seed=5))
    assert names(where) == left


def test_parity_and_calibration_inputs() -> None:
    making = tiny_making()
    assert parity_images(making.dataset, 0).shape == (256, 1, 16, 16)
    images = calibration_images(making.dataset, 10, 0)
    assert images.shape == (10, 1, 16, 16)
    assert images.dtype == np.float32
    everything = making.dataset.normalise(making.dataset.train.images)
    assert all((everything == image).all((1, 2, 3)).any() for image in images)


def test_manifest_names_every_file_and_what_parity_saw(folder: ModelFolder) -> None:
    network = tiny_network()
    made = make(network, folder, tiny_making())
    assert Architecture.from_yaml(folder.architecture.read_text()) == network.architecture
    assert (made.params, made.macs, made.reused) == (network.architecture.params, network.architecture.macs, False)
    manifest = Manifest.find(folder.path)
    assert {*manifest.files, "manifest.json"} == names(folder) == {
        "architecture.yaml", "weights.safetensors", "model.onnx", "model_int8.onnx", "manifest.json"}
    assert manifest.recipe == stored_fingerprint(folder.weights)
    assert manifest.parity["n"] >= 256
    assert manifest.faults(folder.int8) == []
    assert manifest.quantisation["method"] in METHODS
    assert 0 <= manifest.quantisation["agreement"] <= 1
    assert manifest.quantisation["weight_bits"] == (7 if tiny_making().narrow else 8)


@pytest.mark.parametrize("name", ["weights.safetensors", "model.onnx", "model_int8.onnx"])
def test_a_damaged_file_is_made_again_and_said(done: ModelFolder, name: str) -> None:
    whole = {path: path.read_bytes() for path in done.path.iterdir() if path != done.manifest}
    content = bytearray(whole[done.path / name])
    content[len(content) // 2] ^= 1
    (done.path / name).write_bytes(content)
    made = make(tiny_network(), done, tiny_making())
    assert [line.partition(":")[0] for line in made.remarks] == [f"{name} is not the file that was made"]
    assert made.reused == (name != "weights.safetensors")
    assert {path: path.read_bytes() for path in whole} == whole
    assert "; ".join(Manifest.find(done.path).faults(*whole)) == ""


def test_a_kill_between_export_and_manifest_leaves_no_file_as_done(folder: ModelFolder, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        fail_with(patch, "quantize_static", KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            make(tiny_network(), folder, tiny_making())
    assert folder.onnx.is_file()
    manifest = Manifest.find(folder.path)
    assert manifest.fault(folder.onnx) == "model.onnx is not in manifest.json: its making did not come to an end"
    assert manifest.fault(folder.weights) == ""
    made = make(tiny_network(), folder, tiny_making())
    assert (made.reused, len(made.remarks)) == (True, 1)
