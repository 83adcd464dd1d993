"""The run folder: whole files, one-line errors, values that survive the round trip."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from hwnas.errors import StudyError, UserError
from hwnas.system.run_folder import NAME, RunFolder, settle_home
from hwnas.system.tables import finite


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs" / "mine")


def test_what_is_no_run_folder_is_told(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(StudyError, match="is a file"):
        RunFolder.create(tmp_path / "taken")
    with pytest.raises(StudyError, match=r"no config\.yaml.*hwnas search"):
        RunFolder.open(tmp_path)


def test_a_run_that_was_copied_without_its_mark_is_told(run: RunFolder, tmp_path: Path) -> None:
    run.write_config("seed: 0\n")
    run.write_json(run.environment, {})
    shutil.copytree(run.path, tmp_path / "copy", ignore=lambda *_: [NAME])
    with pytest.raises(StudyError, match=re.escape(NAME)):
        RunFolder.open(tmp_path / "copy")


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises((UserError, OSError)):
        RunFolder.create(tmp_path / "loop")


@pytest.mark.parametrize(("code", "told"), [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only"),
                                            (errno.EACCES, "Permission denied")])
def test_unwritable_disk_is_one_line_at_once(run: RunFolder, monkeypatch, code: int, told: str) -> None:
    def refuse(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    run.write_config({})
    monkeypatch.setattr(os, "fsync", refuse)
    for make in (RunFolder.create, RunFolder.open):
        with pytest.raises(UserError, match=told) as caught:
            make(run.path)
        assert "\n" not in str(caught.value)
    assert {path.name for path in run.path.iterdir()} == {".hwnas.json", "config.yaml"}


def test_predictions_round_trip_without_pickle(run: RunFolder) -> None:
    labels = np.arange(5)
    run.write_arrays(run.predictions, {"3fa91c20": labels[::-1], "resnet10t-stem1": labels, "labels": labels})
    found = run.read_predictions()
    np.testing.assert_array_equal(found["labels"], labels)
    np.testing.assert_array_equal(found["3fa91c20"], labels[::-1])
    assert found["resnet10t-stem1"].dtype == np.int32
    whole = run.predictions.read_bytes()
    for torn in (b"torn", whole[:-20], b""):
        run.predictions.write_bytes(torn)
        with pytest.raises(StudyError, match=r"predictions\.npz"):
            run.read_predictions()


def test_json_has_no_nan(run: RunFolder) -> None:
    run.write_json(run.environment, {"a": float("nan"), "b": (1, np.float32(0.5)), 3: np.int64(4)})
    assert json.loads(run.environment.read_text()) == {"a": None, "b": [1, 0.5], "3": 4}
    assert finite([float("inf")]) == [None]


def test_a_model_folder_names_what_a_target_runs_and_its_id_cannot_leave_the_run(run: RunFolder) -> None:
    for id in ("../../etc", "a/b", "", ".hidden", "x" * 200):
        with pytest.raises(StudyError, match="not a plain name"):
            run.model(id)
    model = run.model("3fa91c20")
    assert model.deployed("int8").name == "model_int8.onnx"
    assert model.deployed("bf16").name == "model.onnx"
    assert model.path == run.path / "models" / "3fa91c20"


@pytest.mark.parametrize("text", ["- a\n- b", "a: [", ""])
def test_config_that_is_no_mapping(run: RunFolder, text: str) -> None:
    run.write_config(text)
    with pytest.raises(StudyError, match=r"config\.yaml"):
        run.read_config()


@pytest.mark.parametrize("text", [None, "{", "[]", *(f'{{"format": "hwnas-environment/{n}"}}' for n in (1, 2))])
def test_an_environment_that_is_not_whole_names_the_next_step(run: RunFolder, text: str | None) -> None:
    if text is not None:
        run.environment.write_text(text)
    with pytest.raises(StudyError, match=r"environment\.json.*(Search again|Update hwnas)"):
        run.read_environment()


def test_who_has_no_home_keeps_tables_in_a_run_that_is_marked_first(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hwnas.system.run_folder.find_home", lambda: None)
    monkeypatch.setenv("HWNAS_HOME", "")
    told = list[str]()
    settle_home(None, False, told.append)
    assert not told
    settle_home(tmp_path / "run", False, told.append)
    home = Path(os.environ["HWNAS_HOME"])
    assert home == tmp_path / "run" / "home"
    assert str(home) in told[0]
    (home / "zoo").mkdir(parents=True)
    RunFolder.create(tmp_path / "run")  # its own files are no strange ones
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("")
    with pytest.raises(StudyError, match="did not make"):
        settle_home(tmp_path / "other", False, told.append)
