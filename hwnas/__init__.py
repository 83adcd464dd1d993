"""hwnas: hardware-aware neural architecture search with verified accuracy-latency fronts.

If an import of timm or torchvision ends with "operator torchvision::nms does not exist", import hwnas before it.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

from hwnas.face import end_quietly, face, watch_torchvision

if TYPE_CHECKING:
    from hwnas.api import Model as Model
    from hwnas.api import Run as Run
    from hwnas.api import benchmark as benchmark
    from hwnas.api import load as load
    from hwnas.api import profile as profile
    from hwnas.api import search as search
    from hwnas.errors import HwnasError as HwnasError
    from hwnas.networks.given import register_module as register_module

if sys.platform == "win32":
    raise ImportError("hwnas runs on Linux, and this is Windows. Install it in WSL: wsl --install")
warnings.filterwarnings("ignore", "IProgress not found")  # of progress bars of Optuna that hwnas never shows
end_quietly()
watch_torchvision()
__version__ = "0.1.0"
__getattr__, __dir__ = face(
    __name__, {**dict.fromkeys(("Model", "Run", "benchmark", "load", "profile", "search"), "api"),
               "register_module": "networks.given", "HwnasError": "errors"})
