"""The figures of the pages for users: where each comes from, and which numbers there are none of ours."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from experiments.claims.check import Claim
from experiments.claims.sources import ROOT, Certificate, document, gained_since, lines, lost_to_int8, numbers
from experiments.contest.controls import contest_networks, random_networks, times_as_fast
from hwnas.latency.table import LatencyTable

TABLES = ("NAS-Bench-201_raspi4", "NAS-Bench-201_pixel3", "NAS-Bench-201_xeon_gold_6226", "NAS-Bench-201_gtx1080ti",
          "NAS-Bench-Macro_OpenVINO_int8", "NAS-Bench-Macro_ONNX_Runtime_fp32")
OPTUNA = ("tpe", "tpe_multivariate", "nsga2", "nsga2_small", "gp")


@dataclass(frozen=True)
class Page:
    """A page for users: every number of its prose is one of `claims`, or stands in `allowed` with a reason."""

    claims: Sequence[Claim] = ()
    allowed: Mapping[str, str] = field(default_factory=dict)


def pages() -> dict[str, Page]:
    """Every page for users, by path."""
    held = {
        "README.md": Page(_readme(), {"Python 3.11 or newer": "a version", "EuroSAT, 64 px,": "what was asked for",
                                      "TrashNet, 128 px,": "what was asked for",
                                      "20 minutes |": "what was asked for"}),
        "docs/results.md": Page(_results(), {"EuroSAT at 64 px": "what was asked for"}),
        "docs/guides/check.md": Page(_check(), {"spend 15 % of": "a rule"}),
        "docs/guides/limits.md": Page([
            Claim("in OpenVINO int8 by {} % on one shipped host, by {} % on the other", lambda: [
                _copy_spread("amd-epyc-f26m2s1-2c/openvino-int8-t1-b1-32px-c1-k10"),
                _copy_spread("intel-xeon-f6m167s1-2c/openvino-int8-t1-b1-128px-c3-k10")])]),
        "docs/guides/accuracy.md": Page(allowed={"for 80 steps (AdamW at 0.005,": "a recipe"}),
        "docs/guides/latency.md": Page(allowed={"predicted within 5 % often enough": "a goal"}),
        "docs/guides/device.md": Page(allowed={"Python 3.11 with": "a version"}),
        "docs/guides/deployments.md": Page([
            Claim("on EuroSAT {}, {} and {} times the hypervolume of the best single target, on TrashNet {}, {} and {} "
                  "times", lambda: [ratio for of in document("deployments/summary.json")["judged"].values()
                                    for ratio in of["set_over_best"]]),
            Claim("four deployments took {} times as long as one in three turns (mean), and eight trials {} times",
                  lambda: [sum(_paces("four", of)) / sum(_paces("one", of)) for of in ("ready_s", "trials_s")])],
            {"of digits at 32 px": "a setting"}),
        "docs/guides/choose.md": Page([
            Claim("Expected was a p99 of {} ms; ten minutes of LoadGen gave {} ms", lambda: [
                _checked()["predicted_p99_ms"], _checked()["p99_ms"]]),
            Claim("of {} configurations {} to {} % are within", lambda: [
                len(_loads()) / 3, *_range([100 * share for share in _near_loads()])])],
            {"5 % less": "a rule", "are within 15 %": "a rule", "99 of 100 answered within 20 ms": "an example",
             "95 % of them": "an example", "at 30, 60 and 85 %": "a rule",
             "2,000 queries/s within 20 ms on two": "what was asked for",
             "at 56 px in LiteRT": "a name in experiments/choose/choice.json"}),
        "docs/guides/log.md": Page(allowed={"from 0 to 1": "a unit", "top-1 0 and": "a unit"}),
        "docs/guides/gpu.md": Page(allowed={
            "driver 580": "a version", "ONNX Runtime 1.31.1": "a version", "torch 2.11": "a version",
            "within 0.2 %": "experiments/gpu/h200_training.txt"}),
        "docs/guides/machines.md": Page(_machines(), {
            "up to 1,000 workers": "what was simulated", "study of 1,000 finished": "chosen",
            "Among 1,000 running trials one trial takes": "chosen",
            "Among 1,000 running trials one trial costs": "chosen", "after 1,000 finished trials": "chosen",
            "after 5,000": "chosen", "sleep for 5 s instead of training, 8 and 16": "chosen"}),
        "docs/guides/options.md": Page(allowed={
            "(224 px)": "a size in a space's file",
            "what 99 of 100 calls take": "the meaning of an option",
            "0: done. 1: not done, for a reason that no option mends. 2: bad input": "exit codes",
            "3: done in part": "an exit code",
            "130 and 143: ended by": "exit codes"}),
    }
    for path in sorted((ROOT / "docs/guides").glob("*.md")):
        held.setdefault(f"docs/guides/{path.name}", Page())
    return held


def _checked() -> Mapping[str, Any]:
    checked: Mapping[str, Any] = document("choose/choice.json")["checked"]
    return checked


def _loads() -> list[Mapping[str, str]]:
    return lines("choose/load.csv")


def _near_loads() -> list[float]:
    """By share of saturation: of all configurations, for which p99 was predicted within 15 % of both runs' mean."""
    near: dict[str, list[bool]] = {}
    for each in _loads():
        measured = (float(each["measured_p99_ms"]) + float(each["again_p99_ms"])) / 2
        near.setdefault(each["share"], []).append(abs(float(each["predicted_p99_ms"]) / measured - 1) <= 0.15)
    return [sum(each) / len(each) for each in near.values()]


