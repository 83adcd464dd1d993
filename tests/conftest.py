"""What every test shares: a user folder of its own, no network, the real data sets where they are, an end in time."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clock_fixtures import VirtualClock
from device_fixtures import board, sshd  # noqa: F401  fixtures of several files
from hypothesis import settings
from postgresql_fixtures import place, server  # noqa: F401  fixtures of several files
from run_fixtures import finished, finished_run, on_any_machine, use_few_images  # noqa: F401  fixtures of several files
from soak_record import area_of, read_touched, write_record
from table_fixtures import write_table
from tiny_fixtures import load_tiny_space
from training_fixtures import away, stripes_data  # noqa: F401  a fixture of several files

from hwnas.data.dataset import Dataset
from hwnas.space.search_space import SearchSpace
from hwnas.target import Host

STARTED = time.monotonic()
# The null runtime is another package's, for child processes too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent / "null_runtime"),
                                            *filter(None, [os.environ.get("PYTHONPATH")])])
LATE = "not run: the minutes of this run were over"
# Files that take longest start first, so that no worker ends alone.
LONGEST = ("test_search.py", "test_around.py", "test_train.py", "test_making_pool.py",
           "test_calibrate.py", "test_postgresql.py", "test_faults.py", "test_workers.py",
           "test_runtimes.py", "test_known_objectives.py", "test_verification.py")

settings.register_profile("any machine", deadline=None)  # a busy one takes its time
settings.load_profile("any machine")
if "PYTEST_XDIST_WORKER" in os.environ:  # a core each, for torch too, which reads it at its import
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, default=0.0, metavar="N",
                     help="start no test after N minutes, and name those that were left out (0: no limit)")
    parser.addoption("--touched", action="store_true",
                     help="only what the changes since the recorded soak run (tests/soak.json) touch")
    parser.addoption("--record", action="store_true", help="record this soak run in tests/soak.json if all passed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--touched") and (touched := read_touched()) is not None:
        left = [item for item in items if area_of(item.path) not in touched]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if area_of(item.path) in touched]
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_sessionstart() -> None:
    """A job that a script starts in the background ignores SIGINT, and so would all processes that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Each timing of a network collects garbage first: it need not look through all tests and their modules."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(LATE)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Changes that touch no soak test are no failure."""
    if session.config.getoption("--touched") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    late = [report.nodeid for report in terminalreporter.stats.get("skipped", []) if LATE in str(report.longrepr)]
    if late:
        terminalreporter.section(f"{len(late)} tests {LATE}")
        terminalreporter.write_line("\n".join(late))
    if config.getoption("--record") and exitstatus == 0 and not late:
        counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "skipped")}
        write_record(Host.detect().name, counts, time.monotonic() - STARTED)


@pytest.fixture(scope="session", autouse=True)
def _own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tables and spaces of the user who runs the tests are neither read nor written, nor is a display needed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWNAS_HOME", str(tmp_path_factory.mktemp("hwnas-home")))
        patch.setenv("HWNAS_OWN_TABLES", "1")  # tests that calibrate do so on hosts of shipped tables too
        patch.setenv("MPLBACKEND", "Agg")
        patch.setattr("hwnas.target.LOCK_FOLDERS", (tmp_path_factory.mktemp("locks"),))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Weights and draws that a test leaves to chance are the same whichever tests ran before it in its process."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _scripts_beside_each_other() -> None:
    """A command that another test gave in this process keeps the folder of a script off its children's path."""
    os.environ.pop("PYTHONSAFEPATH", None)


@pytest.fixture(scope="session", autouse=True)
def _revisions_read_once() -> Iterator[None]:
    """Each new database has Alembic read the same ten scripts of Optuna's twice, which takes longer than its tables."""
    from alembic.script import base

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base.util, "load_python_file", cache(base.util.load_python_file))
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


@pytest.fixture
def hwnas_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder of this test's own."""
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def tiny_table(hwnas_home: Path) -> Callable[..., Path]:
    """`tiny_table(target, image_size, …)` stores a made-up latency table in the user's folder (see `write_table`)."""
    return partial(write_table, hwnas_home)


@pytest.fixture(scope="session")
def tiny_space(tmp_path_factory: pytest.TempPathFactory) -> SearchSpace:
    """A space of two stages for digits."""
    return load_tiny_space(tmp_path_factory.mktemp("space"))


@pytest.fixture(scope="session")
def space() -> SearchSpace:
    """The shipped space mnasnet_small, for digits."""
    return SearchSpace.load("mnasnet_small", channels=1, classes=10)


@pytest.fixture(scope="session")
def tiny_dataset() -> Dataset:
    """Four classes of 16 px images that a network learns in seconds."""
    return stripes_data(256)


@pytest.fixture(scope="module")
def any_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Here and in processes started meanwhile a measurement counts, however busy the machine is."""
    with on_any_machine(tmp_path_factory.mktemp("tmp")):
        yield


@pytest.fixture(scope="module")
def few_images() -> Iterator[None]:
    """Networks are quantised with few images, which takes a fraction of the time."""
    with pytest.MonkeyPatch.context() as patch:
        use_few_images(patch)
        yield


@pytest.fixture
def virtual_clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The clock of the harness: calls take exactly what they say, and nobody else runs on this machine."""
    import null_runtime

    from hwnas.latency import harness, probes

    clock = VirtualClock()
    for module in (harness, probes, null_runtime):
        monkeypatch.setattr(module, "time", clock)
    return clock
