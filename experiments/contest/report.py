"""What the contest leaves: table.csv, table.md, summary.json, contest.png."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.common import save_csv, save_json
from experiments.contest.entries import Entry, compared, read_entries
from experiments.contest.networks import Network, Training
from experiments.contest.options import BASELINES, Options
from experiments.contest.picks import Picks
from experiments.contest.picture import picture
from experiments.contest.scoring import PRECISIONS, target_of
from experiments.contest.statements import Statement, decide, verdicts
from experiments.contest.timing import read_latencies
from hwnas.errors import ConfigError, StudyError
from hwnas.system.paths import write_atomic

COLUMNS = {"network": "network", "stem": "stem", "precision": "precision", "top1": "test top-1 (95 %)",
           "seeds": "each seed", "drop": "drop from fp32, points (95 %)", "latency_ms": "latency, ms (90 %)",
           "images_per_s": "images/s", "params": "parameters", "macs": "MACs", "process_cpu_s": "training, CPU s",
           "search_s": "search, s"}
NOTE = ("Top-1 and drops: mean of the seeds, 95 % intervals by test images (not by training again). Latency and "
        "images/s: seed 0's file, one image at a time, 90 % interval. Training: CPU seconds of one training, reading, "
        "export and a first scoring included. Search: seconds of all trials, workers together, and of what preceded "
        "them. Goals: 95 % paired bootstrap over test images, seeds averaged, not corrected for the number of "
        "comparisons (as accurate: not clearly less); rivals are chosen by the same test images. "
        "In brackets after int8: the step of hwnas.compress that made the file (qat: fine-tuned for some epochs more).")


def write_all(networks: Sequence[Network], options: Options, picks: Picks | None) -> str:
    """Write the four files; returns what is printed."""
    entries, timed = read_entries(networks, options, picks), read_latencies(options.out)
    if timed and timed.facts["target"] != options.target:
        raise ConfigError(f"{options.out} was timed for target {timed.facts['target']}. Give target="
                          f"{timed.facts['target']}, or time it for {options.target}: steps=time,report.")
    if not entries:
        raise StudyError(f"{options.out} holds no scored network. Give steps=train,score first.")
    entries.sort(key=lambda one: (one.latency is None, one.latency.ms if one.latency else 0.0))
    statements = decide(entries, target_of(options, "int8", 1).precision)
    rows, lines = [row_of(one, entries) for one in entries], gaps(networks, entries, options)
    lines += [*_uncounted(rows, picks), *_trained(options)]
    save_csv(options.out / "table.csv", rows)
    text = markdown(entries, rows, statements, lines)
    write_atomic(options.out / "table.md", text)
    save_json(options.out / "summary.json", {
        "data": options.data, "recipe": options.recipe, "trained_in_bf16": list(options.bf16), "seeds": options.seeds,
        "target": options.target, "batch": options.batch,
        "timed": dict(timed.facts) if timed else None, "verdicts": verdicts(statements),
        "statements": [{"goal": one.goal, "met": one.met, "text": one.text} for one in statements],
        "missing": lines, "search": dict(picks.search) if picks else None,
        "picks": [vars(one) for one in picks.picks] if picks else [], "rows": rows})
    write_atomic(options.out / "contest.png", picture(entries, *headings(entries, options)))
    return text


def row_of(one: Entry, entries: Sequence[Entry]) -> dict[str, Any]:
    """A line of table.csv: fractions, milliseconds, seconds; empty is not known."""
    low, high = one.top1_interval
    whole = next((other for other in entries if other.network == one.network and other.precision == "fp32"), None)
    drop = compared(whole, one) if whole and set(whole.correct) == set(one.correct) else None
    latency = one.latency
    return {
        "network": one.network.label if one.network.is_ours else one.network.family, "ours": one.network.is_ours,
        "stem": "own" if one.network.is_ours else "stride 1" if one.network.stem_stride else "stock",
        "precision": one.precision, "top1": round(one.top1, 6), "top1_low": round(low, 6), "top1_high": round(high, 6),
        "top1_by_seed": " ".join(f"{float(right.mean()):.4f}" for right in one.correct.values()),
        "n_test": len(one.share), "drop": _rounded(drop and drop.mean), "drop_low": _rounded(drop and drop.low),
        "drop_high": _rounded(drop and drop.high), "latency_ms": _rounded(latency and latency.ms),
        "latency_ms_low": _rounded(latency and latency.low), "latency_ms_high": _rounded(latency and latency.high),
        "images_per_s": round(1e3 / latency.ms, 1) if latency else None,
        "batch_latency_ms": _rounded(one.batch_latency_ms), **one.facts}


def markdown(entries: Sequence[Entry], rows: Sequence[dict[str, Any]], statements: Sequence[Statement],
             missing: Sequence[str]) -> str:
    """Verdicts, every statement, and the table, fastest first."""
    lines = ["## Goals", "", *(f"- {one}" for one in verdicts(statements)), ""]
    for goal in dict.fromkeys(one.goal for one in statements):
        lines += [f"### {goal}", "", *(f"- {one.sentence}" for one in statements if one.goal == goal), ""]
    lines += ["## Networks, fastest first", "", "| " + " | ".join(COLUMNS.values()) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join([*lines, "", NOTE, "", *(f"- {one}" for one in missing)]).rstrip() + "\n"


def gaps(networks: Sequence[Network], entries: Sequence[Entry], options: Options) -> list[str]:
    """What is not in the table though it was to be."""
    held = {(one.network.label, one.precision): one for one in entries}
    found = [f"Baseline {name} takes no part." for name in BASELINES if name not in options.networks]
    if not any(network.is_ours for network in networks):
        found.append("No network of ours takes part.")
    for network in networks:
        absent = [precision for precision in PRECISIONS if (network.label, precision) not in held]
        if absent:
            found.append(f"{network.label} was not scored in {', '.join(absent)}.")
        untimed = [precision for precision in PRECISIONS
                   if (one := held.get((network.label, precision))) and one.latency is None]
        if untimed:
            found.append(f"{network.label} has no valid latency in {', '.join(untimed)}.")
    seeds = [f"{Training(one.network, 0).name[:-3]}" for one in entries
             if one.precision == "fp32" and len(one.correct) < options.seeds]
    if seeds:
        found.append(f"Fewer than {options.seeds} seeds: {', '.join(sorted(seeds))}. Of two stems only the better one "
                     "is to be trained again; where neither was, that is still to be done.")
    return found


def _uncounted(rows: Sequence[dict[str, Any]], picks: Picks | None) -> list[str]:
    """What the cost of the search lacks."""
    found, reused = [], picks.search.get("reused", 0) if picks else 0
    if picks and any(row["ours"] and row["search_s"] is None for row in rows):
        found.append("What preceded the search's trials is not known, nor is its cost: give setup_seconds=N.")
    if reused:
        found.append(f"The search took {reused} accuracies from another search, whose seconds are not counted.")
    return found


def _trained(options: Options) -> list[str]:
    """What differs between the trainings."""
    names = ", ".join(name for name in options.bf16 if name in options.networks)
    return [f"Trained in bf16 autocast, to save time: {names}. All others in fp32."] if names else []


def headings(entries: Sequence[Entry], options: Options) -> tuple[str, str]:
    """Title and subtitle of the picture."""
    timed = read_latencies(options.out)
    host = f"measured on {timed.facts['host']}, one image at a time" if timed else "not timed"
    n, counts = len(entries[0].share), sorted({len(one.correct) for one in entries})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return (f"Test top-1 of the deployed file and its latency: {options.data}, {options.target}",
            f"{host} · {n} test images · all trained {options.epochs} epochs on {options.train_images} images, "
            f"{seeds} seed{'s' if counts[-1] > 1 else ''}")


def _cells(row: dict[str, Any]) -> list[str]:
    def interval(key: str, scale: float, digits: int) -> str:
        if row[key] is None:
            return "–"
        middle, low, high = (f"{scale * row[name]:.{digits}f}" for name in (key, f"{key}_low", f"{key}_high"))
        return f"{middle} ({low} to {high})"

    name = f"**{row['network']}**" if row["ours"] else str(row["network"])
    seeds = ", ".join(f"{100 * float(one):.2f}" for one in row["top1_by_seed"].split())
    precision = row["precision"] + (f" ({row['compressed']})" if row["compressed"] else "")
    return [name, row["stem"], precision, interval("top1", 100, 2), seeds,
            "" if row["precision"] == "fp32" else interval("drop", 100, 2), interval("latency_ms", 1, 4),
            "–" if row["images_per_s"] is None else f"{row['images_per_s']:.0f}", f"{row['params'] / 1e6:.2f} M",
            f"{row['macs'] / 1e6:.1f} M", "–" if row["process_cpu_s"] is None else f"{row['process_cpu_s']:.0f}",
            "" if row["search_s"] is None else f"{row['search_s']:.0f}"]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
