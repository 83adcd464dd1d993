"""Cuts of a pretrained network: the space they make, and what they keep of its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

torch = pytest.importorskip("torch")

from hwnas.errors import ConfigError, DataError, SpaceError  # noqa: E402
from hwnas.latency.features import block_features  # noqa: E402
from hwnas.networks.around import (  # noqa: E402
    _source,
    around_of,
    begin,
    check_cuts,
    find_start,
    origin_of,
    space_content,
)
from hwnas.networks.baselines import (  # noqa: E402
    count_macs,
    count_params,
    original,
)
from hwnas.networks.build import settings_of  # noqa: E402
from hwnas.networks.cuts import Cut  # noqa: E402
from hwnas.networks.export import check_parity, export_onnx, randomise  # noqa: E402
from hwnas.networks.quantize import quantize_static  # noqa: E402
from hwnas.networks.weights import Pretrained, PretrainedOptions, find_pretrained  # noqa: E402
from hwnas.space.architecture import Architecture  # noqa: E402
from hwnas.space.search_space import SearchSpace  # noqa: E402
from hwnas.system.libraries import import_onnxruntime  # noqa: E402
from hwnas.training.loop import seeded  # noqa: E402

NAMES = ("test_efficientnet", "mnasnet_small", "mobilenetv2_035", "mobilenetv2_035+same", "tinynet_e",
         "mobilenetv1_025+same", "fbnetc_100", "tf_mobilenetv3_small_075", "lcnet_050")


def space_of(around: str, px: int, sizes: tuple[int, ...] = (), channels: int = 3) -> SearchSpace:
    return SearchSpace.of_content(space_content(around, channels, 10, px, sizes), "cuts", channels=channels, classes=10)


def trained(around: str, prune: bool = False) -> Any:
    """The network with statistics unlike fresh ones; `prune`: every second channel of every norm says nothing."""
    with seeded(0, 1):
        model: Any = original(around)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.weight.data.uniform_(0.5, 1.5)
                module.bias.data.uniform_(-0.5, 0.5)
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.5, 2)
                if prune:
                    module.weight.data[::2] = module.bias.data[::2] = 0
    return model


def saved(model: Any, around: str, folder: Path) -> Pretrained:
    save_file(model.state_dict(), folder / f"{around.partition('+')[0]}.safetensors")
    return find_pretrained(around.partition("+")[0], PretrainedOptions(folder=folder), 3)[0]


@pytest.mark.parametrize("around", NAMES)
@pytest.mark.parametrize("px", [16, 64])
def test_the_space_of_cuts_holds_the_whole_network_and_builds_what_it_says(around: str, px: int) -> None:
    space = space_of(around, px)
    whole = origin_of(around, 3, 10, px)
    assert max(space.image_sizes) == px
    stride = max(space.definition.stem_strides) * np.prod([stage.stride for stage in space.definition.stages])
    assert 2 * min(space.image_sizes) >= stride
    if px == 64:
        assert space.reference == whole
        assert space.decode(space.encode(whole)) == whole
    for row in space.sample(np.random.default_rng(0), 3):
        cut = space.decode(space.to_params(row))
        model = begin(cut, None).eval()
        assert model(torch.zeros(1, 3, cut.image_size, cut.image_size)).shape == (1, 10)
        assert count_params(model) == cut.params
        assert count_macs(model, (3, cut.image_size, cut.image_size)) == cut.macs
        assert Architecture.parse(str(cut), 3, 10) == cut
        assert cut.id != Architecture.from_dict({**cut.to_dict(), "around": ""}).id


@pytest.mark.parametrize("around", NAMES)
def test_the_whole_network_begins_as_it_is(around: str, tmp_path: Path) -> None:
    source = trained(around).eval()
    model = begin(origin_of(around, 3, 10, 64), saved(source, around, tmp_path)).eval()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model.forward_features(images), source.forward_features(images))
        ours, theirs = (each.forward_head(each.forward_features(images), pre_logits=True) for each in (model, source))
        assert torch.equal(ours, theirs)
    assert model.get_classifier().out_features == 10
    headless = begin(replace(origin_of(around, 3, 10, 64), head=0, pooled=False), saved(source, around, tmp_path))
    assert headless.eval()(images).shape == (2, 10)


@pytest.mark.parametrize("around", ["test_efficientnet", "mobilenetv2_035+same", "lcnet_050", "mobilenetv3_small_050"])
def test_cuts_by_depth_keep_the_first_blocks(around: str, tmp_path: Path) -> None:
    source = trained(around).eval()
    pretrained = saved(source, around, tmp_path)
    space = space_of(around, 64)
    shorter = {name: cut for name, cut in space.known.items() if name.startswith("cut_")}
    assert shorter
    images = torch.rand(2, 3, 64, 64)
    for name, architecture in shorter.items():
        model: Any = begin(architecture, pretrained).eval()
        expected: Any = original(around).eval()
        expected.load_state_dict(source.state_dict())
        Cut.parse(name.removeprefix("cut_")).apply(expected, around)
        with torch.no_grad():
            ours, theirs = (network.blocks(network.bn1(network.conv_stem(images))) for network in (model, expected))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("around", ["mobilenetv2_035", "tinynet_e", "test_efficientnet", "mobilenetv1_025",
                                    "fbnetc_100", "mobilenetv3_small_100"])
def test_channels_that_say_nothing_can_be_left_out(around: str, tmp_path: Path) -> None:
    """With half of all channels silent, a network of half the width and thickness answers as the whole one does."""
    source = trained(around, prune=True).eval()
    whole = origin_of(around, 3, 10, 64)
    stages = []
    for stage in whole.block_defs():
        stages.append(tuple(str(replace(block, channels=block.channels // 2, se=0.0)) for block in stage))
    for block in (block for stage in source.blocks for block in stage):
        if hasattr(getattr(block, "se", None), "conv_reduce"):
            block.se = torch.nn.Identity()
    half = replace(whole, stages=tuple(stages), stem_width=whole.stem_width // 2, head=whole.head // 2)
    complete = {**original(around).state_dict(), **source.state_dict()}
    save_file(complete, tmp_path / f"{around}.safetensors")
    pretrained, _ = find_pretrained(around, PretrainedOptions(folder=tmp_path), 3)
    model: Any = begin(half, pretrained).eval()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        ours, theirs = model.forward_features(images), source.forward_features(images)
    kept = theirs.abs().sum((0, 2, 3)) > 0
    assert ours.shape[1] >= kept.sum()
    torch.testing.assert_close(ours[:, ours.abs().sum((0, 2, 3)) > 0], theirs[:, kept])


@pytest.mark.parametrize("around", ["mobilenetv1_025", "tf_mobilenetv3_small_075+same", "hardcorenas_a"])
def test_cuts_are_exported_and_run_in_int8(around: str, tmp_path: Path) -> None:
    space = space_of(around, 64)
    for row in space.sample(np.random.default_rng(2), 2):
        cut = space.decode(space.to_params(row))
        model = randomise(begin(cut, None), 0).eval()
        images = np.random.default_rng(0).standard_normal((256, 3, cut.image_size, cut.image_size), dtype=np.float32)
        export_onnx(model, tmp_path / "fp32.onnx", images.shape[1:])
        check_parity(model, tmp_path / "fp32.onnx", images)
        quantize_static(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", images[:32], method="minmax")
        logits = [import_onnxruntime().InferenceSession(str(tmp_path / f"{precision}.onnx"), providers=[
            "CPUExecutionProvider"]).run(None, {"images": images[:32]})[0] for precision in ("fp32", "int8")]
        assert np.corrcoef(logits[0].ravel(), logits[1].ravel())[0, 1] > 0.9
        codes = space.canonical_codes(row[None])
        assert sum(map(block_features, cut.blocks())).tolist() == pytest.approx(sum(
            block_features(block) for segment in space.segments(codes)[0]
            for block in space.segment_blocks(int(segment))).tolist())


def test_a_narrower_head_behind_the_pooling_keeps_what_weighs_most(tmp_path: Path) -> None:
    around = "mobilenetv3_small_050"
    source = trained(around)
    with torch.no_grad():
        source.conv_head.weight[::2] *= 1e-3
    whole = origin_of(around, 3, 10, 64)
    model: Any = begin(replace(whole, head=whole.head // 2), saved(source, around, tmp_path))
    assert torch.equal(model.conv_head.weight, source.conv_head.weight[1::2])
    assert torch.equal(model.conv_head.bias, source.conv_head.bias[1::2])


def test_a_kernel_is_cropped_to_its_middle_and_a_block_becomes_one_dense_convolution(tmp_path: Path) -> None:
    around = "tinynet_e"
    source = trained(around).eval()
    pretrained = saved(source, around, tmp_path)
    whole = origin_of(around, 3, 10, 64)
    index = next(i for i, (block, *_) in enumerate(whole.block_defs()) if block.kernel == 5)

    def changed(old: str, new: str, at: int) -> Any:
        stages = [tuple(text.replace(old, new) for text in stage) if i == at else stage
                  for i, stage in enumerate(whole.stages)]
        return begin(Architecture.from_dict({**whole.to_dict(), "stages": [list(stage) for stage in stages]}),
                     pretrained)

    small: Any = changed("k5", "k3", index)
    assert torch.equal(small.blocks[index][0].conv_dw.weight, source.blocks[index][0].conv_dw.weight[..., 1:4, 1:4])
    dense: Any = changed("ir_", "er_", 1).blocks[1][0]
    block = source.blocks[1][0]
    maps = torch.rand(1, block.conv_pw.in_channels, 9, 9)
    scale = block.bn1.weight / (block.bn1.running_var + block.bn1.eps).sqrt()
    with torch.no_grad():
        inner = block.conv_pw(maps) * scale[:, None, None]
        apart = torch.nn.functional.conv2d(inner, block.conv_dw.weight, groups=inner.shape[1])
        at_once = torch.nn.functional.conv2d(maps, dense.conv_exp.weight)
    torch.testing.assert_close(at_once, apart)


def test_grey_images_read_the_sum_of_the_colours(tmp_path: Path) -> None:
    source = trained("mnasnet_small").eval()
    save_file(source.state_dict(), tmp_path / "mnasnet_small.safetensors")
    pretrained, _ = find_pretrained("mnasnet_small", PretrainedOptions(folder=tmp_path), 1)
    model: Any = begin(origin_of("mnasnet_small", 1, 10, 64), pretrained)
    assert torch.equal(model.conv_stem.weight, source.conv_stem.weight.sum(1, keepdim=True))


@pytest.mark.parametrize(("around", "words"), [
    ("resnet18", "builds it as ResNet"), ("lcnet_035", "keeps 22 of 88 channels"),
    ("mobilenetv4_conv_small_035", "UniversalInvertedResidual"),
    ("mixnet_s", "kernels of several sizes"), ("efficientnet_b1_pruned", "stage 1 differ in squeeze-and-excite"),
    ("efficientnet_blur_b0", "layers that cannot be said"),
    ("test_efficientnet_gn", "batch norms")])
def test_what_words_cannot_say_of_a_network_is_told(around: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        origin_of(around, 3, 10, 64)
    assert "\n" not in str(caught.value)


def test_a_network_that_words_cannot_say_is_traced() -> None:
    assert {"runs", "groups", "operators"} <= space_content("mobilenetv4_conv_small_035", 3, 10, 64).keys()


def test_sizes_that_are_asked_for_are_searched() -> None:
    assert space_of("mobilenetv2_035", 96, (64, 80, 128)).image_sizes == (96, 80, 64)


def test_padding_is_named_only_where_timm_does_not_know_it() -> None:
    assert around_of("mobilenetv2_035", "same") == "mobilenetv2_035+same"
    assert around_of("tf_efficientnet_lite0", "same") == "tf_efficientnet_lite0"
    assert around_of("mobilenetv2_035", "") == "mobilenetv2_035"


def test_the_first_cut_of_a_process_begins_as_any_later_one(tmp_path: Path) -> None:
    around = "mnasnet_small"
    cut, pretrained = space_of(around, 64).known["cut_1111h640"], saved(trained(around), around, tmp_path)
    settings_of.cache_clear()
    _source.cache_clear()
    begun = []
    for _ in range(2):
        with seeded(5, 1):
            begun.append(begin(cut, pretrained).state_dict())
    assert all(torch.equal(tensor, begun[1][name]) for name, tensor in begun[0].items())


@pytest.mark.parametrize(("key", "value", "words"), [
    ("repeats", [9, 1], r"stages\[2\]\.repeats must not be above 3"), ("kernel", [7], r"kernel must not be above 5"),
    ("channels", [999], r"channels must not be above"), ("op", ["ir_e9"], r"op must not be above 3"),
    ("op", ["ds"], "operations of the kind er or ir"),
    ("se", [0.5], "and se 0 or 0")])
def test_a_space_may_hold_no_more_than_the_network_that_it_is_cut_from(key: str, value: Any, words: str) -> None:
    content = space_content("mnasnet_100", 3, 10, 64)
    check_cuts(SearchSpace.of_content(content, "cuts", channels=3, classes=10))
    content["stages"][2][key] = value
    content.pop("known")
    with pytest.raises(SpaceError, match=words):
        check_cuts(SearchSpace.of_content(content, "cuts", channels=3, classes=10))


@pytest.mark.parametrize(("stage", "key", "value", "words"), [
    (1, "op", ["ir_e4.5+ir_e6"], r"stages\[1\]\.op must not be above 3.5"),
    (1, "activation", "relu6", "activation and gate"), (2, "gate", "sigmoid", "activation and gate"),
    (None, "pooled", False, "pooled must be true")])
def test_rows_gates_and_heads_are_those_of_the_network(stage: int | None, key: str, value: Any, words: str) -> None:
    content = space_content("mobilenetv3_small_050", 3, 10, 64)
    check_cuts(SearchSpace.of_content(content, "cuts", channels=3, classes=10))
    (content if stage is None else content["stages"][stage])[key] = value
    content.pop("known")
    with pytest.raises(SpaceError, match=words):
        check_cuts(SearchSpace.of_content(content, "cuts", channels=3, classes=10))


def test_weights_of_another_padding_are_refused(tmp_path: Path) -> None:
    save_file(trained("mnasnet_small").state_dict(), tmp_path / "mnasnet_small.safetensors", {"pad": "same"})
    options = PretrainedOptions(folder=tmp_path)
    assert find_start("mnasnet_small+same", options, 3).file == "mnasnet_small.safetensors"
    with pytest.raises(DataError, match="ask for another padding"):
        find_start("mnasnet_small", options, 3)


def test_spaces_of_different_cuts_have_different_names() -> None:
    names = [space_of(around, px).name for around in ("mnasnet_small", "mobilenetv2_035") for px in (64, 96)]
    assert len({*names}) == len(names)
    assert names[0].startswith("around_mnasnet_small_")


def test_sizes_below_the_stride_that_were_asked_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="image_sizes: 8 px is too small for mobilenetv2_035, whose stride is 32"):
        space_of("mobilenetv2_035", 64, (8, 48))
