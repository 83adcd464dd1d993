"""Tables of the pages, computed from files of the repository.

    python -m experiments.tables             # writes every table anew
    python -m experiments.tables --check     # exits with 1 where a page differs from what the files give

A page holds a table between `<!-- table: NAME -->` and `<!-- end -->`. Beside the tables of docs/results.md a figure
(a number with decimals) may stand in a sentence only if a table of the same section has these digits.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"
sys.path.insert(0, str(ROOT))

from experiments.sampler.controls import contest_networks, random_networks, times_as_fast  # noqa: E402
from hwnas.stats import kendall_tau  # noqa: E402

RESULTS = "docs/results.md"
PAGES = ("README.md", RESULTS, "docs/decisions/race.md", "docs/decisions/training-recipes.md",
         *(f"experiments/{name}/README.md" for name in (
             "detection", "latency", "race", "int8", "serve", "zoo")))
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FIGURE = re.compile(r"(?<![\w.\-])[−+-]?\d+\.\d+(?!\w|\.\d)")
_HIDDEN = re.compile(r"`[^`]*`|\]\([^)]*\)")
Rows = list[list[str]]  # the first is the head


@cache
def lines(path: str) -> list[dict[str, str]]:
    """Rows of a CSV file below experiments/."""
    with (EXPERIMENTS / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def document(path: str) -> Any:
    """The content of a JSON file below experiments/."""
    return json.loads((EXPERIMENTS / path).read_text(encoding="utf-8"))


def shown(value: float | None, decimals: int = 1) -> str:
    """A number with so many decimals; a dash for none."""
    if value is None or np.isnan(value):
        return "–"
    text = f"{value:.{decimals}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def ends(values: Sequence[float], decimals: int = 1) -> str:
    """The least and the most."""
    least, most = shown(min(values), decimals), shown(max(values), decimals)
    return least if least == most else f"{least} to {most}"


def with_interval(of: Mapping[str, Any], decimals: int, level: float) -> str:
    """A value with its 95 % interval, bold where that does not hold `level`, which is none."""
    if of["value"] is None or np.isnan(of["value"]):
        return "–"
    return f"{_marked(of, decimals, level)} ({ends([of['low'], of['high']], decimals)})"


def _marked(of: Mapping[str, Any], decimals: int, level: float) -> str:
    value = shown(of["value"], decimals)
    return value if of["low"] <= level <= of["high"] else f"**{value}**"


def hour(name: str) -> Any:
    """What races of a name came to, beside the obvious cuts."""
    return document(f"race/results/hour/{name}/summary.json")


EARLIER = {
    "eurosat_mobilenetv2": "MobileNetV2, EuroSAT, 20 min",
    "trashnet_lite0": "Lite0, TrashNet, 20 min",
    "eurosat_lite0_hour": "Lite0, EuroSAT, 60 min, 7 bits \\*",
    "eurosat_lite0_two_hours": "Lite0, EuroSAT, 120 min, 7 bits \\*"}
SHORTER = {"tf_efficientnet_lite0": "Lite0", "mobilenetv2_100": "MobileNetV2", "mobilenetv1_100": "MobileNetV1"}


def earlier() -> Rows:
    """Speed and points ahead by third of the latencies of races of earlier code, and the most accurate networks."""
    rows = [["cuts of", "times as fast: fast third", "middle", "points ahead: fast", "middle", "slow",
             "best top-1, race", "cuts"]]
    for name, label in EARLIER.items():
        told = hour(name)
        best = [ends([100 * of["top1"] for of in told["most_accurate"][arm]]) for arm in ("ours", "obvious")]
        rows.append([label, *(with_interval(of, 2, 1.0) for of in told["times_as_fast"]["ours"][:2]),
                     *(_marked(of, 1, 0.0) for of in told["points_ahead"]["ours"]), *best])
    return rows


def _races(cuts: str, results: str = "minutes") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Runs of equal minutes beside these cuts, each with its label."""
    for each in document(f"race/results/{results}/summary.json"):
        if each["cuts"] == cuts:
            n = len(each["runs"])
            yield (f"{SHORTER[each['around']]}, {each['data']} {each['px']} px, {each['minutes']:g} min, "
                   f"{n} seed{'s' * (n > 1)}"), each


