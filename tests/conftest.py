"""What every test shares: a user folder of its own, no network, the real data sets where they are."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tables and spaces of the user who runs the tests are neither read nor written, nor is a display needed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWNAS_HOME", str(tmp_path_factory.mktemp("hwnas-home")))
        patch.setenv("HWNAS_OWN_TABLES", "1")  # tests that calibrate do so on hosts of shipped tables too
        patch.setenv("MPLBACKEND", "Agg")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Nothing contacts the network: a connection to anything but this machine fails the test that asks for it."""
    connect = socket.socket.connect

    def only_local(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test contacts the network: {address!r}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", only_local)
        yield


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets (eurosat/, fashion_mnist/) named by HWNAS_DATA; skips where it is not set."""
    chosen = os.environ.get("HWNAS_DATA")
    if not chosen:
        pytest.skip("HWNAS_DATA does not name a folder of real data sets")
    root = Path(chosen)
    if not root.is_dir():
        pytest.fail(f"HWNAS_DATA={chosen} is no folder")
    return root
