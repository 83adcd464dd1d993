"""Pretrained weights: where they are looked for, what fits, what is said of them, and that they were not mixed up."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from hwnas.errors import ConfigError, DataError, StudyError
from hwnas.networks.baselines import Baseline
from hwnas.networks.checkpoint import find_tensors
from hwnas.networks.export import export_onnx
from hwnas.networks.network import Shape, TimmNetwork
from hwnas.networks.weights import FOLDER, PretrainedOptions, _adapt_stem, find_pretrained, find_some, import_timm
from hwnas.runtimes.runtime import load_runtime
from hwnas.target import Target

NAME = "test_efficientnet"  # timm's smallest with a stem and a classifier of their own
DATA = os.environ.get("HWNAS_DATA")
GIVEN = os.environ.get(FOLDER) or (DATA and str(Path(DATA).parent / "pretrained"))  # before a test unsets it
NORM = {"norm": "mean 0.5,0.5,0.5 std 0.25,0.25,0.25"}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    """The weights of a network of 1000 classes."""
    torch.manual_seed(7)
    return dict(timm.create_model(NAME).state_dict())


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))


def begun(file: Path, channels: int = 3, classes: int = 10, name: str = NAME) -> torch.nn.Module:
    """The network as its training begins with the weights of `file`."""
    weights, pad_type = find_pretrained(name, PretrainedOptions(file=file), channels)
    return TimmNetwork(Baseline(name, 0, pad_type, weights), Shape(channels, 32, classes)).start()


def test_all_but_the_classifier_is_taken(tensors: Tensors, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / f"{NAME}.safetensors")
    own = begun(tmp_path / f"{NAME}.safetensors").state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(own[name], tensor) != name.startswith("classifier."), name
    assert own["classifier.weight"].shape[0] == 10
    same = begun(tmp_path / f"{NAME}.safetensors", classes=1000).state_dict()
    assert all(torch.equal(same[name], tensor) for name, tensor in tensors.items())


def test_a_classifier_that_is_a_convolution_begins_as_a_linear_one_does(tmp_path: Path) -> None:
    path = saved(timm.create_model("dla46_c").state_dict(), tmp_path / "w.pth")
    weight = begun(path, name="dla46_c").state_dict()["fc.weight"]
    assert weight.shape == (10, 256, 1, 1)
    assert weight.abs().max() <= 256 ** -0.5  # torch's bound; timm's values are several times as large


def test_grey_images_are_seen_as_colour_ones_without_colour(tensors: Tensors, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "w.safetensors", NORM)
    pixels = torch.rand(2, 1, 32, 32)
    answers = []
    for channels in (1, 3):
        weights, _ = find_pretrained(NAME, PretrainedOptions(file=tmp_path / "w.safetensors"), channels)
        assert (weights.mean, weights.std) == ((0.5,) * channels, (0.25,) * channels)
        model: Any = begun(tmp_path / "w.safetensors", channels).eval()
        with torch.inference_mode():
            answers.append(model.forward_features(((pixels - 0.5) / 0.25).repeat(1, channels, 1, 1)))
    assert torch.allclose(*answers, atol=1e-4)
    with pytest.raises(ConfigError, match=r"images of 3 channels .* the data set has 2"):
        find_pretrained(NAME, PretrainedOptions(file=tmp_path / "w.safetensors"), 2)


def test_another_packages_weights_are_taken_for_grey_images_too(tensors: Tensors, tmp_path: Path) -> None:
    for name, content in (("named", tensors), ("others", FORMS["another package's names"](tensors))):
        torch.save(content, tmp_path / f"{name}.pth")
    named, renamed = (begun(tmp_path / f"{name}.pth", channels=1).state_dict() for name in ("named", "others"))
    assert all(torch.equal(renamed[name], tensor) for name, tensor in named.items()
               if not name.startswith("classifier."))


class _Code:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def saved(content: Any, path: Path) -> Path:
    torch.save(content, path)
    return path


FORMS: dict[str, Any] = {
    "plain": lambda t: t, "module": lambda t: {f"module.{k}": v for k, v in t.items()},
    "compiled and parallel": lambda t: {f"module._orig_mod.{k}": v for k, v in t.items()},
    "compiled in part": lambda t: {k.replace("blocks.1.", "blocks.1._orig_mod."): v for k, v in t.items()},
    "a module twice": lambda t: {f"{place}.{k}": v for place in ("net", "compiled._orig_mod") for k, v in t.items()},
    "half": lambda t: {k: v.half() if v.is_floating_point() else v for k, v in t.items()},
    "no counters": lambda t: {k: v for k, v in t.items() if not k.endswith("num_batches_tracked")},
    "no head": lambda t: {k: v for k, v in t.items() if not k.startswith("classifier.")},
    "torchvision's references": lambda t: {"model": t, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}},
                                           "epoch": 3, "args": argparse.Namespace(lr=0.1)},
    "timm's train.py": lambda t: {"epoch": 1, "arch": NAME, "state_dict": {k: v + 1 for k, v in t.items()},
                                  "state_dict_ema": t, "args": argparse.Namespace(model=NAME, data=Path("x")),
                                  "metric": np.float64(0.5), "version": 2},
    "Lightning": lambda t: {"state_dict": {"criterion.weight": torch.ones(3),
                                           **{f"model.{k}": v for k, v in t.items()}},
                            "callbacks": {"x": Path("x")}, "hyper_parameters": {"lr": 1},
                            "pytorch-lightning_version": "2"},
    "torch's tutorials": lambda t: {"epoch": 3, "model_state_dict": t, "optimizer_state_dict": {"state": {}}},
    "an average beside the last": lambda t: {"model": {k: v + 1 for k, v in t.items()}, "ema": t},
    "no average, but its rate": lambda t: {"model": t, "ema": {"decay": 0.99}},
    "DeepSpeed": lambda t: {"module": t, "global_steps": 3},
    "a mapping in an order": lambda t: {"model": collections.OrderedDict(t), "history": [1, 2, {"a": 3}]},
    "parameters": lambda t: {k: torch.nn.Parameter(v, requires_grad=False) for k, v in t.items()},
    "more beside them": lambda t: {**t, "aux.weight": torch.zeros(2), "epoch": 3},
    "another package's names": lambda t: {f"net._{number}.{name.rpartition('.')[2]}": tensor
                                          for number, (name, tensor) in enumerate(t.items())}}


@pytest.mark.parametrize(("form", "old"), [*((form, False) for form in FORMS), ("module", True), ("parameters", True)])
def test_a_checkpoint_is_taken_in_each_form_that_people_have(form, old, tensors, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(FORMS[form](dict(tensors)), tmp_path / "w.pth", _use_new_zipfile_serialization=not old)
    own = begun(tmp_path / "w.pth").state_dict()
    for name, tensor in tensors.items():
        if not name.startswith("classifier."):
            assert torch.allclose(own[name], tensor, atol=1e-3), name
    assert not (tmp_path / "ran").exists()  # no code of the file


def test_what_was_taken_and_what_was_left_out_is_said(tensors: Tensors, tmp_path: Path) -> None:
    def said(content: Any, channels: int = 3, classes: int = 10) -> str:
        path = saved(content, tmp_path / "w.pth")
        weights, _ = find_pretrained(NAME, PretrainedOptions(file=path), channels)
        return weights.load(Baseline(NAME).build(channels, classes, 32), classes)

    assert said(tensors).startswith("w.pth: nothing says how its images were normalised, so mean 0.485, 0.456, 0.406")
    (tmp_path / "w.json").write_text('{"norm": "imagenet"}')
    assert said(tensors) == ""
    head = {name: tensor[:7] if name.startswith("classifier.") else tensor for name, tensor in tensors.items()}
    assert said(head) == "w.pth: its last layer has 7 classes, not 10, and is made anew"
    assert "its last layer is kept, as it has 7 classes" in said(head, classes=7)
    both = {"state_dict": tensors, "state_dict_ema": tensors}
    assert said(both) == "w.pth: state_dict_ema was taken"
    more = {**tensors, "extra.weight": torch.ones(2)}
    assert "left out, as the network has no such tensors: extra.weight" in said(more)
    assert "its stem of 3 channels was made one of 1" in said(tensors, channels=1)
    weights, _ = find_pretrained(NAME, PretrainedOptions(file=saved(tensors, tmp_path / "tf_efficientnet_b0.pth")), 3)
    assert "its name is that of tf_efficientnet_b0" in weights.load(Baseline(NAME).build(3, 10, 32), 10)


def test_a_stem_for_other_channels_is_adapted_as_timm_does(tensors: Tensors, tmp_path: Path) -> None:
    first, *_ = tensors
    stem = tensors[first]
    for given in (stem.sum(1, keepdim=True), torch.cat([stem, stem[:, :1]], 1)):
        own = begun(saved({**tensors, first: given}, tmp_path / "w.pth")).state_dict()
        wanted = timm.models.adapt_input_conv(3, given, base_chans=given.shape[1])
        assert torch.allclose(own[first], wanted)


def test_a_stem_that_reads_groups_of_pixels_sees_grey_images_as_colour_ones() -> None:
    """TResNet's."""
    colour, grey = (torch.nn.Sequential(timm.layers.SpaceToDepth(), torch.nn.Conv2d(16 * channels, 5, 3))
                    for channels in (3, 1))
    grey.default_cfg, tensors = {"first_conv": "1"}, dict(colour.state_dict())  # type: ignore[assignment]
    assert _adapt_stem(grey, tensors, grey.state_dict(), 1) == ["its stem of 48 channels was made one of 16"]
    grey.load_state_dict(tensors)
    pixels = torch.rand(2, 1, 32, 32)
    with torch.inference_mode():
        assert torch.allclose(grey(pixels), colour(pixels.repeat(1, 3, 1, 1)), atol=1e-5)