def race() -> Rows:
    """Speed and points ahead of a race by third of the latencies of obvious cuts at three image sizes."""
    rows = [["cuts of", "the cuts answer in", "times as fast: fast third", "middle", "points ahead: fast", "middle",
             "slow", "best top-1, race", "cuts"]]
    for label, each in _races("sizes"):
        for precision, held in (("int8", each), ("fp32", each["of_fp32"])):
            key = {"int8": "best_of_cuts", "fp32": "best_of_cuts_fp32"}[precision]
            rows.append([label, precision, *(with_interval(of, 2, 1.0) for of in held["times_as_fast"][:2]),
                         *(with_interval(of, 1, 0.0) for of in held["points_ahead"]),
                         *(ends([100 * run[arm] for run in each["runs"]]) for arm in ("best_int8", key))])
    return rows


def cuts_lost() -> Rows:
    """Points of top-1 that the obvious cuts lose to int8."""
    rows = [["cuts of", "networks", "points lost to int8, median", "most"]]
    for cuts in ("sizes", "obvious"):
        for label, each in _races(cuts):
            if each["cuts_answer"] == "int8":
                lost = [100 * of for run in each["runs"] for of in run["cuts_lost"]]
                rows.append([label, str(len(lost)), shown(float(np.median(lost))), shown(max(lost))])
    return rows


def step_seconds() -> Rows:
    """How fast the machine trained in a race beside its cuts' runs."""
    steps = pd.read_csv(EXPERIMENTS / "race/results/minutes/step_seconds.csv")
    return [["cuts of", "seed", "a step in the race, times as fast"]] + [
        [f"{SHORTER[around]}, {data}", str(seed), ends(own.times_as_fast.tolist(), 2)]
        for (around, data, seed), own in steps.groupby(["around", "data", "seed"], sort=False)]


def short() -> Rows:
    """Points ahead and the most accurate networks, for the front page."""
    rows = [["cuts of", "the cuts answer in", "points ahead: fast third", "middle", "slow", "best top-1, race", "cuts"]]
    return rows + [[label, each["cuts_answer"], *(_marked(of, 1, 0.0) for of in each["points_ahead"]),
                    *(ends([100 * run[arm] for run in each["runs"]]) for arm in ("best_int8", "best_of_cuts"))]
                   for cuts in ("sizes", "obvious") for label, each in _races(cuts)]


def minutes() -> Rows:
    """Races against the network fine-tuned alone, and with few minutes against its obvious cuts."""
    rows = [["cuts of", "alone and cuts in", "race, best network", "its ms", "alone", "its ms", "race − alone",
             "both in fp32", "ahead of cuts: fast", "middle", "slow"]]
    for cuts in ("obvious", "sizes"):
        for label, each in _races(cuts):
            runs = [run for run in each["runs"] if run["alone"] is not None]
            if runs:
                best, best_ms, alone, alone_ms = (float(np.mean([run[key] for run in runs]))
                                                  for key in ("best_int8", "best_ms", "alone", "alone_ms"))
                fp32 = float(np.mean([run["best"] - run.get("alone_fp32", run["alone"]) for run in runs]))
                of_seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds"
                rows.append([re.sub(r"\d+ seeds?", of_seeds, label), each["cuts_answer"], shown(100 * best),
                             shown(best_ms, 3), shown(100 * alone), shown(alone_ms, 3), shown(100 * (best - alone)),
                             shown(100 * fp32),
                             *(with_interval(third, 1, 0.0) for third in each["points_ahead"])])
    return rows


def pairs() -> Rows:
    """What pairs of the upper half of each front give."""
    rows = [["networks of", "of", "with a pair", "times as fast, median", "least, most", "points of top-1, median",
             "least, most", "points ahead of the single network as fast, median"]]
    held = pd.read_csv(EXPERIMENTS / "race/results/pairs.csv")
    arms = {"race": "a race", "cuts": "the obvious cuts", "scratch": "a search"}
    for (around, data, part), own in held.fillna({"around": ""}).groupby(["around", "data", "arm"], sort=False):
        paired = own[own.fast.notna()]
        lead = 100 * (own.top1 + own.difference - own.single_top1)
        rows.append([f"{arms[part]}, {SHORTER.get(around, 'from scratch')}, {data}", str(len(own)),
                     str(len(paired)), shown(own.times_as_fast.median(), 2), ends([*own.times_as_fast], 2),
                     shown(100 * own.difference.median(), 2), ends([*(100 * own.difference)], 2),
                     shown(lead.median(), 2)])
    return rows


