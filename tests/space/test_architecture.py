"""Architecture: arch-def strings and architecture.yaml, both ways, and what they refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwnas.errors import SpaceError
from hwnas.space.architecture import Architecture, BlockDef, Cut

SMALL = Architecture((("ds_r1_k3_s1_c16",), ("ir_r2_k5_s2_e3_c40_se0.25",)), 16, 1, 64, "relu", 32, 3, 10)
GOLDEN = """\
format: hwnas-architecture/1
stem:
  width: 16
  stride: 1
stages:
- - ds_r1_k3_s1_c16
- - ir_r2_k5_s2_e3_c40_se0.25
head: 64
activation: relu
input:
  size: 32
  channels: 3
classes: 10
"""

block_defs = st.builds(
    lambda kind, repeats, kernel, stride, expansion, channels, se, skip: BlockDef(
        kind, repeats, 1 if kind == "id" else kernel, stride, expansion if kind in ("ir", "er") else 1.0, channels,
        se if kind in ("ds", "ir", "er") else 0.0, skip and kind != "id"),
    st.sampled_from(["cn", "ds", "ir", "er", "id"]), st.integers(1, 9), st.sampled_from([1, 3, 5, 7]),
    st.sampled_from([1, 2]), st.sampled_from([1.0, 2.5, 3.0, 6.0]), st.integers(1, 512),
    st.sampled_from([0.0, 0.25, 0.5]), st.booleans())


@given(block_defs)
def test_every_block_string_parses_back(block: BlockDef) -> None:
    assert BlockDef.parse(str(block)) == block


@given(st.lists(st.lists(block_defs.map(lambda b: replace(b, stride=1)), min_size=1, max_size=3), min_size=1,
                max_size=4), st.sampled_from(["relu", "relu6", "swish", "hard_swish"]))
def test_every_architecture_reads_back_from_yaml_and_text(stages: list[list[BlockDef]], activation: str) -> None:
    wide = [[replace(block, channels=block.channels + 16) for block in stage] for stage in stages]
    written = Architecture(tuple(tuple(map(str, stage)) for stage in wide), 32, 2, 0, activation, 64, 1, 5)
    read = Architecture.from_yaml(written.to_yaml())
    assert read == written == Architecture.parse(str(written), 1, 5)
    assert read.blocks() == written.blocks()


def test_yaml_is_golden_and_blocks_follow_each_other() -> None:
    assert SMALL.to_yaml() == GOLDEN
    assert Architecture.from_yaml(GOLDEN) == SMALL
    blocks = SMALL.blocks()
    assert [b.kind for b in blocks] == ["stem", "ds", "ir", "ir", "head"]
    assert [b.stride for b in blocks] == [1, 1, 2, 1, 1]
    assert [b.skip for b in blocks] == [False, True, False, True, False]
    for before, after in pairwise(blocks):
        assert (after.in_channels, after.size) == (before.out_channels, before.out_size)
    assert blocks == tuple(b for stage in SMALL.staged_blocks() for b in stage)


def test_id_names_the_network_and_an_identity_that_changes_nothing_is_no_block():
    moot = replace(SMALL, stages=(("ds_k3_c16",), ("ir_r2_k5_s2_e3_c40_se0.25_skip",)))
    other = replace(SMALL, stages=(("ds_r1_k3_s1_c16_noskip",), SMALL.stages[1]))
    assert moot.id == SMALL.id
    assert other.id != SMALL.id
    assert len(SMALL.id) == 8
    assert set(SMALL.id) <= set("0123456789abcdef")
    network = replace(SMALL, stages=(("id_c32_s2",), ("id_c32",), ("ir_k3_e3_c32",)))
    assert [b.kind for b in network.blocks()] == ["stem", "id", "ir", "head"]
    assert [len(stage) for stage in network.staged_blocks()] == [1, 1, 0, 1, 1]


@pytest.mark.parametrize(("text", "words"), [
    ("xy_k3_c16", "kind must be one of"), ("ir_k3_c16_q", "cannot read 'q'"), ("ir_k3_k5_c16", "'k' is given twice"),
    ("ir_k4_c16", "k must be odd, got 4"), ("ir_k3", "c must be a whole number"), ("cn_c16", "k must be a whole"),
    ("ir_k3_e99_c16", "e must be between"), ("ir_k3_c16_se2", "se must be between"),
    ("ir_k3_c16_se0.5_se0.5", "'se' is given twice"), ("ir_k3_c16_nre", "cannot read 'nre'"),
])
def test_bad_block_strings_name_the_rule(text: str, words: str) -> None:
    with pytest.raises(SpaceError, match=words) as caught:
        BlockDef.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("old", "new", "words"), [
    ("hwnas-architecture/1", "other/1", "not an architecture"), ("ture/1", "ture/2", "reads up to 1"),
    ("activation: relu", "activation: tanh", "activation must be one of relu"),
    ("stride: 1", "stride: 4", "stride must be a whole number from 1 to 2, got 4"),
    ("- - ds_r1_k3_s1_c16", "- ds", "stages must be a list"),
    ("- - ds_r1_k3_s1_c16", "- - ds_k3_c16\n  - ds_k3_s2_c16", "only the first string of a stage"),
    ("se0.25", "se0.01", "leaves no channel"), ("head: 64", "head: [64", "not YAML"),
    ("head: 64", "head: 64\naround: resnet18", "says what it keeps: kept is missing"),
])
def test_bad_files_name_place_rule_and_value(old: str, new: str, words: str) -> None:
    assert old in GOLDEN
    with pytest.raises(SpaceError, match=words) as caught:
        Architecture.from_yaml(GOLDEN.replace(old, new), where="models/x/architecture.yaml")
    message = str(caught.value)
    assert message.startswith(("models/x/architecture.yaml: ", "block 'ds'"))
    assert "\n" not in message


@pytest.mark.parametrize(("text", "words"), [
    ("0a1b2c3d", "1 words"), ("stem16 ds_r1_k3_s1_c16 head0 relu@32", "word 1, 'stem16', must be stem<width>"),
    ("stem16s1 ds_r1_k3_s1_c16 ds_r1_k3_s1_c16 relu@32", "word 3, 'ds_r1_k3_s1_c16', must be head<width>"),
    ("stem16s1 ds_r1_k3_s1_c16 head0 relu", "word 4, 'relu', must be <activation>@"),
    ("stem16s1 ds_r1_k3_s1_c16+xy head0 relu@32", "block 'xy'"),
    ("stem16s1 ds_r1_k3_s1_c16 head0 tanh@32", "activation must be one of"),
    ("stem16s3 ds_r1_k3_s1_c16 head0 relu@32", "stride must be a whole number from 1 to 2, got 3"),
])
def test_text_that_is_no_network_says_where(text: str, words: str) -> None:
    with pytest.raises(SpaceError, match=re.escape(words)):
        Architecture.parse(text, 1, 10)


CUT = Cut.of("anything", "relu", (("stage", 1), ("width.inner2", 0.5)), (
    ("", "stem", 3, 16, 3, 1, 2), ("a", "pointwise", 16, 16, 1, 2, 2), ("a", "depthwise", 16, 16, 3, 2, 2),
    ("", "linear", 16, 10, 1, 0, 0)), 32, 3, 10)


def test_a_cut_reads_back_from_its_texts() -> None:
    assert [block.skip for block in CUT.blocks()] == [False, True, False]
    for again in (Architecture.parse(str(CUT), 3, 10), Architecture.from_yaml(CUT.to_yaml())):
        assert again == CUT
        assert json.dumps(again.to_dict()) == json.dumps(CUT.to_dict())  # what names it in fingerprints


@pytest.mark.parametrize("text", [
    "cut:x", "cut:x@32 relu a=1", "cut:x@32 odd a=1 /stem/3/8/3/1/2", "cut:x@32 relu a=1 /odd/1/2/3/4/5",
    "cut:x@0 relu a=1 /stem/3/8/3/1/2", "cut:x@32 relu a=b /stem/3/8/3/1/2", "cut:x@32 relu a=1 /linear/3/8/1/0/0",
    "cut:x@32 relu a=inf /stem/3/8/3/1/2", "cut:x@32 relu a=1 /stem/3/9999999/3/1/2",
    "cut:X!@32 relu a=1 /stem/3/8/3/1/2"])
def test_a_text_that_is_no_cut_is_one_clear_line(text: str) -> None:
    with pytest.raises(SpaceError) as caught:
        Architecture.parse(text, 3, 10)
    assert "\n" not in str(caught.value)
