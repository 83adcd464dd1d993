"""Make a verified front from finalists: train and export them, score and time them with the baselines, write the run,
and sum up the result."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from hwnas import __version__
from hwnas.cli.progress import Console
from hwnas.errors import CandidateError, Unfinished
from hwnas.front.card import card_text
from hwnas.front.comparison import DEPLOY, Comparison, compare, compare_deployed, compare_precisions, shown_row
from hwnas.front.make import BuildSettings, fault_of, file_of, make_all, steps_left
from hwnas.front.pairs import Pair, Scored, choose_pairs, save_pairs
from hwnas.front.report import read_report, write_report
from hwnas.front.rows import FrontRow, mark_front, save_front, with_costs
from hwnas.front.score import Scores, Timing, compare_sets, validated_rows, verify_rows
from hwnas.latency.measurement import Protocol, describe_machine
from hwnas.latency.remote import RemoteDevice
from hwnas.latency.timing import Device
from hwnas.networks.network import FoundNetwork, Network
from hwnas.pictures import figure_bytes
from hwnas.runtimes.child import probe_model
from hwnas.study.objective import COSTS, Objective
from hwnas.system.documents import now
from hwnas.system.libraries import version_of
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import ENVIRONMENT, Manifest, ModelFolder, RunFolder
from hwnas.target import Host, Target, describe_targets
from hwnas.tasks.task import Grades, load_task

TOLD = 2  # pairs of networks in the summary: the ones that gain most speed
# Libraries whose versions `environment.json` lists.
_PACKAGES = ("torch", "torchvision", "timm", "optuna", "onnx", "onnxruntime", "openvino", "numpy", "scikit-learn")


@dataclass(frozen=True)
class SearchFacts:
    """Facts of the search for the report: target host, space, cap, quality of the latency model and so on. `host` is
    the machine that the search was for; it may differ from this one. `target_name` is the name of its target, or of its
    set of targets."""

    host: str
    space: str
    timing: Timing
    target_name: str = ""
    cap_ms: float | None = None
    cap_p99_ms: float | None = None
    latency_model: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """A front with the content of its run folder: `rows` as in front.csv, `environment` as in its file. `scores` holds
    answers and samples; it is empty if nothing was verified."""

    rows: list[FrontRow]
    environment: Mapping[str, Any]
    comparisons: list[Comparison]
    scores: Scores
    pairs: list[Pair]


def make_rows(rows: Sequence[FrontRow], run: RunFolder, making: BuildSettings, workers: int, console: Console
              ) -> list[FrontRow]:
    """Train, export and quantise the network of every row, and score it in fp32; a failure becomes the row's reason.
    After a kill at any point, the same call continues: finished networks are not made again."""
    metric = load_task(making.dataset.task).metric
    by_id = {row.id: replace(row, metric=metric) for row in rows}
    own, n = replace(making, begun={}), len(making.dataset.train)  # a trial's steps are part of a training
    networks = [row.network for row in rows if row.network is not None]
    with console.step("train finalists and baselines") as report:
        for network, result in make_all(networks, run, making, workers, report):
            row = by_id[network.id]
            if isinstance(result, str):
                console.say(f"{network.id}: {result}")
                by_id[network.id] = replace(row, reason=result)
                continue
            for remark in result.remarks:
                console.remark(f"{network.id}: {remark}.")
            by_id[network.id] = replace(row, params=result.params, macs=result.macs, top1_test_fp32=result.top1_fp32,
                                        n_test=len(making.dataset.test),
                                        steps=row.steps or own.recipe_of(network).steps_for(n))
    return list(by_id.values())


def verify_front(rows: Sequence[FrontRow], run: RunFolder, making: BuildSettings, timing: Timing, objective: Objective,
                 environment: Mapping[str, Any], console: Console, memory_mb: int | None = None) -> Results:
    """Score and time `rows` on the device of `timing`, and mark the front by the measurements. Predictions stay as the
    search used them. With `memory_mb`, another process may have made the files: each is first opened with at most that
    much memory, in a child process or on the remote device."""
    # Refuse files that must not be opened. Their rows get the reason, and the others are verified.
    files, refused = {}, {}
    for row in rows:
        target = making.target
        try:
            target = making.target_of(row.network, row.target)
            _check_file(row, run.model(row.id), target, making, memory_mb, timing.device)
        except CandidateError as error:
            refused[row.id] = str(error)
        files[row.id] = file_of(target, run.model(row.id)), target
    # Score and time the rows, and describe in the environment how and on which machine.
    scores = verify_rows(rows, files, making.dataset, making.target, timing, console, refused)
    runtimes = dict.fromkeys([making.target.runtime, *(target.runtime for _, target in files.values())])
    environment = {**environment, "created": now(), "host": timing.device.host.to_dict(), "verified_here": True,
                   **({} if timing.device.is_here else {"verified_from": Host.detect().name}),
                   "runtime": ", ".join(timing.device.runtime(name).version() for name in runtimes),
                   "executed": scores.executed,
                   "measuring": {**environment["measuring"],
                                 "machine": describe_machine(scores.measurements.values())},
                   "versions": versions()}
    results = results_of(scores, run, making, objective, environment)
    # Remark on a test set that differs from the validation set, by the answers of the most accurate network.
    best = max((row for row in results.rows if row.network is not None and row.top1_test_fp32 is not None),
               key=lambda row: row.top1_test_fp32 or 0.0, default=None)
    if not len(making.dataset.validation):
        console.say(f"no pairs of networks: {making.dataset.name} has no validation images, which choose them.")
    elif memory_mb is None and best is not None and best.network is not None and (
            remark := compare_sets(run.model(best.id).onnx, best.network.fed(making.dataset, later=True))):
        console.remark(f"note: {remark}.")
    # Say which finalists break a cap as measured, or cannot be judged.
    for row in results.rows:
        if not (row.verified and row.is_finalist):  # the summary says why one is not verified
            continue
        if row.meets_cap is False:
            tail = "" if row.latency_ms_p99 is None else f", 99 of 100 calls within {row.latency_ms_p99:.4g} ms"
            console.say(f"{row.id} breaks its cap: {row.latency_ms:.4g} ms measured{tail}.")
        elif environment.get("cap_p99_ms") is not None and row.latency_ms_p99 is None:
            console.say(f"{row.id}: its calls are too few for a 99th percentile, so budget.p99_ms is not judged. "
                        "Raise verification.seconds.")
    return results


def _check_file(row: FrontRow, folder: ModelFolder, target: Target, making: BuildSettings, memory_mb: int | None,
                device: Device) -> None:
    """Raise CandidateError if a row's deployed file exists and must not be opened on a device."""
    path = file_of(target, folder)
    if row.network is None or not path.is_file():
        return
    if fault := fault_of(row.network, folder, making):
        raise CandidateError(fault)
    if memory_mb is not None and isinstance(device, RemoteDevice):
        device.runtime(target.runtime).compile(path, target, memory_mb)
    elif memory_mb is not None:
        probe_model(path, target, memory_mb=memory_mb)


