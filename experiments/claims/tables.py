"""The tables of experiments/README.md, row by row from the results files beside it, and some of its sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.claims.check import Claim, Figures, Table
from experiments.claims.pages import OPTUNA, TABLES, ask, hour, litert_table
from experiments.claims.pages import sampler_figure as _sampler
from experiments.claims.records import moved_errors
from experiments.claims.sources import EXPERIMENTS, Certificate, document, gained_since, lines, lost_to_int8, numbers
from experiments.contest.controls import contest_networks, random_networks, rival, times_as_fast
from experiments.cut_estimates.judged import judged
from experiments.hour.run import levels
from experiments.latency_transfer.run import harmed, taken_error
from hwnas.stats import kendall_tau, spearman, student_t

Rows = dict[str, Figures]
EPYC, XEON = "amd-epyc-f26m2s1-2c", "intel-xeon-f6m167s1-2c"
PICKS = "contest/results/fashion_mnist/picks.json"
INT8_RUNTIMES = ("openvino",)
EDGE_RUNS = {"eurosat": "EuroSAT", "fashion_mnist": "Fashion-MNIST"}
MARKS = (25, 50, 100, 200, 250, 400)
EARLY = MARKS[:3]
GOALS = (("within_5", 0.90, 1.0, "ceiling_within_5"), ("within_10", 0.985, 1.0, "ceiling_within_10"),
         ("spearman", 0.99, 1.0, "ceiling_spearman"), ("coverage", 0.85, 0.95, ""),
         ("median_half_width", 0.0, 0.08, ""))  # marks of a latency model: figure, least, most, its noise ceiling
KINDS = ("average", "last", "average, set", "last, set")  # of weights, in experiments/full_training
TUNING_SETS, TUNED = ("eurosat", "trashnet", "fashion_mnist"), "batch_size=32,layer_decay=0.85"
SAMPLERS = {"hwnas": "hwnas", "TPE": "tpe", "TPE, multivariate": "tpe_multivariate", "NSGA-II (20)": "nsga2_small",
            "Optuna's GP": "gp", "random, stratified": "stratified", "LINAS-like": "linas"}
ESTIMATORS = {"multi-fidelity": "multi_fidelity", "proxy (80 steps)": "proxy", "NASWOT": "zero_cost:naswot",
              "MACs": "zero_cost:macs", "zero-cost ensemble": "zero_cost:ensemble", "ZiCo": "zero_cost:zico",
              "SynFlow": "zero_cost:synflow",
              "parameters": "zero_cost:params", "gradient norm": "zero_cost:grad_norm",
              "supernet (20 epochs; 960 and 886 s)": "supernet"}
PARTS = {"known latency: guessed from the networks evaluated": "latency_guessed",
         "which settings are one network": "duplicates_unknown", "features (latency, counts of values)": "no_features",
         "features": "no_features", "counts of values alone": "no_counts",
         "the warp of the accuracies": "no_warp", "the kernel's linear part": "no_linear",
         "calibration of the model's errors": "no_doubt", "evolution (as many first candidates)": "no_evolution",
         "crossings of evaluated networks": "no_crossings", "random candidates": "no_random",
         "all but random candidates": "random_only", "the noise of each accuracy, told": "noise_untold"}


def tables() -> list[Table]:
    """Every table with figures on the page."""
    return [
        *(Table("| target and space |", partial(_validation, host), nth) for nth, host in enumerate((EPYC, XEON))),
        Table("| target, hours later |", _hours_later), Table("| refined search |", _refined),
        Table("| method | mean error", _peers), Table("| mean of all shipped tables", _regressors),
        Table("| few measurements |", _transfer), Table("| ten measured here |", _measured_transfer),
        Table("| | 25 | 50 |", _contests), Table("| asked |", _asked),
        Table("| without | raspi4: after 25", _twenty_seeds),
        Table("| without | after 25", partial(_ablation, "raspi4")), Table("| without | after 25", _large, 1),
        Table("| without | after 25", partial(_ablation, "noise"), 2),
        Table("| | networks | within 5 / 10 %", _macro), Table("| | to the other's final", _searches),
        Table("| | at 24 |", _workers), Table("| table, sampler, networks |", _believed),
        Table("| table, sampler, evaluations |", _looked_twice), Table("| data set, steps |", _kept_weights),
        Table("| int8 by weights |", _int8_by_weights),
        Table("| changed, on the cut |", _tuning_tries), Table("| network, data set |", _tuning_finals),
        Table("| cut, px, seed |", _going_on), Table("| estimate of cuts |", _cut_estimates),
        Table("| traced network |", _any_baseline), Table("| whole search |", _small_searches),
        Table("| cut without loss |", _lossless), Table("| from 30 cuts |", _family_model),
        Table("| channels by |", _importance), Table("| classifier, network, cut, steps |", _classifier_start),
        Table("| seed, cuts by |", _cut_by_tracing), Table("| MobileNetV1, seed, cuts by |", _mobilenetv1_by_tracing),
        Table("| set, data, seed |", _deployments), Table("| p50 of a file |", _benchmark_app),
        Table("| top-1 by deployment, network |", _kinds),
        Table("| p99 in ms, network, deployment, batch, streams |", _under_load),
        Table("| p99 under load |", _load_within),
        Table("| p99 of a large network |", partial(_load_within, "large.csv")),
        Table("| data, network, arm, third |", _hour), Table("| move |", _moves),
        Table("| points of top-1, seed |", _rounding), Table("| top-1 in %, network |", _saturation),
        Table("| from scratch, by seed |", _from_scratch),
        Table("| search | trials |", _against_random), Table("| search, network |", _against_random_networks),
        *(table for runtime in INT8_RUNTIMES for table in (
            Table(f"| top-1 lost, {runtime} |", partial(_int8_lost, runtime)),
            Table(f"| ms, {runtime} |", partial(_int8_latency, runtime)))),
        *(Table(f"| beside NNCF, {runtime} |", partial(_beside_nncf, runtime)) for runtime in (
            "openvino", "onnxruntime")),
        Table("| table | networks |", _edge_validation), Table("| network | int8 top-1 |", _edge_fronts),
        Table("| estimator |", _certificates), Table("| network | ms |", _controls),
        *(Table("| network | stem |", partial(_deployed, data), nth, keys=2)
          for nth, data in enumerate(("fashion_mnist", "eurosat")))]


def claims() -> list[Claim]:
    """Sentences that no table holds, and every statement of the two contests that the page gives, word by word."""
    eurosat, fashion = (Certificate(name) for name in ("eurosat", "fashion_mnist"))
    both = (eurosat, fashion)

    def ahead() -> list[float]:
        return [figure for held in both for figure in held.content["estimators"]["proxy"]["behind_best"]]

    return [
        Claim("of {} searches the mean error was {} % by the session of their beginning, and {} % moved", lambda: [
            len({row["run"] for row in lines("sessions/moved.csv")}), *moved_errors()]),
        Claim("({} % of all {} networks lie in their intervals)", _covered),
        Claim("have {} % of the test images right in {} ms (int8), the two networks that the search found {} and {} % "
              "in {} and {} ms.", _cut_and_searched),
        Claim("Over both hosts {} of the {} tables meet all five marks", _marks_met),
        Claim("the slowest quarter of networks: {} to {} % in six of them", _slowest),
        Claim("Of these {} networks {} % lay in their intervals (± {} %), and {} % within 5 %", _predicted_in_searches),
        Claim("Over all tables ten telling networks leave {} %, ten random ones from scratch {} %; {} of {} have "
              "5 % at most.", _within_asked),
        Claim("A start was taken in {} of {} draws, and did harm in {}; random entries were taken in {} of {}, and did "
              "harm in {}.", _harm_of_transfer),
        Claim("ours after {} has {}, {}, {}, {}, {} and {} %; the LINAS-like loop {}, {}, {}, {}, {} and {} %.",
              lambda: [100, *_wide("hwnas"), *_wide("linas")]),
        Claim("int8 Optuna's GP ({} %) and TPE ({} %), fp32 TPE, multivariate ({} %).",
              lambda: [_wide("gp")[4], _wide("tpe")[4], _wide("tpe_multivariate")[5]]),
        Claim("ours finds {} % at {} ms, NSGA-II {} % at {} ms.", lambda: _front_ends("default")),
        Claim("NSGA-II's front reaches {} % at {} ms.", lambda: _front_ends("longer_proxy")[2:]),
        Claim("by {} ({} to {}) and {} ({} to {}): not shown beyond chance", ahead),
        Claim("ranks networks as MACs do (tau {}) and as the other runtimes in fp32 do ({} to {})", lambda: [
            *_taus("litert fp32", "MACs"), *_ends(_taus("litert fp32", "onnxruntime fp32", "openvino fp32"))]),
        Claim("int8 on one thread ({} to {}) than to its own fp32 ({})", lambda: [
            *_ends(_taus("litert int8", "openvino bf16", "openvino int8 32 px")),
            *_taus("litert fp32", "litert int8")]),
        Claim("calibrated in {} s)", lambda: [litert_table().spent_s["mnasnet_small"]]),
        Claim("Finalists lose {} points at most, baselines up to {},", lambda: [
            max(lost for lost, kind in _edge_lost() if kind == which) for which in ("finalist", "baseline")]),
        Claim("finalists were trained for {} steps (EuroSAT) and {} (Fashion-MNIST)", lambda: [
            document(f"edge/{name}/environment.json")["training"]["steps"] for name in EDGE_RUNS]),
        Claim("by {} points of top-1 ({} to {} over the test images), and both", lambda: _edge_beats("fashion_mnist")),
        Claim("the one random network by {} points ({} to {})", lambda: _edge_beats("eurosat")),
        Claim("*Obvious* took {}, {} and {} minutes, *ours* {}, {} and {}.", lambda: [
            minutes for arm in ("obvious", "ours") for minutes in hour("eurosat_lite0")["minutes"][arm]]),
        Claim("By the rule the race is faster in the fast third, {} times, and more accurate in the fast and in the "
              "middle one, by {} and {} points.", lambda: [
                  hour("eurosat_lite0")["times_as_fast"]["ours"][0]["value"],
                  *(part["value"] for part in hour("eurosat_lite0")["points_ahead"]["ours"][:2])]),
        Claim("its speed lies within chance: {} times, from {} to {}, where such runs were sure to show {}.", lambda: [
            hour("eurosat_lite0")["times_as_fast"]["ours"][1][key]
            for key in ("value", "low", "high", "could_be_seen")]),
        Claim("held against the same *obvious*): {} and {} times as fast, {}, {} and {} points ahead.", lambda: [
            *(part["value"] for part in hour("eurosat_lite0_parents")["times_as_fast"]["ours"][:2]),
            *(part["value"] for part in hour("eurosat_lite0_parents")["points_ahead"]["ours"])]),
        Claim("int8 is {}, {} and {} points more accurate at equal minutes. The worst network loses {} points to int8 "
              "without, {} with.", lambda: [*document("rounding/summary.json")["same"],
                                            document("rounding/summary.json")["most_lost"]["without"],
                                            document("rounding/summary.json")["most_lost"]["with"]]),
        Claim("the networks of the race lose {} points to fp32 in the mean, {} at most, and {} of it to saturation; "
              "with 7 bits {} and {}. The networks of *obvious* lose {} and {}.", lambda: [
                  float(np.mean(lost_to_int8("ours", "8"))), max(lost_to_int8("ours", "8")),
                  float(np.mean(lost_to_int8("ours", "8", "top1_exact"))),
                  float(np.mean(lost_to_int8("ours", "7"))), max(lost_to_int8("ours", "7")),
                  *(float(np.mean(lost_to_int8("obvious", bits))) for bits in ("8", "7"))]),
        Claim("with 7 bits than with 8, {} points against {}:", lambda: [
            max(lost_to_int8("obvious", "7")),
            lost_to_int8("obvious", "8")[int(np.argmax(lost_to_int8("obvious", "7")))]]),
        Claim("{} and {} times as fast as *obvious* in the fast and the middle third, within chance ({} to {}, {} to "
              "{}):", lambda: [hour("eurosat_lite0_hour_saturated")["times_as_fast"]["ours"][third][key]
                               for third, key in ((0, "value"), (1, "value"), (0, "low"), (0, "high"), (1, "low"),
                                                  (1, "high"))]),
        Claim("it is {} times as fast in the fast third ({} to {}; {} was sure to be seen) and {} in the middle one "
              "({} to {}, within chance), and {}, {} and {} points ahead.", lambda: [
                  *(hour("eurosat_lite0_hour")["times_as_fast"]["ours"][0][key]
                    for key in ("value", "low", "high", "could_be_seen")),
                  *(hour("eurosat_lite0_hour")["times_as_fast"]["ours"][1][key] for key in ("value", "low", "high")),
                  *(part["value"] for part in hour("eurosat_lite0_hour")["points_ahead"]["ours"])]),
        Claim("the race is {} times as fast in the fast third ({} to {}) and {} in the middle one ({} to {}, within "
              "chance), and {}, {} and {} points ahead, the last within chance. At the top-1 of the six networks of "
              "the rival's front its fastest networks of no lower top-1 are {}, {}, {}, {}, {} and {} times as fast; "
              "at the whole network's, {} times. The most accurate networks have {} and {} %.", lambda: [
                  *(hour("eurosat_lite0_narrow")["times_as_fast"]["ours"][third][key]
                    for third in (0, 1) for key in ("value", "low", "high")),
                  *(part["value"] for part in hour("eurosat_lite0_narrow")["points_ahead"]["ours"]),
                  *(each["times_as_fast"] for each in hour("eurosat_lite0_narrow")["as_fast_at"]["ours"][0]),
                  hour("eurosat_lite0_narrow")["as_fast_as_whole"]["ours"][0]["times_as_fast"],
                  *(100 * hour("eurosat_lite0_narrow")["most_accurate"][arm][0]["top1"]
                    for arm in ("ours", "obvious"))]),
        Claim("each arm had {} % of a core (after {} minutes,", _load),
        Claim("in which the rival took {} % more minutes.", lambda: [100 * (
            hour("eurosat_lite0_two_hours")["minutes"]["obvious"][0]
            / hour("eurosat_lite0_two_hours")["minutes"]["ours"][0] - 1)]),
        Claim("and took {} minutes, the race {}. The race is\n{} and {} times as fast in the fast and the middle "
              "third, within chance ({} to {}, {} to {}), and {}, {} and {} points ahead, the last two within chance. "
              "At the top-1 of the first four networks of the rival's front it is {}, {}, {} and {} times as fast; of "
              "the fifth, the cut of {} % in {} ms, it has no equal: the race had dropped that cut, and ends with {} % "
              "in {} ms.\nAt the whole network's top-1 it is {} times as fast.", _two_hours),
        Claim("other thirds of latency each time: race {}/{}/{}, {}/{}/{} and {}/{}/{} %; *obvious* {}/{}/{}, "
              "{}/{}/{} and {}/{}/{} %.", lambda: [
                  part for arm in ("ours", "obvious") for name in LENGTHS for part in hour(name)["level"][arm][0]]),
        Claim("and was {} % sure.", lambda: [100 * float(lines("hour/results/families.csv")[-1]["sure"])]),
        Claim("named alone it is {}, {} and {} points behind in the three thirds", lambda: [
            alone - zoo for alone, zoo in zip(_level("eurosat_lite0_narrow"), _level("eurosat_zoo"), strict=True)]),
        Claim("of the thirds is {}, {} and {} %. One worker has {}, {} and {} % after twenty minutes of the same day, "
              "and {}, {} and {} % after the sixty above (other thirds of latency, by {} % at most).", lambda: [
                  *_level("eurosat_lite0_two_workers"), *_level("eurosat_lite0_narrow"), *_level("eurosat_lite0_hour"),
                  100 * max(abs(one / other - 1) for one, other in zip(
                      hour("eurosat_lite0_hour")["edges_ms"][0], hour("eurosat_lite0_narrow")["edges_ms"][0],
                      strict=True))]),
        Claim("At the whole network's top-1 it is {} times as fast.\n", lambda: [
            hour("eurosat_lite0_two_workers")["as_fast_as_whole"]["ours"][0]["times_as_fast"]]),
        Claim("are {} points more accurate in fp32 after sixty (least {}, most {}).", lambda: [
            float(np.mean(gained_since("minutes_60"))), *_ends(gained_since("minutes_60"))]),
        Claim("cost {} points of fp32 top-1 in the mean of", lambda: [
            -float(np.mean(gained_since("minutes_20_behind_a_choice")))]),
        Claim("By the rule the race is faster in the fast third, {} times, and more accurate in every third.", lambda: [
            hour("eurosat_mobilenetv2")["times_as_fast"]["ours"][0]["value"]]),
        Claim("In the middle third its speed lies within chance: {} times, from {} to {}, where {} was sure to be "
              "seen.", lambda: [hour("eurosat_mobilenetv2")["times_as_fast"]["ours"][1][key]
                       for key in ("value", "low", "high", "could_be_seen")]),
        Claim("top-1 it is {}, {} and {} times as fast; int8 costs that network much. Its most accurate networks have "
              "{}, {} and {} %, the rival's {}, {} and {} %.", lambda: [
                  *(each["times_as_fast"] for each in hour("eurosat_mobilenetv2")["as_fast_as_whole"]["ours"]),
                  *(100 * each["top1"] for arm in ("ours", "obvious")
                    for each in hour("eurosat_mobilenetv2")["most_accurate"][arm])]),
        Claim("The rival took {}, {} and {} minutes, the race {} in each seed.", lambda: [
            *hour("eurosat_mobilenetv2")["minutes"]["obvious"],
            *_ends(hour("eurosat_mobilenetv2")["minutes"]["ours"])[:1]]),
        Claim("in the end int8 cost the five of them {}, {}, {}, {} and {} points, from fast to slow, and none of the "
              "six others more than {}.", lambda: [*_lost_line_by_line("false"), max(_lost_line_by_line("true"))]),
        Claim("EfficientNet-Lite0's cuts lost {} points at most after the trunk", lambda: [max(
            lost for seed in document("rounding/trunk.json")["points_lost_to_rounding_after_the_trunk_by_seed"][
                "tf_efficientnet_lite0"] for lost in seed)]),
        Claim("*carried* made {}, {} and {} % more steps than *ours*", _more_steps),
        Claim("*ours* lies {} points behind *carried* in the fast and in the middle third and {} before it", lambda: [
            -hour("eurosat_lite0_children")["points_ahead_of"]["carried"][0]["value"],
            hour("eurosat_lite0_children")["points_ahead_of"]["carried"][2]["value"]]),
        Claim("Here the race's lead lies within chance: {}, {} and {} points in the three thirds, where such runs were "
              "sure to show {} to {};", lambda: [
                  *(part["value"] for part in hour("trashnet_lite0")["points_ahead"]["ours"]),
                  *_ends([part["could_be_seen"] for part in hour("trashnet_lite0")["points_ahead"]["ours"]])]),
        Claim("Its most accurate networks have {} % in {} ms, {} in {} and {} in {}; the rival's, the whole network in "
              "each seed, {}, {} and {} % in {} to {} ms.", _most_accurate),
        Claim("ends where it is the likelier worse: {} to {} lines, and the whole network had {} to {} steps",
              _short_races),
        Claim("it took {}, {} and {} minutes, *ours* {}, {} and {}.", lambda: [
            minutes for arm in ("obvious", "ours") for minutes in hour("trashnet_lite0")["minutes"][arm]]),
        *_tuning_claims(),
        Claim("multi-fidelity has {} and {} (EuroSAT), {} and {} (Fashion-MNIST), the proxy {} and {}, {} and {}.",
              lambda: [float(kendall_tau(held.told[label], held.seeds[:, seed]))
                       for label in ("multi_fidelity", "proxy") for held in both for seed in (0, 1)]),
        Claim("networks differ by {} points, two trainings of one by {}.", lambda: [
            100 * fashion.content["truth"][key] for key in ("std_networks", "std_seeds")]),
        Claim("whose tau with cost is {} and {}.", lambda: [
            float(kendall_tau(held.told["zero_cost:naswot"], held.log_cost)) for held in both]),
        Claim("given cost multi-fidelity is ahead by {} and {}", lambda: [
            held.tau_given_cost(held.told["multi_fidelity"]) - held.tau_given_cost(held.told["proxy"])
            for held in both]),
        Claim("All {} exceed the goal of {} times; {} have a higher top-1 than every baseline, of which the best has "
              "{} %", _above),
        Claim("measured was {} to {} % above predicted", _above_predicted),
        Claim("it was ask {} of {}.", ask), Claim("the first {} asks are the same", _equal_asks),
        Claim("{} s for its anchors", lambda: [document(PICKS)["search"]["setup_seconds"]]),
        Claim("and {} s for 200 networks.", lambda: [document(PICKS)["search"]["trials_seconds"]]),
        Claim("The {} s of search are", lambda: [sum(document(PICKS)["search"][key] for key in
                                                     ("setup_seconds", "trials_seconds"))]),
        Claim("accurate {} ms, ResNet-18 and ResNet-50 with stride-1 stem {} and {} ms, so {} and {} times;", _alone),
        Claim("takes {} ms alone (a tenth of its calls more than {}) and {} ms in the contest", lambda: [
            _timed_alone("efficientnet_b0-stem1")[key] for key in ("latency_ms", "p90_ms")] + [
            float(_row("efficientnet_b0", "stride 1")["latency_ms"])]),
        Claim("mse ranges {} points, minmax {}, percentile {}, entropy {}, which it writes: {} ms, {} times",
              _compressed),
        *(Claim(sentence) for data in ("fashion_mnist", "eurosat") for sentence in _statements(data))]


def _int8_lost(runtime: str) -> Rows:
    """By network: fp32's top-1, then the points lost by each way that the runtime ran: per cent."""
    rows: dict[str, list[float | None]] = {}
    for row in _int8(runtime):
        fp32 = rows.setdefault(row["network"], [100 * float(row["top1"])])[0]
        if row["way"] != "fp32" and fp32 is not None:
            rows[row["network"]].append(fp32 - 100 * float(row["top1"]))
    return {**rows}


