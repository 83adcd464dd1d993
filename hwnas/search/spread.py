"""Networks that are spread over latency, of which none has been timed yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hwnas.lazy import scipy
from hwnas.space.architecture import Architecture

_DOUBT = 0.03  # weight of the assumption that each price is a third of a latency, in those of a timed network


def guess_ms(networks: Sequence[Architecture], timed: Sequence[Architecture], timed_ms: Sequence[float]
             ) -> NDArray[np.float64]:
    """Guess latencies [n] by networks that were timed: so much for each multiply-add, operator and output value.

    The three prices are non-negative least squares of the relative errors. As far as the timed networks do not tell
    them, each pays a third of the slowest one.
    """
    largest = int(np.argmax(timed_ms))
    known, told_ms = _costs_of(timed), np.asarray(timed_ms, float)
    doubt = _DOUBT * np.diag(known[largest]) / told_ms[largest]
    prices, _ = scipy.optimize.nnls(np.vstack([known / told_ms[:, None], doubt]),
                                    np.concatenate([np.ones(len(timed)), np.full(len(doubt), _DOUBT / len(doubt))]))
    return np.asarray(_costs_of(networks) @ prices, np.float64)


def _costs_of(networks: Sequence[Architecture]) -> NDArray[np.float64]:
    """Return multiply-adds, operators and output values of each network [n, 3]."""
    rows = []
    for network in networks:
        operators = [each for block in network.blocks() for each in block.convolutions()]
        rows.append((network.macs, len(operators), sum(n_out * px * px for _, _, n_out, _, _, px in operators)))
    return np.array(rows, float)


def spread_over_latency(networks: Sequence[Architecture], latency_ms: Callable[[Architecture], float], n: int,
                        bound_ms: float) -> list[Architecture]:
    """Choose at most `n` networks that are spread over the logarithm of latency, from the fastest to `bound_ms`.

    A network counts if none that is as fast has more multiply-adds. Of each of `n` equal parts of the range the one
    with the most is chosen, of the first part the fastest one: nothing else keeps a tight cap. Slowest first.
    """
    kept: list[Architecture] = []
    for each in sorted(networks, key=lambda each: (latency_ms(each), -each.macs)):
        if not kept or each.macs > kept[-1].macs:
            kept.append(each)
    if not kept or n < 1:
        return []
    ends = np.geomspace(latency_ms(kept[0]), max(bound_ms, latency_ms(kept[0])) * 1.001, n + 1)[1:]
    parts = {min(n - 1, int(np.searchsorted(ends, latency_ms(each)))): each for each in kept}  # the last one of each
    if len(parts) > 1:
        parts[min(parts)] = kept[0]
    return [parts[part] for part in sorted(parts, reverse=True)]
