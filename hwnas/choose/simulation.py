"""A queue before several streams, simulated: what waiting adds to the times of calls at a rate of queries.

The server is that of `hwnas.choose.load`: first come, first served, and a stream that is free takes as many images as
wait, up to the batch. Calls take what calls took when they were measured, with as many streams busy, in the order in
which they were measured, so that a machine's slow moments stay together.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

QUERIES = 60_000  # of a simulation: p99 rests on the slowest 600


def simulate(arrivals: NDArray[np.float64], calls_s: Mapping[int, Sequence[float]], streams: int, batch: int,
             overhead_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Seconds from the arrival of each query to its answer.

    Args:
        arrivals: seconds at which queries come, rising.
        calls_s: seconds of calls, by how many streams were busy when they began, itself included.
        streams: how many calls run at a time.
        batch: the most images of a call.
        overhead_s: seconds of a query beside waiting and its call.
        rng: decides where among the measured calls the simulation begins.
    """
    at = {busy: int(rng.integers(len(times))) for busy, times in calls_s.items()}
    latencies = np.empty(len(arrivals))
    ends: list[float] = []  # of the calls that run, a heap
    first, n = 0, len(arrivals)
    times = arrivals.tolist()
    while first < n:
        start = times[first]
        if len(ends) == streams:  # all are busy: the one that ends next takes it
            start = max(start, heapq.heappop(ends))
        while ends and ends[0] <= start:
            heapq.heappop(ends)
        last = first + 1
        while last < n and last - first < batch and times[last] <= start:
            last += 1
        busy = len(ends) + 1
        known = calls_s[busy]
        end = start + known[at[busy]]
        at[busy] = (at[busy] + 1) % len(known)
        heapq.heappush(ends, end)
        for query in range(first, last):
            latencies[query] = end - times[query] + overhead_s
        first = last
    return latencies