def _int8_latency(runtime: str) -> Rows:
    rows: dict[str, list[float | None]] = {}
    for row in _int8(runtime):
        rows.setdefault(row["network"], []).append(float(row["latency_ms"]))
    return {**rows}


def _int8(runtime: str) -> list[dict[str, str]]:
    return [row for row in lines("int8_ranges/results.csv") if row["runtime"] == runtime and row["top1"]]


def _beside_nncf(runtime: str) -> Rows:
    """Top-1 of fp32, points that our file and NNCF's lose, and milliseconds of the three."""
    rows: Rows = {}
    for name, of in pd.read_csv(EXPERIMENTS / "int8_ranges/beside_nncf.csv").groupby("network", sort=False):
        here = of[(of.runtime == runtime) & of.top1.notna()].set_index("way")  # without those that it refused
        lost = 100 * (here.top1["fp32"] - here.top1.drop("fp32"))
        rows[str(name)] = [100 * float(here.top1["fp32"]), *map(float, lost), *map(float, here.latency_ms)]
    return rows


def _validation(host: str) -> Rows:
    rows: Rows = {}
    for of, path in _reports(host):
        label = path.name.partition(".")[0]
        if host == EPYC:
            label = label.replace("ort_", "onnxruntime_").replace("ov_", "openvino_")
        shares = ("within_5", "within_10", "mean_error", "spearman", "kendall", "coverage", "median_half_width",
                  "ceiling_within_5", "ceiling_within_10", "ceiling_mean", "within_5_by_reference",
                  "within_10_by_reference", "within_5_absolute", "within_10_absolute")
        figures = [of[key] if key in ("spearman", "kendall") else 100 * of[key] for key in shares]
        quiet = [of["n_invalid"], 100 * (of["reference"]["ratio"] - 1)] if host == EPYC else []
        rows[label] = [of["n"], *figures, *quiet]
    return rows


