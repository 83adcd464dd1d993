"""The command that finds the cheapest network and deployment of verified runs for a load within a service level."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.benchmark.files import noting_waits
from hwnas.choose.choice import Key, Option, ServedNetwork, Slo, Traffic, choose, tell_changes
from hwnas.choose.curve import CURVE, LoadCurve, add_curves
from hwnas.choose.load import FEWEST, LEAST, MOST_TIMES, SHARES, curve_seconds, import_loadgen
from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, read_command, section
from hwnas.cli.progress import show, text_table
from hwnas.data.dataset import CLASSIFICATION
from hwnas.errors import BudgetError, CandidateError, ConfigError, MeasurementInvalid, ModelError, StudyError, shown
from hwnas.front.pairs import Pair, load_pairs
from hwnas.front.rows import FrontRow, load_front
from hwnas.runtimes.child import run_child
from hwnas.runtimes.classifier import deployed_file
from hwnas.runtimes.runtime import load_runtime
from hwnas.system.cores import usable_cores
from hwnas.system.documents import content_of, load_yaml, now, yaml_text
from hwnas.system.paths import make_writable, write_atomic
from hwnas.system.run_folder import RunFolder, check_replaceable
from hwnas.system.tables import table_csv
from hwnas.target import Host, Target, target_named

if TYPE_CHECKING:
    from hwnas.cli.progress import Console

USAGE = """The cheapest network and deployment of verified runs that serve a load within a service level.

    hwnas choose runs=[runs/a,runs/b] prices=prices.yaml traffic.rate=200 slo.p99_ms=20 slo.top1=0.95"""
_TRIES = 4  # choices that are checked against the service level, until one keeps it
_BACK = 0.95  # of a load that was too high: the new limit
_SILENT_S = 900.0  # longest silence of a measuring child, beside the time of its longest run


@dataclass(frozen=True)
class ChooseOptions:
    """The options of `conf/choose.yaml`."""

    traffic: Traffic
    slo: Slo
    prices: str
    runs: tuple[str, ...] = option(what="a list of run folders")
    networks: int = option(low=1, high=1000)
    batch: tuple[int, ...] = option(low=1, high=4096, what="a list of whole numbers from 1 to 4096")
    streams: tuple[int, ...] | None = option(low=1, high=1024, what="a list of whole numbers from 1 to 1024")
    seconds: float = option(low=1, high=3600)
    check_seconds: float = option(low=0, high=86_400)
    seed: int = option(low=0)
    out: str = option()
    memory_mb: int = option(low=1)


@dataclass(frozen=True)
class ServedRow:
    """A verified row of a run, in one of the ways to serve it."""

    folder: RunFolder
    row: FrontRow
    target: Target
    streams: int

    @property
    def file(self) -> Path:
        """The file of its load curve, in the run's folder."""
        return self.folder.path / "load" / f"{self.row.id}-b{self.target.batch}-s{self.streams}.json"

    @property
    def most(self) -> float:
        """The estimated queries a second at saturation: each stream makes one call after another."""
        return 1e3 * self.target.batch * self.streams / (self.row.latency_ms or 1.0)

    @property
    def said(self) -> str:
        """A description in a few words."""
        return f"{self.row.id} on {self.target.name}, batch {self.target.batch}, streams {self.streams}"


