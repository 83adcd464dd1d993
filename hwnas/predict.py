"""Classifies images with a network: hwnas predict run=runs/x images=DIR (or a file, or a pattern such as a/*.jpg)

Prints a line of CSV for each image (file, class, confidence), or writes them to out=FILE.csv. The images are prepared
as the network's card says. run= takes the most accurate verified network, or id=ID, as its target runs it; so does the
folder model=models/ID of a run. Any other model=, a file too, runs in ONNX Runtime, on every core. target=NAME runs
either as that target does.

id=FAST+ACCURATE of pairs.csv runs a pair: the second network answers where the first is not sure. So does
model=ACCURATE fast=FAST threshold=CONFIDENCE, of any two networks of the same classes.

A name that begins as a formula does gets an apostrophe before it, and control characters are written as escapes: no
spreadsheet or terminal obeys them.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console, count, show
from hwnas.data.dataset import left_out_text
from hwnas.data.decoding import Source, kind_of
from hwnas.data.given_images import list_sources
from hwnas.errors import ConfigError, Unfinished
from hwnas.front.pairs import find_pair
from hwnas.front.rows import choose_row, deployment_of, load_front
from hwnas.runtimes.classifier import Cascade, Classifier, ModelFile, deployed_file, target_of
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import RunFolder, check_replaceable
from hwnas.system.tables import shown_csv
from hwnas.target import Target


@dataclass(frozen=True, slots=True)
class PredictOptions:
    """Options of `conf/predict.yaml`."""

    run: str | None
    id: str | None
    model: str | None
    fast: str | None
    images: str | None
    out: str | None
    target: dict[str, Any] | None
    threshold: float | None = option(low=0, high=1)
    memory_mb: int = option(low=1)


def run(config: Config, console: Console) -> None:
    """The command: `run` is a run folder, or `model` a model folder or an ONNX file of hwnas; `images` is a folder,
    `out` the CSV file.

    Unfinished when some images cannot be decoded; they have a line without class.
    """
    options = read_command(PredictOptions, config)
    if bool(options.model) == bool(options.run) or not options.images:
        raise ConfigError("which network, and which images? Add run=DIR or model=DIR (models/ID of a run, or of "
                          "hwnas train), and images=DIR.")
    if options.id and not options.run:
        raise ConfigError(f"id={options.id} is of which run? Add run=DIR in place of model=.")
    if options.out and os.path.lexists(options.out):
        raise ConfigError(f"{options.out} is there already. Choose another out=FILE.csv.")
    if options.out:
        check_replaceable(Path(options.out))
    if (options.fast is None) != (options.threshold is None) or (options.fast and not options.model):
        raise ConfigError("a pair is model=DIR fast=DIR threshold=CONFIDENCE, or run=DIR id=FAST+ACCURATE of its "
                          "pairs.csv. Give all of one.")
    classifier, entries = _classifier(options), _files(options.images, console)
    with console.step("classify") as report:
        answers = list(classifier.answers(
            entries, skip=True, report=lambda n: report(n / len(entries), f"{n} of {len(entries)}")))
    rows = [{"file": entry.name, "class": answer and answer.label, "confidence": answer and round(answer.confidence, 4)}
            for entry, answer in zip(entries, answers, strict=True)]
    if options.out:
        write_atomic(options.out, shown_csv(rows))
        console.say(f"{count(len(rows), 'image')}: {options.out}")
    else:
        show(shown_csv(rows).removesuffix("\n"))
    missing = [entry for entry, answer in zip(entries, answers, strict=True) if answer is None]
    if missing:
        kind = kind_of(missing[0])
        raise Unfinished(f"{len(missing)} of {len(rows)} images cannot be decoded ({missing[0].name}"
                         f"{f' is {kind}' if kind else ''}). Remove or mend them.", part=len(missing) < len(rows))


def _classifier(options: PredictOptions) -> Classifier | Cascade:
    """The network or the pair that answers."""
    if options.model:
        accurate, fast, threshold = Path(options.model), options.fast and Path(options.fast), options.threshold
    else:
        folder, fast, threshold = RunFolder.open(str(options.run), write=False), None, None
        name = options.id
        if name and "+" in name:
            pair = find_pair(folder, name)
            name, fast, threshold = pair.accurate, folder.model(pair.fast).path, pair.threshold
        accurate = folder.model(choose_row(load_front(folder), str(folder.path), id=name).id).path
    if fast and threshold is not None:
        return Cascade(_network(fast, options), _network(accurate, options), threshold)
    return _network(accurate, options)


def _network(model: Path, options: PredictOptions) -> Classifier:
    """A network, in the target that was asked for or its own."""
    # Of models/ID of a run: answers are those of its front.csv.
    given = deployment_of(model) if options.target is None else Target.from_config(options.target)
    path = deployed_file(model, given.precision if given else "int8", given)
    target = given or target_of(path)
    return Classifier.compile(ModelFile.read(path, target, options.memory_mb), target)


def _files(images: str, console: Console) -> list[Source]:
    """Return the images that `images` stands for; a line says what was left out."""
    left_out = Counter[str]()
    files = list_sources(images, left_out)
    if left_out:
        console.say(left_out_text(left_out))
    return files


command = partial(run_command, run, "predict", __doc__ or "", target=False)

if __name__ == "__main__":
    sys.exit(command())
