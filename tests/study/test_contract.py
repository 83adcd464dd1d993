"""The study's storage, as workers open it, keeps Optuna's own contract for storages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from optuna.testing.pytest_storages import StorageTestCase

from hwnas.study.storage import Storage, open_storage


class TestOptunasCases(StorageTestCase):
    @pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)])
    def storage(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Storage]:
        url = f"sqlite:///{tmp_path}/study.db" if request.param == "sqlite" else request.getfixturevalue("place")
        opened = open_storage(url)
        yield opened
        opened.engine.dispose()