def test_what_does_not_fit_is_one_line_with_file_and_tensor(tensors: Tensors, tmp_path: Path) -> None:
    path, first = tmp_path / "w.pth", next(iter(tensors))
    swapped = dict(zip(tensors, [tensors[first], *list(tensors.values())[:0:-1]], strict=True))
    turned = {f"x{number}.weight": tensor for number, tensor in enumerate(tensors.values())}
    for content, why in (
            ({name: tensor for name, tensor in tensors.items() if name != first}, f"another network: '{first}'"),
            ({**tensors, first: torch.zeros(1, 3, 3, 3)}, rf"'{first}' has shape \[1, 3, 3, 3\] there, \[\d+, 3, 3, 3"),
            (swapped, "another network: .* has shape"),
            (turned, f"another network: '{first}' is in only one of them"),
            ({**tensors, "blocks.0.7.conv.weight": torch.ones(1)},  # a deeper network, or one with layers between
             r"another network: it also has 'blocks\.0\.7\.conv\.weight' \(1 such\)"),
            ({**tensors, first: tensors[first].to(torch.int8)}, rf"'{first}' holds torch\.int8 \(1 such\)"),
            ({**tensors, first: tensors[first] * torch.nan}, f"'{first}' holds values that are not finite"),
            (dict.fromkeys(tensors, 1), "holds no tensors by name"), ([1], "holds no tensors by name"),
            ({**tensors, first: tensors[first].to_sparse()}, f"another network: '{first}'"),
            (Path("x"), "holds no tensors by name"), ({**tensors, "x": _Code()}, "module posix is blocked")):
        torch.save(content, path)
        with pytest.raises(DataError, match=f"^pretrained weights {re.escape(str(path))}.*{why}") as caught:
            begun(path)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
    whole = path.read_bytes()
    for torn, why in ((b"", "is empty, and no file of tensors"), (whole[:100], "torn"),
                      (pickle.dumps([1])[:-1], "torn"), (pickle.dumps([1]), "torn"), (b"\x08\x0aONNX", "torn"),
                      (b"version https://git-lfs", "is a Git LFS pointer")):
        path.write_bytes(torn)
        with pytest.raises(DataError, match=why):
            begun(path)
    save_file(tensors, path, NORM)  # whatever its name
    assert find_pretrained(NAME, PretrainedOptions(file=path), 3)[0].std == (0.25,) * 3
    assert begun(path)
    save_file(tensors, tmp_path / "w.safetensors")
    for torn in ((tmp_path / "w.safetensors").read_bytes()[:-9], (2 ** 40).to_bytes(8, "little") + b"{}"):
        (tmp_path / "w.safetensors").write_bytes(torn)
        with pytest.raises(DataError, match="torn or no file of tensors"):
            begun(tmp_path / "w.safetensors")