def _taus(device: str, *others: str) -> list[float]:
    """Of a device of experiments/devices, by a part of its name, with all whose names have a part of `others`."""
    return [float(row["tau"]) for row in lines("devices/devices.csv")
            if device in row["first"] and any(other in row["second"] for other in others)]


def _ends(values: list[float]) -> list[float]:
    return [min(values), max(values)]


def _hours_later() -> Rows:
    """By target, image size and day: networks, per cent within 5 and 10 %, within 5 % by the panel alone, mean error,
    coverage by third of the predicted latencies, median half-width, the ceiling between sessions, how far the reference
    stood off, hours."""
    rows: Rows = {}
    held = pd.read_csv(EXPERIMENTS / "sessions" / "hours_later.csv")
    for (target, table, measured_at), of in held.groupby(["target", "table", "measured_at"]):
        off = 100 * (of.predicted_ms / of.measured_ms - 1).abs()
        by_panel = 100 * (of.panel_ms / of.measured_ms - 1).abs()
        inside = (of.low_ms <= of.measured_ms) & (of.measured_ms <= of.high_ms)
        thirds = pd.qcut(of.predicted_ms.rank(method="first"), 3, labels=False)
        hours = (pd.Timestamp(measured_at) - pd.Timestamp(of.table_created.iloc[0])).total_seconds() / 3600
        half = 100 * ((of.high_ms - of.low_ms) / 2 / of.predicted_ms).median()
        rows[f"{target} {table.split('-')[4]}, {measured_at[8:13].replace('T', ' at ')}h"] = [
            len(of), 100 * (off <= 5).mean(), 100 * (off <= 10).mean(), 100 * (by_panel <= 5).mean(), off.mean(),
            *(100 * inside[thirds == third].mean() for third in range(3)), half, 100 * of.ceiling_within_5.iloc[0],
            100 * (of.reference_ratio.iloc[0] - 1), hours]
    return rows


def _refined() -> Rows:
    """By network and search: networks; mean error in per cent by the table alone and refined by the searches before;
    the same after each search is levelled by its median."""
    rows: Rows = {}
    held = pd.read_csv(EXPERIMENTS / "sessions" / "refined.csv")
    for (network, before), of in held.groupby(["network", "searches_before"]):
        ratios = [of[name] / of.measured_ms for name in ("table_ms", "refined_ms")]
        rows[f"{network}, {before + 1}"] = [
            len(of), *(100 * (ratio - 1).abs().mean() for ratio in ratios),
            *(100 * (ratio / ratio.median() - 1).abs().mean() for ratio in ratios)]
    return rows


