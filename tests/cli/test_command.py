"""Bad input to the commands: one line that names fact, place and next step; exit code 2; no traceback."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hwnas.cli.command import compose, kept, names_in, reader_of, run_command, target_names
from hwnas.errors import ConfigError, HwnasError
from hwnas.search.__main__ import main
from hwnas.system.paths import shipped

TARGET = "+target=xeon_int8"


def search(*overrides: str) -> int:
    return run_command(main, "search", "usage", ["-q", *overrides])


@pytest.mark.parametrize(("overrides", "named"), [
    ([], ["xeon_int8", "ort_fp32", "target="]),
    (["+target=xeon_int9"], ["xeon_int9", "Did you mean xeon_int8"]),
    ([TARGET, "+n_trails=5"], ["n_trails", "Did you mean n_trials"]),
    ([TARGET, "dataset=/nowhere/photos"], ["/nowhere/photos"]),
    ([TARGET, "seed=0,1"], ["seed=0,1", "[0,1]"]),
    ([TARGET, "mine.epochs=3"], ["mine.epochs", "--show-config"]),
    ([TARGET, "dataset=digitz"], ["data set", "digitz", "digits"]),
    ([TARGET, "space=mnasnett"], ["search space", "mnasnett", "mnasnet"]),
    ([TARGET, "accuracy=magic"], ["accuracy", "magic", "proxy"]),
    ([TARGET, "objective=both"], ["objective", "both", "pareto"]),
    ([TARGET, "baselines=[resnet10x]"], ["resnet10x", "resnet10t"]),
    ([TARGET, "target.runtime=openvin"], ["runtime", "openvin", "openvino"]),
    ([TARGET, "search.reuse='2024'"], ["search.reuse=2024", "no study.db"]),
    ([TARGET, "finalists.recipe.optimizer=adamm"], ["adamm", "adamw"]),
    ([TARGET, "trials=3"], ["trials", "--show-config"]),
    ([TARGET, "n_trials"], ["Write n_trials=…"]),
    ([TARGET, "dataset=imagefolder"], ["root"]),
    ([TARGET, "dataset=imagefolder", "dataset.root=/nowhere"], ["/nowhere"]),
    ([TARGET, "dataset.image_size=4"], ["4", "8"]),
    ([TARGET, "host=elsewhere"], ["host", "elsewhere"]),
    ([TARGET, "minutes=2"], ["'minutes'", "budget.minutes"]),
    ([TARGET, "budget=2"], ["got 2. Write budget.KEY=VALUE with a key of ", "minutes"]),
    ([TARGET, "proxy=2"], ["got 2. Write proxy.KEY=VALUE with a key that --show-config"]),
    ([TARGET, "budget.minutes=−2"], ["cannot be read", "\"budget.minutes='−2'\""]),
    ([TARGET, "dataset=."], ["unknown data set", "dataset=./."]),
    ([TARGET, "dataset=no/where"], ["no/where: no such folder"]),
    (["target=xeon_int8,ort_int8"], ["several values", "Give one."]),
    ([TARGET, "+proxy._target_=os.system"], ["_target_", "cannot name code"]),
    ([TARGET, "+proxy.x={a: [{_target_: os.system}]}"], ["proxy.x.a.0._target_"]),
])
def test_one_line_and_exit_code_2(overrides, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    extra = ["calibration.minutes=0.05"] if TARGET in overrides else []
    assert search(*overrides, *extra) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note:")]
    assert len(errors) == 1, errors
    for text in named:
        assert text in errors[0]


def test_an_option_with_dashes_is_told_how_it_is_written(capsys):
    with pytest.raises(SystemExit) as ended:
        search("--image-size", "32")
    assert ended.value.code == 2
    line, = capsys.readouterr().err.splitlines()
    assert "without dashes: image_size=VALUE (of hwnas search)" in line


def run_failing(error: BaseException) -> int:
    """The exit code of a command that this error ends."""
    def fail(config, console):
        raise error

    return run_command(fail, "report", "usage", ["run=x"], target=False)


def test_other_failures_are_one_line_and_exit_code_1(capsys):
    assert run_failing(HwnasError("the machine\nwas restless")) == 1
    assert capsys.readouterr().err == "HwnasError: the machine was restless\n"


@pytest.mark.parametrize("name", ["model.onnx", None])
def test_a_full_disk_of_temporary_files_is_one_line_and_exit_code_2(name, capsys, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/full")
    assert run_failing(OSError(errno.ENOSPC, "No space left on device", name)) == 2
    error, = capsys.readouterr().err.splitlines()
    assert (name or "/full") in error
    assert "set TMPDIR" in error


def test_a_pipe_that_breaks_inside_the_work_is_no_success(capsys):
    assert run_failing(BrokenPipeError(errno.EPIPE, "Broken pipe")) == 1
    error, = capsys.readouterr().err.splitlines()
    assert error.startswith("HwnasError: a process that this command talked to has ended.")


def test_an_option_that_the_command_would_ignore_is_refused():
    for option, named in (("+bogus=1", "bogus"), ("++bogus.inner=1", "bogus.inner"), ("+target=ort_int8", "target"),
                          ("target=ort_int8", "target")):
        with pytest.raises(ConfigError, match=f"no option of report is called '{named}'"):
            compose("report", ["run=x", option], False)


def test_ctrl_c_says_how_to_go_on_and_programming_errors_are_not_hidden(capsys):
    assert run_failing(KeyboardInterrupt()) == 130
    assert "same command" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        run_failing(ZeroDivisionError())


def test_every_target_is_known_and_overrides_win():
    assert {path.stem for path in (shipped("conf") / "target").glob("*.yaml")} <= set(names_in("target"))
    for written, name in (("+target=cpu", "cpu"), ("target=cuda_fp16", "cuda_fp16"), ("+target=ort_int8", "ort_int8")):
        assert compose("search", [written]).target.name == name
    assert compose("search", [TARGET, "target.threads=0", "n_trials=7"]).n_trials == 7


def test_a_target_is_needed_only_where_one_is_used():
    with pytest.raises(ConfigError, match="target=NAME"):
        compose("search", [])
    assert compose("verify", ["run=x"], target=False).run == "x"


URL = "postgresql+psycopg://me:{}@host/x"


@pytest.mark.parametrize("overrides", [
    [f"proxy.x={URL}"], [f"++proxy.x=[{URL}"], [f"{URL}"], ["--storage", f"--{URL}"], [f"seed={URL}"],
    [f"n_trials={URL}", f"storage={URL}"], [f"storage={URL}", "dataset.root=${oc.env:NO_SUCH_NAME}"],
    [f"++x.{URL}=1"], [f"dataset={URL}"], [f"storage={URL}", "seed=1,2", "seed.x=1"]])
@pytest.mark.parametrize("password", ["s3cret", "s3cret'w{r(d", "a:s3cret=b,c"])
def test_no_error_shows_a_password(overrides, password, capsys):
    try:
        code = search(TARGET, *(part.format(password) if URL in part else part for part in overrides))
    except SystemExit as ended:  # argparse
        code = ended.code
    said = "".join(capsys.readouterr())
    assert code == 2
    assert "s3cret" not in said
    assert "w{r" not in said
    assert "Traceback" not in said


def test_what_is_shown_of_the_options_stands_as_it_was_typed(monkeypatch, capsys):
    monkeypatch.setenv("A_URL", URL.format("s3cret"))
    typed = ["storage=${oc.env:A_URL}", "sampler_options.x=${storage}",
             f"dataset.root={URL.format('s3cret')}", "seed=${threads}"]
    assert search(TARGET, "--show-config", *typed) == 0
    shown = capsys.readouterr().out
    config = compose("search", [TARGET, *(part.replace("=", "='", 1) + "'" for part in typed)])
    stored = kept(config)
    for text in (shown, stored):
        assert "s3cret" not in text
        assert "storage: ${oc.env:A_URL}\n" in text
        assert "root: postgresql+psycopg://me:***@host/x\n" in text
    assert "\n  x: ${oc.env:A_URL}\n" in stored  # made of one that is not resolved
    assert "\nseed: 1\n" in stored


@pytest.mark.parametrize(("files", "reader"), [
    ("data.yaml images/train/0.jpg labels/train/0.txt", "yolo"), ("images/0.jpg labels/0.txt classes.txt", "yolo"),
    ("train/images/0.jpg train/labels/0.txt data.yaml", "yolo"), ("JPEGImages/0.jpg Annotations/0.xml", "voc"),
    ("0.jpg 0.xml", "voc"), ("train.json train/0.jpg val/0.jpg", "coco"),
    ("train/0.jpg train/_annotations.coco.json", "coco"),
    ("annotations/instances_train2017.json train2017/0.jpg", "coco"), ("data/train.parquet", "timm:hfds"),
    ("train/0.jpg train/0.txt train/classes.txt", "yolo"), ("0.jpg 0.txt classes.txt", "yolo"),
    ("JPEGImages/0.jpg Annotations/0.xml classes.txt", "voc"),
    ("train2017/0.jpg annotations/x.json classes.txt", "coco"),
    ("images/0.jpg annotations/xmls/0.xml", "voc"), ("train.tar test.tar", "timm:tar"),
    ("train_images.npy", "arrays"), ("cat/0.jpg dog/0.jpg train.json", "imagefolder"),
    ("train/cat/0.jpg train/dog/0.PNG train.json", "imagefolder"),
    ("cat/0.jpg dog/0.jpg data.yaml a.xml", "imagefolder"),
    ("cat/0.jpg dog/0.jpg annotations/a.json", "imagefolder"), ("cat/0.jpg dog/0.jpg data/x.parquet", "imagefolder")])
def test_a_path_is_read_by_what_it_holds(files: str, reader: str, tmp_path: Path) -> None:
    for name in files.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert reader_of(tmp_path) == reader


def test_a_target_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="target is given twice"):
        compose("search", ["target=ort_int8", "target=ort_fp32"])


def test_a_comment_makes_no_set_of_targets(hwnas_home: Path) -> None:
    folder = hwnas_home / "conf" / "target"
    folder.mkdir(parents=True)
    (folder / "one.yaml").write_text("# one of the deployments: of all\nname: one  # not deployments: of a set\n")
    (folder / "several.yaml").write_text("name: several\n'deployments' : [one]\n")
    assert "one" in target_names("benchmark")
    assert {"several", "cpu"} & {*target_names("benchmark")} == set()
    assert {"one", "several", "cpu"} <= {*target_names("search")}