def half_core() -> Rows:
    """The networks of races on half of a core, beside others of the same minutes."""
    labels = {"race before": "race, before judging and timing had a limit", "race": "race, as it is",
              "alone": "the whole network alone", "obvious": "its obvious cuts"}
    rows = [["images, minutes", "arm", "most accurate in fp32", "steps", "latency, ms"]]
    held = pd.read_csv(EXPERIMENTS / "race/results/half_core/networks.csv")
    for (data, arm), own in held.groupby(["data", "arm"], sort=False):
        best = own.loc[own.top1_test_fp32.idxmax()]
        rows.append([f"{data}, {5 if data == 'eurosat' else 10}", labels[arm], shown(100 * best.top1_test_fp32, 1),
                     str(int(best.steps)), shown(best.latency_ms, 3)])
    return rows


def benchmark_app() -> Rows:
    """Our median latency of ten networks beside benchmark_app's."""
    held = pd.read_csv(EXPERIMENTS / "zoo/results/benchmark_app.csv")
    apart = np.log(held.ours_ms / held.benchmark_app_ms).groupby(held.name).mean()
    between = np.log(held.benchmark_app_ms).groupby(held.name).agg(lambda of: of.max() - of.min())
    percent = 100 * (np.exp(apart) - 1)
    return [["networks", "ours against benchmark_app's, %: median", "least to most",
             "benchmark_app's own two rounds apart, %: median", "most"],
            [str(len(apart)), shown(percent.median(), 1), ends([*percent]), shown(100 * between.median(), 1),
             shown(100 * between.max(), 1)]]


def auto() -> Rows:
    """What around=auto chose, beside races around single networks."""
    rows = [["beside a race around", "images, minutes, seed", "points ahead: fast third", "middle", "slow",
             "its best top-1", "best of auto"]]
    for results, length in (("auto", "eurosat, 10, 0"), ("auto30", "eurosat, 30, 1"),
                            ("auto30_seed2", "eurosat, 30, 2"),
                            ("auto_photographs", "trashnet, 20, 0")):
        for name, told in document(f"race/results/{results}/summary.json").items():
            rows.append([name, length, *(with_interval(of, 1, 0.0) for of in told["points_ahead"]),
                         *(shown(100 * told[key], 1) for key in ("best", "best_of_arm"))])
    return rows


def promise() -> Rows:
    """Races that judge the smaller images of networks that answer well, beside races that went by multiply-adds."""
    rows = [["images", "points ahead: fast third", "middle", "slow", "best top-1 before", "now"]]
    for images, label in (("trashnet", "trashnet 96 px, 6 min, seed 1"), ("eurosat", "eurosat 64 px, 6 min, seed 0")):
        of = document(f"race/results/promise/{images}/summary.json")["before"]
        rows.append([label, *(with_interval(third, 1, 0.0) for third in of["points_ahead"]),
                     *(shown(100 * of[key], 1) for key in ("best", "best_of_arm"))])
    return rows


def trained_on() -> Rows:
    """Networks that go on with what a trial learnt, beside those that are trained anew."""
    rows = [["images", "networks", "80 steps in a trial, 320 behind it", "400 anew", "320 anew",
             "points against 400 anew, least to most"]]
    for data in ("eurosat", "fashion_mnist"):
        held = pd.read_csv(EXPERIMENTS / f"sampler/results/trained_on/{data}.csv")
        rows.append([data, str(len(held)), *(shown(100 * held[arm].mean(), 1) for arm in (
            "goes_on", "anew_400", "anew_320")), ends([*(100 * (held.goes_on - held.anew_400))])])
    return rows


def precision_speed() -> Rows:
    """Milliseconds of a step in each precision, and how many times as fast as fp32 bf16 is."""
    return [["network", "px", "fp32", "autocast alone", "bf16", "bf16, times as fast"]] + [
        [row["network"], row["px"], *(shown(1e3 * float(row[f"{way}_s"]), 0) for way in ("fp32", "autocast", "bf16")),
         shown(float(row["fp32_s"]) / float(row["bf16_s"]), 2)]
        for row in lines("race/results/precision_speed.csv")]


def precision() -> Rows:
    """Top-1 after as many steps in both precisions."""
    rows = [["images", "network", "px", "steps", "fp32", "bf16", "points, least to most"]]
    held = pd.read_csv(EXPERIMENTS / "race/results/precision.csv")
    for (data, around, name, px, steps), part in held.groupby(["data", "around", "name", "px", "steps"]):
        top1 = 100 * part.pivot(index="seed", columns="precision", values="top1")
        rows.append([str(data), f"{around}, {name}", str(px), str(steps), shown(top1.fp32.mean()),
                     shown(top1.bf16.mean()), ends([*(top1.bf16 - top1.fp32)])])
    return rows


