"""The contest: who is picked, who trains when, what a goal's verdict is, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, DataError, StudyError, UnknownName
from hwnas.space.architecture import Architecture
from hwnas.system.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.contest import timing, training  # noqa: E402
from experiments.contest.data import Images, dataset_config  # noqa: E402
from experiments.contest.entries import Entry, Latency, bootstrap, compared, read_entries  # noqa: E402
from experiments.contest.networks import Network, Training, baselines, overrides, ready  # noqa: E402
from experiments.contest.options import BASELINES, parse  # noqa: E402
from experiments.contest.picks import Pick, Picks, check_data, picked, picks_of, searched_space  # noqa: E402
from experiments.contest.report import write_all  # noqa: E402
from experiments.contest.run import main  # noqa: E402
from experiments.contest.scoring import file_of, read_score, score_all  # noqa: E402
from experiments.contest.statements import BETTER, DROPS, FASTER, REACH, RESNETS, decide, verdicts  # noqa: E402
from experiments.contest.training import claim, cpu_seconds, train_all  # noqa: E402

QUIET = Console(quiet=True)
N = 2000


# ---- options


def test_options_are_those_of_the_data_set_and_one_recipe_serves_all(tmp_path):
    options = parse(["data=eurosat", f"root={tmp_path}", f"out={tmp_path}", "networks=resnet50,resnet18",
                     "steps=[report,train]", "dataset.flip=false", "epochs=3"])
    assert options.image_size == 64
    assert options.dataset == ("dataset=imagefolder", f"dataset.root={tmp_path}", "dataset.flip=false")
    assert options.networks == ("resnet18", "resnet50")
    assert options.steps == ("train", "report")
    theirs = [overrides(Training(one, 1), options, tmp_path) for one in baselines(options.networks)]
    mine = overrides(Training(Network("fast-1", "fast", architecture=tmp_path / "a.yaml"), 1), options, tmp_path)
    same = set.intersection(*map(set, theirs), set(mine))
    assert {"lr=0.005", "epochs=3", "train_images=10000", "seed=1", "split_seed=0", "dataset.flip=false"} <= same
    assert "dataset.image_size=64" in theirs[0]
    assert not any(one.startswith("dataset.image_size") for one in mine)


def test_bf16_is_for_the_baselines_named_alone_and_part_of_what_a_folder_holds(tmp_path):
    options = parse(["data=digits", f"out={tmp_path}", "networks=[resnet18,mobilenetv2_050]", "bf16=resnet18"])
    told = {one.label: overrides(Training(one, 0), options, tmp_path) for one in baselines(options.networks)}
    assert {label for label, one in told.items() if "precision=bf16" in one} == {"resnet18", "resnet18-stem1"}
    assert all("precision=fp32" in one for label, one in told.items() if label.startswith("mobilenet"))
    claim(options)
    with pytest.raises(ConfigError, match="bf16 was resnet18, now "):
        claim(parse(["data=digits", f"out={tmp_path}"]))
    held = json.loads((tmp_path / "contest.json").read_text())
    del held["bf16"]  # a folder of before there was the choice
    (tmp_path / "contest.json").write_text(json.dumps(held))
    claim(parse(["data=digits", f"out={tmp_path}"]))
    with pytest.raises(ConfigError, match="now resnet18"):
        claim(options)
    with pytest.raises(UnknownName, match="unknown network 'fast'"):
        parse(["data=digits", f"out={tmp_path}", "bf16=fast"])


@pytest.mark.parametrize(("arguments", "error", "says"), [
    (["data=eurosat", "out=x", "stems=1"], UnknownName, "unknown option 'stems'"),
    (["data=eurosta", "out=x"], UnknownName, "Did you mean eurosat"),
    (["data=eurosat"], ConfigError, "out=… must be given"),
    (["data=eurosat", "out=x", "steps=trian"], UnknownName, "unknown step 'trian'"),
    (["data=eurosat", "out=x", "networks=resnet34"], UnknownName, "unknown network"),
    (["data=eurosat", "out=x", "target=epyc"], UnknownName, "unknown target"),
    (["data=eurosat", "out=x", "epochs=0"], ConfigError, "epochs"),
    (["data=eurosat", "out=x", "dataset.image_size=8"], ConfigError, "write image_size=8"),
    (["data=eurosat", "out=x", "resume"], ConfigError, "is no name=value"),
])
def test_what_cannot_be_meant_is_one_line(arguments, error, says):
    with pytest.raises(error, match=says) as caught:
        parse(arguments)
    assert "\n" not in str(caught.value)


def test_a_folder_holds_one_recipe(tmp_path):
    claim(parse(["data=digits", f"out={tmp_path}"]))
    claim(parse(["data=digits", f"out={tmp_path}", "jobs=1", "seeds=1", "root=/elsewhere"]))
    with pytest.raises(ConfigError, match=r"lr was 0\.005, now 0\.01") as caught:
        claim(parse(["data=digits", f"out={tmp_path}", "lr=0.01"]))
    assert "\n" not in str(caught.value)
    for torn in ("[1]", "{"):
        (tmp_path / "contest.json").write_text(torn)
        with pytest.raises(StudyError, match="Choose another out=DIR"):
            claim(parse(["data=digits", f"out={tmp_path}"]))


# ---- who is picked


def front(*points):
    return [{"id": f"{index:08x}", "latency_ms_predicted": ms, "top1_proxy": top1}
            for index, (ms, top1) in enumerate(points)]


def latencies(found):
    return {role: row["latency_ms_predicted"] for role, row in found.items()}


def test_picks_are_the_best_the_fastest_near_it_and_the_knee():
    rows = front((0.1, 0.70), (0.2, 0.872), (0.3, 0.893), (0.6, 0.895), (1.0, 0.90))
    assert latencies(picked(rows)) == {"fast": 0.2, "balanced": 0.3, "accurate": 1.0}
    assert latencies(picked(rows[::-1])) == {"fast": 0.2, "balanced": 0.3, "accurate": 1.0}


def test_a_steep_front_still_gives_three_and_a_short_one_gives_what_it_has():
    assert latencies(picked(front((0.1, 0.3), (0.2, 0.5), (0.3, 0.7), (0.4, 0.9)))) == {
        "fast": 0.2, "balanced": 0.3, "accurate": 0.4}
    assert latencies(picked(front((0.1, 0.5), (0.2, 0.9)))) == {"fast": 0.1, "accurate": 0.2}
    assert latencies(picked(front((0.1, 0.5)))) == {"accurate": 0.1}
    with pytest.raises(StudyError, match="no evaluated network"):
        picked([])


def test_picks_stay_as_they_were_made(tmp_path):
    options = parse(["data=digits", f"out={tmp_path}", "ours=gone"])
    held = {"format": "x", "search": {"trials": 5}, "picks": [vars(Pick("fast", "ab12cd34", 0.9, 0.1))]}
    (tmp_path / "picks.json").write_text(json.dumps(held))
    found = picks_of(options)
    assert found is not None
    assert [one.label for one in found.networks()] == ["fast-ab12cd34"]
    (tmp_path / "picks.json").write_text("{")
    with pytest.raises(StudyError, match="Remove it to pick anew"):
        picks_of(options)


def test_a_search_that_split_the_data_otherwise_is_refused(tmp_path):
    run = RunFolder.create(tmp_path / "run")
    run.write_config({"seed": 3, "space": "mnasnet_small"})
    with pytest.raises(ConfigError, match="searched with seed=3"):
        picks_of(parse(["data=digits", f"out={tmp_path}", f"ours={run.path}"]))


def test_a_search_on_other_images_is_refused(tmp_path):
    from hwnas.data.loading import load_dataset
    from hwnas.space.search_space import SearchSpace

    options = parse(["data=digits", f"out={tmp_path}"])
    space = SearchSpace.load("mnasnet_small", channels=1, classes=10)
    data = load_dataset(dataset_config(options), max(space.image_sizes), 0)
    check_data(options, {}, space, f"digits ({data.fingerprint})")
    with pytest.raises(ConfigError, match="it may have seen test images"):
        check_data(options, {}, space, "digits (0123456789ab)")
    with pytest.raises(ConfigError, match="it may have seen test images"):
        check_data(parse(["data=digits", f"out={tmp_path}", "dataset.validation_fraction=0.3"]), {}, space,
                   f"digits ({data.fingerprint})")


# ---- who trains when


def names(found):
    return [one.name for one in found]


def test_picks_are_read_at_the_image_size_that_was_searched(tmp_path):
    options = parse(["data=digits", f"out={tmp_path}"])
    config = {"space": "mnasnet_small", "dataset": {"image_size": 64}}
    assert set(searched_space(options, config).image_sizes) == {64}
    assert set(searched_space(options, {"space": "mnasnet_small"}).image_sizes) == {32}


def test_seed_0_of_all_comes_first_cheapest_first_and_ours_before():
    ours = Network("fast-1", "fast", architecture=Path("a.yaml"))
    order = names(ready([ours, *baselines(tuple(BASELINES))], 2, {}, set()))
    assert order[:2] == ["fast-1-s0", "mobilenetv3_small_100-s0"]
    assert order[-1] == "resnet50-stem1-s0"
    assert len(order) == 1 + 2 * len(BASELINES)


def test_only_the_better_stem_is_trained_again_and_only_once_both_are_known():
    nets = baselines(("resnet18",))
    both = {"resnet18-s0", "resnet18-stem1-s0"}
    assert names(ready(nets, 3, {"resnet18-s0": 0.9}, both)) == []
    assert names(ready(nets, 3, {"resnet18-s0": 0.8, "resnet18-stem1-s0": 0.9}, both)) == [
        "resnet18-stem1-s1", "resnet18-stem1-s2"]
    assert names(ready(nets, 2, {"resnet18-s0": 0.9, "resnet18-stem1-s0": 0.9}, both)) == ["resnet18-s1"]
    assert names(ready(nets, 2, {"resnet18-s0": 0.8, "resnet18-stem1-s0": None}, both)) == ["resnet18-s1"]
    assert names(ready(nets, 2, {"resnet18-s0": None, "resnet18-stem1-s0": None}, both)) == []


CHILD = """
import json, pathlib, sys
folder, top1 = pathlib.Path(sys.argv[1]), float(sys.argv[2])
if top1 < 0:
    sys.exit("TrainingError: the loss is not finite")
