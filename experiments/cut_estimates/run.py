"""Which cheap estimate ranks cuts of a pretrained network as their full fine-tuning does?

    python -m hwnas.certify space=space.yaml +target=… dataset=… n=32 seeds=3 only=truth out=TRUTH       # hours
    python -m experiments.cut_estimates.run estimate TRUTH --space space.yaml --weights DIR --results DIR [--arms …]
    python -m experiments.cut_estimates.run table DIR...

`estimate` asks each arm for every network of the certificate's folder TRUTH, and writes networks.csv, with what those
full trainings came to that are done. What the file holds is not asked again. One core; CPU seconds are counted, setup
and all. The arms:

    inherited    the default: the cut's weights, fine-tuned for 160 steps of 32 images
    whole_first  the same, cut from the whole network that was fine-tuned on the data first (312 steps of 32)
    shared       one set of weights for all cuts: 1,500 steps of 32 images, each through a random cut; then 512 images
                 set a cut's norms, and it is asked
    probe        no training: 512 images set the norms, and a linear classifier is fitted to 2,000 images' features
    additive     probes of the whole network with one choice changed each; a cut's drops of log odds are summed

Written before the tables: tau is Kendall's between estimate and mean test top-1 of the full trainings; "given latency"
is tau of what is left of both, in log odds, after a straight line in log latency. Intervals: 2,000 resamples of the
networks. An arm is better than the default where the interval of the difference of its tau given latency lies above
zero, at no more seconds for forty networks.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.common import command, save_csv, text_table
from experiments.cut_estimates.judged import MANY, judged
from hwnas.certify.truth import read_plan, read_training
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset, Split, resize, subset, top1
from hwnas.data.loading import read_images
from hwnas.errors import DataError
from hwnas.networks.around import begin, find_start, kept
from hwnas.networks.weights import Pretrained, PretrainedOptions
from hwnas.space.search_space import WHOLE, SearchSpace
from hwnas.stats import LEVEL, log_odds

if TYPE_CHECKING:
    from torch import nn

    from hwnas.accuracy.proxy import Proxy
    from hwnas.space.architecture import Architecture

Array = NDArray[np.float64]
Ask = Callable[["Architecture"], float]
TRAIN_IMAGES, NORM_IMAGES, PROBE_IMAGES = 5000, 512, 2000
WHOLE_STEPS, SHARED_STEPS, BATCH = 312, 1500, 32


@dataclass(frozen=True)
class Bench:
    """What every arm works with."""

    data: Dataset
    space: SearchSpace
    pretrained: Pretrained
    estimator: Proxy

    @property
    def train(self) -> Split:
        """The images that the full trainings learn from."""
        return self.data.train.take(subset(self.data.train.labels, TRAIN_IMAGES, 0))

    def images(self, architecture: Architecture, n: int, seed: int) -> Split:
        """A stratified subset of them at the network's size."""
        part = self.train.take(subset(self.train.labels, n, seed))
        return Split(resize(part.images, architecture.image_size), part.labels)

    def score(self, network: nn.Module, architecture: Architecture) -> float:
        """Validation top-1 of a network whose norms are set first."""
        from hwnas.training.loop import predict
        from hwnas.training.supernet import recalibrate

        recalibrate(network, self.images(architecture, NORM_IMAGES, 1).images, self.data)
        validation = resize(self.data.validation.images, architecture.image_size)
        return top1(predict(network.eval(), validation, self.data), self.data.validation.labels)


def bench_of(truth: Path, space: Path, weights: Path) -> Bench:
    from hwnas.accuracy.inherited import load

    plan = read_plan(truth)
    if plan is None:
        raise DataError(f"{truth} has no plan of a certificate. Run python -m hwnas.certify … out={truth} first.")
    first = plan.networks[0].architecture
    data = read_images(plan.dataset, first.image_size, plan.seed, Console())
    cuts = SearchSpace.load(space, channels=first.channels, classes=first.classes, image_size=first.image_size)
    options = PretrainedOptions(use=True, folder=weights)
    proxy = load({"threads": 1, "pretrained": {"use": True, "folder": str(weights)}}, data, cuts)
    return Bench(proxy.dataset, cuts, find_start(cuts.definition.around, options, data.channels), proxy)


