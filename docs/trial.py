"""Draws docs/trial.svg, the way of a trial from the command to its row of the front: python docs/trial.py

WAY is written by hand, from the code; tests/test_way.py holds every name in it to the code.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).resolve().parent / "trial.svg"
WIDTH, ROW, TOP, STEP = 1200, 34, 64, 22
WHERE, WORDS, ASKED = 300, 500, 856  # left edges of the columns: file, what it does, whom it asks
INK, MUTED, LINE, BAND = "#1c2430", "#667085", "#98a2b3", "#f8fafc"


class Hop(NamedTuple):
    """A function that the trial passes: `function` as module:name, called in the module of the nearest hop above that
    has a smaller `depth`. `asks` are functions that answer and are left again; they do not count."""

    depth: int
    function: str
    words: str
    asks: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return self.function.partition(":")[0]

    @property
    def name(self) -> str:
        return self.function.partition(":")[2]


WAY = (
    Hop(0, "hwnas.search.__main__:main", "takes the options, prints what comes of them"),
    Hop(1, "hwnas.search.road:search", "the whole road, top to bottom"),
    Hop(2, "hwnas.search.trials:Sampled.work", "trials until enough networks are evaluated"),
    Hop(3, "hwnas.search.sampling:SamplingWorker.search", "this process as one of the study's workers"),
    Hop(4, "hwnas.search.worker:Worker.run", "claim a trial, do it, record it, until the search is over",
        ("hwnas.study.claims:claim", "hwnas.study.claims:beating")),
    Hop(5, "hwnas.search.sampling:SamplingWorker.wanted", "a new trial: ask; known or over the cap?",
        ("hwnas.samplers.known:KnownObjectiveSampler.sample_relative", "hwnas.latency.model:LatencyModel.predict")),
    Hop(5, "hwnas.search.sampling:SamplingWorker.perform", "one trial; its result is written, Optuna is told",
        ("hwnas.study.claims:end_trial",)),
    Hop(6, "hwnas.accuracy.proxy:Proxy.evaluate", "top-1 on validation images, with its error"),
    Hop(7, "hwnas.training.loop:train", "80 steps"),
    Hop(2, "hwnas.search.trials:Sampled.trials", "all trials as rows of trials.csv",
        ("hwnas.study.record:trial_rows",)),
    Hop(2, "hwnas.search.road:verified", "from rows of trials to rows of the front"),
    Hop(3, "hwnas.search.trials:Sampled.front_rows", "which trials: rows that carry their Network",
        ("hwnas.front.finalists:finalists_of",)),
    Hop(3, "hwnas.front.verification:make_rows", "files for every row; a failure is its reason"),
    Hop(4, "hwnas.front.make:make_all", "several networks at once"),
    Hop(5, "hwnas.front.make:make", "one network: full training, ONNX, parity, int8",
        ("hwnas.training.loop:train", "hwnas.networks.export:export_onnx",
         "hwnas.networks.quantize:quantize_static")),
    Hop(3, "hwnas.front.verification:verify_front", "on this host, in the deployment runtime"),
    Hop(4, "hwnas.front.score:verify_rows", "top-1 on test images, measured latency",
        ("hwnas.runtimes.runtime:predict", "hwnas.latency.timing:time_files")),
    Hop(4, "hwnas.front.verification:results_of", "who dominates whom, who beats which baseline",
        ("hwnas.front.rows:mark_front", "hwnas.front.comparison:compare")),
    Hop(3, "hwnas.front.verification:write_results", "answers, samples, cards, report",
        ("hwnas.front.report:write_report",)),
    Hop(4, "hwnas.front.rows:save_front", "front.csv and front.json"),
)


def counted() -> tuple[int, int]:
    """Hops of the way, and the files that they stand in."""
    return len(WAY), len({hop.module for hop in WAY})


def counted_with_asked() -> tuple[int, int]:
    """The same with those that are asked."""
    functions = {*(hop.function for hop in WAY), *(asked for hop in WAY for asked in hop.asks)}
    return len(functions), len({function.partition(":")[0] for function in functions})


def caller(index: int) -> Hop:
    """The hop whose module calls that of `index`."""
    return next(hop for hop in reversed(WAY[:index]) if hop.depth < WAY[index].depth)


def draw() -> str:
    """The picture as SVG text."""
    height = TOP + ROW * len(WAY) + 12
    (hops, files), (functions, all_files) = counted(), counted_with_asked()
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
             f'viewBox="0 0 {WIDTH} {height}" font-family="DejaVu Sans, Verdana, sans-serif">',
             f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
             _text(16, 24, f"A trial's way: {hops} functions in {files} files", 15, INK, bold=True),
             _text(WORDS, 24, f"with those that are asked: {functions} in {all_files}", 10.5, MUTED),
             _text(WHERE, 50, "in hwnas/", 10, MUTED), _text(WORDS, 50, "what it does", 10, MUTED),
             _text(ASKED, 50, "asks on the way", 10, MUTED)]
    for index, hop in enumerate(WAY):
        parts += _drawn(index, hop)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(index: int, hop: Hop) -> list[str]:
    top, x = TOP + ROW * index, 16 + STEP * hop.depth
    middle = top + ROW / 2 + 4
    parts = [f'<rect x="8" y="{top}" width="{WIDTH - 16}" height="{ROW}" fill="{BAND}"/>'] if index % 2 else []
    if index:
        above = TOP + ROW * WAY.index(caller(index)) + ROW / 2 + 9
        left = 16 + STEP * caller(index).depth + 6
        parts.append(f'<path d="M{left},{above:.0f} V{middle - 4:.0f} H{x - 3}" fill="none" stroke="{LINE}" '
                     'stroke-width="1.2"/>')
    parts += [_text(x, middle, hop.name.rpartition(".")[2], 12, INK, bold=True),
              _text(WHERE, middle, _file(hop.module), 10.5, MUTED), _text(WORDS, middle, hop.words, 10.5, INK)]
    for line, text in enumerate(_asked(hop)):
        parts.append(_text(ASKED, middle - 6.5 * (len(_asked(hop)) - 1) + 13 * line, text, 9.5, MUTED))
    return parts


def _asked(hop: Hop) -> list[str]:
    """Who is asked, in lines of two."""
    names = [f"{module.removeprefix('hwnas.').replace('.', '/')}: {name.rpartition('.')[2]}"
             for module, _, name in (one.partition(":") for one in hop.asks)]
    return [" · ".join(names[start:start + 2]) for start in range(0, len(names), 2)]


def _file(module: str) -> str:
    return module.removeprefix("hwnas.").replace(".", "/") + ".py"


def _text(x: float, y: float, text: str, size: float, colour: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}"{weight}>{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
