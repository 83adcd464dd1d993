"""The rows of `front.csv` and `front.json`: networks with predictions, measurements and place on the front."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from hwnas.errors import BudgetError, StudyError, UnknownName
from hwnas.networks.network import Network, Shape, read_network
from hwnas.runtimes.runtime import deployed_of
from hwnas.space.architecture import CUT, origin_name
from hwnas.study.objective import COSTS, LATENCY, KnownObjective, Objective
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import ModelFolder, RunFolder, kind_of
from hwnas.system.tables import read_table, table_csv, table_text
from hwnas.target import Target, target_named

FORMAT = "hwnas-front/1"
TOP1 = "top-1"  # metric of classifiers
Kind = Literal["searched", "obvious cut", "whole network", "baseline", "known network", "random network"]


@dataclass(frozen=True, slots=True)
class Cost:
    """A known objective's value for a row: `predicted` (by model or formula) and `exact`; None if unknown."""

    name: str
    predicted: float | None
    exact: float | None

    @property
    def best(self) -> float | None:
        """The exact value if it is known, otherwise the predicted one."""
        return self.predicted if self.exact is None else self.exact


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRow:
    """One finalist, control or baseline; `docs/run-folder.md` documents every column.

    top-1, or what `metric` names in its place, is a fraction from 0 to 1; in files its columns begin with that name.
    Latencies are in milliseconds. An unknown value is None (an empty cell), never 0. `label` is a letter that one can
    say. `control_of` is the finalist that a control was drawn for; it is empty for the space's known networks.
    `verified`: exported, scored and timed in the deployment runtime on `host`. `steps` counts the training steps, with
    the steps of the networks that it was cut from. `objectives` names the costs that the search minimised, and `costs`
    holds all of them but latency. `network` is in no column. It is None if the row was read from a file and `models/`
    does not describe the network.
    """

    id: str
    name: str
    architecture: str
    is_baseline: bool
    label: str = ""
    is_control: bool = False
    control_of: str = ""
    verified: bool = False
    top1_proxy: float | None = None
    top1_estimated: float | None = None
    top1_estimated_low: float | None = None
    top1_estimated_high: float | None = None
    top1_test_fp32: float | None = None
    top1_test: float | None = None
    top1_test_low: float | None = None
    top1_test_high: float | None = None
    n_test: int | None = None
    latency_ms_predicted: float | None = None
    latency_ms_predicted_low: float | None = None
    latency_ms_predicted_high: float | None = None
    latency_ms: float | None = None
    latency_ms_low: float | None = None
    latency_ms_high: float | None = None
    latency_ms_p50: float | None = None
    latency_ms_p90: float | None = None
    latency_ms_p99: float | None = None
    quiet_share: float | None = None
    slowdown: float | None = None
    pause_factor: float | None = None
    steps: int | None = None
    params: int = 0
    macs: int = 0
    reward: float | None = None
    reward_winner: bool = False
    on_front: bool = False
    meets_cap: bool | None = None
    dominated_by: str = ""
    target: str = ""
    host: str = ""
    threads: int | None = None
    precision: str = ""
    int8_share: float | None = None
    fallback_share: float | None = None
    reason: str = ""
    objectives: tuple[str, ...] = (LATENCY,)
    costs: tuple[Cost, ...] = ()
    metric: str = TOP1
    network: Network | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, network: Network, **known: Any) -> FrontRow:
        """Return the row of `network`, with the facts that are known before training."""
        blocks = network.blocks or ()
        return cls(id=network.id, name=network.name, architecture=str(network), is_baseline=network.is_baseline,
                   params=sum(block.params for block in blocks), macs=sum(block.macs for block in blocks),
                   network=network, **known)

    @property
    def deployment(self) -> str:
        """The target if the search chose among several for each network; otherwise empty."""
        if self.network is not None:
            return self.network.deployment
        return self.target if self.target and self.id.endswith(f"-{self.target}") else ""

    @property
    def trained_id(self) -> str:
        """The id without the deployment. It names the weights, as in the trial that found the network."""
        return self.id.removesuffix(f"-{self.target}") if self.deployment else self.id

    @property
    def is_finalist(self) -> bool:
        """True if the search chose it: neither a baseline nor a control."""
        return not (self.is_baseline or self.is_control)

    @property
    def is_known(self) -> bool:
        """True for one of the space's known networks. They are controls of no finalist."""
        return self.is_control and not self.control_of

    @property
    def kind(self) -> Kind:
        """The kind of the network. The others are cut from the whole network. An obvious cut was trained by itself
        beside the search, as anybody would."""
        around, _, images = self.architecture.partition("@")  # only a space's architecture ends in its images' size
        if self.network.obvious if self.network else "-cut_" in self.id:
            return "obvious cut"
        if self.is_control:
            return "known network" if self.is_known else "random network"
        if self.is_baseline:
            return "whole network" if images else "baseline"
        return "whole network" if images and origin_name(around) == f"{CUT}{self.name}" else "searched"

    @property
    def is_whole(self) -> bool:
        """True for a finalist that is the whole network, which the others are cut from."""
        return self.is_finalist and self.kind == "whole network"

    @property
    def best_latency_ms(self) -> float | None:
        """The measured latency if the row is verified, otherwise the predicted one."""
        return self.latency_ms if self.verified else self.latency_ms_predicted

    @property
    def best_top1(self) -> float | None:
        """The top-1 in the deployment runtime if it was scored there, otherwise the fp32 network's."""
        return self.top1_test_fp32 if self.top1_test is None else self.top1_test

    @property
    def losses(self) -> tuple[float, ...]:
        """The values that decide the front, smaller is better: negated top-1, then each objective. NaN if unknown."""
        costs = {LATENCY: self.best_latency_ms, **{cost.name: cost.best for cost in self.costs}}
        values = (None if self.best_top1 is None else -self.best_top1, *(costs.get(name) for name in self.objectives))
        return tuple(math.nan if value is None else value for value in values)


