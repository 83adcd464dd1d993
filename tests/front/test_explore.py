"""The picture to explore in report.html: its data is text, it loads nothing, and a browser runs it as it says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from front_fixtures import make_pair, make_row

from hwnas.front.picture import PlotInfo
from hwnas.front.report import ReportData, report_html

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
EVIL = "</script><img src=x onerror=alert(1)>"
TARGETS = {"name": "cpu", "targets": [
    {"name": "ort_int8", "runtime": "onnxruntime", "precision": "int8"},
    {"name": "ov_bf16", "runtime": "openvino", "precision": "bf16"}]}


def page_of(cap_ms: float | None = None) -> str:
    """A page of four networks in two deployments, and a network drawn at random that is better than all."""
    rows = [make_row(f"{name}-{target}", target=target, name=EVIL if name == "d" else name, latency_ms=ms,
                     top1_test=top1, latency_ms_low=ms, latency_ms_high=ms, precision=target.rpartition("_")[2],
                     is_control=name == "z", control_of="b-ort_int8" if name == "z" else "")
            for name, target, ms, top1 in [
                ("a", "ort_int8", 0.1, 0.80), ("b", "ort_int8", 0.2, 0.85), ("c", "ov_bf16", 0.4, 0.90),
                ("d", "ov_bf16", 0.8, 0.95), ("z", "ort_int8", 0.3, 0.99)]]
    environment = {"target": TARGETS, "cap_ms": cap_ms}
    return report_html(ReportData(PlotInfo("cpu", "h", "d", "day"), rows, [], [], environment, folder="runs/it's mine"))


def test_the_data_of_the_picture_is_text_and_the_page_loads_nothing() -> None:
    page = page_of()
    assert "<img src=x" not in page
    data = json.loads(re.findall(r'id="explore-data">(.*?)</script>', page)[0])
    assert [point["runtime"] for point in data["points"]] == ["onnxruntime", "onnxruntime", "openvino", "openvino",
                                                              "onnxruntime"]
    assert data["points"][3]["told"][0].startswith(EVIL)
    assert data["points"][0]["copy"] == """cp -r 'runs/it'"'"'s mine/models/a-ort_int8' ."""
    assert "default-src 'none'" in page
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?!data:)', page)
    assert len(page.encode()) < 6e6


def test_a_pair_is_drawn_at_its_mean_latency_and_is_no_pick_of_the_slider() -> None:
    rows = [make_row("a", latency_ms=0.1, top1_test=0.8), make_row("b", latency_ms=0.4, top1_test=0.9)]
    pairs = [make_pair(fast="a", accurate="b", latency_ms_mean=0.2),
             make_pair(fast="a", accurate="gone")]
    page = report_html(ReportData(PlotInfo("cpu", "h", "d", "day"), rows, [], [], {"target": TARGETS}, pairs=pairs))
    points = json.loads(re.findall(r'id="explore-data">(.*?)</script>', page)[0])["points"]
    assert [(point["id"], point["can_be_picked"]) for point in points] == [("a", True), ("b", True), ("a+b", False)]
    assert points[-1]["latency_ms"] == 0.2
    assert "models/a" in points[-1]["copy"]
    assert "models/b" in points[-1]["copy"]
    late = [replace(row, latency_ms_p99=ms) for row, ms in zip(rows, (1.0, 9.0), strict=True)]
    capped = ReportData(PlotInfo("cpu", "h", "d", "day"), late, [], [], {"target": TARGETS, "cap_p99_ms": 5.0})
    points = json.loads(re.findall(r'id="explore-data">(.*?)</script>', report_html(capped))[0])["points"]
    assert [(point["id"], point["can_be_picked"]) for point in points] == [("a", True), ("b", False)]


def test_what_was_not_measured_or_is_no_number_is_not_drawn():
    rows = [make_row(verified=False)]
    page = report_html(ReportData(PlotInfo("t", "h", "d", "day"), rows, [], [], {}))
    assert 'id="explore"' not in page
    unsaid = report_html(ReportData(PlotInfo("t", "h", "d", "day"), [make_row()], [], [], {}))
    assert '"runtime": "unknown"' in unsaid
    # A front.csv of somebody else may say anything.
    rows = [make_row("a", latency_ms=float("nan")),
            make_row("b", latency_ms_low=float("nan"), top1_test_high=float("inf"))]
    page = report_html(ReportData(PlotInfo("t", "h", "d", "day"), rows, [], [], {"cap_ms": float("nan")}))
    data = json.loads(re.findall(r'id="explore-data">(.*?)</script>', page)[0])
    point, = data["points"]
    assert (point["id"], point["latency_ms_low"], point["top1_high"]) == ("b", None, None)
    assert data["cap_ms"] is None


def look(tmp_path: Path, page: str, steps: str = "") -> str:
    """The page's own text after a user's `steps`, which are a program; the browser reaches no network, and an error
    on its console fails the test."""
    path = tmp_path / "report.html"
    path.write_text(page.replace("</body>", f"<script>{steps}</script></body>"))
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=10000", path.as_uri()],
        capture_output=True, text=True, timeout=300, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return unescape(done.stdout.partition('id="explore"')[2])


def pick_of(dom: str) -> str:
    return re.findall(r'id="explore-pick">(.*?)</b>', dom)[0]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize(("cap_ms", "steps", "pick"), [
    (None, "", EVIL), (0.25, "", "b-ort_int8"),
    (None, "const it = document.getElementById('explore-cap'); it.value = 400; it.dispatchEvent(new Event('input'))",
     "b-ort_int8"),
    (None, "document.querySelector('input[value=openvino]').click()", "b-ort_int8"),
    (None, "document.getElementById('explore-plot').emit('plotly_click', {points: [{customdata: 'a-ort_int8'}]})",
     "a-ort_int8"),
    (None, "document.querySelector('input[value=onnxruntime]').click(); "
           "document.querySelector('input[value=openvino]').click()", "No network that is shown keeps this cap.")])
def test_the_pick_follows_cap_filters_and_clicks(tmp_path: Path, cap_ms: float | None, steps: str, pick: str) -> None:
    dom = look(tmp_path, page_of(cap_ms), steps)
    assert pick_of(dom).startswith(pick)
    assert "<svg" in dom  # plotly drew


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_button_shows_the_command_that_copies_the_files(tmp_path: Path) -> None:
    dom = look(tmp_path, page_of(0.15), "document.getElementById('explore-copy').click()")
    assert re.search(r"""<code id="explore-command">cp -r 'runs/it'"'"'s mine/models/a-ort_int8' \.</code>""", dom)
    assert 'id="explore-command" hidden' in look(tmp_path, page_of(0.15))
