"""How long a command takes to answer at all: a whole interpreter, started fresh each round."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def start(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def test_import_hwnas(benchmark: Any, within: Any) -> None:
    benchmark.pedantic(start, args=("-c", "import hwnas, sys; assert 'torch' not in sys.modules"), rounds=10,
                       warmup_rounds=1)
    within(benchmark, 0.3)


def test_search_help(benchmark: Any, within: Any) -> None:
    benchmark.pedantic(start, args=("-m", "hwnas.search", "--help"), rounds=5, warmup_rounds=1)
    within(benchmark, 1.5)