COLUMNS = tuple(column.name for column in fields(FrontRow)
                if column.name not in ("objectives", "costs", "metric", "network"))
_PREFIX = "top1_"  # of columns that are named after the metric in files


def column_of(name: str, metric: str) -> str:
    """Return the name that a field of a row has in files."""
    return f"{metric}_{name.removeprefix(_PREFIX)}" if name.startswith(_PREFIX) and metric != TOP1 else name


def metric_of(header: Sequence[str]) -> str:
    """Return the metric of a file with these columns."""
    ending = f"_{column_of('top1_test_fp32', TOP1).removeprefix(_PREFIX)}"
    named = next((name.removesuffix(ending) for name in header if name.endswith(ending)), "")
    return TOP1 if named in ("", _PREFIX.rstrip("_")) else named


def column_types(metric: str = TOP1) -> dict[str, Any]:
    """Return the types of the columns of front.csv. A column that is not named is text."""
    hints = get_type_hints(FrontRow)
    costs: dict[str, Any] = {
        column: float | None for cost in COSTS.values() for column in (cost.predicted, cost.exact)}
    return costs | {column_of(name, metric): hints[name] for name in COLUMNS}


def dominates(row: FrontRow, other: FrontRow) -> bool:
    """Return whether `row` is no worse than `other` in top-1 and all minimised costs, and better in one of them."""
    pairs = list(zip(row.losses, other.losses, strict=True))
    return all(mine <= theirs for mine, theirs in pairs) and any(mine < theirs for mine, theirs in pairs)


def mark_front(rows: Sequence[FrontRow], cap_ms: float | None = None, cap_p99_ms: float | None = None
               ) -> list[FrontRow]:
    """Return the rows with `on_front`, `meets_cap` and `dominated_by` filled in.

    A network within the caps as measured is on the front if no other such network dominates it. This includes baselines
    and known networks, but never random controls. Once a row is verified, only verified rows are compared; before,
    predictions are compared. `dominated_by` names the most accurate row, controls included, that dominates the row.
    `label`: finalists are A, B, C … from fast to slow, and keep their letters when they are measured again.
    """
    any_verified = any(row.verified for row in rows)
    comparable = [row for row in rows if row.verified == any_verified and row.best_latency_ms is not None
                  and not any(map(math.isnan, row.losses))]
    within = {row.id: within_caps(row, cap_ms, cap_p99_ms) for row in rows}
    members = [row for row in comparable if not row.control_of and within[row.id] is not False]
    marked_rows = []
    finalists = [row for row in sort_rows(rows) if row.is_finalist]
    # New letters, unless each finalist has one of its own already.
    labels = {row.id: _letters(place) for place, row in enumerate(finalists)}
    if len({row.label for row in finalists} - {""}) == len(finalists):
        labels = {row.id: row.label for row in finalists}
    for row in rows:
        # Controls and networks over the caps may dominate a row, but push none off the front.
        better = [other for other in comparable if row in comparable and dominates(other, row)]
        best = max(better, key=lambda other: other.best_top1 or 0.0, default=None)
        on_front = row in members and not any(dominates(other, row) for other in members)
        marked_rows.append(replace(row, label=labels.get(row.id, ""), on_front=on_front,
                                   meets_cap=within[row.id], dominated_by=best.id if best else ""))
    return marked_rows


