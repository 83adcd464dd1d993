"""hwnas zoo: small networks of timm from the command to the page; what fails, what is kept, what is said."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_fixtures import on_any_machine
from table_fixtures import measurement_of

from hwnas.__main__ import main
from hwnas.errors import BudgetError, CandidateError, UserError
from hwnas.system.paths import home
from hwnas.target import Target
from hwnas.zoo import published, waves
from hwnas.zoo.published import PublishedNetwork, published_networks, select_networks
from hwnas.zoo.record import ZooRecord
from hwnas.zoo.result import UNTIMED, mark_front, zoo_figure, zoo_page, zoo_ranks, zoo_rows, zoo_sentences
from hwnas.zoo.waves import ZooTiming

NAMES = ("test_efficientnet", "test_vit", "resnet50")
TARGETS = (Target("ort_int8", "onnxruntime", "int8"), Target("ort_fp32", "onnxruntime", "fp32"))
EVIL = "</script><img src=x onerror=alert(1)>"


def network(name: str, top1: float = 70.0, gmacs: float = 1.0, size: int = 224) -> PublishedNetwork:
    return PublishedNetwork(f"{name}.tag", size, top1, 5.0, gmacs, 3.0)


@pytest.fixture
def timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ZooTiming:
    """Three networks in two deployments, of which nothing was timed."""
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    (tmp_path / "files").mkdir()
    networks = [network("a", 60.0, 0.1), network("b", 70.0, 1.0), network("resnet50", 80.0, 4.0)]
    return ZooTiming(networks, [ZooRecord.open(target) for target in TARGETS], tmp_path / "files", 512, None, 0)


def keep(timing: ZooTiming, times: Mapping[tuple[int, int], float]) -> None:
    """Times in ms by the places of network and deployment."""
    for (at, place), ms in times.items():
        timing.records[place].keep({timing.networks[at].key: measurement_of(ms)}, {})


def test_the_list_is_sound() -> None:
    networks = published_networks()
    assert len({each.key for each in networks}) == len(networks) > 600
    assert all(0 < each.params_m <= 30 and each.gmacs > 0 and each.macts > 0 for each in networks)
    assert all(40 < each.top1 < 90 for each in networks)
    names = subprocess.run([sys.executable, "-c", "import hwnas, timm; print(*timm.list_models())"], timeout=300,
                           capture_output=True, text=True, check=True).stdout.split()
    assert {each.name for each in networks} <= {*names}
    assert {each.name for each in select_networks(["resnet18", "test_vit*"])} == {
        "resnet18", "test_vit", "test_vit2", "test_vit3"}


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which the command was given: a run of two real networks, and of a name that timm has not."""
    folder = tmp_path_factory.mktemp("zoo")
    with on_any_machine(tmp_path_factory.mktemp("tmp")) as patch:
        patch.setenv("HWNAS_HOME", str(folder / "home"))
        patch.chdir(folder)
        (folder / "home" / "conf" / "target").mkdir(parents=True)
        (folder / "home" / "conf" / "target" / "both.yaml").write_text(
            "# @package target\nname: both\ndeployments: [ort_int8, ort_fp32]\n")
        some = [each for each in published_networks() if each.name in NAMES[:2]] + [network("no_such_network", size=64)]
        patch.setattr(published, "published_networks", lambda: tuple(some))
        assert main(["zoo", "-q", "target=both", "minutes=3"]) == 0
        yield folder


def test_networks_are_timed_and_others_are_named_with_the_reason(command: Path) -> None:
    rows = list(csv.DictReader((command / "runs" / "both-zoo" / "zoo.csv").read_text().splitlines()))
    timed = {(row["name"].partition(".")[0], row["deployment"]): row for row in rows if row["latency_ms"]}
    assert {*timed} == {(name, target.name) for name in NAMES[:2] for target in TARGETS}
    assert all(float(row["latency_ms_low"]) <= float(row["latency_ms"]) <= float(row["latency_ms_high"])
               for row in timed.values())
    assert {row["deployment"] for row in rows if row["on_front"] == "true"} == {"ort_int8", "ort_fp32"}
    failed = [row["reason"] for row in rows if not row["latency_ms"]]
    assert len(failed) == 2
    assert all("no_such_network" in reason for reason in failed)
    page = (command / "runs" / "both-zoo" / "zoo.html").read_text()
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?!data:)', page)
    assert (command / "runs" / "both-zoo" / "front.png").read_bytes().startswith(b"\x89PNG")


