"""The list of cuts that a space has, of one network or of several, and files that break a rule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import yaml
from around_fixtures import member_of, space_around

from hwnas.errors import SpaceError
from hwnas.networks.around import check_cuts, family_content
from hwnas.space.architecture import Architecture
from hwnas.space.cuts import FAMILIES, join_contents
from hwnas.space.search_space import SearchSpace

NAMES = ("mobilenetv2_035", "test_efficientnet")


@cache
def content() -> dict[str, Any]:
    return join_contents([family_content(name, 3, 10, 64) for name in NAMES])


def space_of(content: dict[str, Any]) -> SearchSpace:
    return SearchSpace.of_content(content, "cuts", channels=3, classes=10)


@pytest.mark.parametrize("of_several", [False, True])
def test_every_known_network_is_listed_on_every_image_size_and_told_by_its_id(of_several: bool) -> None:
    space = space_of(content()) if of_several else space_around(NAMES[0])
    assert [parameter.name for parameter in space.parameters] == ["cut", "image_size"]
    ids = set()
    for name, network in space.known.items():
        for px in space.image_sizes:
            params = {"cut": name, "image_size": px}
            cut = space.decode(params)
            assert cut == replace(network, image_size=px)
            assert space.encode(Architecture.parse(str(cut), 3, 10)) == params
            ids.add(cut.id)
    assert len(ids) == space.size
    assert space.find(replace(space.known[next(iter(space.known))], image_size=61)) is None
    assert space.find(member_of(space_around(NAMES[0]), depth=6)) is None


def test_of_equal_networks_the_first_is_known() -> None:
    parts = family_content(NAMES[0], 3, 10, 64)
    early = parts["known"]["cut_early"]
    again = {**early, "blocks.5": 2}  # of a stage that it has not
    assert [*space_of({**parts, "known": {"ours": early, "theirs": again}}).known] == ["ours"]
    assert [*space_of({**parts, "known": {}}).known] == ["whole"]


def test_a_list_of_several_networks_has_the_cuts_of_each_and_no_others() -> None:
    space = space_of(content())
    assert space.arounds == NAMES
    for name in NAMES:
        alone = space_around(name)
        assert {f"{name} {cut}": network for cut, network in alone.known.items()} == {
            cut: network for cut, network in space.known.items() if network.around == name}
        assert space.wholes[name] == alone.known["whole"]
    assert space.find(space_around("test_resnet").known["whole"]) is None
    check_cuts(space)
    assert space_of(yaml.safe_load(space.text)).fingerprint == space.fingerprint


def test_a_network_is_listed_on_images_of_its_own_family_alone() -> None:
    first, second = content()[FAMILIES]
    space = space_of(join_contents([first, {**second, "image_size": [64, 32]}]))
    with pytest.raises(SpaceError, match="take no images of 48 px"):
        space.decode({"cut": f"{NAMES[1]} whole", "image_size": 48})
    assert space.find(replace(space.wholes[NAMES[1]], image_size=48)) is None
    assert space.find(replace(space.wholes[NAMES[0]], image_size=48)) is not None


@pytest.mark.parametrize("change", [
    lambda parts: parts[:1], lambda parts: [parts[0], parts[0]], lambda parts: parts[0], lambda parts: ["a", "b"],
    lambda parts: [parts[0], {**parts[1], "image_size": 48}], lambda parts: [parts[0], {**parts[1], "shares": {}}]])
def test_a_file_of_several_networks_that_breaks_a_rule_is_refused(change):
    with pytest.raises(SpaceError, match=FAMILIES):
        space_of({FAMILIES: change(content()[FAMILIES])})
