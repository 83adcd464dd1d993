"""Checkpoints of a training: weights, their average and the optimiser's state in one safetensors file.

All of it is one file, so that it is whole or not there; nothing is pickled. The header's only key holds JSON: format,
identity (what decides the training), epochs done and the log's rows. It also holds the optimiser's state, with a
tensor's name where a tensor stood.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hwnas.errors import StudyError
from hwnas.networks.network import check_tensors
from hwnas.system.documents import WRONG, Document, load_json
from hwnas.system.paths import write_atomic

DOCUMENT = Document("hwnas-checkpoint", 1, "a checkpoint", "Choose another out=FOLDER.", shape={
    "identity": dict, "epoch": int, "rows": [dict], "optimizer": dict})
KEY = "hwnas_checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """A training after `epoch` whole epochs."""

    identity: Mapping[str, Any]
    epoch: int
    rows: list[dict[str, Any]]
    model: Mapping[str, Tensor]
    average: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write it whole; UserError, the old file left as it was, when that fails."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        for part, state in (("model", self.model), ("average", self.average)):
            tensors |= {f"{part}.{name}": plain(tensor) for name, tensor in state.items()}
        about = {**DOCUMENT.header, "identity": dict(self.identity), "epoch": self.epoch, "rows": self.rows,
                 "optimizer": _pack(self.optimizer, "optimizer", tensors)}
        write_atomic(path, save(tensors, {KEY: json.dumps(about)}))

    @classmethod
    def load(cls, path: Path) -> Checkpoint | None:
        """The checkpoint at `path`, None where there is no file; StudyError for one that is torn or foreign."""
        from safetensors import SafetensorError, safe_open

        if not path.exists():
            return None
        try:
            with safe_open(check_tensors(path), framework="pt") as file:
                about = load_json((file.metadata() or {}).get(KEY, "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError) as error:
            raise StudyError(f"{path} is torn or no checkpoint ({' '.join(str(error).split())[:120]}). Put a whole "
                             "copy there, or remove it to begin again.") from None
        about = DOCUMENT.check(about, path)
        try:
            optimizer = _unpack(about["optimizer"], tensors)
            return cls(about["identity"], int(about["epoch"]), list(about["rows"]), _part(tensors, "model."),
                       _part(tensors, "average."), optimizer)
        except WRONG:
            raise StudyError(f"{path} is no whole checkpoint: tensors are missing. Put a whole copy there, or remove "
                             "it to begin again.") from None

    def restore(self, model: nn.Module, average: nn.Module | None, optimizer: torch.optim.Optimizer) -> None:
        """Put the state into these, in the memory layout that training gave it: rounding differs in other layouts."""
        model.load_state_dict(self.model)
        if average is not None:
            average.load_state_dict(self.average)
        optimizer.load_state_dict(dict(self.optimizer))
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def plain(tensor: Tensor) -> Tensor:
    """A copy in main memory that shares nothing, laid out plainly."""
    return tensor.detach().cpu().contiguous(memory_format=torch.contiguous_format).clone()


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors go to `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = plain(value)
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[key, _pack(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_pack(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name}: cannot store a {type(value).__name__} without pickling it")


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, content), = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    items = [_unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
