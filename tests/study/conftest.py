"""Workers in processes of their own, none of which outlives its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from race_fixtures import Worker


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def begin(*args: Any) -> Worker:
        workers.append(Worker(*args))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.close()
