"""The choice of `around=auto`: networks race by published top-1 and by latency here, timed as by `hwnas zoo`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hwnas.cli.progress import Console, count
from hwnas.data.dataset import CLASSIFICATION, Dataset, Split
from hwnas.errors import BudgetError, CandidateError, ConfigError, DataError, MissingWeights, SpaceError, one_line
from hwnas.front.comparison import family
from hwnas.front.explore import shown_ms
from hwnas.front.make import BuildSettings
from hwnas.networks.network import FoundNetwork
from hwnas.networks.weights import Pretrained, PretrainedOptions, find_tag, import_timm, list_having
from hwnas.search.minutes import FEWEST_STEPS, LEAST_SHARE, SEVERAL_SHARE, step_seconds
from hwnas.space.architecture import origin_name
from hwnas.space.cuts import WHOLE
from hwnas.space.search_space import SearchSpace, spread
from hwnas.stats import non_dominated
from hwnas.system.paths import temporary_folder
from hwnas.target import Target
from hwnas.tasks.task import trunk_of
from hwnas.training.recipe import Recipe
from hwnas.zoo.published import PublishedNetwork, default_tag, find_published, published_networks
from hwnas.zoo.record import ZooRecord
from hwnas.zoo.waves import ZooTiming

AUTO = "auto"  # value of `around`
MOST = 4  # networks that race
MEMORY_MB = 4096  # of memory that preparing a network may take
MOST_TOLD = 4  # networks or reasons that a line lists
FEW_IMAGES = 64  # with which a step is timed; eight of them are a batch


@dataclass(frozen=True, slots=True)
class Contender:
    """A network that may race, with its published top-1 in per cent and its latency here. `is_of_timm`: the top-1 is of
    timm's weights, and nothing says that the weights here are the same."""

    name: str
    top1: float
    latency_ms: float
    is_of_timm: bool = False

    @property
    def family(self) -> str:
        """The family that its name belongs to, whoever trained it."""
        return family(self.name.removeprefix("tf_"))

    def __str__(self) -> str:
        whose = " for timm's weights, those used may be others" if self.is_of_timm else ""
        return f"{self.name} ({self.top1:.1f} % published{whose}, {shown_ms(self.latency_ms)})"


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Seconds of a training step on one core: of the whole network, and of it together with all its obvious cuts."""

    whole_s: float = 0.0
    known_s: float = 0.0


def choose_networks(candidates: Iterable[Contender], cap_ms: float | None = None, most: int = MOST) -> list[Contender]:
    """Return at most `most` networks of the front under the cap, the most accurate first, each of another family.

    Each family gives its most accurate network, as a race makes networks faster and never more accurate. If there are
    more families than `most`, the networks are spread over the front.
    """
    within = [each for each in candidates if cap_ms is None or each.latency_ms <= cap_ms]
    points = np.array([(each.latency_ms, each.top1) for each in within]).reshape(-1, 2)
    front = sorted((within[at] for at in np.flatnonzero(non_dominated(points, [True, False]))),
                   key=lambda each: each.top1)
    best_of_family = [*{each.family: each for each in front}.values()]  # the last one, which is the most accurate
    return spread([-each.latency_ms for each in best_of_family], max(1, min(most, len(best_of_family))),
                  lambda part: best_of_family[part[0]] if len(part) else None)


def choose_around(pretrained: PretrainedOptions, image_size: int, targets: Sequence[Target],
                  cost: Callable[[str], TrainingCost], console: Console, *, cap_ms: float | None, timing_s: float,
                  training_s: float | None, seed: int) -> tuple[str, ...]:
    """Return the names of the networks that race. Lines say why these were chosen, and which others there were.

    Args:
        pretrained: The options that say which weights are used.
        image_size: Of the search's images, in px.
        targets: A network counts by the target on which it is fastest.
        cost: Returns the cost of training a network by its name. Raises MissingWeights if its weights cannot be
            fetched, CandidateError, ConfigError, DataError or SpaceError if it cannot be cut or trained.
        console: Receives the lines.
        cap_ms: No slower network is chosen if there is a faster one.
        timing_s: Seconds for timing networks.
        training_s: Seconds of all cores for the race; None if no minutes bound it.
        seed: Of the order of turns.

    Raises:
        MissingWeights: There are no weights of any network, or those of a chosen one cannot be fetched.
        ConfigError: No network has a published top-1, or none could be timed; or what `cost` raises for the last.
        BudgetError: There was no time to time any.
    """
    networks, untagged, failed = _find_weights(pretrained, image_size)
    if len(networks) > 1:
        timed, untimed = _time(networks, targets, cap_ms, timing_s, seed, console)
        timed = {name: replace(each, is_of_timm=name in untagged) for name, each in timed.items()}
        failed |= untimed
    else:
        timed = {name: Contender(name, np.nan, np.nan) for name in networks or failed}
        failed = failed if networks else {}  # it is the only one, whatever is published of it
    chosen = _choose(timed, cap_ms, training_s, cost, failed)
    if failed:
        console.remark(f"note: not considered for the race: {_list_few([*failed.values()])}.")
    console.remark(tell_choice(chosen, [*timed.values()], cap_ms))
    return tuple(each.name for each in chosen)


def _choose(timed: dict[str, Contender], cap_ms: float | None, training_s: float | None,
            cost: Callable[[str], TrainingCost], failed: dict[str, str]) -> list[Contender]:
    """Choose the networks that race. One that cannot be cut goes from `timed` to `failed`. If no other is left, not
    even one that is too slow, the error of `cost` is raised."""
    candidates, costs, most, too_slow = dict(timed), dict[str, TrainingCost](), MOST, list[Contender]()
    while True:
        chosen = choose_networks(candidates.values(), cap_ms, most) if len(candidates) > 1 else [*candidates.values()]
        chosen = chosen or [min(candidates.values(), key=lambda each: each.latency_ms)]  # its cuts may keep the cap
        # One cost at a time: a network that fails changes the choice.
        if new := next((each.name for each in chosen if each.name not in costs), ""):
            try:
                costs[new] = cost(new)
            except MissingWeights:  # it cannot be fetched: neither could others
                raise
            except (CandidateError, ConfigError, DataError, SpaceError) as error:
                del candidates[new], timed[new]
                failed[new] = one_line(error)
                if not candidates and not too_slow:
                    raise
                if not candidates:
                    return too_slow
        elif training_s is None or _is_time_for([costs[each.name] for each in chosen], training_s):
            return chosen
        elif len(chosen) > 1:  # fewer networks have more steps each
            most = len(chosen) - 1
        else:  # too slow to train even alone: a faster one, if there is any
            too_slow, most = chosen, MOST
            candidates = {name: each for name, each in candidates.items() if each.latency_ms < chosen[0].latency_ms}
            if not candidates:
                return chosen


def _is_time_for(costs: Sequence[TrainingCost], training_s: float) -> bool:
    """Return whether `training_s` seconds suffice. Several networks and their cuts are judged in SEVERAL_SHARE of them,
    which takes as long as FEWEST_STEPS of each. A single network needs FEWEST_STEPS in LEAST_SHARE of them."""
    if len(costs) == 1:
        return FEWEST_STEPS * costs[0].whole_s <= LEAST_SHARE * training_s
    return FEWEST_STEPS * sum(cost.known_s for cost in costs) <= SEVERAL_SHARE * training_s


def tell_choice(chosen: Sequence[Contender], timed: Sequence[Contender], cap_ms: float | None) -> str:
    """Return a line that says which of the timed networks were chosen, why, and which were not."""
    if len(timed) == 1:
        return f"around={AUTO} is around={timed[0].name}: there is no other network to choose."
    others = sorted((each for each in timed if each not in chosen), key=lambda each: -each.top1)
    reasons = [f"{other}, as {_why_left(other, chosen, timed, cap_ms)}" for other in others]
    rest = f". Left out: {_list_few(reasons)}" if others else ""
    over = "; none keeps the cap, and it is the fastest" if cap_ms and chosen[0].latency_ms > cap_ms else ""
    names = [str(each) for each in chosen]
    joined = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    under = f" under the cap of {cap_ms:g} ms" if cap_ms and not over else ""
    return (f"around={AUTO} chose {joined} of {count(len(timed), 'network')} that were timed, for their front of top-1 "
            f"and latency{under}, each of another family, {MOST} at most or as many as there is time for{over}{rest}.")


def _why_left(other: Contender, chosen: Sequence[Contender], timed: Sequence[Contender], cap_ms: float | None) -> str:
    """Return why a timed network was not chosen."""
    if cap_ms is not None and other.latency_ms > cap_ms:
        return "it is over the cap"
    for each in sorted(timed, key=lambda each: -each.top1):
        if each is not other and each.top1 >= other.top1 and each.latency_ms <= other.latency_ms:
            return f"{each.name} is no slower and no less accurate"
    kin = next((each.name for each in chosen if each.family == other.family and each.top1 >= other.top1), "")
    return f"{kin} is of its family" if kin else "there is no place or time for it"


def training_cost(space: SearchSpace, start: Pretrained | None, recipe: Recipe, target: Target, seed: int
                  ) -> TrainingCost:
    """Time a step of the network that all of a space are cut from. The known cuts cost in proportion to their MACs."""
    whole, px, classes = space.known[WHOLE], max(space.image_sizes), space.classes
    task, _ = trunk_of(origin_name(whole.around))
    # Black images: the data set is not loaded yet, and their content does not change the time of a step.
    images = Split(np.zeros((FEW_IMAGES, space.channels, px, px), np.uint8), np.arange(FEW_IMAGES) % classes,
                   np.full((FEW_IMAGES, 1, 5), -1, np.float32) if task else None)
    dataset = Dataset("", images, images, images, tuple(map(str, range(classes))), space.channels, px,
                      (0.5,) * space.channels, (0.25,) * space.channels, "", task=task or CLASSIFICATION)
    making, network = BuildSettings(dataset, recipe, seed, target), FoundNetwork(whole, start)
    own_recipe = making.recipe_of(network)
    image_s = step_seconds(network, making) / making.steps_in_a_step(network) / own_recipe.batch_for(FEW_IMAGES)
    whole_s = own_recipe.batch_size * image_s
    return TrainingCost(whole_s, whole_s * sum(cut.macs for cut in space.known.values()) / whole.macs)


def _list_few(reasons: Sequence[str]) -> str:
    more = len(reasons) - MOST_TOLD
    return "; ".join([*reasons[:MOST_TOLD], *([f"and {more} more"] if more > 0 else [])])


def _find_weights(pretrained: PretrainedOptions, image_size: int
                  ) -> tuple[dict[str, PublishedNetwork], set[str], dict[str, str]]:
    """Find the networks whose weights are here or can be fetched. Returns three values: their published figures, by
    name; the names whose weights here may not be the published ones of timm; why others are left out."""
    here, published, failed = list_having(pretrained), dict[str, PublishedNetwork](), dict[str, str]()
    untagged = set[str]()
    fetched = sorted({each.name for each in published_networks()} - {*here}) if pretrained.download else []
    for name in (*here, *filter(import_timm().is_model_pretrained, fetched)):
        try:
            tag = find_tag(name, pretrained) if name in here else default_tag(name)
            network = find_published(name, tag, image_size)
        except (ConfigError, DataError) as error:
            failed[name] = one_line(error)
        else:
            if network is not None:
                published[name] = network
                untagged |= {name} if network.model != f"{name}.{tag}" else set()
            else:
                failed[name] = f"{name}: its top-1 is not published"
    if not published and len(failed) > 1:
        raise ConfigError(f"around={AUTO}: it chooses by published top-1, and there is none to choose by. "
                          f"{_list_few([*failed.values()])}. Name a network: around=NAME.")
    return published, untagged, failed


def _time(networks: Mapping[str, PublishedNetwork], targets: Sequence[Target], cap_ms: float | None, timing_s: float,
          seed: int, console: Console) -> tuple[dict[str, Contender], dict[str, str]]:
    """Time the networks. Returns each on its fastest target, and why others could not be timed."""
    with temporary_folder() as folder:
        timing = ZooTiming([*networks.values()], [ZooRecord.open(target) for target in targets], Path(folder),
                           MEMORY_MB, cap_ms, seed)
        with console.step(f"time {count(len(networks), 'network')}", timing_s) as report:
            complete = timing.run(timing_s, report)
    # A network counts by the target on which it is fastest.
    measured = [pair for pair in timing.pairs if timing.measured(pair) is not None]
    timed = dict[str, Contender]()
    for (network, _), (latency_ms, *_) in zip(measured, timing.latencies_ms(measured), strict=True):
        if network.name not in timed or latency_ms < timed[network.name].latency_ms:
            timed[network.name] = Contender(network.name, network.top1, float(latency_ms))
    failed = {pair[0].name: f"{pair[0].name}: {reason}" for pair in timing.pairs
              if pair[0].name not in timed and (reason := timing.reason(pair))}
    if not timed and failed:
        raise ConfigError(f"around={AUTO}: no network could be timed. {_list_few([*failed.values()])}. Name one: "
                          "around=NAME.")
    if not timed:
        raise BudgetError(f"around={AUTO}: {timing_s:.0f} s are too few to time networks. Give more "
                          "budget.minutes, or name a network: around=NAME.")
    # The others were not tried.
    if n_left := len(networks) - len(timed) - len(failed):
        failed[""] = f"{count(n_left, 'network')}: " + (
            "not expected to be on the front" if complete else "there was no time to time them")
    return timed, failed