def untrained() -> Rows:
    """Known networks judged untrained, and fine-tuned for equal parts of few minutes."""
    names = ("whole", "cut_thin", "cut_early_two", "cut_short", "cut_early", "cut_short_narrow")
    rows, judged = [["images", *names]], lines("race/results/classifier_start/fitted.csv")
    trained = [row for row in lines("race/results/minutes/networks.csv") if row["arm"] == "obvious"]
    for data, px, minutes in (("eurosat", "64", "5.0"), ("trashnet", "96", "5.0"), ("grocery", "96", "10.0")):
        before = {row["cut"]: row["top1"] for row in judged
                  if (row["data"], row["px"], row["steps"]) == (data, px, "0")}
        after = {row["name"]: row["top1_test_fp32"] for row in trained
                 if (row["data"], row["minutes"]) == (data, minutes)}
        rows.append([data, *(" → ".join(shown(100 * float(of[name])) for of in (before, after)) for name in names)])
    return rows


def bias() -> Rows:
    """Points of top-1 that int8 files of a race's networks lose, with biases as they are and corrected."""
    rows = [["networks of", "networks", "lost, mean", "most", "with corrected biases, mean", "most", "fp32's answers",
             "with corrected biases"]]
    held = pd.read_csv(EXPERIMENTS / "int8/results/bias.csv")
    for (around, data, minutes), part in held.groupby(["around", "data", "minutes"], sort=False):
        lost = {way: 100 * (part.top1_fp32 - part[f"top1_{way}"]) for way in ("as_they_are", "corrected")}
        same = {way: f"{100 * part[f'agreement_{way}'].mean():.1f} %" for way in lost}
        rows.append([f"{SHORTER.get(around, around)}, {data}, {minutes:g} min", str(len(part)), *(
            shown(value) for each in lost.values() for value in (each.mean(), each.max())), *same.values()])
    return rows


def saturation() -> Rows:
    """Points of top-1 that deployed files lose to fp32, by arm and bits of the weights."""
    rows = [["networks of", "weights", "mean lost", "most lost", "of the mean, to saturation"]]
    for arm, label in (("ours", "the race"), ("obvious", "the obvious cuts")):
        for bits in "87":
            of = [row for row in lines("int8/results/saturation.csv")
                  if (row["arm"], row["weight_bits"]) == (arm, bits)]
            lost, saturated = ([100 * (float(row[key]) - float(row["top1_deployed"])) for row in of]
                               for key in ("top1_fp32", "top1_exact"))
            rows.append([label, f"{bits} bits", shown(float(np.mean(lost))), shown(max(lost)),
                         shown(float(np.mean(saturated)))])
    return rows


def _int8(path: str) -> dict[str, dict[str, dict[str, str]]]:
    """Rows of a comparison of int8 files by runtime and network, then by way."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in lines(path):
        found.setdefault(f"{row['runtime']}, {row['network']}", {})[row["way"]] = row
    return found


def _lost_points(of: Mapping[str, Mapping[str, str]], way: str) -> float:
    """Points of top-1 that a way loses to fp32; NaN where its file did not run in int8."""
    row = of.get(way)
    return 100 * (float(of["fp32"]["top1"]) - float(row["top1"])) if row and row["top1"] else float("nan")


def _times(of: Mapping[str, Mapping[str, str]], way: str) -> float:
    """How many times the latency of our file a way's file has."""
    rows = of.get("hwnas"), of.get(way)
    if any(row is None or not row["latency_ms"] or not row["top1"] for row in rows):
        return float("nan")
    ours, other = (float(row["latency_ms"]) for row in rows if row is not None)
    return other / ours


def ranges() -> Rows:
    """Points of top-1 that int8 files of eleven networks lose in OpenVINO, by way."""
    ways = {"hwnas": "ours", "hwnas, mse": "ours before (squared error)", "ORT, min-max": "ONNX Runtime, min-max",
            "ORT, entropy": "ONNX Runtime, entropy", "NNCF": "NNCF"}
    networks = [of for label, of in _int8("int8/results/ranges.csv").items() if label.startswith("openvino")]
    return _by_way(ways, networks)


def nncf() -> Rows:
    """Points of top-1 that our files and NNCF's lose, by runtime."""
    rows = [["runtime", "way", "networks", "mean lost", "median lost", "most lost", "median time, of ours"]]
    for runtime in ("openvino", "onnxruntime"):
        networks = [of for label, of in _int8("int8/results/beside_nncf.csv").items() if label.startswith(runtime)]
        rows += [[runtime, *row] for row in _by_way({"hwnas": "ours", "NNCF": "NNCF"}, networks)[1:]]
    return rows


