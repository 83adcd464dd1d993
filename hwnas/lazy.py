"""Modules that are imported when they are first used, so that a command starts without what it never calls.

Type checkers see the import itself:

    if TYPE_CHECKING:
        import torch
    else:
        torch = LazyModule("torch")
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for the module of its name, and imports it when an attribute is asked for.

    Unlike `importlib.util.LazyLoader` it never stands in `sys.modules`: other packages import the module as always.

    Args:
        name: The dotted name that `import` would be given.
    """

    def __getattr__(self, name: str) -> Any:
        module = import_module(self.__name__)
        try:
            return getattr(module, name)
        except AttributeError:
            # A submodule is an attribute of its package only after somebody has imported it.
            path = f"{self.__name__}.{name}"
            try:
                return import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path:
                    raise
            raise
