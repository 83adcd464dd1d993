"""What keeping freed memory is worth to a training step: CPU time with it over CPU time without, in one run."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import Any

ROUNDS = 5
LIMIT = 0.97
# A process for each: the C library adapts to what it has seen.
CHILD = """
import contextlib, sys, time
import numpy as np
import torch
from hwnas.networks.network import build
from hwnas.space.search_space import SearchSpace
from hwnas.system.libraries import kept_memory

torch.set_num_threads(1)
torch.manual_seed(0)
space = SearchSpace.load("mnasnet_small", channels=3, classes=10)
found = [space.decode(space.to_params(codes)) for codes in space.sample(np.random.default_rng(0), 8)]
networks = [build(one).to(memory_format=torch.channels_last) for one in found]
images = torch.randn(64, 3, 32, 32).contiguous(memory_format=torch.channels_last)
labels = torch.randint(0, 10, (64,))
with kept_memory() if sys.argv[1] == "kept" else contextlib.nullcontext():
    for step in range(4):
        begun = time.process_time() if step == 1 else begun if step else 0.0
        for network in networks:
            torch.nn.functional.cross_entropy(network(images), labels).backward()
    print(time.process_time() - begun)
"""


def cpu_seconds(how: str) -> float:
    """Of three steps of eight networks; glibc as it comes, whatever the user's environment says."""
    environment = {key: value for key, value in os.environ.items()
                   if not key.startswith("MALLOC_") and key != "GLIBC_TUNABLES"}
    run = subprocess.run([sys.executable, "-c", CHILD, how], capture_output=True, text=True, check=True,
                         env=environment)
    return float(run.stdout)


def ratios() -> list[float]:
    """Of the rounds, least first; the two take turns."""
    return sorted(cpu_seconds("kept") / cpu_seconds("plain") for _ in range(ROUNDS))


def test_a_step_with_freed_memory_kept(benchmark: Any) -> None:
    found = benchmark.pedantic(ratios, rounds=1)
    benchmark.extra_info.update(ratio=statistics.median(found), low=found[0], high=found[-1], limit=LIMIT)
    assert statistics.median(found) <= LIMIT