def _letters(place: int) -> str:
    """Return the letters of a place: A, B, … Z, AA, AB …"""
    return (_letters(place // 26 - 1) if place >= 26 else "") + chr(ord("A") + place % 26)


def within_caps(row: FrontRow, cap_ms: float | None, cap_p99_ms: float | None) -> bool | None:
    """Return whether the measured latency of a row and its 99th percentile meet their caps. One broken cap is enough
    for False. None: there is no cap, or none is broken and one cannot be judged."""
    pairs = ((row.latency_ms, cap_ms), (row.latency_ms_p99, cap_p99_ms))
    met = [None if value is None else value <= cap for value, cap in pairs if cap is not None]
    if False in met:
        return False
    return True if met and None not in met else None


def front_csv(rows: Iterable[FrontRow]) -> str:
    """Return the text of `front.csv`: a header, then a line for each row in the order of `sort_rows`."""
    rows = sort_rows(rows)
    return table_csv([_values(row) for row in rows], [column_of(name, rows[0].metric if rows else TOP1)
                                                      for name in COLUMNS])


def _values(row: FrontRow) -> dict[str, Any]:
    """Return values by column. `objectives` and `costs` have columns if the search minimised more than latency."""
    values: dict[str, Any] = {column_of(name, row.metric): getattr(row, name) for name in COLUMNS}
    if row.objectives == (LATENCY,):
        return values
    values["objectives"] = " ".join(row.objectives)
    for cost in row.costs:
        values |= {COSTS[cost.name].predicted: cost.predicted, COSTS[cost.name].exact: cost.exact}
    return values


def sort_rows(rows: Iterable[FrontRow]) -> list[FrontRow]:
    """Sort rows: finalists before controls before baselines, each from fast to slow, rows without a latency last."""
    return sorted(rows, key=lambda row: (row.is_baseline, row.is_control, row.best_latency_ms is None,
                                         row.best_latency_ms or 0.0, row.id))


def load_front(run: RunFolder) -> list[FrontRow]:
    """Return the rows of a run's `front.csv`. Other columns are ignored. Raises StudyError if the search has not
    written it yet. For a faulty file the error names file, line and column."""
    path = run.front_csv
    if not path.exists():
        raise StudyError(f"{run.path} has no front.csv yet. Finish the search first: hwnas search "
                         f"target=NAME out={run.path}")
    try:
        text = table_text(path)
    except (OSError, ValueError) as error:
        raise StudyError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}.") from None
    header = text.partition("\n")[0].rstrip("\r").split(",")
    metric = metric_of(header)
    missing = [name for name in COLUMNS if column_of(name, metric) not in header]
    if missing:
        raise StudyError(f"{path}: no column {missing[0]!r}: it was cut short, or another version of hwnas wrote it. "
                         "To have it made again: delete it, and give the search again.")
    try:
        table = read_table(text, column_types(metric))
    except ValueError as error:
        raise StudyError(f"{path}, {error}") from None
    rows = [_parse(row, f"{path}, line {number}", metric) for number, row in enumerate(table, 2)]
    # Rows are compared in all their objectives, so these must be the same.
    if other := next((row for row in rows if row.objectives != rows[0].objectives), None):
        raise StudyError(f"{path}: {rows[0].id} and {other.id} are of different objectives. To have it made again: "
                         "delete it, and give the search again.")
    return rows


def save_front(run: RunFolder, rows: Sequence[FrontRow]) -> None:
    """Write `front.csv` of a run, and `front.json`: the same rows with their types."""
    run.write_json(run.front_json, {"format": FORMAT, "rows": [_values(row) for row in sort_rows(rows)]})
    write_atomic(run.front_csv, front_csv(rows))


def choose_row(rows: Sequence[FrontRow], where: str, id: str | None = None, latency_ms: float | None = None
               ) -> FrontRow:
    """Return the row called `id`, otherwise the most accurate verified network, baselines included, that was measured
    within `latency_ms`; of equally accurate ones the fastest. Raises UnknownName for another id, StudyError if none is
    verified, BudgetError if none is fast enough. `where` is the run's folder."""
    if id is not None:
        chosen = next((row for row in rows if row.id == id), None)
        if chosen is None:
            raise UnknownName(f"id in {where}", id, [row.id for row in rows])
        return chosen
    timed = [(row.top1_test, -row.latency_ms, row) for row in rows
             if row.verified and row.latency_ms is not None and row.top1_test is not None]
    if not timed:
        raise StudyError(f"{where}: no network is verified. On the machine it is for: hwnas verify "
                         f"run={where}")
    fitting = [entry for entry in timed if latency_ms is None or -entry[1] <= latency_ms]
    if not fitting:
        _, negative, fastest = max(timed, key=lambda entry: entry[1])
        raise BudgetError(f"no network of {where} was measured within {latency_ms:g} ms; the fastest, {fastest.id}, "
                          f"takes {-negative:.3g} ms. Search with budget.latency_ms.")
    return max(fitting, key=lambda entry: entry[:2])[2]


def target_as_timed(described: Mapping[str, Any], row: FrontRow | None) -> Target:
    """Return the target of a run's row, as its environment describes it, with the number of threads that were timed. In
    a description, `threads: 0` is every core of the machine that was measured, not of the one that reads it."""
    target = target_named(described, row.target if row else "")
    return replace(target, threads=row.threads) if row is not None and row.threads else target


def deployment_of(model: Path) -> Target | None:
    """Return the target on which a run's network, `models/ID`, was deployed and timed; None for another folder."""
    place = model.resolve().parent
    run = RunFolder(place.parent)
    if place.name != "models" or not run.front_csv.is_file() or kind_of(run.path) != run.kind:
        return None
    row = next((row for row in load_front(run) if row.id == model.resolve().name), None)
    return target_as_timed(run.read_environment()["target"], row)


def with_networks(rows: Iterable[FrontRow], run: RunFolder, images: Shape) -> list[FrontRow]:
    """Return the rows with the networks that the run's `models/` describe. For `images` see `read_network`."""
    return [replace(row, network=read_network(run.model(row.id), images)) for row in rows]


def _parse(row: Mapping[str, Any], where: str, metric: str) -> FrontRow:
    names = tuple((row.get("objectives") or LATENCY).split())
    unknown = [name for name in names if name not in COSTS]
    if unknown:
        raise StudyError(f"{where}: objectives cannot be {unknown[0]!r}.")
    costs = tuple(Cost(name, row.get(COSTS[name].predicted), row.get(COSTS[name].exact))
                  for name in names if name != LATENCY)
    values = {name: row[column] for name in COLUMNS if (column := column_of(name, metric)) in row}
    return FrontRow(**values, objectives=names, costs=costs, metric=metric)


def with_costs(rows: Sequence[FrontRow], run: RunFolder, objective: Objective) -> list[FrontRow]:
    """Return the rows with the costs that the search minimised besides latency. The exact values come from the exported
    network: the deployed file's size on disk, the model's MACs, the price at the measured latency. If the search
    minimised latency alone, the rows do not change."""
    names = tuple(cost.name for cost in objective.minimised)
    if names in ((), (LATENCY,)):
        return list(rows)
    costs = [cost for cost in objective.minimised if cost.name != LATENCY]
    return [replace(row, objectives=names, costs=tuple(
        _cost_of(cost, row, run.model(row.id), objective.terms) for cost in costs)) for row in rows]


def _cost_of(objective: KnownObjective, row: FrontRow, folder: ModelFolder, terms: Target) -> Cost:
    """Return the predicted and the exact value of `objective` for a row."""
    if objective.of_latency is not None:
        predicted, exact = (None if latency_ms is None else float(objective.of_latency(latency_ms, terms))
                            for latency_ms in (row.latency_ms_predicted, row.latency_ms))
        return Cost(objective.name, predicted, exact)
    earlier = next((cost for cost in row.costs if cost.name == objective.name), Cost(objective.name, None, None))
    predicted, exact = earlier.predicted, earlier.exact  # these remain if the files were moved away
    blocks = None if row.network is None else row.network.blocks
    file = deployed_of(folder.deployed(terms.precision), terms.runtime)
    if blocks is not None:
        predicted = float(objective.of(None, blocks, terms))
    if objective.of_file is None:
        exact = float(getattr(row, objective.exact))
    elif file.is_file():
        exact = objective.of_file(file)
    return Cost(objective.name, predicted, exact)
