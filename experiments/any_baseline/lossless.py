"""Whether a cut of what says nothing changes the answers of any network.

    python -m experiments.any_baseline.lossless --out experiments/any_baseline/lossless.csv

Channels: of each group that may keep half, the other half is silenced (all their weights are 0), then cut. Blocks: each
that changes nothing once all its weights are 0 is left out. `loss` is the largest difference of a logit, as a share of
the largest one, in double precision: networks with random weights may make of float32's rounding half of an answer.
Norms over channels (`layernorm`) see silent channels too, so that these cuts cannot be free of loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from experiments.any_baseline.run import CLASSES, PX, write_rows
from hwnas.errors import HwnasError
from hwnas.networks.around import find_family
from hwnas.networks.baselines import original
from hwnas.networks.cutting import apply_cut
from hwnas.networks.export import randomise
from hwnas.networks.tracing import Traced, build_graph, first_writer, list_groups, trace
from hwnas.space.family import WIDTH, Family


def judge(name: str) -> list[dict[str, Any]]:
    """A row for each tie and each run of a network."""
    try:
        family, traced = find_family(name, 3, CLASSES), trace(name, 3, CLASSES)
    except HwnasError as error:
        return [{"network": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}]
    torch.manual_seed(0)
    model = randomise(original(name, 3, CLASSES, PX), 0).eval()
    images = torch.randn((4, 3, PX, PX), generator=torch.Generator().manual_seed(1))
    rows = []
    for tie, shares in family.shares.items():
        if 0.5 in shares:
            chosen = chosen_of(family) | {WIDTH + tie: 0.5}
            silent = silence(deepcopy(model), traced, family, chosen)
            norms = any(isinstance(module, nn.LayerNorm) for module in model.modules())
            rows.append({"network": name, "cut": tie, "layernorm": norms,
                         "loss": loss(silent, traced, family, chosen, images)})
    for run in family.runs:
        idle = deepcopy(model)
        left_out = [block for block in run.blocks if make_idle(idle, block, images)]
        row = {"network": name, "cut": run.name, "idle_blocks": len(left_out)}
        if set(left_out) == set(run.blocks):
            row["loss"] = loss(idle, traced, family, chosen_of(family) | {run.name: 0}, images)
        rows.append(row)
    return rows


def chosen_of(family: Family) -> dict[str, Any]:
    """What the whole network keeps."""
    return {name: choices[0] for name, choices in family.fields()[1:]}


def loss(model: nn.Module, traced: Traced, family: Family, chosen: dict[str, Any], images: Tensor) -> float:
    """The largest difference that a cut makes, as a share of the largest logit."""
    cut = apply_cut(deepcopy(model), traced, family, chosen, 3)
    with torch.inference_mode():
        before, after = model.double()(images.double()), cut.double()(images.double())
    return float((before - after).abs().max() / before.abs().max())


def silence(model: nn.Module, traced: Traced, family: Family, chosen: dict[str, Any]) -> nn.Module:
    """Give the channels that a cut leaves out weights of 0, wherever they are written or read."""
    wanted = family.channels(chosen)
    for name, reader in traced.readers.items():
        first, second = model.get_submodule(name), model.get_submodule(reader)
        for module, writes in ((first, True), (second, False)):
            set_to_zero(module, range(wanted[name], len(first.weight)), writes)  # type: ignore[arg-type]
    if traced.readers:
        return model
    group_of = {layer: name for name in wanted for layer in traced.writers[name]}
    graph = build_graph(model, 3)
    names = {module: name for name, module in model.named_modules()}
    for group in list_groups(graph, model):
        name = group_of.get(first_writer(graph, group, names))
        if name is None or len(group[0].idxs) <= wanted[name]:
            continue
        surplus = list(range(wanted[name], len(group[0].idxs)))
        for dependency, places in graph.get_pruning_group(group[0].dep.target.module, group[0].dep.handler, surplus):
            set_to_zero(dependency.target.module, places, graph.is_out_channel_pruning_fn(dependency.handler))
    return model


@torch.no_grad()
def set_to_zero(module: Any, places: Sequence[int], writes: bool) -> None:
    """The weights of a layer at these channels of its output, or of its input."""
    if isinstance(module, nn.Conv2d | nn.Linear) and not writes and getattr(module, "groups", 1) == 1:
        module.weight[:, places] = 0
        return
    for values in (getattr(module, "weight", None), getattr(module, "bias", None)):
        if values is not None:
            values[places] = 0


def make_idle(model: nn.Module, block: str, images: Tensor) -> bool:
    """Set all weights of a block to 0, where its output is its input then."""
    module, before = model.get_submodule(block), deepcopy(model.get_submodule(block).state_dict())
    with torch.no_grad():
        for values in module.parameters():
            values.zero_()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.zero_()  # type: ignore[union-attr]
    met: list[bool] = []
    hook = module.register_forward_hook(lambda _, given, out: met.append(torch.equal(given[0], out)))
    with torch.inference_mode():
        model(images)
    hook.remove()
    if not all(met):
        module.load_state_dict(before)
    return all(met)


def main(argv: Sequence[str] | None = None) -> None:
    """Judge all networks; a file that is there is written anew."""
    write_rows(__doc__, judge, argv, digits="%.3g")


if __name__ == "__main__":
    main()