def _readme() -> list[Claim]:
    chance = random_networks()
    return [
        Claim("{} times as fast as the obvious cuts at their top-1 in the fast third of latencies ({} to {}); {} in "
              "the middle one, within chance", lambda: [
                  *(hour("eurosat_lite0")["times_as_fast"]["ours"][0][key] for key in ("value", "low", "high")),
                  hour("eurosat_lite0")["times_as_fast"]["ours"][1]["value"]]),
        Claim("{} times as fast in the fast third ({} to {}); {}, {} and {} points ahead at equal latency | {} times "
              "in the middle third lies within chance", lambda: [
                  *(hour("eurosat_mobilenetv2")["times_as_fast"]["ours"][0][key] for key in ("value", "low", "high")),
                  *(part["value"] for part in hour("eurosat_mobilenetv2")["points_ahead"]["ours"]),
                  hour("eurosat_mobilenetv2")["times_as_fast"]["ours"][1]["value"]]),
        Claim("| {} to {} points ahead of the obvious cuts at equal latency |", lambda: _range([
            part["value"] for part in hour("trashnet_lite0")["points_ahead"]["ours"]])),
        Claim("random networks of the space are {} to {} times as fast as timm baselines",
              lambda: _range(times_as_fast(chance))),
        Claim("the sampler has {} to {} % of the hypervolume after {} evaluations", lambda: [*_on_tables(), 100]),
        Claim("counted from the worst accuracy {} and {} % on two of them", lambda: best_wide("hwnas")),
    ]


def _on_tables() -> list[float]:
    """The least and the most of the hypervolume that the sampler has after 100 evaluations, per cent."""
    return _range([100 * sampler_figure(table, "hwnas", "mean_100") for table in TABLES])


