"""SearchSpace: codes, canonical codes and segments against brute force; and what a bad file is told."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hwnas.errors import SpaceError, UnknownName
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace, find_space

SHIPPED = ("mnasnet_small", "mnasnet", "fused", "nas_bench_macro")
TINY = """\
image_size: 32
stem: {width: 16, stride: 1}
head: 64
stages:
  - {op: [ds, conv], channels: 16}
  - {op: [ir_e3, ir_e6], channels: [24, 40], repeats: [1, 2], stride: 2}
known:
  plain: {op: [ds, ir_e3], channels: [16, 24], repeats: [1, 2]}
"""


def _load(folder: Path, text: str, **options: Any) -> SearchSpace:
    path = folder / "tiny.yaml"
    path.write_text(text)
    return SearchSpace.load(path, channels=3, classes=10, **options)


def _all_codes(space: SearchSpace) -> np.ndarray:
    return np.array(list(itertools.product(*(range(len(p.choices)) for p in space.parameters))), dtype=np.int64)


def _joined(space: SearchSpace, row: np.ndarray) -> tuple[Any, ...]:
    return tuple(b for i in space.segments(row[None])[0] for b in space.segment_blocks(i))


stages = st.fixed_dictionaries({
    "op": st.lists(st.sampled_from(["conv", "conv_k7", "ds", "ir_e3", "er_e3_k3", "ir_e4_k3"]),
                   min_size=1, max_size=2, unique=True),
    "channels": st.sampled_from([8, 16, [8, 16], [16, 24]]),
    "repeats": st.sampled_from([1, 2, [1, 2]]), "stride": st.sampled_from([1, 2]),
    "kernel": st.sampled_from([3, [3, 5]]), "se": st.sampled_from([0, [0, 0.25]]),
    "skip": st.sampled_from([True, False, [True, False], [False, True]]),
    "multipliers": st.sampled_from([1, [0.75, 1.25]]),
})
spaces = st.fixed_dictionaries({
    "image_size": st.sampled_from([32, [24, 32]]),
    "stem": st.fixed_dictionaries({"width": st.sampled_from([16, [8, 16]]), "stride": st.sampled_from([1, [1, 2]])}),
    "head": st.sampled_from([0, [0, 32]]), "activation": st.sampled_from(["relu", ["relu", "hard_swish"]]),
    "stages": st.lists(stages, min_size=1, max_size=2),
})
macro_spaces = st.fixed_dictionaries({
    "image_size": st.just(16), "stem": st.just({"width": 8, "stride": 1}), "head": st.just(16),
    "stages": st.lists(st.sampled_from([8, 8, 16]).map(
        lambda c: {"op": ["ir_e3", "id", "conv"], "channels": c, "se": [0, 0.25]}), min_size=2, max_size=4),
})


@pytest.mark.parametrize("most", [600, pytest.param(1500, marks=pytest.mark.soak)])
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.one_of(spaces, macro_spaces), seed=st.integers(0, 99))
def test_random_spaces_agree_with_brute_force(tmp_path_factory, most, content, seed):
    try:
        space = _load(tmp_path_factory.mktemp("space"), yaml.safe_dump(content))
    except SpaceError as error:
        assume("no parameter" not in str(error))
        raise
    assume(space.size <= most)
    codes = _all_codes(space)
    assert len(codes) == space.size
    canonical = space.canonical_codes(codes)
    networks = [space.decode(space.to_params(row)) for row in codes]
    rows, blocks = [tuple(row) for row in canonical], [network.blocks() for network in networks]
    assert len(set(zip(rows, blocks, strict=True))) == len(set(zip(rows, networks, strict=True))) == len(set(rows))
    np.testing.assert_array_equal(space.canonical_codes(canonical), canonical)
    rng = np.random.default_rng(seed)
    for index in rng.choice(len(codes), size=min(20, len(codes)), replace=False):
        assert _joined(space, codes[index]) == blocks[index]


@pytest.mark.parametrize("name", [*SHIPPED, "convnext_small"])
def test_shipped_spaces_decode_encode_and_segment(name: str) -> None:
    space = SearchSpace.load(name, channels=1, classes=10)
    codes = space.sample(np.random.default_rng(0), 60)
    np.testing.assert_array_equal(space.canonical_codes(codes), codes)
    segments = space.segments(codes)
    assert segments.min() >= 0
    assert segments.max() < space.n_segments
    for row, ids in zip(codes, segments, strict=True):
        network = space.decode(space.to_params(row))
        assert tuple(b for i in ids for b in space.segment_blocks(i)) == network.blocks()
        assert Architecture.from_yaml(network.to_yaml()) == network
        assert Architecture.parse(str(network), 1, 10) == network
    assert len(space.segments(codes[:0])) == 0


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_spaces_name_networks_mobilenetv2_first(name: str) -> None:
    space = SearchSpace.load(name, channels=3, classes=10)
    assert next(iter(space.known)) == "mobilenetv2_like"
    assert 2 <= len(space.known) <= 3
    assert space.reference == space.known["mobilenetv2_like"]
    assert len({network.id for network in space.known.values()}) == len(space.known)
    assert all(len(set(parameter.choices)) == len(parameter.choices) >= 2 for parameter in space.parameters)
    for name, network in space.known.items():
        assert space.decode(space.known_params[name]) == network


def test_sizes_of_the_shipped_spaces():
    sizes = {name: SearchSpace.load(name, channels=3, classes=10) for name in SHIPPED}
    assert sizes["nas_bench_macro"].size == 3**8
    assert sizes["mnasnet"].size > 1e15
    assert sizes["mnasnet_small"].size > 1e9
    space = SearchSpace.load("mnasnet_small", channels=3, classes=10)
    macs = [space.decode(space.to_params(row)).macs for row in space.sample(np.random.default_rng(0), 300)]
    assert np.quantile(macs, 0.75) < 15e6


def test_equal_choices_and_dead_fields_are_no_parameters(tmp_path):
    space = _load(tmp_path, TINY.replace("[24, 40]", "16, multipliers: [0.75, 1, 1.25]").replace("16, 24]", "16, 24]"))
    assert next(p for p in space.parameters if p.name == "stage1.channels").choices == (16, 24)
    text = TINY.split("known")[0].replace("op: [ds, conv]", "op: [conv, conv_k5]").replace(
        "channels: 16}", "channels: 24, stride: 2, se: [0, 0.25], skip: [true, false]}")
    names = [p.name for p in _load(tmp_path, text).parameters]
    assert names == ["stage0.op", "stage1.op", "stage1.channels", "stage1.repeats"]


def test_mutation_reaches_every_parameter() -> None:
    space, rng = SearchSpace.load("mnasnet_small", channels=3, classes=10), np.random.default_rng(0)
    rows = space.sample(rng, 400)
    assert (space.mutate(rows, rng) != rows).any(axis=0).all()


def test_values_of_other_types_are_told_apart() -> None:
    space = SearchSpace.load("mnasnet_small", channels=3, classes=10)
    params = dict(space.known_params["mobilenetv2_like"])
    assert space.decode({**params, "stage1.kernel": np.int64(5)}) == space.decode({**params, "stage1.kernel": 5.0})
    for name, value, words in (("stage1.skip", 1, "must be one of True, False, got 1"),
                               ("stage1.kernel", 4, "must be one of 3, 5, got 4"),
                               ("stage1.op", ["ds"], "must be one of conv"), ("stage1.kernle", 3, "Did you mean")):
        with pytest.raises(SpaceError, match=words):
            space.decode({**params, name: value})
    del params["stage1.kernel"]
    with pytest.raises(SpaceError, match=r"stage1\.kernel is missing"):
        space.decode(params)


def test_fingerprint_follows_content_not_layout(tmp_path: Path) -> None:
    space = _load(tmp_path, TINY)
    assert _load(tmp_path, "# a comment\ndescription: words\n" + TINY).fingerprint == space.fingerprint
    others = [_load(tmp_path, TINY, image_size=48), SearchSpace.load(space.source, channels=1, classes=10),
              SearchSpace.load(space.source, channels=3, classes=11), _load(tmp_path, TINY.replace("40", "48"))]
    assert len({space.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_the_users_folder_comes_before_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    shipped = find_space("mnasnet")
    (tmp_path / "search_spaces").mkdir()
    for name in ("mnasnet", "mine"):
        (tmp_path / "search_spaces" / f"{name}.yaml").write_text(TINY)
    assert find_space("mnasnet") != shipped
    assert SearchSpace.load("mine", channels=3, classes=10).size == 16
    with pytest.raises(UnknownName, match=r"unknown search space 'mnasnet_smal'. Did you mean mnasnet_small"):
        SearchSpace.load("mnasnet_smal", channels=3, classes=10)
    with pytest.raises(SpaceError, match="cannot be read"):
        SearchSpace.load(tmp_path / "none.yaml", channels=3, classes=10)


@pytest.mark.parametrize(("old", "new", "words"), [
    ("head: 64\n", "", "the file lacks the key 'head'"),
    ("head: 64", "head: x", "head must be a whole number from 0 to 16384, got 'x'"),
    ("head: 64", "head: []", "head is an empty list"),
    ("head: 64", "hed: 64", "hed is an unknown key 'hed'. Did you mean head?"),
    ("head: 64", "head: [64", "cannot be read"),
    ("head: 64", "head: !!python/name:os.system x", "cannot be read"),
    ("[24, 40]", "[24, 24]", "stages[1].channels lists 24 twice"),
    ("ir_e6]", "ir_e3_se0]", "stages[1].op must be conv"),
    ("conv]", "conv+conv]", "stages[0].op must be conv"),
    ("stride: 2}", "stride: 4}", "stages[1].stride must be a whole number from 1 to 2, got 4"),
    ("stride: 2}", "stride: [1, 2]}", "stages[1].stride takes one value"),
    ("channels: 16}", "channels: 16, se: 0.01}", "stages[0].se 0.01 leaves no channel of 16"),
    ("image_size: 32", "image_size: 1", "too small for the total stride of 2: the smallest size of this space is 2"),
    ("channels: [16, 24], ", "", "known.plain lacks stage1.channels"),
    ("[1, 2]}\n", "[1, 3]}\n", "known.plain.repeats gives stage1.repeats as 3: it must be one of 1, 2"),
    ("known:\n", "known:\n  a: {op: [ds]}\n", "known.a.op must list 2 values, one a stage, got 1"),
    (TINY, "- 1", "is not a mapping"), (TINY, "stages: " + "[" * 1500, "more than 60 one in another"),
])
def test_bad_files_name_key_rule_and_value(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in TINY
    with pytest.raises(SpaceError) as caught:
        _load(tmp_path, TINY.replace(old, new))
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert message.startswith(f"{tmp_path / 'tiny.yaml'}: ")


def test_a_bomb_of_aliases_and_a_space_without_decisions_are_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(SpaceError, match="more than 20000 values"):
        _load(tmp_path, "\n".join(lines))
    fixed = TINY.split("known")[0].replace("[ds, conv]", "ds").replace("[ir_e3, ir_e6]", "ds")
    with pytest.raises(SpaceError, match="has no parameter"):
        _load(tmp_path, fixed.replace("[24, 40]", "24").replace("[1, 2]", "1"))


def test_spaces_load_without_heavy_imports() -> None:
    code = ("import sys; from hwnas.space.search_space import SearchSpace;"
            "SearchSpace.load('mnasnet', channels=3, classes=10);"
            "sys.exit(bool({'torch', 'timm', 'openvino', 'onnxruntime', 'optuna'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
