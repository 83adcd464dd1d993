"""The pictures and the report of a run: one HTML file without scripts, links or fonts from elsewhere.

`report.html.j2` is the template of the page; this module makes its content.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from hwnas.accuracy.estimator import meaning
from hwnas.cli.progress import count
from hwnas.data.dataset import left_out_text
from hwnas.errors import hidden
from hwnas.front.comparison import DEPLOY, describe, format_signed, shown_row
from hwnas.front.explore import explore_values, load_template
from hwnas.front.pairs import Pair, load_pairs
from hwnas.front.picture import PlotInfo, front_figure
from hwnas.front.rows import COLUMNS, TOP1, FrontRow, load_front, sort_rows
from hwnas.pictures import figure_bytes
from hwnas.study.objective import COSTS, LATENCY
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import RunFolder
from hwnas.tasks.task import Grades, load_task


@dataclass(frozen=True)
class Table:
    """A table of text. All columns except the first and the last hold numbers. `rows` has a CSS class and the cells of
    each row."""

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]

    @classmethod
    def of(cls, columns: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = ()) -> Table:
        """Return the table of these cells, without the inner columns that are empty in all rows."""
        shown = [at for at in range(len(columns)) if at in (0, len(columns) - 1) or any(cells[at] for cells in rows)]
        return cls([columns[at] for at in shown], [
            (css, [cells[at] for at in shown]) for css, cells in zip(classes or [""] * len(rows), rows, strict=True)])


def percent(value: float | None) -> str:
    """Return a fraction in per cent, or an empty text for None."""
    return "" if value is None else f"{100 * value:.2f}"


def milliseconds(value: float | None) -> str:
    """Return milliseconds with four significant digits, or an empty text for None."""
    return "" if value is None else f"{value:#.4g}".rstrip(".")


def between(low: float | None, high: float | None, scale: float, digits: int) -> str:
    """Return an interval as text. `digits` counts decimals; if `scale` is 1, it counts significant digits, and more are
    shown if both ends would look alike."""
    if low is None or high is None:
        return ""
    if scale == 1:
        while digits < 7 and high > low and f"{low:.{digits}g}" == f"{high:.{digits}g}":
            digits += 1
        return "–".join(f"{value:#.{digits}g}".rstrip(".") for value in (low, high))
    return f"{scale * low:.{digits}f}–{scale * high:.{digits}f}"


def _definitions(values: Mapping[str, Any]) -> dict[str, str]:
    """Return keys and values as text, without empty values."""
    return {key: _plain(value) for key, value in values.items() if value not in (None, "", [], {})}


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text}" for key, text in _definitions(value).items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class ReportData:
    """The content of the page. `svg` is the picture of the front, and `examples` one of answers as PNG. `comparisons`
    and `environment` are as in their `.json` files. `answered` is the name of a network and a table of its answers by
    class. `folder` is the run's folder, for commands that name it."""

    info: PlotInfo
    rows: Sequence[FrontRow]
    trials: Sequence[Mapping[str, Any]]
    comparisons: Sequence[Mapping[str, Any]]
    environment: Mapping[str, Any]
    svg: str = ""
    config_yaml: str = ""
    answered: tuple[str, Table] | None = None
    folder: str = "."
    pairs: Sequence[Pair] = ()
    examples: bytes = b""


def read_report(run: RunFolder, grades: Mapping[str, Grades] = MappingProxyType({})) -> ReportData:
    """Read the content of the page from a finished run's files, with the `grades` of its answers if they are known. A
    password in its configuration (storage=) is hidden. Raises StudyError if the search is not finished."""
    rows, comparisons, environment = load_front(run), run.read_comparisons(), run.find_environment()
    answered = read_answers(run, shown_row(rows, comparisons), environment.get("dataset") or {}, grades)
    config = run.config_text() if run.config.is_file() else ""
    return ReportData(plot_info(environment), rows, run.read_trials(), comparisons, environment,
                      config_yaml=hidden(config, whole=True), answered=answered, folder=str(run.path),
                      pairs=load_pairs(run),
                      examples=run.examples.read_bytes() if run.examples.is_file() else b"")


