"""Figures of the decision records that rest on files of the repository."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean, median

import numpy as np

from experiments.claims.check import Claim, Figures, Table
from experiments.claims.pages import TABLES, best_wide, sampler_figure
from experiments.claims.sources import Certificate, lines, log_odds
from hwnas.stats import kendall_tau

NASWOT, MACS = "zero_cost:naswot", "zero_cost:macs"


def records() -> dict[str, tuple[Sequence[Claim], Sequence[Table]]]:
    """By document: its sentences and tables."""
    both = [Certificate(name) for name in ("eurosat", "fashion_mnist")]
    eurosat, fashion = both

    def given_cost(label: str) -> list[float]:
        return [held.tau_given_cost(held.told[label]) for held in both]

    def taus(label: str) -> list[float]:
        return [held.tau(held.told[label]) for held in both]

    def correlation(held: Certificate, share: np.ndarray) -> float:
        return float(np.corrcoef(log_odds(held.told[NASWOT]), log_odds(share))[0, 1])

    def mixtures() -> Mapping[str, Figures]:
        others = ((eurosat, log_odds(eurosat.told[NASWOT])), (eurosat, eurosat.log_cost),
                  (fashion, log_odds(fashion.told[NASWOT])), (fashion, fashion.log_cost),
                  (fashion, log_odds(fashion.told[MACS])))
        return {label: [held.tau(held.mixed("proxy", other, float(label.split()[0]))) for held, other in others]
                for label in ("0 (the proxy alone)", "0.25", "0.5", "0.75", "1", "2")}

    def cost_share(held: Certificate) -> float:
        of = held.content["estimators"]["multi_fidelity"]
        return 100 * (1 - float(of["cpu_seconds"]) / float(of["cpu_seconds_amortised"]))

    def dearer() -> list[float]:
        estimators = [held.content["estimators"] for held in both]
        return [of["proxy"]["cpu_seconds_amortised"] / of["supernet"]["cpu_seconds_amortised"] for of in estimators]

    rung = [
        Claim("logits is {} (EuroSAT) and {} (Fashion-MNIST), with full training's {} and {}.", lambda: [
            *(correlation(held, held.told["proxy"]) for held in both),
            *(correlation(held, held.truth) for held in both)]),
        Claim("NASWOT has tau {} and {} with cost", lambda: [
            float(kendall_tau(held.told[NASWOT], held.log_cost)) for held in both]),
        Claim("estimators-rank)) {} and {} with full training", lambda: given_cost(NASWOT)),
        Claim("multi-fidelity as decided ranks with {} and {}, the proxy with {} and {}:", lambda: [
            *given_cost("multi_fidelity"), *given_cost("proxy")]),
        Claim("its lead is {} and {}.", lambda: [first - second for first, second in zip(
            given_cost("multi_fidelity"), given_cost("proxy"), strict=True)]),
        Claim("Eight anchors cost {} % of a search", lambda: [cost_share(eurosat)])]
    lost = [
        *(Claim(f"| {name} | {{}} and {{}} |", partial(taus, label)) for name, label in (
            ("NASWOT alone (`zero_cost`)", NASWOT), ("supernet", "supernet"), ("ZiCo", "zero_cost:zico"),
            ("SynFlow", "zero_cost:synflow"), ("gradient norm", "zero_cost:grad_norm"),
            ("all scores together", "zero_cost:ensemble"))),
        Claim("| the proxy has {} and {}; given cost it has {} and {} |", lambda: [
            *taus("proxy"), *given_cost(NASWOT)]),
        Claim("| parameters, MACs (`zero_cost`) | {} and {}, {} and {} |", lambda: [
            *taus("zero_cost:params"), *taus(MACS)]),
        Claim("| {} and {} given cost |", lambda: given_cost("zero_cost:ensemble")),
        Claim("Given cost it had tau {} and {}, the proxy, which costs {} and {} times as much, {} and {}.", lambda: [
            *given_cost("supernet"), *dearer(), *given_cost("proxy")])]
    sampler = [
        Claim("it has {} and {} % on NAS-Bench-Macro's two tables", lambda: best_wide("hwnas")),
        Claim("LINAS-like loop has {} and {} %, Optuna's GP {} % (int8) and multivariate TPE {} % (fp32)", lambda: [
            *best_wide("linas"), 100 * sampler_figure(TABLES[-2], "gp", "mean_100", wide=True),
            best_wide("tpe_multivariate")[1]])]
    recipes = [Claim("(the {} is in `experiments/certificates/results/earlier.csv`", lambda: [fashion.tau(np.array(
        [float(row["estimate"]) for row in lines("certificates/results/earlier.csv")]))])]
    thirds = lines("sessions/thirds.csv")

    def of_tables(column: str, fold: Callable[[list[float]], float]) -> list[float]:
        return [100 * fold([float(row[f"{column}_{way}"]) for row in thirds]) for way in ("third", "all", "origin")]

    intervals = [
        Claim("table, the least covered third of {} shipped tables has {} % inside (one interval for all: {} %; wide "
              "enough for random and front ones, as it was before: {} %), the mean of their median half-widths is {} % "
              "({} %; {} %);",
              lambda: [len(thirds), *of_tables("least_third", min), *of_tables("half_width", mean)]),
        Claim("of front networks {} % at least are inside ({} %; {} %;", lambda: of_tables("front", min))]
    def off(run: str, moved: bool) -> float:
        """Mean error of a search's predictions, per cent: as its panel moved them, or of the table alone."""
        return 100 * mean(abs(float(row["predicted_ms"]) / (1 if moved else float(row["factor"]))
                              / float(row["measured_ms"]) - 1)
                          for row in lines("sessions/predictions.csv") if row["measured_at"].startswith(run))

    runs = ("2026-11-26T00", "2026-11-26T03")
    panel = lines("sessions/panel.csv")

    def longer(than: str) -> float:
        return 100 * (median(float(row["now_ms"]) / float(row[than]) for row in panel) - 1)

    factors = [row for row in lines("sessions/factors.csv") if row["beside"] == "the model"]
    sessions = [
        Claim("were told a session {} and\n{} % slower;", lambda: [100 * (float(next(
            row["factor"] for row in lines("sessions/predictions.csv") if row["measured_at"].startswith(run))) - 1)
            for run in runs]),
        Claim("table alone predicted within {} and {} % in the mean, and the panel's factor within {} and {} %",
              lambda: [off(run, moved) for moved in (False, True) for run in runs]),
        Claim("fourteen of them took {} % longer (median) than so put, and {} % longer than", lambda: [
            longer("at_quiet_ms"), longer("predicted_ms")]),
        Claim("neighbour, {}, {} and {} (standard error {} to {} %)", lambda: [
            *(float(row["factor"]) for row in factors),
            *(100 * fold(float(row["standard_error"]) for row in factors) for fold in (min, max))])]
    processes, later = lines("sessions/processes.csv"), lines("sessions/later.csv")

    def column(name: str) -> list[float]:
        return [100 * float(row[name]) for row in processes]

    def apart() -> list[float]:
        return [float(row["other_process_mean"]) / float(row["same_process_mean"]) for row in processes]

    def share(within: float | None, *words: str) -> float:
        """Share of a later session's networks within so much of what was measured, or (None) in their intervals."""
        rows = [row for row in later if all(word in row["table"] + row["networks_of"] for word in words)]
        return 100 * mean(abs(float(row["predicted_ms"]) / float(row["measured_ms"]) - 1) <= within if within else
                          float(row["low_ms"]) <= float(row["measured_ms"]) <= float(row["high_ms"]) for row in rows)

    sessions += [
        Claim("up to {} times that of held-out ones of the table's own process (median {};", lambda: [
            max(apart()), median(apart())]),
        Claim("has a standard deviation of {} % (median)", lambda: [median(column("between"))]),
        Claim("then {} % of networks lie inside in the mean, {} % at least ({} and {} % without), and in {} tables",
              lambda: [*(fold(column(f"covers_{more}")) for more in ("0.023", "0") for fold in (mean, min)),
                       sum(each >= 85 for each in column("least_third_0.023"))]),
        Claim("in every third of the latencies ({} without), at a median half-width of {} % ({} %)", lambda: [
            sum(each >= 85 for each in column("least_third_0")), median(column("half_width_0.023")),
            median(column("half_width_0"))]),
        Claim("{} and {} % lay within 5 % of what was measured, {} and {} % within 10 %,\n{} and {} % in their",
              lambda: [share(within, words) for within in (0.05, 0.10, None) for words in ("cuts of", "its cuts")]),
        Claim("{} % lay within 5 % with OpenVINO int8 ({} % by a table of one process), and {} % ({} %) with ONNX",
              lambda: [share(0.05, runtime, words) for runtime in ("openvino", "onnxruntime")
                       for words in ("a process a wave", "one process")])]
    beside = lines("sessions/beside.csv")

    def times(series: str, column: str = "latency_ms") -> dict[str, dict[str, float]]:
        """Logarithms of times, by process and network."""
        found: dict[str, dict[str, float]] = {}
        for row in beside:
            if row["process"].startswith(series):
                found.setdefault(row["process"], {})[row["id"]] = float(np.log(float(row[column])))
        return found

    def spread_of_four() -> float:
        """Standard deviation of a network from process to process, per cent, at each process's own pace."""
        known = [own for own in times("many").values() if own.keys() == times("many")["many-0"].keys()]
        logs = np.array([[own[name] for name in sorted(own)] for own in known])
        apart = logs - logs.mean(0)
        apart -= np.median(apart, 1, keepdims=True)
        return 100 * float(np.sqrt((apart**2).sum() / ((logs.shape[0] - 1) * (logs.shape[1] - 1))))

    def busy() -> list[float]:
        quiet_ms, busy_ms = (np.exp(np.array([[own[name] for name in sorted(own)] for own in times(series).values()]))
                             .mean(0) for series in ("quiet", "busy"))
        logs = np.log(busy_ms / quiet_ms)
        reference = [np.mean([np.exp(next(iter(own.values()))) for own in times(series, "reference_ms").values()])
                     for series in ("quiet", "busy")]
        return [100 * (np.exp(np.median(logs)) - 1), 100 * logs.std(), 100 * (reference[1] / reference[0] - 1)]

    def waves() -> list[float]:
        """How far the reference stood above its quiet time in the waves of a table, per cent: least and most."""
        own = [next(iter(each.values())) for each in times("quiet", "reference_ms").values()]
        above = [float(row["reference_in_table_ms"]) / np.exp(np.mean(own)) for row in panel]
        return [100 * (fold(above) - 1) for fold in (min, max)]

    sessions += [
        Claim("The reference had stood {} to {} % above its quiet time of that day", waves),
        Claim("24 networks differed by {} % (standard deviation)", lambda: [spread_of_four()]),
        Claim("at the start {} %, moved by the panel and by the reference {} %", moved_errors),
        Claim("the error fell from {} to {} %", lambda: moved_errors("ov/")),
        Claim("busy changed them by {} % (median; standard deviation {} %), and the reference by {} %", busy)]
    graphs = lines("sessions/executed.csv")

    def explained(told_by: str) -> list[float]:
        """R² of ridge and trees, the least and the most over tables."""
        by = [[float(row["r2"]) for row in graphs if row["told_by"] == told_by and row["method"] == method]
              for method in ("ridge", "boosted trees")]
        return [fold(values) for values in by for fold in (min, max)]

    intervals.append(Claim(
        "R² {} to {} by the ridge and {} to {} by trees; with graphs of other networks as a control {} to {} and {} to "
        "{}.", lambda: [*explained("its graph"), *explained("another's graph")]))
    folder = "docs/decisions"
    return {f"{folder}/untrained-rung.md": (rung, [Table("| counted |", mixtures)]),
            f"{folder}/lost-estimators.md": (lost, []), f"{folder}/latency-model.md": (intervals, []),
            f"{folder}/sessions.md": (sessions, []),
            f"{folder}/known-objective-sampler.md": (sampler, []), f"{folder}/training-recipes.md": (recipes, [])}


def moved_errors(runs: str = "") -> list[float]:
    """Mean errors of networks of these runs: by the session of the beginning, and moved before the verification; %."""
    rows = [row for row in lines("sessions/moved.csv") if row["run"].startswith(runs)]
    return [100 * mean(abs(float(row[name]) / float(row["measured_ms"]) - 1) for row in rows)
            for name in ("began_ms", "moved_ms")]
