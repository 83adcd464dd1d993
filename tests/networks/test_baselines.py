"""timm baselines: names, stems, sizes."""

from __future__ import annotations

import pytest

from hwnas.errors import StudyError, UserError
from hwnas.networks.baselines import Baseline, check_names, count_macs, count_params, variants


@pytest.mark.parametrize(("name", "error", "told"), [
    *((name, UserError, rf"^baselines: timm .*'{name}'\. Did you mean .*{near}") for name, near in (
        ("mobilenetv3_smal_050", "mobilenetv3_small_050"), ("resnet10", "resnet10t"))),
    *((name, UserError, "has no network") for name in (
        "hf-hub:timm/resnet10t.c3_in1k", "hf_hub:a/b", "local-dir:/tmp/x", "timm/resnet10t")),
    *((f"{name}.{tag}", UserError, rf"^baselines: .*not loaded.*Write {name}\.$") for name, tag in (
        ("resnet18", "a1_in1k"), ("mobilenetv2_100", "ra_in1k")))])
def test_a_name_that_is_unknown_or_would_load_weights_is_refused(name: str, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told) as caught:
        check_names([name])
    assert len(str(caught.value)) < 300


def test_small_images_get_a_second_variant_where_the_stem_has_a_stride() -> None:
    assert [one.id for one in variants(["resnet10t", "mobilenetv3_small_050"], 64)] == [
        "resnet10t", "resnet10t-stem1", "mobilenetv3_small_050", "mobilenetv3_small_050-stem1"]
    assert [one.id for one in variants(["resnet10t"], 65)] == ["resnet10t"]
    assert [one.id for one in variants(["convnext_atto"], 32)] == ["convnext_atto"]


@pytest.mark.parametrize(("name", "stem", "low"), [
    ("mobilenetv3_small_050", "conv_stem", 2.0), ("resnet10t", "conv1.0", 3.5)])
def test_variant_differs_in_the_stem_only(name: str, stem: str, low: float) -> None:
    plain, wide = Baseline(name).build(1, 10, 32), Baseline(name, 1).build(1, 10, 32)
    assert plain.get_submodule(stem).stride == (2, 2)
    assert wide.get_submodule(stem).stride == (1, 1)
    assert count_params(plain) == count_params(wide)
    assert low < count_macs(wide, (1, 32, 32)) / count_macs(plain, (1, 32, 32)) <= 4.1


@pytest.mark.parametrize(("name", "millions"), [
    ("mobilenetv1_075", 2.6), ("mobilenetv1_050", 1.3), ("mobilenetv1_025", 0.5)])
def test_narrow_mobilenets_have_the_size_that_is_published(name: str, millions: float) -> None:
    assert check_names([name]) == (name,)
    assert count_params(Baseline(name).build(3, 1000, 128)) == pytest.approx(millions * 1e6, rel=0.07)


def test_counts_agree_with_timm() -> None:
    model = Baseline("resnet18").build(3, 1000, 224)
    assert count_params(model) == 11_689_512  # timm's results table: 11.69 M
    assert count_macs(model, (3, 224, 224)) == pytest.approx(1.82e9, rel=0.01)  # and 1.82 GMACs
    assert model.training
    # A network that takes one size of images is built for these.
    assert count_macs(Baseline("vit_tiny_patch16_224").build(3, 10, 64), (3, 64, 64)) > 0
    assert count_macs(Baseline("test_vit3").build(3, 10, 64), (3, 64, 64)) > 0  # which expands a parameter


def test_yaml_round_trip() -> None:
    one = Baseline("resnet10t", 1)
    assert Baseline.from_yaml(one.to_yaml()) == one
    assert str(one) == "timm:resnet10t stem_stride=1"
    small = Baseline("resnet10t", image_size=24)
    assert Baseline.from_yaml(small.to_yaml()) == small
    assert (small.id, str(small)) == ("resnet10t-24px", "timm:resnet10t image_size=24")
    for text in ("", "[", "format: other", "format: hwnas-baseline/1\ntimm: 3\nstem_stride: 1",
                 one.to_yaml() + "image_size: 24.5\n", one.to_yaml() + "image_size: -1\n"):
        with pytest.raises(StudyError, match=r"Give a baseline\.yaml"):
            Baseline.from_yaml(text)