def inherited(bench: Bench) -> Ask:
    return lambda architecture: bench.estimator.evaluate(architecture).value


def whole_first(bench: Bench) -> Ask:
    """The whole network is fine-tuned, and everything is cut from that."""
    from hwnas.networks.build import build
    from hwnas.training.loop import seeded, train
    from hwnas.training.recipe import FINE_TUNING

    recipe = replace(FINE_TUNING, epochs=1, min_steps=WHOLE_STEPS, max_steps=WHOLE_STEPS, threads=1)
    with seeded(0, 1):
        whole = train(begin(bench.space.known[WHOLE], bench.pretrained), bench.train, recipe=recipe, dataset=bench.data,
                      seed=0)

    def cut(architecture: Architecture) -> nn.Module:
        import torch

        network = build(architecture)
        own = network.state_dict()
        with torch.no_grad():
            for name, tensor in kept(whole, network).values.items():
                own[name].copy_(tensor)
        return network.train()

    return inherited(replace(bench, estimator=replace(bench.estimator, build=cut, begun="whole_first")))


class Shared:
    """One set of weights for all cuts: the whole network's, and a head and a classifier for each stage that may be the
    last."""

    def __init__(self, bench: Bench) -> None:
        import torch
        from torch import nn

        self.bench = bench
        self.whole: Any = begin(bench.space.known[WHOLE], bench.pretrained)
        outs = [_outs(stage[-1]) for stage in self.whole.blocks]
        widest, classes = max(bench.space.definition.heads), len(bench.data.class_names)
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Conv2d(out, widest, 1, bias=False) for out in outs[:-1]])
        self.norms = nn.ModuleList([nn.BatchNorm2d(widest) for _ in outs[:-1]])
        self.classifiers = nn.ModuleDict({f"{index}{kind}": nn.Linear(width, classes) for index, out in enumerate(outs)
                                          for kind, width in (("head", widest), ("none", out))})

    @property
    def own(self) -> list[nn.Module]:
        return [self.heads, self.norms, self.classifiers]

    def values(self, network: Any, architecture: Architecture) -> dict[str, Any]:
        """Values of all the cut's parameters, in expressions of the shared ones."""
        import torch

        last, cut = len(network.blocks) - 1, kept(self.whole, network)
        values: dict[str, Any] = dict(cut.values)
        classifier: Any = self.classifiers[f"{last}{'head' if architecture.head else 'none'}"]
        rows = torch.arange(architecture.head) if architecture.head else cut.rows
        if architecture.head and last < len(self.heads):
            norm: Any = self.norms[last]
            values |= {"conv_head.weight": self.heads[last].weight[rows][:, cut.rows],
                       **{f"bn2.{name}": getattr(norm, name)[rows]
                          for name in ("weight", "bias", "running_mean", "running_var")}}
        return {**values, "classifier.weight": classifier.weight[:, rows], "classifier.bias": classifier.bias}

    def train(self) -> None:
        import torch
        from timm.optim import create_optimizer_v2
        from torch import nn
        from torch.func import functional_call
        from torch.nn.functional import cross_entropy

        from hwnas.networks.build import build
        from hwnas.training.batches import Batches
        from hwnas.training.recipe import FINE_TUNING

        bench, rng, lr = self.bench, np.random.default_rng(0), FINE_TUNING.lr
        groups = create_optimizer_v2(self.whole, "adamw", lr=lr, weight_decay=FINE_TUNING.weight_decay,
                                     layer_decay=FINE_TUNING.layer_decay).param_groups
        shares = [group.get("lr_scale", 1.0) for group in groups] + [1.0]
        parameters = [*(group["params"] for group in groups), [p for part in self.own for p in part.parameters()]]
        optimizer = torch.optim.AdamW([{"params": part} for part in parameters], lr=lr,
                                      weight_decay=FINE_TUNING.weight_decay)
        every = [parameter for part in parameters for parameter in part]
        average = [parameter.detach().clone() for parameter in every]
        recipe = replace(FINE_TUNING, epochs=1, min_steps=SHARED_STEPS, max_steps=SHARED_STEPS, threads=1)
        batches, done = Batches(bench.train, bench.data, recipe, 0), 0
        for epoch in range(1, batches.epochs + 1):
            for images, labels in batches.epoch(epoch):
                if done == SHARED_STEPS:
                    break
                done += 1
                rise = min(1.0, done / (0.1 * SHARED_STEPS))
                rate = lr * rise * 0.5 * (1 + math.cos(math.pi * max(0.0, done / SHARED_STEPS - 0.1) / 0.9))
                for group, share in zip(optimizer.param_groups, shares, strict=True):
                    group["lr"] = rate * share
                architecture = bench.space.decode(bench.space.to_params(bench.space.sample(rng, 1)[0]))
                network = build(architecture).train()
                logits = functional_call(network, self.values(network, architecture), (images,))
                optimizer.zero_grad(set_to_none=True)
                cross_entropy(logits, labels, label_smoothing=FINE_TUNING.label_smoothing).backward()
                nn.utils.clip_grad_norm_(every, FINE_TUNING.clip_norm)
                optimizer.step()
                with torch.no_grad():
                    torch._foreach_lerp_(average, [p.detach() for p in every], 1 - min(0.995, (1 + done) / (10 + done)))
        with torch.no_grad():
            for parameter, mean in zip(every, average, strict=True):
                parameter.copy_(mean)

    def ask(self, architecture: Architecture) -> float:
        import torch

        from hwnas.networks.build import build

        network = build(architecture)
        own = network.state_dict()
        with torch.no_grad():
            for name, tensor in self.values(network, architecture).items():
                own[name].copy_(tensor)
        return self.bench.score(network, architecture)


