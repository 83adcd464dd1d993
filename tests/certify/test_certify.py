"""`hwnas certify`: what it chooses, trains and asks, that an interruption loses nothing, what it refuses."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from certify_fixtures import Told, ToldAmong, digits, plan_of, tiny_space, write_space
from safetensors.torch import save_file

from hwnas.accuracy import estimator as accuracy
from hwnas.accuracy.certificate import find_certificate
from hwnas.certify.__main__ import main
from hwnas.certify.results import Judged, estimate_all, read_judged
from hwnas.certify.truth import CertifyPlan, macs_of, read_plan, read_training, spread, work
from hwnas.cli.command import run_command
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, StudyError, TrainingError, UnknownName, UserError
from hwnas.networks.around import family_content
from hwnas.networks.baselines import Baseline
from hwnas.space.search_space import SearchSpace
from hwnas.training.loop import Checkpoint
from hwnas.training.recipe import FINE_TUNING

QUIET = Console(quiet=True)
TINY = ["dataset=digits", "n=4", "seeds=2", "workers=1", "training.epochs=2", "training.train_images=96",
        "training.validation_images=60", "training.batch_size=32"]
PROXY = "proxy:{epochs:1,train_images:96}"
JUDGED = f"estimators={{{PROXY},long:{{accuracy:proxy,epochs:2,train_images:96}}}}"


@pytest.fixture(scope="module")
def space_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_space(tmp_path_factory.mktemp("space"))


def arguments(space_file: Path, out: Path, *more: str) -> list[str]:
    judged = [] if any(one.startswith("estimators=") for one in more) else [JUDGED]
    return ["-q", f"space={space_file}", f"out={out}", *TINY, *judged, *more]


@pytest.fixture(scope="module")
def whole(space_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a certificate that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert run_command(main, "certify", "usage", arguments(space_file, out), target=False) == 0
    return out


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "out")


def weights(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("weights.safetensors"))}


def document(path: Path) -> Any:
    return json.loads(path.read_text())


def test_networks_are_one_from_each_stretch_of_costs(tmp_path: Path) -> None:
    space = tiny_space(tmp_path)
    networks = spread(space, 8, 3, macs_of(space))
    assert [one.cost for one in networks] == [one.architecture.macs for one in networks]
    assert len({one.id for one in networks}) == 8
    assert networks == spread(space, 8, 3, macs_of(space))
    assert networks != spread(space, 8, 4, macs_of(space))
    every = sorted(space.decode(space.to_params(row)).macs
                   for row in np.unique(space.sample(np.random.default_rng(1), 4096), axis=0))
    assert len(every) == space.n_architectures
    for one, part in zip(networks, np.array_split(every, 8), strict=True):
        assert part[0] <= one.cost <= part[-1]


def test_the_whole_space_may_be_asked_for_and_no_more(tmp_path: Path) -> None:
    space = tiny_space(tmp_path)
    n = space.n_architectures
    assert len({one.id for one in spread(space, n, 0, macs_of(space))}) == n
    with pytest.raises(ConfigError, match=f"n={n + 1}: space tiny has {n} networks"):
        spread(space, n + 1, 0, macs_of(space))


def test_a_certificate_leaves_trainings_estimates_and_what_they_come_to(whole: Path, space_file: Path) -> None:
    content = document(whole / "certificate.json")
    assert (content["n"], content["cost"], content["cost_source"]) == (4, "macs", "MACs (no target was given)")
    assert content["truth"]["trainings"] == 8
    assert content["truth"]["cpu_seconds"] > 0
    plan = read_plan(whole)
    assert plan is not None
    for network, row in zip(plan.networks, content["networks"], strict=True):
        scores = []
        for seed in (0, 1):
            summary = document(plan.folder(network, seed) / "summary.json")
            assert summary["identity"]["seed"] == seed
            assert summary["identity"]["train_images"] == pytest.approx(96, abs=9)
            scores.append(summary["top1_test"])
        assert row["top1"] == pytest.approx(np.mean(scores))
        assert row["id"] == network.id
    lines = list(csv.DictReader((whole / "certificate.csv").read_text().splitlines()))
    assert {line["estimator"] for line in lines} == {"proxy", "long"} == set(content["estimators"])
    assert content["estimators"]["long"]["accuracy"] == "proxy"
    assert content["estimators"]["long"]["fingerprint"] != content["estimators"]["proxy"]["fingerprint"]
    assert (whole / "certificate.png").read_bytes().startswith(b"\x89PNG")
    kept = find_certificate(digits(), SearchSpace.load(space_file, channels=1, classes=10))
    assert kept is not None
    assert dict(kept.content) == content


def test_the_same_command_again_trains_and_asks_nothing(copied: Path, space_file: Path, monkeypatch: pytest.MonkeyPatch
                                                        ) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("hwnas.certify.truth.train", refuse)
    monkeypatch.setattr("hwnas.accuracy.proxy.Proxy.evaluate", refuse)
    before = document(copied / "certificate.json")
    assert run_command(main, "certify", "usage", arguments(space_file, copied), target=False) == 0
    assert document(copied / ".hwnas.json")["kind"] == "certify"
    after = document(copied / "certificate.json")
    assert {**after, "created": ""} == {**before, "created": ""}


@pytest.mark.soak
def test_interrupted_and_resumed_gives_the_same_networks(whole: Path, space_file: Path, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    save, saved = Checkpoint.save, []

    def stop_at_sixth(self: Checkpoint, path: Path) -> None:
        saved.append(path)
        if len(saved) == 6:
            raise KeyboardInterrupt
        save(self, path)

    command = arguments(space_file, tmp_path / "out", "only=truth")
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", stop_at_sixth)
        assert run_command(main, "certify", "usage", command, target=False) == 130
    assert [path.parent.name for path in saved] == ["seed0"] * 6  # the first seed of all comes first
    assert run_command(main, "certify", "usage", command, target=False) == 0
    assert weights(tmp_path / "out") == weights(whole)
    costs = [document(path) for path in (tmp_path / "out").rglob("cost.json")]
    assert sorted(one["epochs_timed"] for one in costs) == [1, *[2] * 7]
    assert not (tmp_path / "out" / "certificate.json").exists()


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="children are read off /proc")
def test_killed_with_a_worker_beside_it_ends_both_and_goes_on(whole: Path, space_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = arguments(space_file, out, "only=truth", "workers=2")
    process = subprocess.Popen([sys.executable, "-m", "hwnas.certify", *command], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(out.rglob("log.csv")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(workers) == 1
    while os.path.exists(f"/proc/{workers[0]}") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{workers[0]}")
    assert run_command(main, "certify", "usage", arguments(space_file, out, "only=truth"), target=False) == 0
    assert weights(out) == weights(whole)


@pytest.mark.soak
def test_a_training_that_diverges_is_kept_as_failed_and_not_tried_again(copied: Path, space_file: Path,
                                                                        monkeypatch: pytest.MonkeyPatch,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    tried = []

    def diverge(job: Any, console: Console) -> None:
        tried.append(job.folder.path)
        raise TrainingError("loss is nan in epoch 1 of 2, step 1 of 3, learning rate 0.01")

    plan = read_plan(copied)
    assert plan is not None
    folder = plan.folder(plan.networks[1], 1)
    (folder / "summary.json").unlink()
    monkeypatch.setattr("hwnas.certify.truth.train", diverge)
    command = arguments(space_file, copied)
    for _ in range(2):
        assert run_command(main, "certify", "usage", command, target=False) == 0
    assert tried == [folder]
    found = read_training(plan, plan.networks[1], 1)
    assert found is not None
    assert (found.top1, found.reason) == (None, "loss is nan in epoch 1 of 2, step 1 of 3, learning rate 0.01")
    content = document(copied / "certificate.json")
    assert (content["truth"]["trainings"], content["truth"]["failed"]) == (7, 1)
    assert "one training failed" in capsys.readouterr().err


def test_an_estimator_may_be_added(copied: Path, space_file: Path) -> None:
    before = document(copied / "certificate.json")["estimators"]
    added = f"estimators={{{PROXY},short:{{accuracy:proxy,epochs:1,train_images:32}}}}"
    command = arguments(space_file, copied, added, "only=estimators", "seeds=1")
    assert run_command(main, "certify", "usage", command, target=False) == 0
    content = document(copied / "certificate.json")
    assert content["estimators"]["short"]["n"] == 4
    assert content["estimators"]["proxy"]["cpu_seconds"] == before["proxy"]["cpu_seconds"]
    assert content["truth"]["trainings"] == 4  # of the one seed that was asked for
    assert list(content["estimators"]) == ["proxy", "short", "long"]  # the last was judged before


def test_what_was_judged_before_and_no_longer_counts_is_said(copied: Path, space_file: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    path = copied / "estimates" / "long.json"
    path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "other'))
    command = arguments(space_file, copied, f"estimators={{{PROXY}}}", "only=estimators")
    assert run_command(main, "certify", "usage", command, target=False) == 0
    assert list(document(copied / "certificate.json")["estimators"]) == ["proxy"]
    assert "long.json is of another recipe" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "said"), [
    ("n=1000", "has 36 networks|n was 4, is 1000"), ("training.epochs=3", "training.epochs was 2, is 3"),
    ("training.epochs=0", "training: epochs must be"),
    ("training.epoch=3", "unknown key of training 'epoch'. Did you mean epochs"),
    ("training.seed=3", "unknown key of training 'seed'"), ("only=both", "only must be truth, estimators or null"),
    ("estimators=[prox]", "unknown accuracy estimator 'prox'. Did you mean proxy"),
    ("estimators={proxy:{epochs:2}}", "is of another recipe"), ("+target=xeon", "unknown target 'xeon'"),
    ("dataset.image_size=16", "dataset.image_size was None, is 16")])
def test_bad_options_are_one_line(change: str, said: str, copied: Path, space_file: Path,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(main, "certify", "usage", arguments(space_file, copied, change), target=False) == 2
    line, = capsys.readouterr().err.strip().splitlines()
    assert any(one in line for one in said.split("|")), line


def test_what_an_estimator_refuses_is_told_before_anything_is_trained(space_file: Path, tmp_path: Path,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    command = arguments(space_file, tmp_path / "out", "estimators={a:{accuracy:proxy,epoch:1}}")
    assert run_command(main, "certify", "usage", command, target=False) == 2
    assert "unknown key of proxy 'epoch'" in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("seed*"))


@pytest.mark.parametrize(("name", "text"), [
    ("plan.json", "{\"format\": "), ("estimates/proxy.json", "[1]"),
    ("networks/*/seed1/summary.json", "{\"format\": \"another/1\"}")])
def test_torn_or_foreign_files_are_named_in_one_line(name: str, text: str, copied: Path, space_file: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    path = next(copied.glob(name))
    path.write_text(text)
    assert run_command(main, "certify", "usage", arguments(space_file, copied), target=False) == 2
    line, = capsys.readouterr().err.strip().splitlines()
    assert str(path) in line
    assert path.read_text() == text


def test_a_class_without_test_images_is_named(space_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                              ) -> None:
    from PIL import Image

    for part, classes in (("train", "ab"), ("test", "a")):
        for name in classes:
            folder = tmp_path / "data" / part / name
            folder.mkdir(parents=True)
            for index in range(8):
                Image.new("L", (8, 8), 10 * index).save(folder / f"{index}.png")
    (tmp_path / "data" / "test" / "b").mkdir()
    command = arguments(space_file, tmp_path / "out", "dataset=imagefolder", f"dataset.root={tmp_path / 'data'}")
    assert run_command(main, "certify", "usage", command, target=False) == 2
    line, = capsys.readouterr().err.strip().splitlines()
    assert "b" in line
    assert "DataError" in line


def judged_by(estimator: Told, monkeypatch: pytest.MonkeyPatch) -> list[Judged]:
    monkeypatch.setitem(accuracy.BUILT_IN, "told", "told_estimator")
    monkeypatch.setitem(sys.modules, "told_estimator", SimpleNamespace(load=lambda config, dataset, space: estimator))
    return read_judged(["told"])


@pytest.fixture
def plan(tmp_path: Path) -> CertifyPlan:
    return plan_of(tmp_path / "out", tiny_space(tmp_path))


def ask_all(plan: CertifyPlan, estimator: Told, monkeypatch: pytest.MonkeyPatch, seeds: int = 1
            ) -> Sequence[dict[str, Any]]:
    judged = judged_by(estimator, monkeypatch)
    estimate_all(plan, judged, seeds, digits(), tiny_space(plan.out), QUIET)
    found: Sequence[dict[str, Any]] = document(judged[0].file(plan.out))["results"]
    return found


def test_estimators_hear_of_earlier_networks_in_an_order_without_meaning(plan: CertifyPlan,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    values = {network.id: 0.1 * row for row, network in enumerate(plan.networks)}
    estimator = Told(values)
    results = ask_all(plan, estimator, monkeypatch, seeds=2)
    order = [one["id"] for one in results[:8]]
    assert sorted(order) == sorted(values)
    assert order != list(values)
    assert [one["id"] for one in results[8:]] == order
    assert [len(history) for history in estimator.histories] == [*range(8), *range(8)]  # each seed's search is its own
    assert estimator.histories[2][1] == [values[order[1]] / 2, values[order[1]]]
    assert all(one["cpu_seconds"] >= 0 for one in results)


def test_one_that_asks_for_the_searchs_state_is_told_costs_and_prepared_once(plan: CertifyPlan,
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = ToldAmong({network.id: 0.5 for network in plan.networks})
    results = ask_all(plan, estimator, monkeypatch)
    costs = {network.id: network.cost for network in plan.networks}
    assert list(estimator.histories[-2]) == [(costs[one["id"]],) for one in results[:-1]]
    content = document(plan.out / "estimates" / "told.json")
    assert (content["setup_seconds"], content["setup_cpu_seconds"]) == (123, None)  # it lay done, as far as we can tell
    ask_all(plan, estimator, monkeypatch)
    assert estimator.prepared == 1  # all was asked: no need to prepare again


def test_waiting_for_another_process_is_not_counted_as_the_setup(plan: CertifyPlan, monkeypatch: pytest.MonkeyPatch
                                                                 ) -> None:
    estimator = ToldAmong({network.id: 0.5 for network in plan.networks})
    estimator.setup_here = False  # type: ignore[attr-defined]
    monkeypatch.setattr(estimator, "prepare", lambda console: setattr(estimator, "setup_seconds", 1e-9))
    ask_all(plan, estimator, monkeypatch)
    assert document(plan.out / "estimates" / "told.json")["setup_cpu_seconds"] is None


def test_one_that_cannot_be_prepared_is_said_and_left_out(plan: CertifyPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(console: Console) -> None:
        raise TrainingError("supernet: loss is nan in epoch 1")

    estimator = ToldAmong({network.id: 0.5 for network in plan.networks})
    monkeypatch.setattr(estimator, "prepare", diverge)
    one, = judged_by(estimator, monkeypatch)
    proxy, = read_judged({"proxy": {"epochs": 1, "max_steps": 1, "train_images": 32}})
    with pytest.raises(TrainingError):
        estimate_all(plan, [one], 1, digits(), tiny_space(plan.out), QUIET)
    stream = io.StringIO()
    estimate_all(plan, [one, proxy], 1, digits(), tiny_space(plan.out), Console(stream=stream))
    assert "told is left out: supernet: loss is nan" in stream.getvalue()
    assert not one.file(plan.out).exists()
    assert len(document(proxy.file(plan.out))["results"]) == 8


def test_estimates_of_other_networks_are_refused(plan: CertifyPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = Told({network.id: 0.5 for network in plan.networks})
    ask_all(plan, estimator, monkeypatch)
    path = plan.out / "estimates" / "told.json"
    path.write_text(path.read_text().replace(plan.networks[3].id, "another"))
    with pytest.raises(StudyError, match=r"told.json is of other networks"):
        ask_all(plan, estimator, monkeypatch)


def test_what_an_estimator_cannot_tell_is_kept_with_its_reason(plan: CertifyPlan, monkeypatch: pytest.MonkeyPatch
                                                               ) -> None:
    values: dict[str, float | Exception] = {network.id: 0.5 for network in plan.networks}
    values[plan.networks[2].id] = TrainingError("loss is nan\nin step 3")
    values[plan.networks[5].id] = float("nan")
    results = {one["id"]: one for one in ask_all(plan, Told(values), monkeypatch)}
    assert results[plan.networks[2].id]["reason"] == "loss is nan in step 3"
    assert results[plan.networks[5].id]["reason"] == "top-1 is nan"
    assert sum("reason" in one for one in results.values()) == 2


def test_killed_between_two_networks_asks_for_the_rest_only(plan: CertifyPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, float | Exception] = {network.id: 0.1 * row for row, network in enumerate(plan.networks)}
    untouched = ask_all(plan, Told(values), monkeypatch)
    shutil.rmtree(plan.out / "estimates")
    stopping = {**values, untouched[5]["id"]: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        ask_all(plan, Told(stopping), monkeypatch)  # type: ignore[arg-type]
    rest = Told(values)
    results = ask_all(plan, rest, monkeypatch)
    assert [len(history) for history in rest.histories] == [5, 6, 7]
    assert [(one["id"], one["value"]) for one in results] == [(one["id"], one["value"]) for one in untouched]
    with pytest.raises(StudyError, match=r"told.json is of another recipe \(fingerprint told, now new\)"):
        ask_all(plan, Told(values, "new"), monkeypatch)


def test_a_full_disk_is_one_line_and_loses_no_estimate(plan: CertifyPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {network.id: 0.1 * row for row, network in enumerate(plan.networks)}
    sync, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 6:  # a file and its folder each time: the fourth network's
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left on device"):
            ask_all(plan, Told(values), monkeypatch)
    assert len(document(plan.out / "estimates" / "told.json")["results"]) == 3
    assert len(ask_all(plan, Told(values), monkeypatch)) == 8


@pytest.mark.soak
def test_with_a_target_networks_are_spread_over_predicted_latency(space_file: Path, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    def falling(codes: Any) -> Any:
        return SimpleNamespace(mean=1 / np.asarray(macs_of(tiny_space(tmp_path))(codes)))

    asked = []

    def model(*_: object) -> Any:
        asked.append(1)
        return SimpleNamespace(created="2026-11-20"), SimpleNamespace(predict=falling)

    monkeypatch.setattr("hwnas.certify.__main__.latency_model", model)
    command = arguments(space_file, tmp_path / "out", "+target=epyc_int8", "only=estimators")
    for _ in range(2):
        assert run_command(main, "certify", "usage", command, target=False) == 2  # nothing is trained
    plan = read_plan(tmp_path / "out")
    assert plan is not None
    assert plan.cost == "latency_ms"
    assert plan.cost_source.startswith("latency predicted for epyc_int8 on ")
    macs = [network.architecture.macs for network in plan.networks]
    assert macs == sorted(macs, reverse=True)  # cheapest first, and the most MACs are the cheapest here
    assert asked == [1]


def test_a_host_without_a_table_is_no_reason_to_spread_over_macs(space_file: Path, tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    command = arguments(space_file, tmp_path / "out", "+target=epyc_int8", "host=nowhere")
    assert run_command(main, "certify", "usage", command, target=False) == 2
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "out" / "plan.json").exists()


def test_a_place_that_takes_no_lock_is_one_line(plan: CertifyPlan) -> None:
    plan.folder(plan.networks[0], 0).write_text("a file where a folder should be")
    with pytest.raises(UserError, match=r"cannot write .*\.training\.lock"):
        work(plan, lambda: None, wait=False)


def test_names_and_labels_are_read() -> None:
    assert read_judged({"long": {"accuracy": "proxy", "epochs": 6}}) == [Judged("long", "proxy", {"epochs": 6})]
    found = read_judged(["multi_fidelity", {"long": {"accuracy": "proxy", "epochs": 6}}, "proxy"])
    assert [(one.label, one.accuracy, dict(one.options)) for one in found] == [
        ("multi_fidelity", "multi_fidelity", {}), ("long", "proxy", {"epochs": 6}), ("proxy", "proxy", {})]


@pytest.mark.parametrize(("wrong", "error", "said"), [
    *((wrong, ConfigError, "must be a list of names or a section") for wrong in ("proxy", [3], {"long": 3}, [None])),
    (["proxy", {"proxy": {"epochs": 1}}], ConfigError, "names one twice"),
    ([], ConfigError, "estimators is empty"),
    ({"../proxy": {"accuracy": "proxy"}}, ConfigError, "plain name"),
    (["supernet"], UnknownName, r"was taken out: .* accuracy=proxy"),
    (["zero_cost:naswot"], UnknownName, r"was taken out: .* accuracy=proxy"),
    ({"long": {"epochs": 6}}, UnknownName, "accuracy estimator")])
def test_names_and_labels_that_mean_nothing_are_refused(wrong: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        read_judged(wrong)


def test_a_worker_that_meets_a_torn_plan_says_so(plan: CertifyPlan) -> None:
    (plan.out / "plan.json").write_text("{")
    done = subprocess.run([sys.executable, "-m", "hwnas.certify.truth", str(plan.out)], capture_output=True, text=True,
                          check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "plan.json: torn" in done.stderr


@pytest.mark.soak
def test_cuts_of_a_pretrained_network_are_fine_tuned_and_judged_by_what_they_keep(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name = "test_efficientnet"
    space = tmp_path / "cuts.yaml"
    space.write_text(yaml.safe_dump(family_content(name, 1, 10, 16)))
    given = ["-q", f"space={space}", f"out={tmp_path / 'run'}", "dataset=digits", "n=4", "seeds=1", "workers=1",
             "training.epochs=1", "training.train_images=96", "training.validation_images=32"]
    monkeypatch.setenv("HWNAS_WEIGHTS", str(tmp_path))
    assert run_command(main, "certify", "usage", given, target=False) == 2
    assert f"there are no pretrained weights of {name}" in capsys.readouterr().err
    save_file(Baseline(name).build(3, 1000, 16).state_dict(), tmp_path / f"{name}.safetensors",
              {"norm": "mean 0.5 std 0.5"})
    assert run_command(main, "certify", "usage", given, target=False) == 0
    plan = read_plan(tmp_path / "run")
    assert plan is not None
    key = plan.identity["pretrained"]
    for network in plan.networks:
        summary = document(plan.folder(network, 0) / "summary.json")
        assert summary["identity"]["network"] == f"{network.architecture} pretrained={key}"
        assert summary["identity"]["lr"] == FINE_TUNING.lr
    content = document(tmp_path / "run" / "certificate.json")
    assert [*content["estimators"]] == ["inherited"]
    other = ["-q", "dataset=digits", "training.pretrained.use=true", f"out={tmp_path / 'other'}"]
    assert run_command(main, "certify", "usage", other, target=False) == 2
    assert "are cut from none" in capsys.readouterr().err