def _results() -> list[Claim]:
    """In the page's order."""
    eurosat, fashion = (Certificate(name) for name in ("eurosat", "fashion_mnist"))
    six = hour("eurosat_mobilenetv1_six")
    chance, picked = random_networks(), contest_networks(True, "int8")

    def taus(label: str, *, given_cost: bool = False) -> list[float]:
        return [(held.tau_given_cost if given_cost else held.tau)(held.told[label]) for held in (eurosat, fashion)]

    return [
        Claim("({} epochs of {} Fashion-MNIST images)", lambda: [fashion.content["truth"]["options"][key]
                                                                 for key in ("epochs", "train_images")]),
        Claim("they are {} to {} times as fast as the fastest baseline", lambda: _range(times_as_fast(chance))),
        Claim("the three picked by a search {} to {} times", lambda: _range(times_as_fast(picked))),
        Claim("They have {} to {} % top-1 (fp32), the three {} to {} %, the best baseline {} %", lambda: [
            *_range([point.top1 for point in chance]), *_range([point.top1 for point in picked]),
            max(point.top1 for point in contest_networks(False))]),
        Claim("The most accurate pick was ask {} of {}, a random one", ask),
        Claim("its four finalists lie {} points ({} to {} over the test images) above",
              lambda: _over_controls("hwnas")),
        Claim("random search's {} ({} to {}) above theirs", lambda: _over_controls("random")),
        Claim("(int8, {} seeds, a core of one AMD EPYC", lambda: [hour("eurosat_lite0")["seeds"]]),
        Claim("**{} times as fast in the fast third of the latencies ({} to {})**. In the middle third it is {} times "
              "({} to {}), within chance,", lambda: [
                  part[key] for part in hour("eurosat_lite0")["times_as_fast"]["ours"][:2]
                  for key in ("value", "low", "high")]),
        Claim("as {} is the least that such runs would surely have shown", lambda: [
            hour("eurosat_lite0")["times_as_fast"]["ours"][1]["could_be_seen"]]),
        Claim("At equal latency it is {}, {} and {} points ahead", lambda: [
            part["value"] for part in hour("eurosat_lite0")["points_ahead"]["ours"]]),
        Claim("top-1 it is {} to {} times as fast; its most accurate networks have {} to {} %, the "
              "rival's {} to {} %.", lambda: [
                  *_range([each["times_as_fast"] for each in hour("eurosat_lite0")["as_fast_as_whole"]["ours"]]),
                  *(end for arm in ("ours", "obvious") for end in _range([
                      100 * each["top1"] for each in hour("eurosat_lite0")["most_accurate"][arm]]))]),
        Claim("it is {} times as fast in the fast third ({} to {}) and {} in the middle one ({} to {}, within chance); "
              "{}, {} and {} points ahead at equal latency.", lambda: [
                  *(part[key] for part in hour("eurosat_mobilenetv2")["times_as_fast"]["ours"][:2]
                    for key in ("value", "low", "high")),
                  *(part["value"] for part in hour("eurosat_mobilenetv2")["points_ahead"]["ours"])]),
        Claim("it is {} times as fast there ({} to {}), as it left the fastest of them out on smaller images. In two "
              "of the seeds a fault, mended since, had failed up to two of its lines. In the others it is {} and {} "
              "times as fast, within chance, and {} and {} points ahead", lambda: [
                  *(six["times_as_fast"]["ours"][0][key] for key in ("value", "low", "high")),
                  *(part["value"] for key in ("times_as_fast", "points_ahead") for part in six[key]["ours"][1:])]),
        Claim("As run, the race was {} and {} times as fast, within chance", lambda: [
            part["value"] for part in hour("eurosat_lite0_hour_saturated")["times_as_fast"]["ours"][:2]]),
        Claim("the same networks are {} times as fast in the fast third ({} to {}) and {} in the middle one ({} to {}, "
              "within chance); {}, {} and {} points ahead at equal latency, and both have networks of {} %.", lambda: [
                  *(part[key] for part in hour("eurosat_lite0_hour")["times_as_fast"]["ours"][:2]
                    for key in ("value", "low", "high")),
                  *(part["value"] for part in hour("eurosat_lite0_hour")["points_ahead"]["ours"]),
                  100 * min(hour("eurosat_lite0_hour")["most_accurate"][arm][0]["top1"]
                            for arm in ("ours", "obvious"))]),
        Claim("that host: {} and {} times as fast, within chance, and {}, {} and {} points ahead, the last two within "
              "chance; {} % at best, the rival {}. No lead in speed was seen; the rival took {} minutes, the race {}.",
              lambda: [
                  *(part["value"] for part in hour("eurosat_lite0_two_hours")["times_as_fast"]["ours"][:2]),
                  *(part["value"] for part in hour("eurosat_lite0_two_hours")["points_ahead"]["ours"]),
                  *(100 * hour("eurosat_lite0_two_hours")["most_accurate"][arm][0]["top1"]
                    for arm in ("ours", "obvious")),
                  *(hour("eurosat_lite0_two_hours")["minutes"][arm][0] for arm in ("obvious", "ours"))]),
        Claim("with such weights in the race itself it is {} times as fast in the fast third ({} to {}) and {} in "
              "the middle one ({} to {}, within chance), and {}, {} and {} points ahead.", lambda: [
                  *(part[key] for part in hour("eurosat_lite0_narrow")["times_as_fast"]["ours"][:2]
                    for key in ("value", "low", "high")),
                  *(part["value"] for part in hour("eurosat_lite0_narrow")["points_ahead"]["ours"])]),
        Claim("have in thirty minutes what one has in sixty (one seed): {} % at best against {}.", lambda: [
            100 * hour(name)["most_accurate"]["ours"][0]["top1"]
            for name in ("eurosat_lite0_two_workers", "eurosat_lite0_hour")]),
        Claim("three networks to choose from, cost {} points in the fast and the middle third", lambda: [
            hour("eurosat_lite0_narrow")["level"]["ours"][0][0] - hour("eurosat_zoo")["level"]["ours"][0][0]]),
        Claim("int8 cost up to {} points of top-1, {} in the mean of the race's networks; {} since", lambda: [
            max(lost_to_int8("ours", "8")), *(float(np.mean(lost_to_int8("ours", bits))) for bits in "87")]),
        Claim("cost {} points in the mean of nine networks", lambda: [
            -float(np.mean(gained_since("minutes_20_behind_a_choice")))]),
        Claim("On TrashNet's few photographs it is {} to {} points ahead", lambda: _range([
            part["value"] for part in hour("trashnet_lite0")["points_ahead"]["ours"]])),
        Claim("the same networks are then {}, {} and {} points more accurate in int8",
              lambda: document("rounding/summary.json")["same"]),
        Claim("None of {} in six races stayed", lambda: [
            sum(each["trained"] for own in hour("eurosat_lite0_children")["children"].values() for each in own)]),
        Claim("After {} evaluations it has {} to {} % of the hypervolume on six tables ({} seeds;", lambda: [
            100, *_on_tables(),
            min(sampler_figure(table, "hwnas", "seeds") for table in TABLES)]),
        Claim("it has {} and {} % on two of them", lambda: best_wide("hwnas")),
        Claim("a LINAS-like loop has {} and {} %", lambda: best_wide("linas")),
        Claim("Optuna's samplers up to {} and {} %", lambda: best_wide(*OPTUNA)),
        Claim("multi-fidelity {} and {} for {} and {} % of full training's cost", lambda: [
            *taus("multi_fidelity"), *_shares("multi_fidelity")]),
        Claim("the proxy {} and {} for as much", lambda: taus("proxy")),
        Claim("MACs {} and {} ([what ranked worse]", lambda: taus("zero_cost:macs")),
        Claim("*equal cost*: {} and {}, {} and {}.", lambda: [
            tau for label in ("multi_fidelity", "proxy") for tau in taus(label, given_cost=True)]),
        Claim("half the logarithm of the known cost has {} and {} too", lambda: [
            held.tau(held.mixed("proxy", held.log_cost, 0.5)) for held in (eurosat, fashion)]),
        Claim("(multi-fidelity's {} to {} and {} to {})", lambda: [
            held.content["estimators"]["multi_fidelity"][end]
            for held in (eurosat, fashion) for end in ("low", "high")]),
        Claim("predicted each of {} networks of `mnasnet_small` that it had not seen within {} %.", _edge_told),
        Claim("int8 network gave at least {} % of the test images the same class as in", lambda: [math.floor(10 * min(
            100 * float(row["same"]) for name in ("eurosat", "fashion_mnist")
            for row in lines(f"edge/{name}/parity.csv") if row["precision"] == "int8")) / 10]),
    ]


