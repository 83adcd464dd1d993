"""Ranks: the processes that torchrun started, each of which trains on its share of every batch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from hwnas.errors import ConfigError
from hwnas.lazy import LazyModule
from hwnas.system.processes import end_with

if TYPE_CHECKING:
    import torch
    import torch.distributed
    import torch.nn.parallel
    from torch import nn
else:
    torch = LazyModule("torch")

_PATIENCE = timedelta(days=1)  # the others wait while the first validates, or for another training in the folder


@dataclass(frozen=True)
class Ranks:
    """This process is number `rank` of `world`, and number `local` of its machine."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def of_environment(cls) -> Ranks:
        """The ranks that torchrun gives in the environment; one process where it gives none. ConfigError when it is
        torn."""
        said = [os.environ.get(key, "") for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        if said[1] in ("", "1"):
            return cls()
        if not all(word.isdigit() for word in said) or int(said[0]) >= int(said[1]):
            raise ConfigError(f"started with RANK={said[0]!r}, WORLD_SIZE={said[1]!r}, LOCAL_RANK={said[2]!r}: not "
                              "what torchrun sets. Start it with torchrun -m hwnas.train.")
        return cls(*map(int, said))

    @staticmethod
    def end_with_torchrun() -> None:
        """End this process when torchrun, its parent, has ended, even by SIGKILL; nothing where another started it."""
        parent = os.getppid()
        if "TORCHELASTIC_RUN_ID" in os.environ and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # a kernel before 5.3
                end_with(parent, os.pidfd_open(parent))

    @property
    def first(self) -> bool:
        """Whether this process validates, and writes files."""
        return self.rank == 0

    @contextlib.contextmanager
    def joined(self, device: str) -> Iterator[None]:
        """Inside, all ranks know each other: by NCCL on CUDA, by Gloo elsewhere. Afterwards no thread of theirs is
        left."""
        if self.world == 1:
            yield
            return
        # DistributedDataParallel imports this module, whose functions take the group present at import as a default.
        # If it were imported in the block, it would keep the group for good: Gloo's threads would then abort the
        # ending interpreter.
        import torch.distributed.nn.functional
        if device == "cuda":
            torch.cuda.set_device(self.local)
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", rank=self.rank,
                                             world_size=self.world, timeout=_PATIENCE)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()

    def wrapped(self, model: nn.Module) -> nn.Module:
        """`model`, with its gradients averaged over the ranks in backward and the first rank's buffers of batch
        norm."""
        if self.world == 1:
            return model
        wrapped: nn.Module = torch.nn.parallel.DistributedDataParallel(model)
        return wrapped

    def mean(self, value: float, device: str) -> float:
        """The mean over all ranks, on each of them; all must call it."""
        return value if self.world == 1 else self._sum(value, device) / self.world

    def agree(self, flag: bool, device: str) -> bool:
        """The first rank's `flag`, on each rank. All ranks must call it; the others wait here for the first."""
        return flag if self.world == 1 else self._sum(float(flag and self.first), device) > 0

    def _sum(self, value: float, device: str) -> float:
        tensor = torch.tensor([value], dtype=torch.float64, device=device)
        torch.distributed.all_reduce(tensor)
        return float(tensor.item())


ALONE = Ranks()
