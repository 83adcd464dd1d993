"""The experiments stand beside the package, in the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

# Quick, and of what the documents say; the others are of what experiments do, and take long.
QUICK = {"test_arms.py", "test_tables.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name not in QUICK:
            item.add_marker(pytest.mark.soak)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
