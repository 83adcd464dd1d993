"""Training to quantised file: what is written, what is reused, what a failure leaves behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from deployment_fixtures import tiny_baseline, tiny_dataset, tiny_making, tiny_network, tiny_recipe
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
from hwnas.training.loop import seeded
from hwnas.training.recipe import FINE_TUNING, FULL_TRAINING


@pytest.fixture
def folder(tmp_path) -> ModelFolder:
    return ModelFolder(tmp_path / "models" / "one")


def names(folder: ModelFolder) -> set[str]:
    return {path.name for path in folder.path.iterdir()}


def test_finalist_leaves_every_file(folder: ModelFolder) -> None:
    one = tiny_network()
    made = make(one, folder, tiny_making())
    assert names(folder) == {"architecture.yaml", "weights.safetensors", "model.onnx", "model_int8.onnx",
                             "manifest.json"}
    assert Architecture.from_yaml(folder.architecture.read_text()) == one.architecture
    assert (made.params, made.macs) == (one.architecture.params, one.architecture.macs)
    assert made.parity.n >= 256
    assert not made.reused


def test_onnx_metadata_say_how_to_feed_it(folder: ModelFolder) -> None:
    dataset = replace(tiny_dataset(), preparation=Preparation(True, (16,), 1))
    make(tiny_network(), folder, tiny_making(dataset=dataset))
    for path in (folder.onnx, folder.int8):
        found = {entry.key: entry.value for entry in onnx.load(str(path)).metadata_props}
        assert found["hwnas_id"] == tiny_network().id
        assert json.loads(found["class_names"]) == ["left", "right"]
        assert json.loads(found["mean"]) == [0.4]
        assert "(pixels / 255 - mean) / std" in found["input"]
        assert json.loads(found["preparation"]) == {"channels": "grey", "size": 16, "crop": "centre",
                                                    "resize": "shorter side to 16, bilinear, anti-aliased"}


def test_a_pretrained_network_begins_with_its_weights_and_keeps_their_normalisation(
        folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_baseline("test_efficientnet")
    with seeded(5):
        given = {name: tensor.numpy() for name, tensor in plain.build().state_dict().items()}
    save_file(given, tmp_path / "w.safetensors", {"norm": "mean 0.5 std 0.25"})
    weights, _ = find_pretrained(plain.name, PretrainedOptions(file=tmp_path / "w.safetensors"), 1)
    begun = replace(plain, baseline=replace(plain.baseline, pretrained=weights))
    monkeypatch.setattr(deployable, "_train", lambda model, data, *_: model if data.mean == (0.5,) else None)
    make(begun, folder, tiny_making())
    assert all(np.array_equal(tensor, given[name]) for name, tensor in load_file(folder.weights).items())
    for path in (folder.onnx, folder.int8):
        about = {entry.key: json.loads(entry.value) for entry in onnx.load(str(path)).metadata_props
                 if entry.key in ("mean", "std", "pretrained")}
        assert (about["mean"], about["std"], about["pretrained"]["sha256"]) == ([0.5], [0.25], weights.sha256)
    (tmp_path / "w.safetensors").unlink()
    assert make(begun, folder, tiny_making()).reused  # trained already, so that they are not needed
    making, data = tiny_making(), tiny_dataset()
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
    make(tiny_baseline(), folder, tiny_making(Target("ort_fp32", "onnxruntime", "fp32")))
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


def test_second_call_trains_nothing_and_changes_no_weight(folder: ModelFolder, monkeypatch) -> None:
    make(tiny_network(), folder, tiny_making())
    weights = folder.weights.read_bytes()
    folder.onnx.unlink()
    monkeypatch.setattr(deployable, "_train", lambda *args: pytest.fail("trained again"))
    assert make(tiny_network(), folder, tiny_making()).reused
    assert folder.weights.read_bytes() == weights
    assert folder.onnx.is_file()


def test_same_seed_gives_the_same_weights(tmp_path) -> None:
    first, second, other = (ModelFolder(tmp_path / name) for name in "abc")
    make(tiny_network(), first, tiny_making())
    make(tiny_network(), second, tiny_making())
    make(tiny_network(), other, tiny_making(seed=1))
    assert first.weights.read_bytes() == second.weights.read_bytes()
    assert first.weights.read_bytes() != other.weights.read_bytes()


@pytest.mark.parametrize("change", [{"seed": 1}, {"recipe": tiny_recipe(epochs=4)}])
def test_another_recipe_or_seed_trains_again(folder: ModelFolder, change) -> None:
    make(tiny_network(), folder, tiny_making())
    assert not make(tiny_network(), folder, tiny_making(**change)).reused


def test_fingerprint_tells_networks_apart() -> None:
    making = tiny_making()
    networks = [tiny_network(8), tiny_network(16), tiny_baseline("resnet10t"), tiny_baseline("resnet10t", 1)]
    assert len({fingerprint(one, making) for one in networks}) == 4


def test_torn_weights_count_as_none(folder: ModelFolder) -> None:
    assert stored_fingerprint(folder.weights) is None
    make(tiny_network(), folder, tiny_making())
    assert stored_fingerprint(folder.weights)
    folder.weights.write_bytes(folder.weights.read_bytes()[:-20])
    assert stored_fingerprint(folder.weights) is None
    assert not make(tiny_network(), folder, tiny_making()).reused


def test_kill_while_training_leaves_no_weights(folder: ModelFolder, monkeypatch) -> None:
    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(deployable, "_train", killed)
    with pytest.raises(KeyboardInterrupt):
        make(tiny_network(), folder, tiny_making())
    assert names(folder) == {"architecture.yaml"}


def test_parity_failure_leaves_no_export(folder: ModelFolder, monkeypatch) -> None:
    def fails(*args: object) -> None:
        raise ExportError("parity failed")

    monkeypatch.setattr(deployable, "check_parity", fails)
    with pytest.raises(ExportError):
        make(tiny_network(), folder, tiny_making())
    assert names(folder) == {"architecture.yaml", "weights.safetensors", "manifest.json"}


def test_new_weights_do_not_lie_beside_old_exports(folder: ModelFolder, monkeypatch) -> None:
    make(tiny_network(), folder, tiny_making())

    def diverges(*args: object) -> None:
        raise TrainingError("loss is nan")

    monkeypatch.setattr(deployable, "_train", diverges)
    with pytest.raises(TrainingError):
        make(tiny_network(), folder, tiny_making(seed=5))
    assert names(folder) == {"architecture.yaml"}


def test_parity_and_calibration_inputs() -> None:
    making = tiny_making()
    assert parity_images(making.dataset, 0).shape == (256, 1, 16, 16)
    images = calibration_images(making.dataset, 10, 0)
    assert images.shape == (10, 1, 16, 16)
    assert images.dtype == np.float32
    everything = making.dataset.normalise(making.dataset.train.images)
    assert all((everything == image).all((1, 2, 3)).any() for image in images)


def spoil(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_manifest_names_every_file_and_what_parity_saw(folder: ModelFolder) -> None:
    made = make(tiny_network(), folder, tiny_making())
    manifest = Manifest.find(folder.path)
    assert manifest is not None
    assert {*manifest.files, "manifest.json"} == names(folder)
    assert manifest.recipe == stored_fingerprint(folder.weights)
    assert manifest.parity["n"] == made.parity.n
    assert manifest.faults(folder.int8) == []
    assert manifest.quantisation["method"] in METHODS
    assert 0 <= manifest.quantisation["agreement"] <= 1
    assert manifest.quantisation["weight_bits"] == (7 if tiny_making().narrow else 8)


@pytest.mark.parametrize("name", ["weights.safetensors", "model.onnx", "model_int8.onnx"])
@pytest.mark.parametrize("damage", [spoil, lambda path: path.write_bytes(path.read_bytes()[:-20])], ids=["bit", "cut"])
def test_a_damaged_file_is_made_again_and_said(folder: ModelFolder, name: str, damage) -> None:
    make(tiny_network(), folder, tiny_making())
    whole = {path: path.read_bytes() for path in folder.path.iterdir() if path != folder.manifest}
    damage(folder.path / name)
    made = make(tiny_network(), folder, tiny_making())
    assert [line.partition(":")[0] for line in made.remarks] == [f"{name} is not the file that was made"]
    assert made.reused == (name != "weights.safetensors")
    assert {path: path.read_bytes() for path in whole} == whole
    assert "; ".join(Manifest.find(folder.path).faults(*whole)) == ""


def test_a_kill_between_export_and_manifest_leaves_no_file_as_done(folder: ModelFolder, monkeypatch) -> None:
    def killed(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(deployable, "quantize_static", killed)
        with pytest.raises(KeyboardInterrupt):
            make(tiny_network(), folder, tiny_making())
    assert folder.onnx.is_file()
    manifest = Manifest.find(folder.path)
    assert manifest is not None
    assert manifest.fault(folder.onnx) == "model.onnx is not in manifest.json: its making did not come to an end"
    assert manifest.fault(folder.weights) == ""
    made = make(tiny_network(), folder, tiny_making())
    assert (made.reused, len(made.remarks)) == (True, 1)
