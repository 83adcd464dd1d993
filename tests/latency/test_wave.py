"""A wave that is timed in a process of its own: what comes back, what is heard meanwhile, and what ends it early."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import onnx
import pytest
from null_runtime import NULL_KEY

from hwnas.errors import CandidateError, MeasurementInvalid
from hwnas.latency.copies import TimedFile
from hwnas.latency.measurement import Protocol
from hwnas.latency.timing import prepare_network, reference_network
from hwnas.latency.wave import Wave, time_apart
from hwnas.target import Target

pytestmark = pytest.mark.usefixtures("any_machine")
NULL = Target("null_fp32", "null", "fp32")
SHAPE = (1, 32, 32)


@pytest.fixture
def reference(tmp_path: Path) -> TimedFile:
    return TimedFile(prepare_network(reference_network(), NULL, tmp_path), NULL, SHAPE)


def exported(name: str, ms: str, beside: TimedFile) -> TimedFile:
    """A network that takes `ms` on the null runtime."""
    proto = onnx.load(str(beside.path))
    onnx.helper.set_model_props(proto, {NULL_KEY: ms})
    path = beside.path.with_name(f"{name}.onnx")
    onnx.save(proto, str(path))
    return TimedFile(path, NULL, SHAPE)


def wave(networks: list[TimedFile], reference: TimedFile, **protocol: float) -> Wave:
    return Wave({network.path.stem: network for network in networks}, reference, "reference",
                Protocol(copies=2, min_rounds=2, **protocol), seed=1)


def test_a_wave_is_measured_in_another_process_which_tells_its_progress(reference: TimedFile) -> None:
    heard: list[str] = []
    networks = [exported("quick", "0.2", reference), exported("slow", "2.0", reference),
                exported("strange", "never", reference)]
    measured, failed = time_apart(wave(networks, reference), lambda share, note: heard.append(note))
    assert list(measured) == ["quick", "slow"]
    # They wait for so long by the clock, whatever slows the core: the model takes off what slows others.
    assert 0.05 < measured["quick"].latency_ms < measured["slow"].latency_ms < 2.5
    assert "strange.onnx" in failed["strange"]
    assert any("of 2 networks open" in note for note in heard)


def test_where_no_network_can_be_compiled_the_error_names_one(reference):
    with pytest.raises(CandidateError, match="strange"):
        time_apart(wave([exported("strange", "never", reference)], reference))


def test_a_process_that_is_killed_is_one_clear_error(reference: TimedFile) -> None:
    def kill(share: float, note: str) -> None:
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)

    with pytest.raises(MeasurementInvalid, match="a process that timed networks was ended"):
        time_apart(wave([exported("quick", "0.2", reference)], reference, max_rounds=10_000), kill)