def main(config: Config, console: Console) -> None:
    """Measure missing load curves, choose, and check the choice against its service level (`conf/choose.yaml`)."""
    if not config["runs"] or not config["prices"]:
        raise ConfigError("which runs, and at what prices? Add runs=[DIR,DIR] and prices=FILE.yaml, with a line "
                          "NAME: price per hour for each host.")
    if section(config, "slo").get("p99_ms") is None:
        raise ConfigError("which service level? Add slo.p99_ms=MS, and slo.top1=0.95 for a least accuracy.")
    if section(config, "traffic").get("rate") is None:
        raise ConfigError("how many queries a second? Add traffic.rate=N.")
    # 1. Read everything that can be wrong before minutes of measurement.
    options = read_command(ChooseOptions, config)
    traffic, slo, out = options.traffic, options.slo, Path(options.out)
    check_replaceable(out / "choice.json")
    check_replaceable(out / "choice.csv", begin="run,id,")
    prices = read_prices(Path(options.prices))
    folders = [RunFolder.open(path) for path in dict.fromkeys(map(Path, options.runs))]
    check_alike(folders)
    candidates = [each for folder in folders for each in candidates_of(folder, options)]
    if not candidates:
        best = {folder.path: max(_verified(folder), key=lambda row: row.top1_test or 0.0) for folder in folders}
        most_accurate = (f"{path} has no such network, the most accurate is {row.id} with {row.top1_test:.4f}"
                         for path, row in best.items())
        raise BudgetError(f"slo.top1={slo.top1:g}: {', '.join(most_accurate)}. Allow less, or search for longer.")
    if unpriced := next((each.row.host for each in candidates if each.row.host not in prices), None):
        raise ConfigError(f"{options.prices} has no price for {unpriced}. Add a line: {unpriced}: price per hour.")
    here = Host.detect()
    make_writable(out)  # before what takes minutes
    # 2. Get a load curve of each candidate. A pair's curve is computed from the curves of its two networks.
    left_out: list[str] = []
    networks = _served(candidates, here, options, console, left_out)
    pairs = [each for folder in folders for each in _served_pairs(folder, slo, networks)]
    served = [(each, prices[each.host]) for each in [*networks, *pairs] if each.top1 >= slo.top1]
    if not served:
        raise MeasurementInvalid(f"no load curve can be used: {left_out[0]}")
    # 3. Choose, check the choice, and say what would change it.
    ranked, limits, checked = _hold(served, candidates, here, options, console)
    changes = tell_changes(ranked, served, traffic, slo, limits)
    _write(options, ranked, checked, changes, left_out)
    for line in _lines(ranked, checked, changes):
        show(line)
    console.say(f"choice: {out}/choice.json and choice.csv")


def read_prices(path: Path) -> dict[str, float]:
    """Return prices an hour by host, in dollars or any other currency; ConfigError names file and host."""
    usage = "Write a line for each host: NAME: price per hour."
    try:
        data: Any = load_yaml(yaml_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}. {usage}") from None
    if not isinstance(data, Mapping) or not data:
        raise ConfigError(f"{path} holds no prices. {usage}")
    for host, price in data.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price <= 1e6:
            raise ConfigError(f"{path}: the price of {shown(host)} must be a number above 0 and up to 1000000, got "
                              f"{shown(price)}. {usage}")
    return {str(host): float(price) for host, price in data.items()}


def check_alike(folders: Sequence[RunFolder]) -> None:
    """Raise ConfigError for runs that cannot be compared: of different classes, or not of classifiers."""
    data = [folder.read_environment().get("dataset") or {} for folder in folders]
    for folder, own in zip(folders, data, strict=True):
        if (task := own.get("task", CLASSIFICATION)) != CLASSIFICATION:
            raise ConfigError(f"{folder.path} is for {task}, and slo.top1 is of classifiers. Give runs of these.")
        if own.get("class_names") != data[0].get("class_names"):
            raise ConfigError(f"{folder.path} knows other classes than {folders[0].path}. Give runs of the same ones.")


