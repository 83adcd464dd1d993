"""Anchors: a few networks of a space, trained shortly and scored, that say what a score of untrained networks means.

They are kept in `anchors-<fingerprint>.json`, one network after the other, and shared by every process and search that
asks for the same: format "hwnas-anchors/1", `networks`: id, top1 and std (fractions), seconds of the training, scores
and score_seconds by name; or the reason why there is none under `failed`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.architecture import Architecture
from hwnas.errors import ConfigError, DataError, UserError
from hwnas.latency.locks import file_lock
from hwnas.paths import write_atomic

if TYPE_CHECKING:
    from hwnas.progress import Console
    from hwnas.space import SearchSpace

FORMAT = "hwnas-anchors/1"
_DRAWN = 1024  # random networks that the anchors are chosen from


@dataclass(frozen=True, slots=True)
class Anchor:
    """One network: its short training (top-1 as a fraction) and its scores; `failed` says why it has none."""

    id: str
    top1: float = 0.0
    std: float = 0.0
    seconds: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    score_seconds: dict[str, float] = field(default_factory=dict)
    failed: str = ""


def chosen(space: SearchSpace, n: int, seed: int, option: str = "zero_cost.anchors") -> list[Architecture]:
    """`n` different random networks, one from each n-th of the space's range of MACs, in random order; ConfigError,
    which names `option`, where the space has fewer."""
    rng = np.random.default_rng(seed)
    codes = np.unique(space.sample(rng, max(_DRAWN, 8 * n)), axis=0)
    found = {one.id: one for one in (space.decode(space.to_params(row)) for row in codes)}
    if len(found) < n:
        raise ConfigError(f"{n} anchors are wanted, and space {space.name} gave {len(found)} different networks. Set "
                          f"{option}={len(found)} or less.")
    ranked = sorted(found.values(), key=lambda one: (one.macs, one.id))
    places = ((np.arange(n) + rng.random(n)) / n * len(ranked)).astype(int)
    for i in range(1, n):  # neighbours share the network that both of their parts have a share of
        places[i] = max(places[i], places[i - 1] + 1)
    return [ranked[place] for place in rng.permutation(places)]


def anchors(path: Path, networks: Sequence[Architecture], measure: Callable[[Architecture], Anchor], console: Console
            ) -> list[Anchor]:
    """What `measure` says of each network, from `path` where it is there. One process works, others wait for it."""
    def waiting() -> None:
        console.note(f"another process trains the {len(networks)} anchors; waiting for it")

    with file_lock(path.with_suffix(".lock"), waiting):
        found = _read(path, networks)
        if len(found) == len(networks):
            return found
        with console.step(f"train {len(networks)} anchors") as report:
            for network in networks[len(found):]:
                found.append(measure(network))
                write_atomic(path, json.dumps({"format": FORMAT, "networks": [asdict(one) for one in found]}, indent=1))
                report(len(found) / len(networks), f"{len(found)} of {len(networks)} anchors")
    return found


def _read(path: Path, networks: Sequence[Architecture]) -> list[Anchor]:
    """The anchors that are there, in order; DataError for a file that is not of these networks."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Make it readable or delete it.") from None
    try:
        content: Any = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r} instead of {FORMAT!r}")
        found = [_anchor(one) for one in content["networks"]]
        if [one.id for one in found] != [network.id for network in networks[: len(found)]]:
            raise ValueError("its networks are others")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not the anchors that were kept there ({type(error).__name__}: {error}). Delete it, "
                        "and they are trained again.") from None
    return found


def _anchor(row: dict[str, Any]) -> Anchor:
    one = Anchor(**row)
    numbers = [one.top1, one.std, one.seconds, *one.scores.values(), *one.score_seconds.values()]
    if not all(isinstance(number, int | float) and np.isfinite(number) for number in numbers) or not 0 <= one.top1 <= 1:
        raise ValueError(f"anchor {one.id}: {row}")
    return one
