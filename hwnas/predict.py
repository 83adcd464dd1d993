"""Answers images with a network: hwnas predict run=runs/x images=DIR (or a file, or a pattern such as a/*.jpg)

Prints a line of CSV for each image (file, class, confidence), or writes them to out=FILE.csv. A detector has a line for
each object, with its box in shares of the image's sides. An image in which nothing is found has one without a class.
draw=DIR writes the images with boxes. Images are prepared as the network's card says.

run= takes the most accurate verified network, or id=ID, as its target runs it; so does the folder model=models/ID of a
run. Any other model=, a file too, runs in ONNX Runtime, on every core. target=NAME runs either as that target does.

id=FAST+ACCURATE of pairs.csv runs a pair: the second network answers if the first is not sure.

A name that begins as a formula does gets an apostrophe before it, and control characters are written as escapes: no
spreadsheet or terminal obeys them.
"""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console, count, show
from hwnas.data.dataset import Preparation, left_out_text
from hwnas.data.decoding import Source, kind_of
from hwnas.data.objects import list_sources
from hwnas.data.pixels import ALL_16_BITS, as_seen
from hwnas.errors import ConfigError, Unfinished
from hwnas.front.pairs import find_pair
from hwnas.front.rows import choose_row, deployment_of, load_front
from hwnas.lazy import PIL
from hwnas.runtimes.classifier import Cascade, Classifier, ModelFile, deployed_file, target_of
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import RunFolder, check_replaceable
from hwnas.system.tables import shown_csv
from hwnas.target import Target
from hwnas.tasks.task import Answer, load_task

SIDES = ("left", "top", "right", "bottom")


@dataclass(frozen=True, slots=True)
class PredictOptions:
    """The options of `conf/predict.yaml`."""

    run: str | None
    id: str | None
    model: str | None
    images: str | None
    out: str | None
    draw: str | None
    target: dict[str, Any] | None
    memory_mb: int = option(low=1)


def run(config: Config, console: Console) -> None:
    """Run the command: `run` is a run folder, or `model` a model folder or an ONNX file of hwnas; `images` is a folder,
    `out` the CSV file.

    Raises Unfinished if some images cannot be decoded; they have a line without a class.
    """
    # Refuse wrong options and files that would be replaced, before the slow work.
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
    if options.draw and os.path.isdir(options.draw) and os.listdir(options.draw):
        raise ConfigError(f"draw={options.draw} has files already. Choose another draw=NEW.")
    classifier, left_out = _classifier(options), Counter[str]()
    accurate = (classifier.accurate if isinstance(classifier, Cascade) else classifier).file
    if options.draw and not load_task(accurate.task).draws:
        raise ConfigError("draw= writes boxes, and this network answers without any. Leave it out.")
    entries = list_sources(options.images, left_out)
    if left_out:
        console.say(left_out_text(left_out))
    if options.draw and len({Path(entry.name).stem for entry in entries}) < len(entries):
        raise ConfigError(f"draw={options.draw}: two of the images have the same name but for folder "
                          "and ending. Give them one after the other.")
    with console.step("answer") as report:
        answers = list(classifier.answers(
            entries, skip=True, report=lambda n: report(n / len(entries), f"{n} of {len(entries)}")))
    rows = [row for entry, answer in zip(entries, answers, strict=True) for row in _rows(entry, answer)]
    if options.draw:
        _draw(entries, answers, Path(options.draw), accurate.preparation)
    if options.out:
        write_atomic(options.out, shown_csv(rows))
        console.say(f"{count(len(entries), 'image')}: {options.out}")
    else:
        show(shown_csv(rows).removesuffix("\n"))
    missing = [entry for entry, answer in zip(entries, answers, strict=True) if answer is None]
    if missing:
        kind = kind_of(missing[0])
        raise Unfinished(f"{len(missing)} of {len(entries)} images cannot be decoded ({missing[0].name}"
                         f"{f' is {kind}' if kind else ''}). Remove or mend them.", part=len(missing) < len(entries))


def _rows(entry: Source, answers: Sequence[Answer] | None) -> Iterator[dict[str, Any]]:
    """Yield the lines of an image: one without a class if nothing is in it, or if it cannot be decoded."""
    if not answers:
        yield {"file": entry.name, "class": None, "confidence": None}
    for each in answers or ():
        box = {} if each.box is None else dict(zip(SIDES, (round(side, 4) for side in each.box), strict=True))
        yield {"file": entry.name, "class": each.label, "confidence": round(each.confidence, 4), **box}


def _draw(entries: Sequence[Source], answers: Sequence[Sequence[Answer] | None], folder: Path,
          seen: Preparation) -> None:
    """Write each image, as the network sees it, with the boxes of its objects."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry, objects in zip(entries, answers, strict=True):
        if objects is None:
            continue
        with entry.open() as file:
            image = as_seen(file, "RGB", seen.levels or ALL_16_BITS, seen.upright).copy()
        pen = PIL.ImageDraw.Draw(image)
        for each in objects:
            if each.box is not None:
                corners = [side * length for side, length in zip(each.box, image.size * 2, strict=True)]
                pen.rectangle(corners, outline="#c2410c", width=max(2, min(image.size) // 150))
                pen.text((corners[0] + 3, corners[1] + 2), f"{each.label} {each.confidence:.2f}", fill="#c2410c")
        content = io.BytesIO()
        image.save(content, "png")
        write_atomic(folder / f"{Path(entry.name).stem}.png", content.getvalue())


def _classifier(options: PredictOptions) -> Classifier | Cascade:
    """Return the network or the pair that answers."""
    if options.model:
        return _network(Path(options.model), options)
    folder = RunFolder.open(str(options.run), write=False)
    if options.id and "+" in options.id:
        pair = find_pair(folder, options.id)
        fast, accurate = (_network(folder.model(id).path, options) for id in (pair.fast, pair.accurate))
        return Cascade(fast, accurate, pair.threshold)
    row = choose_row(load_front(folder), str(folder.path), id=options.id)
    return _network(folder.model(row.id).path, options)


def _network(model: Path, options: PredictOptions) -> Classifier:
    """Return a network, in the target of the options or in its own."""
    # A network in models/ID of a run answers as it did for the run's front.csv.
    chosen_target = deployment_of(model) if options.target is None else Target.from_config(options.target)
    path = deployed_file(model, chosen_target.precision if chosen_target else "int8", chosen_target)
    target = chosen_target or target_of(path)
    return Classifier.compile(ModelFile.read(path, target, options.memory_mb), target)


command = partial(run_command, run, "predict", __doc__ or "", target=False)

if __name__ == "__main__":
    sys.exit(command())
