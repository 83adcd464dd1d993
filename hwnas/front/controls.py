"""Controls: networks drawn at random from the space, as fast as the finalists. What a search is worth is what its
finalists have over these (Li and Talwalkar, 2019)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hwnas.front.rows import FrontRow
from hwnas.networks.network import FoundNetwork

if TYPE_CHECKING:
    from hwnas.space.search_space import SearchSpace
    from hwnas.study.objective import Predict

WITHIN = 0.05  # share by which the predicted latencies of a finalist and its control may differ
_DRAWS, _BATCHES = 4096, 16


def draw_controls(finalists: Sequence[FrontRow], space: SearchSpace, predict: Predict, k: int, seed: int,
                  say: Callable[[str], None]) -> list[FrontRow]:
    """Rows of `k` controls, each within 5 % of the predicted latency of the finalist in its `control_of`.

    They are the first that fit of networks drawn as `SearchSpace.sample` draws them, so nothing is known of their
    accuracy. Finalists take turns, slow ones and fast ones evenly. `say` hears of each finalist that none fits.
    """
    partners = _partners([row for row in finalists if row.latency_ms_predicted], k)
    rng = np.random.default_rng([seed, *b"controls"])
    taken, controls = {row.id for row in finalists}, []
    for _ in range(_BATCHES):
        if not partners:
            break
        codes = space.sample(rng, _DRAWS)
        predicted = predict(codes)
        for partner in list(partners):
            apart = np.abs(predicted.mean / (partner.latency_ms_predicted or np.nan) - 1)
            for at in np.flatnonzero(apart <= WITHIN):
                network = FoundNetwork(space.decode(space.to_params(codes[at])))
                if network.id not in taken:
                    taken.add(network.id)
                    partners.remove(partner)
                    controls.append(FrontRow.of(
                        network, target=partner.target, host=partner.host, is_control=True, control_of=partner.id,
                        latency_ms_predicted=float(predicted.mean[at]),
                        latency_ms_predicted_low=float(predicted.low[at]),
                        latency_ms_predicted_high=float(predicted.high[at])))
                    break
    for partner in partners:
        say(f"a control fewer: of {_DRAWS * _BATCHES} networks drawn from {space.name} no other one is predicted "
            f"within 5 % of {partner.id}'s {partner.latency_ms_predicted:.4g} ms.")
    return controls


def _partners(finalists: Sequence[FrontRow], k: int) -> list[FrontRow]:
    """The finalist of each control: all of them in turn, then evenly from the slowest to the fastest."""
    if not finalists or not k:
        return []
    by_latency = sorted(finalists, key=lambda row: -(row.latency_ms_predicted or 0.0))
    rounds, rest = divmod(k, len(by_latency))
    spread = np.linspace(0, len(by_latency) - 1, rest).round().astype(int)
    return by_latency * rounds + [by_latency[at] for at in spread]
