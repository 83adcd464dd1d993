"""The list of cuts that a space has, of one network or of several, and files that break a rule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from around_fixtures import cut_of, space_around

from hwnas.errors import SpaceError
from hwnas.networks.around import describe_cuts, load_space, space_of_cuts
from hwnas.space.architecture import Architecture
from hwnas.space.cuts import FAMILIES
from hwnas.space.search_space import SearchSpace

NAMES = ("mobilenetv2_035", "test_efficientnet")


@cache
def contents() -> list[dict[str, Any]]:
    return [describe_cuts(name, 3, 10, 64) for name in NAMES]


def space_of(*contents: dict[str, Any]) -> SearchSpace:
    return space_of_cuts(contents, 3, 10)


@pytest.mark.parametrize("of_several", [False, True])
def test_every_known_network_is_listed_on_every_image_size_and_told_by_its_id(of_several: bool) -> None:
    space = space_of(*contents()) if of_several else space_around(NAMES[0])
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
    assert space.encode(replace(space.known[next(iter(space.known))], image_size=61)) is None
    assert space.encode(cut_of(space_around(NAMES[0]), depth=6)) is None
    assert space.encode(SearchSpace.load("mnasnet_small", channels=3, classes=10).reference) is None


def test_of_equal_networks_the_first_is_known() -> None:
    early = contents()[0]["known"]["cut_early"]
    again = {**early, "blocks.5": 2}  # of a stage that it has not
    assert [*space_of({**contents()[0], "known": {"ours": early, "theirs": again}}).known] == ["ours"]
    assert [*space_of({**contents()[0], "known": {}}).known] == ["whole"]


def test_a_list_of_several_networks_has_the_cuts_of_each_and_no_others() -> None:
    space = space_of(*contents())
    assert space.arounds == NAMES
    for name in NAMES:
        alone = space_around(name)
        assert {f"{name} {cut}": network for cut, network in alone.known.items()} == {
            cut: network for cut, network in space.known.items() if network.around == name}
        assert space.wholes[name] == alone.known["whole"]
    assert space.encode(space_around("test_resnet").known["whole"]) is None


def test_a_space_is_read_back_from_its_file(tmp_path: Path) -> None:
    for space in (space_around(NAMES[0]), space_of(*contents())):
        (tmp_path / "space.yaml").write_text(space.text)
        again = load_space(str(tmp_path / "space.yaml"), 3, 10)
        assert (again.name, again.fingerprint, again.known) == (space.name, space.fingerprint, space.known)
        assert load_space(str(tmp_path / "space.yaml"), 3, 10, 48).image_sizes == (48,)
        with pytest.raises(SpaceError, match="Nothing is to be measured before"):
            SearchSpace.load(tmp_path / "space.yaml", channels=3, classes=10)
    assert load_space("mnasnet_small", 3, 10).arounds == ()


def test_a_network_is_listed_on_images_of_its_own_sizes_alone() -> None:
    first, second = contents()
    space = space_of(first, {**second, "image_size": [64, 32]})
    with pytest.raises(SpaceError, match="take no images of 48 px"):
        space.decode({"cut": f"{NAMES[1]} whole", "image_size": 48})
    assert space.encode(replace(space.wholes[NAMES[1]], image_size=48)) is None
    assert space.encode(replace(space.wholes[NAMES[0]], image_size=48)) is not None


@pytest.mark.parametrize(("change", "words"), [
    ({"around": "No/Name"}, "around must be the name"), ({"image_size": "x"}, "image_size must be a whole number"),
    ({"known": {"odd": {"blocks.5": 7}}}, r"known\.odd\.blocks\.5 must be one of 2, 1, 0"),
    ({"known": {"odd": {"blocks.99": 1}}}, "unknown key 'blocks.99'"), ({"known": None}, "mapping of names"),
    ({"strange": 1}, "unknown key 'strange'")])
def test_a_file_that_breaks_a_rule_is_one_clear_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpaceError, match=words) as caught:
        space_of({**contents()[0], **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [
    lambda parts: parts[:1], lambda parts: [parts[0], parts[0]], lambda parts: parts[0], lambda parts: ["a", "b"],
    lambda parts: [parts[0], {**parts[1], "image_size": 48}]])
def test_a_file_of_several_networks_that_breaks_a_rule_is_refused(change: Any, tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(yaml.safe_dump({FAMILIES: change(contents())}))
    with pytest.raises(SpaceError, match=FAMILIES):
        load_space(str(tmp_path / "space.yaml"), 3, 10)
