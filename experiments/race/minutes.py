"""What the same minutes of one core give around a pretrained network: a race, its obvious cuts, or the network alone.

    python -m experiments.race.minutes search --data eurosat --root DIR --px 64 --weights FILE --minutes 5 --out RUN
    python -m experiments.race.minutes tune RUN --arm alone
    python -m experiments.race.minutes tune RUN --arm obvious     # or sizes
    python -m experiments.race.minutes table RUN … --results experiments/race/results/minutes
    python -m experiments.race.minutes picture --data eurosat --minutes 20 --out docs/minutes.png

Each part runs on one core. The arms:

    race      around=NETWORK, the whole command within the minutes
    alone     the network fine-tuned alone for the minutes less OVERHEAD_S, at the largest image size, by one cosine
    obvious   the network and its obvious cuts so, each for an equal part of these seconds, from a fitted classifier
              where it has FITTED_STEPS at most
    sizes     the same on images of three sizes

Each training keeps its seconds: the steps are planned for a quiet machine, and some are left out all along on a slower
one. All networks are exported and quantised by one recipe and answer as int8 files; those of the arms `alone`,
`obvious` and `sizes` in fp32 as well. Fitting their classifiers and exporting them does not count. Rule:

(1) The most accurate network of the race, by the int8 files, is not worse in fp32 than the network alone by more than
    a point.
(2) Per third of the latencies (equal parts of the logarithm, from the fastest network on the cuts' front to their
    slowest) the mean of the best top-1 at no more latency is not below that of the obvious cuts, beyond the 95 %
    interval over the test images, and over the seeds where there are several. Latencies are those that the race
    measured; those that it did not need are timed when the cuts are trained.
(3) Speed: at each network on the front of the cuts, the fastest of the race whose top-1 is surely not lower by half a
    point; the mean of the logarithm over each third.

(1) and (2) were written before the first table, except for the fast end of (2): it was the fastest network of both
arms. (3) and the arm `sizes` were written before the runs of twenty minutes. Until 2026-11-30 the cuts answered in fp32
alone; summary.json says of each run in which precision they do (cuts_answer). That all answer as int8 files was written
before these runs. TrashNet and groceries, and EuroSAT with MobileNetV2, are no fresh test: sixteen states of the race
ran on their test images, and were chosen by them (results/minutes/tried.csv). The race was chosen on seed 0 of Lite0,
which is left out. How fast the machine trained in race and cuts is in step_seconds.csv: seconds of a race's legs over
their steps, judging included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from experiments.common import COLOURS
from experiments.race.arms import RESAMPLES, THIRDS, Arm, ahead_of, interval, speeds
from hwnas.cli.command import compose
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset
from hwnas.data.loading import read_images
from hwnas.front.make import TrainedWeights, file_of, make
from hwnas.latency.measured import MeasuredLatency
from hwnas.latency.measured import answered as answered_of
from hwnas.networks.quantize import needs_narrow_weights
from hwnas.runtimes.runtime import FP32, answer, load_runtime
from hwnas.search.plan import Plan, line_recipe, make_plan, making_of
from hwnas.search.race import FITTED_STEPS
from hwnas.space.architecture import Architecture
from hwnas.space.cuts import WHOLE
from hwnas.system.run_folder import ModelFolder, RunFolder
from hwnas.training.classifier import fit_classifier
from hwnas.training.line import Keeping, Leg, Stretch, train_leg

RESULTS = Path(__file__).parent / "results" / "minutes"
OVERHEAD_S = 60.0  # of a command that trains networks: reading images, exporting, scoring
WARMUP = 40
PROBED = 25  # steps that are timed
SIZES = (1.0, 0.75, 0.5)  # of the arm `sizes`, as shares of the largest
KEYS = ("data", "px", "minutes", "around")  # of runs that differ in their seeds only
DRAWN = (("sizes", "the network and its obvious cuts at three sizes", "D"), ("race", "hwnas", "o"))


def options_of(given: Any) -> list[str]:
    """Return the options of a race."""
    return [f"target={given.target}", f"dataset={given.dataset}", f"dataset.root={given.root}",
            f"dataset.image_size={given.px}", f"dataset.flip={str(bool(given.flip)).lower()}", f"around={given.around}",
            f"pretrained.file={given.weights}", f"seed={given.seed}", f"budget.minutes={given.minutes:g}",
            "baselines=[]", "controls=0", "threads=1"]


def search(given: argparse.Namespace) -> None:
    """Run the race on one core."""
    given.out.mkdir(parents=True)
    (given.out / "given.json").write_text(json.dumps({name: value if isinstance(value, int | float) else str(value)
                                                      for name, value in vars(given).items()}))
    command = ["taskset", "-c", str(given.core), sys.executable, "-m", "hwnas.search", *options_of(given),
               f"out={given.out / 'race'}"]
    sys.exit(subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode)


def read_run(folder: Path) -> tuple[argparse.Namespace, Plan, Dataset]:
    """Return what a run was given, its plan and its images."""
    asked = argparse.Namespace(**json.loads((folder / "given.json").read_text()))
    plan = make_plan(compose("search", [*options_of(asked), f"out={folder / 'none'}"]), Console(quiet=True))
    return asked, plan, read_images(plan.options.dataset, max(plan.space.image_sizes), plan.options.seed,
                                    Console(quiet=True))


def tune(given: argparse.Namespace) -> None:
    """Fine-tune the network, or it and its obvious cuts, on one core; ARM.csv, and ARM.npz with the answers."""
    os.sched_setaffinity(0, {given.core})
    asked, plan, data = read_run(given.run)
    largest = max(plan.space.image_sizes)
    sizes = [int(share * largest) // 8 * 8 for share in SIZES] if given.arm == "sizes" else [largest]
    networks = {(name, px): replace(plan.space.known[name], image_size=px) for px in sizes
                for name in ([WHOLE] if given.arm == "alone" else plan.space.known)}
    each_s = (60 * float(asked.minutes) - OVERHEAD_S) / len(networks)
    rows, right, run = [], dict[str, Any](), RunFolder(given.run / "race")
    for (name, px), network in networks.items():
        with TemporaryDirectory() as folder:
            _, probed_s = fine_tune(plan, data, network, PROBED, Path(folder, "probe"), is_fitted=False)
            # As many as a quiet machine could do; those that this one has no time for are left out, as in the race.
            trained, step_s = fine_tune(plan, data, network, round(each_s / probed_s.min()), Path(folder, "state"),
                                        each_s, is_fitted=each_s / np.median(probed_s) <= FITTED_STEPS)
            answered, fp32 = deploy(plan, data, network, trained, Path(folder, network.id))
        right |= {f"{network.id}.{name}": each for name, each in answered.items()}
        right[f"{network.id}.fp32"] = fp32
        told = name if px == largest else f"{name} at {px} px"
        rows.append({"id": network.id, "name": told, "steps": trained.steps, "step_s": np.median(step_s),
                     "top1_test_fp32": float(fp32.mean()), "top1_test": float(answered["right"].mean())})
        print(rows[-1], flush=True)
    latency = MeasuredLatency(plan.deployments[0], plan.space, run.latencies, lambda: run.hold("latencies"))
    timed = answered_of(lambda: latency.predict_architectures([*networks.values()]), Console(quiet=True))
    pd.DataFrame(rows).assign(latency_ms=timed.mean).to_csv(given.run / f"{given.arm}.csv", index=False)
    np.savez(given.run / f"{given.arm}.npz", **right)


def fine_tune(plan: Plan, data: Dataset, network: Architecture, steps: int, state: Path, seconds: float | None = None,
              *, is_fitted: bool) -> tuple[TrainedWeights, np.ndarray]:
    """Train for so many steps along one cosine, or for as many of them as the seconds allow.

    Returns:
        The weights, in the file `state`, and the seconds of each step.
    """
    own, ends = plan.network(network), list[float]()
    fed, recipe = own.fed(data), line_recipe(plan, data)

    def begin() -> nn.Module:
        model = own.start()
        if is_fitted:
            fit_classifier(model, fed)
        return model.train()

    stretch = Stretch(Leg(steps, 1.0, 0.0, min(WARMUP, steps // 3)), 0, "", "tuned", begin, seconds)
    train_leg(stretch, state.with_name("none"), state, data=fed, recipe=recipe, seed=plan.options.seed,
              keep=Keeping(print), progress=lambda step, of: ends.append(time.monotonic()))
    return TrainedWeights("tuned", state, len(ends)), np.diff(ends)


def deploy(plan: Plan, data: Dataset, network: Architecture, trained: TrainedWeights, folder: Path
           ) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Export and quantise a network as a search does; the answers of its int8 file, and which ones its fp32 file has
    right.

    The answers: which test images are right, and how sure the network is of each; the same of validation images."""
    own, target, made = plan.network(network), plan.deployments[0].target, ModelFolder(folder)
    host = plan.deployments[0].device.host
    narrow = [target.name] if needs_narrow_weights(target, host.vendor, host.flags) else []
    make(own, made, replace(making_of(plan, data), raced={own.trained_id: trained}, narrow=narrow))
    fed, told = own.fed(data), dict[str, np.ndarray]()
    int8, fp32 = (load_runtime(each.runtime).compile(path, each) for each, path in (
        (target, file_of(target, made)), (FP32, made.onnx)))
    for prefix, part in (("", fed.test), ("validation_", fed.validation)):
        answers = answer(int8, fed, part)
        told |= {f"{prefix}right": answers.values == part.labels, f"{prefix}confidence": np.asarray(answers.confidence)}
    return told, answer(fp32, fed, fed.test).values == fed.test.labels