def _deployments() -> Rows:
    """By data set and seed: hypervolumes of the set, of each target alone and of both together, the set's over the best
    one's, networks verified by each, how many on the set's front are of LiteRT, of OpenVINO's bf16, and of the others;
    seconds of calibration and of the race of each."""
    rows: Rows = {}
    held = document("deployments/summary.json")
    arms = ("set", "edge_int8", "openvino_bf16")
    for name, of in held["compared"].items():
        front = of["front_of_the_set"]
        data, _, seed = name.rpartition("-")
        named = [front.get("edge_int8", 0), front.get("openvino_bf16", 0)]
        rows[f"{data}, {seed}"] = [
            *(of["hypervolume"][arm] for arm in (*arms, "together")), held["judged"][data]["set_over_best"][int(seed)],
            *(of["networks"][arm] for arm in arms), *named, sum(front.values()) - sum(named),
            *(of[part][arm] for part in ("calibration_s", "race_s") for arm in arms)]
    return rows


def _benchmark_app() -> Rows:
    """By file: turns in which both tools gave a number; medians of their p50 in ms, and ours over theirs."""
    rows: Rows = {}
    held = pd.read_csv(EXPERIMENTS / "deployments" / "benchmark_app.csv").dropna()
    for file, of in held.groupby("model"):
        ours, theirs = of.ours_p50_ms.median(), of.benchmark_app_p50_ms.median()
        rows[str(file).removesuffix(".onnx").replace("/", ", ")] = [len(of), ours, theirs, ours / theirs]
    return rows


def _under_load() -> Rows:
    """By network, deployment, batch and streams: saturation; at 50, 70 and 90 % of it p99 as predicted and as measured
    twice, in ms."""
    rows: Rows = {}
    held = pd.read_csv(EXPERIMENTS / "choose" / "load.csv")
    for (id_, target, batch, streams), of in held.groupby(["id", "target", "batch", "streams"]):
        figures = of.sort_values("share")[["predicted_p99_ms", "measured_p99_ms", "again_p99_ms"]].to_numpy().ravel()
        rows[f"{id_.split('-')[0]} {target}, {batch}, {streams}"] = [of.saturation.iloc[0], *figures.tolist()]
    return rows


def _load_within(file: str = "load.csv") -> Rows:
    """By share of saturation: of all configurations how many LoadGen called VALID; of those, per cent for which the
    prediction is within 15 % of the mean of both measurements, and within a factor of 2; the same for a textbook's
    queue, ln(100) / (saturation - rate), or for a line through LoadGen's own loads where that was kept; the same for
    the second measurement beside the first; medians of predicted over mean, and of the larger over the smaller
    measurement."""
    rows: Rows = {}
    for share, of in pd.read_csv(EXPERIMENTS / "choose" / file).groupby("share"):
        valid = of[of.valid]
        both = valid[["measured_p99_ms", "again_p99_ms"]]
        ratio, again = valid.predicted_p99_ms / both.mean(axis=1), valid.again_p99_ms / valid.measured_p99_ms
        other_ms = valid.line_p99_ms if "line_p99_ms" in valid else 1e3 * np.log(100) / (valid.saturation - valid.rate)
        rows[f"{share:.0%} of saturation"] = [
            len(of), len(valid), *(100 * ((each - 1).abs() <= 0.15).mean() if near else
                                   100 * (np.log(each).abs() <= np.log(2)).mean()
                                   for each in (ratio, other_ms / both.mean(axis=1), again) for near in (True, False)),
            ratio.median(), (both.max(axis=1) / both.min(axis=1)).median()]
    return rows


def _kinds() -> Rows:
    """By network: its size, and top-1 in fp32 and in each deployment."""
    return {f"{of['id']}, {int(of['macs']) / 1e6:.1f} M MACs": numbers(
        of, "fp32", "openvino_bf16", "openvino_int8", "ort_int8", "edge_int8", times=100)
            for of in lines("deployments/kinds.csv")}


def _edge_validation() -> Rows:
    rows: Rows = {}
    for path in sorted((EXPERIMENTS / "edge").glob("*.summary.json")):
        of = document(f"edge/{path.name}")
        shares = [100 * of[key] for key in ("within_5", "within_10", "mean_error")]
        rows[path.name.partition(".")[0]] = [of["n"], *shares, of["spearman"], 100 * of["coverage"],
                                             100 * of["median_half_width"], of["n_invalid"]]
    return rows


def _edge_fronts() -> Rows:
    """By search and network: top-1 and points lost, measured and predicted ms, share of equal classes."""
    rows: Rows = {}
    for name, title in EDGE_RUNS.items():
        same = {row["id"]: 100 * float(row["same"]) for row in lines(f"edge/{name}/parity.csv")
                if row["precision"] == "int8"}
        for row in lines(f"edge/{name}/front.csv"):
            int8, fp32 = numbers(row, "top1_test", "top1_test_fp32", times=100)
            predicted = [float(row["latency_ms_predicted"])] if row["latency_ms_predicted"] else []
            rows[f"{title}: {row['id']}"] = [int8, fp32 - int8, float(row["latency_ms"]), *predicted, same[row["id"]]]
    return rows


def _edge_lost() -> list[tuple[float, str]]:
    """Points that int8 lost, and whether a finalist, a baseline or a control did."""
    return [(float(np.subtract(*numbers(row, "top1_test_fp32", "top1_test", times=100))),
             "baseline" if row["is_baseline"] == "true" else "control" if row["is_control"] == "true" else "finalist")
            for name in EDGE_RUNS for row in lines(f"edge/{name}/front.csv")]


def _edge_beats(name: str) -> list[float]:
    """Points of top-1 above the random networks drawn for a search, with their interval."""
    told = next(each for each in document(f"edge/{name}/comparisons.json") if each["baseline"] == "controls")
    return [100 * told[key] for key in ("difference", "low", "high")]


def _reports(*hosts: str) -> list[tuple[Mapping[str, Any], Path]]:
    folder = EXPERIMENTS / "latency_validation"
    paths = [path for host in hosts for path in sorted((folder / host).glob("*.summary.json"))]
    return [(document(str(path.relative_to(EXPERIMENTS))), path) for path in paths]


def _covered() -> list[float]:
    reports = [of for of, _ in _reports(EPYC)]
    n = sum(of["n"] for of in reports)
    return [100 * sum(of["n"] * of["coverage"] for of in reports) / n, n]


def _marks_met() -> list[float]:
    reports = [of for of, _ in _reports(EPYC, XEON)]
    return [sum(all(_meets(of, *mark) for mark in GOALS) for of in reports), len(reports)]


def _meets(of: Mapping[str, Any], name: str, low: float, high: float, ceiling: str) -> bool:
    """Whether a figure lies from `low` to `high`; where the noise ceiling is lower, two points below it are enough."""
    if ceiling and of[ceiling] < low:
        low = of[ceiling] - 0.02
    return bool(low <= of[name] <= high)


def _slowest() -> list[float]:
    """The six least coverages of a slowest quarter: the least and the largest of them."""
    least = sorted(100 * of["quantiles"][-1]["coverage"] for of, _ in _reports(EPYC, XEON))[:6]
    return [least[0], least[-1]]


def _errors(predicted: np.ndarray, measured: np.ndarray) -> list[float]:
    """Mean error, shares within 5 and 10 %: per cent."""
    error = np.abs(predicted / measured - 1)
    return [100 * float(value) for value in (error.mean(), (error <= 0.05).mean(), (error <= 0.1).mean())]


def _column(path: str, name: str, only: Callable[[Mapping[str, str]], bool] = lambda row: True) -> np.ndarray:
    return np.array([float(row[name] or "nan") for row in lines(path) if only(row)])


def _peers() -> Rows:
    path = "latency_peers/results/peers.csv"
    compared, measured = _column(path, "compared") == 1, _column(path, "measured_ms")
    rows: Rows = {"noise ceiling": [None] * 4}
    for name in list(lines(path)[0])[4:]:
        ms = _column(path, name)
        mean, within_5, within_10 = _errors(ms[compared], measured[compared])
        every = _errors(ms, measured) if np.isfinite(ms).all() and not name.startswith("isolated") else []
        rows[name] = [mean, within_5, within_10, float(spearman(ms[compared], measured[compared])),
                      float(kendall_tau(ms[compared], measured[compared])), None, *every[::2]]
    return rows


def _regressors() -> Rows:
    rows: Rows = {}
    for method in ("ridge", "gradient boosting", "Gaussian process", "ours"):
        own = [row for row in lines("latency_peers/results/regressors.csv") if row["method"] == method]
        apart = [float(row["behind_ours"]) / max(float(row["standard_error"]), 1e-9) for row in own]
        rows[method] = [*(float(np.mean([scale * float(row[name]) for row in own])) for name, scale in (
            ("mean_error", 100), ("within_5", 100), ("within_10", 100), ("spearman", 1))),
            *([] if method == "ours" else [sum(each > 2 for each in apart), sum(each < -2 for each in apart)])]
    return rows


