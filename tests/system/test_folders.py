"""Work folders: what a command takes up, what it refuses in one line, and that it changes nothing of others."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from hwnas.cli.command import run_command
from hwnas.cli.progress import Console
from hwnas.errors import StudyError, UserError
from hwnas.search.__main__ import main as search
from hwnas.system.run_folder import NAME, RunFolder, WorkFolder, check_replaceable
from hwnas.train import main as train

TARGET = "+target=ort_int8"
COMMANDS = {
    "search": (search, [TARGET]), "train": (train, ["model=timm:resnet10t", "dataset.image_size=32"])}
MINE = {"config.yaml": "lr: 3", "report.html": "<p>mine", "trials.csv": "a,b", "weights.safetensors": "w",
        "plan.json": "{}", "summary.json": "[", "study.db": "", "steps/identity.json": "{}", "models/x/card.md": "c"}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
            for path in sorted(folder.rglob("*"))}


def fill(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class TakenUp(UserError):
    """The command has its folder."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command `kind` until it has its folder; returns the one line of its error."""
    take_up = WorkFolder.take_up

    def stop(folder: WorkFolder, *args: object, **named: object) -> None:
        raise TakenUp(f"{take_up(folder, *args, **named).path}")  # type: ignore[arg-type]

    monkeypatch.setattr(WorkFolder, "take_up", stop)

    def command(kind: str, out: Path, *more: str) -> str:
        main, options = COMMANDS[kind]
        target = TARGET in options
        code = run_command(main, kind, "usage", ["-q", *options, f"out={out}", *more], target=target)
        errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note:")]
        assert code == 2
        assert len(errors) == 1, errors
        return errors[0]

    return command


@pytest.mark.parametrize("kind", COMMANDS)
def test_every_command_marks_its_folder_and_asks_before_it_uses_that_of_others(run, kind, tmp_path):
    assert "TakenUp" in run(kind, tmp_path / "new")
    assert json.loads((tmp_path / "new" / NAME).read_text())["kind"] == kind
    assert set(content(tmp_path / "new")) == {NAME}
    there = fill(tmp_path / "there", MINE)
    before = content(there)
    error = run(kind, there)
    assert "files that hwnas did not make" in error
    assert "out=FOLDER, or overwrite=true" in error
    assert content(there) == before
    assert "TakenUp" in run(kind, there, "overwrite=true")
    assert (there / NAME).is_file()
    assert before.items() <= content(there).items()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    for n, files in enumerate(({"config.yaml": "seed: 0"}, {".env": "x"}, MINE)):
        before = content(there := fill(tmp_path / str(n), files))
        with pytest.raises(StudyError, match="files that hwnas did not make"):
            WorkFolder(there, "train").take_up()
        assert content(there) == before
    with pytest.raises(StudyError, match="is not a run folder"):
        RunFolder.open(there)  # a config.yaml of the user's own makes none
    assert content(there) == before


def test_a_folder_that_is_empty_or_ones_own_is_taken_up_also_behind_a_kill(tmp_path):
    for _ in range(2):
        WorkFolder(tmp_path, "train").take_up()
        assert set(content(tmp_path)) == {NAME}
    fill(tmp_path, {".config.yaml.0a1b2c3d.tmp": "", f"{NAME}.77": "", ".training.lock": "",
                    f".{NAME}.77.0a1b2c3d.tmp": ""})
    WorkFolder(tmp_path, "train").take_up()


@pytest.mark.parametrize("other", COMMANDS)
def test_the_folder_of_other_work_is_refused(other: str, tmp_path: Path) -> None:
    marker = {"format": "hwnas-folder/1", "kind": other, "hwnas": "0"}
    before = content(fill(tmp_path / "there", {**MINE, NAME: json.dumps(marker)}))
    for kind in COMMANDS:
        with pytest.raises(StudyError, match=rf"is in .*hwnas\.{other}"):
            WorkFolder(tmp_path / "there" / "models" / "x", kind).take_up(overwrite=True)
        if other != kind:
            with pytest.raises(StudyError, match=r"is the folder of a .*out=FOLDER"):
                WorkFolder(tmp_path / "there", kind).take_up(overwrite=True)
    assert content(tmp_path / "there") == before


@pytest.mark.parametrize("text", ['{"format": "hwnas-folder/2", "kind": "x"}', "[]", '{"format": "y/1"}', '{"format"'],
                         ids=["later", "no object", "foreign", "torn"])
def test_a_marker_that_cannot_be_read_is_refused(text: str, tmp_path: Path) -> None:
    before = content(fill(tmp_path, {**MINE, NAME: text}))
    for out in (tmp_path, tmp_path / "inside"):
        with pytest.raises(StudyError, match=rf"{re.escape(str(tmp_path / NAME))}: "):
            WorkFolder(out, "train").take_up(overwrite=True)
    assert content(tmp_path) == before


def test_a_marker_that_finds_no_space_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if Path(target).name == NAME:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(os, "link", full)
    with pytest.raises(UserError, match=r"\.hwnas\.json: No space left on device\. Free space on that disk"):
        WorkFolder(tmp_path, "train").take_up()
    assert list(tmp_path.iterdir()) == []


def test_of_two_commands_that_begin_at_once_the_first_gets_the_folder(tmp_path, monkeypatch):
    from hwnas.system import run_folder

    others = run_folder._others

    def meanwhile(path: Path) -> list[str]:
        monkeypatch.setattr(run_folder, "_others", others)
        WorkFolder(path, "train").take_up()
        fill(path, {"log.csv": "1"})
        return others(path)

    monkeypatch.setattr(run_folder, "_others", meanwhile)
    assert WorkFolder(tmp_path / "out", "train").take_up().path == tmp_path / "out"
    monkeypatch.setattr(run_folder, "_others", meanwhile)
    with pytest.raises(StudyError, match=r"hwnas\.train"):
        WorkFolder(tmp_path / "other", "search").take_up()


@pytest.mark.parametrize("name", ["verify", "report"])
def test_the_second_command_on_a_run_waits_and_says_so(name, tmp_path, capsys):
    import importlib

    run = RunFolder.create(tmp_path / "run")
    run.write_config({"seed": 0})
    held = FileLock(run.path / ".results.lock")
    held.acquire()

    class Told(Exception):
        pass

    def say(text: str) -> None:
        raise Told(text)

    console = Console(quiet=True)
    console.say = say  # type: ignore[method-assign]
    with pytest.raises(Told, match="another process works in"):
        importlib.import_module(f"hwnas.{name}").run({"run": run.path}, console)
    held.release()


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_file_of_the_users_own_is_not_replaced(kind: str, tmp_path: Path) -> None:
    from hwnas.pictures import blank_figure, figure_bytes

    picture, document, empty, others = (tmp_path / name for name in (f"p.{kind}", "d.json", "e.json", "mine.json"))
    picture.write_bytes(figure_bytes(blank_figure(3, 2), kind))
    document.write_text('{"format": "hwnas-benchmark", "version": 1}')
    empty.touch()
    others.write_text('{"my": "notes"}')
    check_replaceable(picture, document, empty, tmp_path / "absent.json")
    with pytest.raises(StudyError, match=r"mine\.json: hwnas did not write this file"):
        check_replaceable(document, others)
    with pytest.raises(StudyError, match="is a folder"):
        check_replaceable(tmp_path)
    with pytest.raises(UserError, match="cannot write"):  # before the work; a file is no folder, for root neither
        check_replaceable(document / "below.csv")
