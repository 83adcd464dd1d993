"""The pictures and the report of a run: one HTML file without scripts, links or fonts from elsewhere."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.accuracy.estimator import meaning
from hwnas.data.dataset import left_out_text
from hwnas.errors import hidden
from hwnas.front.comparison import describe
from hwnas.front.deploy import DEPLOY
from hwnas.front.lineage import COLUMNS as RACE_COLUMNS
from hwnas.front.lineage import is_race, lineage_rows
from hwnas.front.picture import PlotInfo, front_figure
from hwnas.front.rows import COLUMNS, Cost, FrontRow, load_front, sort_rows
from hwnas.pictures import figure_bytes
from hwnas.study.objective import COSTS, LATENCY
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import RunFolder


def escape(value: object) -> str:
    """Text from outside as HTML."""
    return html.escape(str(value))


def section(title: str, content: str) -> str:
    """A heading with its content; an empty text without content."""
    return f"<h2>{escape(title)}</h2>\n{content}" if content else ""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str]) -> str:
    """A table; `classes` has a CSS class for each row. All columns but the first and the last are numbers; those of
    them that are empty in all rows are left out."""
    shown = [at for at in range(len(columns)) if at in (0, len(columns) - 1) or any(cells[at] for cells in rows)]
    columns, rows = [columns[at] for at in shown], [[cells[at] for at in shown] for cells in rows]
    numeric = range(1, len(columns) - 1)
    head = "".join(f'<th class="{"n" if index in numeric else ""}">{escape(name)}</th>'
                   for index, name in enumerate(columns))
    lines = []
    for cells, css in zip(rows, classes, strict=True):
        tags = "".join(f'<td class="{"id" if index == 0 else "n" if index in numeric else ""}">{escape(cell)}</td>'
                       for index, cell in enumerate(cells))
        lines.append(f'<tr class="{css}">{tags}</tr>')
    return (f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>' + "".join(lines)
            + "</tbody></table></div>")


def percent(value: float | None) -> str:
    """A fraction in per cent; an empty text for None."""
    return "" if value is None else f"{100 * value:.2f}"


def milliseconds(value: float | None) -> str:
    """Milliseconds with four significant digits; an empty text for None."""
    return "" if value is None else f"{value:#.4g}".rstrip(".")


def between(low: float | None, high: float | None, scale: float, digits: int) -> str:
    """An interval as text. `digits` counts decimals; if the scale is 1, significant digits, more where the ends would
    look alike."""
    if low is None or high is None:
        return ""
    if scale == 1:
        while digits < 7 and high > low and f"{low:.{digits}g}" == f"{high:.{digits}g}":
            digits += 1
        return "–".join(f"{value:#.{digits}g}".rstrip(".") for value in (low, high))
    return f"{scale * low:.{digits}f}–{scale * high:.{digits}f}"


def definitions(values: Mapping[str, Any]) -> str:
    """Keys and values as a list, without empty values."""
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(_plain(value))}</dd>" for key, value in values.items()
                    if value not in (None, "", [], {}))
    return f"<dl>{items}</dl>" if items else ""


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_STYLE = """
:root { color: #1c2430; background: #fff; font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
body { max-width: 1120px; margin: 2rem auto 4rem; padding: 0 1.25rem }
h1 { font-size: 1.7rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; border-bottom: 1px solid #e4e7ec }
p.lead { color: #667085; margin: .2rem 0 1.2rem } .note { color: #667085; font-size: .88rem }
svg { width: 100%; height: auto; display: block }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .86rem; width: 100% }
th { text-align: left; color: #667085; font-weight: 600; vertical-align: bottom }
td, th { padding: .3rem .6rem .3rem 0 }
tbody tr { border-top: 1px solid #eef0f3 } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
td.n, td.id { white-space: nowrap } tr.front td.id { font-weight: 700; color: #1f5fbf } tr.base td.id { color: #c2410c }
code { font: .85em ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere }
ul { padding-left: 1.1rem } li { margin: .3rem 0 } .yes { color: #067647; font-weight: 600 }
.no { color: #b42318; font-weight: 600 } .range { color: #667085 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; font-size: .88rem; margin: 0 }
dt { color: #667085 } dd { margin: 0; overflow-wrap: anywhere }
"""


@dataclass(frozen=True, eq=False)
class Classes:
    """Test images by class and by the answer of one network, `counts` [class, answer]."""

    network: str
    names: tuple[str, ...]
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class ReportData:
    """The content of the page. `svg` is the picture; `comparisons` and `environment` are as in their `.json` files."""

    info: PlotInfo
    rows: Sequence[FrontRow]
    trials: Sequence[Mapping[str, Any]]
    comparisons: Sequence[Mapping[str, Any]]
    environment: Mapping[str, Any]
    svg: str = ""
    config_yaml: str = ""
    classes: Classes | None = None


def report_data(rows: Sequence[FrontRow], trials: Sequence[Mapping[str, Any]],
                comparisons: Sequence[Mapping[str, Any]], environment: Mapping[str, Any], config_yaml: str,
                run: RunFolder) -> ReportData:
    """The content of a run's page; the answers are those that its folder holds. A password in `config_yaml` (storage=)
    is hidden."""
    names = (environment.get("dataset") or {}).get("class_names") or ()
    return ReportData(plot_info(environment), rows, trials, comparisons, environment,
                      config_yaml=hidden(config_yaml, whole=True), classes=classes_of(run, rows, names))


def read_report(run: RunFolder) -> ReportData:
    """The content of the page, read from a finished run's files; StudyError when the search is not finished."""
    config = run.config_text() if run.config.is_file() else ""
    return report_data(load_front(run), run.read_trials(), run.read_comparisons(),
                       run.find_environment(), config, run)


def write_report(run: RunFolder, data: ReportData) -> None:
    """Write `front.png`, `front.svg` and `report.html`."""
    figure = front_figure(data.rows, data.trials, data.info)
    svg = figure_bytes(figure, "svg")
    write_atomic(run.front_png, figure_bytes(figure, "png"))
    write_atomic(run.front_svg, svg)
    write_atomic(run.report, report_html(replace(data, svg=svg.decode())))


def plot_info(environment: Mapping[str, Any]) -> PlotInfo:
    """The facts in titles, from `environment.json`."""
    def text(section: str, key: str) -> str:
        return str((environment.get(section) or {}).get(key) or "")

    cap = environment.get("cap_ms")
    host = text("host", "name") if environment.get("verified_here", True) else str(environment.get("searched_for", ""))
    batch, training = (environment.get("target") or {}).get("batch"), environment.get("training") or {}
    begun = "from scratch or, if so named, pretrained" if training.get("pretrained") else "from scratch"
    begun = "from pretrained weights" if training.get("all_pretrained") else begun
    told = f"trained {begun}, {training['steps']} steps" if training.get("steps") else ""
    if environment.get("race"):
        told = f"trained in a race, {begun}"
    size = (environment.get("dataset") or {}).get("image_size")
    return PlotInfo(text("target", "name"), host, text("dataset", "title") or text("dataset", "name"),
                    str(environment.get("created", ""))[:10],
                    str(environment.get("space") or ""), None if cap is None else float(cap),
                    text("search", "accuracy") or "proxy", f"{told}, {size} px" if told and size else told,
                    "image" if batch == 1 else f"batch of {batch}" if batch else "batch")


def report_html(data: ReportData) -> str:
    """The whole page as text; all text from outside is escaped."""
    title = f"{data.info.dataset} on {data.info.target}"
    body = [
        f"<h1>{escape(title)}</h1>", _lead(data), _svg(data.svg),
        section("What the search is worth", _comparisons(data)),
        section("The front", _front(data)),
        section("The race", _race(data)),
        section("Class by class", _classes(data)),
        section("Random networks of the space", _controls(row for row in data.rows if row.control_of)),
        section("Known networks of the space", _controls(row for row in data.rows if row.is_known)),
        section("Baselines", _baselines(data)),
        section("Predicted and measured latency", _latency(data)),
        section("Search", _search(data)),
        section("Failures", _failures(data)),
        section("Certificate", _certificate(data)),
        section("Environment", _environment(data)),
        section("Configuration", f"<details><summary>config.yaml</summary><pre><code>{escape(data.config_yaml)}"
                                  "</code></pre></details>" if data.config_yaml else ""),
    ]
    return ('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>hwnas: {escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
            + "\n".join(part for part in body if part) + "\n</body>\n</html>\n")


def _svg(text: str) -> str:
    """The picture without XML prologue, metadata and comments, so that no address or text from outside stays in it."""
    drawn = text[text.find("<svg"):] if "<svg" in text else ""
    return re.sub(r"<metadata>.*?</metadata>|<!--.*?-->\s*", "", drawn, flags=re.DOTALL)


def _lead(data: ReportData) -> str:
    verified = [row for row in data.rows if row.verified]
    caller = data.environment.get("verified_from")
    over = f", over ssh from {caller}" if caller else ""
    where = (f"scored and timed on {data.info.host}{over}" if verified else
             f"searched for {data.info.host}, where nothing was verified yet: run "
             "`python -m hwnas.verify run=DIR` on that machine")
    front = [row for row in data.rows if row.on_front]
    networks = "1 network" if len(front) == 1 else f"{len(front)} networks"
    words = [f"{networks} on the {'verified' if verified else 'predicted'} front", where, data.info.date]
    deploy = "".join(f"<p><b>{escape(item.get('sentence', ''))}</b></p>" for item in data.comparisons
                     if item.get("verdict") == DEPLOY)
    return f'<p class="lead">{escape(" · ".join(word for word in words if word))}</p>{deploy}'


def _comparisons(data: ReportData) -> str:
    comparisons = [item for item in data.comparisons if item.get("verdict") != DEPLOY]
    if not comparisons:
        return "<p>Nothing was compared: neither baselines nor controls were asked for.</p>"
    warn = '<span class="no">!</span> '
    yes, no = '<span class="yes">✓</span> ', '<span class="no">✗</span> '
    mark = {"beats": yes, "faster": yes, "does not beat": no, "none as fast": no, "under-trained": warn}
    items = "".join(f"<li>{mark.get(str(item.get('verdict')), '')}{escape(item.get('sentence', ''))}</li>"
                    for item in comparisons)
    return (f'<ul>{items}</ul><p class="note">The rival is the most accurate finalist that is not slower than the '
            "baseline's 90 % latency interval. “Beats” needs a paired bootstrap over the test images whose 95 % "
            "interval, widened for having had several finalists to pick from, excludes 0. Of a baseline's variants "
            "the one that is harder to beat counts. Networks are called equally accurate where at most half a point is "
            "lost. Random networks are drawn from the same space at the finalists' predicted latencies and trained, "
            "exported and timed like them; the space's known networks are held against finalists as baselines are.</p>")


_COLUMNS = ("network", "top-1 deployed (%)", "95 %", "fp32 (%)", "estimate (%)", "model of all trials (%)",
            "latency (ms)", "90 %", "p99 (ms)", "predicted (ms)", "params", "M MACs", "notes")


def _front(data: ReportData) -> str:
    rows = sort_rows(row for row in data.rows if row.is_contender)
    if not rows:
        return "<p>No finalist.</p>"
    note = ('<p class="note">Bold: on the front. Top-1 of the test set in the deployment runtime, latency of one '
            "batch as measured in interleaved rounds (median over rounds of each round's low quantile: what the "
            "machine does when nobody disturbs it); p99 is what 99 of 100 of all these calls took at most, with "
            "whatever else the machine did meanwhile. The search ranked networks by "
            f"{escape(meaning(data.info.accuracy))}.</p>")
    rewarded = str((data.environment.get("search") or {}).get("objective", "")).startswith("reward")
    cells = [_cells(row, rewarded) for row in rows]
    return table(_columns(rows), cells, ["front" if row.on_front else "" for row in rows]) \
        + note + _costs(rows[0]) + _architectures(rows)


def _race(data: ReportData) -> str:
    if not is_race(data.trials):
        return ""
    rows = lineage_rows(data.rows, data.trials)
    return (table(RACE_COLUMNS, rows, ["front" if row[-1].endswith("finished") else "" for row in rows])
            + '<p class="note">Every network that was trained, in the order in which they were made. Top-1 won: '
              "against the network that it was cut from, right after its first leg, on validation images. One that was "
              "finished was trained on until its rate was zero. Every network that is known by name and that no faster "
              "one surely beat had its share of steps before any other was tried.</p>")


def _columns(rows: Sequence[FrontRow]) -> list[str]:
    """Columns of the table of `rows`. Minimised costs without a column of their own come before the notes."""
    costs = [COSTS[cost.name] for cost in _more(rows[0])]
    labels = (f"{cost.label} ({cost.unit})" if cost.unit else cost.label for cost in costs)
    return [*_COLUMNS[:-1], *labels, _COLUMNS[-1]]


def _more(row: FrontRow) -> list[Cost]:
    return [cost for cost in row.costs if COSTS[cost.name].exact not in COLUMNS]


def _costs(row: FrontRow) -> str:
    """A note on the front's costs, unless they are latency alone."""
    if row.objectives == (LATENCY,):
        return ""
    names = " and ".join(COSTS[name].label for name in row.objectives)
    return (f'<p class="note">On the front: no other finalist is as good in top-1, {escape(names)}, and better in one '
            "of them; as exported and measured, or as predicted where nothing was.</p>")


def _architectures(rows: Iterable[FrontRow]) -> str:
    items = "".join(f"<dt>{escape(row.id)}</dt><dd><code>{escape(row.architecture)}</code></dd>" for row in rows)
    return f"<details><summary>architectures</summary><dl>{items}</dl></details>"


# In the ids of baselines, as `hwnas.networks.baselines.Baseline.id` makes them.
_VARIANTS = {
    "-pretrained": "fine-tuned from ImageNet weights on as many images",
    "-stem1": "first convolution with stride 1 instead of 2",
    "-cut": "so many first blocks of each stage, and a head of so many channels (h)",
    "px": "on smaller images"}


def _baselines(data: ReportData) -> str:
    rows = sort_rows(row for row in data.rows if row.is_baseline)
    if not rows:
        return "<p>None were asked for.</p>"
    told = [f"“{mark}”: {what}" for mark, what in _VARIANTS.items() if any(mark in row.id for row in rows)]
    begun = all("-pretrained" in row.id or row.is_raced for row in rows)
    whole = "" if begun else " from random weights"
    note = "; ".join([f"timm networks{whole}, by the finalists' recipe, split, export, quantisation and timing", *told])
    return table(_columns(rows), [_cells(row) for row in rows], ["base" for _ in rows]) + f'<p class="note">{note}.</p>'


def _controls(controls: Iterable[FrontRow]) -> str:
    rows = sort_rows(controls)
    if not rows:
        return ""
    return table(_columns(rows), [_cells(row) for row in rows], ["" for _ in rows]) + _architectures(rows)


def _cells(row: FrontRow, rewarded: bool = False) -> list[str]:
    notes = [row.origin] if row.origin else []
    if row.reward_winner and rewarded:
        notes.append("highest reward")
    if row.meets_cap is False:
        notes.append("breaks the cap")
    if row.control_of:
        notes.append(f"drawn for {row.control_of}")
    if row.dominated_by:
        notes.append(f"dominated by {row.dominated_by}")
    if not row.verified:
        notes.append("not verified")
    if row.reason:
        notes.append(row.reason)
    return [describe(row), percent(row.top1_test), between(row.top1_test_low, row.top1_test_high, 100, 2),
            percent(row.top1_test_fp32), percent(row.top1_proxy), _believed(row), milliseconds(row.latency_ms),
            between(row.latency_ms_low, row.latency_ms_high, 1, 3), milliseconds(row.latency_ms_p99),
            milliseconds(row.latency_ms_predicted),
            f"{row.params:,}", f"{row.macs / 1e6:.2f}", *(milliseconds(cost.best) for cost in _more(row)),
            "; ".join(notes)]


def _believed(row: FrontRow) -> str:
    if row.top1_estimated is None:
        return ""
    return f"{percent(row.top1_estimated)} ({between(row.top1_estimated_low, row.top1_estimated_high, 100, 1)})"


def _latency(data: ReportData) -> str:
    judged = [row for row in data.rows if row.inside_prediction is not None]
    lines = []
    if judged:
        inside = sum(bool(row.inside_prediction) for row in judged)
        widths = sorted(((row.latency_ms_predicted_high or 0) - (row.latency_ms_predicted_low or 0)) / 2
                        / (row.latency_ms_predicted or 1) for row in judged)
        errors = [abs((row.latency_ms_predicted or 0) / (row.latency_ms or 1) - 1) for row in judged]
        lines.append(f"<p>{inside} of {len(judged)} networks of the space were measured inside their predicted "
                     f"interval (median half-width {widths[len(widths) // 2]:.1%}); mean error "
                     f"{sum(errors) / len(errors):.1%}.</p>")
    model = data.environment.get("latency_model") or {}
    if model:
        told = {"latency table": model.get("table"), "measured": str(model.get("created", ""))[:10],
                "overhead of a call (ms)": model.get("overhead_ms")}
        lines.append("<p>Latency model, on networks held out of its fit: "
                     f"{escape(model.get('line', 'not judged'))}.</p>{definitions(told)}")
    return "".join(lines) or "<p>Nothing was measured.</p>"


def _search(data: ReportData) -> str:
    counts = Counter(str(trial.get("outcome") or trial.get("state") or "?") for trial in data.trials)
    known = ", ".join(f"{number} {name}" for name, number in counts.most_common())
    said = data.environment.get("search") or {}
    steps = data.environment.get("spent_s") or {}
    spent = ", ".join(f"{title} {seconds / 60:.1f}" for title, seconds in steps.items() if seconds >= 1)
    said = {_WORDS.get(key, key): "; ".join(value) if key == "left_out" else value for key, value in said.items()}
    return (f"<p>{len(data.trials)} trials{': ' + escape(known) if known else ''}.</p>"
            + definitions(said | {
                "minutes of the command that wrote this": spent}))


_WORDS = {"accuracy": "estimator of accuracy", "n_trials": "networks evaluated", "asks": "asked of the sampler",
          "left_out": "blocks left out, for their fallback on the target",
          "host": "machine", "executed": "precision executed", "measuring": "how it was timed",
          "dataset": "images", "recipe": "training of finalists, controls and baselines"}
MOST_CLASSES = 12  # whose confusions are shown as a matrix


def classes_of(run: RunFolder, rows: Sequence[FrontRow], names: Sequence[str]) -> Classes | None:
    """What the most accurate network of the front answered, class by class; None where no answers are kept."""
    front = [row for row in rows if row.on_front and row.verified]
    if not front or not names or not run.predictions.exists():
        return None
    best = max(front, key=lambda row: row.top1_test or 0.0)
    answers = run.read_predictions()
    if best.id not in answers or "labels" not in answers:
        return None
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (np.clip(answers["labels"], 0, len(names) - 1), np.clip(answers[best.id], 0, len(names) - 1)), 1)
    return Classes(describe(best), tuple(names), counts)


def _classes(data: ReportData) -> str:
    if (of := data.classes) is None:
        return ""
    rows, n_of = [], of.counts.sum(1)
    for at in np.argsort(of.counts.diagonal() / np.maximum(n_of, 1), kind="stable"):
        wrong = of.counts[at].copy()
        wrong[at] = 0
        taken = [f"{of.names[other]} {wrong[other]}" for other in np.argsort(-wrong, kind="stable")[:3] if wrong[other]]
        share = of.counts[at, at] / n_of[at] if n_of[at] else None
        rows.append([of.names[at], percent(share), str(n_of[at]), ", ".join(taken)])
    text = (f"<p>Test images of each class as {escape(of.network)} answers them, the hardest class first.</p>"
            + table(["class", "right (%)", "images", "taken for"], rows, [""] * len(rows)))
    if len(of.names) > MOST_CLASSES:
        return text
    matrix = [[name, *map(str, line), ""] for name, line in zip(of.names, of.counts, strict=True)]
    return text + ("<details><summary>confusion matrix (rows: what it is; columns: the answer)</summary>"
                   + table(["", *of.names, ""], matrix, [""] * len(matrix)) + "</details>")


def _certificate(data: ReportData) -> str:
    certificate = data.environment.get("certificate") or {}
    said = certificate.get("lines") or ["No certificate. How well the accuracy estimator ranks networks was not "
                                        "checked in this run, so treat its values as estimates."]
    head = "".join(f"<p>{escape(line)}</p>" for line in said)
    if not certificate.get("table"):
        return head
    cells = [[*row, ""] for row in certificate["table"]]
    lines = table([*certificate.get("columns", ()), ""], cells, [""] * len(cells))
    where = ", ".join(escape(certificate.get(key, "?")) for key in ("file", "created", "host"))
    return (f'{head}{lines}<p class="note">{where}. Regret: '
            "top-1 lost at equal cost by training the three networks that an estimator likes best. Seconds are of one "
            "core.</p>")


def _kind(row: FrontRow) -> str:
    return "joined" if row.origin else "baseline" if row.is_baseline else "control" if row.is_control else "finalist"


def _failures(data: ReportData) -> str:
    items = [f"<li><b>{escape(row.id)}</b> ({_kind(row)}): {escape(row.reason)}</li>"
             for row in data.rows if row.reason]
    reasons = Counter(str(trial["reason"]) for trial in data.trials if trial.get("reason")
                      and trial.get("outcome") in ("failed", "error", "lost", None))
    items += [f"<li>{number} trial{'s' if number > 1 else ''}: {escape(reason)}</li>"
              for reason, number in reasons.most_common(20)]
    left_out = (data.environment.get("dataset") or {}).get("left_out")
    items += [f"<li>files {escape(left_out_text(left_out))}</li>"] if left_out else []
    return f"<ul>{''.join(items)}</ul>" if items else "<p>None.</p>"


def _environment(data: ReportData) -> str:
    parts = []
    for key in ("host", "target", "runtime", "executed", "versions", "dataset", "measuring", "recipe"):
        value = data.environment.get(key)
        if isinstance(value, Mapping):
            parts.append(f"<details{' open' if key == 'host' else ''}><summary>{escape(_WORDS.get(key, key))}</summary>"
                         f"{definitions(value)}</details>")
        elif value is not None:
            parts.append(f"<p>{escape(key)}: {escape(value)}</p>")
    return "".join(parts)