def _draws() -> pd.DataFrame:
    return pd.read_csv(EXPERIMENTS / "latency_transfer" / "results" / "transfer.csv")


def _transfer() -> Rows:
    """By runtime, precision and size: tables; mean errors from scratch, with a start that was taken of random and of
    telling networks; and of the table where the last errs most. None where some tables have too few networks."""
    told = taken_error(_draws())
    told["kind"] = told.table.str.replace(r"-t1-b1-(\d+)px.*", r" \1px", regex=True)
    rows: Rows = {}
    for kind, own in told.groupby("kind"):
        tables = len(own.groupby(["host", "table"]))
        row: list[float] = [tables]
        for n in (10, 20, 50):
            if len(own[own.n == n].groupby(["host", "table"])) < tables:
                continue
            random, telling = (own[(own.n == n) & (own.chosen == chosen)] for chosen in ("random", "telling"))
            by_table = telling.groupby(["host", "table"]).mean_error.mean()
            row += [100 * float(value) for value in (random.scratch.mean(), random.mean_error.mean(),
                                                     telling.mean_error.mean(), by_table.max())]
        rows[str(kind)] = row
    return rows


def _predicted_in_searches() -> list[float]:
    """Networks that searches predicted and then verified: how many, and their shares in intervals and within 5 %."""
    rows = pd.read_csv(EXPERIMENTS / "sessions" / "searches.csv")
    inside = (rows.low_ms <= rows.measured_ms) & (rows.measured_ms <= rows.high_ms)
    half = ((rows.high_ms - rows.low_ms) / 2 / rows.predicted_ms).median()
    return [len(rows), *(100 * float(value) for value in (
        inside.mean(), half, ((rows.predicted_ms / rows.measured_ms - 1).abs() <= 0.05).mean()))]


def _measured_transfer() -> Rows:
    """By target: mean error with a start and from scratch, shares within 5 and 10 % and in intervals, half-width."""
    held = pd.read_csv(EXPERIMENTS / "latency_transfer" / "results" / "measured.csv")
    rows: Rows = {}
    for target, own in held.groupby("target"):
        errors, scratch = ((own[name] / own.measured_ms - 1).abs() for name in ("predicted_ms", "scratch_ms"))
        inside = (own.low_ms <= own.measured_ms) & (own.measured_ms <= own.high_ms)
        half = ((own.high_ms - own.low_ms) / 2 / own.predicted_ms).median()
        rows[str(target)] = [100 * float(value) for value in (
            errors.mean(), scratch.mean(), (errors <= 0.05).mean(), (errors <= 0.1).mean(), inside.mean(), half)]
    return rows


def _within_asked() -> list[float]:
    """Of all tables at ten telling networks: mean error, how many have 5 % at most, how many there are."""
    told = taken_error(_draws())
    means = told[(told.n == 10) & (told.chosen == "telling")].groupby(["host", "table"]).mean_error.mean()
    scratch = told[(told.n == 10) & (told.chosen == "random")].scratch
    return [100 * float(means.mean()), 100 * float(scratch.mean()), int((means <= 0.05).sum()), len(means)]


def _harm_of_transfer() -> list[float]:
    draws = _draws()
    tables, control = (draws[draws.start == start] for start in ("tables", "control"))
    return [int(tables.taken.sum()), len(tables), int(harmed(tables).sum()), int(control.taken.sum()), len(control),
            int(harmed(control).sum())]


def _contests() -> Rows:
    rows: Rows = {}
    for table in TABLES:
        for name, sampler in SAMPLERS.items():
            mean = [_sampler(table, sampler, f"mean_{mark}") for mark in MARKS]
            error = [_sampler(table, sampler, f"error_{mark}") for mark in MARKS]
            if np.isfinite(mean[0]):
                rows[f"{table.replace('_', ' ')}: {name}"] = [100 * figure for pair in zip(mean, error, strict=True)
                                                               for figure in pair if np.isfinite(figure)]
    return rows


def _asked() -> Rows:
    def pairs(mine: int, theirs: int) -> list[float]:
        return [100 * value for table in TABLES for value in (_sampler(table, "hwnas", f"mean_{mine}"), float(np.nanmax(
            [_sampler(table, sampler, f"mean_{theirs}") for sampler in OPTUNA])))]

    return {f"ours at {mine} ≥ Optuna's best at {theirs}": pairs(mine, theirs)
            for mine, theirs in ((100, 250), (100, 400), (50, 200))}


def _wide(sampler: str) -> list[float]:
    return [100 * _sampler(table, sampler, "mean_100", wide=True) for table in TABLES]


def _lost(folder: str, variant: str) -> list[float]:
    """Points lost and their standard error after 25, 50 and 100."""
    row = next(row for row in lines(f"sampler_ablation/results/{folder}/summary.csv") if row["variant"] == variant)
    return [times * float(row[f"{key}_{mark}"])
            for mark in EARLY for key, times in (("difference", -100), ("error", 100))]


def _together(folder: str) -> list[float]:
    """The sampler without two parts against the whole, seed by seed."""
    def shares(of: str, mark: int) -> dict[str, float]:
        return {row["seed"]: float(row["hv_share"])
                for row in lines(f"sampler_ablation/results/twenty_seeds/{of}/ablation.csv")
                if row["sampler"] == "whole" and row["evals"] == str(mark)}

    figures: list[float] = []
    for mark in EARLY:
        whole, without = shares(folder, mark), shares(f"{folder}_without_two", mark)
        figures += _mean_and_error(np.array([100 * (whole[seed] - without[seed]) for seed in whole]))
    return figures


def _mean_and_error(values: np.ndarray) -> list[float]:
    return [float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))]


def _twenty_seeds() -> Rows:
    def whole(folder: str) -> list[float]:
        row = lines(f"sampler_ablation/results/twenty_seeds/{folder}/summary.csv")[0]
        return numbers(row, *(f"mean_{mark}" for mark in EARLY), times=100)

    rows: Rows = {"(the whole sampler, %)": whole("raspi4") + whole("macro_noisy"),
                  "both that go out, together": _together("raspi4") + _together("macro_noisy"),
                  "the same on raspi4, noisy": _together("raspi4_noisy")}
    for label in ("the kernel's linear part", "random candidates", "crossings of evaluated networks",
                  "calibration of the model's errors"):
        rows[label] = [figure for folder in ("raspi4", "macro_noisy")
                       for figure in _lost(f"twenty_seeds/{folder}", PARTS[label])]
    rows["told noise (raspi4: drawn, see the rule; the whole: 75.4, 87.2, 91.2)"] = [
        *_lost("twenty_seeds/raspi4_noisy", "noise_untold"), *_lost("twenty_seeds/macro_noisy", "noise_untold")]
    return rows


def _ablation(folder: str) -> Rows:
    variants = {row["variant"] for row in lines(f"sampler_ablation/results/{folder}/summary.csv")}
    features = "features" if folder == "noise" else "features (latency, counts of values)"
    return {label: _lost(folder, variant) for label, variant in PARTS.items()
            if variant in variants and (variant != "no_features" or label == features)}


def _large() -> Rows:
    by: dict[str, dict[str, dict[str, str]]] = {}
    for row in lines("sampler_ablation/results/large/large.csv"):
        by.setdefault(row["variant"], {})[row["seed"]] = row
    return {label: [figure for mark in EARLY for figure in _mean_and_error(np.array(
        [float(by["whole"][seed][f"hv_{mark}"]) - float(row[f"hv_{mark}"]) for seed, row in by[variant].items()]))]
        for label, variant in PARTS.items() if variant in by}


def _macro() -> Rows:
    rows: Rows = {}
    for name, file in (("OpenVINO int8", "epyc_int8"), ("ONNX Runtime fp32", "ort_fp32")):
        held = document(f"macro_latency/results/{file}.json")["measured"]["held_out"]
        for label, group, front in (("all measured", "all", [None, None]), ("random ones", "random", [])):
            of = held[group]
            rows[f"{name}: {label}"] = [of["n"], 100 * of["within_5"], 100 * of["within_10"], 100 * of["mean_error"],
                                        of["spearman"], 100 * of["coverage"], 100 * of["ceiling_mean"], *front]
    return rows


def _searches() -> Rows:
    rows: Rows = {}
    for label, other, folder in (("default proxy of then (128 steps of 32)", "default proxy of then", "default"),
                                 ("longer proxy (400 steps)", "longer proxy", "longer_proxy")):
        summary = document(f"sampler_search/results/{folder}/summary.json")
        reached = summary["to_equal_hypervolume"][summary["reference"]["is"]]
        ends = ((f"{label}: hwnas", [reached[0]["evaluations"][0], summary["budget"], reached[0]["seconds"][0]]),
                (f"{other}: NSGA-II (population 10)", [100 * reached[1]["ended_at"][0]]))
        for (name, end), search, front in zip(ends, summary["searches"], summary["verified"][0]["fronts"], strict=True):
            rows[name] = [*end, search["hypervolume"], search["seconds"],
                          search["asking_seconds"] / search["trials"]["evaluated"], front["hypervolume"],
                          front["hypervolume_std"], front["on_joint_front"], front["finalists"]]
    return rows