def _outs(block: Any) -> int:
    import torch

    return int([module for module in block.modules() if isinstance(module, torch.nn.Conv2d)][-1].out_channels)


def shared(bench: Bench) -> Ask:
    weights = Shared(bench)
    weights.train()
    return weights.ask


def probe(bench: Bench) -> Ask:
    """A linear classifier on the features of the cut as it is; a head without weights is left out."""
    import torch

    from hwnas.training.loop import seeded
    from hwnas.training.supernet import recalibrate

    stages = len(bench.space.known[WHOLE].stages)

    def features(network: Any, images: Any) -> Array:
        with torch.no_grad():
            parts = [network.forward_head(network.forward_features(torch.from_numpy(bench.data.normalise(
                np.asarray(images[at:at + 64])))), pre_logits=True) for at in range(0, len(images), 64)]
        return np.asarray(torch.cat(parts).double().numpy())

    def ask(architecture: Architecture) -> float:
        with seeded(0, 1):
            network: Any = begin(architecture, bench.pretrained)
        if len(network.blocks) < stages:
            network.conv_head = network.bn2 = torch.nn.Identity()
        network.classifier = torch.nn.Identity()
        recalibrate(network, bench.images(architecture, NORM_IMAGES, 1).images, bench.data)
        network.eval()
        given, asked = bench.images(architecture, PROBE_IMAGES, 0), bench.data.validation
        learnt = features(network, given.images)
        told = features(network, resize(asked.images, architecture.image_size))
        middle, width = learnt.mean(0), learnt.std(0) + 1e-6
        learnt, told = (learnt - middle) / width, (told - middle) / width
        wanted = np.eye(len(bench.data.class_names))[given.labels]
        wanted -= wanted.mean(0)
        squares, products = learnt.T @ learnt, learnt.T @ wanted
        ridges = (len(learnt) * share * np.eye(len(squares)) for share in (0.01, 0.03, 0.1, 0.3, 1.0))
        return max(float(((told @ np.linalg.solve(squares + ridge, products)).argmax(1) == asked.labels).mean())
                   for ridge in ridges)

    return ask


