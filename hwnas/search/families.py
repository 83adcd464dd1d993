"""Choose which pretrained network to cut, if several are named: their obvious cuts are compared before the race begins.

Each cut is timed on the target as it is, and trained for as many steps as all others. One slope over the logarithm of
latency is fitted through the best cuts of all networks, and a level for each network: what its best cuts answer at the
same latency. The network of the highest level is cut in the race, and the report says how sure the choice is. A network
that learns slowly may be judged too early here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.cli.command import default_out
from hwnas.cli.options import Config, read_command, read_options, section
from hwnas.cli.progress import Console, Report
from hwnas.data.dataset import Dataset, subset
from hwnas.data.loading import inspect_dataset, read_images
from hwnas.errors import (
    BudgetError,
    CandidateError,
    ConfigError,
    DataError,
    DeviceError,
    HwnasError,
    SpaceError,
    StudyError,
    TargetError,
)
from hwnas.front.score import Timing
from hwnas.latency.copies import TimedFile
from hwnas.latency.measurement import Protocol
from hwnas.latency.timing import Reference, prepare_untrained, reference_network, time_files
from hwnas.lazy import omegaconf
from hwnas.networks.network import FoundNetwork, Network
from hwnas.networks.weights import PretrainedOptions, list_having
from hwnas.search.minutes import step_seconds
from hwnas.search.plan import Plan, PlanOptions, line_recipe, make_plan, making_of
from hwnas.search.race import WARMUP
from hwnas.search.racer import DECIDING
from hwnas.space.search_space import WHOLE
from hwnas.study.lines import THREADS
from hwnas.system.documents import Document, check_identity
from hwnas.system.libraries import release_memory
from hwnas.system.paths import temporary_folder, write_atomic
from hwnas.system.run_folder import RunFolder
from hwnas.target import Target
from hwnas.training.line import Leg, LineBatches, LineTraining, Stretch, answers
from hwnas.training.loop import seeded

ZOO = "zoo"  # value of `around`: every network that can be cut and whose weights are here
FILE = "families.json"
SHARE = 0.15  # of the minutes, for the training of all cuts together
STEPS = (40, 160)  # of each cut, at least and at most
RESAMPLES = 1000
MOST_SECONDS = 60.0  # of the timing
NEAR = 1.05  # a cut does not count where another one of its network is better at up to so many times its latency
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # of a network: no other text gets into a configuration


def _check_choice(content: Mapping[str, Any]) -> None:
    """ValueError for a choice of none of its networks."""
    if content["chosen"] not in content["networks"] or not all(map(_NAME.fullmatch, content["networks"])):
        raise ValueError("the network that was chosen is none of those that were compared")


DOCUMENT = Document("hwnas-families", 1, "the choice of the network that is cut", "Remove it; the choice is made anew.",
                    shape={"asked": {"*": str}, "networks": [str], "chosen": str, "sure": float, "at_ms": float,
                           "sentence": str, "cuts": [{"network": str, "cut": str, "latency_ms": float, "top1": float,
                                                      "steps": int}]}, rule=_check_choice)


@dataclass(frozen=True, slots=True)
class Tried:
    """A cut that was compared: its network, its name, measured median in ms, validation top-1, steps."""

    network: str
    cut: str
    latency_ms: float
    top1: float
    steps: int


@dataclass(frozen=True)
class Choice:
    """The network that is cut, of several.

    Attributes:
        sure: share of resamples of the validation images in which it has the highest level; ties count in part.
        at_ms: the latency that levels are told at.
        sentence: all of it in words.
        asked: what the comparison depends on, as text by key.
    """

    networks: Sequence[str]
    chosen: str
    sure: float
    at_ms: float
    sentence: str
    cuts: Sequence[Tried]
    asked: Mapping[str, str] = field(default_factory=dict)


def choose_family(config: Config, console: Console) -> Config:
    """The configuration of a search around one network, where `around` names several. The choice is written to the run
    folder, and the next call takes it from there; other processes wait for it.

    Raises:
        ConfigError: what is named is no list of networks, or cannot be compared.
        MissingWeights: a network that is named has none here, or with `zoo` none has.
        BudgetError: the minutes are too few to compare so many.
        StudyError: the run folder holds the choice of another comparison, or a search without one.
    """
    named = config.get("around")
    if named is None or (isinstance(named, str) and named != ZOO):
        return config
    if omegaconf.OmegaConf.is_config(named):
        named = omegaconf.OmegaConf.to_container(named)
    pretrained = read_options(PretrainedOptions, section(config, "pretrained"), "pretrained")
    if pretrained.file is not None:
        raise ConfigError(f"pretrained.file={pretrained.file} is of one network, and around names several. Give "
                          "pretrained.folder=DIR with a file for each.")

    def around(name: str, **others: str) -> Any:
        changed: Any = {"around": name, **others}
        return omegaconf.OmegaConf.merge(config, changed)

    names = list_having(pretrained) if isinstance(named, str) else _listed(named)
    options = read_command(PlanOptions, around(names[0]))
    if len(names) == 1 and not isinstance(named, str):
        return around(names[0])  # type: ignore[no-any-return]
    target_name = options.target.get("name", "")
    out = Path(options.out or default_out(target_name, "families", inspect_dataset(options.dataset).name))
    asked = {"around": " ".join(sorted(names)) if named != ZOO else ZOO, "target": target_name,
             "host": str(options.host), "device": str(options.device), "seed": str(options.seed),
             "image_sizes": str(options.image_sizes), "dataset": json.dumps(options.dataset, sort_keys=True)}
    if (choice := find_choice(out)) is None:
        if (out / "study.db").exists():
            raise StudyError(f"{out} holds a search that chose among no networks. Name the one that it is around, or "
                             "another out=FOLDER.")
        plans = _plans({name: around(name) for name in names}, console, skipping=isinstance(named, str))
        run = RunFolder.create(out, options.overwrite)
        with run.hold("families", console.say):
            if (choice := find_choice(out)) is None:
                choice = replace(_compared(plans, console), asked=asked)
                write_atomic(out / FILE, json.dumps({**DOCUMENT.header, **asdict(choice)}, indent=1) + "\n")
    check_identity(choice.asked, asked, out / FILE, work="comparison")
    console.say(choice.sentence)
    return around(choice.chosen, out=str(out))  # type: ignore[no-any-return]


def find_choice(folder: Path) -> Choice | None:
    """The choice that a run folder holds; None where it holds none, StudyError where it cannot be read."""
    content = DOCUMENT.find(folder / FILE)
    if content is None:
        return None
    values = {each.name: content[each.name] for each in fields(Choice)}
    cuts = [Tried(*(row[each.name] for each in fields(Tried))) for row in content["cuts"]]
    return Choice(**{**values, "cuts": cuts})


def _listed(named: Any) -> list[str]:
    """The networks of a list; ConfigError for anything else."""
    names = list(named) if isinstance(named, Sequence) else []
    if not names or any(not isinstance(name, str) or not name for name in names) or len({*names}) < len(names):
        raise ConfigError(f"around must be a timm name, a list of different ones, or {ZOO}, got {named!r}.")
    return names


def _plans(configs: Mapping[str, Any], console: Console, skipping: bool) -> dict[str, Plan]:
    """The plan of a search around each network. With `skipping` those that cannot be cut are left out, and a line says
    why."""
    plans, refused = dict[str, Plan](), None
    for name, config in configs.items():
        try:
            plan = make_plan(config, console, trials_only=True)
            if plan.start is not None:
                plan.network(plan.space.reference).start()  # weights that do not fit are refused now
        except (ConfigError, DataError, SpaceError) as error:
            if not skipping:
                raise
            refused = error
            console.note(f"not compared: {error}")
            continue
        if plan.start is None:
            raise ConfigError(f"around={list(configs)} compares pretrained networks. Leave pretrained.use "
                              "out, or name one network.")
        if plan.others:
            raise ConfigError(f"around={list(configs)} compares networks on one target, and "
                              f"target={plan.options.target['name']} is a set. Name one network, or one target.")
        if not plan.deployment.at_hand:
            raise ConfigError(f"around={list(configs)} times networks on {plan.deployment.host_name}, which is not at "
                              "hand. Name one network.")
        plans[name] = plan
    if refused is not None and not plans:
        raise refused
    return plans


def _compared(plans: Mapping[str, Plan], console: Console) -> Choice:
    """Time and train the cuts of all networks. One of which no cut can be timed and trained, or keeps the cap at any
    image size, is left out, and a line says so. ConfigError where none is left."""
    plan = next(iter(plans.values()))
    deployment, cap_ms = plan.deployment, plan.options.budget.latency_ms
    deployment.device.runtime(deployment.target.runtime).check(deployment.target)
    cuts = {(name, cut): network for name, each in plans.items() for cut, network in _cuts_of(each)}
    smallest = {(name, ""): each.smallest for name, each in plans.items() if cap_ms is not None}
    data = read_images(plan.options.dataset, max(plan.space.image_sizes), plan.options.seed, console)
    with console.step("time the networks that may be cut", MOST_SECONDS) as report:
        timing = Timing(reference_network(), plan.options.verification.seconds, plan.options.seed, deployment.device)
        timed = time_untrained({" ".join(key): network for key, network in (cuts | smallest).items()},
                               deployment.target, timing, report)
    latency_ms = {key: timed[" ".join(key)] for key in cuts if " ".join(key) in timed}
    for name, cut in cuts:
        if (name, cut) not in latency_ms:
            console.remark(f"{name}, {cut}: not compared: it cannot be exported and timed as {deployment.target.name}")
    for name in plans:
        if cap_ms is not None and timed.get(f"{name} ", 0.0) > cap_ms:
            console.remark(f"{name}: not compared: its fastest obvious cut takes {timed[f'{name} ']:.3g} ms on the "
                           f"smallest images, budget.latency_ms is {cap_ms:g}")
            latency_ms = {key: ms for key, ms in latency_ms.items() if key[0] != name}
    if not latency_ms:
        raise ConfigError(f"none of {', '.join(plans)} is left to compare: the lines above say why. Name another "
                          "network, or another target.")
    steps = _steps(plan, data, [cuts[key] for key in latency_ms])
    right: dict[tuple[str, str], NDArray[np.bool_]] = {}
    with console.step("train their cuts") as report:
        for at, key in enumerate(latency_ms):
            report(at / len(latency_ms), f"{key[0]}, {key[1]}, {steps} steps")
            try:
                right[key] = _answers(plans[key[0]], data, cuts[key], steps)
            except CandidateError as error:
                console.remark(f"{key[0]}, {key[1]}: not compared: {error}")
    if not right:
        raise ConfigError(f"no cut of {', '.join(plans)} can be trained here: the lines above say why.")
    choice = judge({name: {cut: (latency_ms[name, cut], right[name, cut]) for family, cut in right if family == name}
                    for name in dict.fromkeys(name for name, _ in right)}, steps)
    return replace(choice, networks=[*plans])


def time_untrained(networks: Mapping[str, Network], target: Target, timing: Timing, report: Report
                   ) -> dict[str, float]:
    """Median latency in ms of each network that can be exported, compiled and timed, all in the same rounds."""
    runtime = timing.device.runtime(target.runtime)
    with temporary_folder() as name:
        files = {}
        for index, (id, network) in enumerate(networks.items()):
            key = hashlib.sha256(network.identity.encode()).hexdigest()[:8]
            try:
                path = prepare_untrained(network.build(), key, network.shape.image, target, Path(name))
                runtime.compile(path, target)  # one that cannot be must not spoil the others' timing
            except (TargetError, DeviceError):  # not of this network
                raise
            except HwnasError:
                continue
            files[id] = TimedFile(path, target, network.shape.image)
            report(0.0, f"exported {index + 1} of {len(networks)}")
        protocol = Protocol(min_rounds=8, min_calls=20, max_seconds=MOST_SECONDS, copies=1)
        reference = Reference(timing.reference, target.batch)
        measured = time_files(files, target, reference, protocol, seed=timing.seed, progress=report,
                              device=timing.device) if files else {}
    return {id: each.latency_ms for id, each in measured.items() if each.valid}


def _cuts_of(plan: Plan) -> list[tuple[str, FoundNetwork]]:
    """The obvious cuts of a network by name, on the largest images; with the whole one where there are fewer than
    two."""
    known = plan.space.known
    names = [name for name in known if name != WHOLE]
    return [(name, plan.network(known[name])) for name in (names if len(names) > 1 else known)]


def _steps(plan: Plan, data: Dataset, networks: Sequence[FoundNetwork]) -> int:
    """Steps of each network, as many as SHARE of the minutes allows. BudgetError where these are too few."""
    minutes = plan.options.budget.minutes
    if minutes is None:
        return STEPS[1]
    making, all_s = making_of(plan, data), 0.0
    for network in sorted(networks, key=lambda network: -network.architecture.macs):
        with suppress(CandidateError):  # another one may fit into memory
            step_s = step_seconds(network, making) / making.steps_in_a_step(network) / plan.workers ** THREADS
            all_s = step_s * sum(each.architecture.macs for each in networks) / network.architecture.macs
            break
    if not all_s:
        return STEPS[0]  # their trainings will say why
    steps = int(SHARE * 60 * minutes / all_s)
    if steps < STEPS[0]:
        least = math.ceil(10 * STEPS[0] * all_s / 60 / SHARE) / 10
        raise BudgetError(f"budget.minutes={minutes:g} is too short to compare the cuts of so many networks: "
                          f"{STEPS[0]} steps of each take {STEPS[0] * all_s / 60:.1f} min. Give budget.minutes="
                          f"{1.05 * least:.1f} or more, or name fewer networks.")
    return min(steps, STEPS[1])


def _answers(plan: Plan, data: Dataset, network: FoundNetwork, steps: int) -> NDArray[np.bool_]:
    """Return which validation images a network answers rightly after so many steps from its pretrained weights."""
    recipe, seed, fed = line_recipe(plan, data), plan.options.seed, network.fed(data)
    recipe = replace(recipe, threads=max(recipe.threads, plan.workers))
    with seeded(seed, recipe.threads):
        stretch = Stretch(Leg(steps, 1.0, 1.0, WARMUP), 0, "", "", network.start)
        training = LineTraining(network.start(), LineBatches(fed.train, fed, recipe, seed), recipe, stretch)
        training.run_leg(lambda state: None)
        deciding = fed.validation.take(subset(fed.validation.labels, DECIDING, 0))
        right = answers(training.current.eval(), deciding, fed)
    del training
    release_memory()
    return right


def judge(cuts: Mapping[str, Mapping[str, tuple[float, NDArray[np.bool_]]]], steps: int) -> Choice:
    """The choice among networks, by the latency in ms of each cut and the validation images [n] that it answers
    rightly."""
    rows = [(name, cut, ms, right) for name, own in cuts.items() for cut, (ms, right) in own.items()]
    counted = [(name, ms, right) for name, cut, ms, right in rows if not any(
        other != cut and its.mean() > right.mean() and its_ms <= NEAR * ms
        for other, (its_ms, its) in cuts[name].items())]  # a race would drop the others at once
    names, family = [*cuts], np.array([[*cuts].index(name) for name, *_ in counted])
    at, right = np.log([ms for _, ms, _ in counted]), np.array([right for *_, right in counted], float)
    n = right.shape[1]
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES) / n
    values = levels(family, at, np.column_stack([right.mean(1), right @ drawn.T]))
    order = np.argsort(-values[:, 0], kind="stable")
    best, heads = int(order[0]), np.isclose(values[:, 1:], values[:, 1:].max(0))
    sure = float((heads[best] / heads.sum(0)).mean())
    at_ms = float(np.exp(at.mean()))
    told = ", ".join(f"those of {names[each]} {values[each, 0]:.1%}" for each in order[1:])
    sentence = (f"cut from {names[best]}: at {at_ms:.3g} ms its cuts answer {values[best, 0]:.1%} of {n} validation "
                f"images after {steps} steps each" + (f", {told}; {sure:.0%} sure to be the best of them" if told else
                                                      "; no other network was compared") + ".")
    return Choice(names, names[best], sure, at_ms, sentence, [
        Tried(name, cut, ms, float(each.mean()), steps) for name, cut, ms, each in rows])


def levels(family: NDArray[np.int64], at: NDArray[np.float64], top1: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what each family's cuts would answer at the mean of `at`, were all on lines of one slope, not below 0.

    Args:
        family: of each cut, from 0 [n].
        at: logarithm of its latency [n].
        top1: in any number of resamples [n, r].

    Returns:
        Top-1 [families, r].
    """
    of = np.eye(family.max() + 1)[family]
    share = of / of.sum(0)
    inside, apart = at - of @ (share.T @ at), top1 - of @ (share.T @ top1)
    slope = np.maximum(0.0, inside @ apart / max(1e-12, float(inside @ inside)))
    shifts: NDArray[np.float64] = share.T @ top1 + np.outer(at.mean() - share.T @ at, slope)
    return shifts