def read_answers(run: RunFolder, row: FrontRow | None, dataset: Mapping[str, Any], grades: Mapping[str, Grades]
                 ) -> tuple[str, Table] | None:
    """Return the name of a network and a table of its answers by class; None if no answers are stored.

    Args:
        run: Its folder holds the answers.
        row: The network.
        dataset: `task` and `class_names`, as the environment describes them.
        grades: Known grades by id. If the network's are missing, its answers are graded here.
    """
    names = dataset.get("class_names")
    if row is None or not names or "task" not in dataset or not run.predictions.exists():
        return None
    answers, task = run.read_predictions(), load_task(str(dataset["task"]))
    if row.id not in answers or "labels" not in answers:
        return None
    labels, predictions = answers["labels"], answers[row.id]
    graded = grades[row.id] if row.id in grades else task.grade(predictions, labels)
    return describe(row), Table.of(*task.class_table(graded, predictions, labels, names))


def write_report(run: RunFolder, data: ReportData) -> None:
    """Write `front.png`, `front.svg` and `report.html`."""
    figure = front_figure(data.rows, data.info, data.pairs)
    svg = figure_bytes(figure, "svg")
    write_atomic(run.front_png, figure_bytes(figure, "png"))
    write_atomic(run.front_svg, svg)
    write_atomic(run.report, report_html(replace(data, svg=svg.decode())))


def plot_info(environment: Mapping[str, Any]) -> PlotInfo:
    """Return the facts for titles, from `environment.json`."""
    def text(section: str, key: str) -> str:
        return str((environment.get(section) or {}).get(key) or "")

    cap = environment.get("cap_ms")
    host = text("host", "name") if environment.get("verified_here", True) else str(environment.get("searched_for", ""))
    target, training = environment.get("target") or {}, environment.get("training") or {}
    batch = next(iter(target.get("targets") or [target])).get("batch")
    start_text = "from scratch or, if so named, pretrained" if training.get("pretrained") else "from scratch"
    start_text = "from pretrained weights" if training.get("all_pretrained") else start_text
    summary = f"trained {start_text}, {training['steps']} steps" if training.get("steps") else ""
    if environment.get("race"):
        summary = f"trained in a race, {start_text}"
    size = (environment.get("dataset") or {}).get("image_size")
    return PlotInfo(text("target", "name"), host, text("dataset", "title") or text("dataset", "name"),
                    str(environment.get("created", ""))[:10],
                    str(environment.get("space") or ""), None if cap is None else float(cap),
                    text("search", "accuracy") or "proxy", f"{summary}, {size} px" if summary and size else summary,
                    "image" if batch == 1 else f"batch of {batch}" if batch else "batch")


def report_html(data: ReportData) -> str:
    """Return the whole page as text. All text from outside is escaped."""
    return load_template("report.html.j2").render(
        {**_head(data), **_networks(data), **_latency(data), **_search(data)},
        explore=explore_values(data.rows, data.pairs, data.environment, data.folder), tabulate=_tabulate,
        answered=data.answered, examples=base64.b64encode(data.examples).decode(), pairs=_pairs(data),
        environment=_environment(data), config_yaml=data.config_yaml)


def _head(data: ReportData) -> dict[str, Any]:
    """Return the title, the first sentences, the picture, the network to deploy, and the comparisons."""
    verified = [row for row in data.rows if row.verified]
    caller = data.environment.get("verified_from")
    over = f", over ssh from {caller}" if caller else ""
    where = (f"scored and timed on {data.info.host}{over}" if verified else
             f"searched for {data.info.host}, where nothing was verified yet: run "
             "`hwnas verify run=DIR` on that machine")
    front = [row for row in data.rows if row.on_front]
    counts = {"a baseline": sum(row.is_baseline for row in front),
              "a known network": sum(row.is_known for row in front)}
    # The front may hold networks that the search did not find; the heading counts them apart.
    others = ", ".join(f"{n} of them {kind if n == 1 else kind[2:] + 's'}" for kind, n in counts.items() if n)
    networks = count(len(front), "network") + f" ({others})" * bool(others)
    words = [f"{networks} on the {'verified' if verified else 'predicted'} front", where, data.info.date]
    verdicts = [(str(item.get("verdict")), str(item.get("sentence", ""))) for item in data.comparisons]
    # Without XML prologue, metadata and comments no address or text from outside stays in the picture.
    svg = re.sub(r"\A.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->\s*", "", data.svg, flags=re.DOTALL)
    return {"title": f"{data.info.dataset} on {data.info.target}", "svg": svg,
            "lead": " · ".join(word for word in words if word),
            "deploy": [sentence for verdict, sentence in verdicts if verdict == DEPLOY],
            "comparisons": [pair for pair in verdicts if pair[0] != DEPLOY]}