def test_entries_that_unpack_to_more_than_their_file_are_refused(tmp_path: Path) -> None:
    path, packed, long = (tmp_path / name for name in ("w.pth", "packed.pth", "long.pth"))
    torch.save({"a": torch.zeros(1 << 16)}, path)
    with ZipFile(path) as plain, ZipFile(packed, "w", ZIP_DEFLATED) as small, ZipFile(long, "w") as large:
        for entry in plain.infolist():
            small.writestr(entry.filename, plain.read(entry))
            large.writestr(entry.filename, plain.read(entry))
            large.filelist[-1].file_size <<= 10
    for wrong in (packed, long):
        with pytest.raises(DataError, match=rf"^pretrained weights .*{wrong.name} cannot be read \(its entries would"):
            begun(wrong)


def test_files_of_torchs_first_form_hold_no_more_than_their_size(tensors: Tensors, tmp_path: Path) -> None:
    """Nor does a tensor that repeats what is stored once, claims any size, and would be made whole when it is used."""
    path, long = tmp_path / "w.pth", tmp_path / "long.pth"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert begun(path)
    torch.save({"a": torch.zeros(1 << 17)}, path, _use_new_zipfile_serialization=False)
    number = b"J" + (1 << 17).to_bytes(4, "little")
    assert number in path.read_bytes()
    long.write_bytes(path.read_bytes().replace(number, b"J" + (1 << 30).to_bytes(4, "little")))
    with pytest.raises(DataError, match="cannot be read"):
        begun(long)
    with pytest.raises(DataError, match="holds no tensors"):
        find_tensors(saved({"a": torch.zeros(1).expand(1 << 40)}, tmp_path / "w.pth"), "w.pth", tensors)


