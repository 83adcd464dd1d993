"""The command hwnas benchmark, which times one file."""

from hwnas.face import call

call(__name__, "benchmark")
