"""Candidates: random settings, mutants and crossings of good ones, then evolution on what they are expected to gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hwnas.samplers.coding import Codes, Coding

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Mix:
    """How many candidates of each kind, and how the best of them evolve."""

    random: int = 250
    mutants: int = 350
    crossings: int = 150
    generations: int = 4
    children: int = 250
    parents: int = 50


@dataclass(frozen=True)
class Proposed:
    """Candidates with their scores, best first."""

    codes: Codes
    scores: Array


def propose(rng: np.random.Generator, coding: Coding, good: Codes, score: Callable[[Codes], tuple[Codes, Array]],
            mix: Mix) -> Proposed:
    """Candidates by descending score. `good` [n, p]: settings to start from, best first.

    `score` takes codes and returns those that may be asked for (canonical, unseen) with their scores.
    """
    pool = [coding.sample(rng, mix.random)]
    if len(good):
        pool.append(coding.mutate(good[_chosen(rng, len(good), mix.mutants)], rng))
        pool.append(crossed(rng, good, mix.crossings))
    found = _scored(score, np.concatenate(pool), Proposed(np.zeros((0, len(coding.columns))), np.zeros(0)))
    for _ in range(mix.generations):
        if not len(found.codes):
            break
        parents = found.codes[: mix.parents]
        half = mix.children // 2
        children = [coding.mutate(parents[rng.integers(0, len(parents), mix.children - half)], rng),
                    coding.mutate(crossed(rng, parents, half), rng)]
        found = _scored(score, np.concatenate(children), found)
    return found


def crossed(rng: np.random.Generator, parents: Codes, n: int) -> Codes:
    """Uniform crossings [n, p] of random pairs."""
    left, right = (parents[rng.integers(0, len(parents), n)] for _ in range(2))
    return np.where(rng.random(left.shape) < 0.5, left, right)


def _chosen(rng: np.random.Generator, n: int, size: int) -> NDArray[np.int64]:
    """Indices, the first ones more often."""
    return np.minimum((rng.random(size) ** 1.5 * n).astype(np.int64), n - 1)


def _scored(score: Callable[[Codes], tuple[Codes, Array]], codes: Codes, before: Proposed) -> Proposed:
    """All of `before` and of `codes` that are new, best first; equal scores in the order of their codes."""
    new, scores = score(np.unique(codes, axis=0))
    every, values = np.concatenate([before.codes, new]), np.concatenate([before.scores, scores])
    every, first = np.unique(every, axis=0, return_index=True)
    values = values[first]
    order = np.argsort(-values, kind="stable")
    return Proposed(every[order], values[order])
