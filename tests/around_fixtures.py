"""What is cut from a network: its space and cuts; and small searches around it, with a home of its weights and a
made-up latency table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from run_fixtures import use_few_images
from table_fixtures import MadeUpTimer

from hwnas.networks.around import describe_cuts, find_cuts, space_of_cuts
from hwnas.networks.cutting import make_cut
from hwnas.space.architecture import Cut
from hwnas.space.search_space import SearchSpace


@cache
def space_around(around: str, px: int = 64, sizes: tuple[int, ...] = (), channels: int = 3) -> SearchSpace:
    """The space of 10 classes that is cut from a network; one object for all who ask."""
    return space_of_cuts([describe_cuts(around, channels, 10, px, sizes)], channels, 10)


def choices_of(space: SearchSpace) -> dict[str, tuple[float, ...]]:
    """What may be kept of the one network that a space's are cut from."""
    around, = space.arounds
    return dict(find_cuts(around, space.channels, space.classes)[0].choices)


def cut_of(space: SearchSpace, image_size: int = 0, **kept: float) -> Cut:
    """The cut that keeps everything but what is said; `__` stands for a dot. On the largest images if no size is said.
    """
    around, = space.arounds
    return make_cut(find_cuts(around, space.channels, space.classes)[0],
                    {name.replace("__", "."): value for name, value in kept.items()},
                    image_size or space.image_sizes[0])


def answers(model: torch.nn.Module, px: int = 64) -> torch.Tensor:
    """Of two drawn images, which are the same each time."""
    images = torch.randn((2, 3, px, px), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model.eval()(images)


def small_search(name: str) -> list[str]:
    """The options of a short search around a network, on digits."""
    return ["+target=xeon_int8", "dataset=digits", "dataset.image_size=32", f"around={name}", "workers=1", "n_trials=6",
            "finalists.k=2", "finalists.recipe.min_steps=4", "finalists.recipe.max_steps=4",
            "verification.seconds=2"]


@contextmanager
def home_around(name: str, home: Path, save_weights: Callable[[Path], None]) -> Iterator[Path]:
    """Weights in the user's folder, as `save_weights` writes them there, and made-up latencies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWNAS_HOME", str(home))
        patch.delenv("HWNAS_WEIGHTS", raising=False)
        use_few_images(patch)
        save_weights(home / "weights")
        (home / f"around_{name}.yaml").write_text(yaml.safe_dump(describe_cuts(name, 1, 10, 32)))
        patch.setattr("hwnas.latency.measured.time_networks", MadeUpTimer())
        yield home
