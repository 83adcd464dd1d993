"""Training to quantised file: what is written, what is reused, what a failure leaves behind."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from deployment_fixtures import tiny_baseline, tiny_making, tiny_network, tiny_recipe

from hwnas.errors import ExportError, TrainingError
from hwnas.front import make as deployable
from hwnas.front.make import fingerprint, make, stored_fingerprint
from hwnas.networks.export import parity_images
from hwnas.networks.quantize import calibration_images
from hwnas.space.architecture import Architecture
from hwnas.system.run_folder import ModelFolder
from hwnas.target.target import Target


@pytest.fixture
def folder(tmp_path) -> ModelFolder:
    return ModelFolder(tmp_path / "models" / "one")


def names(folder: ModelFolder) -> set[str]:
    return {path.name for path in folder.path.iterdir()}


def test_finalist_leaves_every_file(folder: ModelFolder) -> None:
    one = tiny_network()
    made = make(one, folder, tiny_making())
    assert names(folder) == {"architecture.yaml", "weights.safetensors", "model.onnx", "model_int8.onnx"}
    assert Architecture.from_yaml(folder.architecture.read_text()) == one.architecture
    assert (made.params, made.macs) == (one.architecture.params, one.architecture.macs)
    assert made.parity.n >= 256
    assert not made.reused


def test_onnx_metadata_say_how_to_feed_it(folder: ModelFolder) -> None:
    make(tiny_network(), folder, tiny_making())
    for path in (folder.onnx, folder.int8):
        found = {entry.key: entry.value for entry in onnx.load(str(path)).metadata_props}
        assert found["hwnas_id"] == tiny_network().id
        assert json.loads(found["class_names"]) == ["left", "right"]
        assert json.loads(found["mean"]) == [0.4]
        assert "(pixels / 255 - mean) / std" in found["input"]


def test_fp32_target_makes_no_int8_file(folder: ModelFolder) -> None:
    make(tiny_baseline(), folder, tiny_making(Target("ort_fp32", "onnxruntime", "fp32")))
    assert names(folder) == {"baseline.yaml", "weights.safetensors", "model.onnx"}


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
    assert len({fingerprint(one, making, making.dataset) for one in networks}) == 4


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
    assert names(folder) == {"architecture.yaml", "weights.safetensors"}


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
