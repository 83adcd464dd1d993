"""Timing files: copies, noise, the reference beside them and its quiet time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from deployment_fixtures import measured

from hwnas.latency import timing
from hwnas.latency.copies import noise
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.timing import QuietTimes, Reference, TimedFile, reference_file, reference_network, time_files
from hwnas.target import Host, Target

NULL = Target("null_fp32", "null", "fp32")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that takes 0.1 ms on the null runtime."""
    return reference_file(NULL, tmp_path)


def test_every_file_and_the_reference_are_compiled_as_often_as_the_protocol_says(
        file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def measure(calls: Mapping[str, Any], reference: Any, protocol: Protocol, **options: Any) -> dict[str, Measurement]:
        asked.update(calls=calls, reference=reference, **options)
        for copies in (*calls.values(), reference):
            assert len(copies) == protocol.copies == 3
            for call in copies:
                call()
        return {name: measured(0.2) for name in calls}

    monkeypatch.setattr(timing, "measure", measure)
    two = Target("null_fp32", "null", "fp32", batch=2)
    files = {"one": TimedFile(file, NULL, (1, 32, 32)), "two": TimedFile(file, two, (1, 32, 32))}
    found = time_files(files, NULL, Reference(reference_network(), 0.09), Protocol(copies=3), seed=7)
    assert list(found) == ["one", "two"]
    assert (asked["seed"], asked["quiet_ms"], asked["threads"]) == (7, 0.09, 1)
    assert len(set(asked["calls"]["one"])) == 3


def test_noise_is_the_same_every_time_and_of_the_shape() -> None:
    assert noise(2, (3, 8, 8)).shape == (2, 3, 8, 8)
    assert (noise(2, (3, 8, 8)) == noise(2, (3, 8, 8))).all()


def test_the_reference_is_one_network_for_the_images_of_what_is_timed(file: Path) -> None:
    shape = [axis.dim_value for axis in onnx.load(str(file)).graph.input[0].type.tensor_type.shape.dim[1:]]
    assert shape == [1, 32, 32]
    assert reference_network().id == "404a1fb8"  # that of the shipped tables of mnasnet_small
    large = reference_network(3, 100, 128)
    assert (large.channels, large.classes, large.image_size) == (3, 100, 128)
    assert reference_network(1, 10, 4).image_size == 8


def test_quiet_times_of_another_network_or_batch_are_kept_apart() -> None:
    host, large = Host.detect(), reference_network(3, 10, 128)
    Reference.of_host(NULL, "null 1").keep([measured(0.2, quiet_ms=0.3), measured(0.2, quiet_ms=0.2)])
    QuietTimes(host, "null 1", NULL, large).store(0.7)
    assert Reference.of_host(NULL, "null 1").quiet_ms == 0.2
    assert Reference.of_host(NULL, "null 1", large).quiet_ms == 0.7
    assert QuietTimes(host, "null 1", NULL, reference_network(), batch=4).load() is None
    assert QuietTimes(host, "null 2", NULL).load() is None
    Reference(large, 0.1).keep([measured(0.2, quiet_ms=0.01)])  # a table's own: not this host's to remember
    assert Reference.of_host(NULL, "null 1", large).quiet_ms == 0.7
