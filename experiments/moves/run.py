"""What a structural move costs, beside smaller images: children of one trained network, all trained alike.

    python -m experiments.moves.run RUN ID --out experiments/moves/NAME.csv [--steps 300] [--most 24]

RUN is the folder of a race, ID one of its networks. Every network that is one choice away and can be cut from it is a
child (of many, `--most` spread evenly over their latencies), and so is the network itself on each smaller image size,
each size cut from the size above. All begin with their source's weights and get as many steps, whose rate falls from
half to zero. Latencies are predicted by the run's table (an estimate; its error stands in the run's report), top-1 is
fp32 on the test images, which choose nothing here.

Written before the runs: a move pays where its top-1 lies above the line between the two image sizes whose latencies
lie beside its own, on the logarithm of latency, by more than the paired test images leave to chance (two standard
errors). `gap` is that difference.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from safetensors.torch import load_file

from hwnas.cli.progress import Console
from hwnas.networks.carry import cut_network
from hwnas.search.course import part_of_in, smaller_in
from hwnas.search.plan import line_recipe, make_plan
from hwnas.search.prepare import Prepared, prepare
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.system.run_folder import RunFolder
from hwnas.training.line import Keeping, Leg, Stretch, answers, train_leg

RATE, WARMUP = 0.5, 40


@dataclass
class Tried:
    """A network that was trained here: what made it, and which test images it answers rightly."""

    move: str
    architecture: Architecture
    latency_ms: float
    right: NDArray[np.bool_]
    state: dict[str, object]


class Moves:
    """All that is one move away from a network, trained alike."""

    def __init__(self, prepared: Prepared, steps: int) -> None:
        self.prepared, self.steps = prepared, steps
        self.space: SearchSpace = prepared.plan.space
        self.recipe = line_recipe(prepared.plan, prepared.dataset)

    def latency_ms(self, network: Architecture) -> float:
        """Predicted."""
        codes = self.space.to_codes(self.space.encode(network))
        return float(self.prepared.model.predict(codes[None]).mean[0])

    def train(self, move: str, target: Architecture, source: Tried) -> Tried:
        """The network, cut from its source and trained."""
        network = self.prepared.plan.network(target)
        data = network.fed(self.prepared.dataset)
        stretch = Stretch(Leg(self.steps, RATE, 0.0, WARMUP), 0, "", "moves", lambda: cut_network(
            dict(source.state), source.architecture, target))  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            model = train_leg(stretch, path, path, data=data, recipe=self.recipe, seed=0, keep=Keeping(print))
        tried = Tried(move, target, self.latency_ms(target), answers(model, data.test, data), model.state_dict())
        print(f"{move}: {100 * tried.right.mean():.2f} % in {tried.latency_ms:.4f} ms", flush=True)
        return tried

    def children(self, network: Architecture, most: int) -> list[Architecture]:
        """What is one choice away and can be cut from the network, on images as large."""
        own, part_of = self.space.to_codes(self.space.encode(network)), part_of_in(self.space)
        able = {}
        for at, parameter in enumerate(self.space.parameters):
            for choice in range(len(parameter.choices)):
                codes = own.copy()
                codes[at] = choice
                child = self.space.decode(self.space.to_params(self.space.canonical_codes(codes[None])[0]))
                if child.id != network.id and child.image_size == network.image_size and part_of(
                        child, network) == child:
                    able[child.id] = child
        ranked = sorted(able.values(), key=self.latency_ms)
        return [ranked[at] for at in np.unique(np.linspace(0, len(ranked) - 1, most).round().astype(int))]


def difference(space: SearchSpace, source: Architecture, target: Architecture) -> str:
    """What makes one network of a space another one, in the words of its parameters."""
    before, after = space.find(source), space.encode(target)
    changed = [(name, (before or {}).get(name), value) for name, value in after.items()
               if (before or {}).get(name) != value]
    return ", ".join(f"{name} {old} to {new}" for name, old, new in changed[:4])


def gap_of(child: Tried, sizes: list[Tried]) -> tuple[float, float]:
    """Top-1 less that of the sizes at its latency, and the standard error of that; NaN beyond the sizes."""
    ordered = sorted(sizes, key=lambda size: size.latency_ms)
    at = np.searchsorted([size.latency_ms for size in ordered], child.latency_ms)
    if not 0 < at < len(ordered):
        return float("nan"), float("nan")
    low, high = ordered[at - 1], ordered[at]
    share = np.log(child.latency_ms / low.latency_ms) / np.log(high.latency_ms / low.latency_ms)
    apart = child.right.astype(float) - ((1 - share) * low.right + share * high.right)
    return float(apart.mean()), float(apart.std() / np.sqrt(len(apart)))


def main() -> None:
    """Train all, and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("id")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--most", type=int, default=24)
    given = parser.parse_args()
    run, console = RunFolder(given.run), Console()
    prepared = prepare(make_plan(run.read_config(), console), run, console)
    moves, space = Moves(prepared, given.steps), prepared.plan.space
    folder = run.model(given.id)
    network = Architecture.from_yaml((folder.path / "architecture.yaml").read_text())
    begun = Tried("", network, moves.latency_ms(network), np.zeros(0, bool), load_file(folder.weights))
    sizes = [moves.train("as it is", network, begun)]
    for smaller in smaller_in(space, prepared.model.predict, prepared.options, is_short=False)(network):
        sizes.append(moves.train(f"{smaller.image_size} px", smaller, sizes[-1] if sizes[1:] else begun))
    rows = []
    for child in moves.children(network, given.most):
        tried = moves.train(difference(space, network, child), child, begun)
        gap, error = gap_of(tried, sizes)
        rows.append((tried, gap, error))
    table = [{"network": given.id, "move": size.move, "kind": "size", "latency_ms": size.latency_ms,
              "top1": size.right.mean(), "gap": float("nan"), "error": float("nan")} for size in sizes]
    table += [{"network": given.id, "move": tried.move, "kind": "move", "latency_ms": tried.latency_ms,
               "top1": tried.right.mean(), "gap": gap, "error": error} for tried, gap, error in rows]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(table).round(5).to_csv(given.out, index=False)


if __name__ == "__main__":
    main()