def candidates_of(folder: RunFolder, options: ChooseOptions) -> list[ServedRow]:
    """Return the networks of a run to compare, each with every batch and number of streams: the fastest verified ones
    that are accurate enough, and both of its fastest such pair. StudyError if no network is verified."""
    verified, slo = _verified(folder), options.slo
    enough = [row for row in verified if (row.top1_test or 0.0) >= slo.top1]
    environment = folder.read_environment()
    candidates, rows = [], sorted(enough, key=lambda row: row.latency_ms or math.inf)[:options.networks]
    members = [name for pair in _fastest_pair(folder, slo) for name in (pair.fast, pair.accurate)]
    for row in [*rows, *(row for row in verified if row.id in members and row not in rows)]:
        target = target_named(environment["target"], row.target)
        if target.device != "cpu":
            raise ConfigError(f"{folder.path} is of {target.name}: load on a GPU is not measured, as images would be "
                              "there already. Give runs of CPUs.")
        cores = environment.get("host", {}).get("cores") or len(usable_cores())
        most = max(1, cores // (target.threads or cores))  # streams whose threads have a core each
        for batch in sorted({*options.batch}):
            candidates += [ServedRow(folder, row, replace(target, batch=batch), streams)
                           for streams in sorted({*(options.streams or (1, most))})]
    return candidates


def _verified(folder: RunFolder) -> list[FrontRow]:
    """Return the verified networks of a run; StudyError if there are none."""
    rows = [row for row in load_front(folder) if row.verified and row.top1_test is not None]
    if not rows:
        raise StudyError(f"{folder.path}: no network is verified. On the machine it is for: hwnas verify "
                         f"run={folder.path}")
    return rows


def _fastest_pair(folder: RunFolder, slo: Slo) -> list[Pair]:
    """Return the pair of a run with the lowest mean latency, among pairs that are accurate enough, if there is any."""
    return sorted((pair for pair in load_pairs(folder) if pair.top1_test >= slo.top1),
                  key=lambda pair: pair.latency_ms_mean)[:1]


def _served_pairs(folder: RunFolder, slo: Slo, networks: Sequence[ServedNetwork]) -> list[ServedNetwork]:
    """Return the run's pair as a server that runs both networks, for each deployment in which both have load curves."""
    by_key = {each.key: each for each in networks}
    return [replace(second, id=pair.id, name=pair.id, top1=pair.top1_test,
                    target=" then ".join(dict.fromkeys((first.target, second.target))),
                    curve=add_curves(first.curve, second.curve, pair.share))
            for pair in _fastest_pair(folder, slo) for (run, id, batch, streams), first in by_key.items()
            if (run, id) == (str(folder.path), pair.fast)
            and (second := by_key.get((run, pair.accurate, batch, streams))) is not None]


def _served(candidates: Sequence[ServedRow], here: Host, options: ChooseOptions, console: Console,
            left_out: list[str]) -> list[ServedNetwork]:
    """Return each candidate with a load curve, stored in the run or measured now; add the others to `left_out`."""
    served, curves = [], [_kept(each, here, options) for each in candidates]
    missing_s = [curve_seconds(each.most, options.seconds) for each, curve_data in zip(candidates, curves, strict=True)
                 if curve_data is None and each.row.host == here.name and not _too_slow(each, options)]
    if missing_s:
        minutes = max(0.1, sum(missing_s) / 60)
        console.say(f"{len(missing_s)} load curves are to be measured, about {minutes:.2g} min in all "
                    f"(seconds={options.seconds:g}, networks={options.networks}); then the choice is checked for "
                    f"{options.check_seconds:g} s.")
    # Measure what can be measured here; a candidate without a usable curve is left out with a remark.
    for number, (each, curve_data) in enumerate(zip(candidates, curves, strict=True), 1):
        fault = ""
        if curve_data is None and each.row.host != here.name:
            fault = (f"its load curve is of {each.row.host}, and not in {each.file.parent}. Give the command there, "
                     "and bring the run's folder here")
        elif curve_data is None and not (fault := _too_slow(each, options)):
            try:
                curve_data = _measure(each, options, console, f"load {number} of {len(candidates)}: {each.said}")
            except (CandidateError, ModelError) as error:
                fault = str(error)
        if curve_data is not None:
            curve = LoadCurve.from_dict(curve_data)
            fault = curve.invalid and f"LoadGen calls it INVALID, {curve.invalid}"
        if curve_data is None or fault:
            left_out.append(f"{each.said}: {fault}")
            console.remark(f"left out: {left_out[-1]}")
            continue
        served.append(ServedNetwork(str(each.folder.path), each.row.id, each.row.name, each.target.name, each.row.host,
                                    each.row.top1_test or 0.0, curve))
    return served


def _too_slow(each: ServedRow, options: ChooseOptions) -> str:
    """Return why LoadGen would call a load curve INVALID after minutes; empty if its queries suffice."""
    least_s = LEAST / (SHARES[0] * each.most)
    return "" if least_s <= MOST_TIMES * options.seconds else (
        f"it answers about {each.most:.2g} queries/s, so {SHARES[0]:.0%} of them are too few for a p99 in {MOST_TIMES} "
        f"times seconds={options.seconds:g}. Give seconds={math.ceil(1.2 * least_s / MOST_TIMES)}")


def _kept(each: ServedRow, here: Host, options: ChooseOptions) -> dict[str, Any] | None:
    """Return the stored load curve of a candidate; None if there is none, or if it is of another file or deployment.
    None also if it can be measured again here and is of another version of the runtime, too short, or INVALID."""
    data = CURVE.find(each.file)
    facts = (each.row.id, each.target.name, each.target.batch, each.streams, each.row.host, content_of(_deployed(each)))
    if data is None or facts != tuple(data[key] for key in ("id", "target", "batch", "streams", "host", "file")):
        return None
    if each.row.host != here.name:
        return data  # it cannot be measured again here
    same = data["runtime"] == load_runtime(each.target.runtime).version() and data["seconds"] >= options.seconds
    return data if same and not LoadCurve.from_dict(data).invalid else None


def _measure(each: ServedRow, options: ChooseOptions, console: Console, title: str) -> dict[str, Any]:
    import_loadgen()
    with console.step(title, curve_seconds(each.most, options.seconds)) as report:
        raw = run_child("hwnas.choose.load", _job(each, options), each.target,
                        timeout_s=_SILENT_S + 2 * MOST_TIMES * options.seconds,
                        memory_mb=options.memory_mb, progress=noting_waits(report, console))
    document = {**CURVE.header, "id": each.row.id, "target": each.target.name, "host": each.row.host,
                "runtime": load_runtime(each.target.runtime).version(), "file": content_of(_deployed(each)),
                "streams": each.streams, "batch": each.target.batch, "seconds": options.seconds, "measured_at": now(),
                **raw}
    each.file.parent.mkdir(exist_ok=True)
    each.folder.write_json(each.file, document)
    return CURVE.check(document, each.file)


def _hold(served: Sequence[tuple[ServedNetwork, float]], candidates: Sequence[ServedRow], here: Host,
          options: ChooseOptions, console: Console) -> tuple[list[Option], dict[Key, float], dict[str, Any]]:
    """Choose, and let LoadGen check the choice at its load. If it fails, choose again with a lower limit for it. Return
    the options, the best first; these limits; and the result of the check."""
    limits: dict[Key, float] = {}
    traffic, slo = options.traffic, options.slo
    by_key = {(str(each.folder.path), each.row.id, each.target.batch, each.streams): each for each in candidates}
    for _ in range(_TRIES):
        ranked = choose(served, traffic, slo, limits)
        best = ranked[0]
        each = by_key.get(best.served.key)
        if each is None:
            return ranked, limits, {"state": "not checked: it is a pair, whose networks were measured one by one"}
        load = traffic.rate / best.machines
        if reason := _unchecked(each, load, here, options):
            return ranked, limits, {"state": f"not checked: {reason}"}
        seconds = max(options.check_seconds, FEWEST / load)
        with console.step(f"check {load:.4g} queries/s", seconds) as report:
            job = {**_job(each, options), "rate": load, "p99_ms": slo.p99_ms, "seconds": seconds,
                   "seed": options.seed + 1}
            measured = run_child("hwnas.choose.load", job, each.target, timeout_s=_SILENT_S + 2 * seconds,
                                 memory_mb=options.memory_mb, progress=noting_waits(report, console))
        checked = {"rate": load, "seconds": seconds, "predicted_p99_ms": best.p99_ms, "state": (
            "kept" if measured["valid"] else "missed"), **{key: measured[key] for key in (
                "p50_ms", "p99_ms", "valid", "reason")}}
        if measured["valid"]:
            return ranked, limits, checked
        console.remark(f"{best.served.said}: LoadGen calls {load:.4g} queries/s INVALID, with a p99 of "
                       f"{measured['p99_ms']:.4g} ms ({measured['reason']}). Chosen again with less on a machine.")
        limits[best.served.key] = _BACK * load
    return choose(served, traffic, slo, limits), limits, {
        "state": f"not known: {_TRIES} choices missed it, and this next one was not checked"}


def _unchecked(each: ServedRow, load: float, here: Host, options: ChooseOptions) -> str:
    """Return the reason why LoadGen cannot check a choice against its service level; empty if it can."""
    if each.row.host != here.name:
        return f"it is of {each.row.host}, this is another machine"
    if options.check_seconds == 0:
        return "check_seconds=0"
    if FEWEST / load > MOST_TIMES * options.check_seconds:
        return f"{load:.3g} queries/s are too few to say in {MOST_TIMES} times check_seconds={options.check_seconds:g}"
    return ""


def _job(each: ServedRow, options: ChooseOptions) -> dict[str, Any]:
    return {"path": str(_deployed(each)), "label": each.row.id, "streams": each.streams, "seconds": options.seconds,
            "seed": options.seed}


def _deployed(each: ServedRow) -> Path:
    return deployed_file(each.folder.model(each.row.id).path, each.target.precision, each.target).absolute()


def _row(option: Option) -> dict[str, Any]:
    served = option.served
    figures = {each.name: getattr(option, each.name) for each in fields(option) if each.name != "served"}
    return {"run": served.run, "id": served.id, "name": served.name, "target": served.target, "host": served.host,
            "batch": served.curve.batch, "streams": served.curve.streams, "top1": served.top1,
            "saturation": served.curve.most, "drift": served.curve.drift,
            **{name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in figures.items()},
            "p99_by": "both networks' " * ("+" in served.id) + served.curve.told_by(
                option.utilisation * served.curve.most)}


def _write(options: ChooseOptions, ranked: Sequence[Option], checked: dict[str, Any], changes: Sequence[str],
           left_out: Sequence[str]) -> None:
    out, rows = Path(options.out), [_row(each) for each in ranked]
    write_atomic(out / "choice.csv", table_csv(rows))
    write_atomic(out / "choice.json", json.dumps({
        "format": "hwnas-choice/1", "made_at": now(), "traffic": asdict(options.traffic), "slo": asdict(options.slo),
        "options": rows, "checked": checked, "changes": list(changes), "left_out": list(left_out)}, indent=1))


def _lines(ranked: Sequence[Option], checked: dict[str, Any], changes: Sequence[str]) -> list[str]:
    """Return the lines to print: the choice, the next two, the result of its check, and what would change it."""
    table = [["", "machines", "per million", "interval", "top-1", "p99", "of saturation", "host"]]
    table += [[each.served.said, str(each.machines), f"{each.per_million:.4g}",
               f"{each.per_million_low:.4g} to {each.per_million_high:.4g}", f"{each.served.top1:.1%}",
               f"{each.p99_ms:.3g} ms", f"{each.utilisation:.0%}", each.served.host] for each in ranked[:3]]
    state = str(checked["state"])
    if "rate" in checked:
        state = (f"{'kept' if checked['valid'] else 'MISSED'} in {checked['seconds']:.0f} s of LoadGen at "
                 f"{checked['rate']:.4g} queries/s: p99 {checked['p99_ms']:.3g} ms (expected "
                 f"{checked['predicted_p99_ms']:.3g})")
    return [*text_table(table, words=(0, 7)), f"service level of the first: {state}", *changes]


command = partial(run_command, main, "choose", USAGE, target=False, lists=("runs", "batch", "streams"))

if __name__ == "__main__":
    sys.exit(command())