def _front_ends(folder: str) -> list[float]:
    """Top-1 (per cent) and latency of each sampler's most accurate finalist."""
    fronts = document(f"sampler_search/results/{folder}/summary.json")["verified"][0]["fronts"]
    told = [re.search(r"finalist \w+ ([\d.]+) % in ([\d.]+) ms", front["against_baselines"][-1]) for front in fronts]
    return [float(figure) for match in told if match for figure in match.groups()]


def _workers() -> Rows:
    labels = {("sqlite", "hwnas", "1"): "1 worker, SQLite", ("sqlite", "hwnas", "4"): "4 workers, SQLite",
              ("postgresql", "hwnas", "4"): "4 workers, PostgreSQL", ("sqlite", "random", "1"): "random, 1 worker"}
    rows: Rows = {}
    for row in lines("many_workers/results/workers.csv"):
        columns = ("half", "half_error", "share", "share_error", "against_one", "against_one_error", "duplicates_share")
        shares = [column for column in columns if row[column]]
        rows[labels[row["storage"], row["sampler"], row["workers"]]] = [*numbers(row, *shares, times=100),
                                                                         *numbers(row, "lost", "seconds")]
    return rows


def _believed() -> Rows:
    columns = ("tau_raw", "tau_believed", "regret_raw", "regret_believed")
    groups: dict[str, list[Mapping[str, str]]] = {}
    for row in lines("posterior_choice/results/choice.csv"):
        groups.setdefault(f"{row['table']}, {row['sampler']}, {row['networks']}", []).append(row)
    rows: Rows = {}
    for name, group in groups.items():
        apart = np.array([float(row["regret_believed"]) - float(row["regret_raw"]) for row in group])
        means = [float(np.mean([float(row[column]) for row in group])) for column in (*columns, "inside")]
        rows[name] = [*means[:4], float(apart.mean()), float(apart.std(ddof=1) / len(apart) ** 0.5), 100 * means[4]]
    return rows


HOUR = {"EuroSAT, Lite0": "eurosat_lite0", "TrashNet, Lite0": "trashnet_lite0",
        "EuroSAT, MobileNetV2": "eurosat_mobilenetv2",
        "EuroSAT, six minutes, fp32, MobileNetV1": "eurosat_mobilenetv1_six",
        "EuroSAT without VNNI, Lite0": "eurosat_lite0_narrow",
        "EuroSAT without VNNI, zoo": "eurosat_zoo",
        "EuroSAT, sixty minutes, Lite0": "eurosat_lite0_hour", "EuroSAT, two hours, Lite0": "eurosat_lite0_two_hours",
        "EuroSAT, sixty minutes, saturated, Lite0": "eurosat_lite0_hour_saturated",
        "EuroSAT with children, Lite0": "eurosat_lite0_children"}
THIRDS = ("fast", "middle", "slow")


def _saturation() -> Rows:
    """Top-1 in per cent of each network in fp32, and exact and deployed with weights of 8 and of 7 bits."""
    rows: dict[str, list[float]] = {}
    for row in lines("saturation/results.csv"):
        arm = {"ours": "race", "obvious": "obvious"}[row["arm"]]
        figures = rows.setdefault(f"{arm}, {row['id']} at {row['px']} px", numbers(row, "top1_fp32", times=100))
        figures += numbers(row, "top1_exact", "top1_deployed", times=100)
    return rows


def _cut_and_searched() -> list[float]:
    rows = sorted(lines("pretrained_cuts/front.csv"), key=lambda row: row["is_baseline"] == "false")
    cut, *searched = [(100 * float(row["top1_test"]), float(row["latency_ms"])) for row in rows]
    return [*cut, *(top1 for top1, _ in searched), *(latency for _, latency in searched)]


LENGTHS = ("eurosat_lite0_narrow", "eurosat_lite0_hour", "eurosat_lite0_two_hours")


def _load() -> list[float]:
    """Per cent of a core that the arms of two hours had in the mean, and the minutes after which it was read."""
    rows = [numbers(row, "processor_s", "elapsed_s") for row in lines("hour/results/eurosat_lite0_two_hours/load.csv")]
    return [100 * float(np.mean([used / elapsed for used, elapsed in rows])), rows[0][1] / 60]


def _two_hours() -> list[float]:
    told = hour("eurosat_lite0_two_hours")
    fast, middle, _ = told["times_as_fast"]["ours"]
    best, rival = (told["most_accurate"][arm][0] for arm in ("ours", "obvious"))
    return [told["minutes"]["obvious"][0], told["minutes"]["ours"][0], fast["value"], middle["value"],
            *(part[end] for part in (fast, middle) for end in ("low", "high")),
            *(part["value"] for part in told["points_ahead"]["ours"]),
            *(each["times_as_fast"] for each in told["as_fast_at"]["ours"][0][:4]),
            100 * rival["top1"], rival["latency_ms"], 100 * best["top1"], best["latency_ms"],
            told["as_fast_as_whole"]["ours"][0]["times_as_fast"]]


def _level(name: str) -> list[float]:
    """Mean best top-1 of the race in each third, per cent."""
    level: list[float] = hour(name)["level"]["ours"][0]
    return level


def _hour() -> Rows:
    """In each third: times as fast as the obvious cuts and points ahead, with intervals and what could be seen."""
    rows: Rows = {}
    for label in HOUR:
        told = hour(HOUR[label])
        for name in told["times_as_fast"]:
            for third, fast, ahead in zip(THIRDS, told["times_as_fast"][name], told["points_ahead"][name], strict=True):
                figures = [part[key] for part in (fast, ahead) for key in ("value", "low", "high", "could_be_seen")]
                rows[f"{label}, {name}, {third}"] = [figure for figure in figures if figure is not None]
    return rows


def _rounding() -> Rows:
    """Points of top-1 by seed: lost to int8, and won by its rounding in the last steps."""
    told = document("rounding/summary.json")
    thirds = {f"won in the {third} third": [seed[at] for seed in told["thirds"]] for at, third in enumerate(THIRDS)}
    return {"lost to int8, without": told["lost"]["without"], "lost to int8, with": told["lost"]["with"],
            "won on networks of both": told["same"], **thirds}


def _lost_line_by_line(rounded: str) -> list[float]:
    """Points that int8 cost networks whose last steps saw its rounding, or did not."""
    return [100 * (float(row["top1_test_fp32"]) - float(row["top1_test"]))
            for row in lines("rounding/line_by_line.csv") if row["rounded"] == rounded]


def _from_scratch() -> Rows:
    """Most accurate networks by seed, and the race's lead by third: its mean, interval, and what could be seen."""
    told = document("from_scratch/results/fashion_mnist/summary.json")
    best = {f"most accurate, {name}": [100 * top1 for top1 in each] for name, each in told["most_accurate"].items()}
    leads = {f"race ahead, {third} third": [*(seed[at] for seed in told["points_ahead_by_seed"]),
                                            *told["points_ahead"][at].values()] for at, third in enumerate(THIRDS)}
    return {**best, **leads}


def _more_steps() -> list[float]:
    """Steps of carried above those of ours, in per cent, by seed."""
    steps: dict[tuple[str, str], float] = {}
    for row in lines("hour/results/eurosat_lite0_children/lines.csv"):
        key = row["seed"], row["arm"]
        steps[key] = steps.get(key, 0.0) + float(row["steps"] or 0)
    return [100 * (steps[seed, "carried"] / steps[seed, "ours"] - 1) for seed in sorted({seed for seed, _ in steps})]


def _most_accurate() -> list[float]:
    """Top-1 and ms of the race's most accurate network on TrashNet by seed; the rival's top-1, and ends of its ms."""
    best = hour("trashnet_lite0")["most_accurate"]
    return [*(figure for each in best["ours"] for figure in (100 * each["top1"], each["latency_ms"])),
            *(100 * each["top1"] for each in best["obvious"]),
            *_ends([each["latency_ms"] for each in best["obvious"]])]


def _short_races() -> list[float]:
    """Fewest and most lines of a race on TrashNet, and steps of the whole network."""
    rows = lines("hour/results/trashnet_lite0/lines.csv")
    whole = [float(row["steps"]) for row in rows if row["number"] == "0"]
    counts = [float(sum(row["seed"] == seed for row in rows)) for seed in {row["seed"] for row in rows}]
    return [*_ends(counts), *_ends(whole)]


def _any_baseline() -> Rows:
    return {row["network"]: [float(row["seconds"]), float(row["parameters"]), float(row["macs_whole"]) / 1e6,
                             float(row["macs_cut"]) / 1e6, float(row["ms_whole"]), float(row["ms_cut"])]
            for row in lines("any_baseline/results.csv") if row["ms_cut"]}


def _small_searches() -> Rows:
    return {row["network"]: [float(row[key]) for key in (
        "seconds", "verified", "networks", "on_front", "fastest_ms", "slowest_ms")]
        for row in lines("any_baseline/searches.csv")}