def _check() -> list[Claim]:
    return [
        Claim("in `edge_int8` the same hard-swishes took {} % with the conversions around;",
              lambda: _advice("edge_int8", "falls back: ")[-1:]),
        *(Claim(line, partial(_advice, "ort_int8", line.partition(" ")[0])) for line in _CHECKED),
    ]


_CHECKED = (
    "falls back: {} of {} HardSwish: int8 was asked for, and fp32 runs: {}% of the time, {}% with the conversions "
    "around; Relu in its place",
    "left in fp32 by the file: {} Conv, {}% of the time (such as",
    "inserted: {} conversions and reorders, {}% of the time: {}% around HardSwish, {}% around Mul, {}% around "
    "ReduceMean",
    "activations: HardSwish {}% ({} of {} in nodes of their own), Relu {} % (all {} fused or folded), HardSigmoid {} % "
    "(all {} fused or folded)")


def _advice(target: str, begin: str) -> list[float]:
    """The numbers of a line that `hwnas.check` says, from the nodes that it stored of a target."""
    from hwnas.check.report import advice
    from hwnas.runtimes.executed import Executed
    from hwnas.target import Target

    stored = document(f"check/mobilenetv3_small_050-{target}.json")
    line = next(line for line in advice(Executed.from_dict(stored), Target.from_config(stored["target"]))
                if line.startswith(begin))
    return [float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])", line)]


def _edge_told() -> list[float]:
    report = document("edge/edge_int8_small.summary.json")
    each = report["within_5"] == 1 and not report["n_invalid"]
    return [report["n"], 5 if each else math.nan]


def litert_table() -> LatencyTable:
    """The shipped table of LiteRT in int8."""
    return LatencyTable.load(ROOT / "latency_tables/amd-epyc-f25m17s1-2c/litert-int8-t1-b1-32px-c1-k10.json.gz")


def ask() -> list[float]:
    """The most accurate pick's place among the asks of its search, from a replay, and how many these were."""
    picks = document("contest/results/fashion_mnist/picks.json")
    first = picks["picks"][-1]["id"]
    places = [int(row["ask"]) for row in lines("contest/results/fashion_mnist/asks.csv")
              if row["larger_is_better"] == row["smaller_is_better"] == first]
    return [*places, picks["search"]["asks"]]


