"""What tests on a GPU share: figures that are printed at the end, and a skip where a target cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

LINES: list[str] = []


@pytest.fixture
def shown() -> Callable[[str], None]:
    """Keeps a line of figures, to be printed when all tests are over."""
    return LINES.append


@pytest.fixture(scope="session")
def needs() -> Callable[[str], Any]:
    """The target of this name; skips, with what it lacks, where it cannot run here."""
    from hwnas.cli.command import compose
    from hwnas.errors import TargetError
    from hwnas.runtimes.runtime import load_runtime
    from hwnas.system.gpu import describe_gpu
    from hwnas.target import Target

    def target_of(name: str) -> Target:
        target = Target.from_config(compose("profile", [f"+target={name}"]).target)
        try:
            describe_gpu()
            load_runtime(target.runtime).check(target)
        except TargetError as error:
            pytest.skip(str(error))
        return target

    return target_of


@pytest.fixture(scope="session", autouse=True)
def _figures(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the tests measured, below their results."""
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    if LINES and capture is not None:
        with capture.global_and_fixture_disabled():
            print("\n" + "\n".join(LINES))