def check_verified(rows: Sequence[FrontRow], run: RunFolder) -> None:
    """Raise Unfinished, with the ids, if some of `rows` are not verified. The summary says why."""
    missing = [row.id for row in rows if not row.verified]
    if missing:
        raise Unfinished(f"{len(missing)} of {len(rows)} networks are not verified ({', '.join(missing)}). To time "
                         f"them again: hwnas verify run={run.path}", part=len(missing) < len(rows))


def results_of(scores: Scores, run: RunFolder, making: BuildSettings, objective: Objective,
               environment: Mapping[str, Any]) -> Results:
    """Return the results of `scores`: rows with all minimised costs and the front marked, comparisons, and pairs."""
    caps = environment.get("cap_ms"), environment.get("cap_p99_ms")
    rows = mark_front(with_costs(scores.rows, run, objective), *caps)
    correct = scores.grades
    comparisons = [*compare_deployed(rows, correct, environment.get("cap_ms")), *compare(rows, correct),
                   *compare_precisions(rows, correct, making.dataset.class_names)]
    # Cuts can start with the weights of the network that they are cut from. Say so if they did not.
    if any(row.is_finalist and isinstance(row.network, FoundNetwork) and row.network.architecture.around
           and not row.network.provenance for row in rows):
        comparisons = [replace(each, sentence=f"{each.sentence} (These cuts began with random weights.)")
                       for each in comparisons]
    data = making.dataset
    # Pairs need, on both sets, whether each answer is right and how confident the network is.
    test, validation = ({name: Scored(each.values == labels, each.confidence) for name, each in answers.items()
                         if each.confidence is not None}
                        for answers, labels in ((scores.answers, data.test.labels),
                                                (scores.validated, data.validation.labels[validated_rows(data)])))
    return Results(rows, environment, comparisons, scores, choose_pairs(rows, test, validation, *caps))


