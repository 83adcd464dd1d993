"""Timing files: copies, noise, and the reference beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from deployment_fixtures import measured

from hwnas.latency import timing, wave
from hwnas.latency.copies import TimedFile, noise
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.timing import prepare_network, reference_network, time_files
from hwnas.system import cores
from hwnas.target import Target

NULL = Target("null_fp32", "null", "fp32")
pytestmark = pytest.mark.usefixtures("hwnas_home")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that takes 0.1 ms on the null runtime."""
    return prepare_network(reference_network(), NULL, tmp_path)


def test_every_file_is_compiled_as_often_as_the_protocol_says_and_the_reference_twice_so_often(file, monkeypatch):
    asked: dict[str, Any] = {}

    def measure(calls: Mapping[str, Any], reference: Any, protocol: Protocol, **options: Any) -> dict[str, Measurement]:
        asked.update(calls=calls, reference=reference, **options)
        for copies in (*calls.values(), reference):
            assert len(copies) == (6 if copies is reference else 3)
            for call in copies:
                call()
        return {name: measured(0.2) for name in calls}

    monkeypatch.setattr(wave, "measure", measure)
    two = Target("null_fp32", "null", "fp32", batch=2)
    files = {"one": TimedFile(file, NULL, (1, 32, 32)), "two": TimedFile(file, two, (1, 32, 32))}
    found = time_files(files, NULL, reference_network(), Protocol(copies=3), seed=7)
    assert list(found) == ["one", "two"]
    assert (asked["seed"], asked["threads"]) == (7, 1)
    assert asked["reference_id"] == "null 1 fp32 1t cpu b1 404a1fb8"
    assert len(set(asked["calls"]["one"])) == 3


def test_exports_leave_the_core_of_a_measurement_free_and_fit_into_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(timing, "Pool", lambda *options: made.append(options) or SimpleNamespace(shutdown=dict))
    monkeypatch.setattr(timing.NetworkTimer, "_start_export", lambda *_: None)
    monkeypatch.setattr(timing, "usable_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(cores, "physical_cores", lambda some: {(0,): 1, (1,): 1, (2,): 0, (3,): 0})  # two P, two E
    for free_mb, n in ((100_000, 3), (2 * timing.EXPORT_MB, 2), (1, 1)):
        monkeypatch.setattr(timing, "free_memory_mb", lambda free_mb=free_mb: free_mb)
        with timing.NetworkTimer(NULL, reference_network(), Protocol()):
            assert made.pop()[::2] == (n, ([0, 2, 3],))


def test_the_reference_and_the_noise_suit_the_images_of_what_is_timed(file):
    shape = [axis.dim_value for axis in onnx.load(str(file)).graph.input[0].type.tensor_type.shape.dim[1:]]
    assert shape == [1, 32, 32]
    assert reference_network().id == "404a1fb8"  # that of the shipped tables of mnasnet_small
    large = reference_network(3, 100, 128)
    assert (large.channels, large.classes, large.image_size) == (3, 100, 128)
    assert reference_network(1, 10, 4).image_size == 8
    assert noise(2, (3, 8, 8)).shape == (2, 3, 8, 8)
    assert (noise(2, (3, 8, 8)) == noise(2, (3, 8, 8))).all()