def _by_way(ways: Mapping[str, str], networks: Sequence[Mapping[str, Mapping[str, str]]]) -> Rows:
    rows = [["way", "networks", "mean lost", "median lost", "most lost", "median time, of ours"]]
    for way, label in ways.items():
        lost = np.array([_lost_points(of, way) for of in networks])
        known = lost[~np.isnan(lost)]
        if len(known):
            values = (float(known.mean()), float(np.median(known)), float(known.max()))
            rows.append([label, str(len(known)), *map(shown, values),
                         shown(float(np.nanmedian([_times(of, way) for of in networks])), 2)])
    return rows


def contest() -> Rows:
    """Random and searched networks of a space beside those people deploy."""
    picked, chance, others = contest_networks(True, "int8"), random_networks(), contest_networks(False)
    rows = [["networks", "how many", "test top-1, %", "latency, ms", "times as fast as its rival"]]
    for label, of in (("random ones of the space (fp32, latency predicted)", chance), ("picked by a search", picked)):
        rows.append([label, str(len(of)), ends([point.top1 for point in of]), ends([point.ms for point in of], 3),
                     ends(times_as_fast(of))])
    best = max(others, key=lambda point: point.top1)
    rows.append(["the most accurate baseline", "1", shown(best.top1), shown(best.ms, 3), "–"])
    return rows


def against_random() -> Rows:
    """Points of top-1 by which the front of a search from scratch lies above that of random choice."""
    told = document("sampler/results/from_scratch/summary.json")
    rows = [["images", "points ahead: fast third", "middle", "slow", "mean", "best top-1, hwnas", "random choice"]]
    for data in dict.fromkeys(run["data"] for run in told["runs"]):
        runs = [run for run in told["runs"] if run["data"] == data]
        rows.append([f"{data}, {len(runs)} seeds", *(with_interval(of, 1, 0.0) for of in (
            *told[data], told[f"{data}_mean"])),
            *(ends([100 * run[f"best_{name}"] for run in runs]) for name in ("hwnas", "random"))])
    return [*rows, ["both", "", "", "", with_interval(told["mean"], 1, 0.0), "", ""]]


def zoo() -> Rows:
    """Orders of timing: the share of the front's hypervolume that as many timings found."""
    names = {"hwnas": "`hwnas zoo`", "random": "random, mean of 200", "ratio": "top-1 over multiply-adds",
             "layers": "front of top-1 and multiply-adds, then the next front"}
    return [["precision", "order", "timed", "of", "hypervolume, %", "least, %", "networks on the front"], *(
        [precision, names[row["order"]], row["timed"], row["of"], shown(100 * float(row["share"])),
         shown(100 * float(row["least"])), f"{shown(float(row['of_front']), 0)} of {row['on_front']}"]
        for precision, file in (("fp32, 8 min", "order"), ("int8, with fp32 in 13 min", "order_int8"))
        for row in lines(f"zoo/results/{file}.csv"))]


def ranks() -> Rows:
    """The networks whose place by latency differs most between fp32 and int8, and how alike all rank."""
    key = ["name", "image_size"]
    both = pd.read_csv(EXPERIMENTS / "zoo/results/all.csv").merge(
        pd.read_csv(EXPERIMENTS / "zoo/results/all_int8.csv"), on=key, suffixes=("", "_int8"))
    times = both[["latency_ms", "latency_ms_int8"]].to_numpy()
    places, faster = times.argsort(0).argsort(0) + 1, times[:, 0] / times[:, 1]
    largest = np.argsort(-abs(places[:, 0] - places[:, 1]), kind="stable")[:5]
    told = [f"{both.name[at].partition('.')[0]} at {both.image_size[at]} px" for at in largest]
    return [["of", "place in fp32", "in int8", "int8 times as fast"], *(
        [name, *map(str, places[at]), shown(faster[at], 2)] for name, at in zip(told, largest, strict=True)),
        [f"all {len(both)}: Kendall's tau {shown(kendall_tau(*times.T), 2)}", "–", "–",
         f"{shown(float(np.median(faster)), 2)} ({ends(faster, 2)})"]]


def detection_divided() -> Rows:
    """The same races, in bf16 on another host, whose seconds are divided as they are now."""
    return detection("detection/results/divided")


def detection_fronts() -> Rows:
    """The mean of the best AP50 over latencies, before and with the seconds divided as they are now."""
    from experiments.detection.minutes import compare_fronts  # it imports torch

    told = compare_fronts([EXPERIMENTS / "detection/results" / name for name in ("bf16", "divided")])
    return [["pictures", "before", "now", "slow half, before", "now"]] + [
        [str(data), *(shown(own[part].iloc[at]) for part in ("all", "slow_half") for at in (0, 1))]
        for data, own in told.groupby("data")]