_COLUMNS = ("network", "top-1 deployed (%)", "95 %", "fp32 (%)", "estimate (%)", "model of all trials (%)",
            "latency (ms)", "90 %", "p50 as it was", "p99 as it was", "predicted (ms)", "params", "M MACs", "notes")


def _tabulate(rows: Sequence[FrontRow], rewarded: bool = False) -> Table:
    """Return the table of these networks. Minimised costs without a column of their own come before the notes."""
    names = [cost.name for cost in rows[0].costs if COSTS[cost.name].exact not in COLUMNS]
    labels = (f"{COSTS[name].label} ({COSTS[name].unit})" if COSTS[name].unit else COSTS[name].label for name in names)
    return Table.of([*(name.replace(TOP1, rows[0].metric) for name in _COLUMNS[:-1]), *labels, _COLUMNS[-1]],
                    [_cells(row, names, rewarded) for row in rows],
                    [" ".join(["front"] * row.on_front + ["base"] * row.is_baseline) for row in rows])


# Parts of the ids of baselines, as `hwnas.networks.baselines.Baseline.id` makes them, and their meaning.
_VARIANTS = {
    "-pretrained": "fine-tuned from ImageNet weights on as many images",
    "-stem1": "first convolution with stride 1 instead of 2",
    "-cut_": "an obvious cut: short, one block a stage; early, without the last stages; thin and narrow, half as wide",
    "px": "on smaller images"}


def _networks(data: ReportData) -> dict[str, Any]:
    """Return the front, and the networks that it is compared with."""
    front = sorted(sort_rows(row for row in data.rows if row.is_finalist or row.on_front),
                   key=lambda row: (row.best_latency_ms is None, row.best_latency_ms or 0.0))
    # The page names the costs only if the search minimised more than latency.
    costs = () if not front or front[0].objectives == (LATENCY,) else front[0].objectives
    metric = data.rows[0].metric if data.rows else TOP1
    baselines = sort_rows(row for row in data.rows if row.is_baseline)
    all_pretrained = all("-pretrained" in row.id or row.kind == "whole network" for row in baselines)
    return {"front": front, "ranked_by": meaning(data.info.accuracy).replace(TOP1, metric), "metric": metric,
            "rewarded": str((data.environment.get("search") or {}).get("objective", "")).startswith("reward"),
            "costs": " and ".join(COSTS[name].label for name in costs), "family": data.environment.get("family"),
            "random": sort_rows(row for row in data.rows if row.control_of),
            "known": sort_rows(row for row in data.rows if row.is_known),
            "baselines": baselines, "begun": "" if all_pretrained else " from random weights",
            "variants": [(mark, what) for mark, what in _VARIANTS.items() if any(mark in row.id for row in baselines)]}


def _cells(row: FrontRow, costs: Sequence[str], rewarded: bool) -> list[str]:
    notes = {f"a {'baseline' if row.is_baseline else 'known network'}, on the front":
             row.on_front and not row.is_finalist,
             "highest reward": row.reward_winner and rewarded, "breaks the cap": row.meets_cap is False,
             f"drawn for {row.control_of}": row.control_of, f"dominated by {row.dominated_by}": row.dominated_by,
             "not verified" + ", see Failures" * bool(row.reason): not row.verified}
    estimate = "" if row.top1_estimated is None else \
        f"{percent(row.top1_estimated)} ({between(row.top1_estimated_low, row.top1_estimated_high, 100, 1)})"
    return [describe(row), percent(row.top1_test), between(row.top1_test_low, row.top1_test_high, 100, 2),
            percent(row.top1_test_fp32), percent(row.top1_proxy), estimate, milliseconds(row.latency_ms),
            between(row.latency_ms_low, row.latency_ms_high, 1, 3), milliseconds(row.latency_ms_p50),
            milliseconds(row.latency_ms_p99), milliseconds(row.latency_ms_predicted),
            f"{row.params:,}", f"{row.macs / 1e6:.2f}",
            *(milliseconds(cost.best) for cost in row.costs if cost.name in costs),
            "; ".join(note for note, applies in notes.items() if applies)]


