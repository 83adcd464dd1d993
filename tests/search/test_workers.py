"""Whole searches with workers, whose accuracies come from a stub: killed, in a folder of any name, one lost, by Ray,
by Compose.

A part of the shipped latency table of another host is used, so that nothing is measured; nothing is trained either.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from postgresql_fixtures import SECRET, psycopg
from process_fixtures import attack, python_path, wait_until
from search_fixtures import rows_of, workers_of
from study_fixtures import load_sampler

from hwnas.cli.command import run_command
from hwnas.front.report import read_report, write_report
from hwnas.front.rows import save_front
from hwnas.search import road
from hwnas.search.__main__ import main
from hwnas.study.objective import Objective
from hwnas.study.study import open_study
from hwnas.system.documents import load_yaml
from hwnas.system.paths import shipped, write_atomic
from hwnas.worker import command as worker

HOST = "intel-xeon-f6m167s1-2c"
CLUSTER = Path(__file__).resolve().parents[2] / "cluster"

# The first evaluation of each process waits until so many processes evaluate.
STUB = """
import os, sys, time
from pathlib import Path
from hwnas.accuracy.estimator import Estimate

class Stub:
    fingerprint = "stub"

    def __init__(self, folder, mode, processes=2):
        self.folder, self.mode, self.helper = Path(folder), mode, any(text.startswith("run=") for text in sys.argv)
        self.processes = processes

    def evaluate(self, architecture, seed=0):
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        (self.folder / f"{os.getpid()}.runs").write_bytes(b"\\n".join(line for line in lines if b"hwnas" in line))
        while self.mode == "wait" or len(list(self.folder.glob("*.runs"))) < self.processes:
            time.sleep(0.01)
        if self.mode == "lose" and self.helper:
            sys.exit("no memory is left")
        value = int(architecture.id, 16) / 2**32
        return Estimate(value, value, value, 0.01, "stub")

def stub(dataset, space, config):
    return Stub(**config)
"""


@pytest.fixture
def command(hwnas_home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a search with two workers and the stub, which is installed as pip would."""
    (tmp_path / "stub.py").write_text(STUB)
    info = tmp_path / "stub-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stub\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hwnas.accuracy]\nstub = stub:stub\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    table = shipped("latency_tables") / HOST / "openvino-int8-t1-b1-32px-c1-k10.json.gz"
    content = json.loads(gzip.decompress(table.read_bytes()))
    content["networks"] = content["networks"][:24]
    write_atomic(tmp_path / "home" / "latency_tables" / HOST / table.stem, json.dumps(content))
    labels = np.repeat(np.arange(10), 10)
    images = (np.arange(100 * 32 * 32) % 251).astype(np.uint8).reshape(100, 32, 32, 1)  # no two of them are the same
    np.savez(tmp_path / "images.npz", images=images, labels=labels)
    return ["+target=xeon_int8", f"host={HOST}", "dataset=arrays",
            f"dataset.root={tmp_path / 'images.npz'}", "dataset.image_size=32", "accuracy=stub", "n_trials=4",
            "workers=2", "baselines=[]", "controls=0", "sampler=random", f"+stub.folder={tmp_path}"]