def test_a_folder_is_searched_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**options: Any) -> str:
        return find_pretrained(NAME, PretrainedOptions(use=True, **options), 3)[0].file

    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, folder / f"{NAME}_gn.safetensors")  # of another network that timm has
    monkeypatch.setenv(FOLDER, str(folder))
    expected = (rf"no pretrained weights of {NAME} in {folder} \({NAME}_gn\.safetensors\) or .*home/weights \(not "
                rf"there\)\. They are called {NAME}\.safetensors or {NAME}\.pth, .*pretrained\.download=true\.$")
    with pytest.raises(ConfigError, match=expected):
        found()
    for name in (f"{NAME}_mine.safetensors", f"{NAME}.r160_in1k.safetensors"):
        save_file({"a": torch.zeros(1)}, folder / name)
    with pytest.raises(ConfigError, match=rf"several files in .*{NAME}_mine\.safetensors\. .*pretrained\.file="):
        found()
    save_file({"a": torch.zeros(1)}, folder / f"{NAME}.safetensors")
    assert found() == f"{NAME}.safetensors"
    with pytest.raises(ConfigError, match=f"no pretrained weights of {NAME} in {tmp_path / 'other'}"):
        found(folder=tmp_path / "other")


def test_what_is_known_of_weights_comes_from_the_file_or_timm_or_is_unknown(tmp_path: Path) -> None:
    def known(name: str, metadata: dict[str, str] | None = None, network: str = "mobilenetv2_100") -> Any:
        save_file({"a": torch.zeros(1)}, tmp_path / name, metadata)
        return find_pretrained(network, PretrainedOptions(file=tmp_path / name), 3)

    plain, pad_type = known("mine.safetensors")
    assert (plain.licence, plain.origin, plain.mean[0], pad_type) == ("unknown", "unknown", 0.485, "")
    assert known("x.safetensors", network="tf_efficientnet_lite0")[0].mean == (0.5, 0.5, 0.5)
    tagged, _ = known("mobilenetv2_100.ra_in1k.safetensors")
    assert (tagged.licence, tagged.origin) == ("apache-2.0", "timm/mobilenetv2_100.ra_in1k")
    said, pad_type = known("said.safetensors", {"norm": "mean 0.5 std 0.5", "pad": "same", "licence": "MIT"})
    assert (said.mean, said.licence, said.origin, pad_type) == ((0.5,) * 3, "MIT", "unknown", "same")
    (tmp_path / "mine.json").write_text(json.dumps({"norm": "imagenet", "origin": "our\nown"}))
    assert known("mine.safetensors", NORM)[0].mean[0] == 0.485
    assert known("mine.safetensors")[0].origin == "our own"
    for bad in ({"norm": "mean 1 std 0"}, {"norm": "mean 1,2 std 1,2"}, {"norm": "grey"}, {"pad": "valid"}):
        with pytest.raises(DataError, match=r"bad\.safetensors: (norm|pad) must be"):
            known("bad.safetensors", bad)
    (tmp_path / "mine.json").write_text("[1")
    with pytest.raises(DataError, match=r"mine\.json cannot be read"):
        known("mine.safetensors")


def test_timm_fetches_only_where_it_is_let_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create, asked = timm.create_model, []

    def fetch(name: str, pretrained: bool = False) -> Any:
        asked.append(name)
        if len(asked) == 1:
            raise OSError("no route to\nthe hub")
        return create(name)

    monkeypatch.setattr(timm, "create_model", fetch)
    wanted = PretrainedOptions(download=True, folder=tmp_path / "kept")
    with pytest.raises(ConfigError, match=f"cannot fetch pretrained weights of {NAME}: no route to the hub. Check"):
        find_pretrained(NAME, wanted, 3)
    weights, _ = find_pretrained(NAME, wanted, 3)
    assert weights == find_pretrained(NAME, replace(wanted, download=False), 3)[0]
    assert len(asked) == 2
    assert (weights.licence, weights.mean) == ("apache-2.0", (0.485, 0.456, 0.406))
    assert NAME in weights.origin


