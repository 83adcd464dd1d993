"""A certificate in words: what it says of each estimator, and what it means for a search."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.accuracy.certificate import TRIALS, Certificate, favoured, ranked
from hwnas.cli.text import interval, number
from hwnas.errors import StudyError
from hwnas.system.paths import search_space_dirs

if TYPE_CHECKING:
    from hwnas.data.dataset import Dataset
    from hwnas.space.search_space import SearchSpace

LEAST_CEILING = 0.5
SHARE = 0.1  # of a full training's cost, that an estimate may take
COLUMNS = ("estimator", "Kendall tau", "95 %", "Spearman", "regret (points)", "hypervolume lost", "s each",
           "setup (s)", "s with setup", "of full training")


def sentences(content: Mapping[str, Any]) -> list[str]:
    """What the certificate comes to, in plain sentences."""
    found = (_truth(content), _ceiling(content), _favoured(content), _costs(content), _failures(content))
    return [one for one in found if one]


def rows(content: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A line for each estimator in COLUMNS, the best first, those without a correlation last."""
    order = [label for label, _ in ranked(content)]
    order += [label for label in content["estimators"] if label not in order]
    return [_row(label, content["estimators"][label]) for label in order]


def _row(label: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    regret, lost = one.get("top_k_regret"), one.get("hypervolume_loss")
    return (label, number(one["kendall_tau"], ".2f"), interval(one["low"], one["high"], ".2f"),
            number(one["spearman"], ".2f"), number(None if regret is None else 100 * regret, ".2f"),
            "" if lost is None else f"{lost:.1%}", number(one["cpu_seconds"], ".3f"), f"{one['setup_seconds']:.0f}",
            number(one["cpu_seconds_amortised"], ".3f"), f"{one['share_of_full']:.2%}")


def _truth(content: Mapping[str, Any]) -> str:
    truth = content["truth"]
    noise = "" if truth["std_seeds"] is None else f"; seeds differ by {100 * truth['std_seeds']:.2f}"
    cost = f"{truth['cpu_seconds']:.0f} s of a core" if truth["cpu_seconds"] else f"{truth['seconds']:.0f} s"
    return (f"{truth['networks']} networks, spread over {content['cost_source']}, trained in full {truth['trainings']} "
            f"times ({truth['epochs']} epochs, {cost} each): test top-1 {truth['top1_low']:.2%} to "
            f"{truth['top1_high']:.2%}, standard deviation {100 * truth['std_networks']:.2f} points between networks"
            f"{noise}, {truth['n_test']} test images alone by {100 * truth['std_binomial']:.2f}.")


def _ceiling(content: Mapping[str, Any]) -> str:
    one = content["ceiling"]
    if one is None or one["kendall_tau"] is None:
        return "How well one full training ranks another is not known: that takes seeds=2."
    meaning = (f"estimators are held against the mean of {content['truth']['seeds']} seeds, which is steadier, so that "
               "a good one may come out somewhat above." if one["kendall_tau"] >= LEAST_CEILING else
               "these trainings rank by chance more than by merit. Train longer, on more images or with more seeds.")
    return (f"One full training ranks the networks as another seed's does with tau {one['kendall_tau']:.2f} "
            f"({interval(one['low'], one['high'], '.2f')}): {meaning}")


def _favoured(content: Mapping[str, Any]) -> str:
    full = content["truth"]["cpu_seconds"] or content["truth"]["seconds"]
    label = favoured(Certificate(Path(), content), SHARE * full * TRIALS, TRIALS)
    within = f"At {SHARE:.0%} of a full training's cost for each of {TRIALS} networks, setup included,"
    if label is None:
        return f"{within} no estimator is shown to rank above chance."
    best = content["estimators"][label]
    others = [(name, one) for name, one in ranked(content) if name != label]
    overlap = [name for name, one in others if one["high"] is not None and best["low"] is not None
               and one["high"] >= best["low"] and best["high"] >= one["low"]]
    between = interval(best["low"], best["high"], ".2f")
    words = f"{within} {label} is favoured: tau {best['kendall_tau']:.2f} ({between})"
    if others:
        words += (f"; its interval overlaps {'those of ' if len(overlap) > 1 else 'that of '}{', '.join(overlap)}"
                  if overlap else "; no other's interval overlaps its own")
    return f"{words}.{_apart(content, label)}"


def _apart(content: Mapping[str, Any], label: str) -> str:
    """Whom the best is ahead of beyond doubt, which pairs of draws tell better than two intervals do."""
    if label != content.get("best"):
        return f" Without that limit {content.get('best')} ranks best."
    behind = [name for name, one in content["estimators"].items()
              if one.get("behind_best") and (one["behind_best"][1] or 0) > 0]
    return f" Drawn in pairs it is ahead of {', '.join(behind)}." if behind else ""


def _costs(content: Mapping[str, Any]) -> str:
    """Whose seconds were not taken beside the trainings', and how they were."""
    found = [f"{label}: {one['cost_source']}" for label, one in content["estimators"].items() if one.get("cost_source")]
    return f"Costs taken otherwise: {'; '.join(found)}." if found else ""


def _failures(content: Mapping[str, Any]) -> str:
    found = [f"{label} on {one['failed']}" for label, one in content["estimators"].items() if one["failed"]]
    trained = content["truth"]["failed"]
    words = ([f"{trained} trainings failed" if trained > 1 else "one training failed"] if trained else []) + \
        ([f"no estimate by {', '.join(found)}"] if found else [])
    return f"Left out: {'; '.join(words)}." if words else ""


def certificate_facts(found: Certificate | StudyError | None, dataset: Dataset, space: SearchSpace, accuracy: str,
                      options: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
    """What a search's report says: the certificate that `look_up` gave, or the command that makes one, and what it says
    of the estimator that was used, as `lines` and `table`. A certificate that cannot be read is said, not raised."""
    if isinstance(found, StudyError):
        return {"accuracy": accuracy, "lines": [f"No certificate could be looked up: {found}"]}
    if found is None:
        return {"accuracy": accuracy, "lines": [
            f"No certificate for {dataset.name} at {dataset.image_size} px and space {space.name}. How well "
            f"accuracy={accuracy} ranks networks here was not checked, so treat its values as estimates. To check it: "
            f"python -m hwnas.certify {_command(dataset, space)}"]}
    used = [_used(found, accuracy, options, fingerprint, dataset)]
    return {"accuracy": accuracy, "file": found.path.name, "created": found.content["created"],
            "host": found.content["host"], "lines": [*used, *sentences(found.content)],
            "columns": list(COLUMNS), "table": [list(row) for row in rows(found.content)]}


def _command(dataset: Dataset, space: SearchSpace) -> str:
    root = " dataset.root=DIR" if dataset.name != "digits" else ""
    size = f" dataset.image_size={dataset.image_size}" if len(space.image_sizes) == 1 else ""
    place = space.name if space.source is None or space.source.parent in search_space_dirs() else space.source
    return f"dataset={dataset.name}{root}{size} space={place} n=16 seeds=2"


def _used(found: Certificate, accuracy: str, options: Mapping[str, Any], fingerprint: str, dataset: Dataset) -> str:
    """What the certificate says of the estimator that the search used: by fingerprint, or by its options where only
    the images differ."""
    options = _decisive(accuracy, options)
    mine = {label: one for label, one in found.estimators.items()
            if one["accuracy"] == accuracy and _decisive(accuracy, one["options"]).get("score") == options.get("score")}
    same = next((label for label, one in mine.items() if one["fingerprint"] == fingerprint), None)
    other_images = found.content["dataset"]["fingerprint"] != dataset.fingerprint
    if same is None and other_images:
        same = next((label for label, one in mine.items() if _decisive(accuracy, one["options"]) == options),
                    None)
    label = same or next(iter(mine), None)
    if label is None:
        return f"This search used accuracy={accuracy}, which the certificate does not judge."
    one = mine[label]
    kind = ("another recipe of it" if same is None else
            _other_images(found, dataset) if other_images else "this recipe")
    tau = "no rank correlation" if one["kendall_tau"] is None else \
        f"Kendall tau {one['kendall_tau']:.2f} ({interval(one['low'], one['high'], '.2f')})"
    return (f"This search used accuracy={accuracy}. Certified with {kind} ({label}): {tau} against full training, "
            f"{one['cpu_seconds_amortised']:.3g} s a network with its share of the setup over {TRIALS}, "
            f"{one['share_of_full']:.2%} of a full training.")


def _other_images(found: Certificate, dataset: Dataset) -> str:
    """Image folders are told apart by classes and size only, and another product's may have the same."""
    if dataset.name != "imagefolder":
        return "other images of this data set"
    return f"other images of the same classes, those in {found.content['dataset'].get('folder') or 'another folder'}"


def _decisive(accuracy: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """An estimator's own options that decide its values, the score that counts where none is given among them."""
    found = {key: value for key, value in options.items() if key not in ("threads", "path")}
    if accuracy == "zero_cost":
        from hwnas.accuracy.zero_cost import ZeroCostOptions

        found.setdefault("score", ZeroCostOptions().score)
    return found