def detection(results: str = "detection/results") -> Rows:
    """Races of detectors, beside the whole network alone in the same minutes."""
    rows = [["pictures", "network", "px", "AP50", "mAP", "AP50 in fp32", "int8's, points", "latency, ms"]]
    told = {of["data"]: of for of in document(f"{results}/summary.json")}
    for data, of in told.items():
        own = [row for row in lines(f"{results}/networks.csv")
               if row["data"] == data and row["on_front"] == "True"]
        for row in sorted(own, key=lambda row: -float(row["latency_ms"])):
            lost = {"value": 100 * float(row["int8"]), "low": 100 * float(row["int8_low"]),
                    "high": 100 * float(row["int8_high"])}
            rows.append([data, row["name"], row["px"], *(shown(100 * float(row[key])) for key in (
                "AP50", "mAP", "AP50_fp32")), with_interval(lost, 1, 0.0), shown(float(row["latency_ms"]), 2)])
        for key, name in (("alone", "the whole network alone"), ("ssdlite", "SSDLite, torchvision's")):
            if of.get(key):
                rows.append([data, name, str(of["px"]), "", shown(100 * of[key]["mAP"]), shown(100 * of[key]["AP50"]),
                             "", shown(of[key]["latency_ms"], 2)])
    return rows


def detection_probe() -> Rows:
    """The detector's stride and loss, by equal seconds of training."""
    scores = ("AP50", "mAP", "red cells", "white cells", "platelets")
    return [["stride", "loss", "steps", *scores], *(
        [row["stride"], row["loss"], row["steps"], *(shown(100 * float(row[score])) for score in scores)]
        for row in lines("detection/results/probe.csv"))]


CONTESTS = {"NAS-Bench-201_raspi4": "raspi4", "NAS-Bench-201_pixel3": "pixel3",
            "NAS-Bench-201_xeon_gold_6226": "Xeon", "NAS-Bench-201_gtx1080ti": "gtx1080ti",
            "NAS-Bench-Macro_OpenVINO_int8": "Macro, int8", "NAS-Bench-Macro_ONNX_Runtime_fp32": "Macro, fp32"}
OPTUNA = ("tpe", "tpe_multivariate", "nsga2", "nsga2_small", "gp")


def _share(table: str, samplers: Sequence[str], evaluations: int, wide: bool) -> float:
    """The most of a table's hypervolume that one of `samplers` has, per cent."""
    told = document(f"sampler/results/contest/{table}/summary.json")
    entries = (told["wide"] if wide else told)["samplers"]
    values = [entry.get(f"mean_{evaluations}") for entry in entries if entry["sampler"] in samplers]
    return 100 * max(value for value in values if value is not None)


def sampler() -> Rows:
    """Shares of the hypervolume after 100 evaluations, in the contest's measure and from the worst accuracy."""
    rows = [["hypervolume after 100, %", *CONTESTS.values()]]
    for wide, label in ((False, "from the lower quarter"), (True, "from the worst accuracy")):
        for name, samplers in (("ours", ("hwnas",)), ("LINAS-like loop", ("linas",)), ("Optuna's best", OPTUNA)):
            rows.append([f"{label}: {name}", *(shown(_share(table, samplers, 100, wide)) for table in CONTESTS)])
    return rows


class Certificate:
    """Sixteen networks' full trainings, costs, and what each estimator told of them."""

    def __init__(self, name: str) -> None:
        self.estimators = {row["estimator"]: row for row in lines(f"results/certificates/{name}.csv")}
        networks = document(f"results/certificates/{name}.json")["networks"]
        self.truth = np.array([network["top1"] for network in networks])
        self.log_cost = np.log([network["cost"] for network in networks])
        self.told = {label: np.array([network["estimates"][label] for network in networks], float)
                     for label in networks[0]["estimates"]}

    def tau(self, told: np.ndarray) -> float:
        """Kendall's tau with the mean of the full trainings."""
        return float(kendall_tau(told, self.truth))

    def tau_given_cost(self, told: np.ndarray) -> float:
        """The same of what a line on the logarithm of cost leaves over of both."""
        return float(kendall_tau(*(each - np.polyval(np.polyfit(self.log_cost, each, 1), self.log_cost)
                                   for each in (told, self.truth))))

    def with_cost(self, label: str) -> np.ndarray:
        """An estimate's log odds and half the logarithm of the cost, both in standard deviations."""
        share = self.told[label]
        odds, cost = np.log(share / (1 - share)), self.log_cost
        return np.asarray((odds - odds.mean()) / odds.std() + 0.5 * (cost - cost.mean()) / cost.std())