def _latency(data: ReportData) -> dict[str, Any]:
    """Describe how well latency was predicted."""
    # Only rows with a measured latency and a predicted interval show how good the prediction was.
    timings = [(row.latency_ms, row.latency_ms_predicted or 1, row.latency_ms_predicted_low,
                row.latency_ms_predicted_high) for row in data.rows if row.latency_ms is not None
               and row.latency_ms_predicted_low is not None and row.latency_ms_predicted_high is not None]
    inside = ""
    if timings:
        widths = sorted((high - low) / 2 / predicted for _, predicted, low, high in timings)
        errors = [abs(predicted / (measured or 1) - 1) for measured, predicted, _, _ in timings]
        n_inside = sum(low <= measured <= high for measured, _, low, high in timings)
        interval = "interval of their first timing, before their training" if data.environment.get("race") else \
            "predicted interval"
        inside = (f"{n_inside} of {len(timings)} networks of the space were measured inside the {interval} (median "
                  f"half-width {widths[len(widths) // 2]:.1%}); mean error {sum(errors) / len(errors):.1%}.")
    model, paused = data.environment.get("latency_model") or {}, ""
    if factors := sorted(row.pause_factor for row in data.rows if row.pause_factor is not None):
        paused = (f"took {factors[0]:.1f} to {factors[-1]:.1f} times as long as those back to back, of which all "
                  "latencies here are")
    facts = {"latency table": model.get("table"), "measured": str(model.get("created", ""))[:10],
             "the machine, beside its table": (data.environment.get("session") or {}).get("told"),
             "the machine, while networks were timed": (data.environment.get("measuring") or {}).get("machine"),
             "calls after a pause of 20 ms": paused}
    return {"inside": inside, "latency_line": model.get("line", "not judged") if model else "",
            "latency_model": _definitions(facts)}


def _search(data: ReportData) -> dict[str, Any]:
    """Describe the outcomes of trials, the settings of the search, and the networks, trials and files that failed."""
    counts = Counter(str(trial.get("outcome") or trial.get("state") or "?") for trial in data.trials)
    settings = data.environment.get("search") or {}
    steps = data.environment.get("spent_s") or {}
    spent = ", ".join(f"{title} {seconds / 60:.1f}" for title, seconds in steps.items() if seconds >= 1)
    settings = {_WORDS.get(key, key): value for key, value in settings.items()}
    reasons = Counter(str(trial["reason"]) for trial in data.trials if trial.get("reason")
                      and trial.get("outcome") in ("failed", "error", "lost", None))
    dataset = data.environment.get("dataset") or {}
    return {"n_trials": len(data.trials),
            "outcomes": ", ".join(f"{number} {name}" for name, number in counts.most_common()),
            "search": _definitions(settings | {"minutes of the command that wrote this": spent}),
            "remarks": list(data.environment.get("remarks") or ()),
            "constant": dataset.get("constant_answer"),
            "failed_rows": [row for row in data.rows if row.reason], "failed_trials": reasons.most_common(20),
            "left_out": left_out_text(dataset.get("left_out") or {})}


# Headings in the report for keys of `environment.json`.
_WORDS = {"accuracy": "estimator of accuracy", "n_trials": "networks evaluated", "asks": "asked of the sampler",
          "host": "machine", "executed": "precision executed", "measuring": "how it was timed",
          "dataset": "images", "recipe": "training of finalists, controls and baselines"}


def _pairs(data: ReportData) -> Table | None:
    """Return the table of the pairs of networks; None if there are none."""
    if not data.pairs:
        return None
    columns = ("fast, then accurate", "goes on (%)", "below a confidence of", "top-1 (%)", "95 %",
               "beside the second alone (points)", "95 %", "mean (ms)", "90 %", "worst (ms)", "times as fast", "id")
    return Table.of(columns, [[
        pair.describe(data.rows), f"{100 * pair.share:.1f}", f"{pair.threshold:.4f}", percent(pair.top1_test),
        between(pair.top1_test_low, pair.top1_test_high, 100, 2), format_signed(pair.difference),
        f"{format_signed(pair.difference_low)} to {format_signed(pair.difference_high)}",
        milliseconds(pair.latency_ms_mean), between(pair.latency_ms_mean_low, pair.latency_ms_mean_high, 1, 3),
        milliseconds(pair.latency_ms_worst), f"{pair.times_as_fast:.2f}", pair.id] for pair in data.pairs])


def _environment(data: ReportData) -> list[tuple[str, Any, bool]]:
    """Return heading and facts of each part of the environment, and whether they are shown at once."""
    parts = []
    for key in ("host", "target", "runtime", "executed", "versions", "dataset", "measuring", "recipe"):
        value = data.environment.get(key)
        if isinstance(value, Mapping):
            parts.append((_WORDS.get(key, key), _definitions(value), key == "host"))
        elif value is not None:
            parts.append((key, value, False))
    return parts