def _lossless() -> Rows:
    """How many cuts of what says nothing changed no answer, and of how many: of ties, then of runs."""
    told: dict[str, list[float]] = {}
    rows = [row for row in lines("any_baseline/lossless.csv") if row["loss"]]
    for name in dict.fromkeys(row["network"] for row in rows):
        for is_run in (False, True):
            losses = [float(row["loss"]) for row in rows
                      if row["network"] == name and bool(row["idle_blocks"]) is is_run]
            told.setdefault(name, []).extend([float(sum(loss < 1e-4 for loss in losses)), float(len(losses))])
    return told


def _family_model() -> Rows:
    """Of each network: within 5 and 10 %, mean error, that of before, covered; by MACs; held out; seconds of a cut."""
    frame, before_ms = (pd.read_csv(EXPERIMENTS / f"any_baseline/{name}.csv") for name in (
        "family_model", "family_model_before"))
    frame = frame.merge(before_ms, how="left", on=["network", "id"], validate="one_to_one")
    rows: Rows = {}
    for name, of in frame.groupby("network", sort=False):
        own, macs, before = (np.abs(of[key] / of.measured_ms - 1) for key in (
            "predicted_ms", "by_macs_ms", "before_ms"))
        inside = (of.low_ms <= of.measured_ms) & (of.measured_ms <= of.high_ms)
        rows[str(name)] = [*(100 * float(each) for each in (
            (own <= 0.05).mean(), (own <= 0.10).mean(), own.mean(), before.mean(), inside.mean(),
            (macs <= 0.05).mean(), macs.mean(), of.held_out_within_5.iloc[0], of.held_out_mean.iloc[0])),
            float(of.seconds_each.iloc[0])]
    return rows


def _importance() -> Rows:
    """Mean top-1 of each cut, and the lead over `weights` with its interval, of both data sets."""
    told: dict[str, list[float]] = {}
    for data in ("eurosat", "trashnet"):
        rows = [row for row in lines(f"importance/{data}.csv") if row["arm"]]
        top1 = {(row["arm"], row["cut"], row["seed"]): 100 * float(row["top1_after"]) for row in rows}
        pairs = list(dict.fromkeys((row["cut"], row["seed"]) for row in rows))
        for arm in dict.fromkeys(row["arm"] for row in rows):
            leads = np.array([top1[arm, *pair] - top1["weights", *pair] for pair in pairs])
            half = student_t(0.975, len(leads) - 1) * float(leads.std(ddof=1)) / len(leads) ** 0.5
            told.setdefault(arm, []).extend([
                *(float(np.mean([top1[arm, *pair] for pair in pairs if pair[0] == cut]))
                  for cut in dict.fromkeys(cut for cut, _ in pairs)),
                *([] if arm == "weights" else [leads.mean(), leads.mean() - half, leads.mean() + half])])
    return told


def _classifier_start() -> Rows:
    """Mean top-1 of each arm over seeds, then the least and the most that torch's values are ahead of timm's by."""
    rows = [row for name in ("mobilenetv2_100", "tf_efficientnet_lite0")
            for row in lines(f"classifier_start/{name}.csv")]
    top1 = {(row["network"], row["cut"], row["steps"], row["arm"], row["seed"]): 100 * float(row["top1"])
            for row in rows}
    told = {}
    for case in dict.fromkeys((row["network"], row["cut"], row["steps"]) for row in rows):
        arms = {arm: [value for key, value in top1.items() if key[:4] == (*case, arm)]
                for arm in ("timm", "torch", "zero")}
        ahead = [torch - timm for torch, timm in zip(arms["torch"], arms["timm"], strict=True)]
        told[" ".join(case)] = [*(float(np.mean(values)) for values in arms.values() if values), min(ahead), max(ahead)]
    return told


def _cut_by_tracing() -> Rows:
    """How many networks, and their best top-1 at no more MACs, in fp32 and in int8, in the mean over MACs."""
    told: dict[str, list[float]] = {}
    rows = lines("cut_by_tracing/mobilenetv2_eurosat.csv")
    for seed in dict.fromkeys(row["seed"] for row in rows):
        arms = {arm: [row for row in rows if (row["seed"], row["arm"]) == (seed, arm)] for arm in ("words", "tracing")}
        macs = {arm: np.array([float(row["macs"]) for row in of]) for arm, of in arms.items()}
        grid = np.geomspace(max(each.min() for each in macs.values()), min(each.max() for each in macs.values()), 50)
        for arm, of in arms.items():
            told[f"{seed}, {arm}"] = [float(len(of)), *(100 * float(np.mean([max(
                float(row[column]) for row in of if float(row["macs"]) <= 1.03 * at) for at in grid]))
                for column in ("top1_test_fp32", "top1_test"))]
    return told


def _mobilenetv1_by_tracing() -> Rows:
    """Networks, best top-1, and the mean of the best top-1 at no more latency, in thirds of what both arms have."""
    told: Rows = {}
    for seed, of in pd.read_csv(EXPERIMENTS / "cut_by_tracing/mobilenetv1_eurosat.csv").groupby("seed"):
        arms = {arm: of[of.arm == arm] for arm in ("words", "tracing")}
        edges = np.linspace(*np.log([max(each.latency_ms.min() for each in arms.values()),
                                     min(each.latency_ms.max() for each in arms.values())]), 4)
        for arm, each in arms.items():
            told[f"{seed}, {arm}"] = [float(len(each)), 100 * float(each.top1_test.max()), *(100 * levels(
                each.latency_ms.to_numpy(), each.top1_test.to_numpy(), edges, 0.1))]
    return told


def _moves() -> Rows:
    """Latency, top-1, and where sizes lie on both sides the gap with its error."""
    return {row["move"]: [float(row["latency_ms"]), 100 * float(row["top1"]),
                          *(100 * float(row[key]) for key in ("gap", "error") if row[key])]
            for row in lines("moves/eurosat_lite0.csv")}


def _against_random() -> Rows:
    told = document("against_random/results/summary.json")
    controls = told["over_controls_points"]
    return {name: [told["trials"][name], told["hypervolume"][name],
                   *(controls[name][end] for end in ("value", "low", "high"))] for name in told["trials"]}


def _against_random_networks() -> Rows:
    return {f"{row['sampler']}, {row['id']}": [100 * float(row["top1_test"]), float(row["latency_ms"])]
            for row in lines("against_random/results/networks.csv") if row["verified"] == "True"}


def _int8_by_weights() -> Rows:
    """Points of top-1 lost by network, with the average and with the last weights."""
    rows: dict[str, list[float]] = {}
    for row in lines("full_training/results/int8.csv"):
        top1 = [100 * float(row[key]) for key in ("top1_fp32", "top1_int8")]
        rows.setdefault(row["network"], []).extend([top1[0], top1[0] - top1[1]])
    return {**rows}


def _looked_twice() -> Rows:
    groups: dict[str, list[Mapping[str, str]]] = {}
    for row in lines("posterior_choice/results/second.csv"):
        groups.setdefault(f"{row['table']}, {row['sampler']}, {row['evaluations']}", []).append(row)
    rows: Rows = {}
    for name, group in groups.items():
        both = np.array([[float(row[key]) for key in ("regret_others", "regret_again")] for row in group])
        apart = both[:, 1] - both[:, 0]
        rows[name] = [*map(float, both.mean(axis=0)), float(apart.mean()),
                      float(apart.std(ddof=1) / len(apart) ** 0.5)]
    return rows


def _kept_weights() -> Rows:
    """Mean top-1 over networks by kind of weights, per cent; in the last row the gain over the average."""
    rows: dict[str, dict[str, list[float]]] = {}
    for row in lines("full_training/results/weights.csv"):
        kinds = rows.setdefault(f"{row['data']}, {row['steps']}", {})
        kinds.setdefault(row["kind"], []).append(100 * float(row["top1"]))
    means: Rows = {name: [float(np.mean(kinds[kind])) for kind in KINDS] for name, kinds in rows.items()}
    return means


def _tuned(row: Mapping[str, str], part: str) -> float:
    """Top-1 in per cent of the weights that validation chooses, on the images of `part`."""
    last, average = (float(row[f"validation_{kind}"]) for kind in ("last", "average"))
    return 100 * float(row[f"{part}_{'last' if last > average else 'average'}"])


def _tuning_tries() -> Rows:
    """Validation top-1 of the first seed, by what was changed; last what the mean gains."""
    tries: dict[str, dict[str, float]] = {}
    for row in lines("fine_tuning/trials.csv"):
        if row["seed"] == "0":
            tries.setdefault(row["tried"], {})[row["data"]] = _tuned(row, "validation")
    reached = {tried: [of[data] for data in TUNING_SETS] for tried, of in tries.items() if {*TUNING_SETS} <= {*of}}
    return {tried.replace(",", ", ") or "nothing": [*values, float(np.mean(values) - np.mean(reached[""]))]
            for tried, values in reached.items()}


