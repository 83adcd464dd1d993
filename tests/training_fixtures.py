"""Images that a network learns in seconds, and a place to train that is not the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hwnas.data.dataset import Dataset, Split

if TYPE_CHECKING:
    from torch import nn

AWAY = "meta"


def stripes(n: int, seed: int) -> Split:
    """Four classes of noisy 16 px images: dark, light, light above, light on the left."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 4
    images = rng.integers(0, 90, (n, 1, 16, 16))
    images[labels == 1] += 120
    images[labels == 2, :, :8] += 120
    images[labels == 3, :, :, :8] += 120
    return Split(images.astype(np.uint8), labels.astype(np.int64))


def stripes_data(n: int) -> Dataset:
    """Sets of n, 80 and 80 such images."""
    return Dataset("stripes", stripes(n, 0), stripes(80, 1), stripes(80, 2), tuple("abcd"), 1, 16, (0.3,), (0.2,),
                   "stripes")


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    """Whether two networks agree in every bit."""
    mine, theirs = first.state_dict(), second.state_dict()
    return mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The devices on which modules compute. Meanwhile torch's device `meta` can be trained on as a GPU can: it has no
    values, so that all numbers are made up, and a tensor that was left on the CPU shows."""
    import torch
    from torch import Tensor, nn

    import hwnas.networks.modules  # noqa: F401  what it imports makes generators of its own
    from hwnas.training.place import device_of

    to, cpu, number, generator = nn.Module.to, Tensor.cpu, Tensor.__float__, torch.Generator

    def moved(self: nn.Module, *args: Any, **options: Any) -> nn.Module:
        if args == ("cpu",) and device_of(self).type == AWAY:
            return self.to_empty(device="cpu")
        return to(self, *args, **options)

    monkeypatch.setattr(nn.Module, "to", moved)
    monkeypatch.setattr(Tensor, "cpu", lambda self: torch.zeros(self.shape, dtype=self.dtype)
                        if self.device.type == AWAY else cpu(self))
    monkeypatch.setattr(Tensor, "__float__", lambda self: 1.0 if self.device.type == AWAY else number(self))
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())
    seen: set[str] = set()

    def watch(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.update(value.device.type for value in inputs if isinstance(value, Tensor))
        seen.update(parameter.device.type for parameter in module.parameters(recurse=False))

    hook = nn.modules.module.register_module_forward_pre_hook(watch)
    yield seen
    hook.remove()
