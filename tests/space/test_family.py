"""A family of networks: its file, its members as data, and files that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from around_fixtures import member_of

from hwnas.errors import SpaceError
from hwnas.space.architecture import Architecture
from hwnas.space.family import Member
from hwnas.space.search_space import SearchSpace

# A stem, a stage of two blocks of which the second may go, and a classifier.
CONTENT: dict[str, Any] = {
    "description": "small", "around": "anything", "image_size": [32, 16], "runs": {"stage": ["stage.1"]},
    "groups": {"stem": [32, "stream2"], "stage.0.a": [64, "inner2"], "stage.1.a": [64, "inner2"]},
    "shares": {"stream2": [1.0, 0.5], "inner2": [1.0, 0.5, 0.25]},
    "operators": ["0 - stem 3 stem*32 3 1 2", "0 stage.0 pointwise stem*32 stage.0.a*64 1 2 2",
                  "0 stage.0 depthwise stage.0.a*64 stage.0.a*64 3 2 2",
                  "0 stage.0 pointwise stage.0.a*64 stem*32 1 2 2",
                  "0 stage.1 dense stem*32 stage.1.a*64 3 2 2", "0 stage.1 dense stage.1.a*64 stem*32 3 2 2",
                  "0 - linear stem*32+8 10 1 0 0"],
    "known": {"whole": {}, "short": {"stage": 0, "width.inner2": 0.5}}}


# Two stages, the second with squeeze-and-excite and a larger kernel, and a head of 64 channels.
STAGED: dict[str, Any] = {
    "around": "anything", "activation": "swish", "image_size": 32, "depth": [2, 1], "runs": {"b": ["b.1"]},
    "groups": {"stem": [16, "stream2"], "b.0": [32, "stream4"], "head": [64, "outer4"]},
    "shares": {"stream2": [1.0, 0.5], "stream4": [1.0, 0.5], "outer4": [1.0, 0.5]},
    "operators": ["0 - stem 3 stem*16 3 1 2", "1 a.0 dense stem*16 stem*16 3 2 2",
                  "2 b.0 dense stem*16 b.0*32 3 2 4", "2 b.1 depthwise b.0*32 b.0*32 5 4 4",
                  "2 b.1 se b.0*32 8 1 0 0", "2 b.1 se 8 b.0*32 1 0 0", "2 b.1 pointwise b.0*32 b.0*32 1 4 4",
                  "3 - pointwise b.0*32 head*64 1 4 4", "3 - linear head*64 10 1 0 0"],
    "known": {"whole": {}}}


def space_of(**changes: Any) -> SearchSpace:
    return SearchSpace.of_content({**CONTENT, **changes}, "small", channels=3, classes=10)


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return space_of()


def test_a_member_keeps_the_channels_and_blocks_that_are_chosen(space: SearchSpace) -> None:
    whole, short = space.known["whole"], space.known["short"]
    assert isinstance(short, Member)
    assert (len(whole.blocks()), len(short.blocks())) == (4, 3)
    narrow = member_of(space, image_size=16, stage=1, width__stream2=0.5, width__inner2=0.25)
    assert narrow.blocks()[1].convolutions() == (
        ("pointwise", 16, 16, 1, 8, 8), ("depthwise", 16, 16, 3, 8, 8), ("pointwise", 16, 16, 1, 8, 8))
    assert narrow.blocks()[-1].convolutions() == (("linear", 24, 10, 1, 1, 1),)  # 16 of the stream, 8 that never change
    assert narrow.macs < short.macs < whole.macs
    assert short.image_size // short.total_stride == 16


def test_stages_are_chosen() -> None:
    space = SearchSpace.of_content(STAGED, "staged", channels=3, classes=10)
    short = member_of(space, depth=1)
    convolutions = [operator for block in short.blocks() for operator in block.convolutions()]
    assert convolutions[2:] == [("pointwise", 16, 64, 1, 16, 16), ("linear", 64, 10, 1, 1, 1)]  # on the first's maps
    assert {block.activation for block in space.known["whole"].blocks()} == {"swish"}
    assert member_of(space, depth=1, b=0) == short, "of a stage that is gone nothing counts"
    assert member_of(space, b=0).id != space.known["whole"].id


def test_a_member_keeps_no_number_without_end(space: SearchSpace) -> None:
    whole = space.known["whole"]
    with pytest.raises(SpaceError, match="no network that is cut"):
        Member.from_dict({**whole.to_dict(), "kept": {**whole.to_dict()["kept"], "stage": float("inf")}})


def test_a_family_and_its_members_read_back_from_their_texts(space):
    for network in space.known.values():
        for again in (Architecture.parse(str(network), 3, 10), Architecture.from_yaml(network.to_yaml())):
            assert again == network
            assert json.dumps(again.to_dict()) == json.dumps(network.to_dict())  # what names it in fingerprints
    again = SearchSpace.of_content(yaml.safe_load(space.text), "small", channels=3, classes=10)
    assert again.fingerprint == space.fingerprint
    assert again.known == space.known
    content = yaml.safe_load(space.text)
    mixed = {key: dict(reversed(of.items())) if key in ("groups", "runs", "shares") else of
             for key, of in sorted(content.items())}
    assert SearchSpace.of_content(mixed, "small", channels=3, classes=10).fingerprint == space.fingerprint
    assert space.find(space_of(around="another").known["whole"]) is None
    assert space.find(SearchSpace.load("mnasnet_small", channels=3, classes=10).reference) is None


@pytest.mark.parametrize(("changes", "words"), [
    ({"around": "No/Name"}, "around must be the name"), ({"operators": ["0 - stem 3 gone*32 3 1 2"]}, "not among"),
    ({"operators": ["0 - odd 3 stem*32 3 1 2"]}, "is no family"),
    ({"operators": []}, "operators must be 1 to"), ({"depth": [1]}, "depth must begin with all stages"),
    ({"depth": [float("inf")]}, "is no family"),
    ({"operators": ["1 - stem 3 stem*32 3 1 2", "0 - linear stem*32 10 1 0 0"]}, "never fall"),
    ({"depth": [1, 2]}, "largest first"), ({"depth": [1, 1]}, "largest first"), ({"activation": "odd"}, "activation"),
    ({"groups": {"stem": [32, "nothing"]}}, "not among|no shares"), ({"groups": {"stem": [0, "stream2"]}}, "not among"),
    ({"shares": {"stream2": [0.5], "inner2": [1.0]}}, "begin with 1"),
    ({"shares": {"stream2": [1.0, 0.5, float("nan")], "inner2": [1.0]}}, "lie above 0"),
    ({"known": {"odd": {"stage": 7}}}, "must be one of 1, 0"), ({"known": None}, "mapping of names"),
    ({"strange": 1}, "strange")])
def test_a_file_that_is_no_family_is_one_clear_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpaceError, match=words) as caught:
        space_of(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [
    "cut:x", "cut:x@32 relu a=1", "cut:x@32 odd a=1 /stem/3/8/3/1/2", "cut:x@32 relu a=1 /odd/1/2/3/4/5",
    "cut:x@0 relu a=1 /stem/3/8/3/1/2", "cut:x@32 relu a=b /stem/3/8/3/1/2", "cut:x@32 relu a=1 /linear/3/8/1/0/0",
    "cut:x@32 relu a=1 /stem/3/9999999/3/1/2", "cut:X!@32 relu a=1 /stem/3/8/3/1/2"])
def test_a_text_that_is_no_member_is_one_clear_line(text: str) -> None:
    with pytest.raises(SpaceError) as caught:
        Architecture.parse(text, 3, 10)
    assert "\n" not in str(caught.value)
