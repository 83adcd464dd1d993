"""The cheapest way to serve a load: LoadGen's curves and words, traffic, prices, the command."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from front_fixtures import make_pair, make_row

from hwnas.__main__ import main
from hwnas.choose import __main__ as choosing
from hwnas.choose.__main__ import ServedRow, _served, _served_pairs, candidates_of, read_prices
from hwnas.choose.choice import ServedNetwork, Slo, Traffic, choose, tell_changes
from hwnas.choose.curve import CURVE, LoadCurve, add_curves
from hwnas.choose.load import LoadFigures, Server, curve_seconds, offer, read_summary
from hwnas.cli.progress import Console
from hwnas.errors import BudgetError, ModelError, StudyError
from hwnas.front.pairs import save_pairs
from hwnas.front.rows import save_front
from hwnas.system.run_folder import RunFolder
from hwnas.target import Host, Target

SUMMARY = """================================================
MLPerf Results Summary
================================================
SUT name : PySUT
Scenario : Server
Mode     : PerformanceOnly
Completed samples per second    : 501.65
Result is : {result}
  Performance constraints satisfied : {kept}
  Min duration satisfied : Yes
  Min queries satisfied : Yes
  Early stopping satisfied: Yes
{advice}
================================================
Additional Stats
================================================
Scheduled samples per second : 501.72
50.00 percentile latency (ns)   : 1982528
90.00 percentile latency (ns)   : 4722658
99.00 percentile latency (ns)   : 9237973
"""


TARGET = Target("ort_int8", "onnxruntime", "int8")
RATES = (0.05, 0.25, 0.45, 0.65, 0.8, 0.9)


def queue_of(service_s: float, streams: int = 1, batch: int = 1, drift: float = 0.0) -> LoadCurve:
    """A curve whose p99 rises as that of an M/M/1 queue does, measured at RATES of saturation."""
    most = streams * batch / service_s
    runs = [LoadFigures(share * most, share * most, 1e3 * service_s, 2e3 * service_s,
                        1e3 * service_s * (1 + np.log(100) * share / (1 - share)), True) for share in RATES]
    return LoadCurve(streams, batch, (most * (1 + drift / 2), most * (1 - drift / 2)), tuple(runs))


def served(curve: LoadCurve, name: str = "a", host: str = "here", top1: float = 0.9) -> ServedNetwork:
    return ServedNetwork("runs/a", name, name, "ort_int8", host, top1, curve)


def test_p99_rises_with_the_load_is_loadgens_where_it_measured_and_marked_between_and_the_capacity_keeps_it() -> None:
    curve = queue_of(0.002, streams=2)
    values = [curve.p99_ms(rate) for rate in (20, 100, 400, 700, 900)]
    assert values == sorted(values)
    assert curve.p99_ms(950) == np.inf  # nothing was measured there
    capacity = curve.capacity(5.0)
    assert curve.p99_ms(0.97 * capacity) < 5.0 < curve.p99_ms(1.03 * capacity)
    assert curve.capacity(1.9) == 0.0  # a call alone takes longer
    assert curve.capacity(1e6) == 0.9 * curve.most
    for run in curve.runs:
        assert curve.p99_ms(run.rate) == pytest.approx(run.p99_ms)
        assert curve.told_by(run.rate) == "measured"
    assert [curve.told_by(rate) for rate in (10, 400)] == ["measured at a higher load",
                                                           "interpolated between measured loads"]
    assert curve.p99_ms(10) == curve.runs[0].p99_ms


@pytest.mark.parametrize(("change", "fault"), [
    ({"saturation": [1.0]}, "saturation must be two"), ({"saturation": [0.0, 0.0]}, "saturation must be two"),
    ({"runs": []}, "runs must be some"), ({"runs": [{"rate": 1.0}]}, "runs")])
def test_curves_that_are_not_whole_are_refused(change: dict[str, object], fault: str) -> None:
    whole = {**CURVE.header, "id": "a", "target": "t", "host": "h", "runtime": "r", "file": "f", "streams": 1,
             "batch": 1, "fault": "", "seconds": 1.0, "measured_at": "now", "saturation": [1.0, 1.0],
             "runs": [asdict(queue_of(0.1).runs[0])]}
    assert LoadCurve.from_dict(CURVE.check(whole, "here")).most == 1.0
    with pytest.raises(StudyError, match=fault):
        CURVE.check({**whole, **change}, "here")


def test_how_long_a_curve_takes_goes_by_the_network_and_the_seconds() -> None:
    fast_s, slow_s, slowest_s = (curve_seconds(most, 30.0) for most in (10_000.0, 20.0, 0.01))
    assert 100 < fast_s < 200 < slow_s < slowest_s
    assert slowest_s < 60 + 6 * 10 * 30  # as long as a run may be


def test_a_call_that_fails_under_load_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    pytest.importorskip("mlperf_loadgen")

    def failing() -> None:
        raise RuntimeError("no memory")

    server = Server([failing], 1, (1, 8, 8))
    with pytest.raises(ModelError, match="a call failed under load: no memory"):
        offer(server, tmp_path, 0.1)
    server.close()


def test_summaries_of_loadgen_are_read() -> None:
    good = read_summary(SUMMARY.format(result="VALID", kept="Yes", advice="Early Stopping Result:\n * Run successful."),
                        504.0)
    assert good == LoadFigures(504.0, 501.65, 1.982528, 4.722658, 9.237973, True)
    bad = read_summary(SUMMARY.format(result="INVALID", kept="NO", advice="Recommendations:\n * Reduce target QPS."),
                       504.0)
    assert not bad.valid
    assert bad.reason == "not met: performance constraints (Reduce target QPS.)"
    assert not read_summary("torn", 504.0).valid


def test_the_cheapest_is_chosen_and_what_would_change_it_told() -> None:
    fast, slow = queue_of(0.001, drift=0.1), queue_of(0.004)
    candidates = [(served(slow, "slow", "there"), 0.05), (served(fast, "fast"), 0.1)]
    ranked = choose(candidates, Traffic(1500), Slo(20.0), {})
    assert [option.served.id for option in ranked] == ["fast", "slow"]
    best = ranked[0]
    assert best.machines == 2
    assert best.per_million == pytest.approx(2 * 0.1 / (1500 * 3600) * 1e6)
    assert best.machines_low <= best.machines <= best.machines_high
    assert best.per_million_low <= best.per_million <= best.per_million_high
    changes = tell_changes(ranked, candidates, Traffic(1500), Slo(20.0), {})
    assert any("queries/s at the peak 2 machines will do (asked 1500)" in line for line in changes)
    assert any(line.startswith("there is cheaper below") for line in changes)
    fewer = choose(candidates, Traffic(1500), Slo(20.0), {best.served.key: 400.0})
    assert next(option for option in fewer if option.served.id == "fast").machines == 4  # LoadGen found 400 enough


def test_what_answers_too_late_at_its_own_load_is_not_chosen_and_more_machines_may_help() -> None:
    def curve(*p99_ms: float) -> LoadCurve:
        return LoadCurve(1, 1, (1000.0, 1000.0), tuple(LoadFigures(1000 * share, 1000 * share, 1.0, 2.0, ms, True)
                                                       for share, ms in zip(RATES, p99_ms, strict=True)))

    after_pauses, sound = served(curve(12, 5, 5, 6, 7, 9), "late"), served(curve(6, 6, 6.5, 7, 8, 9.5), "sound")
    candidates = [(after_pauses, 0.1), (sound, 0.11)]
    assert [option.served.id for option in choose(candidates, Traffic(40), Slo(10.0), {})] == ["sound"]
    assert choose(candidates, Traffic(250), Slo(10.0), {})[0].served.id == "late"
    with pytest.raises(BudgetError, match="nothing keeps it at 40 queries/s"):
        choose(candidates[:1], Traffic(40), Slo(10.0), {})
    bump, = choose([(served(curve(6, 7, 14, 13, 9, 9.5)), 0.1)], Traffic(500), Slo(10.0), {})
    assert (bump.machines, bump.p99_ms) == (2, pytest.approx(7.0))


def test_a_pair_costs_its_mean_and_keeps_a_p99_by_its_worst_case(tmp_path: Path) -> None:
    fast, accurate, both = queue_of(0.001), queue_of(0.004), add_curves(queue_of(0.001), queue_of(0.004), 0.25)
    assert both.most == pytest.approx(1 / (0.001 + 0.25 * 0.004))
    assert accurate.most < both.most < fast.most
    for share in RATES:
        each_ms = [curve.p99_ms(share * curve.most) for curve in (fast, accurate, both)]
        assert each_ms[2] == pytest.approx(each_ms[0] + each_ms[1])
    run = RunFolder.create(tmp_path / "run")
    run.write_config("seed: 0\n")
    save_front(run, [make_row("a", top1_test=0.9), make_row("b", latency_ms=4.0, top1_test=0.97)])
    run.write_json(run.environment, {"format": "hwnas-environment/1", "dataset": {
        "fingerprint": "f", "image_size": 8, "channels": 1, "class_names": []}, "target": asdict(TARGET),
        "recipe": {}, "measuring": {"seconds": 1.0, "seed": 0, "reference": {}}})
    save_pairs(run, [make_pair(fast="a", accurate="b", top1_test=0.95, share=0.25)])
    options = {"networks": 1, "batch": (1,), "streams": (1,)}
    names = {least: [each.row.id for each in candidates_of(run, SimpleNamespace(slo=Slo(9.0, least), **options))]
             for least in (0.8, 0.95, 0.96)}
    assert names == {0.8: ["a", "b"], 0.95: ["b", "a"], 0.96: ["b"]}
    save_pairs(run, [make_pair(fast="a", accurate="b", top1_test=0.98, share=0.25)])
    both_needed = candidates_of(run, SimpleNamespace(slo=Slo(9.0, 0.975), **options))
    assert {each.row.id for each in both_needed} == {"a", "b"}  # no network is as accurate alone
    save_pairs(run, [make_pair(fast="a", accurate="b", top1_test=0.95, share=0.25)])
    singles = [served(curve, id, top1=top1) for curve, id, top1 in ((fast, "a", 0.9), (accurate, "b", 0.97))]
    singles = [replace(each, run=str(run.path)) for each in singles]
    pair, = _served_pairs(run, Slo(9.0, 0.95), singles)
    assert (pair.id, pair.top1, pair.curve) == ("a+b", 0.95, both)
    assert not _served_pairs(run, Slo(9.0, 0.96), singles)
    assert not _served_pairs(run, Slo(9.0, 0.95), singles[1:])
    ranked = choose([(pair, 0.1), (singles[1], 0.1)], Traffic(400), Slo(60.0), {})
    assert [option.served.id for option in ranked] == ["a+b", "b"]


def test_a_network_that_is_too_slow_for_a_curve_is_left_out_before_it_is_measured(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(choosing, "_kept", lambda *_: None)
    monkeypatch.setattr(choosing, "_measure", lambda *_: pytest.fail("it measures"))
    here, left_out = Host.detect(), list[str]()
    slow = ServedRow(RunFolder(tmp_path), make_row("slow", latency_ms=80.0, host=here.name), TARGET, 1)
    options = SimpleNamespace(seconds=30.0, networks=1, check_seconds=60.0)
    assert _served([slow], here, options, Console(quiet=True), left_out) == []
    enough = int(re.findall(r"Give seconds=(\d+)", left_out[0])[0])
    assert not choosing._too_slow(slow, SimpleNamespace(seconds=enough))


def test_a_service_level_beyond_reach_is_refused() -> None:
    candidates = [(served(queue_of(0.004), "slow"), 0.1), (served(queue_of(0.002), "fast"), 1.0)]
    with pytest.raises(BudgetError, match=r"nothing keeps it at any load\. The nearest is fast .*: 2.48 ms"):
        choose(candidates, Traffic(10), Slo(1.0), {})


@pytest.mark.parametrize(("text", "fault"), [
    ("a: -1", "the price of 'a' must be a number above 0"), ("a: {per_hour: 1}", "the price of 'a' must be a number"),
    ("[1, 2]", "holds no prices"), ("a: [", "cannot be read"),
    ("a: 2026-02-30", "cannot be read"), ("a: !!python/object/apply:os.system ['true']", "cannot be read"),
])
def test_prices_that_are_none_are_refused(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(Exception, match=fault) as caught:
        read_prices(path)
    assert "\n" not in str(caught.value)
    path.write_text("a: 1\nb: 0.5\n")
    assert read_prices(path) == {"a": 1.0, "b": 0.5}


def test_the_whole_command_serves_a_finished_run(finished, tmp_path, monkeypatch, capsys):
    pytest.importorskip("mlperf_loadgen")
    run = shutil.copytree(finished, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    host = Host.detect().name
    Path("prices.yaml").write_text(f"{host}: 0.1\n")
    words = ["choose", "-q", "runs=[run]", "prices=prices.yaml", "traffic.rate=300", "slo.p99_ms=60000", "networks=1",
             "streams=[1]", "seconds=1", "check_seconds=1", "out=choice"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "will do (asked 300)" in said.out
    assert re.match(r"1 load curves are to be measured, about 0\.\d+ min in all", said.err)
    chosen = json.loads(Path("choice/choice.json").read_text())
    row, = csv.DictReader(Path("choice/choice.csv").read_text().splitlines())
    assert row["host"] == host
    assert chosen["options"][0]["machines"] >= 1
    assert chosen["checked"]["valid"]
    curve, = (run / "load").glob("*.json")
    held = LoadCurve.from_dict(CURVE.read(curve))
    assert [measured.valid for measured in held.runs] == [True] * 6
    before = curve.stat().st_mtime_ns
    assert main([*words, "check_seconds=0"]) == 0  # what is measured is not measured again
    assert "to be measured" not in capsys.readouterr().err
    assert curve.stat().st_mtime_ns == before
    capsys.readouterr()
    assert main([*words, "slo.top1=1.0"]) == 2
    assert "slo.top1=1: run has no such network, the most accurate is" in capsys.readouterr().err
    Path("other.yaml").write_text("another: 0.1\n")
    assert main([*words, "prices=other.yaml"]) == 2
    assert f"other.yaml has no price for {host}. Add a line" in capsys.readouterr().err
    Path("choice/choice.csv").write_text("mine\n")
    assert main([*words, "check_seconds=0"]) == 2
    assert "hwnas did not write this file" in capsys.readouterr().err
    Path("choice/choice.csv").unlink()
    curve.write_text("{")
    assert main([*words, "check_seconds=0"]) == 2
    assert f"{curve.relative_to(tmp_path)}: torn" in capsys.readouterr().err
    curve.unlink()
    Path("taken").touch()
    assert main([*words, "out=taken"]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert not curve.exists()  # told before what takes minutes


@pytest.mark.parametrize(("words", "fault"), [
    ([], "which runs, and at what prices"), (["runs=[a]"], "which runs"),
    (["runs=[a]", "prices=p.yaml"], "which service level"),
    (["runs=[a]", "prices=p.yaml", "slo.p99_ms=20"], "how many queries a second"),
    (["runs=[a]", "prices=p.yaml", "slo.p99_ms=20", "traffic.rate=-1"], "traffic.rate must be"),
    (["runs=[a]", "prices=p.yaml", "slo.p99_ms=20", "traffic.rate=9"], "p.yaml cannot be read"),
    (["runs=[a]", "prices=p.yaml", "slo=null"], "which service level"),
    (["runs=[a]", "prices=p.yaml", "slo=x"], "slo must be"),
    (["runs=[a]", "prices=p.yaml", "slo.p99_ms=20", "traffic=5"], "traffic must be"),
])
def test_bad_input_is_one_line(words, fault, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["choose", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert fault in said
    assert "\n" not in said