def write_results(run: RunFolder, results: Results, making: BuildSettings) -> None:
    """Write answers, samples, comparisons, environment, cards, pairs, front, pictures and report, in this order. A kill
    leaves no half-written file, and no report until all files are of this verification."""
    environment, scores, data = results.environment, results.scores, making.dataset
    run.report.unlink(missing_ok=True)
    if scores.answers:
        protocol = next((measurement.protocol for measurement in scores.measurements.values()), Protocol())
        predicted = {name: each.values for name, each in scores.answers.items()}
        run.write_arrays(run.predictions, {**predicted, "labels": data.test.targets})
        # Answers and confidences on both sets, from which pairs were chosen.
        if scores.validated:
            confidences = {**{f"{name}.test_confidence": each.confidence for name, each in scores.answers.items()},
                           **{f"{name}.confidence": each.confidence for name, each in scores.validated.items()}}
            run.write_arrays(run.confidences, {
                "labels": data.validation.labels[validated_rows(data)],
                **{name: each for name, each in confidences.items() if each is not None},
                **{name: each.values for name, each in scores.validated.items()}})
        run.write_json(run.measurements, {
            "format": "hwnas-measurements/1", "host": environment["host"]["name"], "created": environment["created"],
            "runtime": environment["runtime"], "protocol": protocol.to_dict(),
            "networks": {name: measurement.to_dict() for name, measurement in scores.measurements.items()}})
    run.write_json(run.comparisons, [asdict(comparison) for comparison in results.comparisons])
    run.write_json(run.environment, environment)
    # A card for each network that was exported, verified or not.
    for row in results.rows:
        folder = run.model(row.id)
        if row.network is not None and folder.onnx.is_file():
            is_int8 = making.target_of(row.network).precision == "int8"
            manifest = Manifest.find(folder.path) if is_int8 else None
            quantised = manifest.quantisation.get("text", "") if manifest else ""
            pair = next((each for each in results.pairs if each.accurate == row.id), None)
            write_atomic(folder.card, _card(row, row.network, making, environment, quantised,
                                            scores.grades.get(row.id), pair))
    save_pairs(run, results.pairs)
    save_front(run, results.rows)
    _draw_answers(run, results, making)
    write_report(run, read_report(run, scores.grades))


def _draw_answers(run: RunFolder, results: Results, making: BuildSettings) -> None:
    """Write a picture of the answers of the network to deploy, if its task has one."""
    run.examples.unlink(missing_ok=True)
    row, task = shown_row(results.rows, [asdict(each) for each in results.comparisons]), load_task(making.dataset.task)
    scores = results.scores
    if row is None or row.network is None or row.id not in scores.answers or not task.draws:
        return
    test = making.dataset.test.resize(row.network.shape.image_size)
    figure = task.draw_answers(scores.grades[row.id], scores.answers[row.id].values, test.images, test.targets,
                               making.dataset.class_names)
    if figure is not None:
        write_atomic(run.examples, figure_bytes(figure, "png"))


def _card(row: FrontRow, network: Network, making: BuildSettings, environment: Mapping[str, Any],
          quantised: str, grades: Grades | None, pair: Pair | None) -> str:
    data = network.fed(making.dataset, later=True)
    # The card describes the whole training, so the steps of a trial are not left out of the recipe here.
    own_recipe = replace(making, begun={}).recipe_of(network)
    recipe = f"Recipe `{own_recipe.name}`, seed {making.seed}, {len(data.train)} training images: " \
             f"{', '.join(f'{key} {value}' for key, value in asdict(own_recipe).items() if key != 'name')}."
    if race_text := (environment.get("race") or {}).get(network.trained_id):
        recipe = f"A race, seed {making.seed}, {len(data.train)} training images: {race_text}. Each leg by recipe " \
                 f"`{own_recipe.name}`, but for its rate and length."
    done, steps = (environment.get("begun") or {}).get(network.trained_id, 0), making.recipe.steps_for(len(data.train))
    if trial_steps := steps - steps_left(steps, done):
        recipe += f" Of its {steps} steps the first {trial_steps} were those of its trial."
    target, versions_of = making.target_of(network), str(environment["runtime"]).split(", ")
    version = next((text for text in versions_of if text.startswith(target.runtime)), str(environment["runtime"]))
    return card_text(row, data, target, date=str(environment["created"])[:10], runtime=version, recipe=recipe,
                     quantised=quantised,
                     recall={} if grades is None else grades.by_class(data.class_names),
                     machine=str(environment["measuring"].get("machine", "")), pair=pair)