def _machines() -> list[Claim]:
    """How many workers a study bears, what a trial costs then, and how near real processes came."""
    recorded = [row for row in lines("sampler_search/results/longer_proxy/search.csv") if row["sampler"] == "hwnas"]
    mean_s = float(recorded[-1]["training_seconds"]) / len(recorded)  # the file holds sums

    def bears(storage: str, times: int) -> list[float]:
        """The most simulated workers that train for half of their time, and their trials an hour."""
        rows = [row for row in lines("many_workers/simulated.csv") if row["storage"] == storage and not row["limit"]
                and (float(row["times_as_long"]), row["finished"]) == (times, "1000")]
        return numbers(max(rows, key=lambda row: int(row["workers"])), "workers", "trials_per_hour")

    def cost(storage: str, column: str, running: int = 1000, finished: int = 1000) -> list[float]:
        return [float(row[column]) for row in lines("many_workers/services.csv") if (
            row["storage"], row["finished"], row["running"]) == (storage, str(finished), str(running))]

    def above(storage: str) -> list[float]:
        return [100 * (float(row["simulated_per_hour"]) / float(row["real_per_hour"]) - 1)
                for row in lines("many_workers/checked.csv") if row["storage"] == storage]

    return [
        Claim(" ".join(3 * ["| {} s | {} | {} | {} | {} |"]), lambda: [figure for times in (1, 10, 100) for figure in (
            times * mean_s, *bears("sqlite", times), *bears("postgresql", times))]),
        Claim("one trial takes {} s of it", lambda: cost("sqlite", "locked_s")),
        Claim("one trial costs a worker {} s of its own processor, and the server {} s", lambda: [
            *cost("postgresql", "own_s"), *cost("postgresql", "server_s")]),
        Claim("gets its number in {} s", lambda: cost("postgresql", "locked_s")),
        Claim("took {} to {} ms of a worker's own processor", lambda: _range([
            1000 * seen_s for row in lines("many_workers/services.csv") if (seen_s := float(row["seen_s"]))])),
        Claim("{} ms on SQLite and {} ms on PostgreSQL", lambda: [
            1000 * cost(storage, "seen_s", 0)[0] for storage in ("sqlite", "postgresql")]),
        Claim("takes {} s an ask after 1,000 finished trials and {} s after 5,000", lambda: [
            *cost("postgresql", "sampler_s", 0), *cost("postgresql", "sampler_s", 0, 5000)]),
        Claim("is off by {} and {} % on SQLite, and by {} and {} % on PostgreSQL", lambda: [
            *above("sqlite"), *above("postgresql")]),
    ]


def _paces(arm: str, column: str) -> list[float]:
    return [float(row[column]) for row in lines("deployments/pace.csv") if row["arm"] == arm]


def _range(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


def sampler_figure(table: str, sampler: str, key: str, *, wide: bool = False) -> float:
    """NaN where it was not run, or not so far."""
    summary = document(f"sampler_contest/results/{table}/summary.json")
    entries = (summary["wide"] if wide else summary)["samplers"]
    value = next((entry.get(key) for entry in entries if entry["sampler"] == sampler), None)
    return float("nan") if value is None else float(value)


def best_wide(*samplers: str) -> list[float]:
    """Of NAS-Bench-Macro's two tables, counted from the worst accuracy: the best of `samplers` after 100, per cent."""
    return [100 * float(np.nanmax([sampler_figure(table, sampler, "mean_100", wide=True) for sampler in samplers]))
            for table in TABLES[-2:]]


def hour(name: str) -> dict[str, Any]:
    """What the hour's runs on a data set came to."""
    held: dict[str, Any] = document(f"hour/results/{name}/summary.json")
    return held


def _over_controls(sampler: str) -> list[float]:
    points = document("against_random/results/summary.json")["over_controls_points"][sampler]
    return [points[end] for end in ("value", "low", "high")]


def _shares(label: str) -> list[float]:
    return [100 * Certificate(name).content["estimators"][label]["share_of_full"]
            for name in ("eurosat", "fashion_mnist")]


def _copy_spread(table: str) -> float:
    """Median over the table's networks of the standard deviation between compilations, per cent."""
    networks = LatencyTable.load(ROOT / "latency_tables" / f"{table}.json.gz").networks
    measured = [network.measurement for network in networks if network.measurement.valid]
    return 100 * float(np.median([measurement.copy_spread for measurement in measured]))
