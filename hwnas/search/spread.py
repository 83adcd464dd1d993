"""The choice of networks that are spread over latency while none of them has been timed yet."""

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

    The three prices are non-negative least squares of the relative errors. If the timed networks do not determine them,
    each one pays for a third of the slowest network.
    """
    # Three more equations, of little weight: each price pays a third of the slowest latency.
    largest = int(np.argmax(timed_ms))
    costs, measured_ms = _costs_of(timed), np.asarray(timed_ms, float)
    doubt = _DOUBT * np.diag(costs[largest]) / measured_ms[largest]
    prices, _ = scipy.optimize.nnls(np.vstack([costs / measured_ms[:, None], doubt]),
                                    np.concatenate([np.ones(len(timed)), np.full(len(doubt), _DOUBT / len(doubt))]))
    return np.asarray(_costs_of(networks) @ prices, np.float64)


def _costs_of(networks: Sequence[Architecture]) -> NDArray[np.float64]:
    """Return multiply-adds, operators and output values of each network [n, 3]."""
    rows = []
    for network in networks:
        operators = [each for block in network.blocks() for each in block.convolutions()]
        rows.append((network.macs, len(operators), sum(n_out * px * px for _, _, n_out, _, _, px in operators)))
    return np.array(rows, float)


def spread_over_latency(networks: Sequence[Architecture], latency_ms: Callable[[Architecture], float],
                        promise: Callable[[Architecture], float], n: int, bound_ms: float) -> list[Architecture]:
    """Choose at most `n` networks that are spread over the logarithm of latency, from the fastest to `bound_ms`.

    A network counts if none that is as fast promises as much. Each of `n` equal parts of the range that has any gives
    the network that promises the most. The first part gives its fastest one: nothing else keeps a tight cap. The
    slowest comes first.
    """
    front: list[Architecture] = []
    for each in sorted(networks, key=lambda each: (latency_ms(each), -promise(each))):
        if not front or promise(each) > promise(front[-1]):
            front.append(each)
    if not front or n < 1:
        return []
    ends = np.geomspace(latency_ms(front[0]), max(bound_ms, latency_ms(front[0])) * 1.001, n + 1)[1:]
    parts = {min(n - 1, int(np.searchsorted(ends, latency_ms(each)))): each for each in front}  # the last one of each
    if len(parts) > 1:
        parts[min(parts)] = front[0]
    return [parts[part] for part in sorted(parts, reverse=True)]