def judge(folders: list[Path]) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return what the rule asks of the runs of several seeds, and their networks."""
    rng, told, kept, drawn = np.random.default_rng(0), [], [], [np.arange(len(folders))]
    apart: dict[str, list[np.ndarray]] = {}  # by the cuts' answers: [resamples, speed and points, thirds] of each seed
    for folder in folders:
        given, run = json.loads((folder / "given.json").read_text()), RunFolder(folder / "race")
        cuts = "sizes" if (folder / "sizes.csv").exists() else "obvious"
        rows = {"race": pd.read_csv(run.front_csv).query("verified")} | {
            name: read_arm(folder / f"{name}.csv") for name in (cuts, "alone") if (folder / f"{name}.csv").exists()}
        answers, of_cuts = run.read_predictions(), dict(np.load(folder / f"{cuts}.npz"))
        labels = answers.pop("labels")
        images = [np.arange(len(labels)), *(rng.integers(0, len(labels), len(labels)) for _ in range(RESAMPLES))]
        race = Arm.of(latencies_of(rows["race"]), {id: labels == each for id, each in answers.items()})
        for way in ("right", "fp32"):
            right = {name.removesuffix(f".{way}"): each for name, each in of_cuts.items() if name.endswith(f".{way}")}
            if right:
                rivals = Arm.of(latencies_of(rows[cuts]), right)
                apart.setdefault(way, []).append(np.array([[speeds(race, rivals, some), ahead_of(
                    race, rivals, some, 1 / len(np.unique(labels)))] for some in images]))
        best = rows["race"].sort_values("top1_test").iloc[-1]
        alone = rows["alone"].iloc[0].to_dict() if "alone" in rows else {}
        told.append({"seed": given["seed"], "networks": len(rows["race"]), "steps": int(best.steps), "best": float(
            best.top1_test_fp32), "best_int8": float(best.top1_test), "best_ms": float(best.latency_ms), "best_name":
            str(best["name"]), "best_of_cuts": float(rows[cuts].top1_test.max()), "best_of_cuts_fp32":
            float(rows[cuts].top1_test_fp32.max()), "alone": alone.get("top1_test"),
            "alone_fp32": alone.get("top1_test_fp32"), "alone_ms": alone.get("latency_ms"),
            "alone_steps": alone.get("steps"),
            "cuts_lost": [round(each, 5) for each in rows[cuts].top1_test_fp32 - rows[cuts].top1_test]})
        kept += [part.assign(arm=arm, seed=given["seed"]) for arm, part in rows.items()]
    drawn += [rng.integers(0, len(folders), len(folders)) for _ in range(RESAMPLES)]

    def over_seeds(values: list[np.ndarray]) -> dict[str, Any]:
        with np.errstate(invalid="ignore"), warnings.catch_warnings(action="ignore"):  # a third without a network
            mean = np.array([np.nanmean(np.array(values)[seeds, at], axis=0) for at, seeds in enumerate(drawn)])
        return {"points_ahead": [interval(mean[:, 1, third]) for third in range(THIRDS)],
                "times_as_fast": [interval(np.exp(mean[:, 0, third])) for third in range(THIRDS)]}

    facts = {**{key: given[key] for key in KEYS}, "host": run.read_environment()["host"]["name"],
             "images": len(labels), "cuts": cuts, "runs": told, "cuts_answer": "int8" if "fp32" in apart else "fp32",
             **over_seeds(apart["right"]), **({"of_fp32": over_seeds(apart["fp32"])} if "fp32" in apart else {})}
    return facts, pd.concat(kept).assign(**{key: given[key] for key in KEYS})


def read_arm(path: Path) -> pd.DataFrame:
    """The networks of an arm that was tuned; where their int8 files did not answer, those of fp32 count."""
    rows = pd.read_csv(path)
    return rows if "top1_test" in rows else rows.assign(top1_test=rows.top1_test_fp32)


def latencies_of(rows: pd.DataFrame) -> dict[str, float]:
    """Milliseconds by id."""
    return dict(zip(rows.id, rows.latency_ms, strict=True))


def draw(networks: pd.DataFrame, out: Path) -> None:
    """Every network of a race and of its obvious cuts, and the front of each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.4, 4.6), layout="constrained")
    for (arm, label, marker), colour in zip(DRAWN, (COLOURS[4], COLOURS[6]), strict=True):
        part = networks[networks.arm == arm].sort_values("latency_ms")
        part = part.assign(top1=100 * part.top1_test)
        for _, run in part.groupby("seed"):
            front = run[run.top1 > run.top1.cummax().shift(fill_value=0)]
            axes.step(front.latency_ms, front.top1, where="post", color=colour, linewidth=1.2, alpha=0.6)
        axes.scatter(part.latency_ms, part.top1, color=colour, marker=marker, s=26, label=label, zorder=3)
    axes.set_xscale("log")
    ticks = [tick for tick in (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5)
             if networks.latency_ms.min() * 0.9 < tick < networks.latency_ms.max() * 1.1]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="latency of one image, int8, one thread (ms, log scale)", ylabel="test top-1 of int8 files (%)")
    first = networks.iloc[0]
    axes.set_title(f"{first.around}, {first.data} at {first.px} px, {first.minutes:g} minutes of one core, "
                   f"{networks.seed.nunique()} seeds", loc="left", fontsize=10)
    axes.grid(color="#eaecf0", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(out, dpi=150)


def main() -> None:
    """Run an arm, or compare what was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    run = parts.add_parser("search")
    for name in ("root", "weights", "out"):
        run.add_argument(f"--{name}", type=Path, required=True)
    run.add_argument("--data", required=True)
    run.add_argument("--target", default="xeon_int8")
    run.add_argument("--around", default="mobilenetv2_100")
    run.add_argument("--minutes", type=float, required=True)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--px", type=int, required=True)
    run.add_argument("--dataset", default="imagefolder")
    run.add_argument("--flip", type=int, default=1)
    tuned = parts.add_parser("tune")
    tuned.add_argument("run", type=Path)
    tuned.add_argument("--arm", choices=["alone", "obvious", "sizes"], required=True)
    for part in (run, tuned):
        part.add_argument("--core", type=int, default=0)
    table = parts.add_parser("table")
    table.add_argument("runs", type=Path, nargs="+")
    picture = parts.add_parser("picture")
    picture.add_argument("--data", required=True)
    picture.add_argument("--minutes", type=float, required=True)
    picture.add_argument("--out", type=Path, required=True)
    for part in (table, picture):
        part.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.part == "picture":
        networks = pd.read_csv(given.results / "networks.csv")
        draw(networks[(networks.data == given.data) & (networks.minutes == given.minutes)], given.out)
    elif given.part == "table":
        groups: dict[tuple[str, ...], list[Path]] = {}
        for folder in given.runs:
            asked = json.loads((folder / "given.json").read_text())
            groups.setdefault(tuple(str(asked[key]) for key in KEYS), []).append(folder)
        judged = [judge(folders) for folders in groups.values()]
        given.results.mkdir(parents=True, exist_ok=True)
        columns = [*KEYS, "seed", "arm", "id", "name", "steps", "top1_test_fp32", "top1_test", "latency_ms"]
        pd.concat([rows for _, rows in judged])[columns].to_csv(given.results / "networks.csv", index=False)
        text = json.dumps([facts for facts, _ in judged], indent=1)
        (given.results / "summary.json").write_text(text + "\n")
        print(text)
    else:
        {"search": search, "tune": tune}[given.part](given)


if __name__ == "__main__":
    main()
