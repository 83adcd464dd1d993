"""report.html: self-contained, escaped, and it says what it must; so do the closing lines of a search."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from front_fixtures import Balance, make_row, some_rows, trials, without_programs

from hwnas import report
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, StudyError
from hwnas.front.picture import PlotInfo
from hwnas.front.report import ReportData, between, plot_info, read_report, report_html
from hwnas.front.rows import mark_front, save_front
from hwnas.front.verification import summary_lines
from hwnas.system.run_folder import RunFolder

ENVIRONMENT = {
    "format": "hwnas-environment/1",
    "created": "2026-11-20T12:00:00+00:00", "host": {"name": "intel-xeon-f6m143s8-2c", "cores": 2},
    "target": {"name": "xeon_int8", "runtime": "openvino"}, "dataset": {"name": "digits"}, "space": "mnasnet_small",
    "latency_model": {"mean_error": 0.061, "line": "mean 6.1%"}, "cap_ms": None,
    "search": {"reason": "30 trials are done", "left_out": ["cxl, gelu: Gelu in fp32, 30% of its time", "cxl, relu"]},
    "verified_here": True, "searched_for": "intel-xeon-f6m143s8-2c"}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    run = RunFolder.create(tmp_path / "run")
    run.write_config({"seed": 0})
    save_front(run, some_rows())
    run.write_trials(trials())
    run.write_json(run.comparisons, [{"verdict": "beats", "sentence": "The search beats resnet10t."}])
    run.write_json(run.environment, ENVIRONMENT)
    return run


def test_report_is_whole_and_needs_no_network_and_takes_nothing_from_outside(run: RunFolder) -> None:
    evil = "x --><script>alert(1)</script>"  # in the picture's title too
    run.write_json(run.environment, {**ENVIRONMENT, "dataset": {"name": evil}})
    report.run({"run": run.path}, Console(quiet=True))
    with pytest.raises(ConfigError, match="run=DIR"):
        report.run({"run": None}, Console(quiet=True))
    page = without_programs(run.report.read_text())
    checker = Balance()
    checker.feed(page)
    assert checker.wrong == []
    assert checker.open == []
    assert "<script" not in page
    assert "<!--" not in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert set(re.findall(r'https?://[^"\s]+', page)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "<svg" in page
    assert run.front_png.read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in run.front_svg.read_text()


def test_known_networks_of_the_space_have_a_section_of_their_own(run: RunFolder) -> None:
    assert "Known networks of the space" not in report_html(read_report(run))
    save_front(run, [*some_rows(), make_row("0a1b", name="mnasnet_a1_like", is_control=True),
                     make_row("2c3d", is_control=True, control_of="aaaaaaa0")])
    random, known = report_html(read_report(run)).split("<h2>Random networks of the space")[1].split(
        "<h2>Known networks of the space")
    assert "2c3d" in random
    assert "drawn for aaaaaaa0" in random
    known = known.split("<h2>")[0]
    assert "mnasnet_a1_like 0a1b" in known
    assert "drawn for" not in known


def test_report_says_what_its_files_hold(run: RunFolder) -> None:
    page = report_html(read_report(run))
    for text in ("The search beats resnet10t.", "intel-xeon-f6m143s8-2c", "30 trials are done",
                 "mean 6.1%", "aaaaaaa0", "stem16s1 ir_r1_k3_s1_e3_c16", "2026-11-20",
                 "20 trials", "seed: 0"):
        assert text in page
    save_front(run, [make_row(str(i), latency_ms=0.1 if i else 9.0) for i in range(4)])
    assert "3 of 4 networks of the space were" in report_html(read_report(run))


def page_of(rows=(), failed=(), **environment: object) -> str:
    return report_html(ReportData(PlotInfo("t", "far-host", "d", "day"), rows, failed, [], environment))


def test_failures_are_told_with_their_reasons_and_what_is_not_verified_with_the_command() -> None:
    failed = [{"outcome": "failed", "reason": "loss was NaN", "top1_proxy": None}] * 2
    page = page_of([make_row(reason="parity failed over 256 images", meets_cap=False)], failed)
    assert "breaks the cap" in page
    failures = page[page.index("<h2>Failures"):]
    assert "parity failed over 256 images" in failures
    assert "2 trials: loss was NaN" in failures
    page = page_of([make_row(verified=False, latency_ms=None, top1_test=None)])
    assert "hwnas verify run=DIR" in page
    assert "far-host" in page
    # Files that were left out are told by reason, and older runs have none.
    assert "files left out: 12 (ending .heic), 1 (cannot be decoded)" in page_of(
        dataset={"skipped": 1, "left_out": {"cannot be decoded": 1, "ending .heic": 12}})
    assert "files left out" not in page_of(dataset={"skipped": 3})
    assert "files left out" not in page_of(dataset={"skipped": 0, "left_out": {}})


def test_names_from_outside_are_escaped_and_the_password_of_the_study_stays_out(run: RunFolder) -> None:
    run.write_config({"seed": 0, "storage": "postgresql+psycopg://me:s3cret@host/name"})
    page = report_html(read_report(run))
    assert "postgresql+psycopg://me:***@host/name" in page
    assert "s3cret" not in page
    evil = "<script>alert(1)</script>"
    data = ReportData(PlotInfo(evil, evil, evil, evil), [make_row(reason=evil, architecture=evil)],
                      [{"outcome": "failed", "reason": evil}], [{"sentence": evil}],
                      {"host": {evil: evil}, "search": {evil: evil}}, "", evil)
    assert "<script" not in without_programs(report_html(data))
    assert "<script>alert" not in report_html(data)


def test_report_before_the_front_is_an_error_and_plot_info_names_the_host_searched_for(tmp_path) -> None:
    with pytest.raises(StudyError, match=r"front\.csv"):
        read_report(RunFolder.create(tmp_path))
    info = plot_info({**ENVIRONMENT, "verified_here": False, "searched_for": "far", "cap_ms": 2})
    assert (info.host, info.cap_ms, info.date) == ("far", 2.0, "2026-11-20")


def test_the_best_networks_answers_are_shown_class_by_class(run: RunFolder) -> None:
    run.write_json(run.environment, {**ENVIRONMENT, "dataset": {"name": "digits", "class_names": ["cat", "<dog>"],
                                                                  "task": "classification"},
                                     "spent_s": {"search": 90.0, "read images": 0.2}})
    best = max((row for row in some_rows() if row.on_front), key=lambda row: row.top1_test or 0.0)
    run.write_arrays(run.predictions, {best.id: np.array([0, 1, 1, 1, 1]), "labels": np.array([0, 0, 0, 1, 1])})
    page = re.sub(r' class="[^"]*"', "", report_html(read_report(run)))
    assert "<tr><td>cat</td><td>33.33</td><td>3</td><td>&lt;dog&gt; 2</td></tr>" in page
    assert "<tr><td>&lt;dog&gt;</td><td>100.00</td><td>2</td><td></td></tr>" in page
    assert "search 1.5" in page
    assert "read images" not in page


def test_a_baseline_on_the_front_stands_in_its_table_and_is_marked(run: RunFolder) -> None:
    rows = mark_front([make_row("fast", latency_ms=0.1, top1_test=0.9),
                       make_row("stock", name="stock", is_baseline=True, latency_ms=0.2, top1_test=0.95)])
    save_front(run, rows)
    page = report_html(read_report(run))
    assert "2 networks (1 of them a baseline) on the verified front" in page
    table = page[page.index("<h2>The front</h2>"):page.index("<h2>Baselines</h2>")]
    assert '<tr class="front base">' in table
    assert "a baseline, on the front" in table
    balance = Balance()
    balance.feed(page)
    assert not balance.wrong


def test_ends_of_an_interval_never_look_alike() -> None:
    assert between(0.11812, 0.11843, 1, 3) == "0.1181–0.1184"
    assert between(0.1, 0.2, 1, 3) == "0.100–0.200"


def test_what_a_user_interrupted_is_no_failure_and_what_was_left_out_is_said_once(run: RunFolder) -> None:
    run.write_json(run.environment, {**ENVIRONMENT, "remarks": ["no time for 2 of 6 networks: <b>, c."]})
    run.write_trials([{**trials()[0], "outcome": "interrupted", "state": "FAIL", "reason": "Ctrl-C"},
                      {**trials()[1], "outcome": "lost", "state": "FAIL", "reason": "its worker died"}])
    page = report_html(read_report(run))
    assert "its worker died" in page
    assert "Ctrl-C" not in page
    assert page.count("<li>no time for 2 of 6 networks: &lt;b&gt;, c.</li>") == 1


def lines_of(*rows, comparisons=()) -> list[str]:
    return list(summary_lines(rows, comparisons, [], Path("report.html")))


def test_a_predicted_latency_and_a_top1_of_fp32_are_marked_wherever_they_stand() -> None:
    measured = make_row("measured0")
    unknown = make_row("unknown00", verified=False, latency_ms=None, reason="timing INVALID")
    unscored = replace(unknown, id="unscored0", top1_test=None)
    lines = lines_of(measured, unknown, unscored)
    assert "0.105 ms" in lines[2]
    assert "predicted" not in lines[2]
    for line, top1 in ((lines[0], "96.50%"), (lines[1], "97.00% in fp32")):
        assert f"top-1  {top1}" in line.replace("top-1 97", "top-1  97").replace("top-1 96", "top-1  96")
        assert "~0.100 ms predicted" in line
        assert "not verified: timing INVALID" in line


def test_what_to_deploy_stands_last_but_one() -> None:
    comparisons = [{"verdict": "deploy", "sentence": "Deploy a."}, {"verdict": "beats", "sentence": "It beats b."}]
    assert lines_of(make_row(), comparisons=comparisons)[1:] == ["It beats b.", "Deploy a.", "report: report.html"]
    assert not lines_of()