def additive(bench: Bench) -> Ask:
    """Every choice costs what it costs the whole network alone."""
    ask, space = probe(bench), bench.space
    whole = dict(space.encode(space.known[WHOLE]))
    top = float(log_odds(ask(space.known[WHOLE])))
    drops: dict[tuple[str, Any], float] = {}
    for parameter in space.parameters:
        for choice in parameter.choices:
            changed = space.decode({**whole, parameter.name: choice})
            drops[parameter.name, choice] = 0.0 if changed.id == space.known[WHOLE].id else \
                top - float(log_odds(ask(changed)))

    def summed(architecture: Architecture) -> float:
        setting: Mapping[str, Any] = space.encode(architecture)
        gone = {f"stage{index}." for index in range(setting.get("depth", 99), 99)}
        return 1 / (1 + math.exp(-(top - sum(drops[key, value] for key, value in setting.items()
                                             if not any(key.startswith(stage) for stage in gone)))))

    return summed


ARMS: dict[str, Callable[[Bench], Ask]] = {"inherited": inherited, "whole_first": whole_first, "shared": shared,
                                           "probe": probe, "additive": additive}


def estimate(truth: Path, space: Path, weights: Path, results: Path, arms: Sequence[str]) -> None:
    """Ask each arm for every network."""
    bench, plan = bench_of(truth, space, weights), read_plan(truth)
    assert plan is not None
    path = results / "networks.csv"
    rows: list[dict[str, Any]] = pd.read_csv(path).to_dict("records") if path.exists() else []
    full = {}
    for network in plan.networks:
        trained = [read_training(plan, network, seed) for seed in range(plan.seeds)]
        tops = [training.top1 for training in trained if training is not None and training.top1 is not None]
        full[network.id] = {"top1_test": float(np.mean(tops)) if tops else math.nan, "seeds": len(tops)}
    rows = [{**row, **full[row["id"]]} for row in rows]
    asked = {(row["id"], row["arm"]) for row in rows}
    for arm in arms:
        missing = [network for network in plan.networks if (network.id, arm) not in asked]
        if not missing:
            continue
        began = time.process_time()
        ask = ARMS[arm](copy.copy(bench))
        setup_s = time.process_time() - began
        for network in missing:
            began = time.process_time()
            value = ask(network.architecture)
            rows.append({"id": network.id, "latency_ms": network.cost, **full[network.id], "arm": arm,
                         "estimate": value, "cpu_seconds": round(time.process_time() - began, 2),
                         "setup_cpu_seconds": round(setup_s, 1)})
            save_csv(path, rows)
            print(f"{arm} {network.id} {value:.3f}", flush=True)
    if rows:
        save_csv(path, rows)


def table(folder: Path) -> None:
    """Print what `judged` says."""
    rows = pd.read_csv(folder / "networks.csv").dropna(subset="top1_test").drop_duplicates("id")
    print(f"{folder.name}: {len(rows)} networks, {rows['seeds'].sum()} full trainings")
    print(text_table([["arm", "tau given latency", f"{LEVEL:.0%}", "less inherited's", "tau", "CPU s each", "setup",
                       f"{MANY} networks"],
                      *([arm, f"{tau:.2f}", f"{low:.2f} to {high:.2f}", f"{less:.2f} to {more:.2f}", f"{plain:.2f}",
                         f"{each:.1f}", f"{setup:.0f}", f"{both:.0f}"]
                        for arm, (tau, low, high, less, more, plain, each, setup, both) in judged(folder).items())]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    asking = commands.add_parser("estimate")
    asking.add_argument("truth", type=Path)
    for name in ("--space", "--weights", "--results"):
        asking.add_argument(name, type=Path, required=True)
    asking.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    commands.add_parser("table").add_argument("results", nargs="+", type=Path)
    given = parser.parse_args()
    if given.command == "estimate":
        estimate(given.truth, given.space, given.weights, given.results, given.arms)
    else:
        for folder in given.results:
            table(folder)


if __name__ == "__main__":
    command(main)