@pytest.mark.soak  # a short form: system/test_processes.py
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_the_search(command: list[str], number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "run"
    search = subprocess.Popen([sys.executable, "-m", "hwnas.search", *command, "+stub.mode=wait", f"out={out}"],
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(lambda: len(list(tmp_path.glob("*.runs"))) == 2 or search.poll() is not None)
    said = attack(search, number, out / "study.db.lock")
    assert "Traceback" not in said
    assert len(workers_of(out)) == 2


@pytest.mark.soak
def test_a_worker_lost_in_a_folder_of_any_name_is_an_error_and_costs_no_trial(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(road, "verified", lambda prepared, trials, console: ([], []))
    monkeypatch.chdir(tmp_path)
    name = "ü (1), x=y/it's $HOME, 50%?"
    assert run_command(main, "search", "", [*command, "+stub.mode=lose", f"out={name}"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(
        "WorkerError: 1 worker ended early, and the work was done without: no memory is left (exit code 1). ")
    assert len(list(tmp_path.glob("*.runs"))) == 2  # it had begun in that folder before
    assert [row["outcome"] for row in rows_of(tmp_path / name / "trials.csv")].count("evaluated") == 4


@pytest.mark.soak
def test_a_password_goes_to_the_workers_and_nowhere_else(command, place, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(road, "verified", report_only)
    monkeypatch.setenv("A_FOLDER", str(tmp_path))
    out = tmp_path / "run"
    given = [*command[:-1], "+stub.folder=${oc.env:A_FOLDER}", "+stub.mode=run", f"out={out}"]
    assert run_command(main, "search", "", [*given, f"storage={place}"]) == 0
    assert "folder: ${oc.env:A_FOLDER}" in (out / "config.yaml").read_text()
    assert "storage: postgresql+psycopg://me:***@127.0.0.1:" in (out / "report.html").read_text()
    lines = [path.read_text() for path in tmp_path.glob("*.runs")]
    assert len(lines) == 2
    assert all("hwnas.worker" in line for line in lines)
    with psycopg().connect(place.replace("+psycopg", "")) as server:
        tables = [name for (name,) in server.execute("select tablename from pg_tables where schemaname = 'public'")]
        rows = [str(server.execute(f"select * from {name}").fetchall()) for name in tables]
    assert any("evaluated" in row for row in rows)  # they hold what the workers wrote
    files = [path.read_text(errors="replace") for path in out.rglob("*") if path.is_file()]
    for text in [*lines, *rows, *files, *capfd.readouterr()]:
        assert SECRET not in text

    assert worker([f"run={out}"]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"StudyError: {out}: its study is elsewhere, in postgresql+psycopg://me:***@")
    assert said.endswith("Name the database yourself: storage=URL.\n")
    assert worker([f"run={out}", f"storage={place}"]) == 2
    assert "stub.folder as typed" in capfd.readouterr().err


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Where Ray writes; its sockets lie there, and their paths must be short."""
    pytest.importorskip("ray", reason="no ray: pip install 'hwnas[ray]'")
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.soak
def test_ray_starts_two_workers_and_sees_no_password(command, place, ray_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(road, "verified", report_only)
    out = tmp_path / "run"
    ended: list[subprocess.CompletedProcess[str]] = []

    def start_workers() -> None:
        wait_until(lambda: any(tmp_path.glob("*.runs")))  # the search evaluates, and goes on once three do
        try:
            ended.append(subprocess.run(
                [sys.executable, CLUSTER / "ray_workers.py", out, "--workers", "2"], capture_output=True, text=True,
                check=False, env={**os.environ, "HWNAS_STORAGE": place, "RAY_TMPDIR": str(ray_folder),
                                  "RAY_ADDRESS": "local"}))
        finally:
            for name in ("no-worker-1.runs", "no-worker-2.runs"):
                (tmp_path / name).touch()

    thread = threading.Thread(target=start_workers)
    thread.start()
    options = [*command, "workers=1", "+stub.mode=run", "+stub.processes=3", f"out={out}", f"storage={place}"]
    assert run_command(main, "search", "", options) == 0
    thread.join()
    assert ended[0].returncode == 0, ended[0].stdout + ended[0].stderr
    assert [line[:28] for line in ended[0].stdout.splitlines()] == [f"worker {n} of 2 ended with 0, " for n in (1, 2)]
    runs = [path for path in tmp_path.glob("*.runs") if path.stat().st_size]
    assert len(runs) == 3
    assert [row["outcome"] for row in rows_of(out / "trials.csv")].count("evaluated") >= 4
    logs = [path for path in ray_folder.rglob("*") if path.is_file()]
    assert logs
    for path in [*runs, *logs]:
        assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in ended[0].stdout + ended[0].stderr


@pytest.fixture
def services(command: list[str], place: str, tmp_path: Path) -> dict[str, list[str]]:
    """Command lines of `compose.yaml` in its containers, with the places of this test instead of theirs."""
    (tmp_path / "password").write_text(SECRET)
    options = shlex.join([text for text in command if not text.startswith(("workers=", "dataset.root="))])
    options += " +stub.mode=run finalists.k=1 finalists.recipe.max_steps=2"
    lines = {}
    for name, service in load_yaml((CLUSTER / "compose.yaml").read_text())["services"].items():
        text = re.sub(r"\$\{HWNAS_SEARCH:[^}]*\}", lambda _: options, service["command"])
        line = [part.replace("$$", "$") for part in service.get("entrypoint", [])] + shlex.split(text)
        for theirs, ours in (("postgresql+psycopg://hwnas@database/hwnas", place.replace(f":{SECRET}", "")),
                             ("/run/secrets/database_password", tmp_path / "password"),
                             ("=/runs", f"={tmp_path}"), ("=/images", f"={tmp_path / 'images.npz'}")):
            line = [part.replace(theirs, str(ours)) for part in line]
        lines[name] = line
    return lines


@pytest.mark.soak
def test_what_compose_runs_works_as_plain_processes(services, tmp_path, monkeypatch):
    commands = tmp_path / "bin"  # that of the image is on its PATH
    commands.mkdir()
    (commands / "hwnas").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hwnas "$@"\n')
    (commands / "hwnas").chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)
    search = subprocess.Popen(services["search"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(lambda: any(tmp_path.glob("*.runs")) or search.poll() is not None)
    assert (tmp_path / "search" / "config.yaml").is_file()  # which its health check asks for
    worker = subprocess.run(services["worker"], text=True, capture_output=True, check=False)
    said = search.communicate(timeout=900)[0]
    assert (worker.returncode, search.returncode) == (0, 0), said + worker.stderr
    assert len(list(tmp_path.glob("*.runs"))) == 2
    for path in tmp_path.glob("*.runs"):
        assert b"hwnas" in path.read_bytes()
        assert SECRET.encode() not in path.read_bytes()


@pytest.mark.soak
def test_the_dashboard_of_compose_shows_the_study(services: dict[str, list[str]], place: str) -> None:
    pytest.importorskip("optuna_dashboard", reason="no optuna-dashboard: pip install optuna-dashboard")
    open_study(place, {"space": "none"}, Objective(target_ms=1.0), load_sampler("random", 0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    line = [part.replace("0.0.0.0", "127.0.0.1").replace("8080", port) for part in services["dashboard"]]
    at = line.index("optuna-dashboard")
    line[at:at + 1] = [sys.executable, "-c", "import optuna_dashboard._cli as cli; cli.main()"]
    told: list[str] = []

    def answers() -> bool:
        with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/api/studies") as answer:
            told.append(answer.read().decode())
        return bool(told) or dashboard.poll() is not None

    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as dashboard:
        try:
            wait_until(answers)
        finally:
            dashboard.terminate()
    assert '"study_name": "hwnas"' in told[0]


def test_compose_holds_no_password_and_every_service_starts_after_what_it_needs() -> None:
    document = load_yaml((CLUSTER / "compose.yaml").read_text())
    services = document["services"]
    assert document["secrets"] == {"database_password": {"environment": "DATABASE_PASSWORD"}}
    for name, service in services.items():
        assert service["secrets"] == ["database_password"]
        assert not re.search(r"://[^/@ ]*:[^/@ ]*@", service["command"])
        assert not [key for key in service.get("environment", {}) if key.endswith("PASSWORD")]
        for other, state in service.get("depends_on", {}).items():
            assert "healthcheck" in services[other], name
            assert state == {"condition": "service_healthy"}
        for volume in service["volumes"]:
            assert volume[0] == "$" or volume.partition(":")[0] in document["volumes"]


def report_only(explorer: road.Explorer, trials: list[dict[str, object]], console: object
                ) -> tuple[list[object], list[object]]:
    save_front(explorer.run, [])
    write_report(explorer.run, read_report(explorer.run))
    return [], []


def test_no_error_of_a_database_shows_a_password(command, tmp_path, capfd):
    out = tmp_path / "run"
    for url in (f"postgresql+psycopg://me:{SECRET}@127.0.0.1:1/x", f"postgresql://me:{SECRET}@127.0.0.1:x/x",
                f"mysql+nodriver://me:{SECRET}@127.0.0.1/x", f"nothing:{SECRET}@x", f"host=x password={SECRET}"):
        assert run_command(main, "search", "", [*command, "+stub.mode=run", f"out={out}", f"storage={url}"]) == 2
        said = capfd.readouterr()
        assert "Error: " in said.err.splitlines()[-1]
        for text in [*said, *(path.read_text(errors="replace") for path in out.rglob("*") if path.is_file())]:
            assert SECRET not in text


@pytest.mark.parametrize(("line", "given", "fact"), [
    ("storage: ${oc.env:A_URL}", [], "its study is elsewhere, in ${oc.env:A_URL}. Name the database yourself"),
    ("storage: sqlite:////tmp/elsewhere.db", [], "its study is elsewhere, in sqlite:////tmp/elsewhere.db"),
    ("storage: [1]", [], "its study is elsewhere"),
    ("dataset: {root: '${oc.env:A_URL}'}", [], "dataset.root as typed"),
    ("space: ${oc.env:A_URL}", ["dataset.root=/x"], "space as typed"),
    ("space: 2001-01-01", [], "cannot read"), ("a: &a [*a]", [], "cannot read"),
    ("x: {_target_: os.system}", [], "cannot name code"),
])
def test_the_options_in_a_folder_of_others_are_data(line, given, fact, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("A_URL", f"sqlite:///{tmp_path}/{SECRET}.db")
    (tmp_path / ".hwnas.json").write_text('{"format": "hwnas-folder/1", "kind": "search"}')
    (tmp_path / "config.yaml").write_text(f"seed: 0\n{line}\n")
    assert worker([f"run={tmp_path}", *given]) == 2
    said = capfd.readouterr().err
    assert len(said.splitlines()) == 1
    assert fact in said
    assert SECRET not in said
    assert not [*tmp_path.glob("*.db")]
