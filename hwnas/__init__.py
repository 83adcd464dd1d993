"""hwnas: hardware-aware neural architecture search with verified accuracy-latency fronts."""

__version__ = "0.1.0"
