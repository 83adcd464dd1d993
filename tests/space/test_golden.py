"""Shipped spaces: ids, keys, codes, features of 200 networks each are those that tables and studies were made with."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from hwnas.latency.features import LATER, block_features
from hwnas.space.search_space import SearchSpace

# (fingerprint, then digests of codes, ids, table keys, arch-def strings, features) as of 2026-11-22;
# codes and strings of nas_bench_macro as of 2026-11-29, since identities are left where they are drawn.
GOLDEN: dict[str, tuple[str | int, ...]] = {
    "fused": ("d49d64794d0f", "d9a8cfbc3b79b22b", "13a1262c03a4f97a",
        "d60ddc2354d2326a", "aab5b30e6d104fbb", "208ac9d4bac2f5c6"),
    "mnasnet": ("3fd34dda8703", "c3192526f9b3d9c5", "2bb7a3aadf826788",
        "2766e121994f4bfb", "492e0226fa3921bd", "91e362e5742dd9b9"),
    "mnasnet_small": ("dae6486eb121", "706e73a3f3ad40b1", "3e00d224d229b0c5",
        "e681d52c61af5eaf", "c7b120f17d138f9b", "90163a163a386611"),
    "nas_bench_macro": ("b6104fdf6b2f", "e987956228a8513c", "63c7af004c9bd233",
        "3db9e09326eb70cc", "5fb4bb9ea22af46c", "2df771b0a64495aa"),
}


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def facts(name: str) -> tuple[str | int, ...]:
    space = SearchSpace.load(name, channels=3, classes=10)
    codes = space.sample(np.random.default_rng(0), 200)
    networks = [space.decode(space.to_params(row)) for row in codes]
    blocks = [network.blocks() for network in networks]
    rows = [np.stack([block_features(block) for block in row]) for row in blocks]
    assert not any(row[:, -len(LATER):].any() for row in rows)  # columns that came later
    features = [[f"{value:.6g}" for value in row[:, :-len(LATER)].ravel()] for row in rows]
    return (space.fingerprint, digest(codes.tolist()), digest([one.id for one in networks]),
            digest([[block.key for block in row] for row in blocks]), digest([one.to_yaml() for one in networks]),
            digest(features))


@pytest.mark.parametrize("name", GOLDEN)
def test_a_shipped_space_is_what_it_was(name: str) -> None:
    assert facts(name) == GOLDEN[name]