def _tuning_pairs(part: str) -> dict[str, list[tuple[float, float]]]:
    """Top-1 before and after, a pair for each further seed, by network and data set."""
    held = {(row["network"], row["data"], row["seed"], row["tried"]): _tuned(row, part)
            for row in lines("fine_tuning/trials.csv") if row["seed"] != "0"}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for (network, data, seed, tried), before in held.items():
        if not tried and (network, data, seed, TUNED) in held:
            pairs.setdefault(f"{network}, {data}", []).append((before, held[network, data, seed, TUNED]))
    return pairs


def _tuning_finals() -> Rows:
    """Means over the seeds: validation before and after, test before and after."""
    parts = [_tuning_pairs(part) for part in ("validation", "test")]
    return {name: [float(mean) for pairs in parts for mean in np.mean(pairs[name], 0)] for name in parts[0]}


def _tuning_gain(part: str, data: str = "") -> list[float]:
    """Mean gain in points over the settings' pairs, and its standard error."""
    gains = [after - before for name, pairs in _tuning_pairs(part).items() if data in name
             for before, after in pairs]
    return [float(np.mean(gains)), float(np.std(gains, ddof=1) / np.sqrt(len(gains)))]


def _cut_estimates() -> Rows:
    """Of each estimate: tau given latency, its interval, that of the difference, tau, seconds."""
    return dict(judged(EXPERIMENTS / "cut_estimates/results/eurosat_64px"))


def _cut_certificate() -> list[float]:
    """Of the certificate of cuts: tau of `inherited` with its interval, of another seed with its, share of the cost."""
    held = document("certificates/results/eurosat_cuts/certificate.json")
    one, other = held["estimators"]["inherited"], held["ceiling"]
    return [one["kendall_tau"], one["low"], one["high"], other["kendall_tau"], other["low"], other["high"],
            100 * one["share_of_full"]]


def _going_on() -> Rows:
    """Top-1 after 400 steps, after 400 behind a trial, after 560."""
    return {f"{row['cut']}, {row['px']}, {row['seed']}": [100 * float(row[kind])
                                                          for kind in ("fresh", "after_trial", "as_long")]
            for row in lines("fine_tuning/go_on.csv")}


def _going_on_gains() -> list[float]:
    """Mean difference of going on from 400 steps alone, then from 560, each with its standard error."""
    table = np.array(list(_going_on().values()))
    gains = [table[:, 1] - table[:, 0], table[:, 2] - table[:, 1]]
    return [value for gain in gains for value in (float(gain.mean()),
                                                  float(gain.std(ddof=1) / np.sqrt(len(gain))))]


def _tuning_claims() -> list[Claim]:
    def gains(tried: str) -> list[float]:
        """Of the whole network's first further seed on each data set, in points of validation."""
        rows = {(row["data"], row["tried"]): _tuned(row, "validation") for row in lines("fine_tuning/trials.csv")
                if (row["network"], row["seed"]) == ("whole", "1")}
        return [rows[data, tried] - rows[data, ""] for data in TUNING_SETS]

    return [
        Claim("Over the {} pairs", lambda: [sum(map(len, _tuning_pairs("test").values()))]),
        Claim("gains {} points of validation (standard error {}) and {} of test ({}): EuroSAT {} and {}, TrashNet {} "
              "and {}, Fashion-MNIST {} and {}; the whole network {} and {}, the cut {} and {}.", lambda: [
                  *_tuning_gain("validation"), *_tuning_gain("test"), *(
                      _tuning_gain(part, of)[0] for of in (*TUNING_SETS, "whole", "cut")
                      for part in ("validation", "test"))]),
        Claim("Kendall tau {} ({} to {}) with the mean of two full trainings, another seed's full training {} ({} to "
              "{}), at {} % of", _cut_certificate),
        Claim("is {} points (standard error {}) above as many steps alone, and {} ({}) below", _going_on_gains),
        Claim("not by each: {} and {} %, before {} and {} %.", lambda: [
            pair[place] for place in (1, 0) for pair in _tuning_pairs("test")["whole, eurosat"]]),
        Claim("gains {}, {} and {} points of validation on the three, with them {}, {} and {}:", lambda: [
            *gains("layer_decay=0.85"), *gains(TUNED)]),
        Claim("(seed 1: {}, {} and {} points of validation", lambda: gains("batch_size=32,shift=0.05"))]


def _certificates() -> Rows:
    both = [Certificate(name) for name in ("eurosat", "fashion_mnist")]
    rows: dict[str, list[float]] = {}
    for held in both:
        for label, name in ESTIMATORS.items():
            of, told = held.content["estimators"][name], held.told[name]
            given = [] if held.content["cost"] == "macs" and label == "MACs" else [held.tau_given_cost(told)]
            rows.setdefault(label, []).extend([
                held.tau(told), of["low"], of["high"], *given, 100 * of["hypervolume_loss"],
                of["cpu_seconds_amortised"], 100 * of["share_of_full"]])
        control, ceiling = held.mixed("proxy", held.log_cost, 0.5), held.content["ceiling"]
        rows.setdefault("proxy + 0.5 log cost (control)", []).extend([held.tau(control), held.tau_given_cost(control)])
        rows.setdefault("one full training of the other seed", []).extend([
            float(kendall_tau(*held.seeds.T)), ceiling["low"], ceiling["high"], held.given_cost(*held.seeds.T),
            held.content["truth"]["cpu_seconds"], 100])
    return dict(rows)


def _controls() -> Rows:
    baselines = contest_networks(False)
    return {point.name: [point.ms, point.top1, *point.seeds, (best := rival(point, baselines)).ms, best.ms / point.ms]
            for point in (*random_networks(), *contest_networks(True, "int8"))}


def _above() -> list[float]:
    """Random networks that meet the goal of speed, the goal, those above every baseline, the best baseline."""
    goal, networks = 1.3, random_networks()
    best = max(point.top1 for point in contest_networks(False))
    return [sum(times >= goal for times in times_as_fast(networks)), goal,
            sum(point.top1 > best for point in networks), best]


def _above_predicted() -> list[float]:
    picks = document(PICKS)["picks"]
    ratios = [100 * (point.ms / pick["latency_ms_predicted"] - 1)
              for point, pick in zip(contest_networks(True, "int8"), picks, strict=True)]
    return [min(ratios), max(ratios)]


def _equal_asks() -> list[float]:
    rows = lines("contest/results/fashion_mnist/asks.csv")
    equal = [row["larger_is_better"] == row["smaller_is_better"] for row in rows]
    return [equal.index(False)]


def _timed_alone(name: str) -> Mapping[str, float]:
    timed: Mapping[str, float] = document(f"contest/results/fashion_mnist/alone/{name}.json")["latency"][0]
    return timed


def _alone() -> list[float]:
    """Of the most accurate pick and two baselines; then how many times as fast as these it is."""
    first, *others = (_timed_alone(name)["latency_ms"]
                      for name in ("accurate-460c8dd0", "resnet18-stem1", "resnet50-stem1"))
    return [first, *others, *(ms / first for ms in others)]


def _compressed() -> list[float]:
    rows = {row["name"]: row for row in lines("contest/results/fashion_mnist/compress_efficientnet_b0-stem1-s1.csv")}
    return [*(-float(rows[name]["drop_points"]) for name in ("mse", "minmax", "percentile", "entropy")),
            *numbers(rows["entropy"], "latency_ms", "speedup")]


def _row(network: str, stem: str) -> Mapping[str, str]:
    return next(row for row in lines("contest/results/fashion_mnist/table.csv")
                if (row["network"], row["stem"], row["precision"]) == (network, stem, "int8"))


def _deployed(data: str) -> Rows:
    by: dict[str, dict[str, dict[str, str]]] = {}
    for row in lines(f"contest/results/{data}/table.csv"):
        by.setdefault(f"{row['network']} {row['stem']}", {})[row["precision"]] = row
    rows: Rows = {}
    for label, of in by.items():
        int8 = of["int8"]
        rows[label] = [*numbers(int8, "top1", "top1_low", "top1_high", times=100),
                       *(100 * float(top1) for top1 in int8["top1_by_seed"].split()), *numbers(int8, "drop", times=100),
                       *numbers(int8, "latency_ms", "latency_ms_low", "latency_ms_high"),
                       *(float(of[precision]["latency_ms"]) for precision in ("bf16", "fp32")),
                       float(int8["images_per_s"]), float(int8["process_cpu_s"]) if int8["process_cpu_s"] else None]
    return rows


def _statements(data: str) -> list[str]:
    """Those of speed at equal accuracy, of accuracy at equal latency, of ResNet-50's better stem and of int8."""
    verdict = {True: "met", False: "not met", None: "undecided"}
    return [f"- {verdict[statement['met']]}: {statement['text']}"
            for statement in document(f"contest/results/{data}/summary.json")["statements"]
            if not re.search("as accurate or more accurate|other stem", statement["goal"])]