ESTIMATORS = {"multi-fidelity (went out)": "multi_fidelity", "proxy": "proxy", "MACs": "zero_cost:macs"}


def estimators() -> Rows:
    """Kendall's tau of estimates with full training, on two data sets."""
    rows = [["estimate", *(f"{data}{part}" for data in ("EuroSAT", "Fashion-MNIST") for part in ("", ", equal cost"))]]
    both = [Certificate(name) for name in ("eurosat", "fashion_mnist")]
    for label, name in ESTIMATORS.items():
        row = [label]
        for held in both:
            of, told = held.estimators[name], held.told[name]
            given = float("nan") if name == "zero_cost:macs" else held.tau_given_cost(told)
            row += [f"{shown(held.tau(told), 2)} ({ends([float(of['low']), float(of['high'])], 2)})", shown(given, 2)]
        rows.append(row)
    row = ["proxy and half the log cost"]
    for held in both:
        row += [shown(held.tau(held.with_cost("proxy")), 2), shown(held.tau_given_cost(held.told["proxy"]), 2)]
    return [*rows, row]


def litert() -> Rows:
    """Predictions of LiteRT's latency, and int8 answers in LiteRT beside ONNX Runtime's."""
    told = document("int8/results/edge/edge_int8_small.summary.json")
    rows = [["asked of LiteRT int8", "networks", "came to"],
            ["predicted within 5 %, unseen networks", str(told["n"]), f"{shown(100 * told['within_5'])} %"]]
    for name, label in (("eurosat", "EuroSAT"), ("fashion_mnist", "Fashion-MNIST")):
        same = [100 * float(row["same"]) for row in lines(f"int8/results/edge/{name}/parity.csv")
                if row["precision"] == "int8"]
        rows.append([f"same class as in ONNX Runtime, {label}", str(len(same)), f"{ends(same, 2)} % of test images"])
    return rows


def validation() -> Rows:
    """Predicted against measured latency of networks that a table has never seen, minutes later."""
    rows = [["host, size", "targets", "networks", "within 5 %", "within 10 %", "mean error, %", "least Spearman",
             "90 % interval covers, %", "half-width, %"]]
    keys = ("within_5", "within_10", "mean_error")
    for host in sorted(path for path in (EXPERIMENTS / "latency_validation").iterdir() if path.is_dir()):
        for size, name in (("32 px", "small"), ("128 px", "128")):
            told = [json.loads(path.read_text(encoding="utf-8")) for path in host.glob(f"*_{name}.summary.json")]
            by = {key: [100 * of[key] for of in told] for key in (*keys, "coverage", "median_half_width")}
            rows.append([f"{host.name}, {size}", str(len(told)), str(sum(of["n"] for of in told)),
                         *(ends(by[key]) for key in keys), shown(min(of["spearman"] for of in told), 3),
                         ends(by["coverage"]), ends(by["median_half_width"])])
    return rows


def peers() -> Rows:
    """Errors of other latency models on the networks that all of them know."""
    rows = [["method", "mean error, %", "within 10 %"]]
    compared = [row for row in lines("latency/results/peers/peers.csv") if row["compared"] == "1"]
    measured = np.array([float(row["measured_ms"]) for row in compared])
    for method in list(compared[0])[4:]:
        error = np.abs(np.array([float(row[method]) for row in compared]) / measured - 1)
        rows.append([method, shown(100 * float(error.mean())), shown(100 * float((error <= 0.1).mean()))])
    return rows


def transfer() -> Rows:
    """Mean errors of new hosts with few measurements, from scratch and from other hosts' tables."""
    from experiments.latency.transfer.run import beside_scratch

    told = beside_scratch(pd.read_csv(EXPERIMENTS / "latency/results/transfer/transfer.csv"))
    rows = [["networks measured", "tables", "from scratch, %", "from tables, random networks, %",
             "telling networks, %"]]
    for n, own in told.groupby("n"):
        random, telling = (own[own.chosen == chosen] for chosen in ("random", "telling"))
        means = (random.scratch, random.mean_error, telling.mean_error)
        rows.append([str(n), str(len(own.groupby(["host", "table"]))),
                     *(shown(100 * float(of.mean())) for of in means)])
    return rows


def deployments() -> Rows:
    """Hypervolume of a set of four deployments over that of the best single target, by seed."""
    rows = [["data", "best single target", "set over it, seed 0", "1", "2"]]
    for data, of in document("latency/results/deployments/summary.json")["judged"].items():
        rows.append([data, of["best_single"], *(shown(value, 2) for value in of["set_over_best"])])
    return rows