folder.mkdir(parents=True)
(folder / "summary.json").write_text(json.dumps({"top1_validation": top1, "top1_test": top1}))
"""


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    """hwnas.train is a child that writes a summary; `top1` by network's label, below 0 it fails."""
    top1, started = {"resnet18": 0.8, "resnet18-stem1": 0.9}, []

    def command(one, options):
        started.append(one.name)
        return [sys.executable, "-c", CHILD, str(training.folder_of(options.out, one)), str(top1[one.network.label])]

    monkeypatch.setattr(training, "_command", command)
    monkeypatch.setattr(training, "POLL_S", 0.01)
    options = parse(["data=digits", f"out={tmp_path}", "networks=resnet18"])
    return top1, started, options


def test_what_is_trained_is_not_trained_again_and_its_cpu_time_is_kept(pretended):
    _, started, options = pretended
    nets = baselines(options.networks)
    assert train_all(nets, options, QUIET) == []
    assert started == ["resnet18-s0", "resnet18-stem1-s0", "resnet18-stem1-s1"]
    assert train_all(nets, options, QUIET) == []
    assert len(started) == 3
    assert cpu_seconds(options.out, Training(nets[0], 0)) > 0
    assert cpu_seconds(options.out, Training(nets[0], 1)) is None


def test_a_training_that_fails_is_named_and_tried_again(pretended, capsys):
    top1, started, options = pretended
    top1["resnet18"] = -1.0
    nets = baselines(options.networks)
    assert train_all(nets, options, Console(quiet=True)) == ["resnet18-s0"]
    assert "the loss is not finite" in capsys.readouterr().err
    top1["resnet18"] = 0.95
    assert train_all(nets, options, QUIET) == []
    assert started.count("resnet18-s0") == 2


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from experiments.contest import training
from experiments.contest.networks import baselines
from experiments.contest.options import parse
from hwnas.cli.progress import Console
child = "import os, pathlib, time; pathlib.Path({out!r}, str(os.getpid()) + '.pid').touch(); time.sleep(600)"
training._command = lambda one, options: [sys.executable, "-S", "-c", child]
training.train_all(baselines(("resnet18",)), parse(["data=digits", "out=" + {out!r}]), Console(quiet=True))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children that their parent died")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_children_end_with_the_command(tmp_path, how):
    code = PARENT.format(root=str(ROOT), out=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        _wait(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
        pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        parent.send_signal(how)
        parent.wait(300)
        _wait(lambda: not any(_alive(pid) for pid in pids))
    finally:
        parent.kill()
        parent.wait()


def _wait(what) -> None:
    for _ in range(4000):
        if what():
            return
        time.sleep(0.05)
    raise AssertionError("not within 200 s")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_costs_that_two_commands_tell_at_once_are_all_kept(tmp_path):
    one = Training(baselines(("resnet18",))[0], 0)
    threads = [threading.Thread(target=lambda: [training._add_cost(tmp_path, one, 1.0) for _ in range(25)])
               for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cpu_seconds(tmp_path, one) == 100.0


# ---- what the goals' verdicts are


def entry(label, top1, ms, precision="int8", *, stem=0, ours=False, seeds=1):
    """Right on the first images, so that two entries differ by just their difference in top-1."""
    right = np.arange(N) < round(top1 * N)
    name = label + "-stem1" * stem
    network = Network(name, label, stem, Path("a.yaml") if ours else None)
    facts = {"image_size": 32, "params": 1000, "macs": 2000, "int8_share": 1.0, "compressed": "",
             "training_wall_s": 10.0, "process_cpu_s": 12.0, "search_s": 100.0 if ours else None}
    return Entry(network, precision, dict.fromkeys(range(seeds), right), Latency(ms, 0.99 * ms, 1.01 * ms),
                 facts=facts)


def met(entries, goal):
    return [one.met for one in decide(entries) if one.goal == goal]


def test_faster_counts_against_the_fastest_that_is_as_accurate_in_any_precision():
    ours = entry("fast", 0.90, 0.10, ours=True)
    slow, poor = entry("resnet50", 0.90, 1.0), entry("resnet18", 0.80, 0.05)
    assert met([ours, slow, poor], FASTER) == [True]
    assert met([ours, slow, poor, entry("resnet50", 0.90, 0.12, "bf16")], FASTER) == [False]


def test_a_rival_that_is_not_clearly_worse_is_as_accurate():
    ours = entry("fast", 0.90, 0.10, ours=True)
    assert met([ours, entry("resnet50", 0.90, 1.0), entry("resnet18", 0.8995, 0.11)], FASTER) == [False]


def test_faster_but_clearly_less_accurate_is_not_faster_at_equal_accuracy():
    entries = [entry("fast", 0.88, 0.10, ours=True), entry("resnet50", 0.92, 1.0)]
    assert met(entries, FASTER) == [False]
    assert met(entries, REACH) == [True]
    assert "clearly less accurate" in next(one.text for one in decide(entries) if one.goal == FASTER)


def test_where_every_baseline_is_less_accurate_the_most_accurate_is_the_rival():
    ours = entry("fast", 0.95, 0.10, ours=True)
    assert met([ours, entry("resnet50", 0.90, 0.2), entry("resnet18", 0.80, 0.05)], FASTER) == [True]
    assert met([ours, entry("resnet50", 0.90, 0.11), entry("resnet18", 0.80, 0.5)], FASTER) == [False]
    # One that is as accurate as that one for all the images can tell, and faster, is harder to beat.
    assert met([ours, entry("resnet50", 0.90, 1.0), entry("resnet18", 0.8995, 0.11)], FASTER) == [False]


def test_better_counts_against_everything_that_is_not_slower():
    ours = entry("fast", 0.90, 0.100, ours=True)
    near, better_and_faster = entry("resnet18", 0.87, 0.098), entry("resnet50", 0.89, 0.05)
    assert met([ours, near], BETTER) == [True]
    assert met([ours, near, better_and_faster], BETTER) == [False]
    assert met([ours, near, entry("resnet50", 0.95, 0.106)], BETTER) == [True]
    assert met([ours, near, entry("resnet50", 0.95, 0.104)], BETTER) == [False]


def test_with_none_of_equal_latency_the_next_slower_front_network_decides():
    ours = entry("fast", 0.90, 0.100, ours=True)
    faster, slower = entry("resnet18", 0.80, 0.05), entry("resnet50", 0.88, 0.2)
    assert met([ours, faster, slower], BETTER) == [True]
    assert met([ours, faster, entry("resnet50", 0.89, 0.2)], BETTER) == [False]
    assert met([ours, faster, entry("resnet50", 0.79, 0.15), entry("semnasnet_100", 0.93, 0.2)], BETTER) == [False]
    assert met([ours, faster, entry("resnet50", 0.79, 0.15)], BETTER) == [None]


def test_points_that_the_images_cannot_tell_apart_are_not_points():
    rng = np.random.default_rng(0)
    one, other = (Entry(Network(name, name, architecture=path), "int8", {0: rng.random(150) < share},
                        Latency(0.1, 0.1, 0.1)) for name, path, share in (("fast", Path("a"), 0.86),
                                                                         ("resnet18", None, 0.82)))
    gap = compared(one, other)
    assert gap.mean >= 0.015
    assert gap.low < 0
    assert met([one, other], BETTER) == [False]


def test_resnet_50_is_held_against_by_its_better_stem():
    ours = entry("fast", 0.90, 0.1, ours=True)
    stock, wide = entry("resnet50", 0.80, 0.5), entry("resnet50", 0.88, 0.9, stem=1)
    assert met([ours, stock, wide], RESNETS) == [True]
    assert met([ours, stock, entry("resnet50", 0.88, 0.7, stem=1)], RESNETS) == [False]
    assert met([ours, stock, entry("resnet50", 0.895, 0.9, stem=1)], RESNETS) == [False]
    assert met([ours, entry("resnet50", 0.8, 9.0, "fp32")], RESNETS) == [None]


def test_the_worst_seed_decides_the_drop():
    good = np.arange(N) < 1800
    files = [Entry(Network("fast", "fast", architecture=Path("a")), precision, {0: good, 1: np.arange(N) < right})
             for precision, right in (("fp32", 1800), ("int8", 1789))]
    assert met(files, DROPS) == [False]
    assert met([files[0], Entry(files[1].network, "int8", {0: good, 1: np.arange(N) < 1790})], DROPS) == [True]
    assert met([files[1]], DROPS) == [None]


def test_one_network_meets_the_first_goal_and_every_one_must_meet_the_drop():
    entries = [entry("fast", 0.90, 0.1, ours=True), entry("accurate", 0.90, 5.0, ours=True),
               entry("fast", 0.90, 0.2, "fp32", ours=True), entry("resnet50", 0.90, 1.0)]
    found = verdicts(decide(entries))
    assert found[0].endswith(": met.")
    assert found[-1].endswith("each seed: undecided.")  # one of them has no fp32 file beside it
    assert [one.rpartition(": ")[2] for one in verdicts(decide([entry("resnet50", 0.9, 1.0)]))] == ["undecided."] * 4
    assert verdicts(decide([entries[0], entry("resnet50", 0.95, 0.05)]))[0].endswith(": not met.")


def test_the_interval_covers_the_mean_and_shrinks_with_images():
    rng = np.random.default_rng(1)
    few, many = (bootstrap((rng.random((2, n)) < 0.9).mean(0)) for n in (200, 20_000))
    assert few.low < few.mean < few.high
    assert many.high - many.low < 0.2 * (few.high - few.low)


# ---- from files to the report


@pytest.fixture(scope="module")
def contest(tmp_path_factory):
    """Two untrained networks in the place of trained ones: of ours, and one that passes for a baseline."""
    import torch

    from hwnas.data.loading import load_dataset
    from hwnas.networks.build import build
    from hwnas.networks.export import export_onnx, randomise

    out = tmp_path_factory.mktemp("contest")
    options = parse(["data=digits", f"out={out}", "networks=resnet18", "seeds=1", "train_images=200"])
    data = load_dataset(dataset_config(options), 16, 0)
    nets = [Network("fast-1", "fast", architecture=out / "a.yaml"), Network("resnet18", "resnet18")]
    torch.manual_seed(0)
    for width, network in zip((8, 16), nets, strict=True):
        architecture = Architecture(((f"ds_r1_k3_s2_c{width}",),), 8, 2, 0, "relu", 16, 1, 10)
        folder = training.folder_of(out, Training(network, 0))
        folder.mkdir(parents=True)
        model = build(architecture).eval()
        randomise(model, width)
        export_onnx(model, folder / "model.onnx", (1, 16, 16))
        (folder / "summary.json").write_text(json.dumps({
            "identity": {"image_size": 16, "dataset.fingerprint": data.fingerprint}, "params": architecture.params,
            "macs": architecture.macs, "seconds_training": 5.0, "top1_validation": 0.5}))
    score_all(nets, options, QUIET)
    return options, nets


def test_every_precision_is_scored_once(contest, monkeypatch):
    options, nets = contest
    one, other = (read_score(options.out, Training(nets[0], 0), name) for name in ("fp32", "int8"))
    assert one.facts["precisions"].keys() == {"fp32"}
    assert other.facts["int8_share"] > 0.5
    assert len(one.correct) == one.facts["n"]
    assert abs(one.facts["top1"] - other.facts["top1"]) < 0.1

    def unwanted(*_):
        raise AssertionError("scored again")

    monkeypatch.setattr("experiments.contest.scoring._score", unwanted)
    score_all(nets, options, QUIET)


def test_a_compressed_file_takes_the_place_of_the_plain_one(contest, tmp_path):
    options, nets = contest
    plain = file_of(options.out, Training(nets[0], 0), "int8")
    assert not plain.compressed
    better = tmp_path / "compressed" / "fast-1-s0" / plain.path.name
    better.parent.mkdir(parents=True)
    better.write_bytes(plain.path.read_bytes())
    assert file_of(tmp_path, Training(nets[0], 0), "int8").compressed


@pytest.mark.parametrize(("step", "images", "fair"), [("qat_kept1", 200, True), ("qat", None, False),
                                                      ("qat", 201, False), ("mse_bias", None, True)])
def test_fine_tuning_with_more_images_than_the_others_had_is_refused(contest, tmp_path, step, images, fair):
    from experiments.contest.scoring import DeployedFile, _step_of

    options, nets = contest
    (tmp_path / "summary.json").write_text(json.dumps({"step": step, "identity": {"train_images": images}}))
    file = DeployedFile(Training(nets[0], 0), "int8", tmp_path / "model_int8.onnx", compressed=True)
    if fair:
        assert _step_of(file, options) == step
    else:
        with pytest.raises(DataError, match="Compress it again with train_images=200"):
            _step_of(file, options)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(StudyError, match=r"summary\.json: .*Give its python"):
        _step_of(file, options)


def test_other_images_than_those_trained_on_are_refused(contest):
    options, _ = contest
    with pytest.raises(DataError, match="was trained on data 0123"):
        Images(options).of("x", {"identity": {"image_size": 16, "dataset.fingerprint": "0123"}})


def test_timing_and_report_run_through_and_say_what_is_missing(contest, monkeypatch):
    from hwnas.latency.table import Measurement, Turn

    options, nets = contest
    measured: list[list[str]] = []

    def measure(calls, reference, protocol, **_):
        measured.append(sorted(calls))
        for copies in (*calls.values(), reference):
            assert len(copies) == protocol.copies
            copies[0]()
        return {name: Measurement(tuple(Turn((0.1 + 0.01 * at + 1e-4 * turn,), 0.1) for turn in range(24)), 0.1,
                                  protocol) for at, name in enumerate(calls)}

    monkeypatch.setattr("hwnas.latency.timing.measure", measure)
    monkeypatch.setattr("hwnas.latency.timing.prepare_network",
                        lambda *_: file_of(options.out, Training(nets[0], 0), "int8").path)
    timing.time_all(nets, options, QUIET)
    timing.time_all(nets, options, QUIET)
    assert len(measured) == 1
    assert {"fast-1 fp32", "fast-1 int8", "resnet18 fp32", "resnet18 int8"} <= set(measured[0])
    picks = Picks((Pick("fast", "1", 0.9, 0.1),), {"trials_seconds": 50.0, "setup_seconds": 7.0}, options.out)
    text = write_all(nets, options, picks)
    summary = json.loads((options.out / "summary.json").read_text())
    row = next(row for row in summary["rows"] if row["ours"] and row["precision"] == "int8")
    assert row["search_s"] == 57.0
    assert row["images_per_s"] == pytest.approx(1e3 / row["latency_ms"], rel=0.01)
    assert "Baseline resnet50 takes no part." in text
    assert summary["verdicts"][0] in text
    assert (options.out / "contest.png").read_bytes().startswith(b"\x89PNG")
    assert "not counted" not in text
    unknown = replace(picks, search={"trials_seconds": 50.0, "setup_seconds": None, "reused": 3})
    text = write_all(nets, options, unknown)
    assert "give setup_seconds=N" in text
    assert "took 3 accuracies from another search" in text
    assert not [row for row in json.loads((options.out / "summary.json").read_text())["rows"] if row["search_s"]]
    path = options.out / "latency-b1.json"
    whole, held = path.read_text(), json.loads(path.read_text())
    held["networks"]["resnet18 fp32"]["file"] = "another"
    path.write_text(json.dumps(held))
    assert "resnet18 has no valid latency in fp32" in write_all(nets, options, picks)
    path.write_text(json.dumps({**held, "target": "xeon_int8"}))
    with pytest.raises(ConfigError, match="was timed for target xeon_int8"):
        write_all(nets, options, picks)
    path.write_text(json.dumps({**json.loads(whole), "host": "elsewhere"}))
    timing.time_all(nets, options, QUIET)
    assert len(measured) == 2


def test_trainings_of_two_recipes_are_not_compared(tmp_path):
    options = parse(["data=digits", f"out={tmp_path}", "networks=resnet18", "seeds=1"])
    nets = baselines(options.networks)
    for network, size, smoothing in zip(nets, (16, 32), (0.1, 0.0), strict=True):
        folder = training.folder_of(tmp_path, Training(network, 0))
        folder.mkdir(parents=True)
        identity = {"network": network.label, "image_size": size, "label_smoothing": smoothing}
        (folder / "summary.json").write_text(json.dumps({"identity": identity}))
    with pytest.raises(StudyError, match=r"resnet18-stem1-s0 was trained with label_smoothing 0\.0, resnet18-s0 with"):
        read_entries(nets, options, None)


def test_a_torn_latency_file_is_one_line(tmp_path):
    (tmp_path / "latency-b1.json").write_text('{"protocol": {}')
    with pytest.raises(StudyError, match="Remove it, then give steps=time"):
        timing.read_latencies(tmp_path)


def test_help_and_an_empty_folder(tmp_path, capsys):
    main(["--help"])
    assert "steps=train,score,time,report" in capsys.readouterr().out
    with pytest.raises(StudyError, match="holds no scored network"):
        main(["data=digits", f"out={tmp_path}", "networks=resnet18", "steps=report"])
    assert os.listdir(tmp_path) == ["contest.json"]