def test_a_network_that_timm_has_no_weights_of_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create, wanted, without = timm.create_model, PretrainedOptions(download=True, folder=tmp_path), "mobilenetv1_025"
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: {NAME: create}[name](name))
    assert [*find_some([without, NAME], wanted, 3)] == [NAME]
    save_file({"a": torch.zeros(1)}, tmp_path / f"{without}.safetensors")
    assert [*find_some([without, NAME], wanted, 3)] == [without, NAME]


def test_a_description_keeps_what_the_network_began_with(tensors: Tensors, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "w.safetensors", {**NORM, "pad": "same"})
    weights, pad_type = find_pretrained(NAME, PretrainedOptions(file=tmp_path / "w.safetensors"), 1)
    baseline = Baseline(NAME, 1, pad_type, weights)
    assert str(baseline) == f"timm:{NAME} stem_stride=1 pad_type=same pretrained={weights.key}"
    assert baseline.id == f"{NAME}-stem1-pretrained"
    again = Baseline.from_yaml(baseline.to_yaml())
    assert again == baseline
    network = TimmNetwork(again, Shape(1, 32, 10))
    assert network.normalisation == ((0.5,), (0.25,))
    assert type(network.build().get_submodule("blocks.1.0.conv_exp")).__name__ == "Conv2dSame"
    with pytest.raises(DataError, match="are not at hand"):
        network.start()
    for wrong in ("pad_type: valid", "pretrained: {file: x}", "pretrained: 1"):
        with pytest.raises(StudyError, match=r"Give a baseline\.yaml"):
            Baseline.from_yaml(Baseline(NAME).to_yaml() + wrong)


PHOTOS = {"coffee": {967}, "chelsea": {281, 282, 285}, "camera": {872}, "motorcycle_left": {665}, "rocket": {657}}


def weights_folder() -> Path:
    if not GIVEN or not (Path(GIVEN) / "photos").is_dir():
        pytest.skip(f"{FOLDER} names no folder of pretrained weights with photos/ to classify")
    return Path(GIVEN)


def photograph(path: Path, size: int) -> np.ndarray:
    """[3, size, size] on 0..1: an eighth more than `size`, the middle."""
    image, side = Image.open(path).convert("RGB"), round(size * 256 / 224)
    image = image.resize((max(side, side * image.width // image.height), max(side, side * image.height // image.width)),
                         Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size))).transpose(2, 0, 1) / 255


@pytest.mark.soak
def test_photographs_are_recognised_with_every_file(tmp_path: Path) -> None:
    """Wrong strides, paddings or means pass every check of names and shapes, and cost ten points or all. OpenVINO's
    answers are asked for, held against torch's."""
    folder = weights_folder()
    names = sorted(import_timm().list_models(), key=len, reverse=True)
    for file in sorted(folder.glob("*.safetensors")):
        name = next((name for name in names if file.stem.startswith(f"{name}_")), "")
        if not name or "backbone" in file.stem:  # timm has no such network, or it has no head
            continue
        with safe_open(file, "np") as opened:
            size, right = int((opened.metadata() or {}).get("size", 224)), 0
        weights, pad_type = find_pretrained(name, PretrainedOptions(file=file), 3)
        model = TimmNetwork(Baseline(name, 0, pad_type, weights), Shape(3, size, 1000)).start().eval()
        export_onnx(model, tmp_path / "model.onnx", (3, size, size))
        compiled = load_runtime("openvino").compile(tmp_path / "model.onnx", Target("ov", "openvino", "fp32"))
        for photo, classes in PHOTOS.items():
            pixels = photograph(folder / "photos" / f"{photo}.jpg", size)
            mean, std = (np.array(values)[:, None, None] for values in (weights.mean, weights.std))
            images = np.asarray((pixels - mean) / std, np.float32)[None]
            logits = compiled.logits(images)[0]
            with torch.inference_mode():
                expected = model(torch.from_numpy(images))[0].numpy()
            assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max(), file.name
            right += bool(classes & {*np.argsort(logits)[-3:].tolist()})
        assert right >= 4, (file.name, right)