def asked() -> Rows:
    """Networks of a race, timed when they are asked for, beside a calibration's predictions of them."""
    told = pd.read_csv(EXPERIMENTS / "latency/results/asked/asked.csv")
    rows = [["network, target", "latencies", "networks", "seconds", "median error, %", "9 of 10 within, %",
             "90 % interval covers, %", "half-width, %", "Kendall's tau"]]
    for took in lines("latency/results/asked/asked_seconds.csv"):
        of = told[(told.network == took["network"]) & (told.px == int(took["px"])) & (told.target == took["target"])]
        timed_s = float(took["known_s"]) + float(took["smaller_s"])
        for name, each_s in (("timed", timed_s), ("predicted", float(took["calibration_s"]))):
            ms, low, high = of[f"{name}_ms"], of[f"{name}_low_ms"], of[f"{name}_high_ms"]
            error = (ms / of.truth_ms - 1).abs()
            inside = ((low <= of.truth_ms) & (of.truth_ms <= high)).mean()
            rows.append([f"{took['network']}, {took['px']} px, {took['target']}", name, str(len(of)), f"{each_s:.0f}",
                         shown(100 * float(error.median())), shown(100 * float(error.quantile(0.9))),
                         f"{100 * inside:.0f}", shown(100 * float(((high / low) ** 0.5 - 1).median())),
                         shown(kendall_tau(ms.to_numpy(), of.truth_ms.to_numpy()), 3)])
    return rows


def load() -> Rows:
    """How often p99 of a small network is predicted, and how often LoadGen agrees with itself."""
    rows = [["share of saturation", "configurations", "predicted within 15 %", "two runs within 15 %",
             "two runs within a factor of 2"]]
    for share in ("0.5", "0.7", "0.9"):
        of = [row for row in lines("serve/results/load.csv") if row["share"] == share]
        told, first, again = (np.array([float(row[f"{key}_p99_ms"]) for row in of])
                              for key in ("predicted", "measured", "again"))
        near = np.abs(told / ((first + again) / 2) - 1) <= 0.15
        apart = np.maximum(first, again) / np.minimum(first, again)
        rows.append([f"{100 * float(share):.0f} %", str(len(of)), f"{100 * near.mean():.0f} %",
                     f"{100 * (np.abs(again / first - 1) <= 0.15).mean():.0f} %", f"{100 * (apart <= 2).mean():.0f} %"])
    return rows


TABLES: Mapping[str, Callable[[], Rows]] = {of.__name__: of for of in (
    race, cuts_lost, step_seconds, earlier, short, minutes, pairs, half_core, auto, promise, benchmark_app, trained_on,
    precision, precision_speed, untrained, bias, saturation, ranges, nncf, contest, against_random, detection,
    detection_divided, detection_fronts, detection_probe, zoo, ranks, sampler, estimators, litert, validation, peers,
    transfer, deployments, asked, load)}


def markdown(rows: Rows) -> str:
    """A table as pages hold it."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body]) + "\n"


def written(text: str) -> str:
    """A page with every table computed anew; KeyError for a name that no table has."""
    return _TABLE.sub(lambda match: match[1] + markdown(TABLES[match[2]]()) + match[3], text)


def differences(name: str, text: str) -> Iterator[str]:
    """What a page says otherwise than the files, a line each."""
    for number, (says, gives) in enumerate(zip(text.split("\n"), written(text).split("\n"), strict=False), 1):
        if says != gives:
            yield f"{name}:{number}: says {says!r}, the files give {gives!r}"
            return


def strays(name: str, text: str) -> Iterator[str]:
    """Figures of the prose that no table of their section has, a line each."""
    for section in re.split(r"(?m)^(?=## )", text):
        tables = "".join(match.group() for match in _TABLE.finditer(section))
        held = {figure.lstrip("+−-") for figure in _FIGURE.findall(tables)}
        for figure in _FIGURE.findall(_HIDDEN.sub("", _TABLE.sub("", section))):
            if figure.lstrip("+−-") not in held:
                yield f"{name}: no table of the section computes {figure}: {section.partition(chr(10))[0]}"


def problems() -> list[str]:
    """What is wrong with the pages."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    return [line for name, text in texts.items()
            for line in (*differences(name, text), *(strays(name, text) if name == RESULTS else ()))]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or say where a page differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a page differs")
    if not parser.parse_args(argv).check:
        for name in PAGES:
            path = ROOT / name
            path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    found = problems()
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
