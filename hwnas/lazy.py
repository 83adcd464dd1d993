"""The modules that are imported at their first use, so that a command starts without the packages it never calls.

Other files write `from hwnas.lazy import torch`. Type checkers see the import itself.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any


class LazyModule(ModuleType):
    """A substitute for the module of its name, which imports the module when an attribute is used.

    Unlike `importlib.util.LazyLoader` it is never in `sys.modules`: other packages import the module as always.

    Args:
        name: The dotted name, as behind `import`.
    """

    def __getattr__(self, name: str) -> Any:
        module = import_module(self.__name__)
        try:
            return getattr(module, name)
        except AttributeError:
            # A submodule is an attribute of its package only after its first import.
            path = f"{self.__name__}.{name}"
            try:
                return import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path:
                    raise
            raise


if TYPE_CHECKING:
    import filelock
    import hydra.core.config_search_path
    import hydra.core.override_parser.overrides_parser
    import hydra.core.plugins
    import hydra.errors
    import hydra.plugins.search_path_plugin
    import jinja2
    import matplotlib.figure
    import matplotlib.patches
    import matplotlib.ticker
    import numpy
    import omegaconf.errors
    import onnx.helper
    import onnx.numpy_helper
    import onnx.reference
    import onnx.shape_inference
    import pandas
    import PIL.Image
    import PIL.ImageDraw
    import PIL.ImageOps
    import pycocotools
    import rich.cells
    import rich.console
    import rich.progress
    import rich.table
    import safetensors.torch
    import scipy
    import textalloc
    import timm.data.auto_augment
    import timm.data.mixup
    import timm.data.random_erasing
    import timm.data.readers.reader_image_in_tar
    import timm.layers
    import timm.layers.padding
    import timm.models._efficientnet_blocks
    import timm.models._efficientnet_builder
    import timm.optim
    import timm.scheduler
    import timm.utils
    import torch._utils
    import torch.nn
    import torch.nn.functional
    import torch_pruning
    import yaml
    from torch import nn
else:
    def __getattr__(name: str) -> LazyModule:
        if name.startswith("_"):  # as Python and its tools ask any module
            raise AttributeError(name)
        return globals().setdefault(name, LazyModule("torch.nn" if name == "nn" else name))