def test_another_call_goes_on_with_what_was_timed(command: Path, capsys: pytest.CaptureFixture[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waves, "run_child", lambda *given, **options: pytest.fail("something is timed again"))
    before = (command / "runs" / "both-zoo" / "zoo.csv").read_text()
    assert main(["zoo", "target=both", "minutes=3"]) == 0
    assert (command / "runs" / "both-zoo" / "zoo.csv").read_text() == before
    said = capsys.readouterr()
    assert "4 of 6 timings were made before" in said.err
    assert "published" in said.out
    assert main(["zoo", "-q", "target=ort_int8", "cap_ms=0.0001"]) == 2
    assert "BudgetError: cap_ms=0.0001" in (said := capsys.readouterr().err)
    assert "test_" in said
    record = next((home() / "zoo").rglob("int8*.json"))
    record.write_text("{")
    assert main(["zoo", "-q", "target=ort_int8"]) == 2
    assert str(record) in capsys.readouterr().err


@pytest.mark.parametrize(("option", "said"), [
    ("names=[resnet5*,mobilnet*]", "Did you mean mobilenet*"), ("names=resnet50", "names must be"),
    ("cap_ms=0", "cap_ms must be"), ("minutes=0", "minutes must be"), ("minute=3", "Did you mean minutes"),
    ("target=cuda_fp32", "runs on a GPU")])
def test_wrong_options_are_answered_at_once(option: str, said: str, tmp_path: Path) -> None:
    script = f"""import sys; from hwnas.__main__ import main
code = main(["zoo", "-q", *(["target=ort_int8"] if "target" not in {option!r} else []), {option!r}])
sys.exit(code if not {{"torch", "timm", "openvino", "sklearn"}} & {{*sys.modules}} else 9)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False,
                          cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_what_ends_the_preparing_process_costs_one_pair_and_what_ends_the_timing_process_one_file(
        timing: ZooTiming, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pair ends each process that prepares it, and the file of the fourth each that times it."""
    deadly = [timing.pairs[1], timing.pairs[3]]

    def run_child(module: str, job: dict[str, Any], target: Target, **options: Any) -> Any:
        if "files" not in job:
            with open(job["journal"], "a") as journal:
                for at, (name, size, place) in enumerate(job["pairs"]):
                    if (f"{name}@{size}", place) == (deadly[0][0].key, deadly[0][1]):
                        raise CandidateError("ended by SIGSEGV")
                    print(json.dumps({"at": at, "path": f"{name} {place}", "ms": 1.0, "place": place}), file=journal)
            return None
        if any(file["path"] == f"{deadly[1][0].name} {deadly[1][1]}" for file in job["files"]):
            raise CandidateError("ended by SIGKILL")
        return {file["id"]: measurement_of(5.0).to_dict() for file in job["files"]}

    monkeypatch.setattr(waves, "run_child", run_child)
    assert timing.run(300.0, lambda share, note="": None)
    assert [timing.reason(pair) for pair in deadly] == ["ended by SIGSEGV", "ended by SIGKILL"]
    assert [timing.measured(pair) is not None for pair in timing.pairs] == [pair not in deadly for pair in timing.pairs]
    again = [ZooRecord.open(target) for target in TARGETS]
    assert [{*record.timed} for record in again] == [{*record.timed} for record in timing.records]
    assert [record.failed for record in again] == [record.failed for record in timing.records]


def test_nothing_is_begun_that_the_time_is_too_short_for(timing: ZooTiming, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waves, "run_child", lambda *given, **options: pytest.fail("a process was started"))
    assert not timing.run(waves.LEAST_S - 1, lambda share, note="": None)


def test_rows_sentences_and_pictures_hold_what_was_measured(timing: ZooTiming) -> None:
    keep(timing, {(0, 0): 1.0, (1, 0): 4.0, (2, 0): 31.0, (0, 1): 2.0, (1, 1): 1.5})
    rows = mark_front(zoo_rows(timing, complete=False), None)
    on_front = {(row.network.name, row.target.name) for row in rows if row.on_front}
    assert on_front == {("a", "ort_int8"), ("b", "ort_int8"), ("resnet50", "ort_int8"), ("b", "ort_fp32")}
    assert [row.reason.startswith(UNTIMED) for row in rows] == [False] * 5 + [True]
    assert rows[-1].values()["latency_ms"] is None
    said = zoo_sentences(rows, 5.0)
    assert said[0].startswith("Under 5 ms: b at 224 px, 70.0 % published, 4.0")
    assert "in floating point b at 224 px" in said[0]
    assert "resnet50 at 224 px, 80.0 % published, 31." in said[1]
    assert any(sentence.startswith("Under 2 ms") for sentence in zoo_sentences(rows, None))
    assert "in floating point" not in zoo_sentences(rows, 1.2)[0]
    assert zoo_figure(rows, "heading", "subtitle", 5.0).axes
    timing.cap_ms = 0.5
    with pytest.raises(BudgetError, match="The fastest is a at"):
        zoo_rows(timing, complete=True)
    timing.cap_ms = 1.8
    assert {row.network.name for row in mark_front(zoo_rows(timing, complete=True), 1.8) if row.on_front} == {"a", "b"}


def test_ranks_of_two_deployments_are_compared_over_what_was_timed_in_both(timing: ZooTiming) -> None:
    keep(timing, {(0, 0): 1.0, (1, 0): 4.0, (2, 0): 31.0, (0, 1): 2.0, (1, 1): 1.5})
    (ranks,) = zoo_ranks(zoo_rows(timing, complete=False))
    assert (ranks["networks"], ranks["kendall_tau"]) == (2, -1.0)
    assert "a@224: 1 and 2" in ranks["surprises"] or "a@224: 2 and 1" in ranks["surprises"]
    keep(timing, {(2, 1): 40.0})
    (ranks,) = zoo_ranks(zoo_rows(timing, complete=False))
    assert ranks["kendall_tau"] == pytest.approx(1 / 3)
    assert "resnet50" not in ranks["surprises"]
    assert not zoo_ranks([row for row in zoo_rows(timing, complete=False) if row.target == TARGETS[0]])


def test_text_of_others_is_text_on_the_page(timing: ZooTiming) -> None:
    keep(timing, {(0, 0): 1.0, (1, 1): 2.0})
    page = zoo_page(zoo_rows(timing, complete=True), EVIL, EVIL, [EVIL], None)
    assert "<img src=x" not in page
    assert "default-src 'none'" in page
    data = json.loads(re.findall(r'id="explore-data">(.*?)</script>', page)[0])
    assert [(point["kind"], point["top1"]) for point in data["points"]] == [("int8", 0.6), ("floating point", 0.7)]
    assert data["points"][1]["copy"] == 'timm.create_model("b.tag", pretrained=True)'


def test_a_full_disk_ends_the_command_and_is_no_fault_of_a_network(timing: ZooTiming, monkeypatch: pytest.MonkeyPatch
                                                                   ) -> None:
    def run_child(*given: object, **options: object) -> None:
        raise CandidateError("No space left on device")

    monkeypatch.setattr(waves, "run_child", run_child)
    monkeypatch.setattr(waves.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(UserError, match="no space left on the disk"):
        timing.run(300.0, lambda share, note="": None)
    assert not any(record.failed for record in [*timing.records, *map(ZooRecord.open, TARGETS)])
