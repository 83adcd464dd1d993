"""Times one file: python -m hwnas.benchmark"""

from hwnas.face import call

call(__name__, "benchmark")
