"""The face of a package: it offers a few names of its modules, and loads a module only when its name is used.

`hwnas.search` is a function for users and a package for Python. The import of the package replaces the function, so
the package is made callable, and a call goes to the function.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType, TracebackType
from typing import Any


def face(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package (PEP 562) that offers `names`: name -> module of the package."""

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{names[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next use does not come here
        return value

    return load, lambda: sorted({*names, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})


def call(module: str, function: str) -> None:
    """Make `module`, which is being imported, callable: a call runs `function` of `hwnas.api`."""

    class Called(ModuleType):
        def __call__(self, *values: object, **options: object) -> object:
            return getattr(import_module("hwnas.api"), function)(*values, **options)

    sys.modules[module].__class__ = Called


class _TorchvisionFinder(MetaPathFinder):
    """A finder that declares torchvision's operators before an import of torchvision, which it leaves to others."""

    def find_spec(self, name: str, *_: object) -> None:
        """Act on the first search for torchvision; find nothing."""
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            import_module("hwnas.system.libraries").declare_missing()


def watch_torchvision() -> None:
    """Let `import timm` and `import torchvision` work in this process, also beside another build of torch."""
    if not any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())


def end_quietly() -> None:
    """Let Ctrl-C during the imports of a hwnas command end the command with one line and status 130.

    Nothing changes for other programs that import hwnas.
    """
    # It is a command if Python was started as `python -m hwnas…` or with the script `hwnas`.
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if module.partition(".")[0] != "hwnas" and os.path.basename(words[1] if words[1:] else "") != "hwnas":
        return
    hook = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            hook(kind, error, trace)
            return
        print("interrupted; the same command goes on from here.", file=sys.stderr, flush=True)
        os._exit(130)

    sys.excepthook = end