def environment_of(making: BuildSettings, facts: SearchFacts, networks: Iterable[Network] = ()) -> dict[str, Any]:
    """Return the content of `environment.json` before `networks` are verified. To verify on another host, `hwnas
    verify` needs `dataset`, `target`, `recipe` and `measuring`."""
    data, target, networks = making.dataset, making.target, list(networks)
    constant = data.constant_answer()
    are_pretrained = [bool(network.provenance) for network in networks]
    # The report names one number of steps: of fine-tuning, if all networks start with pretrained weights. The steps of
    # trials are part of it.
    whole = replace(making, begun={})
    recipe = whole.recipe_of(networks[0]) if are_pretrained and all(are_pretrained) else making.recipe
    return {
        **ENVIRONMENT.header, "created": now(), "searched_for": facts.host, "verified_here": False,
        "host": Host.detect().to_dict(), "target": describe_targets(facts.target_name, making.targets or (target,)),
        "runtime": facts.timing.device.runtime(target.runtime).version(),
        "versions": versions(), "space": facts.space, "cap_ms": facts.cap_ms,
        "cap_p99_ms": facts.cap_p99_ms,
        "training": {"steps": recipe.steps_for(len(data.train)),
                     "pretrained": any(are_pretrained), "all_pretrained": bool(are_pretrained) and all(are_pretrained)},
        "dataset": {"name": data.name, "title": data.title, "fingerprint": data.fingerprint,
                    "image_size": data.image_size,
                    "channels": data.channels, "mean": list(data.mean), "std": list(data.std), "skipped": data.skipped,
                    "left_out": dict(data.left_out), "kinds": list(data.kinds),
                    **({"constant_answer": dict(zip(("class", "top1"), constant, strict=True))} if constant else {}),
                    "task": data.task,
                    "images": {"train": len(data.train), "validation": len(data.validation), "test": len(data.test)},
                    "class_names": list(data.class_names)},
        "latency_model": dict(facts.latency_model), "search": dict(facts.search),
        "recipe": asdict(making.recipe),
        "executed": {},
        "measuring": {"seconds": facts.timing.seconds, "seed": facts.timing.seed,
                      "reference": facts.timing.reference.to_dict()},
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, hwnas and the libraries that it needs, if they are installed."""
    installed = {"python": platform.python_version(), "hwnas": __version__}
    for name in _PACKAGES:
        try:
            installed[name] = version_of(name)
        except PackageNotFoundError:
            continue
    return installed


def summary_lines(rows: Sequence[FrontRow], comparisons: Sequence[Mapping[str, Any]], pairs: Sequence[Pair],
                  report: Path) -> Iterator[str]:
    """Yield the result in a few lines, the deploy line last but one; none if another process verifies the rows."""
    for row in sorted(rows, key=lambda row: row.best_latency_ms or 0.0):
        yield _line(row)
    for pair in sorted(pairs, key=lambda pair: -pair.times_as_fast)[:TOLD]:
        yield pair.tell(rows)
    for comparison in sorted(comparisons, key=lambda comparison: comparison.get("verdict") == DEPLOY):
        yield str(comparison.get("sentence", ""))
    if rows:
        yield f"report: {report}"


def _line(row: FrontRow) -> str:
    mark = "*" if row.on_front else " "
    top1 = "-" if row.best_top1 is None else f"{row.best_top1:.2%}"
    if row.top1_test is None and row.top1_test_fp32 is not None:
        top1 += " in fp32"
    predicted = "-" if row.latency_ms_predicted is None else f"~{row.latency_ms_predicted:.3f} ms predicted"
    latency = f"{row.latency_ms:.3f} ms" if row.verified and row.latency_ms is not None else predicted
    state = "" if row.verified else f"  not verified{': ' if row.reason else ''}{row.reason}"
    costs = "".join(f"  {COSTS[cost.name].shown(cost.best):>10}" for cost in row.costs)
    name = f"  {row.name}" * (not row.id.startswith(row.name) and not row.is_baseline)
    return f"{mark} {row.id:<28} {row.metric} {top1:>7}  {latency:>10}{costs}{name}{state}"
