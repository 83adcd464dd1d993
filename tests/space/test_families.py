"""Several families in one space: whose networks are told apart, and files that break a rule."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import yaml
from around_fixtures import space_around
from hypothesis import given, settings
from hypothesis import strategies as st

from hwnas.errors import SpaceError
from hwnas.networks.around import check_cuts, family_content
from hwnas.space.families import FAMILIES, join_contents
from hwnas.space.search_space import SearchSpace

NAMES = ("mobilenetv2_035", "test_efficientnet")


@cache
def content() -> dict[str, Any]:
    return join_contents([family_content(name, 3, 10, 64) for name in NAMES])


@cache
def both() -> SearchSpace:
    return SearchSpace.of_content(content(), "both", channels=3, classes=10)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_every_network_has_codes_of_its_own_whichever_family_it_is_of(seed):
    space, rng = both(), np.random.default_rng(seed)
    codes = space.sample(rng, 20)
    networks = [space.decode(space.to_params(row)) for row in codes]
    assert [space.encode(network) for network in networks] == [space.to_params(row) for row in codes]
    assert len({network.id for network in networks}) == len({tuple(row) for row in codes})
    changed = space.mutate(codes[0], rng)
    assert space.decode(space.to_params(changed)) != networks[0]


def test_its_networks_are_those_of_the_spaces_of_one_family_and_no_others():
    space = both()
    assert space.arounds == NAMES
    for name in NAMES:
        alone = space_around(name)
        assert {f"{name} {cut}": network for cut, network in alone.known.items()} == {
            cut: network for cut, network in space.known.items() if network.around == name}
        assert space.wholes[name] == alone.known["whole"]
        drawn = alone.decode(alone.to_params(alone.sample(np.random.default_rng(0), 1)[0]))
        assert space.find(drawn) is not None
    assert space.find(space_around("test_resnet").known["whole"]) is None
    check_cuts(space)
    assert SearchSpace.of_content(yaml.safe_load(space.text), "both", channels=3, classes=10
                                  ).fingerprint == space.fingerprint


@pytest.mark.parametrize("change", [
    lambda parts: parts[:1], lambda parts: [parts[0], parts[0]], lambda parts: parts[0], lambda parts: ["a", "b"],
    lambda parts: [parts[0], {**parts[1], "shares": {}}]])
def test_a_file_of_families_that_breaks_a_rule_is_refused(change):
    with pytest.raises(SpaceError, match=FAMILIES):
        SearchSpace.of_content({FAMILIES: change(content()[FAMILIES])}, "both", channels=3, classes=10)
